"""Traced values: an epilogue function computes with them while it is traced, and they record its operations.

Python operators, methods, and functions of torch (`__torch_function__`) and numpy (`__array_ufunc__`,
`__array_function__`) are all looked up in op_table.py. No state is kept between calls.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from gemmsmith.core.dtypes import FP32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.core.graph import BroadcastDims, Node, Operation, axis_of_dims
from gemmsmith.graph.frontend.op_table import (
    ARGUMENT_ALIASES,
    DEFAULT_HINT,
    EPILOGUE_FUNCTIONS,
    METHODS,
    UNSUPPORTED_HINTS,
    find_op,
)
from gemmsmith.graph.reductions import REDUCTIONS
from gemmsmith.graph.row_functions import RowFunction
from gemmsmith.graph.source_location import epilogue_error, user_source_line

F = TypeVar("F", bound=Callable[..., Any])


class _Fp32(DType):
    """FP32, as another object that is equal to it.

    It tells x.to(y.dtype) of traced values, which does nothing, from a cast to fp32, which sets a result's dtype.
    """

    def __eq__(self, other: object) -> bool:
        return other is self or other is FP32

    def __hash__(self) -> int:
        return hash(FP32)


TRACED_DTYPE = _Fp32(**vars(FP32))
"""The `.dtype` of all traced values: fp32. A cast to this very object does nothing."""

MAX_EXACT_FP32_INT = 1 << 24
"""Maximum integer up to which all integers are exact in fp32 (24 significant bits)."""


def epilogue_function(num_results: int = 1) -> Callable[[F], F]:
    """Return a decorator that registers a function of traced values, for epilogues to call by its own name.

    The function's first argument is a traced value. What the function does must never change: epilogues that call it
    are not traced again, and torch.compile records its calls. `num_results`: how many values it returns.

    A function of the same qualified name in the same module is replaced. Raises EpilogueError if any other registered
    function has this name.
    """

    def decorate(function: F) -> F:
        name = function.__name__

        @functools.wraps(function)
        def called(x: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compile_proxy(x):  # torch.compile records the call under the function's name
                return x.record(name, num_results, (x, *args), kwargs)
            return function(x, *args, **kwargs)

        EPILOGUE_FUNCTIONS.register(called, f"{function.__module__}.{function.__qualname__}", name)
        return called  # type: ignore[return-value]

    return decorate


def call_row_function(function: RowFunction, x: Any, attribute: Any = None) -> Traced:
    """Apply a function of rows to x, and return its value. Raises EpilogueError if x is not a matrix.

    `attribute`: what the function needs besides x; see `RowFunction`.
    """
    tracer = _tracer_of_matrix(function.name, x)
    return tracer.add(function.name, tracer.value(x), attribute=attribute)


@epilogue_function(num_results=2)
def quantize(x: Any, dtype: Any = "fp8_e4m3", block: int = 128) -> tuple[Any, Any]:
    """Quantize x to fp8 with one scale per row and `block` columns, in an epilogue.

    A scale is the block's largest magnitude divided by the dtype's maximum. Scales are contiguous along M, padded to 16
    bytes, unless `out` says otherwise.

    Args:
        x: A matrix: the accumulator, or a value computed from it.
        dtype: "fp8_e4m3" or "fp8_e5m2".
        block: Columns per scale: a multiple of 16, at most 256 (128 for halves of `deinterleave`). All blocks of an
            epilogue have one size.

    Returns:
        The values, of x's shape, and the scales, (M, N / block).

    Raises:
        EpilogueError: for other dtypes and blocks.
    """
    tracer = _tracer_of_matrix("quantize", x)
    quantized_dtype = _dtype(dtype)
    if quantized_dtype.bits != 8:
        raise epilogue_error(f"quantize: dtype: got {dtype!r}; use 'fp8_e4m3' or 'fp8_e5m2'")
    if not isinstance(block, int) or block < 1:
        raise epilogue_error(f"quantize: block: got {block!r}; use a number of columns, such as 128")
    q = tracer.add("quantize", tracer.value(x), attribute=(quantized_dtype, block))
    return q.with_pending_cast(quantized_dtype), tracer.add("scale", q)


@epilogue_function()
def top_k_softmax(x: Any, k: int) -> Any:
    """Compute the softmax over the k largest elements of each row of a matrix x, and 0 elsewhere, in an epilogue.

    Args:
        x: A matrix: the accumulator, or a value computed from it. N must fit one tile.
        k: Number of elements, from 1 to N; the first ones are selected among equals.

    Returns:
        A matrix of x's shape.

    Raises:
        EpilogueError: for another k, or if x is not a matrix.
    """
    tracer = _tracer_of_matrix("top_k_softmax", x)
    if not isinstance(k, int) or not 1 <= k <= x.shape[-1]:
        raise epilogue_error(f"top_k_softmax: k: got {k!r}; use an integer from 1 to {x.shape[-1]}")
    return tracer.add("top_k_softmax", tracer.value(x), attribute=k)


@epilogue_function(num_results=2)
def deinterleave(packed: Any) -> tuple[Any, Any]:
    """Return the even and the odd groups of 8 columns, (M, N/2) each: the inverse of `interleave`, in an epilogue."""
    tracer = packed.tracer
    x, n = tracer.value(packed), tracer.acc_shape[-1]
    if x.broadcast_dims.columns_per_value != 1 or n % 16:
        received = f"{n} columns" if x.broadcast_dims.columns_per_value == 1 else "a value without all columns"
        raise epilogue_error(
            f"deinterleave: got {received}; use the accumulator, with a multiple of 16 columns (8 of each half)"
        )
    return tracer.add("chunk", x, attribute=(0, "n")), tracer.add("chunk", x, attribute=(1, "n"))


@epilogue_function()
def interleave(gate: Any, up: Any) -> Any:
    """Interleave two halves in groups of 8 columns: the inverse of `deinterleave`, in an epilogue."""
    tracer = gate.tracer
    halves = [tracer.value(x) for x in (gate, up)]
    if any(x.broadcast_dims.columns_per_value != 2 for x in halves):
        raise epilogue_error(
            "interleave: got a value with all columns; use the halves that deinterleave returns, or values of them"
        )
    return tracer.add("interleave", *halves, attribute="n")


class Tracer:
    """The graph of one run of an epilogue function, under construction.

    Calling it, t("exp", x), adds an elementwise node. `acc_shape` is the accumulator's shape (..., M, N).
    """

    def __init__(self, acc_shape: tuple[int, ...]) -> None:
        self.acc_shape, self.shape_dependent = acc_shape, False
        self.nodes: list[Node] = []

    def add(
        self, op: str, *inputs: Traced, attribute: Any = None, location: str | None = None,
        dims: BroadcastDims | None = None,
    ) -> Traced:  # fmt: skip
        """Add a node and return its value.

        `location`: the source line; None: the user's innermost one. `dims`: an operand's broadcast dims; None for other
        nodes, whose dims follow from the inputs.
        """
        node = Node(op, tuple(x.node for x in inputs), attribute, location or user_source_line())
        dims = dims or node.operation.dims(node, [x.broadcast_dims for x in inputs])
        self.nodes.append(node)
        return Traced(self, len(self.nodes) - 1, dims, is_bool=node.operation.is_predicate)

    def __call__(self, op: str, *inputs: Any) -> Traced:
        """Add an elementwise node and return its value. Its inputs are traced values or numbers.

        Raises EpilogueError for arithmetic of predicates alone, and for values with different numbers of columns.
        """
        values = [self.value(x) for x in inputs]
        if op in ("add", "sub", "neg") and all(x.is_bool for x in values):
            raise epilogue_error(f"{op}: got booleans only; use & or | or ~, or .float() to count them")
        widths = {x.broadcast_dims.columns_per_value for x in values} - {0}
        if len(widths) > 1:
            *_, m, n = self.acc_shape
            rows = any(x.op == "operand" and x.broadcast_dims[1:] == (0, 2) for x in values) and 2 * m == n
            column = f"; an operand with one value per row has the shape ({m}, 1)" * rows
            raise epilogue_error(
                f"{op}: got {n} and {n // 2} columns; use halves of deinterleave, or all columns, for both{column}"
            )
        return self.add(op, *values)

    def value(self, x: Any) -> Traced:
        """Return x as an input of another node: a number becomes a constant, a pending cast becomes a node.

        Raises EpilogueError for what cannot be an input, such as an array or a reduction's result.
        """
        if isinstance(x, Traced):
            if x.tracer is not self:
                raise epilogue_error("got a value of another call; values cannot be kept from one call to the next")
            if what := x.operation.known_afterwards:
                raise epilogue_error(
                    f"{what} is only known after the kernel; return it, and apply this operation to what gemm returns"
                )
            if x.pending_cast in (None, FP32):
                return x
            return self.add("cast", x.with_pending_cast(None), attribute=x.pending_cast)
        if is_array(x):
            raise epilogue_error(
                f"got {type(x).__name__} of shape {tuple(x.shape)}; make it a parameter and pass it as an operand"
            )
        if not isinstance(x, (numbers.Real, np.generic, np.ndarray)):
            raise epilogue_error(f"got {x!r}; use a traced value or a number")
        return self.add("constant", attribute=x)

    def expect_bools(self, op: str, inputs: tuple[Any, ...]) -> None:
        """Raise EpilogueError unless all inputs are booleans."""
        for x in inputs:
            if not (x.is_bool if isinstance(x, Traced) else isinstance(x, (bool, np.bool_))):
                raise epilogue_error(
                    f"{op}: got a number; use comparisons on both sides, in parentheses: (x > 0) & (x < 1)"
                )

    def reduce(self, kind: str, x: Any, dim: Any, keepdim: Any, dtype: Any = None) -> Traced:
        """Add a reduction of x and return its value.

        `kind`: a name of REDUCTIONS. `dim`, `keepdim`, `dtype`: as users pass them to torch's function; `dim` None: all
        dimensions. Raises EpilogueError for arguments that are wrong or not supported.
        """
        x, rank = self.value(x), len(self.acc_shape)
        if not x.broadcast_dims.is_matrix or (rank > 2 and not x.broadcast_dims.batch):
            raise epilogue_error(
                f"{kind}: expected a value of the accumulator's shape {self.acc_shape}; reduce others before the call, "
                "and pass the result as an operand"
            )
        if not isinstance(keepdim, (bool, np.bool_)):
            raise epilogue_error(f"{kind}: keepdim: got {keepdim!r}; use True or False, and dtype= for a dtype")
        dims = range(rank) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
        if not all(isinstance(d, (int, np.integer)) and -rank <= d < rank for d in dims):
            raise epilogue_error(
                f"{kind}: dim: got {dim!r}; use dimensions of the accumulator from {-rank} to {rank - 1}, or None"
            )
        reduced = {int(d) % rank for d in dims}
        if not reduced or 0 < len(reduced & set(range(rank - 2))) < rank - 2:
            raise epilogue_error(
                f"{kind}: dim: got {dim!r} of {rank}; use -1 (one value per row), -2 (one per column), all dimensions "
                "before these, or several"
            )
        axis = "all" if len(reduced) == rank else axis_of_dims(["bmn"[max(d - rank + 3, 0)] for d in reduced])
        result = self.add("reduce", x, attribute=(kind, axis))
        result.keepdim = bool(keepdim)
        return result if dtype is None else result.with_pending_cast(_dtype(dtype))

    def cast(self, x: Traced, dtype: Any) -> Traced:
        """Return x with a pending cast to `dtype`; see `Traced.pending_cast`.

        Raises EpilogueError for a second cast of a value that no node can read, such as a reduction's result.
        """
        target = None if dtype is TRACED_DTYPE or isinstance(dtype, Traced) else _dtype(dtype)
        is_final = bool(x.operation.known_afterwards)
        if is_final and x.pending_cast not in (None, FP32, target):
            raise epilogue_error(
                f"got a second cast of a value in {x.pending_cast}; return it, and cast it again afterwards"
            )
        return (x if is_final else self.value(x)).with_pending_cast(target)

    def one_hot(self, x: Any, num_classes: Any) -> Traced:
        """Add a node that is 1 in each row's labeled column and 0 elsewhere.

        x is a column of integer labels; one outside [0, N), such as an ignored -100, labels no column. `num_classes`:
        as in torch; it must be N, the number of the accumulator's columns.
        """
        x, n = self.value(x), self.acc_shape[-1]
        if n == 1 and x.broadcast_dims.varies_along_n:  # a column has the accumulator's shape
            return self("eq", x, 0)
        if not x.broadcast_dims.varies_along_m or x.broadcast_dims.varies_along_n:
            raise epilogue_error(
                f"one_hot: input: got a value of shape {x.shape}; use one label per row, an operand (M, 1)"
            )
        if num_classes != n or n > MAX_EXACT_FP32_INT:
            raise epilogue_error(
                f"one_hot: num_classes: got {num_classes!r}; use {n}, the accumulator's columns, at most 2^24"
            )
        return self.add("one_hot", x)


def call(display_name: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], method: bool = False) -> Any:
    """Add the nodes of a call of a function or method in an epilogue, and return the traced result.

    `display_name`: how the user wrote the function, such as "torch.exp", for messages. `name`: its name in op_table.py.
    At least one argument is a traced value; keywords are torch's or numpy's. For a `method`, METHODS is searched first.
    Raises EpilogueError if the function is not supported, or not with these arguments.
    """
    all_arguments = [*args, *kwargs.values()]
    arrays = [x for x in all_arguments if is_array(x)]
    first = next((x for x in all_arguments if isinstance(x, Traced)), None)
    if arrays and first is not None:
        first.tracer.value(arrays[0])  # raises EpilogueError: arrays must be operands
    entry = (METHODS.get(name) if method else None) or find_op(name)
    if entry is None or first is None:
        raise epilogue_error(
            f"{display_name} cannot be part of an epilogue; {UNSUPPORTED_HINTS.get(name, DEFAULT_HINT)}"
        )
    named = {ARGUMENT_ALIASES.get(key, key): x for key, x in kwargs.items()}
    if named.pop("out", None) is not None or named.pop("inplace", False):
        raise epilogue_error(f"{display_name}: values cannot be changed in place; use what it returns")
    signature = inspect.signature(entry)
    try:
        signature.bind(first.tracer, *args, **named)
    except TypeError as error:
        arguments = ", ".join(map(str, list(signature.parameters.values())[1:]))
        raise epilogue_error(f"{display_name}: {error}; its arguments are {arguments}") from None
    return entry(first.tracer, *args, **named)


def is_compile_proxy(x: Any) -> bool:
    """Return whether x is a proxy value of an epilogue that torch.compile traces (torch/recording.py)."""
    return hasattr(type(x), "record")


def is_array(x: Any) -> bool:
    """Return whether x is an array, which must be an operand. Scalars and 0-d arrays of numpy count as numbers."""
    if isinstance(x, (Traced, np.generic, type)):
        return False
    return x.ndim > 0 if isinstance(x, np.ndarray) else hasattr(x, "shape")


def _binary_operator(symbol: str, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the methods of an operator and of its reflected form, such as `__add__` and `__radd__`."""
    return (
        lambda self, *other: call(symbol, name, (self, *other), {}),
        lambda self, other: call(symbol, name, (other, self), {}),
    )


def _unsupported(problem: str, instead: str) -> Any:
    """Return a method that raises EpilogueError with the message "`problem`; `instead`"."""

    def method(self: Traced, *args: Any, **kwargs: Any) -> Any:
        raise epilogue_error(f"{problem}; {instead}")

    return method


_NO_VALUE_HINT = "use traced functions (import math, if you do, outside of the function), or where(condition, a, b)"
_ELEMENTWISE_HINT = (
    "the same operations apply to every element; use operands, where(condition, a, b), gate, up = "
    "gemmsmith.deinterleave(x), or max(dim).values"
)


class EpilogueAttributeError(EpilogueError, AttributeError):
    """Error for an attribute that traced values do not have; an AttributeError, so that hasattr works."""


@dataclass(eq=False, repr=False)
class Traced:
    """A value of an epilogue function while it is traced.

    `node`: the index of its node. `is_bool`: whether it is a predicate.
    `pending_cast`: the dtype to which it was cast last, or None. The cast becomes a node if another node reads the
    value; if the function returns the value, the dtype is the result's.
    `keepdim`: for a reduction, whether reduced dimensions are kept, with length 1.
    `is_number`: whether it is an operand that is passed as a Python number.
    """

    tracer: Tracer
    node: int
    broadcast_dims: BroadcastDims
    is_bool: bool = False
    pending_cast: DType | None = None
    keepdim: bool = False
    is_number: bool = False

    @property
    def op(self) -> str:
        """Operation of the value's node."""
        return self.tracer.nodes[self.node].op

    @property
    def operation(self) -> Operation:
        """The record of that operation."""
        return self.tracer.nodes[self.node].operation

    def with_pending_cast(self, dtype: DType | None) -> Traced:
        """Return the value with another pending cast. It then counts as neither a predicate nor a Python number."""
        return replace(self, is_bool=False, pending_cast=dtype, is_number=False)

    dtype = TRACED_DTYPE

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that broadcasts to the accumulator's, without leading dimensions of length 1."""
        if self.operation.known_afterwards:
            raise epilogue_error("the shape of a reduction's result is only known after the kernel; return it")
        self.tracer.shape_dependent = True
        (*batch, m, n), dims = self.tracer.acc_shape, self.broadcast_dims
        rows, columns = m if dims.varies_along_m else 1, n // dims.column_divisor if dims.varies_along_n else 1
        if dims.batch and batch:
            return (*batch, rows, columns)
        return (rows, columns) if dims.varies_along_m else (columns,) if dims.varies_along_n else ()

    @property
    def ndim(self) -> int:
        """Number of dimensions of `shape`."""
        return len(self.shape)

    @property
    def values(self) -> Traced:
        """The value itself, for `x.max(dim).values`, since torch's max(dim) returns (values, indices)."""
        if self._selects:
            return self
        raise epilogue_error(".values: only max(dim) and min(dim) have it", error_type=EpilogueAttributeError)

    @property
    def _selects(self) -> bool:
        """Whether this is a maximum or minimum."""
        node = self.tracer.nodes[self.node]
        return node.op == "reduce" and REDUCTIONS[node.attribute[0]].selects

    def __getattr__(self, name: str) -> Any:
        """Return the method of an operation's name. Raises EpilogueAttributeError, with a hint, if there is none."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name in METHODS or find_op(name):
            return lambda *args, **kwargs: call(f".{name}()", name, (self, *args), kwargs, method=True)
        out_of_place = name.removesuffix("_")
        if find_op(out_of_place):
            hint = f"a value cannot be changed in place; use {out_of_place}"
        elif name in ("T", "mT", "H", "mH", "indices"):
            hint = "use .values alone" if name == "indices" else "store the result in a transposed array: out=d.T"
        else:
            hint = UNSUPPORTED_HINTS.get(name, DEFAULT_HINT)
        raise epilogue_error(f".{name} cannot be part of an epilogue; {hint}", error_type=EpilogueAttributeError)

    def __repr__(self) -> str:
        return f"<traced {self.op}>"

    __hash__ = object.__hash__
    __add__, __radd__ = _binary_operator("+", "add")
    __sub__, __rsub__ = _binary_operator("-", "sub")
    __mul__, __rmul__ = _binary_operator("*", "mul")
    __truediv__, __rtruediv__ = _binary_operator("/", "div")
    __pow__, __rpow__ = _binary_operator("**", "pow")
    __and__, __rand__ = _binary_operator("&", "bitwise_and")
    __or__, __ror__ = _binary_operator("|", "bitwise_or")
    __xor__, __rxor__ = _binary_operator("^", "bitwise_xor")
    __neg__, _ = _binary_operator("-", "neg")
    __pos__, _ = _binary_operator("+", "positive")
    __abs__, _ = _binary_operator("abs", "abs")
    __invert__, _ = _binary_operator("~", "bitwise_not")
    __round__, _ = _binary_operator("round", "round")
    __lt__, _ = _binary_operator("<", "lt")
    __le__, _ = _binary_operator("<=", "le")
    __gt__, _ = _binary_operator(">", "gt")
    __ge__, _ = _binary_operator(">=", "ge")
    __eq__, _ = _binary_operator("==", "eq")
    __ne__, _ = _binary_operator("!=", "ne")
    __floordiv__ = __rfloordiv__ = _unsupported("// cannot be part of an epilogue", "use floor(x / y)")
    __mod__ = __rmod__ = _unsupported("% cannot be part of an epilogue", "use x - floor(x / y) * y")
    __matmul__ = __rmatmul__ = _unsupported("@ cannot be part of an epilogue", UNSUPPORTED_HINTS["matmul"])
    __bool__ = _unsupported(
        "a condition differs from element to element, so if, while, and, or, not, min() and max() cannot ask for it",
        "use where(condition, a, b), & | ~, minimum and maximum",
    )
    __float__ = __int__ = __index__ = __complex__ = __array__ = _unsupported(
        "a traced value has no number yet", _NO_VALUE_HINT
    )
    __len__ = __iter__ = __contains__ = __setitem__ = _unsupported(
        "a traced value has no elements yet", _ELEMENTWISE_HINT
    )

    def __getitem__(self, key: Any) -> Traced:
        """Return the value itself for `x.max(dim)[0]`, since torch's max(dim) returns (values, indices)."""
        if self._selects and isinstance(key, int) and key == 0:
            return self
        raise epilogue_error(f"a traced value cannot be indexed; {_ELEMENTWISE_HINT}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call of a function of torch; torch calls this instead if an argument is a traced value.

        In op_table.py the function has torch's name, without leading underscores and the prefix "special_".
        """
        name = getattr(function, "__name__", str(function))
        if name.startswith("__"):
            name = name.strip("_")
        elif name.endswith("_"):
            raise epilogue_error(f"torch.{name}: a value cannot be changed in place; use {name.rstrip('_')}")
        return call(f"torch.{name}", name.removeprefix("_").removeprefix("special_"), args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Record the call of a universal function of numpy; `method`: "__call__", or another way to call it."""
        if method != "__call__":
            raise epilogue_error(f"numpy.{ufunc.__name__}.{method} cannot be part of an epilogue; use sum, max or min")
        name = ufunc.__name__
        return call(f"numpy.{name}", "eq" if name == "equal" else name, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call(f"numpy.{function.__name__}", function.__name__, args, kwargs)


def _tracer_of_matrix(name: str, x: Any) -> Tracer:
    """Return the tracer of a traced matrix. Raises EpilogueError, naming the function `name`, for anything else."""
    if not isinstance(x, Traced) or not x.broadcast_dims.is_matrix:
        description = "a value that is not a matrix" if isinstance(x, Traced) else type(x).__name__
        raise epilogue_error(
            f"{name}: got {description}; use the accumulator, or a value computed from it, in an epilogue"
        )
    return x.tracer


def _dtype(value: Any) -> DType:
    """Return the DType that a user's argument means. Raises EpilogueError with the user's line if there is none."""
    try:
        return as_dtype(value)
    except ArgumentError as error:
        raise epilogue_error(str(error)) from None
