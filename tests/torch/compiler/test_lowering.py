"""What Inductor's generated code calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

import gemmsmith.torch as gt


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    with fresh_cache():
        torch._dynamo.reset()
        yield


def layer(x: Any, w: Any, bias: Any) -> Any:
    return torch.relu(x @ w + bias)


@torch.compiler.nested_compile_region
def region(x: Any, w: Any, bias: Any) -> Any:
    return torch.relu(x @ w + bias)


def of_regions(x: Any, w: Any, bias: Any) -> Any:
    return region(region(x, w, bias), w, bias)


def of_branches(x: Any, w: Any, bias: Any) -> Any:
    return torch.cond(
        x.sum() > 0, lambda x: torch.relu(x @ w + bias), lambda x: torch.sigmoid(x @ w + bias), (x,)
    )  # fmt: skip


def is_close(actual: Any, function: Any, *operands: Any) -> bool:
    """Whether fp32 results of up to two layers of 32 products and a bias are those of float64, but for rounding."""
    expected, magnitude = (function(*(convert(x.double()) for x in operands)) for convert in (torch.clone, torch.abs))
    return bool(((actual - expected).abs() <= 2 * (32 + 2) * 2.0**-24 * magnitude).all())


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize(("function", "calls"), [(layer, 1), (of_regions, 1), (of_branches, 2)])
@torch.no_grad()
def test_each_call_is_defined_once_in_the_module(function: Any, calls: int, partition: bool) -> None:
    x, w, bias = torch.randn(32, 32), torch.randn(32, 32), torch.randn(32)
    compiled = torch.compile(function, options=gt.options(graph_partition=partition))
    actual, (code,) = run_and_get_code(compiled, x, w, bias)
    assert is_close(actual, function, x, w, bias)
    assert code.count(" = CompiledCall(torch.ops.gemmsmith.gemm_1.default)\n") == calls
    assert code.count("import CompiledCall\n") == 1
    assert is_close(compiled(-x, w, bias), function, -x, w, bias)


def test_a_training_step_with_shapes_that_change() -> None:
    compiled, w = torch.compile(layer, dynamic=True, options=gt.options()), torch.randn(16, 32, requires_grad=True)
    for rows in (8, 24, 40):
        x, bias = torch.randn(rows, 16, requires_grad=True), torch.randn(32, requires_grad=True)
        cotangent = torch.randn(rows, 32)
        actual, expected = (
            torch.autograd.grad(f(x, w, bias), (x, w, bias), cotangent) for f in (compiled, layer)
        )  # fmt: skip
        torch.testing.assert_close(actual, expected)
