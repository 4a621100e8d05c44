"""The approximate functions against float64, over all of fp32, with the largest errors of the special-function unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gemmsmith.graph.functions import FUNCTIONS, Lowering
from gemmsmith.hw.arithmetic import SfuApproximation
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.instruction import Result
from gemmsmith.lang.types import F32, PRED, U32
from gemmsmith.lang.values import Constant, Operation, Value

Array = np.ndarray[Any, Any]
SFU_ERROR = 2.0**-22.4
"""Relative error of ex2 and rcp, and of lg2, which has it absolute from 1/2 to 2, as stated in hw/arithmetic.py."""
TANH_ERROR = 2.0**-11
DEFAULT, APPROXIMATE = 2.0**-18, 2.0**-11 + 2.0**-24
EXPONENTIALS = dict.fromkeys(("exp", "expm1"), 2.0**-17.9)
"""Of results beyond 2^64, whose exponents have fewer bits left behind the point."""
RELATIVE = {"log1p": 0.0, "expm1": 0.0, "tanh": 0.0, "erf": 0.0, "elu": 0.0, "softplus": 2.0**-60, "exp": 2.0**-60,
            "sigmoid": 2.0**-60}  # fmt: skip
"""Functions whose error is relative to their value where that is larger than this; that of the others is relative to 1
below 1."""
NAMES = [*RELATIVE, "logaddexp", "gelu", "ndtr", "gelu_tanh", "silu", "mish"]
OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "neg": np.negative, "select": np.where, "&": np.bitwise_and,
    "|": np.bitwise_or, "<": np.less, ">": np.greater, "==": np.equal,
}  # fmt: skip


class Evaluation:
    """Evaluates recorded values on arrays of any size; each result of the special-function unit is off by at most its
    error times `disturb(shape)`, in [-1, 1]."""

    def __init__(self, inputs: dict[Value, Array], disturb: Callable[[Any], Array | float]) -> None:
        self.known, self.disturb = dict(inputs), disturb

    def per_thread(self, value: Any) -> Any:
        if isinstance(value, Constant):
            return {F32: np.float32, U32: np.uint32, PRED: np.bool_}[value.type](value.value)
        if value not in self.known:
            self.known[value] = self._compute(value)
        return self.known[value]

    def _compute(self, value: Value) -> Array:
        if isinstance(value, Operation):
            return np.asarray(OPERATIONS[value.op](*(self.per_thread(x) for x in value.operands)))
        assert isinstance(value, Result)
        result = value.instruction.simulate(self)  # type: ignore[arg-type]
        if isinstance(value.instruction, SfuApproximation):
            return self._disturbed(value.instruction.function, result)
        return result.astype(np.uint32) if value.type == U32 else np.asarray(result)

    def _disturbed(self, function: str, y: Array) -> Array:
        wide = y.astype(np.float64)
        off = wide * (TANH_ERROR if function == "tanh.approx" else SFU_ERROR)
        if function == "lg2.approx.ftz":
            off = np.where(np.abs(wide) < 1, SFU_ERROR, off)
        disturbed = np.where(np.isfinite(y), wide + off * self.disturb(y.shape), y).astype(np.float32)
        return np.clip(disturbed, -1, 1) if function == "tanh.approx" else disturbed


def evaluated(lowering: Lowering, inputs: list[Array], disturb: Callable[[Any], Array | float]) -> Array:
    with Builder("k", threads=32), np.errstate(all="ignore"):
        values = [Value(F32, f"x{i}") for i in range(len(inputs))]
        return np.asarray(Evaluation(dict(zip(values, inputs, strict=True)), disturb).per_thread(lowering(*values)))


def samples(rng: np.random.Generator, count: int = 1 << 18) -> Array:
    """Return numbers of all exponents, others from -20 to 20, and some of the neighborhood of each exponent's first."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    powers = np.arange(0, 1 << 32, 1 << 23, dtype=np.uint32)
    near = (powers[:, None] + np.arange(-4, 5, dtype=np.int64)).astype(np.uint32).ravel()
    return np.concatenate(
        [bits.view(np.float32), near.view(np.float32), rng.uniform(-20, 20, count).astype(np.float32)]
    )


def worst(name: str, found: Array, expected: Array, relative_to: Array | float) -> float:
    """Return the maximum error, relative to the value or to `relative_to`; values that are not finite must be equal."""
    overflow = np.abs(expected) > np.finfo(np.float32).max * (1 - 2.0**-18)
    finite = np.isfinite(expected) & ~overflow
    with np.errstate(all="ignore"):
        as_float32 = expected.astype(np.float32)
        same = (found == as_float32) | (np.isnan(found) & np.isnan(expected)) | (overflow & (np.abs(found) > 3.4e38))
        assert same[~finite].all(), (name, found[~finite & ~same][:4], expected[~finite & ~same][:4])
        error = np.abs(found.astype(np.float64) - expected)[finite]
        least = np.maximum(np.abs(expected), relative_to)[finite]
        bits = np.where(np.abs(expected[finite]) < np.finfo(np.float32).smallest_normal, 2.0**-149, 0)
        return float((np.maximum(error - bits, 0) / np.where(least == 0, 1, least)).max())


def inputs_of(name: str, rng: np.random.Generator) -> list[Array]:
    x = samples(rng)
    if name == "logaddexp":
        near = (x + rng.uniform(-20, 20, x.shape)).astype(np.float32)
        return [x, np.where(rng.random(x.shape) < 0.5, rng.permutation(x), near)]
    return [x, np.full_like(x, 1.5)] if name == "elu" else [x]


def off(rng: np.random.Generator) -> list[Callable[[Any], Any]]:
    """Return the errors of the special-function unit that are tried: none, all of one sign, and random ones."""
    return [lambda s: 0, lambda s: 1, lambda s: -1, lambda s: rng.choice([-1.0, 1.0], s)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_within_the_stated_error(name: str) -> None:
    """Errors of the coarse forms of silu and of gelu_tanh are relative to |x| where that is above 1."""
    rng, function = np.random.default_rng(0), FUNCTIONS[name]
    with np.errstate(all="ignore"):
        inputs = inputs_of(name, rng)
        expected = function.reference(*(x.astype(np.float64) for x in inputs))
    stated, least = EXPONENTIALS.get(name, DEFAULT), RELATIVE.get(name, 1.0)
    coarse = np.maximum(1, np.abs(inputs[0])) if name in ("silu", "gelu_tanh") else 1.0
    for disturb in off(rng):
        assert worst(name, evaluated(function.lower, inputs, disturb), expected, least) <= stated
        if function.approx:
            assert worst(name, evaluated(function.approx, inputs, disturb), expected, coarse) <= APPROXIMATE


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_softplus_of_sigmoid(sign: int) -> None:
    """From sigmoid(x) or sigmoid(-x)."""
    rng, sigmoid, function = np.random.default_rng(0), FUNCTIONS["sigmoid"], FUNCTIONS["softplus_of_sigmoid"]
    x = samples(rng)
    with np.errstate(all="ignore"):
        expected = np.logaddexp(0, x.astype(np.float64))
    assert function.approx
    for lowering, stated in ((function.lower, DEFAULT), (function.approx, APPROXIMATE)):
        for disturb in off(rng):
            found = evaluated(lambda v, f=lowering: f(v, sigmoid.lower(v if sign > 0 else -v)), [x], disturb)
            # with sigmoid(-x), 1 - sigmoid(-x) is not relative to its value
            assert worst("softplus", found, expected, 2.0**-60 if sign > 0 else 1.0) <= stated
