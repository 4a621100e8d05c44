"""Names and switches of a call, the same in every function that takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith.core.errors import ArgumentError

M, N, K = 16, 24, 32
A, B = np.ones((M, K), np.float16), np.ones((K, N), np.float16)


def plus(acc: Any, c: Any) -> Any:
    return acc + c


def _of_plan(method: str) -> Callable[..., Any]:
    def run(a: Any, b: Any, epilogue: Any, **given: Any) -> Any:
        return getattr(gemmsmith.plan(a, b, epilogue=epilogue, c=1.0), method)(a, b, **given)

    return run


CALLS: dict[str, Callable[..., Any]] = {
    "gemm": gemmsmith.gemm, "plan": gemmsmith.plan, "simulate": gemmsmith.simulate, "Plan.run": _of_plan("run"),
    "Plan.prepare": _of_plan("prepare"), "Plan.simulate": _of_plan("simulate"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("given", "message"), [
    ({"operands": [1.0]}, "operands: got list; use a dict, of arrays and numbers by name"),
    ({"operands": "c"}, "operands: got str; use a dict"),
    ({"operands": {1: 2.0}}, "operands: got the name 1; use a Python identifier"),
    ({"operands": {"c d": 2.0}}, "operands: got the name 'c d'; use a Python identifier"),
    ({"operands": {"class": 2.0}}, "operands: got the name 'class'; use a Python identifier"),
    ({"operands": {"scale of a": 2.0}}, "operands: got the name 'scale of a'; use a Python identifier"),
    ({"operands": {"c": 2.0}, "c": 3.0}, "c: got it in `operands` and by name; use either"),
])  # fmt: skip
def test_names_that_are_refused(call: Callable[..., Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(A, B, epilogue=plus, **given)


def test_an_operand_may_have_the_name_of_an_argument(rng: np.random.Generator) -> None:
    """It is that operand, whether or not the argument is given too."""
    a, b = rng.standard_normal((M, K)).astype(np.float16), rng.standard_normal((K, N)).astype(np.float16)
    column = rng.standard_normal((M, 1)).astype(np.float32)
    scale, product = rng.uniform(1, 2, (M, 1)).astype(np.float32), a.astype(float) @ b

    def function(acc: Any, scale_a: Any, fast_math: Any) -> Any:
        return (acc + scale_a) * fast_math

    given: dict[str, Any] = {"epilogue": function, "operands": {"scale_a": column, "fast_math": 2.0}}
    given["out_dtype"] = "fp32"
    for result in (gemmsmith.gemm(a, b, **given), gemmsmith.simulate(a, b, **given).result):
        np.testing.assert_allclose(result, (product + column) * 2, rtol=1e-4, atol=1e-4)
    for result in (
        gemmsmith.gemm(a, b, scale_a=scale, **given),
        gemmsmith.simulate(a, b, scale_a=scale, **given).result,
    ):
        np.testing.assert_allclose(result, (product * scale + column) * 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["scale", "operand"])
def test_a_result_over_a_scale_or_an_operand_of_its_name_is_refused(which: str) -> None:
    out, other = np.zeros((M, N), np.float32), np.ones((M, 1), np.float32)
    scale, operand = (out[:, :1], other) if which == "scale" else (other, out[:, :1])
    with pytest.raises(ArgumentError, match="out: overlaps scale_a; pass a separate array"):
        gemmsmith.gemm(A, B, out=out, out_dtype="fp32", epilogue=lambda acc, scale_a: acc * scale_a, scale_a=scale,
                       operands={"scale_a": operand})  # fmt: skip


@pytest.mark.parametrize("call", [gemmsmith.gemm, gemmsmith.plan, gemmsmith.simulate])
@pytest.mark.parametrize("name", ["fast_math", "deterministic", "batch_invariant"])
@pytest.mark.parametrize("given", ["yes", 1, 0, None, 1.0, np.ones(2)])
def test_a_switch_is_true_or_false(call: Callable[..., Any], name: str, given: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}: got .*; use True or False"):
        call(A, B, epilogue=plus, c=1.0, **{name: given})


@pytest.mark.parametrize("name", ["fast_math", "deterministic", "batch_invariant"])
def test_a_switch_may_be_numpys(name: str) -> None:
    for _ in range(2):
        given = gemmsmith.gemm(A, B, epilogue=plus, c=1.0, **{name: np.bool_(True)})
        np.testing.assert_array_equal(given, K + 1)
