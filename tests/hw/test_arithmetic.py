"""fp32 arithmetic: the PTX of each function, and its value against numpy."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from tests.hw.one import Forms, computed, ptx

from gemmsmith import hw
from gemmsmith.core.errors import KernelError
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32

FORMS: Forms = {
    "fma.rn.f32 %0, %1, %2, %3;": lambda k: hw.fma(float_of(k), 2.0, 3.0),
    "max.NaN.f32 %0, %1, %2;": lambda k: hw.maximum_nan(float_of(k), 2.0),
    "min.NaN.f32 %0, %1, %2;": lambda k: hw.minimum_nan(float_of(k), 2.0),
    "{ .reg .pred p; setp.ne.b32 p, %1, 0; selp.f32 %0, %2, %3, p; }": lambda k: hw.select(
        k.lane < 3, float_of(k), 4.0
    ),
    "{ .reg .pred less; setp.lt.f32 less, %1, %2; selp.f32 %0, %3, %4, less; }": lambda k: hw.select_less(
        float_of(k), 2.0, 3.0, 4.0
    ),
    "div.full.f32 %0, %1, %2;": lambda k: hw.divide_full(float_of(k), 2.0),
    "ex2.approx.ftz.f32 %0, %1;": lambda k: hw.sfu_approximation("ex2.approx.ftz", float_of(k)),
    "tanh.approx.f32 %0, %1;": lambda k: hw.sfu_approximation("tanh.approx", float_of(k)),
}

APPROXIMATE = {
    "ex2.approx.ftz": np.exp2, "lg2.approx.ftz": np.log2, "tanh.approx": np.tanh, "rcp.approx.ftz": np.reciprocal,
    "rsqrt.approx.ftz": lambda x: 1 / np.sqrt(x), "sqrt.approx.ftz": np.sqrt, "sin.approx.ftz": np.sin,
    "cos.approx.ftz": np.cos,
}  # fmt: skip
LIBRARY = {
    "expf": np.exp, "exp2f": np.exp2, "expm1f": np.expm1, "logf": np.log, "log2f": np.log2, "log1pf": np.log1p,
    "sinf": np.sin, "cosf": np.cos, "tanhf": np.tanh, "erff": np.vectorize(math.erf), "fabsf": np.abs,
    "floorf": np.floor, "rintf": np.rint, "sqrtf": np.sqrt,
}  # fmt: skip


def float_of(k: Builder):
    return k.lane.to(F32)


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


def test_functions_of_the_math_library_are_calls() -> None:
    with Builder("k", threads=32) as k:
        with k.when(hw.power(hw.math_library_call("erff", k.lane.to(F32)), 2.0) == 0):
            hw.sync_warp()
        source = k.finish().source
    assert "erff((float)lane)" in source
    assert "powf(" in source


def positive(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(0.01, 3, 100).astype(np.float32)


@pytest.mark.parametrize("function", APPROXIMATE)
def test_approximations_are_rounded_once(function: str, rng: np.random.Generator) -> None:
    x = positive(rng)
    found = computed(lambda v: hw.sfu_approximation(function, v), x)
    np.testing.assert_array_equal(found, APPROXIMATE[function](x.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("function", LIBRARY)
def test_functions_of_the_math_library(function: str, rng: np.random.Generator) -> None:
    x = positive(rng)
    found = computed(lambda v: hw.math_library_call(function, v), x)
    np.testing.assert_array_equal(found, LIBRARY[function](x.astype(np.float64)).astype(np.float32))


def test_fma_does_not_round_the_product(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(128).astype(np.float32) for _ in range(2))
    c = -(a * b)  # what is left is the error of the rounded product
    found = computed(hw.fma, a, b, c)
    want = a.astype(np.float64) * b.astype(np.float64) + c
    np.testing.assert_array_equal(found, want.astype(np.float32))
    assert np.count_nonzero(found) > 64


def test_fma_rounds_once(rng: np.random.Generator) -> None:
    """Products halfway between two numbers of fp32, with something far smaller added."""
    a = (1 + rng.integers(0, 2**12, 128) * 2.0**-12).astype(np.float32)
    c = (rng.choice([-1.0, 1.0], 128) * 2.0 ** rng.integers(-90, -60, 128)).astype(np.float32)
    found = computed(hw.fma, a, a, c)
    exact = [Fraction(float(x)) ** 2 + Fraction(float(y)) for x, y in zip(a, c, strict=True)]
    for x, want in zip(found, exact, strict=True):
        near = [
            abs(Fraction(float(y)) - want) for y in (x, np.nextafter(x, np.float32(9)), np.nextafter(x, np.float32(0)))
        ]
        assert near[0] == min(near)
    rounded_twice = (a.astype(np.float64) ** 2 + c).astype(np.float32)
    assert (found != rounded_twice).any()


def test_zeros_have_signs() -> None:
    zero = np.zeros(128, np.float32)
    for a, b in ((zero, -zero), (-zero, zero)):
        assert not np.signbit(computed(hw.maximum_nan, a, b)).any()
        assert np.signbit(computed(hw.minimum_nan, a, b)).all()
    assert np.signbit(computed(hw.maximum_nan, -zero, -zero)).all()


def test_division_and_powers(rng: np.random.Generator) -> None:
    a, b = positive(rng), positive(rng)
    wide = a.astype(np.float64), b.astype(np.float64)
    np.testing.assert_array_equal(computed(hw.divide_full, a, b), np.divide(*wide).astype(np.float32))
    np.testing.assert_array_equal(computed(hw.power, a, b), np.power(*wide).astype(np.float32))


def test_the_larger_and_the_smaller_of_nan_are_nan(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(128).astype(np.float32) for _ in range(2))
    a[::5], b[::7] = np.nan, np.nan
    some = np.isnan(a) | np.isnan(b)
    for found, want in (
        (computed(hw.maximum_nan, a, b), np.fmax(a, b)),
        (computed(hw.minimum_nan, a, b), np.fmin(a, b)),
    ):
        np.testing.assert_array_equal(found, np.where(some, np.float32(np.nan), want))


def test_selection(rng: np.random.Generator) -> None:
    a, b, x, y = (rng.standard_normal(128).astype(np.float32) for _ in range(4))
    a[::5], b[::7] = np.nan, np.nan
    np.testing.assert_array_equal(computed(hw.select_less, a, b, x, y), np.where(a < b, x, y))
    found = computed(lambda *v: hw.select(v[0] < v[1], v[2], v[3]), a, b, x, y)
    np.testing.assert_array_equal(found, np.where(a < b, x, y))


def test_functions_that_do_not_exist() -> None:
    with Builder("k", threads=32) as k:
        with pytest.raises(KernelError, match=r"^'ex2': use one of ex2\.approx\.ftz, lg2\.approx\.ftz, "):
            hw.sfu_approximation("ex2", k.lane.to(F32))
        with pytest.raises(KernelError, match=r"^'exp': use one of expf, exp2f, "):
            hw.math_library_call("exp", k.lane.to(F32))
