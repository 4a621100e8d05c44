"""An epilogue as data: the nodes computed for every element of the accumulator, its operands, and its results.

The package `graph` builds graphs from Python functions or visitor trees, and rewrites them; the package `epilogue`
lowers them; a KernelSpec contains one; the reference backend executes one in float64. The identity epilogue has one
node. What an operation means is in its record, an `Operation`, which the package `graph` registers.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from gemmsmith.core.dicts import Records
from gemmsmith.core.dtypes import DType, overflow_as_fp32
from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.frozen import cached_property


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

    `op`: the name of a registered `Operation`, `attribute`: what the operation needs besides its inputs, or None. A
    constant's attribute is its value in fp32's range; see `overflow_as_fp32`.
    `location`: the user's source line, "file:line: text"; ignored in comparison and in the kernel name.
    """

    op: str
    inputs: tuple[int, ...] = ()
    attribute: Any = field(default=None, compare=False)
    location: str = field(default="", compare=False, repr=False)
    comparison_key: Any = field(init=False, repr=False)
    """Attribute used for equality. Constants compare by their hex text, so that 0.0 != -0.0 and NaN == NaN.

    Nodes that are made before and after a record is replaced are not equal.
    """

    def __post_init__(self) -> None:
        """Set the key by which nodes are compared, and limit a constant to fp32's range."""
        comparison_key = self.attribute
        if self.op == "constant":
            attribute = overflow_as_fp32(self.attribute)
            object.__setattr__(self, "attribute", attribute)
            comparison_key = attribute.hex()
        if Records.replaced:
            comparison_key = comparison_key, Records.replaced
        object.__setattr__(self, "comparison_key", comparison_key)

    @property
    def operation(self) -> Operation:
        """The record of the node's operation. Raises EpilogueError if there is none."""
        if self.op not in OPERATIONS:
            raise EpilogueError(f"{self.op!r}: no operation has this name; register a record of it")
        return OPERATIONS[self.op]


class Operation(ABC):
    """The record of an operation: all that the library knows of it.

    Most operations are a `Function` (graph/functions.py), some a `RowFunction` (graph/row_functions.py); the others,
    in graph/operations.py, have methods of their own. Arrays are numpy's or torch's, and values a kernel's or a traced
    function's, so that they have no types here.
    """

    name: str
    attribute_type: Any = None
    """What a node's attribute is: DType, int, float or str, a tuple of these for its parts, or None."""
    num_predicates: int = 0
    """How many of the inputs, from the first on, are predicates, which have no gradient."""
    is_predicate: bool = False
    depends_on_columns: bool = False
    """Whether a value depends on its column's index or on other columns, so that no other device may have them."""
    requires_full_rows: bool = False
    """Whether each row of D must lie within one tile."""
    linearity: Linearity = ""
    commutes_with_rounding: bool = False
    has_gradient: bool = True
    """Whether the derivative may differ from 0."""
    known_afterwards: str = ""
    """What messages call a value that is only known after the kernel, so that no node can read it; else ""."""
    label_format: str = ""
    """What plots and trees call a node with parts of an attribute; by default CUTLASS's name and the parts."""
    style: Literal["input", "compute", "special", "reduce"] = "compute"
    """How plots show it; "special": it takes operations of the special-function unit."""

    def dims(self, node: Node, inputs: list[BroadcastDims]) -> BroadcastDims:
        """Return the dims of a node from those of its inputs, by default their broadcast.

        It is not called for operands, whose dims are in the graph.
        """
        return broadcast(inputs)

    def transposed(self, attribute: Any) -> Any:
        """Return the attribute of the node with rows and columns exchanged."""
        return attribute

    def is_transposable(self, attribute: Any) -> bool:
        """Return whether the node can be computed with rows and columns exchanged."""
        return not self.depends_on_columns

    def linearity_of(self, attribute: Any) -> Linearity:
        """Return in which inputs a node with this attribute is linear."""
        return self.linearity

    def leaf_name(self, node: Node) -> str | None:
        """Return the name of the operand that the node reads, "" for the accumulator; None if it reads neither."""
        return None

    @abstractmethod
    def compute(self, arrays: Any, node: Node, *inputs: Any) -> Any:
        """Return the array of the node's values, from those of its inputs.

        `arrays`: a `GraphArrays` (graph/operations.py), which has the operands and the library's functions.
        """

    def input_coords(self, node: Node, n8_offset: int, row_half: int) -> list[tuple[int, int, int]]:
        """Return the pairs of elements from which a pair is computed in a kernel, each as (input node, n8, row half).

        The coordinates are those of `Evaluation.pair` (epilogue/evaluate.py).
        """
        return [(i, n8_offset, row_half) for i in node.inputs]

    def lower_node(self, evaluation: Any, index: int, n8_offset: int, inputs: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Emit instructions, and return two adjacent elements of node `index`; by default those of its first input.

        `evaluation`: an `Evaluation` (epilogue/evaluate.py). `inputs`: the pairs at `input_coords`.
        """
        return inputs[0]

    def backpropagate(self, node: Node, g: Any, y: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the inputs, None for an input without one.

        `g`: the gradient of the node's value `y`. All are traced values (graph/frontend/values.py).
        """
        if node.inputs:
            raise EpilogueError(f"{self.name}: its record has no gradient")
        return ()

    def cost_per_element(self, precision: Any) -> tuple[float, float, float]:
        """Return the instructions of an element, as a `Cost`. `precision`: a `Precision` (graph/function_costs.py)."""
        return 0.0, 0.0, 0.0

    def label(self, graph: EpilogueGraph, node: Node) -> str:
        """Return the node's name as a CUTLASS visitor, with its attribute."""
        if self.label_format:
            return self.label_format.format(*attribute_parts(node.attribute))
        parts = ", ".join(map(str, attribute_parts(node.attribute)))
        return self.name.title().replace("_", "") + (f"({parts})" if parts else "")


def attribute_parts(attribute: Any) -> tuple[Any, ...]:
    """Return a node's attribute as a tuple: () for None, one part if it is no tuple."""
    return () if attribute is None else attribute if isinstance(attribute, tuple) else (attribute,)


Linearity = Literal["", "sum", "product", "quotient"]
"""In which inputs an operation is linear: in none, in all at once, in each by itself, or in the first."""
OPERATIONS: Records[Operation] = Records("an operation", Operation)
"""All operations by name."""


def register_operation(operation: Operation) -> Operation:
    """Make an operation known to graphs, by its name.

    It replaces an operation of this name that the calling module has registered before. Raises EpilogueError if another
    module has registered the name.
    """
    OPERATIONS.register(operation, sys._getframe(1).f_globals["__name__"])
    return operation


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

    @cached_property
    def broadcast_dims(self) -> tuple[BroadcastDims, ...]:
        """The broadcast dims of every node, by index."""
        result: list[BroadcastDims] = []
        for node in self.nodes:
            if node.op == "operand":
                result.append(self.operand(node.attribute).broadcast_dims)
            else:
                result.append(node.operation.dims(node, [result[i] for i in node.inputs]))
        return tuple(result)

    def nodes_needed_by(self, nodes: Iterable[int]) -> set[int]:
        """Return the indices of these nodes and of all from which they are computed."""
        needed = set(nodes)
        for i in range(len(self.nodes) - 1, -1, -1):
            if i in needed:
                needed.update(self.nodes[i].inputs)
        return needed

    def edges(self) -> Iterator[tuple[int, int]]:
        """Iterate over (node, user) pairs."""
        for i, node in enumerate(self.nodes):
            for source in node.inputs:
                yield source, i

    @cached_property
    def transposed(self) -> EpilogueGraph:
        """The graph for the transposed problem, with rows and columns exchanged; see `is_transposable`."""
        nodes = [replace(x, attribute=x.operation.transposed(x.attribute)) for x in self.nodes]
        operands = [replace(o, broadcast_dims=o.broadcast_dims.transposed) for o in self.operands]
        return replace(self, nodes=tuple(nodes), operands=tuple(operands))

    @cached_property
    def matrix_operands(self) -> list[Operand]:
        """The operands that are matrices."""
        return [o for o in self.operands if o.broadcast_dims.is_matrix]

    @cached_property
    def matrix_results(self) -> list[Result]:
        """The results that are matrices; reductions are not, whatever their shape."""
        return [r for r in self.results if self.broadcast_dims[r.node].is_matrix and not self.is_reduction(r)]

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the operands that are arrays."""
        return tuple(o.name for o in self.operands if o.dtype is not None)

    @cached_property
    def number_names(self) -> tuple[str, ...]:
        """Names of the operands that are Python scalars."""
        return tuple(o.name for o in self.operands if o.dtype is None)

    @cached_property
    def result_names(self) -> tuple[str, ...]:
        """Names of the results."""
        return tuple(r.name for r in self.results)

    @cached_property
    def matrix_result_names(self) -> list[str]:
        """Names of the results that are matrices."""
        return [r.name for r in self.matrix_results]

    @property
    def matrices(self) -> list[Operand | Result]:
        """The operands and results that are matrices."""
        return [*self.matrix_operands, *self.matrix_results]

    @cached_property
    def matrix_names(self) -> list[str]:
        """Names of the operands and results that are matrices."""
        return [x.name for x in self.matrices]

    def is_reduction(self, result: Result) -> bool:
        """Return whether a result is a reduction."""
        return self.nodes[result.node].op == "reduce"

    def constant_operand_of(self, result: Result) -> float | None:
        """Return the constant that a result reduces; None if it reduces anything else, or nothing.

        The host computes the value of such a reduction; the GEMM's kernel skips it.
        """
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

        Subtiles then need pairs of n8 groups. Interleaved rows need nothing, since a thread has both rows of a pair.
        """
        return any(extent.columns_per_value == 2 for extent in self.broadcast_dims)

    @property
    def requires_full_rows(self) -> bool:
        """True if the graph needs each row of D within one tile."""
        return any(n.operation.requires_full_rows for n in self.nodes)

    @cached_property
    def is_transposable(self) -> bool:
        """True if the graph can be transposed.

        No node needs whole rows or column indices, and none is a reduction over the batch alone.
        """
        return all(node.operation.is_transposable(node.attribute) for node in self.nodes)


@lru_cache(maxsize=16)
def identity_graph(out_dtype: DType) -> EpilogueGraph:
    """Return the identity epilogue: D = A @ B, stored as `out_dtype`."""
    return EpilogueGraph((Node("accumulator"),), (), (Result("out", 0, out_dtype),))
