"""Block scales as a kernel is compiled for: their rows per scale, dtype, and how they are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.mma import (
    Major,
)
from gemmsmith.core.problem import Scale
from gemmsmith.core.product import Role
from gemmsmith.core.scalars import ceil_div, round_up

SCALES_PER_TMA_BOX = 4
"""Block scales (k-tiles) per TMA box along K: 4 fp32 = 16 bytes, TMA's minimum."""


@dataclass(frozen=True)
class ScaleSpec:
    """Block scales of an operand: rows per scale (1 or 128), and how they are loaded.

    `by_tma`: "MN", a TMA box of one k-tile; "K", a box of SCALES_PER_TMA_BOX k-tiles; None: element by element. TMA
    loads scales per row that are fp32, contiguous and 16-byte aligned. `interleaved`: the operand's rows alternate
    between two matrices, and so do the scales of 128 rows of each.
    """

    granularity: int
    dtype: DType
    by_tma: Major | None = None
    interleaved: bool = False

    @classmethod
    def from_scale(cls, scale: Scale | None) -> ScaleSpec | None:
        """Return the spec of an operand's block scales; None if it has none."""
        if not scale:
            return None
        matrix, by_tma = scale.matrix, scale.granularity == 1 and scale.matrix.dtype == FP32
        major = matrix.major if by_tma and matrix.is_tma_compatible else None
        return cls(scale.granularity, matrix.dtype, major, matrix.interleave_stride != 0)

    def in_groups(self, grouping: Grouping, role: Role) -> ScaleSpec:
        """Return the spec for a grouped GEMM, without TMA where it cannot load the scales.

        It cannot if tiles begin at any row and the scales are contiguous along the rows, nor if rows are gathered.
        """
        begins_anywhere = self.by_tma == "MN" and grouping.begins_anywhere(role)
        return replace(self, by_tma=None) if begins_anywhere or grouping.gathers_rows_of(role) else self

    def __str__(self) -> str:
        of_two = " of two" * self.interleaved
        return f"{self.dtype}{of_two} read " + (f"by TMA along {self.by_tma}" if self.by_tma else "one by one")

    def is_compatible_with(self, other: ScaleSpec) -> bool:
        """Return whether a kernel for these scales accepts a call's scales `other`.

        They may differ in `by_tma` if the kernel loads element by element, which supports any layout.
        """
        return self == replace(other, by_tma=self.by_tma) and self.by_tma in (None, other.by_tma)

    @property
    def matrices(self) -> int:
        """The matrices between which the rows alternate, and so do the scales."""
        return 2 if self.interleaved else 1

    @property
    def period(self) -> int:
        """Rows after which the next scale of a matrix follows."""
        return self.granularity * self.matrices

    def max_scales(self, rows: int) -> int:
        """Return the most scales that a tile of `rows` rows needs. It starts at a multiple of `rows`."""
        max_offset = self.period - gcd(rows, self.period)  # largest offset of a tile's first row within a period
        return ceil_div(max_offset + rows, self.period) * self.matrices

    def staged_bytes(self, rows: int) -> int:
        """Return the bytes of shared memory of one stage, or of one TMA box, in fp32."""
        alignment = 128 if self.by_tma else 16
        k_tiles = SCALES_PER_TMA_BOX if self.by_tma == "K" else 1
        return round_up(4 * k_tiles * self.max_scales(rows), alignment)

    def num_stages(self, stages: int) -> int:
        """Return the stages of scales for a pipeline of `stages` k-tiles.

        With boxes along K, one more than full boxes are needed, since the first k-tile may be in the middle of a box.
        """
        return ceil_div(stages, SCALES_PER_TMA_BOX) + 1 if self.by_tma == "K" else stages
