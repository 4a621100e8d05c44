"""Packing of weights for gated epilogues: gate and up in one product, interleaved by 8 columns.

A thread of a wgmma accumulator holds the same columns of every group of 8, so that it finds a gate's value and the up
value that belongs to it among its own registers.
"""

from __future__ import annotations

import sys
from typing import Any

from gemmsmith.core.errors import ArgumentError
from gemmsmith.epilogue.frontend.values import Traced, is_recorded
from gemmsmith.epilogue.frontend.values import deinterleave as deinterleave_traced
from gemmsmith.epilogue.frontend.values import interleave as interleave_traced

GROUP = 8


def interleave(gate: Any, up: Any) -> Any:
    """Columns g0..7, u0..7, g8..15, u8..15, ...: what `gate, up = deinterleave(acc)` in an epilogue takes apart.

    gate, up: arrays or tensors of one library, dtype and shape (..., n), such as weights (k, n), batched or not, and
    biases (n,); n is a multiple of 8. Gives a new (..., 2n). A torch.nn.Linear's weight is (n, k): pass its `.T`.
    In an epilogue it takes the halves that `deinterleave` gives, or what is computed from them.
    Raises ArgumentError for other shapes, and for what is no array.
    """
    if isinstance(gate, Traced) or is_recorded(gate):
        return interleave_traced(gate, up)
    library = _library("gate", gate)
    if _library("up", up) is not library or up.dtype != gate.dtype:
        raise ArgumentError(f"up: got {type(up).__name__} of {up.dtype} with a gate of {gate.dtype}; use the same")
    if tuple(gate.shape) != tuple(up.shape):
        raise ArgumentError(f"up: got shape {tuple(up.shape)} with a gate of {tuple(gate.shape)}; use the same")
    *leading, groups, width = _groups("gate", gate, GROUP)
    pair = tuple(x.reshape(*leading, groups, width) for x in (gate, up))
    return library.stack(pair, -2).reshape(*leading, 2 * groups * width)


def deinterleave(packed: Any) -> tuple[Any, Any]:
    """(gate, up), each (..., n), of what `interleave` gave, (..., 2n); in an epilogue of the product, or of a value of
    its shape, whose n is a multiple of 16. Raises ArgumentError for other shapes."""
    if isinstance(packed, Traced) or is_recorded(packed):
        return deinterleave_traced(packed)
    _library("packed", packed)
    *leading, pairs, width = _groups("packed", packed, 2 * GROUP)
    groups = packed.reshape(*leading, pairs, 2, width // 2)
    shape = (*leading, pairs * width // 2)
    return groups[..., 0, :].reshape(shape), groups[..., 1, :].reshape(shape)


def _groups(argument: str, x: Any, width: int) -> tuple[int, ...]:
    """The shape of x with its columns in groups."""
    shape = tuple(x.shape)
    if not shape or shape[-1] % width:
        raise ArgumentError(f"{argument}: got shape {shape}; use a last extent that is a multiple of {width}")
    return (*shape[:-1], shape[-1] // width, width)


def _library(argument: str, x: Any) -> Any:
    """The module that made x, which is loaded already. ArgumentError for what is no array of these."""
    roots = (cls.__module__.partition(".")[0] for cls in type(x).__mro__)
    found = next((sys.modules[root] for root in roots if root in ("numpy", "torch", "cupy")), None)
    if found is None or not hasattr(x, "shape"):
        raise ArgumentError(f"{argument}: got {type(x).__name__}; use an array of numpy, torch or CuPy")
    return found
