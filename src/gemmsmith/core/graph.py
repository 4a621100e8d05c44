"""An epilogue as data: the nodes computed for every element of the product, its operands, and its results.

The package `epilogue` makes graphs (from Python functions or visitor trees), rewrites and lowers them; a KernelSpec
holds one; the reference executes one in float64. The bare product is the graph with one node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from gemmsmith.core.dtypes import DType, in_fp32


class Extent(NamedTuple):
    """Along which indices of the product a value varies: the batch, rows, columns.

    `width` is 0 for a value that is the same in every column, 1 for one a column, 2 for one in every two columns:
    what `chunk` of interleaved halves gives. `height` is the same for rows.
    """

    batch: bool = False
    height: Literal[0, 1, 2] = 0
    width: Literal[0, 1, 2] = 0

    @property
    def is_matrix(self) -> bool:
        return self.height > 0 and self.width > 0

    @property
    def transposed(self) -> Extent:
        return Extent(self.batch, self.width, self.height)

    def reduced(self, axis: str) -> Extent:
        """The extent of a reduction over `axis`, as `over` reads it."""
        b, m, n = (index in over(axis) for index in "bmn")
        return Extent(self.batch and not b, 0 if m else self.height, 0 if n else self.width)


def over(axis: str) -> str:
    """The indices that a reduction over an axis sums: of b (the batch), m (rows) and n (columns), as their letters say:
    "n" gives one value a row, "bm" one a column of all batches; "all" is each of them."""
    return "bmn" if axis == "all" else axis


def axis_over(indices: Collection[str]) -> str:
    """The axis whose `over` these indices are."""
    return "all" if len(set(indices)) == 3 else "".join(index for index in "bmn" if index in indices)


def broadcast(extents: Sequence[Extent]) -> Extent:
    """Of what is computed of values with these extents, whose widths and heights agree where they are not 0."""
    return Extent(
        any(e.batch for e in extents),
        max((e.height for e in extents), default=0),
        max((e.width for e in extents), default=0),
    )


@dataclass(frozen=True)
class Operand:
    """An input by name. `dtype` is None for a Python number, which is an fp32 argument of the kernel."""

    name: str
    extent: Extent
    dtype: DType | None = None


@dataclass(frozen=True)
class Node:
    """One operation on earlier nodes.

    op, inputs, value:
      "accumulator"   ()      None           the product, fp32
      "constant"      ()      float          as fp32 has it: an infinity where it is beyond, see `in_fp32`
      "operand"       ()      name           as fp32
      "chunk"         (x,)    (i, axis)      the even (i = 0) or odd (1) groups of 8 columns (axis "n") or rows ("m") of
                                             x: gate and up, interleaved
      "interleave"    (x, y)  axis           chunk's inverse: groups of 8 of x and of y, alternately
      "one_hot"       (x,)    None           whether a column's number is x, which has one value a row
      "cast"          (x,)    DType          rounded to a dtype and back
      "reduce"        (x,)    (kind, axis)   kind: sum, mean, max, min, logsumexp; axis: what it is over, see `over`
      "quantize"      (x,)    (DType, block) x over its scale, rounded; the scale is one a row and `block` columns
      "scale"         (q,)    None           the scale of a "quantize" node: amax of the block over the dtype's maximum
      "top_k_softmax" (x,)    k              softmax over the k largest of a row, 0 elsewhere; N fits a tile
      any name of epilogue.functions: elementwise, inputs as many as its arity; parameters are constant nodes
    `where` is the user's line, "file:line: text"; it tells neither graphs apart nor their kernels.
    """

    op: str
    inputs: tuple[int, ...] = ()
    value: Any = field(default=None, compare=False)
    where: str = field(default="", compare=False, repr=False)
    compared: Any = field(init=False, repr=False)
    """The value, but a constant's as text: so 0.0 is another one than -0.0, and NaN is the same as NaN."""

    def __post_init__(self) -> None:
        compared = self.value
        if self.op == "constant":
            number = in_fp32(self.value)
            object.__setattr__(self, "value", number)
            compared = number.hex()
        object.__setattr__(self, "compared", compared)


@dataclass(frozen=True)
class Result:
    """An output: the node's value, stored as `dtype` (None: as the caller's array, or its default).

    The first that is a matrix is D; others are auxiliary stores, or reductions where the node is one. A reduction
    keeps the index it sums as one of length 1 where `keepdim` is set.
    """

    name: str
    node: int
    dtype: DType | None = None
    keepdim: bool = False


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order: every input stands before its users. Equal graphs make the same kernel."""

    nodes: tuple[Node, ...]
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.operands, self.results))

    def operand(self, name: str) -> Operand:
        return next(o for o in self.operands if o.name == name)

    def extents(self) -> tuple[Extent, ...]:
        """The extent of every node. Inputs of elementwise nodes broadcast."""
        return self._extents

    @cached_property
    def _extents(self) -> tuple[Extent, ...]:
        result: list[Extent] = []
        for node in self.nodes:
            result.append(self._extent(node, [result[i] for i in node.inputs]))
        return tuple(result)

    def _extent(self, node: Node, inputs: list[Extent]) -> Extent:
        match node.op:
            case "accumulator":
                return Extent(True, 1, 1)
            case "constant":
                return Extent()
            case "operand":
                return self.operand(node.value).extent
            case "chunk":
                return inputs[0]._replace(width=2) if node.value[1] == "n" else inputs[0]._replace(height=2)
            case "interleave":
                both = broadcast(inputs)
                return both._replace(width=1) if node.value == "n" else both._replace(height=1)
            case "scale":
                return inputs[0]._replace(width=0)
            case "one_hot":
                return inputs[0]._replace(width=1)
            case "reduce":
                return inputs[0].reduced(node.value[1])
        return broadcast(inputs)

    def reachable(self) -> set[int]:
        """Nodes that some result needs."""
        needed = {r.node for r in self.results}
        for i in range(len(self.nodes) - 1, -1, -1):
            if i in needed:
                needed.update(self.nodes[i].inputs)
        return needed

    def users(self) -> Iterator[tuple[int, int]]:
        """(node, user) pairs."""
        for i, node in enumerate(self.nodes):
            for source in node.inputs:
                yield source, i

    def transposed(self) -> Graph:
        """The graph for the transposed product: rows and columns are exchanged. It must be `transposable`."""
        return self._transposed

    @cached_property
    def _transposed(self) -> Graph:
        other = {"n": "m", "m": "n"}
        nodes = list(self.nodes)
        for i, x in enumerate(nodes):
            if x.op in ("reduce", "chunk"):
                nodes[i] = replace(x, value=(x.value[0], axis_over([other.get(y, y) for y in over(x.value[1])])))
            elif x.op == "interleave":
                nodes[i] = replace(x, value=other[x.value])
        operands = [replace(o, extent=o.extent.transposed) for o in self.operands]
        return replace(self, nodes=tuple(nodes), operands=tuple(operands))

    @cached_property
    def stored(self) -> list[str]:
        """The names of results that are stored as matrices; what is reduced is not, whatever its shape."""
        return [r.name for r in self.results if self.extents()[r.node].is_matrix and not self.is_reduced(r)]

    @cached_property
    def matrices(self) -> list[str]:
        """The names of operands and results that are matrices."""
        return [o.name for o in self.operands if o.extent.is_matrix] + self.stored

    def is_reduced(self, result: Result) -> bool:
        """Whether a result is a reduction."""
        return self.nodes[result.node].op == "reduce"

    def known(self, result: Result) -> float | None:
        """The constant that a result reduces; None if it reduces anything else."""
        node = self.nodes[result.node]
        inner = self.nodes[node.inputs[0]] if node.op == "reduce" else node
        return float(inner.value) if node.op == "reduce" and inner.op == "constant" else None

    @property
    def computes(self) -> bool:
        """Whether anything is computed; if not, the product is stored as it is."""
        return len(self.nodes) > 1

    @cached_property
    def is_bare(self) -> bool:
        """Whether it is the bare product's: the product is stored once, as it is."""
        return not self.computes and not self.operands and len(self.results) == 1

    @cached_property
    def halves(self) -> bool:
        """Whether it pairs columns: some value has one in every two, even where no `chunk` is left that made it. Rows
        that are paired lie in one thread of any tile."""
        return any(extent.width == 2 for extent in self.extents())

    @property
    def takes_whole_rows(self) -> bool:
        """Whether the graph needs each row of the product within one tile."""
        return any(n.op == "top_k_softmax" for n in self.nodes)

    @cached_property
    def transposable(self) -> bool:
        """Whether `transposed` is possible: no node needs a row's columns at once, or their numbers, and none gives a
        matrix that is reduced over the batch."""
        matrices = any(node.op == "reduce" and node.value[1] == "b" for node in self.nodes)
        return not matrices and not {node.op for node in self.nodes} & {"one_hot", "quantize", "scale", "top_k_softmax"}


@lru_cache(maxsize=16)
def bare(output: DType) -> Graph:
    """D = A @ B, stored as `output`."""
    return Graph((Node("accumulator"),), (), (Result("out", 0, output),))
