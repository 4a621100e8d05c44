"""From nodes of torch's graphs to an epilogue: aten's operations on traced values, by the table of epilogues' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gemmsmith.core.dtypes import FP32, DType, as_dtype, in_fp32
from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import Extent, Graph, Operand, Result
from gemmsmith.epilogue.frontend.values import Traced, Tracing, call
from gemmsmith.epilogue.lines import refused
from gemmsmith.epilogue.passes.rewrite import pruned
from gemmsmith.torch.compiler.nodes import Node, constant, dtype, kind, name, same, shape, size, value
from gemmsmith.torch.compiler.products import Product
from gemmsmith.torch.compiler.traffic import Traffic, moved

REDUCTIONS = {"amax": "max", "amin": "min"} | {kind: kind for kind in ("sum", "mean", "max", "min", "logsumexp")}
"""What an epilogue calls aten's."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of values; float64 where a is float64, and there no other. Not fp8: torch's
rule for what overflows need not be the epilogue's."""
READ = (*FLOATS, torch.bool, torch.int32, torch.int64)
"""The dtypes of operands; float64 too where a is float64."""
DEEPEST = 50
"""Operations, one after the other, that are pulled in together."""
AXES = {"n": -1, "m": -2, "all": None}


class Epilogue(Tracing):
    """The epilogue of a product while nodes are joined to it.

    `values`: what is known of the product's values and of those that are computed beside them. `reads`: the nodes of
    operands that computing such a value takes, beside what the product's values take themselves.
    """

    def __init__(self, product: Product, traffic: Traffic) -> None:
        super().__init__(product.shape)
        self.of, self.traffic = product, traffic
        self.values: dict[Node, Traced] = {}
        self.reads: dict[Node, frozenset[Node]] = {}
        self.operands: dict[Node, Operand] = {}
        self.numbers: dict[str, float] = {}
        self.joined: set[Node] = set()
        self._frontiers: dict[Node, set[Node]] = {}
        self._begin()

    def _begin(self) -> None:
        """The values that the product's own node has."""
        product, graph = self.of, self.of.epilogue
        if graph is not None:
            return self._continue(graph)
        found = self.add("accumulator", Extent(True, 1, 1))
        self.reads[product.node] = frozenset()
        if product.term:
            term, beta, alpha = product.term
            found = found if alpha == 1 else self("mul", found, alpha)
            if beta != 0:  # else the term is not read: it may be NaN
                bias = self._read(term, shape(product.node))
                self.reads[product.node] = self._leaves([term])
                found = self("add", found, bias if beta == 1 else self("mul", bias, beta))
        self._join(product.node, found)

    def _continue(self, graph: Graph) -> None:
        """Goes on from the epilogue that the product has."""
        names = {}
        for operand in graph.operands:
            given = self.of.operands[operand.name]
            if operand.dtype is None:
                names[operand.name] = f"n{len(self.numbers)}"
                self.numbers[names[operand.name]] = given
            else:
                names[operand.name] = self._operand(given, operand.extent, operand.dtype).name
        self.nodes = [replace(n, value=names[n.value]) if n.op == "operand" else n for n in graph.nodes]
        self.reads[self.of.node] = frozenset(self.operands)
        for r in graph.results:
            if r.name in self.of.results:
                found = Traced(self, r.node, graph.extents()[r.node])
                found.keepdim = r.keepdim
                self._join(self.of.results[r.name], found)
        self.joined.add(self.of.node)

    def value(self, x: Any) -> Traced:
        """Numbers are as they are in torch, or refused."""
        if isinstance(x, Traced) and x.op == "reduce":
            raise refused("it needs a reduction of the product, which is known when all of it is computed")
        if isinstance(x, (int, float)) and x == x and in_fp32(x) != x:
            raise refused(f"{x} is {in_fp32(x)} in fp32")
        return super().value(x)

    # -- joining ---------------------------------------------------------------------------------------------------

    def join(self, node: Node) -> None:
        """Makes a node's value one of the epilogue's. EpilogueError, which says why, where it cannot be."""
        self._join(node, self._compute(node))

    def _join(self, node: Node, found: Traced) -> None:
        self.values[node] = self._rounded(node, found)
        self.reads.setdefault(node, frozenset())
        self.joined.add(node)

    def _compute(self, node: Node) -> Traced:
        if kind(node) == "opaque":
            raise refused(f"{name(node) or node.name} reads it from memory")
        if value(node) is None:
            raise refused(f"{name(node) or node.name}: it gives more than one tensor")
        if not (dtype(node) == torch.bool or self._fits(dtype(node))):
            raise refused(f"{name(node) or node.name}: it gives {dtype(node)}")
        found = self._rounded(node, self._value(node))
        self.reads[node] = self._leaves(node.all_input_nodes)
        return found

    def _rounded(self, node: Node, found: Traced) -> Traced:
        """A node's value in its dtype: what is computed of it is computed of what is stored, as in eager mode."""
        return found.storing(held(dtype(node))) if dtype(node).is_floating_point else found

    def _value(self, node: Node) -> Traced:
        if name(node) in REDUCTIONS and kind(node) == "reduction":
            return self._reduced(node)
        if kind(node) == "view":
            self._whole(node)
            return self.value(self._read(node.args[0], shape(node)))
        if kind(node) != "pointwise":
            raise refused(f"{name(node) or node.name}: it is not computed element by element")
        self._whole(node)
        if name(node) == "hypot":
            raise refused(f"{name(node)}: its squares may be beyond fp32")
        if dtype(node) == torch.bool and any(is_integer(x) for x in node.all_input_nodes):
            raise refused(f"{name(node)}: it compares integers, which fp32 does not hold")
        args = [self._argument(x, shape(node)) for x in node.args]
        kwargs = {key: self._argument(x, shape(node)) for key, x in node.kwargs.items()}
        if name(node) == "convert_element_type":
            return self.value(args[0]) if args[1].is_floating_point else self("ne", args[0], 0)
        return call(name(node), name(node), tuple(args), kwargs)  # type: ignore[no-any-return]

    def _argument(self, x: Any, like: tuple[Any, ...]) -> Any:
        return self._read(x, like) if isinstance(x, torch.fx.Node) else x

    def _reduced(self, node: Node) -> Traced:
        x = node.args[0]
        if x not in self.joined:
            raise refused(f"{name(node)}: it does not reduce the product")
        axis = self._axis(node)
        if axis is None:
            raise refused(f"{name(node)}: it reduces some indices of the product's rows, or of its columns")
        return self.reduce(REDUCTIONS[name(node)], self.values[x], AXES[axis], False)

    def _axis(self, node: Node) -> str | None:
        """What a reduction runs over: "n", the columns, "m", the rows, or "all"."""
        dims_of, rank = shape(node.args[0]), len(shape(node.args[0]))
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        reduced = {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}
        parts = self._parts(dims_of, dims_of)
        if parts is None:
            return None
        n, m = parts[-1], parts[-2]
        everything = [d for part in parts for d in part]
        for axis, wanted in (("all", everything), ("n", n), ("m", m)):
            if reduced == set(wanted):
                return axis
        return None

    # -- shapes ----------------------------------------------------------------------------------------------------

    def _whole(self, node: Node) -> None:
        if self._extent(shape(node), shape(node)) != self._matrix:
            raise refused(f"{name(node)}: it has the shape {tuple(shape(node))}, and the product {self.product}")

    def _fits(self, kind: torch.dtype) -> bool:
        """Whether values of a dtype are the epilogue's."""
        return kind == torch.float64 if dtype(self.of.a) == torch.float64 else kind in FLOATS

    @property
    def _matrix(self) -> Extent:
        return Extent(len(self.product) == 3, 1, 1)

    def _parts(self, like: Sequence[Any], whole: Sequence[Any]) -> list[list[int]] | None:
        """The indices of a shape that make up the batch, if there is one, the rows and the columns of the product."""
        count = len(self.product)
        if len(like) < count:
            return None
        lead = len(like) - count + 1
        parts = [list(range(lead)), *([d] for d in range(lead, len(like)))]
        for part, extent in zip(parts, self.product, strict=True):
            length = 1
            for d in part:
                length *= like[d]
            if not same(length, extent):
                return None
        return parts

    def _extent(self, given: tuple[Any, ...], like: tuple[Any, ...]) -> Extent | None:
        """Along what a value varies that is broadcast to a shape, which is that of the whole product."""
        parts = self._parts(like, like)
        if parts is None or len(given) > len(like):
            return None
        padded = (*[1] * (len(like) - len(given)), *given)
        varies = []
        for part in parts:
            if all(same(padded[d], 1) for d in part) and not all(same(like[d], 1) for d in part):
                varies.append(0)
            elif all(same(padded[d], like[d]) for d in part):
                varies.append(1)
            else:
                return None
        return Extent(len(varies) == 3 and bool(varies[0]), varies[-2], varies[-1])  # type: ignore[arg-type]

    # -- what is read ------------------------------------------------------------------------------------------------

    def _leaves(self, nodes: Sequence[Node]) -> frozenset[Node]:
        """The operands that computing some values takes, beside what the joined ones take."""
        others = [x for x in nodes if x not in self.joined]
        return frozenset(leaf for x in others for leaf in self.reads.get(x, ()))

    def _read(self, node: Node, like: tuple[Any, ...]) -> Any:
        """A node's value where a value of the product's shape is computed of it."""
        if node in self.values:
            return self.values[node]
        number = constant(node)
        if number is not None:
            return number
        if value(node) is None:
            raise refused(f"{node.name}: it is a number that is known when the graph runs")
        if name(node) == "expand":
            found = self._read(node.args[0], like)
            self.reads[node] = self._leaves([node.args[0]])
            return found
        extent = self._extent(shape(node), like)
        if extent is None:
            raise refused(f"{node.name}: its shape {tuple(shape(node))} is neither a row, a column nor a matrix")
        if self._frontier(node) != {node}:
            try:
                self.values[node] = self._compute(node)
            except EpilogueError:
                pass
        if node not in self.values:
            self.values[node] = self._operand_value(node, extent)
        return self.values[node]

    def _operand_value(self, node: Node, extent: Extent) -> Traced:
        if not (dtype(node) in READ or self._fits(dtype(node))) or value(node).device != value(self.of.a).device:
            raise refused(f"{node.name}: it is {dtype(node)} on {value(node).device}")
        self.reads[node] = frozenset({node})
        operand = self._operand(node, extent, held(dtype(node)))
        found = self.add("operand", extent, value=operand.name)
        found.condition = dtype(node) == torch.bool
        return found

    def _operand(self, node: Node, extent: Extent, kept: DType) -> Operand:
        return self.operands.setdefault(node, Operand(f"x{len(self.operands)}", extent, kept))

    def _frontier(self, node: Node, depth: int = 0) -> set[Node]:
        """What to read in place of a node's value: itself, or what it is computed of where that is fewer bytes."""
        if node in self._frontiers:
            return self._frontiers[node]
        found = {node}
        if depth == DEEPEST:
            pass
        elif name(node) == "expand" or kind(node) == "view":
            found = self._frontier(node.args[0], depth + 1)
        elif kind(node) == "pointwise" and self._extent(shape(node), shape(node)) == self._matrix:
            others = [x for x in node.all_input_nodes if constant(x) is None]
            inner = {leaf for x in others for leaf in (self._frontier(x, depth + 1) if value(x) is not None else {x})}
            most = size(node) - 1 if self.traffic.lies(node) else 2 * size(node)  # or it is written first
            if moved(inner) <= most:
                found = inner
        self._frontiers[node] = found
        return found

    def given(self, extent: Extent) -> tuple[Any, ...]:
        """The shape in which the operator is given an operand."""
        *batch, m, n = self.product
        lengths = (m if extent.height else 1, n if extent.width else 1)
        if batch and extent.batch:
            return (batch[0], *lengths)
        return lengths if extent.height else lengths[1:] if extent.width else ()

    # -- the result --------------------------------------------------------------------------------------------------

    def graph(self, stored: Sequence[Node]) -> Graph:
        """The epilogue's graph, with the values of some nodes as results, in their dtypes. A cast to a wider dtype that
        alone is stored, to be returned, as a weight's gradient is, is not of a rounded value: nobody sees that one."""
        alone = len(stored) == 1 and is_widening(stored[0]) and all(user.op == "output" for user in stored[0].users)
        nodes = [self.values[x.args[0] if alone else x].node for x in stored]
        named = enumerate(zip(nodes, stored, strict=True))
        results = [Result(f"out{i or ''}", value, held(dtype(x))) for i, (value, x) in named]
        numbers = [Operand(x, Extent()) for x in self.numbers]
        return pruned(Graph(tuple(self.nodes), (*self.operands.values(), *numbers), tuple(results)))


def is_extreme(node: Node) -> bool:
    """Whether it is the largest or smallest of some values. Its gradient is that of the value that equals it."""
    return REDUCTIONS.get(name(node)) in ("max", "min")


def as_stored(node: Node) -> Node:
    """What a node is a view of, or the same numbers in a wider dtype."""
    while kind(node) == "view" or is_widening(node):
        node = node.args[0]
    return node


def is_widening(node: Node) -> bool:
    """Whether it is a cast to a wider dtype."""
    return name(node) == "convert_element_type" and dtype(node).itemsize > dtype(node.args[0]).itemsize


def held(of: torch.dtype) -> DType:
    """How an epilogue's graph calls the dtype of a tensor: float64 is what fp32 is where a is float64."""
    return FP32 if of == torch.float64 else as_dtype(of, integers=True)


def is_integer(node: Node) -> bool:
    """Whether it is a tensor of integers."""
    return value(node) is not None and not dtype(node).is_floating_point and dtype(node) != torch.bool
