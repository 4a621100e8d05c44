"""Recording of an epilogue while torch.compile traces it.

Dynamo traces the user's function on proxy values and installs guards. The recorded calls are encoded as tuples of
constants and replayed on the ordinary tracer, outside the compiled graph. So both ways of tracing support the same
functions and raise the same errors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph
from gemmsmith.graph.frontend.op_table import EPILOGUE_FUNCTIONS
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.frontend.values import Traced

Entry = tuple[Any, ...]
"""A recorded call: its kind, which says where the name is looked up when it is replayed ("function" of torch,
"epilogue_function" of gemmsmith, "method", "operator" of the module operator, "attribute"; or "error", whose name is
the message); its name; its encoded arguments; its encoded keyword arguments."""
ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "indices"})
"""Attributes that the tracer rejects, and that are not methods."""


class Tape:
    """Records the operations on the values of one run of an epilogue."""

    def __init__(self, shape: tuple[Any, ...]) -> None:
        self.shape = shape
        self.entries: list[Entry] = []
        self.values = 0

    def value(self, shape: Any, is_number: bool = False) -> Proxy:
        """Return a new value of this shape; None: the shape is not known. `is_number`: it is an operand's number."""
        self.values += 1
        return Proxy(self, self.values - 1, shape, is_number)

    def add(
        self, how: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_results: int = 1
    ) -> Any:  # fmt: skip
        """Record a call, and return a proxy of its result, or a tuple of proxies if there are several.

        A single result counts as having the accumulator's shape if an argument has it; all other shapes are unknown.
        """
        encoded_kwargs = tuple([(key, encode_argument(x)) for key, x in kwargs.items()])
        self.entries.append((how, name, tuple([encode_argument(x) for x in args]), encoded_kwargs))
        if num_results > 1:
            return tuple([self.value(None) for _ in range(num_results)])
        full_shaped = [x for x in args if isinstance(x, Proxy) and x.known_shape == self.shape]
        return self.value(self.shape if full_shaped else None)


class Proxy:
    """A value in an epilogue that Dynamo traces. Operations on it are recorded on its tape.

    Attributes:
        index: the value's number on the tape.
        known_shape: its shape, or None if it is not known.
        is_number: whether it is an operand that is a number.
    """

    def __init__(self, tape: Tape, index: int, known_shape: Any, is_number: bool = False) -> None:
        self.tape, self.index, self.known_shape, self.is_number = tape, index, known_shape, is_number

    @property
    def shape(self) -> Any:
        """The value's shape. If it is not known, an error is recorded, and the accumulator's is returned.

        So tracing goes on; the replay raises the error.
        """
        if self.known_shape is None:
            _record_error(
                self, "got .shape of a value that does not have the accumulator's shape; use the accumulator's"
            )
            return self.tape.shape
        return self.known_shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> Proxy:
        """The value itself, which stands for its dtype as an argument of `to`."""
        return self

    @property
    def values(self) -> Any:
        """The field `values` of a result such as that of torch.max(x, dim), which also has indices."""
        return self.tape.add("attribute", "values", (self,), {})

    def __getitem__(self, key: Any) -> Any:
        return self.tape.add("operator", "getitem", (self, key), {})

    def __getattr__(self, name: str) -> Any:
        """Record the attribute, or return a function that records a call of the method."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ATTRIBUTES:
            return self.tape.add("attribute", name, (self,), {})
        return lambda *args, **kwargs: self.tape.add("method", name, (self, *args), kwargs)

    def record(self, name: str, num_results: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record a call of one of `EPILOGUE_FUNCTIONS`, which call this."""
        return self.tape.add("epilogue_function", name, args, kwargs, num_results)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        first = next(x for x in (*args, *named.values()) if isinstance(x, Proxy))
        return first.tape.add("function", function.__name__, args, named)

    def __bool__(self) -> bool:
        """Record an error: a traced value is no condition. Returns something, so that tracing goes on."""
        _record_error(
            self,
            "a condition differs from element to element, so if, while, and, or and not cannot ask for it; "
            "use where(condition, a, b), & | ~, minimum and maximum",
        )
        return True

    def __float__(self) -> float:
        """Record an error: a traced value is no number. Returns something, so that tracing goes on."""
        _record_error(
            self, "a value has no number yet; use functions of torch, not of math or numpy, in a compiled epilogue"
        )
        return 0.0

    def __int__(self) -> int:
        return int(float(self))

    def __len__(self) -> int:
        _record_error(self, "a value has no elements yet; apply functions to the whole value")
        return 2

    def __iter__(self) -> Any:  # without it Python would call __getitem__ forever
        return iter((self,) * len(self))

    def __contains__(self, x: Any) -> bool:
        return len(self) == 0

    __hash__ = object.__hash__


def _operator(name: str, reflected: bool = False) -> Callable[..., Any]:
    """Return a method of Proxy that records a call of the function `name` of the module operator.

    `reflected`: the proxy is the second argument, as in __radd__.
    """

    def method(self: Proxy, *other: Any) -> Any:
        return self.tape.add("operator", name, (*other, self) if reflected else (self, *other), {})

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "and_", "or_", "xor", "floordiv", "mod", "matmul"):
    _plain = _name.rstrip("_")
    setattr(Proxy, f"__{_plain}__", _operator(_name))
    setattr(Proxy, f"__r{_plain}__", _operator(_name, reflected=True))
for _name in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Proxy, f"__{_name}__", _operator(_name))


def _record_error(x: Proxy, message: str) -> None:
    x.tape.entries.append(("error", message, (), ()))


def encode_argument(x: Any) -> tuple[Any, ...]:
    """Return an argument of a call as a tuple (kind, value) of constants, which `_decode_argument` reads.

    Numbers are encoded as strings, so that Dynamo does not make them symbolic. An argument that no epilogue may have is
    encoded as an error, which the replay raises.
    """
    if isinstance(x, Proxy):
        return "value", x.index
    if x is None or isinstance(x, (bool, str)):
        return "constant", x
    if isinstance(x, float):
        return "float", x.hex()
    if isinstance(x, int):
        return "int", float(x).hex()
    if isinstance(x, (tuple, list)):
        return "tuple", tuple([encode_argument(y) for y in x])
    if isinstance(x, dict):
        return "dict", tuple([(key, encode_argument(y)) for key, y in x.items()])
    if isinstance(x, torch.dtype):
        return "constant", str(x).removeprefix("torch.")
    if isinstance(x, torch.Tensor):
        return "error", f"got a tensor of shape {tuple(x.shape)}; make it a parameter and pass it as an operand"
    return "error", f"got {type(x).__name__}; use a traced value or a number"


def replay(
    entries: tuple[Entry, ...], returned: tuple[Any, ...], shape: tuple[int, ...],
    operands: Mapping[str, tuple[BroadcastDims, DType | None]],
) -> EpilogueGraph:  # fmt: skip
    """Replay recorded calls on the tracer and return the epilogue's graph.

    `returned`: what the function returned, by `encode_argument`. `shape`: that of a @ b. `operands`: extents and dtypes
    by name. Raises EpilogueError if the calls are not a valid epilogue.
    """

    def function(acc: Any, **named: Any) -> Any:
        """Repeat the recorded calls on traced values, and return what the epilogue returned."""
        values = [acc, *(named[name] for name in operands)]
        for entry in entries:
            new_values = _replay_entry(entry, values)
            values += new_values if isinstance(new_values, tuple) else (new_values,)
        return _decode_argument(returned, values)

    return trace(function, shape, operands)


def _replay_entry(entry: Entry, values: list[Any]) -> Any:
    """Execute a recorded call on traced values, and return its result, or a tuple of results.

    `values`: the accumulator, the operands and the results of the earlier calls, by their numbers on the tape. Raises
    EpilogueError for a recorded error.
    """
    how, name, encoded_args, encoded_kwargs = entry
    args = [_decode_argument(x, values) for x in encoded_args]
    kwargs = {key: _decode_argument(x, values) for key, x in encoded_kwargs}
    match how:
        case "function":
            return Traced.__torch_function__(SimpleNamespace(__name__=name), (), tuple(args), kwargs)
        case "epilogue_function":
            return EPILOGUE_FUNCTIONS[name](*args, **kwargs)
        case "method":
            return getattr(args[0], name)(*args[1:], **kwargs)
        case "operator":
            return getattr(operator, name)(*args)
        case "attribute":
            return getattr(args[0], name)
    assert how == "error"
    raise EpilogueError(f"epilogue: {name}")  # then the name is the message


def _decode_argument(x: tuple[Any, ...], values: list[Any]) -> Any:
    """Return the argument that `encode_argument` encoded, with traced values in place of proxies.

    Raises EpilogueError for an argument that no epilogue may have.
    """
    kind, encoded = x
    match kind:
        case "value":
            return values[encoded]
        case "float":
            return float.fromhex(encoded)
        case "int":
            return int(float.fromhex(encoded))
        case "tuple":
            return tuple(_decode_argument(y, values) for y in encoded)
        case "dict":
            return {key: _decode_argument(y, values) for key, y in encoded}
        case "error":
            raise EpilogueError(f"epilogue: {encoded}")
    return encoded
