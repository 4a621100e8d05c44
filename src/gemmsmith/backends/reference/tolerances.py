"""What an epilogue's results may be off by, as its own sensitivity shows.

Functions amplify what others lose, and jump: so the epilogue is evaluated again with every value disturbed up or down
by LOSS, more than a coarse function or the accumulation loses, in PATTERNS patterns of signs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gemmsmith.backends.reference.bounds import Report, step_error
from gemmsmith.backends.reference.evaluation import Evaluation
from gemmsmith.backends.reference.matmul import Array
from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.core.mma import Mma
from gemmsmith.core.scalars import ceil_div
from gemmsmith.graph.functions import FUNCTIONS

PATTERNS = 16
"""Graphs with disturbed values. Chosen; not measured."""
LOSS = 2.0**-11
"""Relative and absolute disturbance of a value: the error of the coarse functions."""


def check_results(
    graph: EpilogueGraph, evaluation: Evaluation, actual: Mapping[str, Array], mma: Mma, k: int
) -> Report:
    """Compare an epilogue's results with float64, each element with its tolerance.

    `k`: how many products an element of the product sums.
    """
    actual = {name: x for name, x in actual.items() if x.size}
    graph = replace(graph, results=tuple(r for r in graph.results if r.name in actual))

    def execute(graph: EpilogueGraph) -> dict[str, Array]:
        results = {name: np.full(x.shape, np.nan) for name, x in actual.items()}
        evaluation.execute(graph, results)
        return results

    product = np.zeros(0) if evaluation.accumulator is None else evaluation.accumulator
    scale = max(1.0, float(np.sqrt(np.mean(product**2)))) if product.size else 1.0
    loss = max(LOSS, ceil_div(k, mma.k) ** 0.5 * step_error(mma))
    dtypes = {name: as_dtype(x.dtype, name, allow_integers=True) for name, x in actual.items()}
    expected = execute(graph)
    with np.errstate(all="ignore"):
        allowed = tolerances(graph, expected, dtypes, product.size, execute, np.maximum, (loss, loss * scale))
    reports = [_compare(name, actual[name].astype(np.float64), y, allowed[name]) for name, y in expected.items()]
    return max(reports, key=lambda r: r.ratio, default=Report(0.0, 0.0, 0, 0.0, 0.0, "none"))


def _compare(name: str, x: Array, y: Array, allowed: Array) -> Report:
    """Return the report of a result x, which is to be y, and whose elements may be off by `allowed`."""
    with np.errstate(all="ignore"):
        is_same = (x == y) | (np.isnan(x) & np.isnan(y))
        error = np.where(is_same, 0.0, np.abs(x - y))
        ratio = np.where(is_same, 0.0, error / allowed)
    ratio[np.isnan(ratio)] = np.inf
    at = np.unravel_index(int(ratio.argmax()), ratio.shape)
    norm = float(np.linalg.norm(y)) or 1.0
    place = ", ".join(map(str, at))
    return Report(
        float(error.max()), float(ratio[at]), int((ratio > 1).sum()), float(np.linalg.norm(error)) / norm,
        float(np.linalg.norm(np.broadcast_to(allowed, y.shape))) / norm,
        f"{name}[{place}] = {x[at]:.6g}, want {y[at]:.6g}",
    )  # fmt: skip


def tolerances(
    graph: EpilogueGraph, expected: Mapping[str, Any], dtypes: Mapping[str, DType], terms: int,
    execute: Callable[[EpilogueGraph], Mapping[str, Any]], maximum: Callable[[Any, Any], Any],
    product_loss: tuple[float, float] = (LOSS, LOSS),
) -> dict[str, Any]:  # fmt: skip
    """Return what each result may be off by.

    `expected`: the results in float64. `terms`: how many values a sum has, of which it may be off by the root times as
    much as other results. `execute` returns a graph's results in float64, of the data that `expected` is of. `maximum`:
    numpy's or torch's. `product_loss`: the relative and the absolute disturbance of the product.
    """
    count, dice = len(graph.nodes), random.Random(0)
    patterns = [[1] * count, [-1] * count, *([dice.choice((-1, 1)) for _ in range(count)] for _ in range(PATTERNS - 2))]
    sensitive: dict[str, Any] = {}
    for signs in patterns:
        for name, shaken in execute(_disturbed(graph, signs, product_loss)).items():
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


def _disturbed(graph: EpilogueGraph, signs: Sequence[int], product_loss: tuple[float, float]) -> EpilogueGraph:
    """Return the graph with every value disturbed by LOSS, and the product by `product_loss`: up or down by `signs`."""
    nodes: list[Node] = []
    place: list[int] = []
    for node, sign in zip(graph.nodes, signs, strict=True):
        nodes.append(replace(node, inputs=tuple(place[i] for i in node.inputs)))
        is_product = node.op == "accumulator"
        if is_product or (node.op in FUNCTIONS and not node.operation.is_predicate):
            relative, absolute = product_loss if is_product else (LOSS, LOSS)
            at, factor, addend = len(nodes) - 1, 1 + sign * relative, sign * absolute
            nodes += [
                Node("constant", (), factor), Node("constant", (), addend), Node("fma", (at, at + 1, at + 2))
            ]  # fmt: skip
        place.append(len(nodes) - 1)
    return replace(graph, nodes=tuple(nodes), results=tuple(replace(r, node=place[r.node]) for r in graph.results))
