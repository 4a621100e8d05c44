"""Derivatives of graphs against differences of the reference, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epilogue.graphs import M, N, data, graphs

import gemmsmith
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph
from gemmsmith.graph.frontend.derivative import ACCUMULATOR, derivative, tie_count_graph, with_saved_values
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.frontend.values import quantize, top_k_softmax

MATRIX, HALF = BroadcastDims(True, 1, 1), BroadcastDims(True, 1, 2)
KINDS = {
    "row": (BroadcastDims(columns_per_value=1), BF16),
    "column": (BroadcastDims(rows_per_value=1), BF16),
    "matrix": (MATRIX, BF16),
    "scalar": (BroadcastDims(), FP32),
    "number": (BroadcastDims(), None),
    "half_row": (BroadcastDims(columns_per_value=2), BF16),
}
SHAPES = {"row": (N,), "column": (M, 1), "matrix": (M, N), "scalar": (), "half_row": (N // 2,)}

Values = dict[str, Any]


def traced(function: Callable[..., Any], *names: str) -> EpilogueGraph:
    return trace(function, (M, N), {name: KINDS[name] for name in names})


def gradients(graph: EpilogueGraph, product: Any, operands: Values, of: Values, wanted: list[str]) -> Values:
    """As a caller computes them."""
    graph, stored = with_saved_values(graph, wanted, FP32)
    values = execute(graph, product, operands)
    given = {f"x_{name}": x for name, x in operands.items()}
    for r in graph.results:
        node, value, g = graph.nodes[r.node], values[r.name], of.get(r.name)
        if node.op == "reduce" and not r.keepdim:
            axis = {"n": -1, "m": -2, "all": ()}[node.attribute[1]]
            value, g = np.expand_dims(value, axis), np.expand_dims(g, axis)
        given[f"y_{r.name}"] = value
        if node.op == "reduce" and node.attribute[0] == "mean":
            g = g * (np.size(g) / product.size * (graph.broadcast_dims[node.inputs[0]].columns_per_value or 1))
        given[f"d_{r.name}"] = g
    for r in graph.results:
        node = graph.nodes[r.node]
        if node.op == "reduce" and node.attribute[0] in ("max", "min"):
            count = execute(tie_count_graph(graph, r.name, stored, FP32), product, given)["out"]
            given[f"d_{r.name}"] = given[f"d_{r.name}"] / count
    found = derivative(graph, list(of), wanted, stored, FP32)
    assert not any(node.op == "accumulator" for node in found.nodes)
    results = execute(found, np.full_like(product, np.nan), {o.name: given[o.name] for o in found.operands})
    return {name: results.get(f"g_{name}" if name else "out") for name in wanted}


def check(graph: EpilogueGraph, operands: Values, rng: np.random.Generator, step: float = 1e-6) -> None:
    """The derivative in a random direction, with random gradients of results."""
    product = rng.standard_normal((M, N))
    exact = {name: np.asarray(x, np.float64) for name, x in operands.items()}
    tensors = {o.name for o in graph.operands if o.dtype is not None}
    of = {r.name: rng.standard_normal(np.shape(x)) for r, x in
          zip(graph.results, execute(graph, product, exact).values(), strict=True)}  # fmt: skip
    places = {ACCUMULATOR: product, **{name: exact[name] for name in tensors}}
    along = {name: rng.standard_normal(np.shape(x)) for name, x in places.items()}

    def loss(t: float) -> float:
        moved = {name: x + t * along[name] for name, x in places.items()}
        results = execute(graph, moved.pop(ACCUMULATOR), {**exact, **moved})
        return sum(float((of[name] * x).sum()) for name, x in results.items())

    found = gradients(graph, product, exact, of, list(places))
    got = sum(float((np.asarray(g) * np.ones((1, 1)) * along[name]).sum() if name == ACCUMULATOR else
                    (np.asarray(g).reshape(np.shape(along[name])) * along[name]).sum())
              for name, g in found.items() if g is not None)  # fmt: skip
    want = (loss(step) - loss(-step)) / (2 * step)
    size = sum(float(np.abs(np.asarray(g)).sum()) for g in found.values() if g is not None)
    assert abs(got - want) <= 1e-6 * (1 + size), (got, want)


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 2**32 - 1))
def test_random_epilogues(graph: EpilogueGraph, seed: int) -> None:
    if any(node.op in ("floor", "sign") or node.op == "where" for node in graph.nodes):
        return  # the differences may step over an edge
    rng = np.random.default_rng(seed)
    apart = {name: x + 1e-3 * rng.standard_normal(np.shape(x)) for name, x in data(rng, graph).items()}
    check(graph, apart, rng)  # numbers of bf16 may be equal, and there a maximum has no derivative


def halves(acc, half_row):
    gate, up = gemmsmith.deinterleave(acc)
    return gate.silu() * up * half_row, gate.exp()


CASES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "every kind of operand": (
        lambda acc, row, column, matrix, scalar, number: (acc * row + column * number).tanh() * matrix * scalar,
        ("row", "column", "matrix", "scalar", "number"),
    ),
    "halves": (halves, ("half_row",)),
    "sums of what is linear": (lambda acc, row: ((acc + row).sum(), (acc * 2 + row).mean(-1)), ("row",)),
    "reductions": (lambda acc: (acc.logsumexp(-1), acc.amax(-2), acc.square().mean(), acc), ()),
    "extremes of what is stored": (lambda acc: (acc, acc.abs().amax(-1, keepdim=True), acc.min()), ()),
    "a loss": (lambda acc, row, matrix: ((matrix - 1) * (acc + row) + (acc + row).sigmoid().log()).sum(),
               ("row", "matrix")),
    "choices": (lambda acc, row: (acc * row).where(acc.exp() > row.exp(), acc).clamp(-1, 1), ("row",)),
    "powers": (lambda acc, row: (acc.abs() + 0.5) ** row.abs() + acc**3, ("row",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    function, operands = CASES[name]
    rng = np.random.default_rng()
    values = {x: rng.standard_normal(SHAPES[x]) if x != "number" else 0.7 for x in operands}
    check(traced(function, *operands), values, rng)


def gradient_of(
    function: Callable[..., Any], *names: str, wanted: tuple[str, ...] = (ACCUMULATOR,)
) -> tuple[EpilogueGraph, EpilogueGraph]:
    graph, stored = with_saved_values(traced(function, *names), wanted, BF16)
    return graph, derivative(graph, ["out"], wanted, stored, BF16)


def test_what_is_stored() -> None:
    """Nothing if linear; the result where it is enough; else one value before the activation."""
    for function, count in [(lambda acc, row: acc * 2 + row, 0), (lambda acc, row: acc * row, 0)]:
        graph, found = gradient_of(function, "row")
        assert len(graph.results) == 1
        assert sum(o.name.startswith("y_") for o in found.operands) == count
    for name in ("relu", "sigmoid", "tanh", "exp"):
        graph, found = gradient_of(lambda acc, row, name=name: getattr(acc + row, name)(), "row")
        assert [o.name for o in found.operands] == ["d_out", "y_out"]
        assert len(graph.results) == 1
    for name in ("gelu", "silu", "mish", "softplus"):
        graph, found = gradient_of(lambda acc, matrix, name=name: getattr(acc + matrix, name)(), "matrix")
        assert [o.name for o in found.operands] == ["d_out", "y__saved0"]
        assert [graph.nodes[r.node].op for r in graph.results] == [name, "add"]


def test_a_result_that_is_stored_anyway_is_used() -> None:
    graph, stored = with_saved_values(
        traced(lambda acc, row: ((acc + row).gelu(), acc + row), "row"), [ACCUMULATOR], BF16
    )
    assert len(graph.results) == 2
    assert stored == ("out1",)


def test_sums_are_shared_along_what_an_operand_is_not() -> None:
    _, found = gradient_of(lambda acc, row, column, scalar: acc * row * column * scalar, "row", "column", "scalar",
                           wanted=("row", "column", "scalar"))  # fmt: skip
    kinds = [found.nodes[r.node].attribute for r in found.results]
    assert kinds == [("sum", "m"), ("sum", "n"), ("sum", "all")]
    assert [(r.dtype, r.keepdim) for r in found.results] == [(BF16, True), (BF16, True), (FP32, True)]


@pytest.mark.parametrize("name", ["halves", "every kind of operand"])
def test_kernels_compute_derivatives(name: str) -> None:
    """In the simulator, as the epilogue of an empty product."""
    function, operands = CASES[name]
    rng = np.random.default_rng()
    graph, stored = with_saved_values(traced(function, *operands), [ACCUMULATOR], BF16)
    found = derivative(graph, ["out"], [ACCUMULATOR, *(x for x in operands if x != "number")][:4], stored, BF16)
    given: Values = {}
    for o in found.operands:
        extent = o.broadcast_dims
        shape = (M if extent.rows_per_value else 1, N // extent.columns_per_value if extent.columns_per_value else 1)
        x = rng.standard_normal(shape if extent.rows_per_value or extent.columns_per_value else ())
        given[o.name] = x.astype(o.dtype.numpy) if o.dtype else 0.7
    a, b = np.zeros((M, 0), BF16.numpy), np.zeros((0, N), BF16.numpy)
    simulated = gemmsmith.simulate(a, b, epilogue=found, operands=given)
    assert not simulated.hazards
    want = execute(found, np.zeros((M, N)), given)
    got = simulated.result if isinstance(simulated.result, dict) else {"out": simulated.result}
    for r in found.results:
        x, y = np.asarray(got[r.name], np.float64), want[r.name]
        np.testing.assert_allclose(x, y, rtol=2**-7, atol=2**-7 * np.abs(y).max())


def test_what_is_detached_has_no_gradient() -> None:
    _, found = gradient_of(lambda acc, row: acc * row.detach() + acc.exp().detach(), "row", wanted=(ACCUMULATOR, "row"))
    assert [r.name for r in found.results] == ["out"]
    assert sorted(node.op for node in found.nodes) == ["detach", "mul", "operand", "operand"]
    graph, stored = with_saved_values(traced(lambda acc: (acc.relu(), acc.detach().abs().amax())), [ACCUMULATOR], BF16)
    assert len(graph.results) == 2
    assert stored == ("out",)


@pytest.mark.parametrize("function", [lambda acc: quantize(acc, block=16), lambda acc: top_k_softmax(acc, 2)])
def test_what_has_no_gradient_is_refused(function) -> None:
    with pytest.raises(EpilogueError, match=r"it has no gradient; call it under torch\.no_grad"):
        with_saved_values(traced(function), [ACCUMULATOR], BF16)


def test_a_maximum_needs_what_it_is_of() -> None:
    graph = traced(lambda acc: acc.amax(-1))
    with pytest.raises(EpilogueError, match="max: its gradient needs its input"):
        derivative(graph, ["out"], [ACCUMULATOR], [], BF16)
