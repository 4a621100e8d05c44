"""An epilogue as data: the nodes computed for every element of the accumulator, its operands, and its results.

The package `epilogue` builds graphs from Python functions or visitor trees, rewrites and lowers them; a KernelSpec
contains one; the reference backend executes one in float64. The identity epilogue has one node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from gemmsmith.core.cached_property import cached_property
from gemmsmith.core.dtypes import DType, overflow_as_fp32


class BroadcastDims(NamedTuple):
    """How a value broadcasts against the accumulator.

    `batch`: whether it varies along the batch. `columns_per_value`: 0 if it is the same in every column, 1 for one
    value per column, 2 for one value per two columns (`chunk` of interleaved halves). `rows_per_value`: likewise.
    """

    batch: bool = False
    rows_per_value: Literal[0, 1, 2] = 0
    columns_per_value: Literal[0, 1, 2] = 0

    @property
    def varies_along_m(self) -> bool:
        """True if rows have values of their own."""
        return self.rows_per_value > 0

    @property
    def varies_along_n(self) -> bool:
        """True if columns have values of their own."""
        return self.columns_per_value > 0

    @property
    def row_divisor(self) -> Literal[1, 2]:
        """What a row index of the accumulator is divided by to index the value: 1 if that does not vary along M."""
        return self.rows_per_value or 1

    @property
    def column_divisor(self) -> Literal[1, 2]:
        """What a column index of the accumulator is divided by to index the value: 1 if that does not vary along N."""
        return self.columns_per_value or 1

    @property
    def is_matrix(self) -> bool:
        """True if the value varies along M and along N."""
        return self.varies_along_m and self.varies_along_n

    @property
    def transposed(self) -> BroadcastDims:
        """The dims with rows and columns exchanged."""
        return BroadcastDims(self.batch, self.columns_per_value, self.rows_per_value)

    def reduced(self, axis: str) -> BroadcastDims:
        """Return the dims of a reduction over `axis`; see `reduced_dims`."""
        b, m, n = (dim in reduced_dims(axis) for dim in "bmn")
        return BroadcastDims(self.batch and not b, 0 if m else self.rows_per_value, 0 if n else self.columns_per_value)


def reduced_dims(axis: str) -> str:
    """Return the dimensions that a reduction over `axis` reduces: the letters b (batch), m (rows) and n (columns).

    "n" yields one value per row, "bm" one per column for all batches; "all" is "bmn".
    """
    return "bmn" if axis == "all" else axis


def axis_of_dims(dims: Collection[str]) -> str:
    """Return the axis whose `reduced_dims` are these letters."""
    return "all" if len(set(dims)) == 3 else "".join(dim for dim in "bmn" if dim in dims)


def broadcast(dims: Sequence[BroadcastDims]) -> BroadcastDims:
    """Return the result of broadcasting `dims`; nonzero rows (columns) per value must be equal."""
    return BroadcastDims(
        any(x.batch for x in dims),
        max((x.rows_per_value for x in dims), default=0),
        max((x.columns_per_value for x in dims), default=0),
    )


@dataclass(frozen=True)
class Operand:
    """An input. `dtype` is None for a Python scalar, which is an fp32 argument of the kernel."""

    name: str
    broadcast_dims: BroadcastDims
    dtype: DType | None = None


@dataclass(frozen=True)
class Node:
    """One operation on earlier nodes.

    op, inputs, attribute:
      "accumulator"   ()      None           A @ B, fp32
      "constant"      ()      float          in fp32's range: infinity if it overflows, see `overflow_as_fp32`
      "operand"       ()      name           converted to fp32
      "group_index"   ()      None           in a grouped GEMM, the index of the group
      "chunk"         (x,)    (i, axis)      the even (i = 0) or odd (1) groups of 8 columns (axis "n") or rows ("m") of
                                             x: gate and up, interleaved
      "interleave"    (x, y)  axis           chunk's inverse: alternating groups of 8 of x and of y
      "one_hot"       (x,)    None           1 in the column whose index is x, else 0; x has one value per row
      "cast"          (x,)    DType          rounded to a dtype and back
      "reduce"        (x,)    (kind, axis)   kind: sum, mean, max, min, logsumexp; axis: see `reduced_dims`
      "quantize"      (x,)    (DType, block) x over its scale, rounded; one scale per row and `block` columns
      "scale"         (q,)    None           the scale of a "quantize" node: amax of the block over the dtype's maximum
      "top_k_softmax" (x,)    k              softmax over the k largest of a row, 0 elsewhere; N fits a tile
      any name of graph.functions: elementwise, inputs as many as its arity; parameters are constant nodes
    `location`: the user's source line, "file:line: text"; ignored in comparison and in the kernel name.
    """

    op: str
    inputs: tuple[int, ...] = ()
    attribute: Any = field(default=None, compare=False)
    location: str = field(default="", compare=False, repr=False)
    comparison_key: Any = field(init=False, repr=False)
    """Attribute used for equality. Constants compare by their hex text, so that 0.0 != -0.0 and NaN == NaN."""

    def __post_init__(self) -> None:
        comparison_key = self.attribute
        if self.op == "constant":
            attribute = overflow_as_fp32(self.attribute)
            object.__setattr__(self, "attribute", attribute)
            comparison_key = attribute.hex()
        object.__setattr__(self, "comparison_key", comparison_key)


@dataclass(frozen=True)
class Result:
    """An output: a node's value, stored as `dtype` (None: the dtype of the caller's array, or the default).

    The first matrix is D; other matrices are auxiliary stores, reduce nodes are reductions. `keepdim`: keep the reduced
    dimension with length 1.
    """

    name: str
    node: int
    dtype: DType | None = None
    keepdim: bool = False


@dataclass(frozen=True)
class EpilogueGraph:
    """Nodes in topological order: every input precedes its users. Equal graphs yield the same kernel."""

    nodes: tuple[Node, ...]
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.operands, self.results))

    def operand(self, name: str) -> Operand:
        """Return the operand of that name."""
        return next(o for o in self.operands if o.name == name)

    def broadcast_dims(self) -> tuple[BroadcastDims, ...]:
        """Return the dims of every node. Inputs of elementwise nodes broadcast."""
        return self._broadcast_dims

    @cached_property
    def _broadcast_dims(self) -> tuple[BroadcastDims, ...]:
        result: list[BroadcastDims] = []
        for node in self.nodes:
            result.append(self._node_dims(node, [result[i] for i in node.inputs]))
        return tuple(result)

    def _node_dims(self, node: Node, inputs: list[BroadcastDims]) -> BroadcastDims:
        match node.op:
            case "accumulator":
                return BroadcastDims(True, 1, 1)
            case "constant":
                return BroadcastDims()
            case "group_index":
                return BroadcastDims(batch=True)
            case "operand":
                return self.operand(node.attribute).broadcast_dims
            case "chunk":
                (x,), is_n = inputs, node.attribute[1] == "n"
                return x._replace(columns_per_value=2) if is_n else x._replace(rows_per_value=2)
            case "interleave":
                both = broadcast(inputs)
                return both._replace(columns_per_value=1) if node.attribute == "n" else both._replace(rows_per_value=1)
            case "scale":
                return inputs[0]._replace(columns_per_value=0)
            case "one_hot":
                return inputs[0]._replace(columns_per_value=1)
            case "reduce":
                return inputs[0].reduced(node.attribute[1])
        return broadcast(inputs)

    def reachable(self) -> set[int]:
        """Return the indices of the nodes that some result needs."""
        needed = {r.node for r in self.results}
        for i in range(len(self.nodes) - 1, -1, -1):
            if i in needed:
                needed.update(self.nodes[i].inputs)
        return needed

    def edges(self) -> Iterator[tuple[int, int]]:
        """Iterate over (node, user) pairs."""
        for i, node in enumerate(self.nodes):
            for source in node.inputs:
                yield source, i

    def transposed(self) -> EpilogueGraph:
        """Return the graph for the transposed problem, with rows and columns exchanged; see `is_transposable`."""
        return self._transposed

    @cached_property
    def _transposed(self) -> EpilogueGraph:
        other = {"n": "m", "m": "n"}
        nodes = list(self.nodes)
        for i, x in enumerate(nodes):
            if x.op in ("reduce", "chunk"):
                nodes[i] = replace(
                    x, attribute=(x.attribute[0], axis_of_dims([other.get(y, y) for y in reduced_dims(x.attribute[1])]))
                )
            elif x.op == "interleave":
                nodes[i] = replace(x, attribute=other[x.attribute])
        operands = [replace(o, broadcast_dims=o.broadcast_dims.transposed) for o in self.operands]
        return replace(self, nodes=tuple(nodes), operands=tuple(operands))

    @cached_property
    def matrix_result_names(self) -> list[str]:
        """Names of the results that are matrices; reductions are not, whatever their shape."""
        return [r.name for r in self.results if self.broadcast_dims()[r.node].is_matrix and not self.is_reduction(r)]

    @cached_property
    def matrix_names(self) -> list[str]:
        """Names of the operands and results that are matrices."""
        return [o.name for o in self.operands if o.broadcast_dims.is_matrix] + self.matrix_result_names

    def is_reduction(self, result: Result) -> bool:
        """Return whether a result is a reduction."""
        return self.nodes[result.node].op == "reduce"

    def constant_operand_of(self, result: Result) -> float | None:
        """Return the constant that a result reduces; None if it reduces anything else."""
        node = self.nodes[result.node]
        inner = self.nodes[node.inputs[0]] if node.op == "reduce" else node
        return float(inner.attribute) if node.op == "reduce" and inner.op == "constant" else None

    @property
    def has_operations(self) -> bool:
        """True if there is any operation; if not, the accumulator is stored as it is."""
        return len(self.nodes) > 1

    @cached_property
    def is_identity(self) -> bool:
        """True if it is the identity epilogue, which stores the accumulator once."""
        return not self.has_operations and not self.operands and len(self.results) == 1

    @cached_property
    def has_interleaved_columns(self) -> bool:
        """True if some value exists once per two columns, even if the passes have removed its `chunk` node.

        Interleaved rows are in one thread for any tile.
        """
        return any(extent.columns_per_value == 2 for extent in self.broadcast_dims())

    @property
    def requires_full_rows(self) -> bool:
        """True if the graph needs each row of D within one tile."""
        return any(n.op == "top_k_softmax" for n in self.nodes)

    @cached_property
    def is_transposable(self) -> bool:
        """True if the graph can be transposed.

        No node needs a whole row or column indices, and none is a matrix reduced over the batch.
        """
        reduces_to_matrix = any(node.op == "reduce" and node.attribute[1] == "b" for node in self.nodes)
        row_ops = {"one_hot", "quantize", "scale", "top_k_softmax"}
        return not reduces_to_matrix and row_ops.isdisjoint(node.op for node in self.nodes)


@lru_cache(maxsize=16)
def identity_graph(out_dtype: DType) -> EpilogueGraph:
    """Return the identity epilogue: D = A @ B, stored as `out_dtype`."""
    return EpilogueGraph((Node("accumulator"),), (), (Result("out", 0, out_dtype),))
