"""The GEMM to be computed: D[b] = A[b] @ B[b], with every operand's shape, strides and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dtypes import DType
from gemmsmith.core.frozen import cached_property, changed, copied_as
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.mma import Major
from gemmsmith.core.product import Role
from gemmsmith.core.scalars import ceil_div, round_up

TMA_ALIGNMENT_BYTES = 16
"""Alignment of the base address and of every stride but the innermost (PTX ISA, tensor maps)."""
MAX_EXTENT = 2**31 - 2**12
"""TMA coordinates are int32, and a coordinate may be up to one cluster's tile beyond the extent."""
MAX_STRIDE_BYTES = 2**40
"""Limit of a tensor map's strides (CUDA driver API, cuTensorMapEncodeTiled)."""
SCALE_BLOCK = 128
"""Elements of K (or rows) per block scale, and elements of K per promotion step."""


@dataclass(frozen=True)
class Matrix:
    """A batch of matrices in memory: shape (batch, rows, cols), strides in elements.

    `alignment` is the largest power of two, at most 16, that divides the base address in bytes.
    A broadcast batch has stride 0. Strides are canonical: see `canonical`.
    `interleave_stride`: not 0 if those rows or columns that are not K alternate between two matrices, in groups of 8:
    elements from the first matrix, which has these strides, to the second, which may be at a lower address.
    """

    dtype: DType
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    batch: int = 1
    batch_stride: int = 0
    alignment: int = TMA_ALIGNMENT_BYTES
    interleave_stride: int = 0

    @cached_property
    def T(self) -> Matrix:
        """Transposed view of the same memory."""
        return Matrix(
            self.dtype, self.cols, self.rows, self.col_stride, self.row_stride,
            self.batch, self.batch_stride, self.alignment, self.interleave_stride,
        )  # fmt: skip

    def with_rows(self, rows: int) -> Matrix:
        """Return the matrix with another number of rows."""
        return changed(self, rows=rows)

    @property
    def is_row_major(self) -> bool:
        """True if columns have unit stride. If rows have it, too, one of both dimensions has length 1.

        A single row with two unit strides is column-major: its row stride reaches no element, so that only a plan for
        column-major matrices can have set it; see `with_degenerate_strides_of`.
        """
        return self.col_stride == 1 and not (self.row_stride == 1 and self.rows <= 1 < self.cols)

    @property
    def is_column_major(self) -> bool:
        """True if rows have unit stride, and the matrix is not `is_row_major`."""
        return self.row_stride == 1 and not self.is_row_major

    @property
    def major(self) -> Major:
        """The contiguous dimension of an operand, viewed as (M or N) x K."""
        return "MN" if self.is_column_major else "K"

    @property
    def pitch_bytes(self) -> int:
        """Bytes from one contiguous row, or column if column-major, to the next."""
        return self.dtype.bytes_of(self.col_stride if self.is_column_major else self.row_stride)

    @cached_property
    def is_tma_compatible(self) -> bool:
        """True if a tensor map can address it: one unit stride, others multiples of 16 bytes, an aligned base."""
        if not (self.is_row_major or self.is_column_major) or self.alignment % TMA_ALIGNMENT_BYTES:
            return False
        strides = self.pitch_bytes, *map(self.dtype.bytes_of, (self.batch_stride, abs(self.interleave_stride)))
        return all(map(_fits_tma, strides))

    @property
    def can_tma_store(self) -> bool:
        """True if an epilogue can store it by TMA; a column-major matrix needs elements of 16 or 32 bits.

        Rows (columns if column-major) must be multiples of 16 bytes: TMA writes whole 16-byte units, and would
        overwrite what follows the matrix (seen on an H200).
        """
        if not self.is_tma_compatible or (self.is_column_major and self.dtype.bits < 16):
            return False
        contiguous_extent = self.rows if self.is_column_major else self.cols
        return self.dtype.bytes_of(contiguous_extent) % TMA_ALIGNMENT_BYTES == 0

    def canonical(self) -> Matrix:
        """Return the same matrix with unused strides, those of dimensions of length 0 or 1, as TMA accepts them.

        If the other dimension's stride is 1, the unused one becomes that of a padded row (or column), a multiple of 16
        bytes; otherwise it becomes 1. An unused batch stride becomes 0.
        """
        if self.rows > 1 and self.cols > 1 and (self.batch > 1 or not self.batch_stride):
            return self
        alignment = self.dtype.elements_in(TMA_ALIGNMENT_BYTES)
        row, col = self.row_stride, self.col_stride
        if self.cols <= 1 and row != 1:
            col = 1
        if self.rows <= 1 and col != 1:
            row = 1
        if self.rows <= 1 and col == 1:
            row = round_up(max(self.cols, 1), alignment)
        if self.cols <= 1 and row == 1:
            col = round_up(max(self.rows, 1), alignment)
        batch = self.batch_stride if self.batch > 1 else 0
        return changed(self, row_stride=row, col_stride=col, batch_stride=batch)

    def with_degenerate_strides_of(self, other: Matrix) -> Matrix:
        """Return the same matrix with the strides of length-0 and length-1 dimensions taken from `other`.

        These strides reach no element, but decide between layouts. So an array has the layout of the one that a plan
        was made for, and the plan's kernel, whenever its elements allow it.
        """
        empty = 0 in (self.batch, self.rows, self.cols)
        row = other.row_stride if empty or self.rows <= 1 else self.row_stride
        col = other.col_stride if empty or self.cols <= 1 else self.col_stride
        return changed(self, row_stride=row, col_stride=col)


@dataclass(frozen=True)
class Scale:
    """Block scales of an operand viewed as (M or N) x K.

    `matrix` has one scale per `granularity` (1 or 128) rows (CUTLASS: ScaleGranularityM/N) and SCALE_BLOCK elements of
    K, rounded up. It is stored at the Pointer `name`.
    """

    name: str
    matrix: Matrix
    granularity: int

    def with_rows(self, rows: int) -> Scale:
        """Return the scales of an operand with another M or N."""
        return changed(self, matrix=self.matrix.with_rows(ceil_div(rows, self.granularity)))


SCALE_NAMES: Mapping[Role, str] = {"a": "scale of a", "b": "scale of b"}
"""Names of the scales of a and b among a graph's operands; not identifiers, so no user operand has them."""
Scales = tuple[Scale | None, Scale | None]
"""The scales of A and of B."""


@dataclass(frozen=True)
class Problem:
    """A GEMM: D (batch, m, n) = A (batch, m, k) @ B (batch, k, n), accumulated in `accumulator_dtype`.

    `promoted`: each SCALE_BLOCK of K is summed separately, multiplied by its `scales`, and added in fp32.
    `is_3xtf32` (3xTF32): also multiply the residuals, what the truncation to TF32 drops of A and of B.
    `extents`: m and n of a design with an output shape of its own; None: a's rows and b's columns.
    `grouping`: how rows or K are divided into `groups` groups, for a grouped GEMM.
    """

    a: Matrix
    b: Matrix
    d: Matrix
    accumulator_dtype: DType
    promoted: bool = False
    scales: Scales = (None, None)
    is_3xtf32: bool = False
    extents: tuple[int, int] | None = None
    grouping: Grouping | None = None
    groups: int = 0

    @property
    def m(self) -> int:
        """Rows of A @ B."""
        return self.extents[0] if self.extents else self.a.rows

    @property
    def n(self) -> int:
        """Columns of A @ B."""
        return self.extents[1] if self.extents else self.b.cols

    @property
    def k(self) -> int:
        """Columns of A, rows of B."""
        return self.a.cols

    @property
    def batch(self) -> int:
        """Number of GEMMs."""
        return self.d.batch

    @cached_property
    def operands(self) -> tuple[Matrix, Matrix]:
        """A as M x K and B as N x K, as kernels load them."""
        return self.a, self.b.T

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiply-add counts as two. Rows of no group of a grouped GEMM count, too."""
        batch = 1 if self.grouping and self.grouping.along == "k" else self.batch
        return 2 * batch * self.m * self.n * self.k

    @property
    def T(self) -> Problem:
        """The transposed problem, D^T = B^T @ A^T, whose D is row-major if this one's is column-major."""
        extents, grouping = self.extents and self.extents[::-1], self.grouping and self.grouping.transposed()
        swapped = self.with_matrices(self.b.T, self.a.T, self.d.T, self.scales[::-1])
        return changed(swapped, extents=extents, grouping=grouping) if extents or grouping else swapped

    def with_matrices(self, a: Matrix, b: Matrix, d: Matrix, scales: Scales) -> Problem:
        """Return the same problem with other matrices."""
        return changed(self, a=a, b=b, d=d, scales=scales)

    def with_rows(self, m: int) -> Problem:
        """Return the problem with M = m. Strides stay as they are."""
        scale_a, scale_b = self.scales
        scale_a = scale_a and scale_a.with_rows(m)
        return self.with_matrices(self.a.with_rows(m), self.b, self.d.with_rows(m), (scale_a, scale_b))

    def with_columns(self, n: int) -> Problem:
        """Return the problem with N = n. Strides stay as they are."""
        scale_a, scale_b = self.scales
        b, d = changed(self.b, cols=n), changed(self.d, cols=n)
        return self.with_matrices(self.a, b, d, (scale_a, scale_b and scale_b.with_rows(n)))

    def with_degenerate_strides_of(self, other: Problem) -> Problem:
        """Return the same problem with the strides of length-0 and length-1 dimensions taken from `other`.

        `other` is a plan's problem; see `Matrix.with_degenerate_strides_of`.
        """
        scale_a, scale_b = (
            changed(x, matrix=x.matrix.with_degenerate_strides_of(y.matrix)) if x and y else x
            for x, y in zip(self.scales, other.scales, strict=True)
        )
        return self.with_matrices(
            self.a.with_degenerate_strides_of(other.a),
            self.b.with_degenerate_strides_of(other.b),
            self.d.with_degenerate_strides_of(other.d),
            (scale_a, scale_b),
        )

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else f"{self.groups} groups, " if self.grouping else ""
        operands = " x ".join(dict.fromkeys((str(self.a.dtype), str(self.b.dtype))))
        return f"{batch}{self.m}x{self.n}x{self.k} {operands} -> {self.d.dtype}"


@dataclass(frozen=True)
class BoundProblem(Problem):
    """A problem with TMA-compatible A and B and the Pointers of its arrays: what kernel arguments are computed from.

    `bound_operands`: the operands in memory, each as (M or N) x K with its Pointer, by name: "a" and "b", their
    block scales "scale_a" and "scale_b", with 3xTF32 "a_residual" and "b_residual"; and the design's arrays, as the
    caller has them.
    `arrays`: the epilogue's operands and results in memory, by name: (rows, columns) each, 1 if they are broadcast.
    """

    bound_operands: Mapping[str, tuple[Matrix, Pointer]] = field(kw_only=True)
    arrays: Mapping[str, Matrix] = field(kw_only=True)

    @classmethod
    def from_problem(
        cls, p: Problem, a: Pointer, b: Pointer, arrays: Mapping[str, Matrix],
        others: Mapping[str, tuple[Matrix, Pointer]] | None = None,
    ) -> BoundProblem:  # fmt: skip
        """Return the problem with the Pointers of its arrays: `a` and `b`, and those of the block scales.

        `arrays`: as the attribute. `others`: further `bound_operands`, those of residuals and of the design's arrays.
        """
        bound = dict(zip("ab", zip(p.operands, (a, b), strict=True), strict=True))
        bound |= {f"scale_{role}": (x.matrix, Pointer(x.name)) for role, x in zip("ab", p.scales, strict=True) if x}
        bound |= others or {}
        return copied_as(cls, p, bound_operands=bound, arrays=arrays)


OperandFn = Callable[[BoundProblem], tuple[Matrix, Pointer]]
"""Function that returns an operand of a problem as an (M or N) x K matrix, and its Pointer."""


def operand_getter(name: str) -> OperandFn:
    """Return the function that returns a problem's bound operand of that name."""
    return lambda p: p.bound_operands[name]


def _fits_tma(stride_bytes: int) -> bool:
    """Return whether a tensor map may have this stride."""
    return 0 <= stride_bytes < MAX_STRIDE_BYTES and stride_bytes % TMA_ALIGNMENT_BYTES == 0
