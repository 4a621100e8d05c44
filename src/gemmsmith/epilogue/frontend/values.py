"""The values that an epilogue function computes with while it is traced: they record what is done to them.

Python operators, methods, and functions of torch (`__torch_function__`) and numpy (`__array_ufunc__`,
`__array_function__`) all end in the table of names.py. No state is kept between calls.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gemmsmith.core.dtypes import FP32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.core.graph import Extent, Node, axis_over, broadcast
from gemmsmith.epilogue.frontend.names import ELSE, HINTS, METHODS, NAMES, SPELLINGS
from gemmsmith.epilogue.functions import PREDICATES
from gemmsmith.epilogue.lines import refused, user_line

COMPUTED = replace(FP32)
"""The `.dtype` of a traced value: fp32. A cast to it does nothing."""

LARGEST_LABEL = 1 << 24
"""Integers up to this are exact in fp32."""


def quantize(x: Any, dtype: Any = "fp8_e4m3", block: int = 128) -> tuple[Any, Any]:
    """In an epilogue: x, a matrix, in fp8 over one scale a row and `block` columns, and the scales (M, N / block).

    A scale is the block's largest magnitude over the dtype's maximum. Scales are contiguous along M, padded to 16
    bytes, unless `out` says otherwise. A block is a multiple of 16, at most 256, or 128
    of halves; all of one epilogue are the same. Raises EpilogueError for other dtypes and blocks.
    """
    if is_recorded(x):
        return x.record("quantize", x, dtype, block)  # type: ignore[no-any-return]
    t = _matrix("quantize", x)
    kind = _dtype(dtype)
    if kind.bits != 8:
        raise refused(f"quantize: dtype: got {dtype!r}; use 'fp8_e4m3' or 'fp8_e5m2'")
    if not isinstance(block, int) or block < 1:
        raise refused(f"quantize: block: got {block!r}; use a number of columns, such as 128")
    q = t.add("quantize", x.extent, t.value(x), value=(kind, block))
    return q.storing(kind), t.add("scale", x.extent, q)


def top_k_softmax(x: Any, k: int) -> Any:
    """In an epilogue: the softmax over the k largest elements of each row of x, a matrix, and 0 elsewhere."""
    if is_recorded(x):
        return x.record("top_k_softmax", x, k)
    t = _matrix("top_k_softmax", x)
    if not isinstance(k, int) or not 1 <= k <= x.shape[-1]:
        raise refused(f"top_k_softmax: k: got {k!r}; use an integer from 1 to {x.shape[-1]}")
    return t.add("top_k_softmax", x.extent, t.value(x), value=k)


def deinterleave(packed: Any) -> tuple[Any, Any]:
    """In an epilogue: the even and the odd groups of 8 columns, (M, N/2) each, which `interleave` put together."""
    if is_recorded(packed):
        return packed.record("deinterleave", packed)  # type: ignore[no-any-return]
    t = packed.tracing
    x, n = t.value(packed), t.product[-1]
    if x.extent.width != 1 or n % 16:
        got = f"{n} columns" if x.extent.width == 1 else "a value without all columns"
        raise refused(f"deinterleave: got {got}; use the whole product, its columns a multiple of 16 (8 of each half)")
    gate, up = (t.add("chunk", x.extent._replace(width=2), x, value=(i, "n")) for i in range(2))
    return gate, up


def interleave(gate: Any, up: Any) -> Any:
    """In an epilogue: the value of which `deinterleave` gives these halves."""
    if is_recorded(gate):
        return gate.record("interleave", gate, up)
    t = gate.tracing
    halves = [t.value(x) for x in (gate, up)]
    if any(x.extent.width != 2 for x in halves):
        raise refused("interleave: got a value that is not of halves; use two that deinterleave gives, or of them")
    return t.add("interleave", broadcast([x.extent for x in halves])._replace(width=1), *halves, value="n")


class Tracing:
    """One run of a function: the nodes so far, and how more are made. A call makes an elementwise one."""

    def __init__(self, product: tuple[int, ...]) -> None:
        self.product, self.sized = product, False
        self.nodes: list[Node] = []

    def add(self, op: str, extent: Extent, *inputs: Traced, value: Any = None, where: str | None = None) -> Traced:
        self.nodes.append(Node(op, tuple(x.node for x in inputs), value, where or user_line()))
        return Traced(self, len(self.nodes) - 1, extent, condition=op in PREDICATES)

    def __call__(self, op: str, *inputs: Any) -> Traced:
        values = [self.value(x) for x in inputs]
        if op in ("add", "sub", "neg") and all(x.condition for x in values):
            raise refused(f"{op}: got conditions only; use & or | or ~, or .float() to count them")
        widths = {x.extent.width for x in values} - {0}
        if len(widths) > 1:
            *_, m, n = self.product
            rows = any(x.op == "operand" and x.extent[1:] == (0, 2) for x in values) and 2 * m == n
            column = f"; an operand of a value a row has the shape ({m}, 1)" * rows
            raise refused(
                f"{op}: got {n} and {n // 2} columns; use deinterleave's halves, or the whole of both{column}"
            )
        return self.add(op, broadcast([x.extent for x in values]), *values)

    def value(self, x: Any) -> Traced:
        """x as an input of a further node: a number becomes a constant."""
        if isinstance(x, Traced):
            if x.tracing is not self:
                raise refused("got a value of another call; values cannot be kept from one call to the next")
            if x.op in ("reduce", "scale"):
                what = "a reduction's result" if x.op == "reduce" else "a scale"
                raise refused(f"{what} used again would need the whole grid; return it, and apply this afterwards")
            return x if x.stored in (None, FP32) else self.add("cast", x.extent, x.storing(None), value=x.stored)
        if is_array(x):
            raise refused(
                f"got {type(x).__name__} of shape {tuple(x.shape)}; make it a parameter and pass it as an operand"
            )
        if not isinstance(x, (numbers.Real, np.generic, np.ndarray)):
            raise refused(f"got {x!r}; use a traced value or a number")
        return self.add("constant", Extent(), value=x)

    def expect_conditions(self, op: str, inputs: tuple[Any, ...]) -> None:
        for x in inputs:
            if not (x.condition if isinstance(x, Traced) else isinstance(x, (bool, np.bool_))):
                raise refused(f"{op}: got a number; use comparisons on both sides, in parentheses: (x > 0) & (x < 1)")

    def reduce(self, kind: str, x: Any, dim: Any, keepdim: Any, dtype: Any = None) -> Traced:
        x, rank = self.value(x), len(self.product)
        if not x.extent.is_matrix or (rank > 2 and not x.extent.batch):
            raise refused(f"{kind}: got a value that is no whole product; reduce it before, and pass it as an operand")
        if not isinstance(keepdim, (bool, np.bool_)):
            raise refused(f"{kind}: keepdim: got {keepdim!r}; use True or False, and dtype= for a dtype")
        dims = range(rank) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
        if not all(isinstance(d, (int, np.integer)) and -rank <= d < rank for d in dims):
            raise refused(f"{kind}: dim: got {dim!r}; use indices of the product from {-rank} to {rank - 1}, or None")
        reduced = {int(d) % rank for d in dims}
        if not reduced or 0 < len(reduced & set(range(rank - 2))) < rank - 2:
            raise refused(
                f"{kind}: dim: got {dim!r} of {rank}; use -1 (one value a row), -2 (one a column), all in front of "
                "these, or several"
            )
        axis = "all" if len(reduced) == rank else axis_over(["bmn"[max(d - rank + 3, 0)] for d in reduced])
        extent = x.extent.reduced(axis)
        result = self.add("reduce", extent, x, value=(kind, axis))
        result.keepdim = bool(keepdim)
        return result if dtype is None else result.storing(_dtype(dtype))

    def cast(self, x: Traced, dtype: Any) -> Traced:
        kind = None if dtype is COMPUTED or isinstance(dtype, Traced) else _dtype(dtype)
        last = x.op in ("reduce", "scale")
        if last and x.stored not in (None, FP32, kind):
            raise refused(f"got a second cast of a value in {x.stored}; return it, and cast it again afterwards")
        return (x if last else self.value(x)).storing(kind)

    def one_hot(self, x: Any, classes: Any) -> Traced:
        """1 in the column that x, a column of labels, names. Labels are whole numbers; one outside [0, N), such as an
        ignored -100, names none."""
        x, n = self.value(x), self.product[-1]
        if n == 1 and x.extent.width:  # a column is the whole product
            return self("eq", x, 0)
        if not x.extent.height or x.extent.width:
            raise refused(f"one_hot: input: got a value of shape {x.shape}; use one label a row, an operand (M, 1)")
        if classes != n or n > LARGEST_LABEL:
            raise refused(f"one_hot: num_classes: got {classes!r}; use {n}, the product's columns, at most 2^24")
        return self.add("one_hot", x.extent._replace(width=1), x)


def call(spelled: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], method: bool = False) -> Any:
    """Calls the entry `name` of the table; `spelled` is the user's name for it, for error messages."""
    everything = [*args, *kwargs.values()]
    arrays = [x for x in everything if is_array(x)]
    first = next((x for x in everything if isinstance(x, Traced)), None)
    if arrays and first is not None:
        first.tracing.value(arrays[0])  # refuses it
    entry = METHODS.get(name) if method else None
    entry = entry or NAMES.get(name)
    if entry is None or first is None:
        raise refused(f"{spelled} cannot be part of an epilogue; {HINTS.get(name, ELSE)}")
    named = {SPELLINGS.get(key, key): x for key, x in kwargs.items()}
    if named.pop("out", None) is not None or named.pop("inplace", False):
        raise refused(f"{spelled}: values cannot be changed in place; use what it returns")
    try:
        inspect.signature(entry).bind(first.tracing, *args, **named)
    except TypeError as error:
        raise refused(f"{spelled}: {error}; its arguments are {_arguments(entry)}") from None
    return entry(first.tracing, *args, **named)


def is_recorded(x: Any) -> bool:
    """Whether x is a value of an epilogue that torch.compile runs: it records what is done to it."""
    return hasattr(type(x), "record")


def is_array(x: Any) -> bool:
    """Whether x is an array, which is an operand; numpy's scalars and arrays of no dimensions are numbers."""
    if isinstance(x, (Traced, np.generic, type)):
        return False
    return x.ndim > 0 if isinstance(x, np.ndarray) else hasattr(x, "shape")


def _operator(symbol: str, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The methods of an operator and of its reflected form."""
    return (
        lambda self, *other: call(symbol, name, (self, *other), {}),
        lambda self, other: call(symbol, name, (other, self), {}),
    )


def _cannot(what: str, instead: str) -> Any:
    def method(self: Traced, *args: Any, **kwargs: Any) -> Any:
        raise refused(f"{what}; {instead}")

    return method


_NUMBER = "use traced functions (import math, if you do, outside of the function), or where(condition, a, b)"
_WHOLE = (
    "every element is computed alike; use operands, where(condition, a, b), gate, up = gemmsmith.deinterleave(x), or "
    "max(dim).values"
)


class EpilogueAttributeError(EpilogueError, AttributeError):
    """The error for an attribute that traced values do not have; an AttributeError, so that hasattr works."""


class Traced:
    """A value of an epilogue. `extent` is what it varies along; `stored` a cast that its next use makes a node."""

    def __init__(
        self, tracing: Tracing, node: int, extent: Extent, condition: bool = False, stored: DType | None = None
    ) -> None:
        self.tracing, self.node, self.extent, self.condition, self.stored = tracing, node, extent, condition, stored
        self.keepdim = False
        self.is_number = False
        """Whether it is an operand that is given as a number."""

    @property
    def op(self) -> str:
        return self.tracing.nodes[self.node].op

    def storing(self, dtype: DType | None) -> Traced:
        """The value cast to a dtype. The result is a number, not a condition."""
        other = Traced(self.tracing, self.node, self.extent, stored=dtype)
        other.keepdim = self.keepdim
        return other

    dtype = COMPUTED

    @property
    def shape(self) -> tuple[int, ...]:
        """Broadcast over what it does not vary along, without indices of length 1 in front."""
        if self.op in ("reduce", "scale"):
            raise refused("the shape of a reduction's result is known afterwards; return it")
        self.tracing.sized = True
        *b, m, n = self.tracing.product
        width = self.extent.width
        if self.extent.batch and b:
            return (*b, m if self.extent.height else 1, n // width if width else 1)
        return (m, n // width if width else 1) if self.extent.height else (n // width,) if width else ()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def values(self) -> Traced:
        """The value of max(dim) and min(dim), which are a pair in torch."""
        node = self.tracing.nodes[self.node]
        if node.op == "reduce" and node.value[0] in ("max", "min"):
            return self
        raise refused(".values: only max(dim) and min(dim) have them", kind=EpilogueAttributeError)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in NAMES or name in METHODS:
            return lambda *args, **kwargs: call(f".{name}()", name, (self, *args), kwargs, method=True)
        plain = name.removesuffix("_")
        if plain in NAMES:
            hint = f"a value cannot be changed in place; use {plain}"
        elif name in ("T", "mT", "H", "mH", "indices"):
            hint = "use .values alone" if name == "indices" else "store the result in a transposed array: out=d.T"
        else:
            hint = HINTS.get(name, ELSE)
        raise refused(f".{name} cannot be part of an epilogue; {hint}", kind=EpilogueAttributeError)

    def __repr__(self) -> str:
        return f"<traced {self.op}>"

    __hash__ = object.__hash__
    __add__, __radd__ = _operator("+", "add")
    __sub__, __rsub__ = _operator("-", "sub")
    __mul__, __rmul__ = _operator("*", "mul")
    __truediv__, __rtruediv__ = _operator("/", "div")
    __pow__, __rpow__ = _operator("**", "pow")
    __and__, __rand__ = _operator("&", "bitwise_and")
    __or__, __ror__ = _operator("|", "bitwise_or")
    __xor__, __rxor__ = _operator("^", "bitwise_xor")
    __neg__, _ = _operator("-", "neg")
    __pos__, _ = _operator("+", "positive")
    __abs__, _ = _operator("abs", "abs")
    __invert__, _ = _operator("~", "bitwise_not")
    __round__, _ = _operator("round", "round")
    __lt__, _ = _operator("<", "lt")
    __le__, _ = _operator("<=", "le")
    __gt__, _ = _operator(">", "gt")
    __ge__, _ = _operator(">=", "ge")
    __eq__, _ = _operator("==", "eq")
    __ne__, _ = _operator("!=", "ne")
    __floordiv__ = __rfloordiv__ = _cannot("// cannot be part of an epilogue", "use floor(x / y)")
    __mod__ = __rmod__ = _cannot("% cannot be part of an epilogue", "use x - floor(x / y) * y")
    __matmul__ = __rmatmul__ = _cannot("@ cannot be part of an epilogue", HINTS["matmul"])
    __bool__ = _cannot(
        "a condition differs from element to element, so if, while, and, or, not, min() and max() cannot ask for it",
        "use where(condition, a, b), & | ~, minimum and maximum",
    )
    __float__ = __int__ = __index__ = __complex__ = __array__ = _cannot("a traced value has no number yet", _NUMBER)
    __len__ = __iter__ = __contains__ = __setitem__ = _cannot("a traced value has no elements yet", _WHOLE)

    def __getitem__(self, key: Any) -> Traced:
        """values, indices = x.max(dim): [0] of it are the values."""
        node = self.tracing.nodes[self.node]
        if node.op == "reduce" and node.value[0] in ("max", "min") and isinstance(key, int) and key == 0:
            return self
        raise refused(f"a traced value cannot be indexed; {_WHOLE}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        if name.startswith("__"):
            name = name.strip("_")
        elif name.endswith("_"):
            raise refused(f"torch.{name}: a value cannot be changed in place; use {name.rstrip('_')}")
        return call(f"torch.{name}", name.removeprefix("_").removeprefix("special_"), args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise refused(f"numpy.{ufunc.__name__}.{method} cannot be part of an epilogue; use sum, max or min")
        name = ufunc.__name__
        return call(f"numpy.{name}", "eq" if name == "equal" else name, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call(f"numpy.{function.__name__}", function.__name__, args, kwargs)


def _matrix(name: str, x: Any) -> Tracing:
    if not isinstance(x, Traced) or not x.extent.is_matrix:
        what = "a value that is no matrix" if isinstance(x, Traced) else type(x).__name__
        raise refused(f"{name}: got {what}; use the product, or something computed from it, in an epilogue")
    return x.tracing


def _dtype(value: Any) -> DType:
    try:
        return as_dtype(value)
    except ArgumentError as error:
        raise refused(str(error)) from None


def _arguments(entry: Callable[..., Any]) -> str:
    return ", ".join(str(p) for p in list(inspect.signature(entry).parameters.values())[1:])
