"""Strided matrices: what TMA can address, and strides that no index reaches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.problem import Matrix, Problem


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    extent, stride = st.integers(0, 5), st.sampled_from([0, 1, 2, 3, 8, 16, 24])
    rows, cols, batch = draw(extent), draw(extent), draw(st.integers(0, 3))
    return Matrix(
        draw(st.sampled_from([BF16, FP16, FP32])),
        rows,
        cols,
        draw(stride),
        draw(stride),
        batch,
        draw(stride) if batch > 1 else 0,
        draw(st.sampled_from([2, 4, 8, 16])),
    )


def addresses(x: Matrix) -> np.ndarray:
    b, r, c = np.ogrid[: x.batch, : x.rows, : x.cols]
    return b * x.batch_stride + r * x.row_stride + c * x.col_stride


@given(matrices())
def test_canonical_is_the_same_memory(x: Matrix) -> None:
    y = x.canonical()
    assert np.array_equal(addresses(x), addresses(y))
    assert (x.dtype, x.rows, x.cols, x.batch, x.alignment) == (y.dtype, y.rows, y.cols, y.batch, y.alignment)


@given(matrices())
def test_canonical_only_helps_and_settles(x: Matrix) -> None:
    y = x.canonical()
    assert y.canonical() == y
    assert y.is_tma_compatible or not x.is_tma_compatible


@given(matrices())
def test_transposing_twice_changes_nothing(x: Matrix) -> None:
    assert x.T.T == x
    assert np.array_equal(addresses(x.T), addresses(x).transpose(0, 2, 1))


@pytest.mark.parametrize(("rows", "cols"), [(1, 7), (7, 1), (1, 1), (0, 7), (7, 0), (1, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_one_row_or_column_is_always_addressable(rows: int, cols: int, dtype: DType) -> None:
    """By the shortest stride of whole 16 bytes."""
    row_major = Matrix(dtype, rows, cols, max(cols, 1), 1)
    for matrix in (row_major.canonical(), row_major.T.canonical()):
        assert matrix.is_tma_compatible
        if max(rows, cols) == 7 and min(rows, cols) == 1:
            assert {matrix.row_stride, matrix.col_stride} == {1, 8}


BASE = Matrix(BF16, 64, 48, 48, 1)


@pytest.mark.parametrize(
    ("change", "ready"),
    [
        ({}, True),
        ({"row_stride": 56}, True),
        ({"row_stride": 49}, False),
        ({"row_stride": 52}, False),
        ({"dtype": FP32, "row_stride": 52}, True),
        ({"col_stride": 2}, False),
        ({"row_stride": 1, "col_stride": 64}, True),
        ({"alignment": 8}, False),
        ({"batch": 3, "batch_stride": 64 * 48}, True),
        ({"batch": 3, "batch_stride": 64 * 48 + 4}, False),
        ({"batch": 3, "batch_stride": 0}, True),
        ({"row_stride": 2**39}, False),
        ({"row_stride": 2**39 - 8}, True),
    ],
)
def test_tma_ready(change: dict[str, int], ready: bool) -> None:
    assert replace(BASE, **change).is_tma_compatible is ready


def test_problem_reads_its_extents_and_transposes() -> None:
    p = Problem(Matrix(BF16, 3, 5, 5, 1), Matrix(BF16, 5, 7, 7, 1), Matrix(FP32, 3, 7, 1, 3), FP32)
    assert (p.m, p.n, p.k, p.batch, p.flops) == (3, 7, 5, 1, 210)
    assert (p.T.m, p.T.n, p.T.k, p.T.d.is_row_major) == (7, 3, 5, True)
    assert p.T.T == p
    assert str(p) == "3x7x5 bf16 -> fp32"


def test_a_problem_read_like_another_keeps_what_its_indices_reach() -> None:
    """Strides of one row, one column, or nothing are the other's."""

    def of(m: int, n: int, k: int, pad: int) -> Problem:
        a, b, d = Matrix(BF16, m, k, k + pad, 1), Matrix(BF16, k, n, n + pad, 1), Matrix(FP32, m, n, n + pad, 1)
        return Problem(a, b, d, FP32)

    tight, wide = of(1, 8, 4, 0), of(1, 8, 4, 3)
    read = tight.with_degenerate_strides_of(wide)
    assert (read.a, read.b, read.d) == (wide.a, tight.b, wide.d)
    assert (read.accumulator_dtype, str(read)) == (FP32, str(tight))
    for extents in ((2, 2, 2), (2, 8, 4)):
        assert of(*extents, 0).with_degenerate_strides_of(of(*extents, 3)) == of(*extents, 0)
    empty = of(0, 8, 4, 0).with_degenerate_strides_of(of(0, 8, 4, 3))
    assert (empty.a.row_stride, empty.b.row_stride, empty.d.row_stride) == (7, 8, 11)
