"""The operators' Autograd kernels, which exported programs and compiled code, for two, need for their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from gemmsmith.core.errors import ArgumentError
from gemmsmith.graph.frontend.interleave import interleave
from gemmsmith.torch.autograd import (
    apply_in_transform,
    differentiable_slices,
    plan_forward,
    run_forward,
)
from gemmsmith.torch.autograd_state import in_functorch_transform, records_now
from gemmsmith.torch.grouped_ops import ROWS, ROWS_OF_TWO, SLICES
from gemmsmith.torch.ops import LIBRARY, OPERATORS, run_or_dispatch


def _below_autograd(op: Any, *arguments: Any) -> Any:
    """Call an operator's kernel for the device."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _record(epilogue: str, a: Any, b: Any, numbers: list[float], operands: Any, offsets: Any = None) -> Any:
    """Return an operator's results, and record their gradients."""
    plan = plan_forward(epilogue, a, b, operands, recompute=False)
    apply = apply_in_transform if in_functorch_transform() else None
    results = run_forward(*plan, a, b, numbers, operands, offsets, apply)
    return results if len(results) > 1 else results[0]


def _autograd_kernel(op: Any) -> Callable[..., Any]:
    """Return the Autograd kernel of an operator of one product."""

    def kernel(a: Any, b: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
        inputs = (a, b, *operands)
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):
            raise ArgumentError(f"{op.name()}: got a dual tensor, of forward mode; use reverse mode")
        if records_now(*inputs):
            return _record(epilogue, a, b, numbers, operands)
        dispatch = partial(_below_autograd, op, a, b, key, epilogue, numbers, *operands)
        return run_or_dispatch(epilogue, a, b, numbers, operands, dispatch)

    return kernel


def _rows_autograd_kernel(op: Any) -> Callable[..., Any]:
    """Return the Autograd kernel of an operator of groups of rows."""

    def kernel(a: Any, b: Any, offsets: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
        if records_now(a, b, *operands):
            return _record(epilogue, a, b, numbers, operands, offsets)
        dispatch = partial(_below_autograd, op, a, b, offsets, key, epilogue, numbers, *operands)
        return run_or_dispatch(epilogue, a, b, numbers, operands, dispatch, offsets)

    return kernel


def _rows_of_two_autograd_kernel(op: Any) -> Callable[..., Any]:
    """Return that of an operator that multiplies groups of rows by the columns of b and b2, which alternate."""

    def kernel(
        a: Any, b: Any, b2: Any, offsets: Any, key: int, epilogue: str, numbers: list[float], *operands: Any
    ) -> Any:  # fmt: skip
        if records_now(a, b, b2, *operands):
            return _record(epilogue, a, interleave(b, b2), numbers, operands, offsets)
        return _below_autograd(op, a, b, b2, offsets, key, epilogue, numbers, *operands)

    return kernel


def _slices_autograd_kernel(a: Any, b: Any, offsets: Any) -> Any:
    if records_now(a, b):
        return differentiable_slices(a, b, offsets)
    return _below_autograd(SLICES, a, b, offsets)


for _op in OPERATORS.values():
    LIBRARY.impl(_op.overloadpacket.__name__, _autograd_kernel(_op), "Autograd")
for _op in ROWS.values():
    LIBRARY.impl(_op.overloadpacket.__name__, _rows_autograd_kernel(_op), "Autograd")
for _op in ROWS_OF_TWO.values():
    LIBRARY.impl(_op.overloadpacket.__name__, _rows_of_two_autograd_kernel(_op), "Autograd")
LIBRARY.impl("grouped_gemm_k", _slices_autograd_kernel, "Autograd")
