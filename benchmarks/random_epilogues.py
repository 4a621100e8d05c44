"""Random epilogue graphs, trees and DAGs over all functions, and what their results may be off by.

`speed.heavy` times them; tests draw them through hypothesis.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gemmsmith.core.dtypes import BF16, FP32, DType
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Operand, Result
from gemmsmith.graph.functions import FUNCTIONS
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
PATTERNS = 16
"""Graphs with disturbed values that show how sensitive results are. Chosen; not measured."""


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


def disturbed(graph: EpilogueGraph, signs: Sequence[int]) -> EpilogueGraph:
    """Return the graph with every value off by what a coarse function may lose, up or down."""
    nodes: list[Node] = []
    place: list[int] = []
    for node, sign in zip(graph.nodes, signs, strict=True):
        nodes.append(replace(node, inputs=tuple(place[i] for i in node.inputs)))
        if node.op == "accumulator" or (node.op in FUNCTIONS and not node.operation.is_predicate):
            at, loss = len(nodes) - 1, sign * 2.0**-11
            nodes += [Node("constant", (), 1 + loss), Node("constant", (), loss), Node("fma", (at, at + 1, at + 2))]
        place.append(len(nodes) - 1)
    return replace(graph, nodes=tuple(nodes), results=tuple(replace(r, node=place[r.node]) for r in graph.results))


def tolerances(
    graph: EpilogueGraph, expected: Mapping[str, Any], dtypes: Mapping[str, DType], terms: int,
    execute: Callable[[EpilogueGraph], Mapping[str, Any]], maximum: Callable[[Any, Any], Any],
) -> dict[str, Any]:  # fmt: skip
    """Return what each result may be off by: functions amplify what others lose, and jump.

    `execute` returns a graph's results in float64, of the data that `expected` is of; `maximum` is numpy's or torch's.
    A sum may be off by the root of `terms` times as much as other results.
    """
    count, dice = len(graph.nodes), random.Random(0)
    patterns = [[1] * count, [-1] * count, *([dice.choice((-1, 1)) for _ in range(count)] for _ in range(PATTERNS - 2))]
    sensitive: dict[str, Any] = {}
    for signs in patterns:
        for name, shaken in execute(disturbed(graph, signs)).items():
            off = abs(shaken - expected[name])
            sensitive[name] = maximum(off, sensitive.get(name, off))
    allowed = {}
    for r in graph.results:
        y, dtype = expected[r.name], dtypes[r.name]
        loss = (2.0**-9 if dtype.bits < 32 else 2.0**-13) * max(1.0, float(abs(y).max()))
        if graph.nodes[r.node].op == "reduce" and graph.nodes[r.node].attribute[0] == "sum":
            loss *= terms**0.5
        allowed[r.name] = 1.01 * dtype.roundoff * abs(y) + loss + 2 * sensitive[r.name]
    return allowed
