"""The reference: exact in float64, rounded once, IEEE where data are not finite."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.backends.reference.matmul import matmul_float64, rounded
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, DType
from gemmsmith.core.errors import ArgumentError


def matmul(a: np.ndarray, b: np.ndarray, output: DType) -> np.ndarray:
    """a @ b in float64, rounded once."""
    return rounded(matmul_float64(a, b), output)


DTYPES = [BF16, FP16, FP32]


def neighbors(dtype: DType, x: float) -> list[float]:
    """x in `dtype`, and the two values beside it."""
    value = np.asarray(x, np.float32).astype(dtype.numpy)
    around = [np.nextafter(value, np.asarray(s * np.inf, dtype.numpy)) for s in (-1, 1)]
    return [float(v) for v in (*around, value)]


@given(st.sampled_from(DTYPES), st.floats(-60000, 60000, allow_subnormal=False), st.data())
def test_rounds_once_to_nearest_even(dtype: DType, x: float, data: st.DataObject) -> None:
    """Also just beside a midpoint, where rounding through float32 would be wrong."""
    low, here, _ = sorted(neighbors(dtype, x))
    mid = (low + here) / 2
    x = data.draw(st.sampled_from([x, mid, np.nextafter(mid, np.inf), np.nextafter(mid, -np.inf)]))
    got = rounded(np.array([x]), dtype)
    best = min(abs(Fraction(v) - Fraction(x)) for v in (*neighbors(dtype, x), low, here) if np.isfinite(v))
    assert abs(Fraction(float(got[0])) - Fraction(x)) == best
    if Fraction(x) == Fraction(mid):
        assert got.view(f"u{dtype.bytes}")[0] % 2 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x", [np.inf, -np.inf, 1e300, -1e300, 0.0, -0.0, 1e-300])
def test_extremes(dtype: DType, x: float) -> None:
    want = np.sign(x) * np.inf if abs(x) > 1e299 else 0.0
    assert float(rounded(np.array([x]), dtype)[0]) == want
    assert np.isnan(rounded(np.array([np.nan, -np.nan]), dtype).astype(float)).all()


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448), (E5M2, 57344)])
def test_fp8_saturates_as_kernels_do(dtype: DType, largest: float) -> None:
    x = np.array([largest, largest * 1.1, -1e30, np.inf, -np.inf, np.nan, -0.0])
    want = [largest, largest, -largest, largest, -largest, np.nan, 0]
    np.testing.assert_array_equal(rounded(x, dtype).astype(float), want)


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("operand", [BF16, FP16, FP32])
def test_integers_are_exact(operand: DType, output: DType, rng: np.random.Generator) -> None:
    a, b = rng.integers(-3, 4, (5, 9)), rng.integers(-3, 4, (9, 6))
    got = matmul(a.astype(operand.numpy), b.astype(operand.numpy), output)
    assert got.dtype == output.numpy
    assert np.array_equal(got.astype(int), a @ b)


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((2, 3), (3, 4), (2, 4)),
        ((5, 2, 3), (5, 3, 4), (5, 2, 4)),
        ((1, 2, 3), (5, 3, 4), (5, 2, 4)),
        ((5, 2, 3), (3, 4), (5, 2, 4)),
        ((2, 3), (5, 3, 4), (5, 2, 4)),
        ((0, 3), (3, 4), (0, 4)),
        ((0, 2, 3), (0, 3, 4), (0, 2, 4)),
    ],
)
def test_shapes(a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]) -> None:
    assert matmul(np.ones(a, np.float16), np.ones(b, np.float16), FP32).shape == out


def test_no_k_gives_zeros() -> None:
    got = matmul(np.empty((3, 0), ml_dtypes.bfloat16), np.empty((0, 4), ml_dtypes.bfloat16), BF16)
    assert got.shape == (3, 4)
    assert not got.astype(float).any()


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 5), (5, 1), (5, 7), (33, 65)])
def test_nan_and_inf_propagate(m: int, n: int) -> None:
    """0 * Inf is NaN wherever it happens, also in the matrix-vector routines that could skip a zero."""
    a, b = np.zeros((m, 3), np.float16), np.ones((3, n), np.float16)
    b[1] = np.inf
    assert np.isnan(matmul(a, b, FP32)).all()
    a[:, 1] = 1
    assert np.isposinf(matmul(a, b, FP16)).all()
    a[:, 2], b[2] = -1, np.inf
    assert np.isnan(matmul(a, b, BF16).astype(float)).all()
    b[:] = 0
    a[:, 0] = np.nan
    assert np.isnan(matmul(a, b, FP32)).all()


def test_a_broadcast_batch_of_stride_0() -> None:
    a = np.broadcast_to(np.eye(3, dtype=np.float16), (4, 3, 3))
    b = np.arange(36, dtype=np.float16).reshape(4, 3, 3)
    assert np.array_equal(matmul(a, b, FP16), b)


@pytest.mark.parametrize(("a", "b"), [((2, 3), (4, 5)), ((3,), (3, 4)), ((2, 3), (3,))])
def test_mismatched_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="a, b: got shapes"):
        matmul(np.ones(a, np.float16), np.ones(b, np.float16), FP16)
