"""The operands of a mainloop, as values: which matrix each is, and which tile of it a stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.mma import Major
from gemmsmith.core.problem import Matrix, OperandFn
from gemmsmith.core.product import Role
from gemmsmith.core.tile import Tile


@dataclass(frozen=True)
class MmaOperand:
    """An operand of the mainloop, a tile of which is multiplied per k-tile.

    Attributes:
        name: Prefix of its kernel arguments.
        role: Whether its rows are those of A or those of B.
        tile: Its tile in a stage: dtype in memory, extents, major-ness.
        source: Returns its matrix, with extents and a batch of its own, as (M or N) x K, and its Pointer.
        evict: L2 eviction policy of its loads: "first", "normal" or "last".
        residual: Returns the matrix of its TF32 residuals x - tf32(x) and its Pointer; None without 3xTF32.
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
    """Return the major-ness of an operand viewed as (M or N) x K."""
    return "MN" if matrix.is_column_major else "K"
