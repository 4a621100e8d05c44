"""What a plan launches, as a function of sizes, strides and addresses, found by running Python on Symbols.

`explore` computes the launches of many random problems, each of which notes the comparisons that it makes. Problems
with the same outcomes have the same launches but for their values, whose expressions are known. What no problem
reached is refused by the header. Sources: concolic testing (Godefroid, Klarlund, Sen, "DART", 2005), and fuzzing guided
by coverage.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import NamedTuple

from gemmsmith.arrays import ArrayInfo, Spec
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.matrices import orient_problem
from gemmsmith.core.errors import ArgumentError, GemmsmithError
from gemmsmith.core.frozen import changed
from gemmsmith.core.integers import round_up
from gemmsmith.core.mma import N8_COLUMNS
from gemmsmith.core.problem import MAX_EXTENT, MAX_STRIDE_BYTES, SCALE_NAMES, TMA_ALIGNMENT_BYTES
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.epilogue.register_usage import row_function_inputs
from gemmsmith.host.export.symbol import Expression, Outcomes, Symbol, traced
from gemmsmith.host.launch_sequence import build_launches
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.lang.launch import Launches

MAX_RUNS, RUNS_WITHOUT_NEWS = 20_000, 1_000
"""Problems that are tried at most, and how many without a new path end the search. Chosen."""
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 512,
         513, 1000, 1024, 4096, 5000)  # fmt: skip
"""Sizes that are tried besides random ones up to MAX_DRAWN: next to those of tiles and boxes."""
MAX_DRAWN = 1 << 13
POWERS = tuple(1 << i for i in range(11))
"""Sizes that are tried of each new way."""
MAX_ADDRESS = 1 << 57
OTHER_LAYOUT = "arrays of another layout or alignment than the plan's; export a plan of arrays like these"

Values = dict[str, int]


class Variable(NamedTuple):
    """A number that the caller of the header passes.

    Attributes:
        name: Its name.
        what: A comment.
        least, most: Its bounds.
        multiple: What divides it.
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

    Both are the names of variables, or numbers; a size may be a variable divided by a number.
    """

    name: str
    info: ArrayInfo
    sizes: tuple[tuple[str | int, int], ...]
    strides: tuple[str | int, ...]

    def layout(self, values: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape and the strides for these values of the variables."""
        sizes = ((_value(size, values), by) for size, by in self.sizes)
        return tuple(x if by == 1 else x // by for x, by in sizes), tuple(_value(x, values) for x in self.strides)


class Path(NamedTuple):
    """Outcomes of comparisons, and what is launched if they are so: launches of Symbols, or why nothing can be."""

    outcomes: Outcomes
    launches: Launches | str


@dataclass
class Signature:
    """The arguments of an exported plan: variables, and the arrays that they describe.

    `numbers`: names of numbers that the epilogue takes, as fp32.
    """

    planned: PlannedGemm
    variables: list[Variable] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, planned: PlannedGemm) -> Signature:
        """Return the signature of a plan. Raises ArgumentError if the plan cannot be exported."""
        binding, self = planned.binding, cls(planned)
        _check_exportable(planned)
        (*batch, m, n), k = binding.shape, binding.a.shape[-1]
        sizes = dict(zip(("batch",), batch, strict=False)) | {"m": m, "n": n, "k": k}
        for name, size in sizes.items():
            if size < 2:
                raise ArgumentError(f"a, b: got {name} = {size}; export a plan for at least 2, which serves any {name}")
        dims = {"a": ("batch", "m", "k"), "b": ("batch", "k", "n")}
        for name, x in binding.arguments.items():
            if isinstance(x, ArrayInfo):
                self._add_array(name, x, dims.get(name, ("batch", "m", "n")), sizes, name in ("a", "b"))
            else:
                self.numbers.append(name)
        self.variables[:0] = map(self._size_variable, sizes)
        names = [*(x.name for x in self.variables), *self.numbers]
        if len(names) > len({*names}):
            raise ArgumentError(f"operands: got {names}, of which two are equal; rename the operand")
        return self

    @property
    def rows(self) -> int:
        """M of the plan."""
        return self.planned.binding.shape[-2]

    def _size_variable(self, name: str) -> Variable:
        """Return the variable of m, n, k or the batch."""
        multiple = max(by for x in self.arrays for size, by in x.sizes if size == name)
        if multiple > 1 or (name in ("m", "n") and self._has_halves(name)):
            multiple = 2 * N8_COLUMNS  # halves alternate in groups of 8
        return Variable(name, "", int(name != "k"), MAX_EXTENT, multiple, partial(_size, name, multiple))

    def _has_halves(self, name: str) -> bool:
        """Return whether the epilogue has values for two rows (columns) of the accumulator each."""
        return any((x.rows_per_value if name == "m" else x.columns_per_value) == 2
                   for x in self.planned.binding.graph.broadcast_dims)  # fmt: skip

    def _add_array(
        self, name: str, x: ArrayInfo, dims: tuple[str, ...], sizes: Mapping[str, int], is_whole: bool
    ) -> None:
        """Add an array whose last dimensions are, or are broadcast along, `dims`. `is_whole`: rows, columns are."""
        extents: list[tuple[str | int, int]] = []
        strides: list[str | int] = []
        axes = list(zip(dims[-len(x.shape) :], x.shape, x.strides, strict=True)) if x.shape else []
        self.variables.append(Variable(name, f"{x.dtype}", 1, MAX_ADDRESS, 1, _address))
        for i, (dim, size, stride) in enumerate(axes):
            whole = sizes.get(dim, 1)
            is_broadcast = size == 1 and not (is_whole and i >= len(axes) - 2)
            if not is_broadcast and (not size or whole % size):
                raise ArgumentError(
                    f"{name}: got the shape {x.shape}; export needs sizes that divide m, n or the batch"
                )
            extents.append((1, 1) if is_broadcast else (dim, whole // size))
            if is_broadcast or stride in (0, 1):
                strides.append(stride)
                continue
            if stride < 0:
                raise ArgumentError(f"{name}: got the strides {x.strides}; export a plan with positive ones")
            others = [a for a in axes[-2:] if a[2] not in (0, 1)]
            kind = "batch_stride" if i == len(axes) - 3 else "stride" if len(others) == 1 else f"{dim}_stride"
            strides.append(f"{name}_{kind}")
        axis_of_batch = len(axes) - 3
        for i in reversed(range(len(axes))):
            if isinstance(step := strides[i], str):
                inner = [j for j in range(len(axes)) if j != i and (i == axis_of_batch or strides[j] == 1)]
                most = MAX_STRIDE_BYTES // x.dtype.bytes - 1
                multiple = gcd(x.dtype.elements_in(TMA_ALIGNMENT_BYTES), axes[i][2])
                draw = partial(_stride, [(extents[j], strides[j]) for j in inner], multiple)
                what = f"elements from one index of {axes[i][0]} to the next, of {name}"
                self.variables.append(Variable(step, what, 1, most, 1, draw))
        self.arrays.append(Array(name, x, tuple(extents), tuple(strides)))

    def draw(self, dice: random.Random) -> Values:
        """Return random values of the variables."""
        values: Values = {}
        for x in self.variables:
            values[x.name] = x.draw(dice, values)
        return values

    def bind(self, values: Mapping[str, int]) -> Binding:
        """Return the plan's binding for other values, which may be Symbols."""
        binding = self.planned.binding
        arguments = dict(binding.arguments)
        for x in self.arrays:
            shape, strides = x.layout(values)
            arguments[x.name] = x.info._replace(shape=shape, strides=strides, address=values[x.name])
        shape = tuple(values[name] for name in ("batch", "m", "n") if name in values)
        oriented = orient_problem(
            binding.spec.with_graph(binding.graph), arguments, shape, binding.out_dtype, binding.multiplication,
            binding.scale_granularity, binding.product, binding.grouping, 0, swapped=binding.swapped,
        )  # fmt: skip
        return changed(binding, arguments=arguments, shape=shape, **oriented._asdict())

    def launches(self, values: Mapping[str, int]) -> Launches | str:
        """Return what the plan's kernel launches for these values, or why it does not."""
        try:
            binding = self.bind(values)
            if binding.kernel_spec(self.planned.config) != self.planned.spec:
                return OTHER_LAYOUT
            return build_launches(binding, self.planned.spec)
        except GemmsmithError:
            return OTHER_LAYOUT

    def trace(self, values: Values) -> Path:
        """Return the path of these values."""
        with traced({x.name: (x.least, x.most) for x in self.variables}) as outcomes:
            symbols = {name: Symbol(x, Expression(name)) for name, x in values.items()}
            return Path(outcomes, self.launches(symbols))

    def rebound(self, values: Values) -> Launches:
        """Return what the plan launches for stand-ins of other arrays. Raises ArgumentError if it cannot."""
        layouts = ((x, *x.layout(values)) for x in self.arrays)
        specs = {x.name: Spec(shape, x.info.dtype, strides) for x, shape, strides in layouts}
        graph = self.planned.binding.graph
        out = {name: specs[result_argument(name)] for name in graph.result_names}
        operands: dict[str, Spec | float] = {x[3:]: y for x, y in specs.items() if x.startswith("in_")}
        scales = [operands.pop(name, None) for name in SCALE_NAMES.values()]
        operands |= {x[3:]: 0.5 for x in self.numbers}
        only = next(iter(out.values())) if len(out) == 1 else out
        return self.planned._launches(self.planned._bind(specs["a"], specs["b"], only, operands, *scales))

    def explore(self, seed: int = 0) -> list[Path]:
        """Return all paths that a search finds, each once.

        It begins with the plan's own values. Of a problem that takes a new way single values are changed, sizes to all
        powers of two.
        """
        dice, last_news = random.Random(seed), 0
        paths: dict[tuple[tuple[Expression, bool], ...], Path] = {}
        queue, corpus = [self._own_values()], list[Values]()
        for run in range(MAX_RUNS):
            if queue:
                values = queue.pop()
            elif run - last_news > RUNS_WITHOUT_NEWS:
                break
            else:
                values = self.draw(dice)
                if run % 4:
                    start, changing = dice.choice(corpus), dice.sample(self.variables, dice.choice((1, 1, 2)))
                    values = start | {x.name: values[x.name] for x in changing}
            path = self.trace(values)
            key = tuple(path.outcomes.items())
            if key not in paths:
                paths[key], last_news = path, run
                corpus.append(values)
                if not isinstance(path.launches, str):
                    queue += [values | {x.name: size} for x in self.variables if x.name in ("batch", "m", "n", "k")
                              for size in (0, *POWERS) if size >= x.least and not size % x.multiple]  # fmt: skip
        return list(paths.values())

    def _own_values(self) -> Values:
        """Return the values of the plan's own arrays, at some addresses."""
        binding = self.planned.binding
        values = dict(zip(("m", "n", "k"), (*binding.shape[-2:], binding.a.shape[-1]), strict=True))
        values |= zip(("batch",), binding.shape[:-2], strict=False)
        for i, x in enumerate(self.arrays):
            values[x.name] = (i + 1) << 40
            values |= {name: s for name, s in zip(x.strides, x.info.strides, strict=True) if isinstance(name, str)}
        return {x.name: values[x.name] for x in self.variables}


def check_alike(signatures: Sequence[Signature]) -> None:
    """Raise ArgumentError unless the plans take the same arrays, in the same layouts, with other M."""
    first, *others = ([(*x[:5],) for x in s.variables] + [(x.name, x.info.dtype, *x[2:]) for x in s.arrays] + s.numbers
                      for s in signatures)  # fmt: skip
    rows = [s.rows for s in signatures]
    if len({*rows}) < len(rows):
        raise ArgumentError(f"others: got plans for m = {rows}; use plans for different m")
    if any(x != first for x in others):
        raise ArgumentError("others: got a plan of other arrays or layouts; only m may be another")


def served_rows(signatures: Sequence[Signature]) -> list[range]:
    """Return the numbers of rows that each plan serves, whose own numbers are in ascending order."""
    ends = [*(s.rows + 1 for s in signatures[:-1]), MAX_EXTENT + 1]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def explore_choice(signatures: Sequence[Signature]) -> list[Path]:
    """Return the paths of all plans, each behind the comparisons of m that choose its plan."""
    paths, before = list[Path](), Outcomes()
    for signature, rows in zip(signatures, served_rows(signatures), strict=True):
        chosen = Expression("<=", (Expression("m"), rows[-1]))
        choice = before | ({chosen: True} if rows[-1] < MAX_EXTENT else {})
        paths += [path._replace(outcomes=choice | path.outcomes) for path in signature.explore()
                  if all(path.outcomes.get(x, y) == y for x, y in choice.items())]  # fmt: skip
        before = before | {chosen: False}
    return paths


def _check_exportable(planned: PlannedGemm) -> None:
    """Raise ArgumentError if a header cannot bind the arrays of a plan yet."""
    binding, request = planned.binding, planned._request
    graph = binding.graph
    refused = {
        "an epilogue that is traced at each call": request.epilogue is not None and request.fingerprint is None,
        "a grouped GEMM": binding.grouping is not None,
        "a design with arrays of its own": binding.product is not None and binding.grouping is None,
        "block scales": bool(binding.scale_granularity),
        "a reduction": any(graph.is_reduction(r) for r in graph.results),
        "a constant result": any(graph.constant_operand_of(r) is not None for r in graph.results),
        "a function of whole rows, or quantization": bool(row_function_inputs(graph)),
        "two arrays as b": any(isinstance(x, ArrayInfo) and x.interleave_stride for x in binding.arguments.values()),
    }
    for what, is_there in refused.items():
        if is_there:
            raise ArgumentError(f"plan: got one with {what}; plans of a GEMM with or without an elementwise epilogue, "
                                "whose results are matrices, can be exported")  # fmt: skip


def _size(name: str, multiple: int, dice: random.Random, _: Values) -> int:
    """Return a random size, often one next to those of tiles; not 0 but for k, since nothing is launched then."""
    if name == "batch":
        return dice.randrange(1, 5)
    size = dice.choice((dice.choice(SIZES), dice.randrange(1, MAX_DRAWN), 8 * dice.randrange(1, MAX_DRAWN // 8)))
    return 0 if name == "k" and dice.random() < 0.05 else round_up(size, multiple)


def _address(dice: random.Random, _: Values) -> int:
    """Return a random address, which is mostly aligned."""
    return dice.randrange(1, 1 << 40) * TMA_ALIGNMENT_BYTES


def _stride(
    inner: list[tuple[tuple[str | int, int], str | int]], multiple: int, dice: random.Random, values: Values
) -> int:
    """Return a random stride: a multiple that reaches over the dimensions within it, of which `inner` has size, stride.

    They are as in `Array`, and their strides were drawn before.
    """
    reach = (max(_value(size, values) // by - 1, 0) * _value(stride, values) for (size, by), stride in inner)
    length = 1 + sum(reach)
    return round_up(length, multiple) + multiple * dice.choice((0, 0, dice.randrange(8)))


def _value(x: str | int, values: Mapping[str, int]) -> int:
    """Return a variable's value, or a number as it is."""
    return values[x] if isinstance(x, str) else x
