"""The operands of a mainloop, as values: which matrix each is, and which tile of it a stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.mma import Major
from gemmsmith.core.problem import Matrix, OperandFn
from gemmsmith.core.product import Role
from gemmsmith.core.tile import Tile


@dataclass(frozen=True)
class MmaOperand:
    """An operand of the mainloop, which loads and multiplies one tile of it per k-tile.

    Attributes:
        name: Prefix of its kernel arguments.
        role: "a" if its rows are rows of D, "b" if they are columns of D.
        tile: Its tile in a stage: dtype in memory, extents, major-ness.
        source: Function of a BoundProblem that returns its matrix, viewed as (M or N) x K, and its Pointer.
        evict: L2 eviction policy of its loads: "first", "normal" or "last".
        residual: Likewise for the matrix of its TF32 residuals, x - tf32(x); None without 3xTF32.
        interleaved: Its rows alternate between two matrices, in groups of 8.
    """

    name: str
    role: Role
    tile: Tile
    source: OperandFn
    evict: str = "normal"
    residual: OperandFn | None = None
    interleaved: bool = False


def operand_major(matrix: Matrix) -> Major:
    """Return which dimension of an operand, viewed as (M or N) x K, is contiguous: "MN" or "K"."""
    return "MN" if matrix.is_column_major else "K"
