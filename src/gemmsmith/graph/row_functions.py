"""Functions of whole rows of a subtile: each element of the result depends on all elements of its row.

The row's elements are evaluated once and kept in registers; each row of a subtile is held by the four lanes of a quad.
`RowFunction` is the record of such a function, with what a kernel does for a subtile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gemmsmith import hw
from gemmsmith.core.dtypes import MAX_FINITE, MIN_SCALE, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims, Node, Operation, attribute_parts, register_operation
from gemmsmith.core.mma import N8_COLUMNS, QUAD_XOR_MASKS, fragment_column
from gemmsmith.graph.approximations import fast_exp, reciprocal
from gemmsmith.graph.function_costs import Cost, Precision
from gemmsmith.graph.functions import Array, Refused, check_gradient, gradient_rule
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32
from gemmsmith.lang.values import Constant, RegisterArray, Value, ValueLike, as_value


def quad_reduce(x: Value, merge: Callable[[Value, Value], Value], name: str) -> Value:
    """Reduce x over the four lanes that share a row. `name`: what the kernel's text calls the value after a step."""
    for mask in QUAD_XOR_MASKS:
        x = merge(x, hw.shuffle_xor_fp32(x, mask)).with_name_hint(name)
    return x


class RowFragment:
    """A node's elements of a subtile in a thread's registers, by (n8 group, row half, element of a pair).

    A thread has four elements of every n8 group (8 columns): two adjacent ones in each half of its warp's 16 rows. They
    may be kept in `registers` of the accumulator instead of their own: from `first_register` on, in every `stride`-th
    n8 group.
    """

    def __init__(self, n8_count: int, registers: RegisterArray | None, first_register: ValueLike, stride: int) -> None:
        self.n8_count, self.first_register, self.stride = n8_count, first_register, stride
        self.registers = registers or current_builder().registers(F32, 4 * n8_count, "row_frag")

    def register_index(self, n8: ValueLike, row_half: int, i: int) -> Value:
        """Return the index of an element's register."""
        return as_value(n8, I32) * (4 * self.stride) + (self.first_register + 2 * row_half + i)

    def store_pair(
        self, n8: ValueLike, row_half: int, pair: tuple[Value, Value], in_bounds: tuple[Value, Value],
        masked_value: float,
    ) -> None:  # fmt: skip
        """Store two adjacent elements; `masked_value` replaces those that are not `in_bounds`, outside the matrix."""
        for i in range(2):
            index = self.register_index(n8, row_half, i)
            self.registers[index] = current_builder().select(in_bounds[i], pair[i], masked_value)

    def load_pair(self, n8: ValueLike, row_half: int) -> tuple[Value, Value]:
        """Return a pair."""
        low, high = (self.registers[self.register_index(n8, row_half, i)] for i in range(2))
        return low, high

    def row_reduce(
        self, row_half: int, start: float, step: Callable[[Value, Value], Value], name: str,
        merge: Callable[[Value, Value], Value] | None = None,
    ) -> Value:  # fmt: skip
        """Return step(... step(start, x0) ..., xn) over the elements of a row.

        `merge` combines the results of the row's four lanes; by default `step` does. `name`: what the kernel's text
        calls the result.
        """
        result = current_builder().registers(F32, 1, f"lane_{name}")
        result[0] = start
        with current_builder().unroll(self.n8_count, name="n8") as n8:
            for x in self.load_pair(n8, row_half):
                result[0] = step(result[0], x)
        return quad_reduce(result[0], merge or step, f"quad_{name}")


class RowsOfSubtile(Protocol):
    """What a kernel computes of a `RowFunction` for one subtile: an object for a node and its input's elements."""

    masked_value: float
    """What elements outside of the matrix are replaced by."""

    def __init__(self, node: Node, fragment: RowFragment) -> None:
        """Compute what all elements of a row share, such as its maximum. `fragment`: has all elements of the input."""

    def pair(self, n8: ValueLike, row_half: int) -> tuple[Value, Value]:
        """Return two adjacent elements of the result."""


@dataclass(frozen=True, eq=False)
class RowFunction(Operation):
    """A function of whole rows of its one input; the result has the input's shape.

    Args:
        name: Its name in graphs.
        reference: A function of a float64 array (..., n), and of the parts of the node's attribute.
        device: The class of what a kernel computes for a subtile.
        torch: A function of a tensor, likewise, or `Refused` with the reason if there is none.
        cost: The instructions of an element.
        gradient: A function (g, y, x), as of a `Function`, or `Refused` with the reason if there is none.
        attribute_type: What it needs besides its input; see `Operation`.
        requires_full_rows: Whether it needs all of a row of D; otherwise its attribute says how many columns.

    Raises:
        ArgumentError: Something is missing.
    """

    name: str
    reference: Callable[..., Array]
    device: type[RowsOfSubtile]
    torch: Callable[..., Any] | Refused | None = None
    cost: Cost | None = None
    gradient: Callable[..., Any] | Refused | None = None
    attribute_type: Any = None
    requires_full_rows: bool = True
    depends_on_columns = True

    def __post_init__(self) -> None:
        if self.torch is None:
            raise ArgumentError(f"{self.name}: torch: got none; give a function of tensors, or Refused with the reason")
        if self.cost is None:
            raise ArgumentError(f"{self.name}: cost: got none; give the instructions of an element, Cost(8, 1)")
        check_gradient(self.name, self.gradient)

    def cost_per_element(self, precision: Precision) -> Cost:
        """Return the instructions of an element, in any precision."""
        assert self.cost
        return self.cost

    def compute(self, arrays: Any, node: Node, *inputs: Any) -> Any:
        """Apply numpy's or torch's implementation to arrays; see `Operation.compute`."""
        return arrays.implementation(self)(arrays.full(inputs[0]), *attribute_parts(node.attribute))

    def backpropagate(self, node: Node, g: Any, y: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the gradient of the input by the function's rule."""
        return [gradient_rule(self.name, self.gradient, node)(g, y, *inputs)]


class QuantizeRows:
    """x divided by the scale of its row's block of columns, which is the subtile.

    The scale is amax / the dtype's maximum, at least MIN_SCALE, and 1 if amax is 0.
    """

    masked_value = 0.0

    def __init__(self, node: Node, fragment: RowFragment) -> None:
        """Compute the scales of a thread's two rows, and their reciprocals, from all elements of the input."""
        k, dtype = current_builder(), node.attribute[0]
        self.fragment = fragment
        self.scales: list[Value] = []
        self.reciprocals: list[Value] = []
        max_finite = MAX_FINITE[dtype]
        for row_half in range(2):
            amax = self.fragment.row_reduce(row_half, 0.0, _max_magnitude, "amax").named("amax")
            clamped = hw.maximum_nan(amax, max_finite * MIN_SCALE).with_name_hint("clamped_amax")
            scale = k.select(amax == 0.0, 1.0, clamped * (1 / max_finite))
            reciprocal = k.select(amax == 0.0, 1.0, hw.divide_full(Constant(F32, max_finite), clamped))
            self.scales.append(scale.with_name_hint("dequantization_scale"))
            self.reciprocals.append(reciprocal.with_name_hint("quantization_scale"))

    def pair(self, n8: ValueLike, row_half: int) -> tuple[Value, Value]:
        low, high = self.fragment.load_pair(n8, row_half)
        return low * self.reciprocals[row_half], high * self.reciprocals[row_half]


class TopKSoftmax:
    """Softmax over the k largest elements of a row (the first ones among equals), 0 for the others.

    k is the node's attribute.
    The whole row is NaN if the sum of exponentials is: with a NaN, with +Inf, or if all elements are -Inf.
    """

    masked_value = -math.inf

    def __init__(self, node: Node, fragment: RowFragment) -> None:
        """Find the k-th largest element of each row, by k searches for the next largest one, and the exponentials' sum.

        Elements are ordered by value, largest first, then by column; the next one is the first that follows the
        previous one in that order, so none is found twice and none needs to be marked. The k-th one is the threshold of
        the selected elements.
        """
        self.fragment = fragment
        self.first_column = fragment_column(current_builder().lane).to(F32).named("first_column")
        self.row_maxima: list[Value] = []
        self.reciprocals: list[Value] = []
        self.thresholds: list[tuple[Value, Value]] = []
        for row_half in range(2):
            row_max = self.fragment.row_reduce(row_half, -math.inf, hw.maximum_nan, "max").named("row_max")
            total = current_builder().registers(F32, 1, "sum_exp")
            total[0], threshold = 0.0, None
            for _ in range(node.attribute):
                threshold = self._find_next(row_half, threshold)
                total[0] = total[0] + fast_exp(threshold[0] - row_max)
            assert threshold
            self.row_maxima.append(row_max)
            self.reciprocals.append(reciprocal(total[0]).named("reciprocal"))
            self.thresholds.append(threshold)

    def _find_next(self, row_half: int, previous: tuple[Value, Value] | None) -> tuple[Value, Value]:
        """Return the row's next element after `previous`, as (value, column); (-Inf, Inf) if there is none.

        Elements are in descending order, equal ones by ascending column. A thread searches its own elements first, then
        the four lanes of the row compare theirs.
        """
        k = current_builder()
        max_value, max_column = k.registers(F32, 1, "max_value"), k.registers(F32, 1, "max_column")
        max_value[0], max_column[0] = -math.inf, math.inf
        with k.unroll(self.fragment.n8_count, name="n8") as n8:
            for i, x in enumerate(self.fragment.load_pair(n8, row_half)):
                better = x > max_value[0]
                if previous:
                    better = better & (
                        (x < previous[0])
                        | ((x == previous[0]) & (_column_offset(n8, i) > previous[1] - self.first_column))
                    )
                better = better.named("better")
                max_value[0] = k.select(better, x, max_value[0])
                max_column[0] = k.select(better, _column_offset(n8, i), max_column[0])
        max_column[0] = max_column[0] + self.first_column
        for mask in QUAD_XOR_MASKS:
            value, column = hw.shuffle_xor_fp32(max_value[0], mask), hw.shuffle_xor_fp32(max_column[0], mask)
            better = ((value > max_value[0]) | ((value == max_value[0]) & (column < max_column[0]))).named("better")
            max_value[0], max_column[0] = k.select(better, value, max_value[0]), k.select(better, column, max_column[0])
        return max_value[0].named("max_value"), max_column[0].named("max_column")

    def pair(self, n8: ValueLike, row_half: int) -> tuple[Value, Value]:
        """Return 0 for elements behind the threshold."""
        reciprocal, (value, column), result = self.reciprocals[row_half], self.thresholds[row_half], []
        for i, x in enumerate(self.fragment.load_pair(n8, row_half)):
            is_selected = (x > value) | ((x == value) & (_column_offset(n8, i) <= column - self.first_column))
            weight = current_builder().select(is_selected, fast_exp(x - self.row_maxima[row_half]), 0.0)
            result.append(weight * reciprocal)
        return result[0], result[1]


def _column_offset(n8: ValueLike, i: int) -> Value:
    """Return an element's column minus the thread's first, in fp32 (exact): a constant in unrolled loops."""
    offset: Value = as_value(n8, I32) * N8_COLUMNS + i
    return offset.to(F32).with_name_hint("column_offset")


def _max_magnitude(amax: Value, x: Value) -> Value:
    return hw.maximum_nan(amax, hw.math_library_call("fabsf", x))


_NO_GRADIENT = Refused("it has no gradient; call it under torch.no_grad()")
_NOT_IN_TORCH = Refused("not supported in the PyTorch fallback on GPUs other than Hopper; use H100 or H200")


class _Quantize(RowFunction):
    """x over its scale, rounded; one scale per row and block of columns. Its attribute: (DType, columns of a block)."""

    label_format = "Quantize({}, {} columns)"

    def compute(self, arrays: Any, node: Node, *inputs: Any) -> Any:
        return arrays.rounded(super().compute(arrays, node, *inputs), node.attribute[0])


class _Scale(Operation):
    """The scale of a "quantize" node, its input: amax of the block over the dtype's maximum."""

    name = "scale"
    depends_on_columns = True
    known_afterwards = "a scale"

    def dims(self, node: Node, inputs: list[BroadcastDims]) -> BroadcastDims:
        return inputs[0]._replace(columns_per_value=0)

    def compute(self, arrays: Any, node: Node, *inputs: Any) -> Any:
        quantize = arrays.graph.nodes[node.inputs[0]]
        x = arrays.full(arrays.values[quantize.inputs[0]])
        return _scales(x, *quantize.attribute)[..., :: quantize.attribute[1]]

    def backpropagate(self, node: Node, g: Any, y: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        return [gradient_rule(self.name, _NO_GRADIENT, node)(g, y, *inputs)]


def _scales(x: Array, dtype: DType, block: int) -> Array:
    """Return an array of x's shape with the scale of each element: one per row and `block` columns."""
    scales = np.empty_like(x)
    for first in range(0, x.shape[-1], block):
        columns = slice(first, first + block)
        amax = np.abs(x[..., columns]).max(axis=-1, keepdims=True)
        scales[..., columns] = np.where(amax == 0, 1.0, np.maximum(amax / MAX_FINITE[dtype], MIN_SCALE))
    return scales


def _top_k_softmax(x: Array, k: int) -> Array:
    """Return the softmax over the k largest elements of each row; of equal elements the first columns are selected.

    A row is all NaN if it has NaN or +Inf, or nothing but -Inf.
    """
    selected = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    weights = np.exp(np.take_along_axis(x, selected, axis=-1) - x.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    result = np.zeros_like(x)
    np.put_along_axis(result, selected, weights / total, axis=-1)
    return np.where(np.isnan(total), np.nan, result)


# Neither has a cost: whole rows determine the tile, whatever they cost.
for _operation in (
    _Quantize("quantize", lambda x, *scale: x / _scales(x, *scale), QuantizeRows, _NOT_IN_TORCH, Cost(), _NO_GRADIENT,
              attribute_type=(DType, int), requires_full_rows=False),
    _Scale(),
    RowFunction("top_k_softmax", _top_k_softmax, TopKSoftmax, _NOT_IN_TORCH, Cost(), _NO_GRADIENT, attribute_type=int),
):  # fmt: skip
    register_operation(_operation)
