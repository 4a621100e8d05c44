"""Elementwise functions as ptxas compiles them: the instructions that the table states, and no branches."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import pytest

import gemmsmith
from benchmarks.fit.function_costs import costs
from benchmarks.fit.polynomials import FITS
from gemmsmith import Config, Spec
from gemmsmith.core.dtypes import BF16, FP32, DType
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.approximations import POLYNOMIALS
from gemmsmith.graph.frontend.derivative import derivative
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.function_costs import COSTS
from gemmsmith.graph.functions import FUNCTIONS
from gemmsmith.graph.precision import epilogue_cost

WITHOUT_BRANCHES = ("log1p", "expm1", "softplus", "erf", "gelu", "tanh", "gelu_tanh", "sigmoid", "silu", "mish", "elu",
                    "logaddexp")  # fmt: skip
MATRIX = BroadcastDims(True, 1, 1)


@pytest.mark.parametrize("name", FITS)
def test_polynomials_are_those_that_are_fitted(name: str) -> None:
    coefficients, error = FITS[name].coefficients()
    np.testing.assert_allclose(POLYNOMIALS[name], coefficients, rtol=1e-5)
    assert error < (2.0**-11 if name.endswith("_approx") else 2.0**-19.5)
    assert POLYNOMIALS.keys() == FITS.keys()


@pytest.mark.slow
def test_the_table() -> None:
    """Special functions and branches exactly; instructions to a tenth, since the compiler's version changes them."""
    found = costs()
    assert found.keys() == {(name, precision) for name, costs in COSTS.items() for precision in costs}
    for (name, precision), cost in found.items():
        expected = COSTS[name][precision]
        assert cost.instructions == pytest.approx(expected.instructions, rel=0.1, abs=0.5), (name, precision)
        if precision != "exact":
            assert (cost.special, cost.branches) == (expected.special, expected.branches), (name, precision)


@pytest.mark.parametrize("name", WITHOUT_BRANCHES)
def test_no_branches(name: str) -> None:
    branches = {precision: cost.branches for precision, cost in COSTS[name].items()}
    assert "default" in branches
    assert not any(count for precision, count in branches.items() if precision != "exact")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", WITHOUT_BRANCHES)
def test_gradients_have_no_branches(name: str, dtype: DType) -> None:
    """As many as a kernel that multiplies by the upstream gradient."""
    arity = FUNCTIONS[name].arity
    forward = trace(
        lambda acc, x: getattr(x, name)(acc) if arity == 2 and name != "elu" else
        x.gelu(approximate="tanh") if name == "gelu_tanh" else getattr(x, name)(),
        (256, 256), {"x": (MATRIX, FP32)},
    )  # fmt: skip
    graph = derivative(forward, ["out"], ["x"], [], dtype)

    assert branches(graph, dtype, *(o.name for o in graph.operands)) <= branches_of_a_product(dtype)


def branches(epilogue: object, dtype: DType, *names: str) -> int:
    plan = gemmsmith.plan(
        Spec((256, 64), "bf16"), Spec((64, 256), "bf16"), epilogue=epilogue, out_dtype=str(dtype),
        operands={key: Spec((256, 256), str(dtype) if key.startswith("d_") else "fp32") for key in names},
        config=Config(tile=(128, 128, 64)),
    )  # fmt: skip
    assert not plan.resources.spill_store_bytes
    return len(re.findall("BSSY|CALL", plan.sass))


@lru_cache
def branches_of_a_product(dtype: DType) -> int:
    return branches(lambda acc, d_out, x_x: (acc + x_x) * d_out, dtype, "d_out", "x_x")


@pytest.mark.slow
def test_sums_of_functions_have_no_branches() -> None:
    """Elements out of bounds are masked without a branch around the others' functions."""
    operands = {"labels": Spec((256, 256), "bf16")}
    count = [
        gemmsmith.plan(
            Spec((256, 64), "bf16"), Spec((64, 256), "bf16"), epilogue=epilogue, operands=operands,
            config=Config(tile=(128, 128, 64)),
        ).sass.count("BSSY")
        for epilogue in (
            lambda acc, labels: (acc - labels, (acc * labels).sum()),
            lambda acc, labels: (acc.sigmoid() - labels, (acc.softplus() - acc * labels).sum()),
        )
    ]  # fmt: skip
    assert count[0] == count[1]


def test_the_cost_of_an_epilogue() -> None:
    """Functions of rows are free; results in bf16 take the coarse forms; `plan.why` states it."""
    operands = {"bias": (BroadcastDims(columns_per_value=1), FP32)}
    graph = trace(lambda acc, bias: (acc + bias.exp()).tanh(), (256, 256), operands)
    expected = [COSTS["add"]["default"], COSTS["tanh"]["approx"]]
    assert epilogue_cost(graph, True).instructions == pytest.approx(sum(x.instructions for x in expected))
    in_fp32 = trace(lambda acc, bias: (acc + bias.exp()).tanh().to("fp32"), (256, 256), operands)
    assert epilogue_cost(in_fp32, True).special == COSTS["tanh"]["default"].special
    a, b = Spec((256, 64), "bf16"), Spec((64, 256), "bf16")
    why = gemmsmith.plan(a, b, epilogue=lambda acc: acc.tanh() * 2).why
    assert "; 2 instructions an element, 1 special" in why
    assert "an element" not in gemmsmith.plan(a, b).why
