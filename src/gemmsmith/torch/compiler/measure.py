"""Times of operators on a GPU, which decide about a matmul if Inductor's max_autotune is set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gemmsmith.torch.compiler.fx_epilogue import FxEpilogueTracer
from gemmsmith.torch.compiler.matmuls import op_call
from gemmsmith.torch.compiler.nodes import Node, fake_tensor, size_hints

MAX_US = 4000
"""Time in us of the rounds of one decision after which no further one starts, if MIN_ROUNDS are done. Chosen; not
measured."""
MIN_ROUNDS, MAX_ROUNDS = 4, 11
"""Rounds in which each operator runs once; the first is a warm-up. Chosen; not measured."""
SLEEP_CYCLES = 600_000
"""Cycles that the GPU waits while the host launches a round, so that launches are not timed: 0.3 ms at 1980 MHz."""


class TensorSpec(NamedTuple):
    """The layout of a tensor, without data. `stride` is in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, fake: Any) -> TensorSpec:
        """Return the layout of a fake tensor, with hints in place of symbolic extents."""
        return cls(size_hints(fake.shape), size_hints(fake.stride()), fake.dtype, fake.device)

    def random(self, generator: torch.Generator) -> Any:
        """Return a tensor of normal numbers, or of zeros if it is not floating point."""
        count = 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.stride, strict=True))
        values = torch.zeros(max(count, 0), dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            values.normal_(generator=generator)
        return values.as_strided(self.shape, self.stride)


class Call(NamedTuple):
    """A call of an operator, hashable: with TensorSpecs in place of tensors, and tuples in place of lists."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def bind(self, generator: torch.Generator) -> Callable[[], Any]:
        """Return a function that runs the operator on random tensors, which are allocated here."""

        def made(x: Any) -> Any:
            if isinstance(x, TensorSpec):
                return x.random(generator)
            return [made(y) for y in x] if isinstance(x, tuple) else x

        args = made(self.args)
        return lambda: self.op(*args, **dict(self.kwargs))


Timer = Callable[[tuple[Call, ...]], Sequence[float]]
"""Returns the times of calls in us. Raises torch.OutOfMemoryError if their tensors do not fit."""


def call_of_node(node: Node) -> Call:
    """Return the call of an operator that a node of an FX graph makes."""
    args = (TensorSpec.of(fake_tensor(x)) if isinstance(x, torch.fx.Node) else x for x in node.args)
    return Call(node.target, tuple(tuple(x) if isinstance(x, list) else x for x in args), tuple(node.kwargs.items()))


def call_of_epilogue(epilogue: FxEpilogueTracer, outputs: Sequence[Node]) -> Call:
    """Return the call of gemmsmith's operator that computes the nodes `outputs` by an epilogue."""
    graph = epilogue.graph(outputs)
    numbers, tensors = epilogue.arguments(graph)
    arrays = [TensorSpec.of(fake_tensor(x)) for x in epilogue.matmul.arrays]
    operands = tuple(TensorSpec.of(fake_tensor(x).reshape(extents)) for x, extents in tensors)
    op, *args = op_call(graph, arrays, tuple(numbers), operands)
    return Call(op, tuple(args))


def configured_timer() -> Timer | None:
    """Return the timer if Inductor is to choose kernels of matmuls by their times, else None."""
    config = torch._inductor.config
    return time_on_gpu if (config.max_autotune or config.max_autotune_gemm) and not config.deterministic else None


@lru_cache(maxsize=1024)
def time_on_gpu(calls: tuple[Call, ...]) -> tuple[float, ...]:
    """Return the median time of each call in us, on random tensors that are not in the L2 cache.

    The calls run in rounds, each once per round. Raises torch.OutOfMemoryError if there is not enough memory for the
    tensors.
    """
    device = calls[0].args[0].device
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cuda", enabled=False), torch.cuda.device(device):
        generator = torch.Generator(device).manual_seed(0)  # the default one's state is the model's
        runs = [call.bind(generator) for call in calls]
        evicting = torch.empty(torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
        for run in runs:  # compiles and loads kernels
            run()
        rounds: list[list[float]] = []
        while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and sum(map(sum, rounds)) < MAX_US):
            step = -1 if len(rounds) % 2 else 1  # every other round in reverse
            rounds.append(_time_round(runs[::step], evicting)[::step])
    return tuple(median(times) for times in zip(*rounds[1:], strict=True))


def _time_round(runs: Sequence[Callable[[], Any]], evicting: Any) -> list[float]:
    """Run each function once, and return their times on the GPU in us.

    Before each, `evicting`, a tensor as large as the L2 cache, is written, so that the function's tensors are not in
    the cache. The GPU sleeps first, so that the host launches all before they run.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in runs]
    torch.cuda._sleep(SLEEP_CYCLES)
    for run, (start, stop) in zip(runs, events, strict=True):
        evicting.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e3 for start, stop in events]
