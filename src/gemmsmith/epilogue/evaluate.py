"""Evaluation of a graph at pairs of a thread's adjacent elements, each node once, and the registers that it takes."""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.mma import THREADS_PER_WARPGROUP, WGMMA_M
from gemmsmith.graph.functions import Function, Lowering
from gemmsmith.graph.precision import select_precisions
from gemmsmith.graph.row_functions import RowFunction
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, PRED
from gemmsmith.lang.values import Constant, Value

Source = Callable[[int, int], tuple[Value, Value]]
"""(n8 offset, row half) -> two adjacent elements of this thread; the coordinates are those of `Evaluation.pair`."""


def select_lowerings(graph: EpilogueGraph, fast_math: bool) -> dict[int, Lowering]:
    """Return the function that emits the instructions of each elementwise node, by the node's index."""
    precisions = ((graph.nodes[i].operation, i, x) for i, x in select_precisions(graph, fast_math).items())
    return {i: f.lowerings[precision] for f, i, precision in precisions if isinstance(f, Function)}


class Evaluation:
    """Values of nodes in one step of a subtile, each computed at most once.

    `sources` maps the nodes of operands and of the accumulator to their values; `columns` returns the indices of a
    pair's two columns at an n8 offset.
    """

    def __init__(
        self, graph: EpilogueGraph, lowering_of_node: dict[int, Lowering], sources: dict[int, Source],
        columns: Callable[[int], tuple[Value, Value]],
    ) -> None:  # fmt: skip
        self.graph, self.lowering_of_node, self.sources, self.columns = graph, lowering_of_node, sources, columns
        self.broadcast_dims = graph.broadcast_dims
        self._computed: dict[tuple[int, int, int], tuple[Value, Value]] = {}

    def pair(self, node: int, n8_offset: int, row_half: int) -> tuple[Value, Value]:
        """Return two adjacent elements of a node, in fp32, that this thread has.

        `n8_offset`: their group of 8 columns, counted from the step's first. `row_half`: which half of the warp's 16
        rows, 0 or 1. If the node has one value per two columns, `n8_offset` counts groups of 8 of its values; if it has
        one per two rows, `row_half` is 0.
        """
        low, high = self._pair(node, n8_offset, row_half)
        return self.as_float(low), self.as_float(high)

    def _pair(self, node: int, n8_offset: int, row_half: int) -> tuple[Value, Value]:
        """Return a pair as computed: predicates are not converted.

        Inputs are computed first, with an explicit stack, since a graph may be deeper than Python's recursion limit.
        """
        target = self._key(node, n8_offset, row_half)
        stack = [target]
        while stack:
            key = stack[-1]
            missing = [] if key in self._computed else [k for k in self._inputs(key) if k not in self._computed]
            if missing:
                stack += reversed(missing)
                continue
            if key not in self._computed:
                self._computed[key] = self._compute(*key)
            stack.pop()
        return self._computed[target]

    def _key(self, node: int, n8_offset: int, row_half: int) -> tuple[int, int, int]:
        dims = self.broadcast_dims[node]
        return node, n8_offset if dims.varies_along_n else 0, row_half if dims.varies_along_m else 0

    def _inputs(self, key: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Return the keys of the pairs from which the pair of this key is computed; none for a source."""
        index, n8_offset, row_half = key
        node = self.graph.nodes[index]
        if index in self.sources:
            return []
        return [self._key(*coord) for coord in node.operation.input_coords(node, n8_offset, row_half)]

    def _compute(self, index: int, n8_offset: int, row_half: int) -> tuple[Value, Value]:
        """Compute a pair whose inputs have been computed. If both elements have the same inputs, they are one value."""
        if index in self.sources:
            return self.sources[index](n8_offset, row_half)
        operation = self.graph.nodes[index].operation
        inputs = [self._computed[key] for key in self._inputs((index, n8_offset, row_half))]
        lower = self.lowering_of_node.get(index)
        if lower is None:
            return operation.lower_node(self, index, n8_offset, inputs)
        same = all(low is high for low, high in inputs)
        first = lower(*self._coerced([low for low, _ in inputs], operation.num_predicates))
        return first, first if same else lower(*self._coerced([high for _, high in inputs], operation.num_predicates))

    def _coerced(self, inputs: list[Value], num_predicates: int) -> list[Value]:
        """Convert the first `num_predicates` inputs of a function to predicates, and the others to floats."""
        return [_as_predicate(x) if i < num_predicates else self.as_float(x) for i, x in enumerate(inputs)]

    @staticmethod
    def as_float(x: Value) -> Value:
        """Convert a predicate to 0 or 1."""
        return current_builder().select(x, Constant(F32, 1.0), Constant(F32, 0.0)) if x.type == PRED else x


def _as_predicate(x: Value) -> Value:
    return x if x.type == PRED else x != 0.0


def row_function_inputs(graph: EpilogueGraph) -> dict[int, int]:
    """Map each row function's node to its input, whose elements are kept in registers."""
    return {i: node.inputs[0] for i, node in enumerate(graph.nodes) if isinstance(node.operation, RowFunction)}


def accumulator_consumers(graph: EpilogueGraph) -> set[int]:
    """Return the nodes that kernels compute directly from the accumulator: inputs of row functions, else results.

    A row function's input is kept in registers, so what is computed from it does not read the accumulator. If such an
    input is the only one of these nodes, it can be kept in the accumulator's registers, which nothing reads afterwards.
    """
    materialized = set(row_function_inputs(graph).values())
    consumers: set[int] = set()
    seen: set[tuple[int, int]] = set()
    stack = [(r.node, r.node) for r in graph.results]
    while stack:
        i, root = stack.pop()
        root = i if i in materialized else root
        if graph.nodes[i].op == "accumulator":
            consumers.add(root)
        elif (i, root) not in seen:
            seen.add((i, root))
            stack += [(j, root) for j in graph.nodes[i].inputs]
    return consumers


def extra_registers(graph: EpilogueGraph, columns: int) -> int:
    """Return the registers per thread, besides the accumulator's, for row functions' inputs in a subtile.

    An input that can be kept in the accumulator's registers needs none.
    """
    dims, consumers = graph.broadcast_dims, accumulator_consumers(graph)
    extra = {i for i in row_function_inputs(graph).values() if consumers != {i}}
    return sum(WGMMA_M * columns // dims[i].column_divisor // THREADS_PER_WARPGROUP for i in extra)
