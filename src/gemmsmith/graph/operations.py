"""The operations of epilogues that are not elementwise functions: leaves, casts, halves, labels and reductions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from gemmsmith import hw
from gemmsmith.core.dtypes import DType
from gemmsmith.core.graph import (
    BroadcastDims,
    EpilogueGraph,
    Linearity,
    Node,
    Operation,
    axis_of_dims,
    broadcast,
    reduced_dims,
    register_operation,
)
from gemmsmith.graph.reductions import REDUCTIONS
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import Constant, Value

Pair = tuple[Value, Value]
OTHER_AXIS = {"n": "m", "m": "n"}


class GraphArrays(ABC):
    """Computes the values of a graph's nodes as arrays: numpy's in float64, or torch's in the accumulator's dtype.

    `library`: the module numpy or torch. Operations only use functions of it that both modules have.
    """

    library: Any

    def __init__(
        self, graph: EpilogueGraph, accumulator: Any, operands: Mapping[str, Any], group_index: Any = None
    ) -> None:
        self.graph, self.accumulator, self.operands, self.group_index = graph, accumulator, operands, group_index
        self.values: list[Any] = []

    def compute(self) -> list[Any]:
        """Return the values of all nodes, in order; a predicate's values are 0 or 1, as in the kernels."""
        for node in self.graph.nodes:
            inputs = (self.values[i] for i in node.inputs)
            self.values.append(self.as_value(node.operation.compute(self, node, *inputs)))
        return self.values

    def full(self, x: Any, divisor: int = 1) -> Any:
        """Return x broadcast to the accumulator's rows and, if x has one column, to its columns / `divisor`."""
        width = x.shape[-1] if x.ndim else 1
        columns = width if width > 1 else self.accumulator.shape[-1] // divisor
        return self.library.broadcast_to(x, (*self.accumulator.shape[:-1], columns))

    @abstractmethod
    def as_value(self, x: Any) -> Any:
        """Return a number, or an array of any dtype, as an array in the dtype in which values are computed."""

    @abstractmethod
    def implementation(self, operation: Any) -> Callable[..., Any]:
        """Return the function of a record for these arrays: its `reference`, or its function of torch."""

    @abstractmethod
    def rounded(self, x: Any, dtype: DType) -> Any:
        """Return x rounded to a dtype, but still in the dtype in which values are computed."""

    @abstractmethod
    def reduce(self, x: Any, kind: str, axis: str) -> Any:
        """Return the reduction of x. `kind`: a name of REDUCTIONS; `axis`: see `reduced_dims`."""


def reduced_axes(axis: str, rank: int) -> tuple[int, ...]:
    """Return the dimensions that a reduction over `axis` reduces in an array of `rank` 2, (M, N), or 3, (B, M, N)."""
    return tuple(i for i, dim in enumerate("bmn"[3 - rank :]) if dim in reduced_dims(axis))


class Leaf(Operation):
    """An operation without inputs."""

    style: Literal["input"] = "input"


class Accumulator(Leaf):
    """A @ B, in fp32."""

    name, label_format = "accumulator", "AccFetch"

    def dims(self, node: Node, inputs: list[BroadcastDims]) -> BroadcastDims:
        return BroadcastDims(True, 1, 1)

    def leaf_name(self, node: Node) -> str:
        return ""

    def compute(self, arrays: GraphArrays, node: Node) -> Any:
        return arrays.accumulator


class ConstantNumber(Leaf):
    """A number, which is the node's attribute."""

    name, label_format = "constant", "ScalarBroadcast({:.6g})"
    attribute_type = float
    has_gradient = False

    def compute(self, arrays: GraphArrays, node: Node) -> Any:
        return arrays.as_value(node.attribute)

    def lower_node(self, evaluation: Any, index: int, n8_offset: int, inputs: list[Pair]) -> Pair:
        constant = Constant(F32, float(evaluation.graph.nodes[index].attribute))
        return constant, constant


class OperandOfGraph(Leaf):
    """An operand, converted to fp32. Its name is the node's attribute."""

    name = "operand"
    attribute_type = str

    def leaf_name(self, node: Node) -> str:
        return str(node.attribute)

    def compute(self, arrays: GraphArrays, node: Node) -> Any:
        return arrays.as_value(arrays.operands[node.attribute])

    def label(self, graph: EpilogueGraph, node: Node) -> str:
        dims = graph.operand(node.attribute).broadcast_dims
        kinds = {(True, True): "AuxLoad", (False, True): "RowBroadcast", (True, False): "ColBroadcast"}
        return f"{kinds.get((dims.varies_along_m, dims.varies_along_n), 'ScalarBroadcast')}({node.attribute})"


class GroupIndex(Leaf):
    """In a grouped GEMM, the index of the group."""

    name = "group_index"
    has_gradient = False

    def dims(self, node: Node, inputs: list[BroadcastDims]) -> BroadcastDims:
        return BroadcastDims(batch=True)

    def compute(self, arrays: GraphArrays, node: Node) -> Any:
        return arrays.group_index


class Chunk(Operation):
    """Every other group of 8 columns (axis "n") or 8 rows (axis "m") of x, from the first (0) or second (1) group on.

    These are the gate and the up values of interleaved weights. The node's attribute is (0 or 1, axis).
    """

    name = "chunk"
    attribute_type = (int, str)
    linearity: Linearity = "sum"

    def dims(self, node: Node, inputs: list[BroadcastDims]) -> BroadcastDims:
        return _with_values_per(inputs[0], node.attribute[1], 2)

    def transposed(self, attribute: tuple[int, str]) -> tuple[int, str]:
        return attribute[0], OTHER_AXIS[attribute[1]]

    def compute(self, arrays: GraphArrays, node: Node, *inputs: Any) -> Any:
        x = arrays.full(inputs[0])
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 2, 8)[..., node.attribute[0], :]
        return groups.reshape(*x.shape[:-1], x.shape[-1] // 2)

    def input_coords(self, node: Node, n8_offset: int, row_half: int) -> list[tuple[int, int, int]]:
        which, axis = node.attribute
        return [(node.inputs[0], *((2 * n8_offset + which, row_half) if axis == "n" else (n8_offset, which)))]

    def backpropagate(self, node: Node, g: Any, y: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        return [HalfGradient(node.attribute[0], g)]

    def label(self, graph: EpilogueGraph, node: Node) -> str:
        return "Chunk(up)" if node.attribute[0] else "Chunk(gate)"


class HalfGradient:
    """The gradient `g` of one half of a value: its even (`which` is 0) or odd (1) groups of 8 columns.

    The other half's gradient comes from another `chunk` node, or is 0 (derivative.py combines them).
    """

    def __init__(self, which: int, g: Any) -> None:
        self.which, self.g = which, g


class Interleave(Operation):
    """The inverse of Chunk: groups of 8 columns (axis "n") or 8 rows ("m") of x and of y, alternately.

    The node's attribute is the axis.
    """

    name, label_format = "interleave", "Interleave"
    attribute_type = str
    linearity: Linearity = "sum"

    def dims(self, node: Node, inputs: list[BroadcastDims]) -> BroadcastDims:
        return _with_values_per(broadcast(inputs), node.attribute, 1)

    def transposed(self, attribute: str) -> str:
        return OTHER_AXIS[attribute]

    def compute(self, arrays: GraphArrays, node: Node, *inputs: Any) -> Any:
        x, y = (arrays.full(z, 2) for z in inputs)
        groups = arrays.library.stack([z.reshape(*z.shape[:-1], z.shape[-1] // 8, 8) for z in (x, y)], -2)
        return groups.reshape(*x.shape[:-1], 2 * x.shape[-1])

    def input_coords(self, node: Node, n8_offset: int, row_half: int) -> list[tuple[int, int, int]]:
        if node.attribute == "n":
            return [(node.inputs[n8_offset % 2], n8_offset // 2, row_half)]
        return [(node.inputs[row_half], n8_offset, 0)]

    def backpropagate(self, node: Node, g: Any, y: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        return [g.tracer.add("chunk", g, attribute=(i, node.attribute)) for i in range(2)]


def _with_values_per(dims: BroadcastDims, axis: str, count: Literal[1, 2]) -> BroadcastDims:
    """Return `dims`, but with one value per `count` columns (axis "n") or rows ("m")."""
    return dims._replace(columns_per_value=count) if axis == "n" else dims._replace(rows_per_value=count)


class OneHot(Operation):
    """1 in the column whose index is x, else 0; x has one value per row."""

    name, label_format = "one_hot", "Compute(one_hot)"
    is_predicate = depends_on_columns = True
    has_gradient = False

    def dims(self, node: Node, inputs: list[BroadcastDims]) -> BroadcastDims:
        return inputs[0]._replace(columns_per_value=1)

    def compute(self, arrays: GraphArrays, node: Node, *inputs: Any) -> Any:
        return arrays.as_value(arrays.library.arange(arrays.accumulator.shape[-1])) == inputs[0]

    def lower_node(self, evaluation: Any, index: int, n8_offset: int, inputs: list[Pair]) -> Pair:
        label = evaluation.as_float(inputs[0][0])
        low, high = evaluation.columns(n8_offset)
        return low.to(F32) == label, high.to(F32) == label


class Cast(Operation):
    """x rounded to a dtype, which is the node's attribute, and converted back to fp32."""

    name = "cast"
    attribute_type = DType

    def compute(self, arrays: GraphArrays, node: Node, *inputs: Any) -> Any:
        return arrays.rounded(inputs[0], node.attribute)

    def lower_node(self, evaluation: Any, index: int, n8_offset: int, inputs: list[Pair]) -> Pair:
        low, high = map(evaluation.as_float, inputs[0])
        return hw.round_pair(low, high, evaluation.graph.nodes[index].attribute)

    def backpropagate(self, node: Node, g: Any, y: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        return [g]


class Reduce(Operation):
    """A reduction, which no node can read, only a result.

    The node's attribute is (kind, axis): a name of REDUCTIONS, and what is reduced, as in `reduced_dims`.
    """

    name = "reduce"
    attribute_type = (str, str)
    style: Literal["reduce"] = "reduce"
    known_afterwards = "a reduction's result"

    def dims(self, node: Node, inputs: list[BroadcastDims]) -> BroadcastDims:
        return inputs[0].reduced(node.attribute[1])

    def transposed(self, attribute: tuple[str, str]) -> tuple[str, str]:
        kind, axis = attribute
        return kind, axis_of_dims([OTHER_AXIS.get(dim, dim) for dim in reduced_dims(axis)])

    def is_transposable(self, attribute: tuple[str, str]) -> bool:
        return attribute[1] != "b"  # a matrix

    def linearity_of(self, attribute: tuple[str, str]) -> Linearity:
        return "sum" if REDUCTIONS[attribute[0]].monoid is REDUCTIONS["sum"].monoid else ""

    def compute(self, arrays: GraphArrays, node: Node, *inputs: Any) -> Any:
        return arrays.reduce(arrays.full(inputs[0]), *node.attribute)

    def label(self, graph: EpilogueGraph, node: Node) -> str:
        """Return CUTLASS's name of the visitor, by what the reduction results in: "ColReduction(sum)" is a column."""
        kind, axis = node.attribute
        batched = ", of all batches" * (axis in ("b", "bm", "bn"))
        names = {"n": "ColReduction", "m": "RowReduction", "": "BatchReduction"}
        return f"{names.get(axis.removeprefix('b'), 'ScalarReduction')}({kind}{batched})"


STRUCTURAL = (
    Accumulator(), ConstantNumber(), OperandOfGraph(), GroupIndex(), Chunk(), Interleave(), OneHot(), Cast(), Reduce(),
)  # fmt: skip
for _operation in STRUCTURAL:
    register_operation(_operation)
