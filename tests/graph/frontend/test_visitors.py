"""Visitor trees against the formulas that they stand for, in float64; every way of writing a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.binding.graphs import bind_operands
from gemmsmith.core.dtypes import BF16, E4M3, FP32
from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph
from gemmsmith.graph.frontend.classify import classify
from gemmsmith.graph.frontend.interleave import deinterleave
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.frontend.visitors import (
    EVT,
    AccFetch,
    AuxLoad,
    AuxStore,
    ColBroadcast,
    ColReduction,
    Compute,
    RowBroadcast,
    RowReduction,
    ScalarBroadcast,
    ScalarReduction,
    SrcFetch,
    TopologicalVisitor,
    Visitor,
    Void,
)
from gemmsmith.graph.functions import FUNCTIONS

M, N = 6, 16
Array = np.ndarray[Any, Any]


def evaluated(graph: EpilogueGraph, acc: Array, operands: Mapping[str, Any]) -> dict[str, Array]:
    """The results in float64, without any rounding."""
    axes = {"n": -1, "m": -2, "all": None}
    reductions: dict[str, Callable[..., Array]] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
    reductions["logsumexp"] = lambda x, axis: np.log(np.exp(x).sum(axis))
    values: list[Any] = []
    for node in graph.nodes:
        x = [values[i] for i in node.inputs]
        match node.op:
            case "accumulator":
                value: Any = acc
            case "constant":
                value = node.attribute
            case "operand":
                value = np.asarray(operands[node.attribute], np.float64)
            case "chunk":
                value = deinterleave(x[0])[node.attribute[0]]
            case "cast":
                value = x[0]
            case "reduce":
                value = reductions[node.attribute[0]](np.broadcast_to(x[0], acc.shape), axis=axes[node.attribute[1]])
            case _:
                value = FUNCTIONS[node.op].reference(*x)
        values.append(value)
    return {r.name: values[r.node] for r in graph.results}


def matrices(count: int) -> Array:
    return np.random.default_rng().standard_normal((count, M, N))


def test_linear_combination() -> None:
    acc, c = matrices(2)
    tree = EVT(
        Compute("homogeneous_multiply_add"),
        ScalarBroadcast("beta"),
        SrcFetch(),
        EVT(Compute("multiplies"), ScalarBroadcast("alpha"), AccFetch()),
    )
    graph = tree.graph()
    assert {o.name: o.broadcast_dims for o in graph.operands} == {
        "beta": BroadcastDims(), "c": BroadcastDims(rows_per_value=1, columns_per_value=1), "alpha": BroadcastDims()
    }  # fmt: skip
    np.testing.assert_allclose(
        evaluated(graph, acc, {"beta": 0.25, "c": c, "alpha": 2.0})["out"], 2 * acc + 0.25 * c, rtol=1e-14
    )


def bce_formula(acc: Any, bias: Any, c: Any) -> Any:
    z = acc + bias
    return {"loss": ((c - 1) * z + z.sigmoid().clamp(1e-3, 1 - 1e-3).log()).sum()}


def bce_tree() -> Visitor:
    """7 compute nodes; the logits are used twice."""
    loss = TopologicalVisitor(
        [(), (), (0, 1), (), (3,), (2, 4), (2,), (6,), (7,), (5, 8), (9,)],
        AccFetch(), ColBroadcast("bias"), Compute("plus"),
        SrcFetch(), Compute("minus", 1), Compute("multiplies"),
        Compute("Sigmoid"), Compute("Clamp", 1e-3, 1 - 1e-3), Compute("log"),
        Compute("plus"), ScalarReduction("plus", "loss"),
    )  # fmt: skip
    return EVT(Void(), loss)


def test_binary_cross_entropy() -> None:
    """The worked example of extreme multi-label classification: as a formula, and as a topological tree."""
    (acc,), bias = 5 * matrices(1), np.random.default_rng().standard_normal((M, 1))
    c = np.random.default_rng().integers(0, 2, (M, N))
    graph = bce_tree().graph()
    assert [r.name for r in graph.results] == ["loss"]
    assert sum(n.op == "accumulator" for n in graph.nodes) == 1
    z = acc + bias
    loss = ((c - 1) * z + np.log(np.clip(1 / (1 + np.exp(-z)), 1e-3, 1 - 1e-3))).sum()
    np.testing.assert_allclose(evaluated(graph, acc, {"bias": bias, "c": c})["loss"], loss, rtol=1e-12)

    kinds = {"bias": classify("bias", (M, 1), (M, N)), "c": classify("c", (M, N), (M, N))}
    traced = trace(bce_formula, (M, N), {name: (extent, FP32) for name, extent in kinds.items()})
    bound = bind_operands(graph, {name: (extent, FP32) for name, extent in kinds.items()})
    assert sorted(n.op for n in bound.nodes) == sorted(n.op for n in traced.nodes)
    assert set(bound.operands) == set(traced.operands)
    np.testing.assert_allclose(evaluated(traced, acc, {"bias": bias, "c": c})["loss"], loss, rtol=1e-12)


@given(st.data())
def test_any_tree_means_its_formula(data: st.DataObject) -> None:
    """Random trees and graphs of binary nodes, nested in one another."""
    acc, c, aux = matrices(3)
    row, column = np.random.default_rng().standard_normal((1, N)), np.random.default_rng().standard_normal((M, 1))
    leaves: list[tuple[Callable[[], Visitor], Any]] = [
        (AccFetch, acc), (SrcFetch, c), (lambda: AuxLoad("aux"), aux), (lambda: RowBroadcast("row"), row),
        (lambda: ColBroadcast("column"), column), (lambda: ScalarBroadcast(0.5), 0.5),
    ]  # fmt: skip
    operators = {"plus": np.add, "minus": np.subtract, "multiplies": np.multiply, "maximum": np.maximum}

    def grown(depth: int) -> tuple[Visitor, Any]:
        shape = data.draw(st.sampled_from(["leaf", "tree", "graph"])) if depth else "leaf"
        if shape == "leaf":
            make, value = data.draw(st.sampled_from(leaves))
            return make(), value
        if shape == "tree":
            op = data.draw(st.sampled_from(sorted(operators)))
            (a, x), (b, y) = grown(depth - 1), grown(depth - 1)
            return EVT(Compute(op), a, b), operators[op](x, y)
        parts = [grown(depth - 1)]
        edges: list[tuple[int, ...]] = [()]
        for _ in range(data.draw(st.integers(1, 4))):
            op = data.draw(st.sampled_from(sorted(operators)))
            i, j = (data.draw(st.integers(0, len(parts) - 1)) for _ in range(2))
            edges.append((i, j))
            parts.append((Compute(op), operators[op](parts[i][1], parts[j][1])))
        return TopologicalVisitor(edges, *(node for node, _ in parts)), parts[-1][1]

    body, expected = grown(3)
    graph = EVT(Compute("plus"), AccFetch(), body).graph()
    got = evaluated(graph, acc, {"c": c, "aux": aux, "row": row, "column": column})["out"]
    np.testing.assert_allclose(got, acc + expected, rtol=1e-12)


def test_functions_by_their_own_names_and_by_cutlass_s() -> None:
    (acc,) = matrices(1)
    functors = {
        "GELU": "gelu", "GELU_taylor": "gelu_tanh", "ReLu": "relu", "Sigmoid": "sigmoid", "SiLu": "silu",
        "HardSwish": "hardswish", "Tanh": "tanh", "negate": "neg",
        **{name: name for name, f in FUNCTIONS.items() if f.arity == 1},
    }  # fmt: skip
    for functor, name in functors.items():
        with np.errstate(invalid="ignore", divide="ignore"):
            got = evaluated(EVT(Compute(functor), AccFetch()).graph(), acc, {})["out"]
            np.testing.assert_array_equal(got, FUNCTIONS[name].reference(acc))
    for functor, expected in {
        Compute("LeakyReLU", 0.1): np.where(acc > 0, acc, 0.1 * acc), Compute("Clamp", -1, 0.5): np.clip(acc, -1, 0.5),
        Compute("divides", 4): acc / 4, Compute("square"): acc * acc, Compute("Identity"): acc,
        Compute("multiply_add", 3, 1): 3 * acc + 1,
    }.items():  # fmt: skip
        np.testing.assert_allclose(evaluated(EVT(functor, AccFetch()).graph(), acc, {})["out"], expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("kind", "meaning"),
    {
        "sum": np.sum, "plus": np.sum, "mean": np.mean, "max": np.max, "minimum": np.min,
        "amax": lambda x, axis: np.abs(x).max(axis), "sum_of_squares": lambda x, axis: np.square(x).sum(axis),
        "logsumexp": lambda x, axis: np.log(np.exp(x).sum(axis)),
    }.items(),
)  # fmt: skip
def test_reductions_and_stores(kind: str, meaning: Callable[..., Array]) -> None:
    (acc,) = matrices(1)
    stored = EVT(AuxStore("z", "bf16"), EVT(Compute("negate"), AccFetch()))
    tree = EVT(ColReduction(kind, "column"), EVT(RowReduction(kind, "row"), EVT(Compute("exp"), stored)))
    graph = EVT(ScalarReduction(kind, "all"), tree).graph()
    assert [(r.name, r.dtype) for r in graph.results] == [
        ("out", None), ("z", BF16), ("row", None), ("column", None), ("all", None)
    ]  # fmt: skip
    got, y = evaluated(graph, acc, {}), np.exp(-acc)
    reduced = {"row": meaning(y, axis=0), "column": meaning(y, axis=1), "all": meaning(y, axis=None)}
    for name, value in {"out": y, "z": -acc, **reduced}.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12)


def test_bind_fills_in_batches_and_dtypes() -> None:
    tree = EVT(Compute("fma"), EVT(Compute("plus"), AccFetch(), RowBroadcast("bias")), ScalarBroadcast("s"), SrcFetch())
    given_ = {
        "bias": (BroadcastDims(columns_per_value=1), BF16),
        "s": (BroadcastDims(), None),
        "c": (BroadcastDims(True, 1, 1), E4M3),
    }
    bound = bind_operands(tree.graph(), given_)
    assert {o.name: (o.broadcast_dims, o.dtype) for o in bound.operands} == given_
    for change, message in [
        ({"bias": (BroadcastDims(rows_per_value=1), BF16)}, r"bias: got a column \(M, 1\); use a row \(N,\)"),
        ({"c": (BroadcastDims(columns_per_value=1), BF16)}, r"c: got a row \(N,\); use a matrix \(M, N\)"),
        ({"c": (BroadcastDims(rows_per_value=1, columns_per_value=2), BF16)}, r"c: got a matrix \(M, N/2\)"),
        ({"beta": (BroadcastDims(), None)}, "beta: given, but the epilogue reads bias, s, c"),
    ]:
        with pytest.raises(EpilogueError, match=message):
            bind_operands(tree.graph(), {**given_, **change})
    with pytest.raises(EpilogueError, match=r"s: not given; pass a scalar of that name"):
        bind_operands(tree.graph(), {k: v for k, v in given_.items() if k != "s"})


@pytest.mark.parametrize("product", [(1, 5), (7, 1), (1, 1), (3, 1, 5)])
def test_bind_where_m_or_n_is_1(product: tuple[int, ...]) -> None:
    """Then shapes do not tell rows, columns and matrices apart; the nodes do."""
    *batch, m, n = product
    leaves = {RowBroadcast("row"): (1, n), ColBroadcast("column"): (m, 1), AuxLoad("aux"): (*batch, m, n)}
    for leaf, shape in leaves.items():
        graph = EVT(Compute("plus"), AccFetch(), leaf).graph()
        bound = bind_operands(graph, {leaf.name: (classify(leaf.name, shape, product), FP32)}, product)
        assert bound.operands[0].broadcast_dims == graph.operands[0].broadcast_dims._replace(batch=len(shape) == 3)


def test_a_number_is_a_constant_and_leaves_are_shared() -> None:
    graph = EVT(Compute("plus"), EVT(Compute("mul"), AccFetch(), ScalarBroadcast(2)), AccFetch()).graph()
    assert [(n.op, n.attribute) for n in graph.nodes] == [
        ("accumulator", None), ("constant", 2.0), ("mul", None), ("add", None)
    ]  # fmt: skip
    assert graph.operands == ()
    assert graph == EVT(Compute("add"), EVT(Compute("multiply", 2.0), AccFetch()), AccFetch()).graph()
    assert "test_visitors.py" in graph.nodes[0].location


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EVT(Compute("plus"), AccFetch()), r"Compute\('plus'\) takes 2 inputs, got 1; use 2, or numbers"),
        (lambda: EVT(Compute("clamp"), AccFetch()), r"as in Compute\('clamp', 1, 1\)"),
        (lambda: EVT(AccFetch(), SrcFetch()), r"AccFetch\(\) takes no input, got 1; use 0"),
        (lambda: EVT(Compute("relu"), Compute("exp")), r"Compute\('exp'\), a child, takes 1 input; use EVT\(Compute"),
        (lambda: EVT(Compute("relu"), 3), r"got 3; use a visitor"),
        (lambda: Compute("geluu"), "got 'geluu'; use 'gelu'"),
        (lambda: Compute("relu", 1, 2), "use at most 1 numbers"),
        (lambda: Compute("relu", "x"), "use at most 1 numbers"),
        (lambda: ScalarBroadcast(None), "got NoneType; use a name or a number"),
        (lambda: ColReduction("product", "x"), "use a kind of amax, logsumexp, max, mean"),
        (lambda: TopologicalVisitor([(), (1,)], AccFetch(), Compute("relu")), r"edges\[1\]: got 1 .*use one of 0 to 0"),
        (lambda: TopologicalVisitor([(1,), ()], Compute("relu"), AccFetch()), r"edges\[0\]: got 1 for .*use \(\)"),
        (lambda: TopologicalVisitor([(), (0,)], AccFetch(), Compute("mul")), r"edges\[1\]: .*takes 2 inputs, got 1"),
        (lambda: TopologicalVisitor([()], AccFetch(), AccFetch()), "got 1 edges for 2 nodes"),
        (lambda: TopologicalVisitor([]), "got 0 edges for 0 nodes"),
        (lambda: EVT(Compute("relu"), EVT(Void(), AccFetch())), "Void is not the root"),
        (lambda: Compute("relu").graph(), r"takes 1 input; use EVT\(Compute\('relu'\), ...\)"),
        (lambda: EVT(Void(), AccFetch()).graph(), "nothing is stored"),
        (lambda: EVT(Compute("relu"), RowBroadcast("x")).graph(), "'out' does not depend on a matrix; use AccFetch"),
        (lambda: EVT(Compute("plus"), RowBroadcast("x"), ColBroadcast("x")).graph(),
         r"'x' is a row \(N,\) and a column \(M, 1\); use two names"),
        (lambda: EVT(AuxStore("c"), SrcFetch()).graph(), "'c' is the name of an operand and of a result"),
        (lambda: EVT(Compute("plus"), EVT(AuxStore("c"), AccFetch()), SrcFetch()).graph(), "'c' is the name of an"),
        (lambda: EVT(AuxStore("z"), EVT(AuxStore("z"), AccFetch())).graph(), "'z' is the name of two results"),
        (lambda: EVT(AuxStore("out"), AccFetch()).graph(), "'out' is D's name; use another"),
        (lambda: TopologicalVisitor([(), ()], AuxLoad("x"), AccFetch()).graph(), "'x': no result needs it"),
        (lambda: AuxLoad("a b").graph(), "got 'a b' as a name; use one that Python takes"),
        (lambda: EVT(Compute("plus"), AccFetch(), RowBroadcast(np.ones(9))).graph(), "got ndarray as a name"),
    ],
)  # fmt: skip
def test_errors_quote_the_line_and_say_what_would_work(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(EpilogueError, match=message) as error:
        make()
    assert "test_visitors.py" in str(error.value)


@pytest.mark.parametrize("node", [AuxLoad, RowBroadcast, ColBroadcast, ScalarBroadcast, AuxStore, RowReduction])
def test_names_are_required(node: type[Visitor]) -> None:
    with pytest.raises(TypeError, match="required positional"):
        node()


def test_repr_is_how_it_was_written() -> None:
    text = "EVT(Compute('Clamp', 0, 6), EVT(Compute('plus'), AccFetch(), RowBroadcast(name='bias')))"
    assert repr(eval(text)) == text
