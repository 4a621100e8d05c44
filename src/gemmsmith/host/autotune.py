"""Configs measured at first use: within `autotune()`, a GEMM's first call measures the configs that the model prefers.

Only copies of the caller's arrays are read and written meanwhile, so that no call has an effect twice.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from gemmsmith.arrays import ArrayInfo, address_of, byte_range, current_stream, describe, empty_like_kind, is_array
from gemmsmith.backends import chip_of, resolve_backend
from gemmsmith.binding.bind import bind
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.request import Request
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import INT8
from gemmsmith.core.errors import ArgumentError, GemmsmithError
from gemmsmith.core.scalars import as_bools, as_integer, ceil_div
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.choice import candidates, choose_config
from gemmsmith.tuning.choose import sustained_us
from gemmsmith.tuning.gpus import gpu_at
from gemmsmith.tuning.measured_configs import Entry, Key, key_of
from gemmsmith.tuning.search import L2_BYTES, Measured, measure

_LOGGER = logging.getLogger("gemmsmith")
ROUNDS = ((16, 2_000.0), (6, 8_000.0), (3, 15_000.0), (3, 15_000.0), (3, 15_000.0), (3, 15_000.0))
"""(Configs, microseconds per config) of each round. The last ones, whose order alternates, count by their median, since
the chip's clock changes meanwhile. Chosen."""
MIN_GAIN = 1.01
"""By how much a config must be faster than the one that is chosen without measurements, to replace it; chosen."""
MAX_SETS = 24
"""Copies of the arrays that are used in turn, at most; chosen."""


class Tuned(NamedTuple):
    """A GEMM that was tuned: what it computes, its entry, the untuned config's microseconds, the seconds it took."""

    problem: str
    entry: Entry
    untuned_us: float
    seconds: float


@dataclass(eq=False)  # blocks are told apart by identity
class Autotune:
    """What `autotune` has measured within the block.

    Attributes:
        tuned: The GEMMs, in the order of their first calls.
        max_configs: Configs that are measured for each, at most.
        keep_bits: Whether only configs are measured that add in one order.
    """

    tuned: list[Tuned] = field(default_factory=list)
    max_configs: int = 16
    keep_bits: bool = False

    def __repr__(self) -> str:
        """Return a line for each GEMM: its time, the gain, and what it took."""
        lines = [
            f"{x.problem}: {x.entry.us:.1f} us, {x.untuned_us / x.entry.us:.2f} of the untuned speed, "
            f"{x.entry.config}, in {x.seconds:.1f} s"
            for x in self.tuned
        ]
        total = sum(x.seconds for x in self.tuned)
        hint = "" if lines else "; only calls on a GPU whose config was not measured before are"
        return "\n".join([f"{len(self.tuned)} GEMMs tuned in {total:.1f} s{hint}", *lines])


_ACTIVE: list[Autotune] = []
"""The blocks that threads are in, the last one entered last. Threads share it: gradients are computed in others."""
_ON_ENTRY: list[Callable[[], Any]] = []
"""What empties the caches of calls that were planned without measurements."""
_LOCK = threading.Lock()
"""One GEMM is measured at a time, so that measurements do not disturb one another."""
_UNTUNABLE: set[Key] = set()
"""Keys whose measurement has failed, which is not tried again."""


@contextmanager
def autotune(*, max_configs: int = 16, keep_bits: bool = False) -> Iterator[Autotune]:
    """Measure configs at the first call of each GEMM within the block, in any thread, and use the fastest from then on.

    A GEMM of a new kind, or whose M is in a new bucket (powers of two; between 64 and 512 rows multiples of 64), takes
    about a second longer, and as long as the compiler takes. The results are stored in the cache folder and serve later
    calls, within such a block or not, in this process and in others. Calls with a `config`, on the CPU, or while their
    stream is being captured, are not measured. GEMMSMITH_AUTOTUNE=1 is a block around the whole process.

    Args:
        max_configs: Configs that are measured for each GEMM, at most.
        keep_bits: Measure only configs that add in the same order, so that results have the same bits whatever is
            measured; about 1 % slower. By default a config may split K: its results have the same bits in every run,
            but others than another config's. Always so with batch_invariant=True, and with torch's
            use_deterministic_algorithms.

    Yields:
        What was measured, whose text is a summary.

    Raises:
        ArgumentError: If an argument has a wrong type or value.
    """
    (keep_bits,) = as_bools(keep_bits=keep_bits)
    block = Autotune([], as_integer("max_configs", max_configs, least=1), keep_bits)
    _forget_all()
    with active(block):
        yield block


@contextmanager
def active(block: Autotune) -> Iterator[Autotune]:
    """Make a block the active one, without a change to calls that were planned before."""
    _ACTIVE.append(block)
    try:
        yield block
    finally:
        _ACTIVE.remove(block)


def share(entries: Sequence[Entry], device: int = 0) -> None:
    """Use configs that another process has measured on a device like this one, from the next calls on."""
    measured_configs.save(entries, device)
    _forget_all()


def _forget_all() -> None:
    """Empty the caches of calls that were planned without these measurements."""
    for forget in _ON_ENTRY:
        forget()


def on_entry(forget: Callable[[], Any]) -> None:
    """Have the entry of a block call a function, which empties a cache of planned calls."""
    _ON_ENTRY.append(forget)


def _block() -> Autotune | None:
    if _ACTIVE:
        return _ACTIVE[-1]
    if os.environ.get("GEMMSMITH_AUTOTUNE", "0") not in ("", "0"):
        _ACTIVE.append(Autotune())
        return _ACTIVE[-1]
    return None


def tune_first_call(request: Request, force: bool = False) -> bool:
    """Measure the GEMM's configs if an `autotune` block is active and they were not measured before, or with `force`.

    Return whether a later call should try again: this one's stream is being captured.
    """
    block = _block()
    if block is None or not block.max_configs or request.config is not None:
        return False
    from gemmsmith.backends.cuda import kernel_loader

    binding = bind(request)
    a = binding.a
    if resolve_backend(request.backend, a, "a") != "cuda" or 0 in binding.shape or binding.problem.k == 0:
        return False
    key, device = key_of(binding.problem, binding.spec, chip_of(a), request.batch_invariant), a.device_index
    if key in _UNTUNABLE or (not force and measured_configs.find(key, device)):
        return False
    stream = current_stream(request.a)
    with kernel_loader.device_guard(device):
        if kernel_loader.is_capturing(stream):
            return True
        with _LOCK, kernel_loader.relaxed_capture_mode():
            if force or not measured_configs.find(key, device):  # another thread may have measured it meanwhile
                _tune(request, binding, key, block, stream)
    return False


def _tune(request: Request, binding: Binding, key: Key, block: Autotune, stream: int) -> None:
    """Measure a GEMM and save its fastest config; warn, and never try again, if that fails."""
    from gemmsmith.backends.cuda import driver

    began, device = time.perf_counter(), binding.a.device_index
    chip, gpu = chip_of(binding.a), gpu_at(device)
    try:
        torch = sys.modules.get("torch")
        keeps_bits = block.keep_bits or bool(torch and torch.are_deterministic_algorithms_enabled())
        any_order = not (keeps_bits or request.batch_invariant)
        untuned = choose_config(binding, chip, gpu, batch_invariant=request.batch_invariant).config
        configs = candidates(binding, chip, gpu, untuned, block.max_configs, any_order)
        if len(configs) < 2:
            _UNTUNABLE.add(key)
            return
        make_sets = partial(_copies, request, binding, stream)
        measured = measure(request, configs, PlannedGemm, make_sets, ROUNDS, kept=configs[0])
    except (GemmsmithError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's, if memory is exhausted
        _UNTUNABLE.add(key)
        warnings.warn(f"gemmsmith: {binding.problem} is not tuned: {error}", stacklevel=2)
        return
    if not measured:
        _UNTUNABLE.add(key)
        return
    best, untuned_us = winner(measured, configs[0], partial(sustained_us, binding.problem, binding.spec))
    entry = Entry(key, binding.problem.m, best.config, best.us, driver.device_attributes(device).name)
    measured_configs.save([entry], device)
    block.tuned.append(Tuned(f"{binding.problem}", entry, untuned_us, time.perf_counter() - began))
    _LOGGER.info("tuned %s: %s, %.1f us, untuned %.1f us, of %d configs, in %.2f s", binding.problem, *best, untuned_us,
                 len(measured), block.tuned[-1].seconds)  # fmt: skip


def winner(
    measured: Sequence[Measured], untuned: Config, sustained: Callable[[Config, float], float]
) -> tuple[Measured, float]:  # fmt: skip
    """Return the config to use of those that were measured, fastest first, and the microseconds of the untuned one.

    Only times of the last round count, of which the first is the least: before it, the chip is not yet throttled. An
    untuned config that did not run counts as equally fast. `sustained`: as in `successive_halving`.
    """
    fastest = measured[0]
    chosen = next((x for x in measured if x.config == untuned), fastest)
    return fastest if sustained(*chosen) > MIN_GAIN * sustained(*fastest) else chosen, chosen.us


def _copies(request: Request, binding: Binding, stream: int, used_on: int) -> Sequence[Mapping[str, Any]]:
    """Return arguments of `PlannedGemm.run`: copies of the request's arrays, and uninitialized results.

    There are as many as exceed the L2 twice, if memory allows it, so that each GEMM reads from DRAM. The arrays are
    complete on `stream`; the copies are used on `used_on`.
    """
    from gemmsmith.backends.cuda.driver import bindings, check

    cu, like = bindings(), request.a
    results = {name: binding.arguments[result_argument(name)] for name in binding.graph.result_names}
    infos = [part for x in binding.arguments.values() if isinstance(x, ArrayInfo) for part in x.parts]
    size = sum(last - first for x in infos if 0 not in x.shape for first, last in [byte_range(x)])
    free, _ = check(cu.cuMemGetInfo(), "cuMemGetInfo")
    count = max(1, min(ceil_div(2 * L2_BYTES, max(size, 1)), MAX_SETS, free // 4 // max(size, 1)))

    def copy(x: Any, name: str) -> Any:
        """Return a copy of an array or of a pair of arrays; a number as it is."""
        if not (is_array(x) or isinstance(x, tuple)):
            return x
        parts = tuple(_view(part, like, used_on, stream) for part in describe(x, name).parts)
        return parts if isinstance(x, tuple) else parts[0]

    sets: list[dict[str, Any]] = []
    for _ in range(count):
        out = {name: _view(info, like, used_on) for name, info in results.items() if isinstance(info, ArrayInfo)}
        arguments = {name: copy(getattr(request, name), name) for name in ("a", "b")}
        for name in ("scale_a", "scale_b"):
            if (scale := getattr(request, name)) is not None:
                arguments[name] = copy(scale, name)
        operands = {name: copy(x, name) for name, x in request.operands.items()}
        sets.append({**arguments, "operands": operands, "out": out if len(out) > 1 or "out" not in out else out["out"]})
    check(cu.cuStreamSynchronize(stream), "cuStreamSynchronize")
    return sets


def _view(x: ArrayInfo, like: Any, used_on: int, copied_on: int | None = None) -> Any:
    """Return an array with x's shape, strides, dtype and alignment in memory that `like`'s library allocates.

    `copied_on`: the stream on which x's memory is copied into it; None: it is uninitialized.
    """
    from gemmsmith.backends.cuda.driver import bindings, check
    from gemmsmith.backends.cuda.memory import DeviceArray, DeviceView

    first, last = byte_range(x) if 0 not in x.shape else (x.address, x.address)
    offset = first % 128
    try:
        memory = empty_like_kind(like, (last - first + 128,), INT8)
    except ArgumentError:  # its library cannot allocate
        memory = DeviceArray.allocate(last - first + 128)
    address = address_of(memory) + offset
    if copied_on is not None and last > first:
        check(bindings().cuMemcpyDtoDAsync(address, first, last - first, copied_on), "cuMemcpyDtoDAsync")
    strides = tuple(stride * x.itemsize for stride in x.strides)
    return DeviceView(memory, address + x.address - first, x.shape, strides, x.dtype.numpy, used_on)
