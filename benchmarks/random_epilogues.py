"""Random epilogue graphs, trees and DAGs over all functions.

`speed.heavy` times them; tests draw them through hypothesis.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Operand, Result
from gemmsmith.graph.passes.rewrite import eliminate_dead_code

OPERANDS = {
    "scalar": Operand("scalar", BroadcastDims()),
    "device_scalar": Operand("device_scalar", BroadcastDims(), FP32),
    "row": Operand("row", BroadcastDims(columns_per_value=1), BF16),
    "column": Operand("column", BroadcastDims(rows_per_value=1), BF16),
    "matrix": Operand("matrix", BroadcastDims(rows_per_value=1, columns_per_value=1), BF16),
}
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


def drawn(one_of: Callable[[Sequence[Any]], Any], most: int = 8, reductions: bool = True) -> EpilogueGraph:
    """Return a graph of up to `most` functions, whose values stay in a sane range: their arguments are in their domain.

    `one_of` draws from a sequence.
    """
    nodes, left = [Node("accumulator")], sorted(OPERANDS)
    names = [left.pop(one_of(range(len(left)))) for _ in range(one_of(range(4)))]
    nodes += [Node("operand", (), name) for name in names]

    def add(op: str, *inputs: int, value: Any = None) -> int:
        nodes.append(Node(op, inputs, value))
        return len(nodes) - 1

    def constant(x: float) -> int:
        return add("constant", value=x)

    values = list(range(len(nodes)))
    for _ in range(one_of(range(1, most + 1))):
        x, y = one_of(values), one_of(values)
        kind = one_of(["any", "any", "binary", "binary", "constant", "where", "positive", "bounded"])
        if kind == "any":
            values.append(add(one_of(ANYWHERE), x))
        elif kind == "binary":
            op = one_of(BINARY)
            values.append(add(op, add("tanh", x), y) if op == "mul" else add(op, x, y))
        elif kind == "constant":
            c = constant(one_of([0.0, 1.0, -1.0, 0.5, 2.0, 3.0, 0.25, 1.7]))
            values.append(add(one_of(["add", "sub", "mul", "maximum", "minimum"]), x, c))
        elif kind == "where":
            values.append(add("where", add(one_of(COMPARISONS), x, constant(0.1)), x, y))
        elif kind == "positive":
            inside = add("add", add("abs", x), constant(0.5))
            values.append(add(one_of(POSITIVE), inside))
        else:
            values.append(add(one_of(BOUNDED), add("tanh", x)))
    out = add("add", values[-1], 0)  # depends on the product
    results = [Result("out", out, one_of([None, FP32]))]
    if one_of([False, True]):
        results.append(Result("aux", add("mul", add("tanh", one_of(values)), 0), FP32))
    if reductions and one_of([False, True]):
        axis = one_of(["n", "m", "all"])
        results.append(Result("reduced", add("reduce", out, value=(one_of(REDUCTIONS), axis))))
    read = [OPERANDS[name] for name in names]
    return EpilogueGraph(tuple(nodes), tuple(read), tuple(results))


def of_size(nodes: int, seed: int) -> EpilogueGraph:
    """Return a random graph of so many nodes, all of which its results need."""
    draw = random.Random(seed).random  # which gives the same numbers in every Python

    def one_of(options: Sequence[Any]) -> Any:
        return options[int(draw() * len(options))]

    while True:
        graph = eliminate_dead_code(drawn(one_of, nodes))
        if len(graph.nodes) == nodes:
            return graph
