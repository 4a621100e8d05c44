"""Calls of operators in the code that Inductor generates; each repeats earlier launches, without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import _C

from gemmsmith.arrays.torch_tensors import MAX_OFFSET_BYTES, has_no_memory
from gemmsmith.core.problem import TMA_ALIGNMENT_BYTES
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.host.autotune import Autotune, active, on_entry
from gemmsmith.host.cached_run import record_run
from gemmsmith.torch import graph_serialization
from gemmsmith.torch.plain_tensors import matches, multiplies_in_tf32, runs_kernels

MAX_LAYOUTS = 4
"""Layouts of tensors for which one call keeps launches, as shapes may be dynamic. Chosen; not measured."""


class _Launches(NamedTuple):
    """The launches of a call for tensors of one layout each.

    Attributes:
        matches: returns whether tensors have these layouts.
        is_tf32: whether fp32 operands are multiplied in TF32; None if there are none.
        pointers: Pointer names of the tensors, in the operator's order.
        numbers: Pointer names of the Python numbers, in the operator's order.
        run: allocates the results, launches, and returns them, given addresses and numbers by Pointer name and a tensor
            of the device.
    """

    matches: Callable[..., bool]
    is_tf32: bool | None
    pointers: tuple[str, ...]
    numbers: tuple[str, ...]
    run: Callable[[dict[str, Any], Any], list[Any]]


_CALLS: WeakSet[CompiledCall] = WeakSet()


def _forget() -> None:
    for call in list(_CALLS):
        call.forget()


on_entry(_forget)


class CompiledCall:
    """A function that replaces an operator gemm_{o} at one place of generated code; arguments and results are the same.

    The first call with tensors of new layouts calls the operator; later ones repeat its launches. One with two arrays b
    calls the operator, since the kernel depends on their distance. The epilogue must be the same in all calls.
    """

    def __init__(self, op: Any, *, autotune: bool = False) -> None:
        """Replace `op`. `autotune`: the first call with tensors of new layouts measures configs."""
        self._op = op
        self._autotune = autotune
        self._launches: tuple[_Launches, ...] = ()
        _CALLS.add(self)

    def _tuning(self) -> AbstractContextManager[Any]:
        """Return a block in which configs are measured, if they are to be."""
        return active(Autotune()) if self._autotune else nullcontext()

    def forget(self) -> None:
        """Forget the launches of earlier calls."""
        self._launches = ()

    def __call__(self, *arguments: Any) -> Any:
        """Run the launches that are kept for tensors of these layouts; call the operator if there are none."""
        a, b, b2, offsets, _, _, _, operands = arguments
        # autograd, and modes, must see the operator
        if b2 is not None or torch.is_grad_enabled() or _C._len_torch_dispatch_stack():
            with self._tuning():
                return self._op(*arguments)
        tensors = (a, b, *operands) if offsets is None else (a, b, offsets, *operands)
        for launches in self._launches:
            if launches.matches(*tensors) and (launches.is_tf32 is None or launches.is_tf32 == multiplies_in_tf32()):
                return self._launch(launches, arguments, tensors)
        return self._call_operator(arguments, tensors)

    def _launch(self, launches: _Launches, arguments: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
        """Repeat an earlier call's launches; if a tensor is not aligned, or has no memory, call the operator."""
        pointers: dict[str, Any] = {}
        for name, x in zip(launches.pointers, tensors):  # noqa: B905 - strict=True takes longer
            pointers[name] = address = x.data_ptr()
            if address % TMA_ALIGNMENT_BYTES or (address < MAX_OFFSET_BYTES and has_no_memory(x, address)):
                return self._op(*arguments)
        for name, number in zip(launches.numbers, arguments[6]):  # noqa: B905
            pointers[name] = float(number)
        results = launches.run(pointers, tensors[0])
        return results[0] if len(results) == 1 else tuple(results)

    def _call_operator(self, arguments: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
        """Call the operator, and keep its launches if they can be repeated.

        `tensors`: a, b, offsets if there are any, and the operands.
        """
        with self._tuning():
            results, run = record_run(lambda: self._op(*arguments))
        graph, offsets = graph_serialization.deserialize(arguments[5]), ["offsets"] * (arguments[3] is not None)
        is_aligned = not any(x.data_ptr() % TMA_ALIGNMENT_BYTES for x in tensors)
        is_unique = not (offsets and "offsets" in graph.tensor_names)
        if run is not None and runs_kernels(tensors[0]) and is_aligned and is_unique:
            launches = _Launches(
                matches(tensors),
                multiplies_in_tf32() if tensors[0].dtype == torch.float32 else None,
                ("a", "b", *map(operand_argument, (*offsets, *graph.tensor_names))),
                tuple(map(operand_argument, graph.number_names)),
                run.launches.for_one_call().run,
            )
            self._launches = (launches, *self._launches[: MAX_LAYOUTS - 1])
        return results
