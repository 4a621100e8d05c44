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
from numbers import Real
from typing import Any, ClassVar

from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.core.graph import Extent, Graph, Node, Operand, Result
from gemmsmith.epilogue.frontend.classify import in_words
from gemmsmith.epilogue.functions import FUNCTIONS
from gemmsmith.epilogue.lines import refused, user_line

OUT = "out"
"""The name of D."""


class Visitor(ABC):
    """A node, or nodes nested in an EVT or a TopologicalVisitor."""

    arity: int = 0  # inputs, which come from children or edges
    stores: bool = False  # whether the argument is a result
    discards: bool = False  # whether its value is not stored where it is the root
    parts: tuple[Visitor, ...] = ()  # nested visitors, in the order of their arguments
    where: str  # the user's line

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self.where = user_line()
        return self

    @property
    def argument(self) -> str | None:
        """The name of the visitor's argument."""
        return getattr(self, "name", None)

    @abstractmethod
    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        """Adds the node and gives its value's index."""

    def graph(self) -> Graph:
        """The graph: D, named "out", is the root's value; other results follow by their names.

        Operands have the extents of their nodes without a batch and no dtype yet, see `bind`. Raises EpilogueError.
        """
        if self.arity:
            raise refused(f"{self!r} takes {_inputs(self.arity)}; use EVT({self!r}, ...)", self.where)
        build = Build()
        root = self.emit(build, ())
        if not self.discards:
            build.results.insert(0, Result(OUT, root))
        graph = Graph(tuple(build.nodes), tuple(build.operands.values()), tuple(build.results))
        extents, needed = graph.extents(), graph.reachable()
        for i, node in enumerate(graph.nodes):
            if node.op == "operand" and i not in needed:
                raise refused(f"{node.value!r}: no result needs it; leave it out", node.where)
        for result in graph.results:
            node = graph.nodes[result.node]
            matrix = node.inputs[0] if node.op == "reduce" else result.node
            if not extents[matrix].is_matrix:
                raise refused(f"{result.name!r} is made of no matrix; use AccFetch, SrcFetch or AuxLoad", self.where)
        if not graph.results:
            raise refused("nothing is stored: use a reduction or an AuxStore below Void", self.where)
        return graph


class Build:
    """A graph under construction. Equal leaves become one node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.operands: dict[str, Operand] = {}
        self.results: list[Result] = []

    def node(self, op: str, inputs: Sequence[int] = (), value: Any = None, where: str = "") -> int:
        node = Node(op, tuple(inputs), value, where)
        if not inputs and node in self.nodes:
            return self.nodes.index(node)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def operand(self, name: str, extent: Extent, where: str) -> int:
        self._check(name, [r.name for r in self.results], where)
        operand = self.operands.setdefault(name, Operand(name, extent))
        if operand.extent != extent:
            raise refused(f"{name!r} is {in_words(operand.extent)} and {in_words(extent)}; use two names", where)
        return self.node("operand", (), name, where)

    def result(self, name: str, node: int, dtype: DType | None, where: str) -> None:
        self._check(name, list(self.operands), where)
        if any(r.name == name for r in self.results):
            raise refused(f"{name!r} is the name of two results; use two names", where)
        self.results.append(Result(name, node, dtype))

    def _check(self, name: Any, others: list[str], where: str) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            got = repr(name) if isinstance(name, str) else type(name).__name__
            raise refused(f"got {got} as a name; use one that Python takes for a variable, such as 'bias'", where)
        if name == OUT:
            raise refused(f"{name!r} is D's name; use another", where)
        if name in others:
            raise refused(f"{name!r} is the name of an operand and of a result; use another for one of them", where)


# -- leaves -----------------------------------------------------------------------------------------------------------


class AccFetch(Visitor):
    """The product, A @ B."""

    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        return build.node("accumulator", where=self.where)

    def __repr__(self) -> str:
        return "AccFetch()"


@dataclass(eq=False)
class _Load(Visitor):
    name: str
    extent: ClassVar[Extent]

    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        return build.operand(self.name, self.extent, self.where)


@dataclass(eq=False)
class SrcFetch(_Load):
    """The matrix C, (M, N)."""

    name: str = "c"
    extent = Extent(height=1, width=1)


@dataclass(eq=False)
class AuxLoad(_Load):
    """Another matrix, (M, N)."""

    extent = Extent(height=1, width=1)


@dataclass(eq=False)
class RowBroadcast(_Load):
    """A row, (N,): one value a column."""

    extent = Extent(width=1)


@dataclass(eq=False)
class ColBroadcast(_Load):
    """A column, (M, 1): one value a row."""

    extent = Extent(height=1)


class ScalarBroadcast(Visitor):
    """A scalar operand by name, or a number, which is constant in the kernel."""

    def __init__(self, value: str | float) -> None:
        if not isinstance(value, (str, Real)):
            raise refused(f"ScalarBroadcast: got {type(value).__name__}; use a name or a number", self.where)
        self.value = value
        self.name = value if isinstance(value, str) else None

    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        if isinstance(self.value, str):
            return build.operand(self.value, Extent(), self.where)
        return build.node("constant", (), self.value, self.where)

    def __repr__(self) -> str:
        return f"ScalarBroadcast({self.value!r})"


# -- functions --------------------------------------------------------------------------------------------------------

SYNONYMS = {
    "plus": "add", "minus": "sub", "multiply": "mul", "multiplies": "mul", "divide": "div", "divides": "div",
    "multiply_add": "fma", "homogeneous_multiply_add": "fma", "negate": "neg", "absolute_value": "abs",
    "inverse_square_root": "rsqrt", "gelu_taylor": "gelu_tanh", "leakyrelu": "leaky_relu",
}  # fmt: skip
"""CUTLASS's functors, in small letters -> functions."""
ARITIES = {"identity": 1, "square": 1, "clamp": 3, **{f.name: f.arity for f in FUNCTIONS.values()}}


class Compute(Visitor):
    """An elementwise function: a name of `FUNCTIONS` or of CUTLASS's functor, "clamp", "square" or "identity".

    Numbers stand for its last inputs: Compute("LeakyReLU", 0.01), Compute("Clamp", 0, 6), Compute("minus", 1).
    Raises EpilogueError for another name and for more numbers than inputs.
    """

    def __init__(self, op: str, *parameters: float) -> None:
        known = {**{name: name for name in ARITIES}, **SYNONYMS}
        if op.lower() not in known:
            near = difflib.get_close_matches(op.lower(), known) or sorted(ARITIES)
            raise refused(f"Compute: got {op!r}; use {', '.join(map(repr, near))}", self.where)
        self.op, self.function, self.parameters = op, known[op.lower()], parameters
        self.arity = ARITIES[self.function] - len(parameters)
        if self.arity < 0 or not all(isinstance(p, Real) for p in parameters):
            raise refused(f"{self!r}: use at most {ARITIES[self.function]} numbers behind the name", self.where)

    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        def add(op: str, *inputs: int) -> int:
            return build.node(op, inputs, where=self.where)

        x = [*inputs, *(build.node("constant", (), p, self.where) for p in self.parameters)]
        match self.function:
            case "identity":
                return x[0]
            case "square":
                return add("mul", x[0], x[0])
            case "clamp":
                return add("minimum", add("maximum", x[0], x[1]), x[2])
        return add(self.function, *x)

    def __repr__(self) -> str:
        return f"Compute({', '.join(map(repr, (self.op, *self.parameters)))})"


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class AuxStore(Visitor):
    """Stores its input, a matrix, as `dtype` (None: as the caller's array), and passes it on."""

    name: str
    dtype: Any = None
    arity, stores = 1, True

    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        dtype = None if self.dtype is None else as_dtype(self.dtype, f"AuxStore({self.name!r}).dtype")
        build.result(self.name, inputs[0], dtype, self.where)
        return inputs[0]


REDUCTIONS = {
    "plus": "sum", "add": "sum", "maximum": "max", "minimum": "min", "maximum_absolute_value_reduction": "amax",
    **{kind: kind for kind in ("sum", "mean", "max", "min", "logsumexp", "amax", "sum_of_squares")},
}  # fmt: skip
"""Kinds of reductions and CUTLASS's functors -> kinds; amax is of magnitudes."""


@dataclass(eq=False)
class _Reduction(Visitor):
    """Reduces its input to the result `name`, and passes the input on. `kind` is a name of REDUCTIONS."""

    kind: str
    name: str
    arity, stores = 1, True
    axis: ClassVar[str]

    def __post_init__(self) -> None:
        if self.kind not in REDUCTIONS:
            raise refused(f"{self!r}: use a kind of {', '.join(sorted(set(REDUCTIONS.values())))}", self.where)

    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        (x,), kind = inputs, REDUCTIONS[self.kind]
        if kind == "amax":
            x, kind = build.node("abs", (x,), where=self.where), "max"
        elif kind == "sum_of_squares":
            x, kind = build.node("mul", (x, x), where=self.where), "sum"
        reduced = build.node("reduce", (x,), (kind, self.axis), self.where)
        build.result(self.name, reduced, None, self.where)
        return inputs[0]


@dataclass(eq=False)
class RowReduction(_Reduction):
    """Reduces over M, to a row (N,)."""

    axis = "m"


@dataclass(eq=False)
class ColReduction(_Reduction):
    """Reduces over N, to a column (M,)."""

    axis = "n"


@dataclass(eq=False)
class ScalarReduction(_Reduction):
    """To a scalar, over the batch too."""

    axis = "all"


class Void(Visitor):
    """At the root: D is not stored, as with ElementD = void; reductions and auxiliary stores are all results."""

    arity, discards = 1, True

    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        return inputs[0]

    def __repr__(self) -> str:
        return "Void()"


# -- nesting ----------------------------------------------------------------------------------------------------------


class EVT(Visitor):
    """`node_op` on what its children give, in order. Raises EpilogueError where their number is not its inputs'."""

    def __init__(self, node_op: Visitor, *children: Visitor) -> None:
        self.parts = (*children, node_op)
        _check_visitors("EVT", self.parts, self.where)
        _check_inputs(node_op, len(children), self.where)
        for child in children:
            if child.arity:
                message = f"{child!r}, a child, takes {_inputs(child.arity)}; use EVT({child!r}, ...)"
                raise refused(message, self.where)
        _check_void(children, self.where)
        self.discards = node_op.discards

    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        *children, node = self.parts
        return node.emit(build, [child.emit(build, ()) for child in children])

    def __repr__(self) -> str:
        *children, node = self.parts
        return f"EVT({', '.join(map(repr, (node, *children)))})"


class TopologicalVisitor(Visitor):
    """Nodes in topological order; edges[i] are the indices of the nodes that node i takes, () for a leaf or a tree.

    The last node is the value. Raises EpilogueError for edges to the same or later nodes, or too few or many.
    """

    def __init__(self, edges: Sequence[Sequence[int]], *nodes: Visitor) -> None:
        self.edges, self.parts = tuple(map(tuple, edges)), nodes
        if len(self.edges) != len(nodes) or not nodes:
            message = f"TopologicalVisitor: got {len(self.edges)} edges for {len(nodes)} nodes; use one tuple a node"
            raise refused(message, self.where)
        _check_visitors("TopologicalVisitor", nodes, self.where)
        for i, (sources, node) in enumerate(zip(self.edges, nodes, strict=True)):
            for source in sources:
                if not 0 <= source < i:
                    use = f"one of 0 to {i - 1}, and put inputs before their users" if i else "()"
                    raise refused(f"edges[{i}]: got {source} for {node!r}; use {use}", self.where)
            _check_inputs(node, len(sources), self.where, f"edges[{i}]: ")
        _check_void(nodes[:-1], self.where)
        self.discards = nodes[-1].discards

    def emit(self, build: Build, inputs: Sequence[int]) -> int:
        values: list[int] = []
        for sources, node in zip(self.edges, self.parts, strict=True):
            values.append(node.emit(build, [values[i] for i in sources]))
        return values[-1]

    def __repr__(self) -> str:
        return f"TopologicalVisitor({', '.join(map(repr, (self.edges, *self.parts)))})"


def _check_visitors(what: str, nodes: Sequence[Any], where: str) -> None:
    for node in nodes:
        if not isinstance(node, Visitor):
            raise refused(f"{what}: got {node!r}; use a visitor, such as AccFetch() or ScalarBroadcast(2)", where)


def _check_inputs(node: Visitor, count: int, where: str, place: str = "") -> None:
    if count == node.arity:
        return
    hint = ""
    if isinstance(node, Compute) and count < node.arity:
        ones = (1,) * (node.arity - count)
        hint = f", or numbers for the last ones, as in {Compute(node.op, *node.parameters, *ones)!r}"
    raise refused(f"{place}{node!r} takes {_inputs(node.arity)}, got {count}; use {node.arity}{hint}", where)


def _check_void(inner: Sequence[Visitor], where: str) -> None:
    if any(x.discards for x in inner):
        raise refused("Void is not the root; use it as the outermost or last node", where)


def _inputs(count: int) -> str:
    return {0: "no input", 1: "1 input"}.get(count, f"{count} inputs")
