"""Reverse-mode derivative of an epilogue: a graph of vector-Jacobian products.

The derivative's graph computes the gradients with respect to the accumulator and to operands from the gradients of the
results. It does not depend on sizes: the gradient of a broadcast operand is a sum over rows, columns or both. The rules
of elementwise functions are in their table (graph/functions.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial, reduce
from itertools import combinations
from typing import NamedTuple

from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Operand, Result
from gemmsmith.graph.frontend.values import Traced, Tracer
from gemmsmith.graph.functions import Function, gradient_rule
from gemmsmith.graph.operations import HalfGradient
from gemmsmith.graph.passes.cse import cse
from gemmsmith.graph.passes.fold import fold
from gemmsmith.graph.passes.rewrite import Editor, eliminate_dead_code, rewrite
from gemmsmith.graph.reductions import REDUCTIONS
from gemmsmith.graph.source_location import epilogue_error

ACCUMULATOR = ""
"""Name of the accumulator among the names of operands."""
INPUT_PREFIX = "x_"
"""Prefix of the derivative's operands that are the epilogue's operands."""
OUTPUT_PREFIX = "y_"
"""Prefix of the derivative's operands that are values of the epilogue's results."""
GRAD_OUTPUT_PREFIX = "d_"
"""Prefix of the derivative's operands that are gradients of the epilogue's results."""
GRAD_PREFIX = "g_"
"""Prefix of the derivative's results that are gradients of operands. The accumulator's gradient is named "out"."""
SAVED_PREFIX = "_saved"
"""Prefix, before a digit, of results that are stored only for the derivative."""
CANDIDATES_PER_END = 16
"""Number of the values nearest to the accumulator, and of those nearest to the results, that are considered for saving.
Chosen; not measured."""


class _DerivativeCost(NamedTuple):
    """Cost of a derivative; costs are compared field by field, from the first. The last three fields are counts."""

    recomputes_gemm: bool
    matrices: int
    operands: int
    nodes: int


def derivative(
    graph: EpilogueGraph, outputs: Collection[str], wrt: Collection[str], saved: Collection[str], default_dtype: DType
) -> EpilogueGraph:
    """Return the graph that computes gradients of an epilogue.

    The graph is an epilogue of the same GEMM (of any GEMM, if it does not read the accumulator). Its operands are the
    epilogue's operands (x_name), gradients of results (d_name) and values of results (y_name). The gradient of a
    reduction is a column, row or scalar; or a matrix, if otherwise some gradient would be the same in all rows or
    columns. The caller divides the gradient of a mean by the number of elements, and that of a maximum or minimum by
    the number of equal elements (see `tie_count_graph`). The results are "out", the accumulator's gradient, and g_name,
    the gradients of operands, whose sums keep the reduced index. Gradients that are zero everywhere have no result.

    Args:
        graph: The epilogue.
        outputs: Names of the results that have gradients.
        wrt: Names of the operands, or ACCUMULATOR, whose gradients are computed.
        saved: Names of matrix results that are read (y_name) instead of being recomputed.
        default_dtype: Dtype of matrices that have none in the graph.

    Raises:
        EpilogueError: for operations without a gradient, and for a maximum or minimum of values that are not saved.
    """
    grad_graph = _DerivativeBuilder(graph, outputs, saved, default_dtype, full_matrix_grads=False).grad_graph(wrt)
    if all(_input_dims(grad_graph, r).is_matrix for r in grad_graph.results):
        return grad_graph
    return _DerivativeBuilder(graph, outputs, saved, default_dtype, full_matrix_grads=True).grad_graph(wrt)


def nodes_with_gradient(graph: EpilogueGraph, wrt: Collection[str] | None = None) -> list[bool]:
    """Return for each node whether it has a gradient with respect to one of `wrt`."""
    result: list[bool] = []
    for node in graph.nodes:
        name = node.operation.leaf_name(node)
        of_inputs = any(result[i] for i in node.inputs[node.operation.num_predicates :])
        reads = of_inputs if name is None else wrt is None or name in wrt
        result.append(node.operation.has_gradient and reads)
    return result


def minmax_results(graph: EpilogueGraph, wrt: Collection[str] | None = None) -> list[Result]:
    """Return the results that are maxima or minima of values that have a gradient."""
    has_gradient = nodes_with_gradient(graph, wrt)
    reduced = [r for r in graph.results if graph.is_reduction(r) and has_gradient[r.node]]
    return [r for r in reduced if REDUCTIONS[graph.nodes[r.node].attribute[0]].selects]


def tie_count_graph(
    graph: EpilogueGraph, result_name: str, saved: Collection[str], default_dtype: DType
) -> EpilogueGraph:
    """Return the graph that counts the elements that are equal to the maximum or minimum `result_name`.

    It reads the elements and the maximum as `derivative` does.
    """
    d = _DerivativeBuilder(graph, (), saved, default_dtype, full_matrix_grads=False)
    result = next(r for r in graph.results if r.name == result_name)
    axis = graph.nodes[result.node].attribute[1]
    equal = d.minmax_mask(result)
    count = d.tracer.add("reduce", equal, attribute=("sum", axis))
    return d.build([Result("out", count.node, FP32, keepdim=True)])


def with_saved_values(
    graph: EpilogueGraph, wrt: Collection[str], default_dtype: DType
) -> tuple[EpilogueGraph, tuple[str, ...]]:
    """Add the results that the derivative needs so as not to recompute the GEMM, and return (graph, names to save).

    The inputs of maxima and minima become results. If the results do not suffice, one further value becomes a result:
    the one with the cheapest derivative. None does if no single value suffices. A logsumexp of a value that is saved
    rounded is computed from the rounded value, so that both passes agree. Raises EpilogueError as `derivative` does.
    """
    graph = _with_minmax_inputs(cse(fold(graph)), wrt)
    cost, saved = _choose_saved(graph, wrt, default_dtype)
    if cost.recomputes_gemm:
        broadcast_dims = graph.broadcast_dims
        matrices = [
            i
            for i, n in enumerate(graph.nodes)
            if broadcast_dims[i].is_matrix and (isinstance(n.operation, Function) or _reads_accumulator(n))
        ]
        nearest = matrices[:CANDIDATES_PER_END] + matrices[CANDIDATES_PER_END:][-CANDIDATES_PER_END:]
        with_one_more_output = [_with_output(graph, i) for i in nearest]
        candidates = [(*_choose_saved(g, wrt, default_dtype, {g.results[-1].name}), g) for g in with_one_more_output]
        cost, saved_names, best = min(candidates, key=lambda x: x[0])
        if not cost.recomputes_gemm:
            graph, saved = best, saved_names
    return _round_before_reductions(graph, saved, default_dtype), saved


def _round_before_reductions(graph: EpilogueGraph, saved: Collection[str], default_dtype: DType) -> EpilogueGraph:
    """Round the saved values from which a reduction is computed whose value the derivative reads, too.

    Such a reduction is a logsumexp, of which the derivative is exp(x - logsumexp). If x were rounded, but the logsumexp
    were computed from unrounded values, these would not be probabilities.
    """
    reductions = [r.node for r in graph.results if graph.is_reduction(r)]
    reading = (i for i in reductions if REDUCTIONS[graph.nodes[i].attribute[0]].reads_value)
    reduced = graph.nodes_needed_by(reading)
    stored = {r.node: r.dtype or default_dtype for r in graph.results if r.name in saved and r.node in reduced}

    def rule(editor: Editor, node: Node) -> int | None:
        if stored.get(editor.index, FP32) == FP32:
            return None
        return editor.add("cast", editor.keep(node), attribute=stored[editor.index])

    return cse(fold(rewrite(graph, rule)))


def _with_minmax_inputs(graph: EpilogueGraph, wrt: Collection[str]) -> EpilogueGraph:
    """Store the inputs of maxima and minima as results.

    The derivative compares these rounded elements with the result; recomputed ones might be rounded differently.
    """
    for r in minmax_results(graph, wrt):
        if _stored_minmax_input(graph, r) is None:
            first_computed = _rounding_equivalent_nodes(graph, r)[-1]
            graph = _with_output(graph, first_computed)
    return graph


def _with_output(graph: EpilogueGraph, node: int) -> EpilogueGraph:
    """Add a node to the results, as one that is stored only for the derivative."""
    count = sum(r.name.startswith(SAVED_PREFIX) for r in graph.results)
    return replace(graph, results=(*graph.results, Result(f"{SAVED_PREFIX}{count}", node)))


def _choose_saved(
    graph: EpilogueGraph, wrt: Collection[str], default_dtype: DType, must_read: Collection[str] = ()
) -> tuple[_DerivativeCost, tuple[str, ...]]:
    """Return the least cost of the derivative, and the names of the matrix results that it then reads.

    All subsets of the matrix results are tried that include `must_read` and the inputs of maxima and minima.
    """
    has_gradient = nodes_with_gradient(graph, wrt)
    outputs = [r.name for r in graph.results if has_gradient[r.node] and not r.name.startswith(SAVED_PREFIX)]
    matrices = graph.matrix_result_names
    stored_inputs = (_stored_minmax_input(graph, r) for r in minmax_results(graph, wrt))
    needed = {*must_read, *(x.name for x in stored_inputs if x)}

    def cost(names: Collection[str]) -> _DerivativeCost:
        d = derivative(graph, outputs, wrt, names, default_dtype)
        recomputes_gemm = any(map(_reads_accumulator, d.nodes))
        return _DerivativeCost(recomputes_gemm, len(d.matrix_names), len(d.operands), len(d.nodes))

    choices = [names for count in range(len(matrices) + 1) for names in combinations(matrices, count)]
    return min(((cost(names), names) for names in choices if needed <= set(names)), key=lambda choice: choice[0])


class _DerivativeBuilder:
    """Builds the derivative: the forward graph's nodes, recomputed or read, followed by those of the gradients."""

    def __init__(
        self, graph: EpilogueGraph, outputs: Collection[str], saved: Collection[str], default_dtype: DType,
        full_matrix_grads: bool,
    ) -> None:  # fmt: skip
        """Build the forward nodes, then the gradients of all nodes, from the results back.

        `outputs`, `saved`, `default_dtype`: as in `derivative`. `full_matrix_grads`: the gradient of a reduction is an
        operand with a value for each element, not one for each reduced value.
        """
        self.forward = graph
        self.saved = saved
        self.default_dtype = default_dtype
        self.full_matrix_grads = full_matrix_grads
        self.broadcast_dims = graph.broadcast_dims
        self.tracer = Tracer(())
        self.operands: dict[str, Operand] = {}
        self.values: list[Traced] = []
        self.grads: dict[int, Traced] = {}
        self.half_grads: dict[int, dict[int, Traced]] = {}
        result_at = {r.node: r for r in graph.results if r.name in saved}
        casts = {i: graph.nodes[i] for i in result_at if graph.nodes[i].op == "cast"}
        # A saved result that is a cast to its own dtype also is the value before the cast.
        result_at |= {n.inputs[0]: result_at[i] for i, n in casts.items() if n.attribute == self.dtype(result_at[i])}
        for i, node in enumerate(graph.nodes):
            self.values.append(self._recompute_or_read(i, node, result_at.get(i)))
        for r in graph.results:
            if r.name in outputs:
                self._seed_result(r)
        has_gradient = nodes_with_gradient(graph)
        for i in range(len(graph.nodes) - 1, -1, -1):
            if half_grads := self.half_grads.get(i):
                both = [half_grads[which] if which in half_grads else self.tracer.value(0.0) for which in range(2)]
                self._accumulate(i, self.tracer.add("interleave", *both, attribute="n"))
            if i in self.grads and has_gradient[i]:
                self._backpropagate(i, graph.nodes[i])

    def grad_graph(self, wrt: Collection[str]) -> EpilogueGraph:
        results = []
        for name in wrt:
            nodes = [i for i, n in enumerate(self.forward.nodes) if n.operation.leaf_name(n) == name]
            grads = [self.grads[i] for i in nodes if i in self.grads]
            if not grads:
                continue
            total = reduce(partial(self.tracer, "add"), grads)
            if name == ACCUMULATOR:
                results.append(Result("out", total.node))
                continue
            operand = self.forward.operand(name)
            dtype = operand.dtype if operand.dtype in (BF16, FP16) else FP32
            if not operand.broadcast_dims.is_matrix:
                axis = _reduced_axis(operand.broadcast_dims)
                total = self.tracer.add("reduce", total, attribute=("sum", axis))
            results.append(Result(f"{GRAD_PREFIX}{name}", total.node, dtype, not operand.broadcast_dims.is_matrix))
        return self.build(results)

    def build(self, results: list[Result]) -> EpilogueGraph:
        """Return the graph of the nodes that these results need."""
        graph = EpilogueGraph(tuple(self.tracer.nodes), tuple(self.operands.values()), tuple(results))
        return cse(fold(eliminate_dead_code(graph)))

    def operand(self, name: str, broadcast_dims: BroadcastDims, dtype: DType | None) -> Traced:
        self.operands[name] = Operand(name, broadcast_dims, dtype)
        return self.tracer.add("operand", attribute=name, dims=broadcast_dims)

    def dtype(self, result: Result) -> DType:
        return result.dtype or (FP32 if self.forward.is_reduction(result) else self.default_dtype)

    def minmax_mask(self, result: Result) -> Traced:
        """Return a predicate of each element: whether it is equal to the maximum or minimum `result`.

        The elements and the result are read as stored, since recomputed values may be rounded differently. Raises
        EpilogueError if the elements are not saved, or if both are stored in different 16-bit or 8-bit dtypes.
        """
        node, stored_input = self.forward.nodes[result.node], _stored_minmax_input(self.forward, result)
        if stored_input is None or stored_input.name not in self.saved:
            message = f"{node.attribute[0]}: its gradient needs its input, saved by the forward pass"
            raise epilogue_error(f"{message}; use recompute=False and fewer results", node.location)
        x, y = self.values[node.inputs[0]], self._reduction_value(result)
        low_precision = {self.dtype(stored_input), self.dtype(result)} - {FP32}
        if len(low_precision) > 1:
            listed = " and ".join(sorted(map(str, low_precision)))
            raise epilogue_error(
                f"{node.attribute[0]}: got values and a result in {listed}; use one dtype, or fp32", node.location
            )
        for dtype in low_precision:
            x, y = (self.tracer.add("cast", v, attribute=dtype) for v in (x, y))
        return self.tracer("eq", x, y)

    def _recompute_or_read(self, index: int, node: Node, saved: Result | None) -> Traced:
        """Return the value of the forward node `index`: read from the result `saved`, or computed again if it is None.

        A leaf is read as the epilogue's operand.
        """
        broadcast_dims = self.broadcast_dims[index]
        if saved:
            return self.operand(OUTPUT_PREFIX + saved.name, broadcast_dims, self.dtype(saved))
        if name := node.operation.leaf_name(node):
            return self.operand(INPUT_PREFIX + name, broadcast_dims, self.forward.operand(name).dtype)
        inputs = [self.values[i] for i in node.inputs]
        return self.tracer.add(node.op, *inputs, attribute=node.attribute, location=node.location)

    def _reduction_value(self, result: Result) -> Traced:
        return self.operand(OUTPUT_PREFIX + result.name, self.broadcast_dims[result.node], self.dtype(result))

    def _seed_result(self, r: Result) -> None:
        """Add the gradient of a result, an operand, to the gradient of the node that the result stores or reduces."""
        node, name = self.forward.nodes[r.node], GRAD_OUTPUT_PREFIX + r.name
        if not self.forward.is_reduction(r):
            self._accumulate(r.node, self.operand(name, self.broadcast_dims[r.node], self.dtype(r)))
            return
        (inner,), kind = node.inputs, REDUCTIONS[node.attribute[0]]
        broadcast_dims = self.broadcast_dims[inner] if self.full_matrix_grads else self.broadcast_dims[r.node]
        g = self.operand(name, broadcast_dims, self.dtype(r))
        if kind.selects and r not in minmax_results(self.forward):
            return
        if kind.selects:  # 0 * (g / 0) is NaN, as in torch, where nothing is equal to NaN
            g = self.tracer("mul", self.minmax_mask(r), g)
        y = self._reduction_value(r) if kind.reads_value else None
        g = gradient_rule(kind.name, kind.gradient, node)(g, y, self.values[inner])
        self._accumulate(inner, g)

    def _backpropagate(self, index: int, node: Node) -> None:
        """Add a node's contributions to the gradients of its inputs. Those of halves are kept until both are known."""
        y, inputs = self.values[index], [self.values[i] for i in node.inputs]
        grads = node.operation.backpropagate(node, self.grads[index], y, inputs)
        for source, g in zip(node.inputs, grads, strict=True):
            if isinstance(g, HalfGradient):
                halves = self.half_grads.setdefault(source, {})
                halves[g.which] = self.tracer("add", halves[g.which], g.g) if g.which in halves else g.g
            elif g is not None:
                self._accumulate(source, g)

    def _accumulate(self, node: int, g: Traced) -> None:
        """Add `g` to the gradient of a forward node, unless it is a leaf without a gradient, such as a constant."""
        if not self.forward.nodes[node].operation.has_gradient and not self.forward.nodes[node].inputs:
            return
        self.grads[node] = self.tracer("add", self.grads[node], g) if node in self.grads else g


def _reads_accumulator(node: Node) -> bool:
    return node.operation.leaf_name(node) == ACCUMULATOR


def _reduced_axis(broadcast_dims: BroadcastDims) -> str:
    """Return the axis, as in `reduced_dims`, over which the gradient of a broadcast operand is summed.

    The caller sums over the other dimensions along which the operand does not vary, such as the rows for a scalar per
    batch.
    """
    if broadcast_dims.varies_along_n:
        return "m"
    return "n" if broadcast_dims.varies_along_m or broadcast_dims.batch else "all"


def _input_dims(graph: EpilogueGraph, result: Result) -> BroadcastDims:
    node = graph.nodes[result.node]
    return graph.broadcast_dims[node.inputs[0] if node.op == "reduce" else result.node]


def _rounding_equivalent_nodes(graph: EpilogueGraph, result: Result) -> list[int]:
    """Return the nodes from whose rounded values the elements of a maximum or minimum follow, in its dtype.

    These are its input x, and if x = f(y) for a function f that commutes with rounding, such as abs, also y, and so on.
    """
    nodes = list(graph.nodes[result.node].inputs)
    while graph.nodes[nodes[-1]].operation.commutes_with_rounding:
        nodes += graph.nodes[nodes[-1]].inputs
    return nodes


def _stored_minmax_input(graph: EpilogueGraph, result: Result) -> Result | None:
    """Return a result that stores one of the `_rounding_equivalent_nodes` of a maximum or minimum, or None."""
    nodes = _rounding_equivalent_nodes(graph, result)
    return next((r for r in graph.results if r.node in nodes), None)
