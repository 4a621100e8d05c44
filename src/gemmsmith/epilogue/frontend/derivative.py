"""The derivative of an epilogue, a graph made of a graph, by reverse accumulation.

With L = sum over the results of <gradient of the result, result>, the derivative's graph computes the gradients of L
with respect to the product and to operands. Nothing in it depends on sizes: what an operand's elements share is a sum
over rows, columns or all. The functions' rules are in their table.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import combinations

from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.graph import Extent, Graph, Node, Operand, Result
from gemmsmith.epilogue.frontend.values import Traced, Tracing
from gemmsmith.epilogue.functions import FUNCTIONS
from gemmsmith.epilogue.lines import refused
from gemmsmith.epilogue.passes.fold import fold
from gemmsmith.epilogue.passes.rewrite import Editor, pruned, rewritten
from gemmsmith.epilogue.passes.share import share

PRODUCT = ""
"""Stands for the product among the names of operands."""
OPERAND, VALUE, GRADIENT, WANTED = "x_", "y_", "d_", "g_"
"""What the names of the derivative begin with: of the epilogue's operands, the values of its results, their gradients,
and of the gradients of operands. The product's is "out"."""
KEPT = "_kept"
"""The name of a result that is stored for the derivative alone; a digit follows."""
TRIED = 16
"""Values nearest to the product, and nearest to the results, that are considered as the one to be stored."""
_ROUNDED_ALIKE = frozenset({"abs", "neg", "relu"})
"""Functions that give the same whether their input or their value is rounded."""


def derivative(
    graph: Graph, of: Collection[str], wanted: Collection[str], stored: Collection[str], default: DType
) -> Graph:
    """The graph of the gradients of `wanted`, operands' names and PRODUCT, from those `of` results.

    It is the epilogue of the same product; one that does not read the product may be that of an empty one. Its operands
    are the epilogue's own (x_name), gradients of results (d_name) and values of results (y_name). A reduction's are a
    column, row or scalar, or, where some gradient would otherwise be the same in all rows or columns, its gradient is
    a matrix. The gradient of a mean is to be divided by the number of elements before, that of a maximum or minimum by
    the number of equal ones, which `ties` gives. Its results: "out", the product's gradient, and g_name, an operand's,
    whose sums keep the index that they are over; none where the gradient is zero everywhere.

    `stored`: results that are matrices, which it reads instead of computing them. `default`: the dtype of matrices of
    which the graph says none. Raises EpilogueError for what has no derivative, and for a maximum of what is not stored.
    """
    found = _Derivative(graph, of, stored, default, whole=False).graph(wanted)
    thin = [r for r in found.results if not _inner(found, r).is_matrix]
    return _Derivative(graph, of, stored, default, whole=True).graph(wanted) if thin else found


def differentiable(graph: Graph, wanted: Collection[str] | None = None) -> list[bool]:
    """Which nodes have a gradient with respect to one of `wanted`, operands' names and PRODUCT, or to any of these."""
    found: list[bool] = []
    for node in graph.nodes:
        f = FUNCTIONS.get(node.op)
        if node.op in ("constant", "one_hot") or (f is not None and f.gradient is None):
            found.append(False)
        elif (name := _name(node)) is not None:
            found.append(wanted is None or name in wanted)
        else:
            found.append(any(found[i] for i in node.inputs[node.op == "where" :]))
    return found


def extremes(graph: Graph, wanted: Collection[str] | None = None) -> list[Result]:
    """The results that are maxima or minima of something that has a gradient."""
    flows = differentiable(graph, wanted)
    reduced = [r for r in graph.results if graph.is_reduced(r) and flows[r.node]]
    return [r for r in reduced if graph.nodes[r.node].value[0] in ("max", "min")]


def ties(graph: Graph, of: str, stored: Collection[str], default: DType) -> Graph:
    """The graph that counts the elements that are equal to the maximum or minimum `of` their row, column, or all."""
    d = _Derivative(graph, (), stored, default, whole=False)
    result = next(r for r in graph.results if r.name == of)
    axis = graph.nodes[result.node].value[1]
    equal = d.extremes(result)
    count = d.t.add("reduce", equal.extent.reduced(axis), equal, value=("sum", axis))
    return d.traced([Result("out", count.node, FP32, keepdim=True)])


def storing(graph: Graph, wanted: Collection[str], default: DType) -> tuple[Graph, tuple[str, ...]]:
    """The graph with the results that its derivative needs so as not to compute the product again, and the names of
    those that it reads, as few as possible.

    Results that are stored anyway come first; otherwise one value is stored, besides those whose maximum is taken. A
    logsumexp in the graph is of what is stored. Raises EpilogueError as `derivative` does.
    """
    graph = _with_extremes(share(fold(graph)), wanted)
    cost, stored = _cheapest(graph, wanted, default)
    if cost[0]:
        extents = graph.extents()
        inner = [i for i, n in enumerate(graph.nodes) if extents[i].is_matrix and n.op in (*FUNCTIONS, "accumulator")]
        inner = inner[:TRIED] + inner[TRIED:][-TRIED:]
        longer = [_keeping(graph, i) for i in inner]
        found = [(*_cheapest(g, wanted, default, {g.results[-1].name}), g) for g in longer]
        cost, chosen, best = min(found, key=lambda x: x[0])
        if not cost[0]:
            graph, stored = best, chosen
    return _reducing_what_is_stored(graph, stored, default), stored


def _reducing_what_is_stored(graph: Graph, stored: Collection[str], default: DType) -> Graph:
    """The graph where a value that the derivative reads from memory, rounded, is rounded before a logsumexp is computed
    of it, and all else: exp(x - logsumexp) is no probability if only x is rounded."""
    under = _ancestors(graph, [i for i, n in enumerate(graph.nodes) if n.op == "reduce" and n.value[0] == "logsumexp"])
    read = {r.node: r.dtype or default for r in graph.results if r.name in stored and r.node in under}

    def rule(e: Editor, node: Node) -> int | None:
        if read.get(e.index, FP32) == FP32:
            return None
        e.nodes.append(node)
        return e.add("cast", len(e.nodes) - 1, value=read[e.index])

    return share(fold(rewritten(graph, rule)))


def _ancestors(graph: Graph, nodes: Collection[int]) -> set[int]:
    """The nodes that some are computed of."""
    found: set[int] = set()
    waiting = list(nodes)
    while waiting:
        inputs = set(graph.nodes[waiting.pop()].inputs) - found
        found |= inputs
        waiting += inputs
    return found


def _with_extremes(graph: Graph, wanted: Collection[str]) -> Graph:
    """The graph with what its maxima and minima are of as results: rounded, so that the largest is found again."""
    for r in extremes(graph, wanted):
        if _base(graph, r) is None:
            graph = _keeping(graph, _rounded_alike(graph, r)[-1])
    return graph


def _keeping(graph: Graph, node: int) -> Graph:
    """The graph with one more result."""
    count = sum(r.name.startswith(KEPT) for r in graph.results)
    return replace(graph, results=(*graph.results, Result(f"{KEPT}{count}", node)))


def _cheapest(
    graph: Graph, wanted: Collection[str], default: DType, read: Collection[str] = ()
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The least cost of the derivative, and the results that it reads then, with those of `read`. A cost is: whether it
    needs the product, the matrices that it reads, its operands, its nodes."""
    flows = differentiable(graph, wanted)
    of = [r.name for r in graph.results if flows[r.node] and not r.name.startswith(KEPT)]
    matrices = graph.stored
    needed = {*read, *(base.name for r in extremes(graph, wanted) if (base := _base(graph, r)))}
    best: tuple[tuple[int, ...], tuple[str, ...]] | None = None
    for names in (names for count in range(len(matrices) + 1) for names in combinations(matrices, count)):
        if needed <= set(names):
            found = derivative(graph, of, wanted, names, default)
            again = any(n.op == "accumulator" for n in found.nodes)
            cost = (again, len(found.matrices), len(found.operands), len(found.nodes))
            if best is None or cost < best[0]:
                best = cost, names
    assert best
    return best


class _Derivative:
    """The epilogue's nodes with those of its derivative behind them."""

    def __init__(self, graph: Graph, of: Collection[str], stored: Collection[str], default: DType, whole: bool) -> None:
        self.old, self.stored, self.default, self.whole = graph, stored, default, whole
        self.extents = graph.extents()
        self.t = Tracing(())
        self.operands: dict[str, Operand] = {}
        self.values: list[Traced] = []
        self.gradients: dict[int, Traced] = {}
        self.halves: dict[int, dict[int, Traced]] = {}
        at = {r.node: r for r in graph.results if r.name in stored}
        casts = {i: graph.nodes[i] for i in at if graph.nodes[i].op == "cast"}
        at |= {n.inputs[0]: at[i] for i, n in casts.items() if n.value == self.dtype(at[i])}  # what is rounded so
        for i, node in enumerate(graph.nodes):
            self.values.append(self._value(i, node, at.get(i)))
        for r in graph.results:
            if r.name in of:
                self._result(r)
        for i in range(len(graph.nodes) - 1, -1, -1):
            if halves := self.halves.get(i):
                both = [halves[which] if which in halves else self.t.value(0.0) for which in range(2)]
                self._add(i, self.t.add("interleave", self.extents[i], *both, value="n"))
            if i in self.gradients:
                self._through(i, graph.nodes[i])

    def graph(self, wanted: Collection[str]) -> Graph:
        """The gradients of `wanted`."""
        results = []
        for name in wanted:
            nodes = [i for i, n in enumerate(self.old.nodes) if _name(n) == name]
            found = [self.gradients[i] for i in nodes if i in self.gradients]
            if not found:
                continue
            total = found[0]
            for more in found[1:]:
                total = self.t("add", total, more)
            if name == PRODUCT:
                results.append(Result("out", total.node))
                continue
            operand = self.old.operand(name)
            dtype = operand.dtype if operand.dtype in (BF16, FP16) else FP32
            if not operand.extent.is_matrix:
                axis = _axis(operand.extent)
                total = self.t.add("reduce", total.extent.reduced(axis), total, value=("sum", axis))
            results.append(Result(f"{WANTED}{name}", total.node, dtype, not operand.extent.is_matrix))
        return self.traced(results)

    def traced(self, results: list[Result]) -> Graph:
        return share(fold(pruned(Graph(tuple(self.t.nodes), tuple(self.operands.values()), tuple(results)))))

    def operand(self, name: str, extent: Extent, dtype: DType | None) -> Traced:
        self.operands[name] = Operand(name, extent, dtype)
        return self.t.add("operand", extent, value=name)

    def dtype(self, result: Result) -> DType:
        return result.dtype or (FP32 if self.old.is_reduced(result) else self.default)

    def extremes(self, result: Result) -> Traced:
        """Which elements are equal to the maximum or minimum that is the result. Both are as they are stored, for what
        is computed again may round otherwise."""
        node, base = self.old.nodes[result.node], _base(self.old, result)
        if base is None or base.name not in self.stored:
            message = f"{node.value[0]}: a gradient needs the values that it is of, stored as they were"
            raise refused(f"{message}; use recompute=False and fewer results", node.where)
        x, y = self.values[node.inputs[0]], self._value_of(result)
        coarse = {self.dtype(base), self.dtype(result)} - {FP32}
        if len(coarse) > 1:
            listed = " and ".join(sorted(map(str, coarse)))
            raise refused(f"{node.value[0]}: got values and a result in {listed}; use one dtype, or fp32", node.where)
        for dtype in coarse:
            x, y = (self.t.add("cast", v.extent, v, value=dtype) for v in (x, y))
        return self.t("eq", x, y)

    def _value(self, index: int, node: Node, stored: Result | None) -> Traced:
        extent = self.extents[index]
        if stored:
            return self.operand(VALUE + stored.name, extent, self.dtype(stored))
        if node.op == "operand":
            return self.operand(OPERAND + node.value, extent, self.old.operand(node.value).dtype)
        inputs = [self.values[i] for i in node.inputs]
        return self.t.add(node.op, extent, *inputs, value=node.value, where=node.where)

    def _value_of(self, result: Result) -> Traced:
        """A reduction's value."""
        return self.operand(VALUE + result.name, self.extents[result.node], self.dtype(result))

    def _result(self, r: Result) -> None:
        """The gradient of what a result stores or reduces."""
        node, name = self.old.nodes[r.node], GRADIENT + r.name
        if node.op != "reduce":
            self._add(r.node, self.operand(name, self.extents[r.node], self.dtype(r)))
            return
        (inner,), (kind, _) = node.inputs, node.value
        extent = self.extents[inner] if self.whole else self.extents[r.node]
        g = self.operand(name, extent, self.dtype(r))
        if kind in ("max", "min"):
            if r not in extremes(self.old):
                return
            g = self.t("mul", self.extremes(r), g)  # 0 * (g / 0) is NaN, as in torch, where nothing is equal to NaN
        elif kind == "logsumexp":
            value = self._value_of(r)  # of a row of nothing but -inf it is that
            offset = self.t("where", self.t("eq", value, float("-inf")), 0.0, value)
            g = self.t("mul", g, self.t("exp", self.t("sub", self.values[inner], offset)))
        self._add(inner, g)

    def _through(self, index: int, node: Node) -> None:
        """From a node's gradient to those of its inputs."""
        g, inputs = self.gradients[index], [self.values[i] for i in node.inputs]
        match node.op:
            case "cast":
                self._add(node.inputs[0], g)
            case "chunk":
                halves = self.halves.setdefault(node.inputs[0], {})
                which = node.value[0]
                halves[which] = self.t("add", halves[which], g) if which in halves else g
            case "interleave":
                for which, source in enumerate(node.inputs):
                    extent = g.extent._replace(width=2)
                    self._add(source, self.t.add("chunk", extent, g, value=(which, node.value)))
            case "quantize" | "scale" | "top_k_softmax":
                raise refused(f"{node.op}: it has no gradient; call it under torch.no_grad()", node.where)
            case _ if (function := FUNCTIONS.get(node.op)) and function.gradient:
                found = function.gradient(g, self.values[index], *inputs)
                for source, x in zip(node.inputs, found if isinstance(found, tuple) else (found,), strict=True):
                    if x is not None:
                        self._add(source, x)

    def _add(self, node: int, g: Traced) -> None:
        if self.old.nodes[node].op == "constant":
            return
        self.gradients[node] = self.t("add", self.gradients[node], g) if node in self.gradients else g


def _name(node: Node) -> str | None:
    return PRODUCT if node.op == "accumulator" else node.value if node.op == "operand" else None


def _axis(extent: Extent) -> str:
    """Over what the gradient of an operand is summed that is no matrix."""
    if extent.width:
        return "m"
    return "n" if extent.height or extent.batch else "all"


def _inner(graph: Graph, result: Result) -> Extent:
    """The extent of what a result stores or reduces."""
    node = graph.nodes[result.node]
    return graph.extents()[node.inputs[0] if node.op == "reduce" else result.node]


def _rounded_alike(graph: Graph, result: Result) -> list[int]:
    """The nodes in whose rounded values a maximum or minimum can be found again: what it is of, and what that is of by
    functions that commute with rounding."""
    found = list(graph.nodes[result.node].inputs)
    while graph.nodes[found[-1]].op in _ROUNDED_ALIKE:
        found += graph.nodes[found[-1]].inputs
    return found


def _base(graph: Graph, result: Result) -> Result | None:
    """The result that stores one of these, if there is one."""
    nodes = _rounded_alike(graph, result)
    return next((r for r in graph.results if r.node in nodes), None)
