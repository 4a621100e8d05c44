"""Forward passes of plain tensors that are run again by their launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gemmsmith.host.cached_run import CachedRun
from gemmsmith.torch.autograd import fast_apply, is_column_major, plan_forward, save_for_backward
from gemmsmith.torch.backward_plan import ForwardSpec, Names
from gemmsmith.torch.cached_backward import CachedBackward, make_cached_backward
from gemmsmith.torch.ops import as_tuple, find_kernel_run


class CachedForward(NamedTuple):
    """A forward pass of plain tensors, as an earlier call has run it.

    `run`: its launches, or None if it calls the operator.
    """

    run: CachedRun | None
    spec: ForwardSpec
    wrt: Names
    backward: CachedBackward


class _CachedGemmFunction(torch.autograd.Function):
    """`GemmFunction` that runs launches. No transform sees it: it has no setup_context, which takes 2 us."""

    @staticmethod
    def forward(
        ctx: Any, cached: CachedForward, pointers: dict[str, Any], numbers: Any, offsets: Any, *arrays: Any
    ) -> tuple[Any, ...]:
        ctx.cached_backward, ctx.numbers = cached.backward, numbers
        outputs = as_tuple(cached.run(pointers, arrays[0]))  # type: ignore[misc]  # there are launches
        save_for_backward(ctx, cached.spec, offsets, arrays, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return ctx.cached_backward(ctx, gradients)  # type: ignore[no-any-return]


_apply_cached = super(torch.autograd.Function, _CachedGemmFunction).apply


def cache_forward(
    epilogue: str, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], recompute: bool,
    offsets: Any = None,
) -> CachedForward:  # fmt: skip
    """Return the forward pass that `differentiable_gemm` has just run for these arguments, with gradients."""
    spec, wrt = plan_forward(epilogue, a, b, operands, recompute)
    numbers, operands = [numbers[i] for i in spec.number_indices], [operands[i] for i in spec.tensor_indices]
    run = find_kernel_run(spec.epilogue, a, b, numbers, operands, offsets)
    shapes = tuple([x.shape for x in (a, b, *operands)])
    return CachedForward(run, spec, wrt, make_cached_backward(spec, wrt, a.dtype, shapes, is_column_major(b)))


def run_cached_forward(
    cached: CachedForward, pointers: dict[str, Any], a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any],
    offsets: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run it again, and return the user's results; the operands are those of its spec. `pointers`: modified."""
    if cached.run is None:
        outputs = fast_apply(cached.spec, cached.wrt, tuple(numbers), offsets, a, b, *operands)
    else:
        outputs = _apply_cached(cached, pointers, numbers, offsets, a, b, *operands)
    return outputs[: len(cached.spec.user_outputs)]  # type: ignore[no-any-return]
