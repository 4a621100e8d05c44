"""The arguments of a plan's header: variables, the arrays that they describe, and what the plan launches for them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any, NamedTuple

from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.matrices import orient_problem
from gemmsmith.binding.results import result_shape
from gemmsmith.core.errors import ArgumentError, GemmsmithError
from gemmsmith.core.frozen import changed
from gemmsmith.core.grouping import MIN_CAPACITY
from gemmsmith.core.mma import N8_COLUMNS
from gemmsmith.core.problem import MAX_EXTENT, MAX_STRIDE_BYTES, SCALE_BLOCK, SCALE_NAMES, TMA_ALIGNMENT_BYTES
from gemmsmith.core.scalars import ceil_div, round_up
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.host.export.symbol import Expression, Symbol, traced
from gemmsmith.host.launch_sequence import build_launches
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.lang.launch import Launches

SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 512,
         513, 1000, 1024, 4096, 5000)  # fmt: skip
"""Sizes that are tried besides random ones up to MAX_DRAWN: next to those of tiles and boxes."""
MAX_DRAWN = 1 << 13
MAX_ADDRESS = 1 << 57
SIZE_NAMES = {"b": "batch", "g": "groups", "t": "a_rows"}
"""Names of sizes by the letters of a product's shapes; others have their letter."""
OTHER_LAYOUT = "arrays of another layout or alignment than the plan's; export a plan of arrays like these"

Values = dict[str, int]


class Variable(NamedTuple):
    """A number that the caller of the header passes.

    Attributes:
        name: Its name.
        what: A comment.
        least, most: Its bounds.
        multiple: What divides it. The search tries no others; of sizes the header refuses them.
        draw: Returns a random value, given a generator and the values of the variables before it.
    """

    name: str
    what: str
    least: int
    most: int
    multiple: int
    draw: Callable[[random.Random, Values], int]

    @property
    def is_address(self) -> bool:
        """Whether it is the address of an array."""
        return self.most == MAX_ADDRESS


class Array(NamedTuple):
    """An array that the caller passes: for each dimension its size, and its stride in elements.

    A size is a variable, or a number, divided by a number and rounded up; a stride is a variable or a number. None: the
    array is contiguous. `second`: the variable of a second array of this layout, whose columns alternate with the
    first's; else "".
    """

    name: str
    info: ArrayInfo
    sizes: tuple[tuple[str | int, int], ...]
    strides: tuple[str | int, ...] | None
    second: str = ""

    def layout(self, values: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape and the strides for these values of the variables."""
        sizes = ((_value(size, values), by) for size, by in self.sizes)
        shape = tuple(x if by == 1 else ceil_div(x, by) for x, by in sizes)
        if self.strides is None:
            return shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return shape, tuple(_value(x, values) for x in self.strides)

    def parts(self, values: Mapping[str, int]) -> list[ArrayInfo]:
        """Return the array, or both, for these values of the variables."""
        shape, strides = self.layout(values)
        one = self.info._replace(shape=shape, strides=strides, interleave_stride=0)
        return [one._replace(address=values[x]) for x in (self.name, self.second) if x]

    def bound(self, values: Mapping[str, int]) -> ArrayInfo:
        """Return the argument of a binding for these values of the variables. Raises ArgumentError for equal arrays."""
        first, *others = self.parts(values)
        if not others:
            return first
        if 0 not in first.shape and first.address == others[0].address:
            raise ArgumentError(f"{self.name}: got the same array twice")
        return describe((first, *others), "b" if self.name == "b" else "scale_b")


@dataclass
class Signature:
    """The arguments of an exported plan: variables, and the arrays that they describe.

    `sizes`: the plan's own, by variable; `shape`: those of the product; `numbers`: names of numbers that the epilogue
    takes, as fp32.
    """

    planned: PlannedGemm
    sizes: dict[str, int] = field(default_factory=dict)
    shape: tuple[str, ...] = ()
    variables: list[Variable] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, planned: PlannedGemm) -> Signature:
        """Return the signature of a plan. Raises ArgumentError if the plan cannot be exported."""
        binding, self = planned.binding, cls(planned)
        if planned._request.epilogue is not None and planned._request.fingerprint is None:
            raise ArgumentError("plan: got one with an epilogue that is traced at each call; let it capture only "
                                "numbers, containers and functions, or pass what changes as an operand")  # fmt: skip
        with traced({}):  # of no path
            shapes = self._shapes()
        for name, x in binding.arguments.items():
            if isinstance(x, ArrayInfo):
                self._add_array(name, x, shapes[name])
            else:
                self.numbers.append(name)
        self.variables[:0] = map(self._size_variable, self.sizes)
        names = [*(x.name for x in self.variables), *self.numbers]
        if len(names) > len({*names}):
            raise ArgumentError(f"operands: got {names}, of which two are equal; rename the operand")
        return self

    @property
    def rows(self) -> int:
        return self.planned.binding.shape[-2]

    @property
    def has_reductions(self) -> bool:
        """Whether a product without elements has results."""
        graph = self.planned.binding.graph
        return any(map(graph.is_reduction, graph.results))

    @property
    def empties(self) -> list[str]:
        """The sizes for which there is nothing to do if they are 0."""
        return [] if self.has_reductions else [x for x in self.sizes if x in self.shape and x != "groups"]

    def is_read_before(self, x: Array) -> bool:
        """Return whether other tiles may read an array when a result is stored, so that it cannot be the result."""
        binding = self.planned.binding
        applied = {operand_argument(name) for name in binding.graph.tensor_names}
        return x.name not in applied or (binding.grouping is not None and not binding.grouping.has_batch)

    def _add_sizes(self) -> dict[str, tuple[int, ...]]:
        """Add the sizes, and return the shapes of a, b and the arrays of the product, as Symbols of sizes."""
        binding = self.planned.binding
        product, (a, b) = binding.product, binding.multiplication.as_elements(self._info("a"), self._info("b"))
        letters = product.shapes if product else "bmk,bkn->bmn" if len(binding.shape) == 3 else "mk,kn->mn"
        inputs, output = letters.split("->")
        arrays = {"a": a, "b": b}
        for name in product.arrays if product else ():
            arrays[operand_argument(name)] = self._info(operand_argument(name))
        terms = dict(zip(arrays, map(_names_of_sizes, inputs.split(",")), strict=True))
        self.shape = _names_of_sizes(output)
        self.sizes |= zip(self.shape, binding.shape, strict=True)
        for name, x in arrays.items():
            for size, extent in zip(reversed(terms[name]), reversed(x.shape), strict=False):
                self.sizes.setdefault(size, extent)
        if binding.grouping and binding.grouping.scatters:
            self.sizes["out_rows"] = self._info(result_argument(binding.graph.results[0].name)).shape[0]
        for size, extent in self.sizes.items():
            if extent < (least := 1 + (size == "batch")):
                raise ArgumentError(f"a, b: got {size} = {extent}; export a plan for {least} or more, which serves any")
        shapes = {}
        for name, term in terms.items():
            per_element = self._info(name).dtype.bits // arrays[name].dtype.bits  # 2 for int4 in bytes, along k
            shape = [x // per_element if i == "k" else x for i, x in zip(term, map(self._symbol, term), strict=True)]
            shapes[name] = tuple(shape)
        return shapes

    def _symbol(self, name: str) -> Symbol:
        return Symbol(self.sizes[name], Expression(name))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each array, as Symbols of sizes; an array may lack the first ones."""
        shapes, binding, size = self._add_sizes(), self.planned.binding, self._symbol
        graph, grouping, shape = binding.graph, binding.grouping, tuple(map(size, self.shape))
        batch = [size(x) for x in ("batch", "groups") if x in self.sizes]
        for operand in graph.operands:
            varies, *per_value = operand.broadcast_dims
            extents = (x // by if by else 1 for x, by in zip(shape[-2:], per_value, strict=True))
            shapes[operand_argument(operand.name)] = (*(batch if varies else [1]), *extents)
        for role, granularity in binding.scale_granularity.items():
            rows = ceil_div(shape[-2 if role == "a" else -1], granularity), ceil_div(size("k"), SCALE_BLOCK)
            shapes[operand_argument(SCALE_NAMES[role])] = (*batch, *rows[:: 1 if role == "a" else -1])
        groups_of_rows = size("groups") if grouping and grouping.clips_rows and not grouping.is_masked else 0
        of_result = (size("out_rows"), shape[-1]) if "out_rows" in self.sizes else shape
        for r in graph.results:
            shapes[result_argument(r.name)] = result_shape(graph, r, of_result, groups_of_rows)
        return shapes

    def _info(self, name: str) -> ArrayInfo:
        x = self.planned.binding.arguments[name]
        assert isinstance(x, ArrayInfo)
        return x

    def _size_variable(self, name: str) -> Variable:
        grouping, dims = self.planned.binding.grouping, self.planned.binding.graph.broadcast_dims
        if name == "groups" and grouping:
            return Variable(name, "", 1, grouping.capacity, 1, partial(_groups, grouping.capacity))
        per_value = [(x.rows_per_value, x.columns_per_value) for x in dims]
        is_halved = name in self.shape[-2:] and any(x[self.shape[-2:].index(name)] == 2 for x in per_value)
        is_halved |= any((name, 2) in x.sizes for x in self.arrays if x.name in ("a", "b"))
        multiple = 2 * N8_COLUMNS if is_halved else 1  # halves alternate in groups of 8
        least, most = int(name in self.shape and not self.has_reductions), MAX_EXTENT
        if name == self.shape[-1] and self.planned.binding.graph.requires_full_rows:
            most = self.planned.spec.warpgroup_columns
        return Variable(name, "", least, most, multiple, partial(_size, name, most, multiple))

    def _add_array(self, name: str, x: ArrayInfo, shape: tuple[int, ...]) -> None:
        """Add an array of the last dimensions of a shape, along which it may be broadcast."""
        graph, is_pair, x = self.planned.binding.graph, x.interleave_stride != 0, x.parts[0]
        address = partial(Variable, what=f"{x.dtype}", least=0, most=MAX_ADDRESS, multiple=TMA_ALIGNMENT_BYTES)
        self.variables.append(address(name, draw=_address))
        if second := f"{name}2" * is_pair:
            self.variables.append(address(second, draw=partial(_address_near, name)))
        sizes: list[tuple[str | int, int]] = []
        for whole, size in zip(shape[len(shape) - len(x.shape) :], x.shape, strict=True):
            sizes.append((1, 1) if size == 1 < whole else _divided(whole))
        if is_pair:
            sizes[-1] = sizes[-1][0], 2 * sizes[-1][1]
        product, strides = self.planned.binding.product, None
        contiguous = {operand_argument(y) for y in (product.arrays if product else ())}
        contiguous |= {result_argument(r.name) for r in graph.results if graph.is_reduction(r)}
        if name not in contiguous:
            strides = tuple(self._strides(name, x, sizes))
        self.arrays.append(Array(name, x, tuple(sizes), strides, second))

    def _strides(self, name: str, x: ArrayInfo, sizes: list[tuple[str | int, int]]) -> list[str | int]:
        """Return the strides of an array of these sizes, of which those that are not 0 or 1 become variables."""
        rank, fixed = len(sizes), [size == (1, 1) or y in (0, 1) for size, y in zip(sizes, x.strides, strict=True)]
        if [(size != (1, 1), y) for size, y in zip(sizes, x.strides, strict=True)][-2:] == [(True, 1)] * 2:
            raise ArgumentError(
                f"{name}: got the shape {x.shape} with the strides {x.strides}, which does not tell rows from columns; "
                "export a plan for larger sizes, which serves any"
            )
        strides: list[str | int] = []
        for i, ((size, _), stride) in enumerate(zip(sizes, x.strides, strict=True)):
            if stride < 0:
                raise ArgumentError(f"{name}: got the strides {x.strides}; export a plan with positive ones")
            kind = "batch_" if i == rank - 3 else f"{size}_" * (not any(fixed[-2:]))
            strides.append(stride if fixed[i] else f"{name}_{kind}stride")
        for i in reversed(range(rank)):
            if isinstance(step := strides[i], str):
                inner = [j for j in range(rank) if j != i and (i == rank - 3 or strides[j] == 1)]
                most = MAX_STRIDE_BYTES // x.dtype.bytes - 1
                multiple = gcd(x.dtype.elements_in(TMA_ALIGNMENT_BYTES), x.strides[i])
                draw = partial(_stride, [(sizes[j], strides[j]) for j in inner], multiple)
                what = f"elements from one index of {sizes[i][0]} to the next, of {name}"
                self.variables.append(Variable(step, what, int(i == rank - 3), most, multiple, draw))
        return strides

    def draw(self, dice: random.Random, **fixed: int) -> Values:
        values: Values = {}
        for x in self.variables:
            values[x.name] = fixed.get(x.name) or x.draw(dice, values)
        return values

    def bind(self, values: Mapping[str, int]) -> Binding:
        """Return the plan's binding for other values, which may be Symbols."""
        binding = self.planned.binding
        arguments = dict(binding.arguments) | {x.name: x.bound(values) for x in self.arrays}
        shape = tuple(values[name] for name in self.shape)
        oriented = orient_problem(
            binding.spec.with_graph(binding.graph), arguments, shape, binding.out_dtype, binding.multiplication,
            binding.scale_granularity, binding.product, binding.grouping, values.get("groups", 0),
            swapped=binding.swapped,
        )  # fmt: skip
        return changed(binding, arguments=arguments, shape=shape, **oriented._asdict())

    def launches(self, values: Mapping[str, int]) -> Launches | str:
        """Return what the plan's kernel launches for these values, or why it does not."""
        try:
            binding = self.bind(values)
            binding.check_results_have_values()
            if 0 not in binding.shape and binding.kernel_spec(self.planned.config) != self.planned.spec:
                return OTHER_LAYOUT
            return build_launches(binding, self.planned.spec)
        except GemmsmithError:
            return OTHER_LAYOUT

    def rebound(self, values: Values) -> Launches:
        """Return what the plan launches for stand-ins of other arrays. Raises ArgumentError if it cannot."""
        arrays = {x.name: x.parts(values) for x in self.arrays}
        given: dict[str, Any] = {name: tuple(x) if len(x) > 1 else x[0] for name, x in arrays.items()}
        out = {name: given[result_argument(name)] for name in self.planned.binding.graph.result_names}
        operands = {x[3:]: y for x, y in given.items() if x.startswith("in_")}
        if (grouping := self.planned.binding.grouping) and not grouping.has_batch:  # an array (M, 1) may be of groups
            for name in self.planned.binding.graph.tensor_names:
                if len((x := operands[name]).shape) in (1, 2) and name not in SCALE_NAMES.values():
                    operands[name] = x._replace(shape=(1, *x.shape), strides=(0, *x.strides))
        scales = [operands.pop(name, None) for name in SCALE_NAMES.values()]
        operands |= {x[3:]: 0.5 for x in self.numbers}
        only = next(iter(out.values())) if len(out) == 1 else out
        return self.planned._launches(self.planned._bind(given["a"], given["b"], only, operands, *scales))

    def has_single(self, values: Values) -> bool:
        """Return whether some array that is not broadcast has a dimension of one index, whose stride Python chooses."""
        sizes = (y for x in self.arrays for y in zip(x.sizes, x.layout(values)[0], strict=True))
        return any(isinstance(variable, str) and size < 2 for (variable, _), size in sizes)

    def addresses(self, values: Mapping[str, int]) -> Values:
        """Return the addresses of the arrays, of two the lower one."""
        return {x.name: min(y.address for y in x.parts(values)) for x in self.arrays}

    def own_values(self) -> Values:
        """Return the plan's own values, and stand-ins for addresses."""
        values = dict(self.sizes)
        for i, x in enumerate(self.arrays):
            values |= {x.name: (i + 1) << 40, x.second: (i + 1) << 40 | 1 << 30}
            for name, stride in zip(x.strides or (), x.info.strides, strict=False):
                if isinstance(name, str):
                    values[name] = stride
        return {x.name: values[x.name] for x in self.variables}


def check_alike(signatures: Sequence[Signature]) -> None:
    """Raise ArgumentError unless the plans take the same arrays, in the same layouts, with other M."""
    first, *others = ([(*x[:5],) for x in s.variables] + [(x.name, x.info.dtype, *x[2:]) for x in s.arrays] + s.numbers
                      for s in signatures)  # fmt: skip
    rows = [s.rows for s in signatures]
    if len({*rows}) < len(rows):
        raise ArgumentError(f"others: got plans for m = {rows}; use plans for different m")
    if any(x != first for x in others):
        raise ArgumentError("others: got a plan of arrays of another layout or alignment; only m may be another")


def served_rows(signatures: Sequence[Signature]) -> list[range]:
    """Return the numbers of rows that each plan serves, whose own numbers are in ascending order."""
    ends = [*(s.rows + 1 for s in signatures[:-1]), MAX_EXTENT + 1]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def _size(name: str, most: int, multiple: int, dice: random.Random, _: Values) -> int:
    """Return a random size, often one next to those of tiles; not 0 but for k, since nothing is launched then."""
    if name == "batch":
        return dice.randrange(1, 5)
    most = min(most, MAX_DRAWN)
    any_size = dice.choice((dice.choice(SIZES), dice.randrange(1, most), 16 * dice.randrange(1, max(most // 16, 2))))
    return 0 if name == "k" and dice.random() < 0.05 else round_up(min(any_size, most), multiple)


def _groups(capacity: int, dice: random.Random, _: Values) -> int:
    """Return a random number of groups for which Python's table has this capacity."""
    return dice.randrange(1 if capacity == MIN_CAPACITY else capacity // 2 + 1, capacity + 1)


def _address(dice: random.Random, _: Values) -> int:
    return dice.randrange(1, 1 << 40) * TMA_ALIGNMENT_BYTES


def _address_near(name: str, dice: random.Random, values: Values) -> int:
    """Return a random address at a distance from another that TMA allows."""
    distance = dice.randrange(1, 1 << 32) * TMA_ALIGNMENT_BYTES
    return values[name] + (distance if values[name] <= distance or dice.random() < 0.5 else -distance)


def _stride(
    inner: list[tuple[tuple[str | int, int], str | int]], multiple: int, dice: random.Random, values: Values
) -> int:
    """Return a random stride: a multiple that reaches over the dimensions within it, of which `inner` has size, stride.

    They are as in `Array`, and their strides were drawn before.
    """
    reach = (max(ceil_div(_value(n, values), by) - 1, 0) * _value(stride, values) for (n, by), stride in inner)
    length = 1 + sum(reach)
    return round_up(length, multiple) + multiple * dice.choice((0, 0, dice.randrange(8)))


def _value(x: str | int, values: Mapping[str, int]) -> int:
    return values[x] if isinstance(x, str) else x


def _names_of_sizes(letters: str) -> tuple[str, ...]:
    """Return the names of sizes for the letters of a product's shapes."""
    return tuple(SIZE_NAMES.get(x, x) for x in letters)


def _divided(size: int) -> tuple[str | int, int]:
    if not isinstance(size, Symbol):
        return size, 1
    expression, by = size.expression, 1
    while expression.operands:
        first, *others = expression.operands
        assert isinstance(first, Expression)
        expression, by = first, by * int(others[0] if others else 1)  # type: ignore[arg-type]
    return expression.op, by
