"""Translation of FX nodes into an epilogue: aten operations on traced values, by the table of epilogue operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from gemmsmith.core.dtypes import DType, overflow_as_fp32
from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Operand, Result
from gemmsmith.graph.frontend.values import Traced, Tracer, call
from gemmsmith.graph.passes.rewrite import eliminate_dead_code
from gemmsmith.graph.source_location import epilogue_error
from gemmsmith.torch.api import OPERAND_DTYPES
from gemmsmith.torch.compiler.matmuls import Matmul
from gemmsmith.torch.compiler.nodes import (
    Node,
    dtype,
    fake_tensor,
    fill_value,
    node_kind,
    op_name,
    reduced_dims,
    shape,
    size_bytes,
    statically_equal,
)
from gemmsmith.torch.compiler.traffic import InductorTraffic, total_bytes
from gemmsmith.torch.graph_serialization import graph_dtype

REDUCTIONS = {"amax": "max", "amin": "min"} | {kind: kind for kind in ("sum", "mean", "max", "min", "logsumexp")}
"""Epilogue reductions by the names of aten's."""
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of values that the epilogue computes; float64 alone if a is float64. Not fp8: torch and an epilogue may treat
values beyond its range differently."""

MAX_PRODUCER_DEPTH = 50
"""Longest chain of operations before an input that is recomputed in the epilogue. Chosen; not measured."""


class FxEpilogueTracer(Tracer):
    """The epilogue of a matmul, to which `fuse` adds nodes of an FX graph.

    Attributes:
        values: traced values by node, of fused nodes, and of nodes that fused ones are computed from.
        inputs_read: by such a node, the tensors that computing it reads, in addition to those that fused nodes read.
        operands: the epilogue's operands by the nodes of the tensors.
        numbers: the values of the epilogue's operands that are numbers, by name.
    """

    def __init__(self, matmul: Matmul, traffic: InductorTraffic) -> None:
        """Start the epilogue, with the matmul's own nodes.

        Of a pair of matmuls one GEMM computes both: each value has one column per two of the accumulator.
        """
        self._columns_per_value: Literal[1, 2] = 2 if matmul.second else 1
        super().__init__((*matmul.shape[:-1], self._columns_per_value * matmul.shape[-1]))
        self.matmul, self.traffic = matmul, traffic
        self.values: dict[Node, Traced] = {}
        self.inputs_read: dict[Node, frozenset[Node]] = {}
        self.operands: dict[Node, Operand] = {}
        self.numbers: dict[str, float] = {}
        self.fused: set[Node] = set()
        self._cheapest: dict[Node, set[Node]] = {}
        self._trace_matmul()

    def _trace_matmul(self) -> None:
        """Trace the values of the matmul's own nodes, with the bias of addmm, and fuse them."""
        matmul, graph = self.matmul, self.matmul.epilogue
        if graph is not None:
            return self._resume(graph)
        value = self.add("accumulator")
        if matmul.second:
            for i, node in enumerate(matmul.nodes):
                self._record_fused(node, self.add("chunk", value, attribute=(i, "n")))
            return
        self.inputs_read[matmul.node] = frozenset()
        if matmul.bias_term:
            term, beta, alpha = matmul.bias_term
            value = value if alpha == 1 else self("mul", value, alpha)
            if beta != 0:  # with beta = 0 the bias is not read, for it may be NaN
                bias = self._read(term, shape(matmul.node))
                self.inputs_read[matmul.node] = self._inputs_read_by([term])
                value = self("add", value, bias if beta == 1 else self("mul", bias, beta))
        self._record_fused(matmul.node, value)

    def _resume(self, graph: EpilogueGraph) -> None:
        """Start from the epilogue of a matmul that already is one of gemmsmith's operators, so that it is extended."""
        names = {}
        for operand in graph.operands:
            operand_value = self.matmul.operands[operand.name]
            if operand.dtype is None:
                names[operand.name] = f"n{len(self.numbers)}"
                self.numbers[names[operand.name]] = operand_value
            else:
                names[operand.name] = self._operand(operand_value, operand.broadcast_dims, operand.dtype).name
        self.nodes = [replace(n, attribute=names[n.attribute]) if n.op == "operand" else n for n in graph.nodes]
        self.inputs_read[self.matmul.node] = frozenset(self.operands)
        for r in graph.results:
            if r.name in self.matmul.results:
                value = Traced(self, r.node, graph.broadcast_dims[r.node])
                value.keepdim = r.keepdim
                self._record_fused(self.matmul.results[r.name], value)
        self.fused.add(self.matmul.node)

    def value(self, x: Any) -> Traced:
        """Return x, a traced value or a number, as a traced value.

        Raises EpilogueError for a reduction's result, which is known only after the kernel, and for a number beyond
        fp32's range.
        """
        if isinstance(x, Traced) and x.op == "reduce":
            raise epilogue_error("it needs a reduction over the whole matmul, which is only known after the kernel")
        if isinstance(x, (int, float)) and x == x and overflow_as_fp32(x) != x:
            raise epilogue_error(f"{x} is {overflow_as_fp32(x)} in fp32")
        return super().value(x)

    # -- fusing ----------------------------------------------------------------------------------------------------

    def fuse(self, node: Node) -> None:
        """Add a node to the epilogue. Raises EpilogueError with the reason if that is not possible."""
        self._record_fused(node, self._trace_node(node))

    def _record_fused(self, node: Node, value: Traced) -> None:
        """Note that the epilogue computes a node, as this value, rounded to the node's dtype."""
        self.values[node] = self._round_to_dtype(node, value)
        self.inputs_read.setdefault(node, frozenset())
        self.fused.add(node)

    def _trace_node(self, node: Node) -> Traced:
        """Return a node's value, rounded to its dtype. Raises EpilogueError, with the reason, if it cannot be fused."""
        if node_kind(node) == "opaque":
            raise epilogue_error(f"{op_name(node) or node.name} is not a pointwise op or a reduction")
        if fake_tensor(node) is None:
            raise epilogue_error(f"{op_name(node) or node.name}: it returns more than one tensor")
        if not (dtype(node) == torch.bool or self._is_computable_dtype(dtype(node))):
            raise epilogue_error(f"{op_name(node) or node.name}: it returns {dtype(node)}")
        value = self._round_to_dtype(node, self._evaluate(node))
        self.inputs_read[node] = self._inputs_read_by(node.all_input_nodes)
        return value

    def _round_to_dtype(self, node: Node, value: Traced) -> Traced:
        """Return a node's value rounded to the node's dtype, as eager mode does. Of bools, True + True is True."""
        if dtype(node) == torch.bool:
            return value if value.is_bool else self("ne", value, 0)
        return value.with_pending_cast(graph_dtype(dtype(node))) if dtype(node).is_floating_point else value

    def _evaluate(self, node: Node) -> Traced:
        """Return a node's traced value before rounding, from the values of its inputs.

        Raises EpilogueError if an epilogue cannot compute it.
        """
        if op_name(node) in REDUCTIONS and node_kind(node) == "reduction":
            return self._evaluate_reduction(node)
        if node_kind(node) == "view":
            self._check_full_shape(node)
            return self.value(self._read(node.args[0], shape(node)))
        if node_kind(node) != "pointwise":
            raise epilogue_error(f"{op_name(node) or node.name}: it is not elementwise")
        self._check_full_shape(node)
        if op_name(node) == "hypot":
            raise epilogue_error(f"{op_name(node)}: its squares may overflow fp32")
        if dtype(node) == torch.bool and any(is_integer(x) for x in node.all_input_nodes):
            raise epilogue_error(f"{op_name(node)}: it compares integers, which fp32 does not hold exactly")
        args = [self._argument(x, shape(node)) for x in node.args]
        kwargs = {key: self._argument(x, shape(node)) for key, x in node.kwargs.items()}
        if op_name(node) == "convert_element_type":
            return self.value(args[0])
        return call(op_name(node), op_name(node), tuple(args), kwargs)  # type: ignore[no-any-return]

    def _argument(self, x: Any, like: tuple[Any, ...]) -> Any:
        return self._read(x, like) if isinstance(x, torch.fx.Node) else x

    def _evaluate_reduction(self, node: Node) -> Traced:
        """Return a reduction's traced value.

        Raises EpilogueError if it is not of a fused node, or does not reduce exactly the dimensions that form N, those
        that form M, or all.
        """
        x = node.args[0]
        if x not in self.fused:
            raise epilogue_error(f"{op_name(node)}: it does not reduce the matmul's result")
        reduced, groups = reduced_dims(node), self._group_dims(shape(x))
        if groups:
            for dim, dims in ((None, range(len(shape(x)))), (-1, groups[-1]), (-2, groups[-2])):
                if reduced == set(dims):
                    return self.reduce(REDUCTIONS[op_name(node)], self.values[x], dim, False)
        raise epilogue_error(f"{op_name(node)}: it reduces only some of the dimensions that form M or N")

    # -- shapes ----------------------------------------------------------------------------------------------------

    def _check_full_shape(self, node: Node) -> None:
        """Raise EpilogueError if a node does not have the matmul's shape, of which the first dimension may be split."""
        if self._broadcast_dims(shape(node), shape(node)) != self._no_broadcast:
            raise epilogue_error(
                f"{op_name(node)}: its shape {tuple(shape(node))} is not the matmul's, {self.matmul.shape}"
            )

    def _is_computable_dtype(self, dtype_: torch.dtype) -> bool:
        return dtype_ == torch.float64 if dtype(self.matmul.a) == torch.float64 else dtype_ in VALUE_DTYPES

    @property
    def _no_broadcast(self) -> BroadcastDims:
        """The broadcast dims of a value that varies along all dimensions of the matmul."""
        return BroadcastDims(len(self.acc_shape) == 3, 1, self._columns_per_value)

    def _group_dims(self, like: Sequence[Any]) -> list[list[int]] | None:
        """Return for each dimension of the matmul, (batch,) M and N, which dimensions of a shape form it.

        Several leading ones may form the first: (4, 5, n) has [[0, 1], [2]] for a matmul of (20, n). None if the shape
        `like` is not the matmul's.
        """
        count = len(self.acc_shape)
        if len(like) < count:
            return None
        lead = len(like) - count + 1
        groups = [list(range(lead)), *([d] for d in range(lead, len(like)))]
        lengths = [math.prod(like[d] for d in group) for group in groups]
        return groups if all(map(statically_equal, lengths, self.matmul.shape)) else None

    def _broadcast_dims(self, shape_: tuple[Any, ...], like: tuple[Any, ...]) -> BroadcastDims | None:
        """Return along which of the matmul's dimensions a tensor of shape `shape_` varies.

        None if `like`, to which it is broadcast, is not the matmul's shape, or if the tensor varies along only some of
        the dimensions that form M, N or the batch.
        """
        groups = self._group_dims(like)
        if groups is None or len(shape_) > len(like):
            return None
        padded = (*[1] * (len(like) - len(shape_)), *shape_)
        varies = []
        for group in groups:
            if all(statically_equal(padded[d], like[d]) for d in group):
                varies.append(1)
            elif all(statically_equal(padded[d], 1) for d in group):
                varies.append(0)
            else:
                return None
        columns = self._columns_per_value if varies[-1] else 0
        return BroadcastDims(len(varies) == 3 and bool(varies[0]), varies[-2], columns)  # type: ignore[arg-type]

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _inputs_read_by(self, nodes: Sequence[Node]) -> frozenset[Node]:
        """Return the tensors that computing `nodes` reads, in addition to those that fused nodes read."""
        unfused = [x for x in nodes if x not in self.fused]
        return frozenset(input_ for x in unfused for input_ in self.inputs_read.get(x, ()))

    def _read(self, node: Node, like: tuple[Any, ...]) -> Any:
        """Return the value, traced or a number, of a node that is an input of a node with the shape `like`.

        It is recomputed in the epilogue if that reads fewer bytes; otherwise the node becomes an operand. Raises
        EpilogueError if it cannot be one.
        """
        if node in self.values:
            return self.values[node]
        number = fill_value(node)
        if number is not None:
            return number
        if fake_tensor(node) is None:
            raise epilogue_error(f"{node.name}: it is a number that is only known when the graph runs")
        if op_name(node) == "expand":
            value = self._read(node.args[0], like)
            self.inputs_read[node] = self._inputs_read_by([node.args[0]])
            return value
        dims = self._broadcast_dims(shape(node), like)
        if dims is None:
            raise epilogue_error(f"{node.name}: its shape {tuple(shape(node))} is neither a row, a column nor a matrix")
        if self._cheapest_inputs(node) != {node}:
            try:
                self.values[node] = self._trace_node(node)
            except EpilogueError:
                pass
        if node not in self.values:
            self.values[node] = self._operand_value(node, dims)
        return self.values[node]

    def _operand_value(self, node: Node, dims: BroadcastDims) -> Traced:
        """Return the traced value of a tensor that becomes an operand; EpilogueError if kernels cannot read it."""
        fake = fake_tensor(node)
        is_readable = fake.dtype in OPERAND_DTYPES or self._is_computable_dtype(fake.dtype)
        if not is_readable or fake.device != fake_tensor(self.matmul.a).device:
            raise epilogue_error(f"{node.name}: it is {fake.dtype} on {fake.device}")
        self.inputs_read[node] = frozenset({node})
        operand = self._operand(node, dims, graph_dtype(dtype(node)))
        value = self.add("operand", attribute=operand.name, dims=dims)
        value.is_bool = dtype(node) == torch.bool
        return value

    def _operand(self, node: Node, dims: BroadcastDims, dtype_: DType) -> Operand:
        """Return the operand of a tensor's node, which is made if there is none."""
        return self.operands.setdefault(node, Operand(f"x{len(self.operands)}", dims, dtype_))

    def _cheapest_inputs(self, node: Node, depth: int = 0) -> set[Node]:
        """Return the tensors from which the epilogue reads or recomputes a node with the fewest bytes.

        This is the node itself if recomputing it would read more bytes.
        """
        if node in self._cheapest:
            return self._cheapest[node]
        inputs = {node}
        if depth == MAX_PRODUCER_DEPTH:
            pass
        elif op_name(node) == "expand" or node_kind(node) == "view":
            inputs = self._cheapest_inputs(node.args[0], depth + 1)
        elif node_kind(node) == "pointwise" and self._broadcast_dims(shape(node), shape(node)) == self._no_broadcast:
            computed = [x for x in node.all_input_nodes if fill_value(x) is None]
            producers = {
                input_
                for x in computed
                for input_ in (self._cheapest_inputs(x, depth + 1) if fake_tensor(x) is not None else {x})
            }
            # To read a node that is not in memory (not materialized), another kernel would have to write it first
            max_bytes = size_bytes(node) - 1 if self.traffic.is_materialized(node) else 2 * size_bytes(node)
            if total_bytes(producers) <= max_bytes:
                inputs = producers
        self._cheapest[node] = inputs
        return inputs

    def _operand_shape(self, dims: BroadcastDims) -> tuple[Any, ...]:
        """Return the shape in which an operand with these broadcast dims is passed to the operator."""
        *batch, m, n = self.matmul.shape
        lengths = (m if dims.varies_along_m else 1, n if dims.varies_along_n else 1)
        if batch and dims.batch:
            return (batch[0], *lengths)
        return lengths if dims.varies_along_m else lengths[1:] if dims.varies_along_n else ()

    def arguments(self, graph: EpilogueGraph) -> tuple[list[float], list[tuple[Node, tuple[Any, ...]]]]:
        """Return the numbers and the tensors that the operator gets for a graph of this epilogue, in its order.

        A tensor is a pair of its node and the shape in which it is passed to the operator.
        """
        nodes = {operand.name: x for x, operand in self.operands.items()}
        tensors = [(nodes[o.name], self._operand_shape(o.broadcast_dims)) for o in graph.operands if o.dtype]
        return [self.numbers[name] for name in graph.number_names], tensors

    # -- results -----------------------------------------------------------------------------------------------------

    def graph(self, stored: Sequence[Node]) -> EpilogueGraph:
        """Return the epilogue's graph whose results are the values of the nodes `stored`, in these nodes' dtypes."""
        sources = [stored[0].args[0]] if _is_only_widened(stored) else stored
        results = [
            Result(f"out{i or ''}", self.values[source].node, graph_dtype(dtype(x)))
            for i, (source, x) in enumerate(zip(sources, stored, strict=True))
        ]
        numbers = [Operand(x, BroadcastDims()) for x in self.numbers]
        return eliminate_dead_code(
            EpilogueGraph(tuple(self.nodes), (*self.operands.values(), *numbers), tuple(results))
        )


def _is_only_widened(stored: Sequence[Node]) -> bool:
    """Return whether the only result is a cast to a wider dtype, which the FX graph returns, as a weight's gradient is.

    Then the result need not be rounded to the narrower dtype first.
    """
    return len(stored) == 1 and is_widening(stored[0]) and all(user.op == "output" for user in stored[0].users)


def is_min_or_max(node: Node) -> bool:
    """Return whether a node is a maximum or minimum. Its gradient goes to the elements that are equal to it."""
    return REDUCTIONS.get(op_name(node)) in ("max", "min")


def strip_views_and_widening(node: Node) -> Node:
    """Return the node of which a node is a view, or a cast to a wider dtype, or several of these in sequence."""
    while node_kind(node) == "view" or is_widening(node):
        node = node.args[0]
    return node


def is_widening(node: Node) -> bool:
    """Return whether a node is a cast to a wider dtype."""
    return op_name(node) == "convert_element_type" and dtype(node).itemsize > dtype(node.args[0]).itemsize


def is_integer(node: Node) -> bool:
    """Return whether a node is a tensor of integers."""
    return fake_tensor(node) is not None and not dtype(node).is_floating_point and dtype(node) != torch.bool
