"""The PyTorch fallback against the reference, in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from tests.epilogue.graphs import M, N, data, graphs
from tests.epilogues import CASES, function_graph
from tests.torch.test_graph_serialization import SHAPES, kinds_of

from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.core.errors import DeviceError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.functions import FUNCTIONS
from gemmsmith.torch.fallback import evaluate_graph, kernels_unsupported, matmul, round_to_dtype


def same(graph: EpilogueGraph, product, operands) -> None:
    exact = {name: x if isinstance(x, float) else torch.as_tensor(x.astype("f8")) for name, x in operands.items()}
    expected = execute(graph, product.numpy(), {n: x if isinstance(x, float) else x.numpy() for n, x in exact.items()})
    for name, actual in evaluate_graph(graph, product, exact).items():
        torch.testing.assert_close(
            actual, torch.from_numpy(expected[name].astype("f8")), rtol=1e-9, atol=1e-9, equal_nan=True
        )


@settings(max_examples=40, deadline=None)
@given(graph=graphs())
def test_random_graphs(graph: EpilogueGraph) -> None:
    rng = torch.Generator().manual_seed(0)
    import numpy as np

    same(graph, torch.randn(M, N, dtype=torch.float64, generator=rng), data(np.random.default_rng(0), graph))


@pytest.mark.parametrize("name", [n for n in CASES if "quantized" not in n and n != "top_k_softmax"])
def test_every_kind_of_node(name: str) -> None:
    graph = trace(CASES[name].function, (6, 32), kinds_of(name))
    operands = {}
    for operand, spelled in CASES[name].operands.items():
        kind, _, dtype = spelled.partition(":")
        x = torch.randn(SHAPES.get(kind, ()), dtype=torch.float64)
        whole = (x * 3).round() if kind == "labels" or "int" in dtype else (x > 0).double() if dtype else x
        operands[operand] = 0.7 if kind == "number" else whole.numpy()
    same(graph, torch.randn(6, 32, dtype=torch.float64), operands)


def test_other_gpus_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A100")
    for capability, falls_back in (((9, 0), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, value=capability: value)
        kernels_unsupported.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [kernels_unsupported(0) for _ in range(3)] == [falls_back] * 3
        assert ["falling back to PyTorch ops on A100" in str(w.message) for w in caught] == [True] * falls_back
    kernels_unsupported.cache_clear()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function(name: str) -> None:
    graph, _ = function_graph(name)
    same(graph, torch.randn(6, 32, dtype=torch.float64) * 3, {})


def test_ops_without_a_torch_equivalent_are_rejected() -> None:
    graph = trace(CASES["top_k_softmax"].function, (6, 32), {})
    with pytest.raises(DeviceError, match="top_k_softmax: not supported in the PyTorch fallback"):
        evaluate_graph(graph, torch.randn(6, 32), {})


def test_products_of_fp8() -> None:
    a = torch.randn(4, 8).to(torch.float8_e4m3fn)
    torch.testing.assert_close(matmul(a, a.T), a.float() @ a.float().T)


def test_products_of_int8_are_exact_and_wrap() -> None:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((2, 140_001), (140_001, 3)))
    a[0], b[:, 0], b[:, 1] = 127, 127, -128
    assert torch.equal(matmul(a, b).int(), (a.long() @ b.long()).int())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_saturates(dtype: torch.dtype) -> None:
    name, limit = {torch.float8_e4m3fn: ("fp8_e4m3", 448.0), torch.float8_e5m2: ("fp8_e5m2", 57344.0)}[dtype]
    graph = trace(lambda acc: acc.to(name).float() * 2, (1, 4), {})
    x = torch.tensor([[1e30, -torch.inf, torch.nan, 1.06]])
    expected = torch.tensor([[limit, -limit, torch.nan, 1.0]])
    torch.testing.assert_close(evaluate_graph(graph, x, {})["out"], 2 * expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(round_to_dtype(x, dtype).float(), expected, rtol=0, atol=0, equal_nan=True)
