"""What is to be computed: D[b] = A[b] @ B[b], with every operand's shape, strides and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from gemmsmith.core.dtypes import DType
from gemmsmith.core.pointer import Pointer

TMA_ALIGNMENT = 16
"""Bytes: base address and every stride but the innermost (PTX ISA, tensor maps)."""
MAX_EXTENT = 2**31 - 2**12
"""TMA coordinates are int32, and a coordinate may lie up to one cluster's tile beyond the extent."""
MAX_STRIDE_BYTES = 2**40
SCALE_BLOCK = 128
"""Elements of K that share a scale, and that tensor cores sum before the sum is added in fp32; or rows that do."""


@dataclass(frozen=True)
class Matrix:
    """A batch of matrices in memory: shape (batch, rows, cols), strides in elements.

    `alignment` is the largest power of two, at most 16, that divides the base address in bytes.
    A broadcast batch has stride 0. Strides are canonical: see `canonical`.
    """

    dtype: DType
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    batch: int = 1
    batch_stride: int = 0
    alignment: int = TMA_ALIGNMENT

    @property
    def T(self) -> Matrix:
        """The transposed view of the same memory."""
        return Matrix(
            self.dtype, self.cols, self.rows, self.col_stride, self.row_stride,
            self.batch, self.batch_stride, self.alignment,
        )  # fmt: skip

    @property
    def contiguous(self) -> str | None:
        """The contiguous index: "cols" (row-major), "rows" (column-major), or None. If both are, one of length 1."""
        if self.col_stride == 1 and not (self.row_stride == 1 and self.rows <= 1 < self.cols):
            return "cols"
        return "rows" if self.row_stride == 1 else None

    @property
    def pitch_bytes(self) -> int:
        """From one contiguous row, or column if column-major, to the next."""
        return (self.col_stride if self.column_major else self.row_stride) * self.dtype.bytes

    @cached_property
    def tma_ready(self) -> bool:
        """Whether TMA can address it: one unit stride, the others multiples of 16 bytes, an aligned base."""
        if self.contiguous is None or self.alignment % TMA_ALIGNMENT:
            return False
        return _fits_tma(self.pitch_bytes) and _fits_tma(self.batch_stride * self.dtype.bytes)

    @property
    def loads_by_tma(self) -> bool:
        """Whether TMA reads pieces of it for an epilogue; of a column-major one those of 16 or 32 bits."""
        return self.tma_ready and (self.dtype.bits >= 16 or not self.column_major)

    @property
    def stores_by_tma(self) -> bool:
        """Whether TMA can write it likewise. TMA writes whole chunks of 16 bytes: if a row (or column) ends within a
        chunk it would overwrite bytes that do not belong to the matrix (seen on an H200)."""
        along = self.rows if self.column_major else self.cols
        return self.loads_by_tma and along * self.dtype.bytes % TMA_ALIGNMENT == 0

    @property
    def column_major(self) -> bool:
        """Whether the matrix is column-major: neighbors in memory belong to one column."""
        return self.contiguous == "rows"

    def canonical(self) -> Matrix:
        """The same matrix; strides of length-1 dimensions, which are never used, become values that TMA accepts."""
        if self.rows > 1 and self.cols > 1 and (self.batch > 1 or not self.batch_stride):
            return self
        step = TMA_ALIGNMENT // self.dtype.bytes
        row, col = self.row_stride, self.col_stride
        if self.cols <= 1 and row != 1:
            col = 1
        if self.rows <= 1 and col != 1:
            row = 1
        if self.rows <= 1 and col == 1:
            row = -(-max(self.cols, 1) // step) * step
        if self.cols <= 1 and row == 1:
            col = -(-max(self.rows, 1) // step) * step
        batch = self.batch_stride if self.batch > 1 else 0
        return Matrix(self.dtype, self.rows, self.cols, row, col, self.batch, batch, self.alignment)

    def read_like(self, other: Matrix) -> Matrix:
        """The same matrix with `other`'s strides in length-1 dimensions."""
        empty = 0 in (self.batch, self.rows, self.cols)
        row = other.row_stride if empty or self.rows <= 1 else self.row_stride
        col = other.col_stride if empty or self.cols <= 1 else self.col_stride
        return replace(self, row_stride=row, col_stride=col)


@dataclass(frozen=True)
class Scale:
    """What an operand, seen as (M or N) x K, is multiplied by: `matrix` has one number for `rows` rows, 1 or 128, and
    SCALE_BLOCK elements of K, blocks rounded up. It lies at the Pointer `name`."""

    name: str
    matrix: Matrix
    rows: int


SCALE_NAMES = ("scale of a", "scale of b")
"""What the scales of a and b are called among an epilogue's operands, none of which can have such a name."""
Scales = tuple[Scale | None, Scale | None]
"""The scales of A and of B."""


@dataclass(frozen=True)
class Problem:
    """D (batch, m, n) = A (batch, m, k) @ B (batch, k, n), accumulated in `accumulate`; where it is `promoted`, each
    SCALE_BLOCK of K on its own, times its `scales`, and these sums in fp32. `low_parts`: besides A and B as the
    instruction reads them, what it leaves of each is multiplied by the other (3xTF32)."""

    a: Matrix
    b: Matrix
    d: Matrix
    accumulate: DType
    promoted: bool = False
    scales: Scales = (None, None)
    low_parts: bool = False

    @property
    def m(self) -> int:
        return self.a.rows

    @property
    def n(self) -> int:
        return self.b.cols

    @property
    def k(self) -> int:
        return self.a.cols

    @property
    def batch(self) -> int:
        return self.d.batch

    @cached_property
    def operands(self) -> tuple[Matrix, Matrix]:
        """A as M x K and B as N x K, as kernels copy them."""
        return self.a, self.b.T

    @property
    def flops(self) -> int:
        """Multiply and add counted as two."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def T(self) -> Problem:
        """The same product read transposed, D^T = B^T @ A^T: makes a column-major D row-major."""
        return replace(self, a=self.b.T, b=self.a.T, d=self.d.T, scales=self.scales[::-1])

    def read_like(self, other: Problem) -> Problem:
        """The same product, matrices of one row, one column or none laid out as in `other` as far as they may be."""
        a, b, d = self.a.read_like(other.a), self.b.read_like(other.b), self.d.read_like(other.d)
        of_a, of_b = (
            replace(x, matrix=x.matrix.read_like(y.matrix)) if x and y else x
            for x, y in zip(self.scales, other.scales, strict=True)
        )
        return replace(self, a=a, b=b, d=d, scales=(of_a, of_b))

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        operands = " x ".join(dict.fromkeys((str(self.a.dtype), str(self.b.dtype))))
        return f"{batch}{self.m}x{self.n}x{self.k} {operands} -> {self.d.dtype}"


@dataclass(frozen=True)
class BoundProblem(Problem):
    """A problem whose A and B TMA reads as they are, with where these lie: what a kernel's arguments are computed from.

    `arrays`: the epilogue's operands and results in memory, by name: (rows, columns) each, 1 where it does not vary.
    `low`: the low parts of the `operands`, if there are any, and where these lie.
    """

    a_at: Pointer = field(kw_only=True)
    b_at: Pointer = field(kw_only=True)
    arrays: Mapping[str, Matrix] = field(kw_only=True)
    low: tuple[tuple[Matrix, Pointer], ...] = field(default=(), kw_only=True)

    @property
    def at(self) -> tuple[Pointer, Pointer]:
        """The addresses of the `operands`."""
        return self.a_at, self.b_at

    @staticmethod
    def of(
        p: Problem, a: Pointer, b: Pointer, arrays: Mapping[str, Matrix], low: tuple[tuple[Matrix, Pointer], ...] = ()
    ) -> BoundProblem:
        own = {x.name: getattr(p, x.name) for x in fields(Problem)}
        return BoundProblem(**own, a_at=a, b_at=b, arrays=arrays, low=low)


Source = Callable[[BoundProblem], tuple[Matrix, Pointer]]
"""Gives an operand of a problem as an (M or N) x K matrix, and where it lies."""


def operand_of(index: int) -> Source:
    """A (0) or B (1)."""
    return lambda p: (p.operands[index], p.at[index])


def low_part_of(index: int) -> Source:
    """The low part of A or of B."""
    return lambda p: p.low[index]


def _fits_tma(stride: int) -> bool:
    """Whether a tensor map may have a stride of that many bytes."""
    return 0 <= stride < MAX_STRIDE_BYTES and stride % TMA_ALIGNMENT == 0
