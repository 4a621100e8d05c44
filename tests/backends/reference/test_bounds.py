"""The bounds hold for what tensor cores compute, on every kind of data, and catch what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.backends.reference.bounds import Report, check
from gemmsmith.backends.reference.matmul import matmul_float64, rounded, truncate_to_tf32
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT32, TF32, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import select_mma
from gemmsmith.hw.mma import fused_mma


def matmul(a: np.ndarray, b: np.ndarray, output: DType) -> np.ndarray:
    """a @ b in float64, rounded once."""
    return rounded(matmul_float64(a, b), output)


MODES = [(BF16, FP32, BF16), (BF16, FP32, FP32), (FP16, FP32, FP16), (FP16, FP32, FP32), (FP16, FP16, FP16)]
"""Operands, accumulator, output."""
ALL_MODES = [*MODES, (E4M3, FP32, BF16), (E5M2, FP32, FP32), (TF32, FP32, FP32)]


def tensor_core(a: np.ndarray, b: np.ndarray, operand: DType, accumulate: DType) -> np.ndarray:
    """A @ B as a Hopper tensor core adds it."""
    a, b = (truncate_to_tf32(x) if operand is TF32 else x for x in (a, b))
    mma, left, right = select_mma(operand, operand, accumulate), a.astype(np.float64), b.T.astype(np.float64)
    sums = np.zeros((len(a), b.shape[1]))
    for k in range(0, a.shape[1], mma.k):
        sums = fused_mma(left[:, k : k + mma.k], right[:, k : k + mma.k], sums, mma).astype(np.float64)
    return sums


def data(kind: str, shape: tuple[int, int], dtype: DType, rng: np.random.Generator) -> np.ndarray:
    match kind:
        case "normal":
            x = rng.standard_normal(shape)
        case "positive":
            x = rng.uniform(0.5, 1, shape)
        case "canceling":  # large sums that vanish in the end
            half = rng.uniform(1, 2, (shape[0], (shape[1] + 1) // 2))
            x = np.concatenate([half, -half], 1)[:, : shape[1]]
        case "wide":
            x = np.ldexp(rng.uniform(-1, 1, shape), rng.integers(-12, 4, shape))
        case "subnormal":
            x = rng.uniform(-1, 1, shape) * (2.0**-16 if dtype is FP16 else 2.0**-100)
        case "mixed":  # subnormals beside ones, and zeros
            x = np.where(rng.random(shape) < 0.5, rng.uniform(-1, 1, shape), rng.uniform(-1, 1, shape) * 2.0**-20)
            x = np.where(rng.random(shape) < 0.2, 0, x)
        case _:  # as bad as it gets: one term, and all others, just below its last aligned bit, are lost
            x = np.full(shape, 2.0**-13 * 181 / 128)
            x[:, :1] = 1
    return x.astype(dtype.numpy)


KINDS = ["normal", "positive", "canceling", "wide", "subnormal", "mixed", "biased"]


@given(
    st.sampled_from(ALL_MODES),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 300),
    st.integers(0, 2**32),
)
def test_what_a_tensor_core_computes_is_right(
    mode: tuple[DType, DType, DType], kind_a: str, kind_b: str, m: int, n: int, k: int, seed: int
) -> None:
    operand, accumulate, output = mode
    rng = np.random.default_rng(seed)
    a, b = data(kind_a, (m, k), operand, rng), data(kind_b, (n, k), operand, rng).T
    check(rounded(tensor_core(a, b, operand, accumulate), output), a, b, accumulate, output).require()


@pytest.mark.parametrize(("operand", "accumulate", "output"), ALL_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_long_sums_too(operand: DType, accumulate: DType, output: DType, kind: str, rng: np.random.Generator) -> None:
    a, b = data(kind, (4, 6000), operand, rng), data(kind, (4, 6000), operand, rng).T
    check(rounded(tensor_core(a, b, operand, accumulate), output), a, b, accumulate, output).require()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 64, 1000, 4096])
def test_float32_is_right(kind: str, k: int, rng: np.random.Generator) -> None:
    a, b = data(kind, (20, k), BF16, rng), data(kind, (30, k), BF16, rng).T
    value = a.astype(np.float32) @ b.astype(np.float32)
    check(value, a, b, FP32, FP32).require()
    check(rounded(value.astype(np.float64), BF16), a, b, FP32, BF16).require()


@pytest.mark.parametrize(("operand", "accumulate", "output"), MODES)
def test_the_reference_itself_is_far_within(
    operand: DType, accumulate: DType, output: DType, rng: np.random.Generator
) -> None:
    a, b = (data("normal", (3, 16, 16), operand, rng) for _ in range(2))
    report = check(matmul(a, b, output), a, b, accumulate, output)
    report.require()
    assert report.ratio <= 1
    assert report.max_error > 0


def failing(out: np.ndarray, a: np.ndarray, b: np.ndarray, accumulate: DType, output: DType) -> Report:
    report = check(out, a, b, accumulate, output)
    assert not report.is_ok
    with pytest.raises(AssertionError, match="out of bound"):
        report.require()
    return report


@pytest.mark.parametrize(("operand", "accumulate", "output"), MODES)
@pytest.mark.parametrize("k", [64, 512])
def test_wrong_results_are_caught(
    operand: DType, accumulate: DType, output: DType, k: int, rng: np.random.Generator
) -> None:
    a, b = data("normal", (96, k), operand, rng), data("normal", (96, k), operand, rng).T
    good = matmul(a, b, output)
    check(good, a, b, accumulate, output).require()

    dropped = matmul(a[:, : k - 64], b[: k - 64], output)
    assert failing(dropped, a, b, accumulate, output).num_out_of_bound > 96 * 96 // 4

    transposed = good.copy()
    transposed[32:64, 32:64] = good[32:64, 32:64].T.copy()
    assert failing(transposed, a, b, accumulate, output).num_out_of_bound > 32 * 32 // 4

    poisoned = good.copy()
    poisoned[95, 94] = np.nan
    report = failing(poisoned, a, b, accumulate, output)
    assert (report.num_out_of_bound, report.ratio) == (1, np.inf)
    assert report.worst.startswith("(95, 94): got nan")


@pytest.mark.parametrize(("operand", "accumulate", "output"), [m for m in MODES if m[1] is FP32])
def test_one_element_off_by_one_percent(
    operand: DType, accumulate: DType, output: DType, rng: np.random.Generator
) -> None:
    a, b = data("normal", (48, 512), operand, rng), data("normal", (40, 512), operand, rng).T
    off = matmul(a, b, output)
    at = np.unravel_index(np.abs(off.astype(float)).argmax(), off.shape)
    off[at] = matmul_float64(a, b)[at] * 1.01  # of the rounded one, a bf16 may be no further off than rounding allows
    report = failing(off, a, b, accumulate, output)
    assert report.num_out_of_bound == 1
    assert report.worst.startswith(str(tuple(map(int, at))))


def test_the_constant_is_needed(rng: np.random.Generator) -> None:
    """Data exist for which a tensor core loses 4 / 5 of what the bound allows, so c can not be much smaller."""
    a, b = data("biased", (2, 8192), BF16, rng), data("biased", (2, 8192), BF16, rng).T
    assert 0.75 < check(tensor_core(a, b, BF16, FP32).astype(np.float32), a, b, FP32, FP32).ratio < 1


def test_subnormal_operands_are_aligned_as_normal_ones(rng: np.random.Generator) -> None:
    """2^-24 * 1 is aligned as 2^-14, so what is added to it loses more than its size tells."""
    a = np.full((1, 16), 2.0**-14) * rng.uniform(1, 2, (1, 16))
    b = np.full((16, 1), 2.0**-12) * rng.uniform(1, 2, (16, 1))
    a[0, 0], b[0, 0] = 2.0**-24, 1
    a, b = a.astype(np.float16), b.astype(np.float16)
    value = tensor_core(a, b, FP16, FP32).astype(np.float32)
    assert abs(value - matmul(a, b, FP32)).max() > 20 * 2.0**-23 * 2.0**-21
    check(value, a, b, FP32, FP32).require()


def test_a_loss_of_precision_breaks_the_norm_of_random_data(rng: np.random.Generator) -> None:
    """Sums rounded to fp16 after every 1024 of k: no element far off, the whole too far."""
    a, b = data("normal", (64, 8192), FP16, rng), data("normal", (64, 8192), FP16, rng).T
    good, sloppy = np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32)
    for k in range(0, 8192, 1024):
        part = matmul(a[:, k : k + 1024], b[k : k + 1024], FP32)
        good, sloppy = good + part, (sloppy + part).astype(np.float16).astype(np.float32)
    check(good, a, b, FP32, FP32, zero_mean=True).require()
    assert check(sloppy, a, b, FP32, FP32).is_ok
    report = check(sloppy, a, b, FP32, FP32, zero_mean=True)
    assert report.num_out_of_bound == 0
    assert not report.is_ok


@pytest.mark.parametrize(("operand", "accumulate", "output"), ALL_MODES)
@pytest.mark.parametrize("k", [1, 16, 48, 500, 4000])
def test_the_norm_of_random_data_holds(
    operand: DType, accumulate: DType, output: DType, k: int, rng: np.random.Generator
) -> None:
    a, b = data("normal", (12, k), operand, rng), data("normal", (12, k), operand, rng).T
    value = rounded(tensor_core(a, b, operand, accumulate), output)
    check(value, a, b, accumulate, output, zero_mean=True).require()


def test_cancellation_and_one_element_are_judged_fairly() -> None:
    """1000 - 1000 + 2^-10: the reference is tiny, its bound is not."""
    a = np.array([[1000, 2.0**-10, -1000]], np.float16)
    b = np.ones((3, 1), np.float16)
    check(np.array([[0]], np.float32), a, b, FP32, FP32).require()
    failing(np.array([[0.01]], np.float32), a, b, FP32, FP32)


def test_no_k_must_give_exact_zeros() -> None:
    a, b = np.empty((2, 0), np.float16), np.empty((0, 3), np.float16)
    check(np.zeros((2, 3), np.float16), a, b, FP32, FP16).require()
    failing(np.full((2, 3), 1e-7, np.float16), a, b, FP32, FP16)
    failing(np.full((2, 3), np.nan, np.float16), a, b, FP32, FP16)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (0, 2, 3)])
def test_nothing_to_compare_is_right(shape: tuple[int, ...]) -> None:
    a, b = np.ones((*shape[:-1], 4), np.float16), np.ones((*shape[:-2], 4, shape[-1]), np.float16)
    assert check(np.empty(shape, np.float16), a, b, FP32, FP16).is_ok


def test_batches_and_panels(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr("gemmsmith.backends.reference.bounds.PANEL_ELEMENTS", 40)
    a, b = rng.standard_normal((3, 11, 8)).astype(np.float16), rng.standard_normal((8, 10)).astype(np.float16)
    out = matmul(a, b, FP16)
    check(out, a, b, FP32, FP16).require()
    out[2, 9, 7] += 1
    assert failing(out, a, b, FP32, FP16).worst.startswith("(2, 9, 7)")
    check(matmul(a[:1], np.stack([b, b]), FP16), a[:1], np.stack([b, b]), FP32, FP16).require()


# -- overflow, NaN, Inf --------------------------------------------------------------------------------------------


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float16)


@pytest.mark.parametrize(
    ("terms", "accumulate", "value", "right"),
    [
        ([60000, 5000], FP32, 65504, False),  # 65000 is in range
        ([60000, 5000], FP32, 64992, True),
        ([60000, 5000], FP32, np.inf, False),
        ([60000, 6000], FP32, np.inf, True),  # 66000 is not
        ([60000, 6000], FP32, -np.inf, False),
        ([60000, 6000], FP32, 65504, False),
        ([60000, 6000, -6000], FP32, np.inf, False),  # fp32 holds the sum of the first two
        ([60000, 6000, -6000], FP16, np.inf, True),  # fp16 may not
        ([60000, 6000, -6000], FP16, 60000, True),
        ([60000, 6000, -6000], FP16, -np.inf, False),
        ([60000, 6000, -6000], FP16, np.nan, False),
        ([60000, 60000, -60000, -60000], FP16, np.nan, True),  # Inf - Inf, where K is split
        ([60000, 60000, -60000, -60000], FP16, -np.inf, True),
        ([60000, 60000, -60000, -60000], FP32, np.nan, False),
        ([np.inf, 1], FP32, np.inf, True),
        ([np.inf, 1], FP32, 65504, False),
        ([np.inf, 1], FP32, np.nan, False),
        ([np.inf, -np.inf], FP32, np.nan, True),
        ([np.inf, -np.inf], FP32, 0, False),
        ([np.nan, 1], FP32, np.nan, True),
        ([np.nan, 1], FP32, np.inf, False),
    ],
)
def test_what_is_not_finite(terms: list[float], accumulate: DType, value: float, right: bool) -> None:
    a = np.array([terms], np.float16)
    assert check(np.array([[value]], np.float16), a, ones(len(terms), 1), accumulate, FP16).is_ok is right


def test_one_nan_makes_one_row_and_no_other(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((8, 32)).astype(np.float16), rng.standard_normal((32, 8)).astype(np.float16)
    a[3, 5] = np.nan
    out = matmul(a, b, FP16)
    check(out, a, b, FP32, FP16).require()
    out[4, 0] = np.nan
    assert failing(out, a, b, FP32, FP16).num_out_of_bound == 1


@pytest.mark.parametrize(
    ("out", "accumulate", "message"),
    [
        (ones(2, 2).astype(np.float32), FP32, "out: got dtype float32; use fp16"),
        (ones(2, 3), FP32, r"out: got shape \(2, 3\); use \(2, 2\)"),
        (ones(2, 2), BF16, "accumulate: got bf16"),
    ],
)
def test_bad_arguments(out: np.ndarray, accumulate: DType, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check(out, ones(2, 4), ones(4, 2), accumulate, FP16)


@pytest.mark.parametrize("k", [0, 1, 700, 131_072])
def test_sums_of_integers_are_exact_modulo_2_to_the_32(k: int, rng: np.random.Generator) -> None:
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((9, k), (k, 11)))
    a[:3], b[:, :3] = -128, -128
    out = np.matmul(a.astype(np.int64), b.astype(np.int64)).astype(np.int32)
    assert check(out, a, b, INT32, INT32).ratio == 0
    out[3, 4] += 1
    assert check(out, a, b, INT32, INT32).num_out_of_bound == 1


@pytest.mark.parametrize("output", [FP32, FP16, BF16])
def test_scaled_sums_of_integers_have_three_roundings(output: DType, rng: np.random.Generator) -> None:
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((9, 700), (700, 11)))
    rows, whole = rng.uniform(0.5, 2, (9, 1)).astype(np.float32), np.asarray(1e-3, np.float32)
    sums = np.matmul(a.astype(np.int64), b.astype(np.int64)).astype(np.float32) * rows * whole
    options = {"scale_a": rows, "scale_b": whole}
    assert 0 < check(sums.astype(output.numpy), a, b, INT32, output, **options).ratio <= 1
    wrong = (sums * np.float32(1.02)).astype(output.numpy)
    assert not check(wrong, a, b, INT32, output, **options).is_ok


def test_a_norm_of_no_element_is_not_reported() -> None:
    """If nothing is finite there is no norm to compare."""
    a, b = np.ones((4, 8), np.float16), np.ones((8, 4), np.float16)
    wrong = check(np.full((4, 4), np.nan, np.float16), a, b, FP32, FP16)
    assert not wrong.is_ok
    assert "16 elements out of bound" in str(wrong)
    assert "Frobenius" not in str(wrong)
    assert "Frobenius 0 of at most" in str(check(a @ b, a, b, FP32, FP16))
