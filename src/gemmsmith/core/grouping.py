"""Grouped GEMMs: how the rows of A and D, or the K of A and B, are divided into groups that have a product each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gemmsmith.core.dtypes import INT32, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.product import ROLES, Product, Role
from gemmsmith.core.scalars import as_bools, round_up

Table = Literal["offsets", "sizes", "counts"]
TABLES: tuple[Table, ...] = "offsets", "sizes", "counts"
MAX_GROUPS = 1024
"""Groups of a table, which is kept in shared memory."""
GROUP_END_MULTIPLE = 128
"""What groups along K of 8-bit operands end at multiples of: a k-tile, and a scale block."""
MIN_CAPACITY = 32
"""Groups that a warp reads at once."""
CAPACITIES = tuple(1 << i for i in range(MIN_CAPACITY.bit_length() - 1, MAX_GROUPS.bit_length()))
GATHER, SCATTER = "gather", "scatter"
"""The names of the arrays of row indices."""


@dataclass(frozen=True)
class Grouping:
    """The groups of a grouped GEMM.

    Attributes:
        table: What the int32 table on the device holds for each group: "offsets", the end of its rows (as in
            torch.nn.functional.grouped_mm); "sizes", how many it has; "counts": how many of the rows of its own matrix
            are valid, so that A is (G, max M, K) and D (G, max M, N) (DeepGEMM: masked).
        along: "m": the rows of A and D are divided; "k": the K of A and B, and D is (G, M, N).
        capacity: The most groups that the kernel's table can hold, a power of two. A call sets it by its table.
        zero_fill: Rows of D behind the last group become zero; otherwise they are not written.
        role: With "m", the operand whose rows are divided: "a", or "b" in a kernel that computes D^T = B^T @ A^T.
        gathers: Row i of A is row gather[i] of the array a, with the int32 array GATHER.
        scatters: Row i of D is row scatter[i] of the result's array, with the int32 array SCATTER.

    Raises:
        ArgumentError: A field has a value that it cannot have, or rows are gathered or scattered, but not divided.
    """

    table: Table
    along: Literal["m", "k"] = "m"
    capacity: int = MIN_CAPACITY
    zero_fill: bool = True
    role: Role = "a"
    gathers: bool = False
    scatters: bool = False

    def __post_init__(self) -> None:
        as_bools(zero_fill=self.zero_fill, gathers=self.gathers, scatters=self.scatters)
        if not isinstance(self.table, str) or self.table not in TABLES:
            raise ArgumentError(f"grouping: got the table {self.table!r}; use one of {', '.join(TABLES)}")
        if not isinstance(self.role, str) or self.role not in ROLES:
            raise ArgumentError(f"role: got {self.role!r}; use 'a'")
        if not isinstance(self.capacity, int) or self.capacity not in CAPACITIES:
            raise ArgumentError(f"capacity: got {self.capacity!r}; use one of {', '.join(map(str, CAPACITIES))}")
        is_known = isinstance(self.along, str) and self.along in ("m", "k")
        if not is_known or (self.along == "k" and self.is_masked):
            raise ArgumentError(f"along: got {self.along!r} with {self.table}; use 'm', or 'k' with offsets or sizes")
        if self.has_row_indices and self.has_batch:
            name, with_ = GATHER if self.gathers else SCATTER, "counts" if self.is_masked else "along='k'"
            raise ArgumentError(f"{name}: got it with {with_}; use offsets or sizes, with along='m'")

    @property
    def is_masked(self) -> bool:
        """True if each group has a matrix of its own, of which the first rows are valid."""
        return self.table == "counts"

    @property
    def has_batch(self) -> bool:
        """True if D is (G, M, N)."""
        return self.is_masked or self.along == "k"

    @property
    def has_row_indices(self) -> bool:
        """True if rows are gathered or scattered."""
        return self.gathers or self.scatters

    @property
    def fills_rows(self) -> bool:
        """True if the rows of D behind the last group become zero."""
        return self.zero_fill and not self.has_batch and not self.scatters

    @property
    def clips_rows(self) -> bool:
        """True if a tile's rows may end before the tile, because its group ends."""
        return self.along == "m"

    @property
    def has_even_tiles(self) -> bool:
        """Whether a group is divided into tiles of almost equal extents, instead of full tiles and a rest.

        They are along N, where one wgmma multiplies any multiple of 8 columns.
        """
        return self.clips_rows and self.role == "b"

    @property
    def table_bytes(self) -> int:
        """Bytes of shared memory of the kernel's table (tile_scheduler/group_table.py).

        Two arrays have the rows and the tiles of the groups before each group; with even tiles a third one has the
        heights of tiles. A flag says whether the table is invalid.
        """
        return (2 + self.has_even_tiles) * round_up(4 * (self.capacity + 1), 16) + 16

    @cached_property
    def product(self) -> Product:
        """The shapes and arrays. In the shapes, g are the groups, and t the rows of an array that is gathered from."""
        indices = [name for name, is_given in ((GATHER, self.gathers), (SCATTER, self.scatters)) if is_given]
        if self.along == "k":
            shapes = "mk,kn,g->gmn"
        elif self.is_masked:
            shapes = "gmk,gkn,g->gmn"
        else:
            shapes = f"{'t' if self.gathers else 'm'}k,gkn,g{',m' * len(indices)}->mn"
        return Product("grouped_gemm", dict.fromkeys([self.table, *indices], INT32), shapes, is_transposable=True)

    def gathers_rows_of(self, role: Role) -> bool:
        """Return whether the rows of a role's operands are gathered: those of the divided operand may be."""
        return self.gathers and role == self.role

    def majors(self, role: Role, dtype: DType) -> tuple[Literal["K", "MN"], ...]:
        """Return the layouts that an operand of this role and dtype may have, so that tiles can begin where groups do.

        A TMA box may begin at any row; along the contiguous dimension only at multiples of 16 bytes. So the divided
        dimension is not the contiguous one. 8-bit operands can only be K-major, for which groups along K end at
        multiples of GROUP_END_MULTIPLE.
        """
        if self.along == "k":
            return ("MN",) if dtype.bits == 16 else ("K",)
        return ("K",) if self.begins_anywhere(role) else ("K", "MN")

    def begins_anywhere(self, role: Role) -> bool:
        """Return whether tiles of a role's operands may begin at any row, since its groups follow one another."""
        return self.along == "m" and not self.is_masked and role == self.role

    def end_multiple(self, dtype: DType) -> int:
        """Return what the end of each group must be a multiple of if the operands have this dtype; see `majors`."""
        return GROUP_END_MULTIPLE if self.along == "k" and dtype.bits == 8 else 1

    def transposed(self) -> Grouping:
        """Return the groups of D^T = B^T @ A^T."""
        return replace(self, role="b" if self.role == "a" else "a")

    def with_room_for(self, groups: int) -> Grouping:
        """Return the grouping with a `capacity` for so many groups. Raises ArgumentError for none or too many."""
        if not 0 < groups <= MAX_GROUPS:
            raise ArgumentError(f"{self.table}: got {groups} groups; use 1 to {MAX_GROUPS}")
        return replace(self, capacity=max(MIN_CAPACITY, 1 << (groups - 1).bit_length()))

    def __str__(self) -> str:
        return f"groups along {self.along} by {self.table}"
