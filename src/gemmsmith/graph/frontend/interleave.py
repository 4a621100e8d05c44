"""Packing of weights for gated epilogues: gate and up in one GEMM, interleaved in groups of 8 columns.

A thread of a wgmma accumulator holds the same two columns of every group of 8, so a gate's value and the up value that
belongs to it are in the same thread's registers.
"""

from __future__ import annotations

import sys
from typing import Any

from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.core.errors import ArgumentError
from gemmsmith.graph.frontend.values import Traced, is_compile_proxy
from gemmsmith.graph.frontend.values import deinterleave as deinterleave_traced
from gemmsmith.graph.frontend.values import interleave as interleave_traced


def interleave(gate: Any, up: Any) -> Any:
    """Interleave two arrays' columns in groups of 8: g0..7, u0..7, g8..15, u8..15, ...

    An epilogue of the GEMM with such weights separates them by `gate, up = deinterleave(acc)`. In an epilogue this
    function takes the halves that `deinterleave` returns, or values computed from them.

    Args:
        gate: An array or tensor (..., n), n a multiple of 8: weights (k, n), batched or not, or a bias (n,). The weight
            of a torch.nn.Linear is (n, k): pass `weight.T`.
        up: An array of the same library, dtype and shape.

    Returns:
        A new array (..., 2n).

    Raises:
        ArgumentError: for other shapes, and for objects that are not arrays.
    """
    if isinstance(gate, Traced) or is_compile_proxy(gate):
        return interleave_traced(gate, up)
    library = _library("gate", gate)
    if _library("up", up) is not library or up.dtype != gate.dtype:
        raise ArgumentError(f"up: got {type(up).__name__} of {up.dtype} with a gate of {gate.dtype}; use the same")
    if tuple(gate.shape) != tuple(up.shape):
        raise ArgumentError(f"up: got shape {tuple(up.shape)} with a gate of {tuple(gate.shape)}; use the same")
    *leading, groups, width = _grouped_shape("gate", gate, INTERLEAVE_COLUMNS)
    pair = tuple(x.reshape(*leading, groups, width) for x in (gate, up))
    return library.stack(pair, -2).reshape(*leading, 2 * groups * width)


def deinterleave(packed: Any) -> tuple[Any, Any]:
    """Return the two arrays that `interleave` combined.

    Args:
        packed: An array (..., 2n), n a multiple of 8; in an epilogue, the accumulator or a value of its shape.

    Returns:
        gate and up, each (..., n).

    Raises:
        ArgumentError: for other shapes, and for objects that are not arrays.
    """
    if isinstance(packed, Traced) or is_compile_proxy(packed):
        return deinterleave_traced(packed)
    _library("packed", packed)  # raises ArgumentError if it is no array
    *leading, pairs, width = _grouped_shape("packed", packed, 2 * INTERLEAVE_COLUMNS)
    groups = packed.reshape(*leading, pairs, 2, width // 2)
    shape = (*leading, pairs * width // 2)
    return groups[..., 0, :].reshape(shape), groups[..., 1, :].reshape(shape)


def _grouped_shape(argument: str, x: Any, width: int) -> tuple[int, ...]:
    """Return the shape of x with its columns split into groups of `width`: (..., groups, width).

    Raises ArgumentError, which names `argument`, if they are no multiple of `width`.
    """
    shape = tuple(x.shape)
    if not shape or shape[-1] % width:
        raise ArgumentError(f"{argument}: got shape {shape}; use a last dimension that is a multiple of {width}")
    return (*shape[:-1], shape[-1] // width, width)


def _library(argument: str, x: Any) -> Any:
    """Return the array library of x (numpy, torch or CuPy). Raises ArgumentError for other objects."""
    roots = (cls.__module__.partition(".")[0] for cls in type(x).__mro__)
    library = next((sys.modules[root] for root in roots if root in ("numpy", "torch", "cupy")), None)
    if library is None or getattr(x, "is_nested", False) or not hasattr(x, "shape"):
        raise ArgumentError(f"{argument}: got {type(x).__name__}; use a dense array of numpy, torch or CuPy")
    return library
