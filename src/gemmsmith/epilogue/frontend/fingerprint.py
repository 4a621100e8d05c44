"""What a function's graph depends on besides its arguments, so that it need not be traced again at every call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from gemmsmith.core.bounded import Bounded
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import RetraceWarning
from gemmsmith.core.graph import Graph
from gemmsmith.epilogue.frontend.copies import is_module
from gemmsmith.epilogue.frontend.purity import is_known, reads
from gemmsmith.epilogue.lines import line, user_level

_LIBRARIES = ("torch", "numpy", "math", "functools", "operator")
_NUMBERS = (bool, int, float, str, bytes, type(None))
_SCALARS = frozenset(x for x in np.sctypeDict.values() if issubclass(x, (np.number, np.bool_)))
Seen = dict[int, str]
"""The functions, lists and dictionaries that one fingerprint has come to, by id, numbered."""


class _UnknownError(Exception):
    """Raised, with the reason, for what may change without its fingerprint changing; `function` reads it."""

    function: Any = None


def fingerprint(source: Any) -> Hashable:
    """Two epilogues with equal fingerprints make the same graph; None if that cannot be determined.

    A function's is its code with the values of its defaults, of the variables it closes over and of the globals it
    names, functions and containers likewise; a partial's is its function's with its arguments; a module's of torch.nn
    its class with its attributes. There is one only if all that these read is known to depend on nothing else
    (purity.py); else a RetraceWarning says why, once. It keeps what it holds alive, so that an id is not used again.
    """
    if source is None:
        return "none"
    if isinstance(source, Graph):
        return source
    try:
        _expect_no_mode()
        return _value(source, {})
    except (_UnknownError, RecursionError) as error:
        if callable(source) and not isinstance(source, type) and not callable(getattr(source, "graph", None)):
            _warn(getattr(error, "function", None) or source, str(error))
        return None


def _expect_no_mode() -> None:
    """Raises where a mode of torch would change what its functions do; that of torch.device does not."""
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "overrides") and torch._C._len_torch_function_stack():
        of_device = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", None)
        for mode in torch.overrides._get_current_function_mode_stack():
            if type(mode) is not of_device:
                raise _UnknownError(f"{type(mode).__name__} is active")


def _value(x: Any, seen: Seen) -> Hashable:
    if known := _FIXED.get(id(x)):
        return known
    kind = type(x)
    if kind in _NUMBERS:
        return kind, repr(x)  # 0.0 and -0.0, NaN
    if kind is FunctionType:
        return _function(x, seen)
    if kind is tuple:
        return tuple([_value(y, seen) for y in x])
    if kind is list or kind is dict:
        return kind, _once(x, seen) or tuple([_value(y, seen) for y in (x if kind is list else list(x.items()))])
    if kind in _SCALARS:
        return kind, x.tobytes()
    if kind is DType:
        return x  # type: ignore[no-any-return]
    if kind is partial and not vars(x):
        return partial, _value(x.func, seen), _value(x.args, seen), _items(x.keywords, seen)
    if is_module(x):
        return _module(x, seen)
    if is_known(x):
        return _fixed(x)
    raise _UnknownError(f"it reads {_described(x)}, which may change")


def _module(x: Any, seen: Seen) -> Hashable:
    """A module of torch.nn: its class and its attributes."""
    nn = sys.modules["torch"].nn
    if getattr(nn, type(x).__name__, None) is not type(x):
        raise _UnknownError(f"{type(x).__name__} is no module of torch.nn")
    if nn.modules.module._has_any_global_hook():
        raise _UnknownError("there are hooks of all modules")
    # hooks, parameters and buffers are dictionaries, empty where there are none
    held = {name: y for name, y in vars(x).items() if not (isinstance(y, (dict, set)) and not y)}
    return _fixed(type(x)), _items(held.pop("_modules", {}), seen), _items(held, seen)


def _once(x: Any, seen: Seen) -> Hashable:
    """Nothing for a function or container that this comes to for the first time, else which of them it is."""
    if id(x) in seen:
        return seen[id(x)]
    seen[id(x)] = f"number {len(seen)}"
    return None


def _function(f: Any, seen: Seen) -> Hashable:
    if before := _once(f, seen):
        return before
    if f.__globals__.get("__name__", "").partition(".")[0] in _LIBRARIES and is_known(f):
        return _fixed(f)
    try:
        return _parts(f, seen)
    except _UnknownError as error:
        error.function = error.function or f
        raise


def _parts(f: Any, seen: Seen) -> Hashable:
    parts: list[Hashable] = [_fixed(f.__code__), None, None, None]
    if f.__defaults__:
        parts[1] = _value(f.__defaults__, seen)
    if f.__kwdefaults__:
        parts[2] = _items(f.__kwdefaults__, seen)
    if f.__dict__:  # such as the __wrapped__ whose parameters it says are its own
        parts[3] = _items(f.__dict__, seen)
    for cell in f.__closure__ or ():
        try:
            contents = cell.cell_contents
        except ValueError:
            raise _UnknownError("a variable of its closure has no value yet") from None
        parts.append(_value(contents, seen))
    if is_ours(f):
        return tuple(parts)  # it reads nothing else
    names, other = reads(f.__code__)
    if other:
        raise _UnknownError(other)
    named = f.__globals__
    for name in names:
        if name in named:
            parts.append(_value(named[name], seen))
        elif name in f.__builtins__:
            parts.append(_value(f.__builtins__[name], seen))
        else:
            raise _UnknownError(f"{name} is not defined")
    return tuple(parts)


def is_ours(f: FunctionType) -> bool:
    """Whether a function was written in this package."""
    name = f.__globals__.get("__name__", "")
    return name.startswith("gemmsmith.") and getattr(sys.modules.get(name), "__dict__", None) is f.__globals__


def _items(named: Mapping[str, Any], seen: Seen) -> Hashable:
    return tuple([(name, _value(x, seen)) for name, x in named.items()])


class _Same:
    """Equal only for the very same object."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


_FIXED: dict[int, _Same] = Bounded(4096)
"""By id, which is not used again while the entry keeps the object alive."""


def _fixed(x: Any) -> _Same:
    """The fingerprint of something that does not change, found by its id from then on."""
    found = _FIXED.get(id(x))
    if found is None:
        _FIXED[id(x)] = found = _Same(x)
    return found


def _described(x: Any) -> str:
    if isinstance(x, ModuleType):
        return f"the module {x.__name__}"
    name = getattr(x, "__qualname__", "")
    return name if isinstance(name, str) and name else f"an object of type {type(x).__name__}"


_WARNED: dict[Hashable, None] = Bounded(4096)


def _warn(function: Any, reason: str) -> None:
    """Says once of each function why it is traced at every call."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    key = code or type(function), reason
    if key in _WARNED:
        return
    _WARNED[key] = None
    where = f" ({line(code.co_filename, code.co_firstlineno)})" if code else ""
    name = getattr(function, "__name__", type(function).__name__)
    warnings.warn(
        f"epilogue: {name}{where} is traced again at each call, since {reason}; let it read only its arguments, "
        "numbers, containers and functions, or pass what changes as an operand",
        RetraceWarning,
        stacklevel=user_level(),
    )
