"""Recording an epilogue while torch.compile traces it.

The compiler runs the function itself, so that it guards all that the function reads. What is done to the values that
are recorded here is noted in tuples of constants; `replayed` does it again to the values of the tracer, outside of the
compiled code. So both ways of tracing know the same functions and give the same errors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import Extent, Graph
from gemmsmith.epilogue.frontend.tracer import trace
from gemmsmith.epilogue.frontend.values import Traced, deinterleave, interleave, quantize, top_k_softmax

Entry = tuple[Any, ...]
"""How ("function", "ours", "method", "operator", "attribute", "item", "refused"), name, arguments, named arguments."""
OURS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (quantize, top_k_softmax, interleave, deinterleave)}
"""Functions of gemmsmith's."""
ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "indices"})
"""Attributes, not methods, that the tracer refuses."""


class Tape:
    """What is done to the values of one run of a function."""

    def __init__(self, product: tuple[Any, ...]) -> None:
        self.product = product
        self.entries: list[Entry] = []
        self.values = 0

    def value(self, shape: Any, is_number: bool = False) -> Recorded:
        self.values += 1
        return Recorded(self, self.values - 1, shape, is_number)

    def add(self, how: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        named = tuple([(key, constant(x)) for key, x in kwargs.items()])
        self.entries.append((how, name, tuple([constant(x) for x in args]), named))
        if name in ("deinterleave", "quantize"):
            return self.value(None), self.value(None)
        whole = [x for x in args if isinstance(x, Recorded) and x.known == self.product]
        return self.value(self.product if whole else None)


class Recorded:
    """A value of an epilogue that torch.compile traces."""

    def __init__(self, tape: Tape, index: int, known: Any, is_number: bool = False) -> None:
        self.tape, self.index, self.known, self.is_number = tape, index, known, is_number

    @property
    def shape(self) -> Any:
        if self.known is None:
            _refuse(self, "got .shape of a value that is not the whole product; use that of the product")
            return self.tape.product
        return self.known

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Recorded:
        return self

    @property
    def values(self) -> Any:
        return self.tape.add("attribute", "values", (self,), {})

    def __getitem__(self, key: Any) -> Any:
        return self.tape.add("item", "", (self, key), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ATTRIBUTES:
            return self.tape.add("attribute", name, (self,), {})
        return lambda *args, **kwargs: self.tape.add("method", name, (self, *args), kwargs)

    def record(self, name: str, *args: Any) -> Any:
        """A call of one of `OURS`, which calls this."""
        return self.tape.add("ours", name, args, {})

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        first = next(x for x in (*args, *named.values()) if isinstance(x, Recorded))
        return first.tape.add("function", function.__name__, args, named)

    def __bool__(self) -> bool:
        _refuse(self, "a condition differs from element to element, so if, while, and, or and not cannot ask for it; "
                      "use where(condition, a, b), & | ~, minimum and maximum")  # fmt: skip
        return True

    def __float__(self) -> float:
        _refuse(self, "a value has no number yet; use functions of torch, not of math or numpy, in a compiled epilogue")
        return 0.0

    def __int__(self) -> int:
        return int(float(self))

    def __len__(self) -> int:
        _refuse(self, "a value has no elements yet; apply functions to the whole")
        return 2

    def __iter__(self) -> Any:  # without it Python would index without an end
        return iter((self,) * len(self))

    def __contains__(self, x: Any) -> bool:
        return len(self) == 0

    __hash__ = object.__hash__


def _operator(name: str, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Recorded, *other: Any) -> Any:
        return self.tape.add("operator", name, (*other, self) if reflected else (self, *other), {})

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "and_", "or_", "xor", "floordiv", "mod", "matmul"):
    _plain = _name.rstrip("_")
    setattr(Recorded, f"__{_plain}__", _operator(_name))
    setattr(Recorded, f"__r{_plain}__", _operator(_name, reflected=True))
for _name in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Recorded, f"__{_name}__", _operator(_name))


def _refuse(x: Recorded, message: str) -> None:
    x.tape.entries.append(("refused", message, (), ()))


def constant(x: Any) -> tuple[Any, ...]:
    """An argument as a tuple of constants. A number becomes text, so that the compiler takes it as it is now."""
    if isinstance(x, Recorded):
        return "value", x.index
    if x is None or isinstance(x, (bool, str)):
        return "constant", x
    if isinstance(x, float):
        return "float", x.hex()
    if isinstance(x, int):
        return "int", float(x).hex()
    if isinstance(x, (tuple, list)):
        return "tuple", tuple([constant(y) for y in x])
    if isinstance(x, torch.dtype):
        return "constant", str(x).removeprefix("torch.")
    if isinstance(x, torch.Tensor):
        return "refused", f"got a tensor of shape {tuple(x.shape)}; make it a parameter and pass it as an operand"
    return "refused", f"got {type(x).__name__}; use a traced value or a number"


def replayed(
    entries: tuple[Entry, ...], results: tuple[tuple[str, Any], ...], form: str, product: tuple[int, ...],
    operands: Mapping[str, tuple[Extent, DType | None]],
) -> Graph:  # fmt: skip
    """The graph of what was recorded. `results`: names and what `constant` made of the values; `form` is "one", "tuple"
    or "dict". Raises EpilogueError."""

    def function(acc: Any, **named: Any) -> Any:
        values = [acc, *(named[name] for name in operands)]
        for entry in entries:
            made = _again(entry, values)
            values += made if isinstance(made, tuple) else (made,)
        found = {name: _argument(x, values) for name, x in results}
        return found if form == "dict" else tuple(found.values()) if form == "tuple" else found[results[0][0]]

    return trace(function, product, operands)


def _again(entry: Entry, values: list[Any]) -> Any:
    how, name, *constants = entry
    args, kwargs = [_argument(x, values) for x in constants[0]], {k: _argument(x, values) for k, x in constants[1]}
    match how:
        case "function":
            return Traced.__torch_function__(SimpleNamespace(__name__=name), (), tuple(args), kwargs)
        case "ours":
            return OURS[name](*args)
        case "method":
            return getattr(args[0], name)(*args[1:], **kwargs)
        case "operator":
            return getattr(operator, name)(*args)
        case "attribute":
            return getattr(args[0], name)
        case "item":
            return args[0][args[1]]
    raise EpilogueError(f"epilogue: {name}")


def _argument(x: tuple[Any, ...], values: list[Any]) -> Any:
    kind, given = x
    match kind:
        case "value":
            return values[given]
        case "float":
            return float.fromhex(given)
        case "int":
            return int(float.fromhex(given))
        case "tuple":
            return tuple(_argument(y, values) for y in given)
        case "refused":
            raise EpilogueError(f"epilogue: {given}")
    return given
