"""Under torch.compile a result follows what its epilogue reads, or the compiler rejects the function."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.graph.frontend.test_staleness import PLACES, WRAPPERS, settings_module

from gemmsmith.torch import FusedLinear, gemm

pytestmark = pytest.mark.filterwarnings("ignore::gemmsmith.RetraceWarning", "ignore:Dynamo")
__all__ = ["settings_module"]  # the modules that some of them import

A, B = torch.ones(2, 16), torch.ones(16, 2)
VALUES = (1.0, 2.0, 0.5, 2.0)
UNSEEN = {"named_as_ours"} | ({"class_in_closure"} if torch.__version__ < "2.13" else set())
"""The compiler looks a function's module up by its name; before torch 2.13 it does not see, in any function, that an
attribute of a class has changed (docs/guides/pytorch.md says so)."""
COMPILED = [name for name in PLACES if name not in UNSEEN]


def expected(name: str, x: float) -> float:
    return 16 * (x * x if name == "descriptor" else x)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("whole", [True, False])
def test_compiled(name: str, whole: bool) -> None:
    """`whole`: one graph, or with breaks where the compiler cannot follow."""
    epilogue, change = PLACES[name](1.0)
    compiled = torch.compile(lambda: gemm(A, B, epilogue=epilogue), backend="eager", fullgraph=whole)
    for x in VALUES:
        change(x)
        try:
            result = compiled()
        except torch._dynamo.exc.TorchDynamoException:
            if not whole:
                raise
            return
        assert float(result[0, 0]) == expected(name, x)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_in_nests(name: str) -> None:
    epilogue, change = PLACES[name](1.0)
    wrapped = WRAPPERS[random.choice(["after", "default", "compose", "keyword partial"])](epilogue)
    compiled = torch.compile(lambda f: gemm(A, B, epilogue=f), backend="eager")
    for x in VALUES:
        change(x)
        plain = wrapped(torch.full((2, 2), 16.0)) if name != "own_builtins" else compiled(wrapped)
        torch.testing.assert_close(compiled(wrapped), plain)


@pytest.mark.parametrize("name", PLACES)
def test_with_gradients_and_in_a_layer(name: str) -> None:
    epilogue, change = PLACES[name](1.0)
    layer: Any = FusedLinear(16, 2, bias=False, activation=epilogue)
    with torch.no_grad():
        layer.weight.fill_(1)
    for x in VALUES:
        change(x)
        a = A.clone().requires_grad_()
        y = gemm(a, B, epilogue=epilogue)
        y.sum().backward()
        assert float(y[0, 0].detach()) == float(layer(A)[0, 0].detach()) == expected(name, x)
        assert float(a.grad[0, 0]) == expected(name, x) / 8
