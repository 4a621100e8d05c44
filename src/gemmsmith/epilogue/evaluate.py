"""Evaluating a graph at two neighboring elements of a thread's fragment: every node once, in topological order."""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith import hw
from gemmsmith.core.dtypes import FP16, FP32
from gemmsmith.core.graph import Graph
from gemmsmith.epilogue.functions import FUNCTIONS, Lowering
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32, PRED
from gemmsmith.lang.values import Constant, Value

Source = Callable[[int, int], tuple[Value, Value]]
"""(chunk offset, half) -> two neighboring elements."""


def lowerings(graph: Graph, exact: bool) -> dict[int, Lowering]:
    """How each elementwise node is computed: coarsely where all results that need it are stored in bf16 or fp8."""
    fine: set[int] = set()
    for result in graph.results:
        reduced = graph.is_reduced(result)
        if reduced or result.dtype in (FP32, FP16):
            fine.add(result.node)
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in fine:
            fine.update(graph.nodes[i].inputs)
    chosen = {}
    for i, node in enumerate(graph.nodes):
        if f := FUNCTIONS.get(node.op):
            chosen[i] = (f.exact or f.lower) if exact else f.lower if i in fine else f.coarse or f.lower
    return chosen


class Evaluation:
    """Values of nodes in one step of a piece.

    `sources` gives operands and the accumulator by their node, `columns` the numbers of two neighboring columns by
    their chunk offset.
    """

    def __init__(
        self, graph: Graph, chosen: dict[int, Lowering], sources: dict[int, Source],
        columns: Callable[[int], tuple[Value, Value]],
    ) -> None:  # fmt: skip
        self.graph, self.chosen, self.sources, self.columns = graph, chosen, sources, columns
        self.extents = graph.extents()
        self._known: dict[tuple[int, int, int], tuple[Value, Value]] = {}

    def pair(self, node: int, j: int, half: int) -> tuple[Value, Value]:
        """Two neighboring elements of a node, as fp32: chunk offset j counts chunks of the node's own width. The only
        half of paired rows is 0."""
        low, high = self._pair(node, j, half)
        return _number(low), _number(high)

    def _pair(self, node: int, j: int, half: int) -> tuple[Value, Value]:
        """Inputs are computed before what is computed of them, by a stack: a graph may be deeper than Python's."""
        wanted = self._key(node, j, half)
        stack = [wanted]
        while stack:
            key = stack[-1]
            missing = [] if key in self._known else [k for k in self._inputs(key) if k not in self._known]
            if missing:
                stack += reversed(missing)
                continue
            if key not in self._known:
                self._known[key] = self._compute(*key)
            stack.pop()
        return self._known[wanted]

    def _key(self, node: int, j: int, half: int) -> tuple[int, int, int]:
        extent = self.extents[node]
        return node, j if extent.width else 0, half if extent.height else 0

    def _inputs(self, key: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Which elements of other nodes an element of one is computed of."""
        index, j, half = key
        node = self.graph.nodes[index]
        if index in self.sources:
            return []
        if node.op == "chunk":
            which, axis = node.value
            return [self._key(node.inputs[0], *((2 * j + which, half) if axis == "n" else (j, which)))]
        if node.op == "interleave":
            inner, which = (j // 2, j % 2) if node.value == "n" else (j, half)
            return [self._key(node.inputs[which], inner, half if node.value == "n" else 0)]
        return [self._key(i, j, half) for i in node.inputs]

    def _compute(self, index: int, j: int, half: int) -> tuple[Value, Value]:
        node = self.graph.nodes[index]
        if index in self.sources:
            return self.sources[index](j, half)
        inputs = [self._known[key] for key in self._inputs((index, j, half))]
        match node.op:
            case "constant":
                constant = Constant(F32, float(node.value))
                return constant, constant
            case "chunk" | "interleave":
                return inputs[0]
            case "one_hot":
                label = _number(inputs[0][0])
                low, high = self.columns(j)
                return low.to(F32) == label, high.to(F32) == label
            case "cast":
                low, high = map(_number, inputs[0])
                return hw.round_pair(low, high, node.value)
        lower = self.chosen[index]
        same = all(low is high for low, high in inputs)
        first = lower(*_fitting(node.op, [low for low, _ in inputs]))
        return first, first if same else lower(*_fitting(node.op, [high for _, high in inputs]))


def _number(x: Value) -> Value:
    """A predicate as 0 or 1."""
    return current().select(x, Constant(F32, 1.0), Constant(F32, 0.0)) if x.type == PRED else x


def _truth(x: Value) -> Value:
    return x if x.type == PRED else x != 0.0


def _fitting(op: str, inputs: list[Value]) -> list[Value]:
    """Inputs as numbers or predicates, as the function wants them."""
    if op in ("and", "or", "not"):
        return [_truth(x) for x in inputs]
    if op == "where":
        return [_truth(inputs[0]), *map(_number, inputs[1:])]
    return [_number(x) for x in inputs]
