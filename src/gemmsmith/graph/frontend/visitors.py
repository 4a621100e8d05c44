"""Explicit epilogue visitor trees, in CUTLASS's terms, which make a graph.

    EVT(Compute("GELU_taylor"), EVT(Compute("plus"), AccFetch(), RowBroadcast("bias")))

The terms are those of CUTLASS 3's epilogue/fusion; the idea is of Chen et al., "EVT: Accelerating Deep Learning
Training with Epilogue Visitor Tree", ASPLOS 2024.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, ClassVar

from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.core.graph import OPERATIONS, BroadcastDims, EpilogueGraph, Node, Operand, Result
from gemmsmith.graph.frontend.classify import describe
from gemmsmith.graph.functions import Function
from gemmsmith.graph.reductions import REDUCTIONS
from gemmsmith.graph.source_location import epilogue_error, user_source_line

D_NAME = "out"
"""Name of the result D."""


class Visitor(ABC):
    """A part of a visitor tree: a single node, or nodes nested in an EVT or a TopologicalVisitor."""

    arity: int = 0  # number of inputs, which come from children or edges
    discards_d: bool = False  # as the root, its value is not stored
    location: str  # the user's source line

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a visitor and record the user's source line."""
        self = super().__new__(cls)
        self.location = user_source_line()
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def emit(self, builder: GraphBuilder, inputs: Sequence[int]) -> int:
        """Add the visitor's nodes to the graph and return the index of its value.

        `inputs`: the indices of its inputs' values, `arity` of them.
        """

    def graph(self) -> EpilogueGraph:
        """Return the tree's graph: D, named "out", is the root's value; other results follow, under their own names.

        Operands have the broadcast dims of their visitors; `bind_operands` adds their batches and dtypes. Raises
        EpilogueError if the tree is incomplete, or has an operand that no result needs.
        """
        if self.arity:
            raise epilogue_error(f"{self!r} takes {_inputs(self.arity)}; use EVT({self!r}, ...)", self.location)
        builder = GraphBuilder()
        root = self.emit(builder, ())
        if not self.discards_d:
            builder.results.insert(0, Result(D_NAME, root))
        graph = EpilogueGraph(tuple(builder.nodes), tuple(builder.operands.values()), tuple(builder.results))
        broadcast_dims, needed = graph.broadcast_dims, graph.nodes_needed_by(r.node for r in graph.results)
        for i, node in enumerate(graph.nodes):
            if node.op == "operand" and i not in needed:
                raise epilogue_error(f"{node.attribute!r}: no result needs it; leave it out", node.location)
        for result in graph.results:
            node = graph.nodes[result.node]
            matrix = node.inputs[0] if node.op == "reduce" else result.node
            if not broadcast_dims[matrix].is_matrix:
                raise epilogue_error(
                    f"{result.name!r} does not depend on a matrix; use AccFetch, SrcFetch or AuxLoad", self.location
                )
        if not graph.results:
            raise epilogue_error(
                "nothing is stored: Void discards D, so use a reduction or an AuxStore in its input", self.location
            )
        return graph


class GraphBuilder:
    """A graph under construction. Equal leaves become one node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.operands: dict[str, Operand] = {}
        self.results: list[Result] = []

    def node(self, op: str, inputs: Sequence[int] = (), value: Any = None, location: str = "") -> int:
        """Add a node, unless it is a leaf that equals an earlier one, and return its index. `value`: its attribute."""
        node = Node(op, tuple(inputs), value, location)
        if not inputs and node in self.nodes:
            return self.nodes.index(node)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def operand(self, name: str, broadcast_dims: BroadcastDims, location: str) -> int:
        """Add the node of the operand `name` and return its index. Raises EpilogueError if the name cannot be used."""
        self._check_name(name, [r.name for r in self.results], location)
        operand = self.operands.setdefault(name, Operand(name, broadcast_dims))
        if operand.broadcast_dims != broadcast_dims:
            raise epilogue_error(
                f"{name!r} is {describe(operand.broadcast_dims)} and {describe(broadcast_dims)}; use two names",
                location,
            )
        return self.node("operand", (), name, location)

    def result(self, name: str, node: int, dtype: DType | None, location: str) -> None:
        """Add the result `name`, the value of `node`. Raises EpilogueError if the name cannot be used."""
        self._check_name(name, list(self.operands), location)
        if any(r.name == name for r in self.results):
            raise epilogue_error(f"{name!r} is the name of two results; use two names", location)
        self.results.append(Result(name, node, dtype))

    def _check_name(self, name: Any, names_of_other_kind: list[str], location: str) -> None:
        """Raise EpilogueError if an operand (or result) cannot have this name.

        `names_of_other_kind`: the names of the results (or operands), which are taken.
        """
        if not isinstance(name, str) or not name.isidentifier():
            received = repr(name) if isinstance(name, str) else type(name).__name__
            raise epilogue_error(f"got {received} as a name; use a valid Python identifier, such as 'bias'", location)
        if name == D_NAME:
            raise epilogue_error(f"{name!r} is D's name; use another", location)
        if name in names_of_other_kind:
            raise epilogue_error(
                f"{name!r} is the name of an operand and of a result; use another for one of them", location
            )


# -- leaves -----------------------------------------------------------------------------------------------------------


class AccFetch(Visitor):
    """The accumulator, A @ B."""

    def emit(self, builder: GraphBuilder, inputs: Sequence[int]) -> int:
        return builder.node("accumulator", location=self.location)


@dataclass(eq=False)
class _Load(Visitor):
    """A leaf that reads the operand `name`, whose broadcast dims are those of the class."""

    name: str
    broadcast_dims: ClassVar[BroadcastDims]

    def emit(self, builder: GraphBuilder, inputs: Sequence[int]) -> int:
        return builder.operand(self.name, self.broadcast_dims, self.location)


@dataclass(eq=False)
class SrcFetch(_Load):
    """The matrix C, (M, N)."""

    name: str = "c"
    broadcast_dims = BroadcastDims(rows_per_value=1, columns_per_value=1)


class AuxLoad(_Load):
    """Another matrix, (M, N)."""

    broadcast_dims = BroadcastDims(rows_per_value=1, columns_per_value=1)


class RowBroadcast(_Load):
    """A row, (N,): one value per column."""

    broadcast_dims = BroadcastDims(columns_per_value=1)


class ColBroadcast(_Load):
    """A column, (M, 1): one value per row."""

    broadcast_dims = BroadcastDims(rows_per_value=1)


class ScalarBroadcast(Visitor):
    """A scalar operand, by name, or a number, which is a constant in the kernel."""

    def __init__(self, value: str | float) -> None:
        if not isinstance(value, (str, Real)):
            raise epilogue_error(f"ScalarBroadcast: got {type(value).__name__}; use a name or a number", self.location)
        self.value = value

    def emit(self, builder: GraphBuilder, inputs: Sequence[int]) -> int:
        if isinstance(self.value, str):
            return builder.operand(self.value, BroadcastDims(), self.location)
        return builder.node("constant", (), self.value, self.location)

    def __repr__(self) -> str:
        return f"ScalarBroadcast({self.value!r})"


# -- functions --------------------------------------------------------------------------------------------------------

SYNONYMS = {
    "plus": "add", "minus": "sub", "multiply": "mul", "multiplies": "mul", "divide": "div", "divides": "div",
    "multiply_add": "fma", "homogeneous_multiply_add": "fma", "negate": "neg", "absolute_value": "abs",
    "inverse_square_root": "rsqrt", "gelu_taylor": "gelu_tanh", "leakyrelu": "leaky_relu",
}  # fmt: skip
"""CUTLASS's functors, in lower case -> functions."""
COMPOSED = {"identity": 1, "square": 1, "clamp": 3}
"""Arities of what `Compute` composes of functions."""


class Compute(Visitor):
    """An elementwise function: the name of a record or of a CUTLASS functor, "clamp", "square" or "identity".

    Numbers are its last inputs: Compute("LeakyReLU", 0.01), Compute("Clamp", 0, 6), Compute("minus", 1). Raises
    EpilogueError for another name and for more numbers than inputs.
    """

    def __init__(self, op: str, *parameters: float) -> None:
        """Look the function up, and check the numbers."""
        arities = {**COMPOSED, **{f.name: f.arity for f in OPERATIONS.values() if isinstance(f, Function)}}
        functions = {**{name: name for name in arities}, **SYNONYMS}
        if op.lower() not in functions:
            matches = difflib.get_close_matches(op.lower(), functions) or sorted(arities)
            raise epilogue_error(f"Compute: got {op!r}; use {', '.join(map(repr, matches))}", self.location)
        self.op, self.function, self.parameters = op, functions[op.lower()], parameters
        self.arity = arities[self.function] - len(parameters)
        if self.arity < 0 or not all(isinstance(p, Real) for p in parameters):
            raise epilogue_error(
                f"{self!r}: use at most {arities[self.function]} numbers after the name", self.location
            )

    def emit(self, builder: GraphBuilder, inputs: Sequence[int]) -> int:
        """Add the function's nodes, and those of its numbers."""
        node = partial(builder.node, location=self.location)
        x = [*inputs, *(node("constant", value=p) for p in self.parameters)]
        match self.function:
            case "identity":
                return x[0]
            case "square":
                return node("mul", (x[0], x[0]))
            case "clamp":
                return node("minimum", (node("maximum", x[:2]), x[2]))
        return node(self.function, x)

    def __repr__(self) -> str:
        return f"Compute({', '.join(map(repr, (self.op, *self.parameters)))})"


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class AuxStore(Visitor):
    """Stores its input, a matrix, as `dtype` (None: that of the caller's array), and returns the input."""

    name: str
    dtype: Any = None
    arity = 1

    def emit(self, builder: GraphBuilder, inputs: Sequence[int]) -> int:
        dtype = None if self.dtype is None else as_dtype(self.dtype, f"AuxStore({self.name!r}).dtype")
        builder.result(self.name, inputs[0], dtype, self.location)
        return inputs[0]


REDUCTION_SYNONYMS = {
    "plus": "sum", "add": "sum", "maximum": "max", "minimum": "min", "maximum_absolute_value_reduction": "amax",
}  # fmt: skip
"""CUTLASS's functors -> kinds of reductions."""
COMPOSED_REDUCTIONS = ("amax", "sum_of_squares")
"""Kinds that are a reduction of a function: of magnitudes, amax, and of squares."""


@dataclass(eq=False)
class _Reduction(Visitor):
    """Reduces its input to the result `name`, and returns the input.

    `kind`: a name of REDUCTIONS or COMPOSED_REDUCTIONS, or one of CUTLASS's in REDUCTION_SYNONYMS. `axis`: see
    `reduced_dims`.
    """

    kind: str
    name: str
    arity = 1
    axis: ClassVar[str]

    def __post_init__(self) -> None:
        kinds = sorted((*REDUCTIONS, *COMPOSED_REDUCTIONS))
        if self.kind not in (*kinds, *REDUCTION_SYNONYMS):
            raise epilogue_error(f"{self!r}: use a kind of {', '.join(kinds)}", self.location)

    def emit(self, builder: GraphBuilder, inputs: Sequence[int]) -> int:
        (x,), kind = inputs, REDUCTION_SYNONYMS.get(self.kind, self.kind)
        node = partial(builder.node, location=self.location)
        if kind == "amax":
            reduced = node("reduce", (node("abs", (x,)),), ("max", self.axis))
        elif kind == "sum_of_squares":
            reduced = node("reduce", (node("mul", (x, x)),), ("sum", self.axis))
        else:
            reduced = node("reduce", (x,), (kind, self.axis))
        builder.result(self.name, reduced, None, self.location)
        return x


class RowReduction(_Reduction):
    """Reduction over M, to a row (N,)."""

    axis = "m"


class ColReduction(_Reduction):
    """Reduction over N, to a column (M,)."""

    axis = "n"


class ScalarReduction(_Reduction):
    """Reduction over M, N and the batch, to a scalar."""

    axis = "all"


class Void(Visitor):
    """As the root: D is not stored (CUTLASS: ElementD = void); reductions and auxiliary stores are the only results."""

    arity, discards_d = 1, True

    def emit(self, builder: GraphBuilder, inputs: Sequence[int]) -> int:
        return inputs[0]


# -- nesting ----------------------------------------------------------------------------------------------------------


class TopologicalVisitor(Visitor):
    """Nodes in topological order; edges[i] are the indices of node i's inputs, () for a leaf or a tree.

    Its value is that of the last node. Raises EpilogueError for edges from the same or later nodes, and for too few or
    too many edges.
    """

    def __init__(self, edges: Sequence[Sequence[int]], *nodes: Visitor) -> None:
        """Check the edges: each node has as many as its arity, from nodes before it."""
        self.edges, self.children = tuple(map(tuple, edges)), nodes
        if len(self.edges) != len(nodes) or not nodes:
            message = f"TopologicalVisitor: got {len(self.edges)} edges for {len(nodes)} nodes; use one tuple per node"
            raise epilogue_error(message, self.location)
        _check_visitors("TopologicalVisitor", nodes, self.location)
        for i, (sources, node) in enumerate(zip(self.edges, nodes, strict=True)):
            for source in sources:
                if not 0 <= source < i:
                    use = f"one of 0 to {i - 1}, and put inputs before their users" if i else "()"
                    raise epilogue_error(f"edges[{i}]: got {source} for {node!r}; use {use}", self.location)
            _check_inputs(node, len(sources), self.location, f"edges[{i}]: ")
        _check_void(nodes[:-1], self.location)
        self.discards_d = nodes[-1].discards_d

    def emit(self, builder: GraphBuilder, inputs: Sequence[int]) -> int:
        """Add the nodes in order."""
        values: list[int] = []
        for sources, node in zip(self.edges, self.children, strict=True):
            values.append(node.emit(builder, [values[i] for i in sources]))
        return values[-1]

    def __repr__(self) -> str:
        return f"TopologicalVisitor({', '.join(map(repr, (self.edges, *self.children)))})"


class EVT(TopologicalVisitor):
    """`node_op` applied to its children's values, in order. Raises EpilogueError if their number is not its arity."""

    def __init__(self, node_op: Visitor, *child_visitors: Visitor) -> None:
        """Check the children: as many as the arity of `node_op`, each a leaf or a tree."""
        _check_visitors("EVT", (*child_visitors, node_op), self.location)
        _check_inputs(node_op, len(child_visitors), self.location)
        for child in child_visitors:
            if child.arity:
                message = f"{child!r}, a child, takes {_inputs(child.arity)}; use EVT({child!r}, ...)"
                raise epilogue_error(message, self.location)
        super().__init__([*[()] * len(child_visitors), range(len(child_visitors))], *child_visitors, node_op)

    def __repr__(self) -> str:
        *child_visitors, node = self.children
        return f"EVT({', '.join(map(repr, (node, *child_visitors)))})"


def _check_visitors(visitor_name: str, nodes: Sequence[Any], location: str) -> None:
    for node in nodes:
        if not isinstance(node, Visitor):
            raise epilogue_error(
                f"{visitor_name}: got {node!r}; use a visitor, such as AccFetch() or ScalarBroadcast(2)", location
            )


def _check_inputs(node: Visitor, count: int, location: str, prefix: str = "") -> None:
    """Raise EpilogueError unless a node takes `count` inputs. `prefix`: the message's beginning."""
    if count == node.arity:
        return
    hint = ""
    if isinstance(node, Compute) and count < node.arity:
        placeholders = (1,) * (node.arity - count)
        hint = f", or numbers for the last ones, as in {Compute(node.op, *node.parameters, *placeholders)!r}"
    raise epilogue_error(f"{prefix}{node!r} takes {_inputs(node.arity)}, got {count}; use {node.arity}{hint}", location)


def _check_void(inner: Sequence[Visitor], location: str) -> None:
    if any(x.discards_d for x in inner):
        raise epilogue_error("Void is not the root; use it as the outermost or last node", location)


def _inputs(count: int) -> str:
    return {0: "no input", 1: "1 input"}.get(count, f"{count} inputs")
