"""Random epilogue graphs of up to 20 nodes, and data for them: trees and DAGs over all functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Operand, Result

M, N = 12, 32
OPERANDS = {
    "scalar": Operand("scalar", BroadcastDims()),
    "device_scalar": Operand("device_scalar", BroadcastDims(), FP32),
    "row": Operand("row", BroadcastDims(columns_per_value=1), BF16),
    "column": Operand("column", BroadcastDims(rows_per_value=1), BF16),
    "matrix": Operand("matrix", BroadcastDims(rows_per_value=1, columns_per_value=1), BF16),
}
SHAPES = {"device_scalar": (), "row": (N,), "column": (M, 1), "matrix": (M, N)}
ANYWHERE = ["neg", "abs", "sign", "floor", "relu", "tanh", "sigmoid", "softplus", "erf", "gelu", "gelu_tanh", "silu",
            "mish", "hardswish", "sin", "cos"]  # fmt: skip
"""Defined and tame for every number."""
BINARY = ["add", "sub", "mul", "maximum", "minimum", "leaky_relu", "elu"]
COMPARISONS = ["lt", "le", "gt", "ge"]
POSITIVE = ["log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal"]
"""Of |x| + 1/2."""
BOUNDED = ["exp", "exp2", "expm1"]
"""Of tanh(x)."""
REDUCTIONS = ["sum", "mean", "max", "min", "logsumexp"]


@st.composite
def graphs(draw: st.DrawFn, reductions: bool = True) -> EpilogueGraph:
    """A graph whose values stay in a sane range; every node it draws is wrapped so that its domain holds."""
    nodes = [Node("accumulator")]
    names = draw(st.lists(st.sampled_from(sorted(OPERANDS)), max_size=3, unique=True))
    nodes += [Node("operand", (), name) for name in names]

    def add(op: str, *inputs: int, value: Any = None) -> int:
        nodes.append(Node(op, inputs, value))
        return len(nodes) - 1

    def constant(x: float) -> int:
        return add("constant", value=x)

    values = list(range(len(nodes)))
    for _ in range(draw(st.integers(1, 8))):
        x, y = (draw(st.sampled_from(values)) for _ in range(2))
        kind = draw(st.sampled_from(["any", "any", "binary", "binary", "constant", "where", "positive", "bounded"]))
        if kind == "any":
            values.append(add(draw(st.sampled_from(ANYWHERE)), x))
        elif kind == "binary":
            op = draw(st.sampled_from(BINARY))
            values.append(add(op, add("tanh", x), y) if op == "mul" else add(op, x, y))
        elif kind == "constant":
            c = constant(draw(st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 3.0, 0.25, 1.7])))
            values.append(add(draw(st.sampled_from(["add", "sub", "mul", "maximum", "minimum"])), x, c))
        elif kind == "where":
            values.append(add("where", add(draw(st.sampled_from(COMPARISONS)), x, constant(0.1)), x, y))
        elif kind == "positive":
            inside = add("add", add("abs", x), constant(0.5))
            values.append(add(draw(st.sampled_from(POSITIVE)), inside))
        else:
            values.append(add(draw(st.sampled_from(BOUNDED)), add("tanh", x)))
    out = add("add", values[-1], 0)  # depends on the product
    results = [Result("out", out, draw(st.sampled_from([None, FP32])))]
    if draw(st.booleans()):
        results.append(Result("aux", add("mul", add("tanh", draw(st.sampled_from(values))), 0), FP32))
    if reductions and draw(st.booleans()):
        axis = draw(st.sampled_from(["n", "m", "all"]))
        results.append(Result("reduced", add("reduce", out, value=(draw(st.sampled_from(REDUCTIONS)), axis))))
    read = [OPERANDS[name] for name in names]
    return EpilogueGraph(tuple(nodes), tuple(read), tuple(results))


def data(rng: np.random.Generator, graph: EpilogueGraph, shape: tuple[int, int] = (M, N)) -> dict[str, Any]:
    """Values for a graph's operands."""
    m, n = shape
    shapes: dict[str, tuple[int, ...]] = {"device_scalar": (), "row": (n,), "column": (m, 1), "matrix": (m, n)}
    made: dict[str, Any] = {}
    for o in graph.operands:
        if o.dtype is None:
            made[o.name] = float(rng.standard_normal())
        else:
            made[o.name] = rng.standard_normal(shapes[o.name]).astype(np.float32).astype(o.dtype.numpy)
    return made
