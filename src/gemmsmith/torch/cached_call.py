"""Calls of `gemm` and `grouped_gemm` that run as an earlier one with an equal signature has: nothing is prepared."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from gemmsmith.binding.results import arrange_results
from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.core.dtypes import validate_fp32_scalar
from gemmsmith.torch.backward_plan import Names, number_names, tensor_names
from gemmsmith.torch.cached_forward import CachedForward, cache_forward, run_cached_forward
from gemmsmith.torch.plain_tensors import MAX_CACHED_CALLS, RUNS, Arguments


class CachedCall(NamedTuple):
    """A call that records gradients.

    `numbers` and `tensors`: names of the operands that its forward pass reads. `folds_batch`: all leading dimensions of
    a are folded into M. `shapes`: those of the results for the caller, or None if they are not reshaped. `names`: the
    results' names.
    """

    forward: CachedForward
    numbers: Names
    tensors: Names
    folds_batch: bool
    shapes: tuple[Any, ...] | None
    names: Names

    def run(self, pointers: dict[str, Any], a: Any, b: Any, operands: Mapping[str, Any], offsets: Any) -> Any:
        """Run it with other tensors and numbers, and return the results in the caller's form."""
        numbers = [validate_fp32_scalar(name, operands[name]) for name in self.numbers]
        tensors = [operands[name] for name in self.tensors]
        if self.folds_batch:
            a = a.flatten(0, -2)
            pointers["a"] = a.data_ptr()  # of a copy, for some strides
        results = run_cached_forward(self.forward, pointers, a, b, numbers, tensors, offsets)
        if self.shapes is not None:
            results = tuple([x.reshape(shape) for x, shape in zip(results, self.shapes, strict=True)])
        if self.names == ("out",):
            return results[0]
        return arrange_results(dict(zip(self.names, results, strict=True)), self.names)


_CALLS: dict[Hashable, CachedCall] = BoundedCache(MAX_CACHED_CALLS)
"""Calls by the signature of their arguments: preparing a call takes most of its time on the host."""


def run_cached_call(
    arguments: Arguments | None, a: Any, b: Any, operands: Mapping[str, Any], offsets: Any = None
) -> Any:  # fmt: skip
    """Return the results of a call that has a cached one, else None."""
    if arguments is None:
        return None
    if not arguments.needs_grad:
        run = RUNS.get(arguments.signature)
        return None if run is None else run(arguments.pointers, a)
    call = _CALLS.get(arguments.signature)
    return None if call is None else call.run(arguments.pointers, a, b, operands, offsets)


def cache_call(
    arguments: Arguments, epilogue: str, a: Any, b: Any, operands: Mapping[str, Any], recompute: bool,
    results: Sequence[Any], names: Names, folds_batch: bool = False, offsets: Any = None,
) -> None:  # fmt: skip
    """Cache a call that records gradients and has just returned `results`.

    `epilogue` is serialized; `a`, `b` and `operands` are those of the operator.
    """
    numbers, tensors = number_names(epilogue), tensor_names(epilogue)
    forward = cache_forward(
        epilogue, a, b, [operands[name] for name in numbers], [operands[name] for name in tensors], recompute, offsets
    )
    _CALLS[arguments.signature] = CachedCall(
        forward, tuple([numbers[i] for i in forward.spec.number_indices]),
        tuple([tensors[i] for i in forward.spec.tensor_indices]), folds_batch,
        tuple([x.shape for x in results]) if folds_batch else None, names,
    )  # fmt: skip
