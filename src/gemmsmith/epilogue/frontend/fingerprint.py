"""What a function's graph depends on besides its arguments, so that it need not be traced again at every call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from gemmsmith.core.bounded import Bounded
from gemmsmith.core.graph import Graph
from gemmsmith.epilogue.frontend.copies import is_module

LIBRARIES = {"torch", "numpy", "math", "gemmsmith"}
"""Modules whose attributes are assumed not to change."""
_NUMBERS = (bool, int, float, str, bytes, type(None))


class _UnknownError(Exception):
    """Raised for a value that may change without its fingerprint changing."""


def fingerprint(source: Any) -> Hashable:
    """Two sources with equal fingerprints make the same graph; None if that cannot be determined.

    A function's is its code with the values of its defaults, of the variables it closes over and of the globals it
    names, functions likewise; a partial's is its function's with its arguments; a module's of torch.nn its class with
    its attributes. It keeps those alive, so that an id is not used again.
    """
    if isinstance(source, Graph):
        return source
    try:
        if isinstance(source, FunctionType):
            return _function(source, ())
        return _value(source, ()) if isinstance(source, partial) or is_module(source) else None
    except _UnknownError:
        return None


def _value(x: Any, inside: tuple[CodeType, ...]) -> Hashable:
    if known := _FIXED.get(id(x)):
        return known
    if type(x) in _NUMBERS:
        return type(x), repr(x)  # 0.0 and -0.0, NaN
    if type(x) is tuple:
        return tuple(_value(y, inside) for y in x)
    if isinstance(x, FunctionType):
        return _function(x, inside)
    if type(x) is partial and not vars(x):
        return partial, _value(x.func, inside), _value(x.args, inside), _items(x.keywords, inside)
    if is_module(x) and type(x).__module__.partition(".")[0] in LIBRARIES:
        # hooks, parameters and buffers are dictionaries, empty where there are none
        held = {name: y for name, y in vars(x).items() if not (isinstance(y, (dict, set)) and not y)}
        return _Same(type(x)), _items(held.pop("_modules", {}), inside), _items(held, inside)
    library = (getattr(x, "__module__", None) or getattr(x, "__name__", "") or "").partition(".")[0]
    if isinstance(x, ModuleType):
        library = x.__name__.partition(".")[0]
    if isinstance(x, (ModuleType, BuiltinFunctionType, type)) and (library in LIBRARIES or library == "builtins"):
        return _fixed(x)
    if type(x).__module__.partition(".")[0] in LIBRARIES and type(x).__name__ in ("dtype", "DType", "ufunc"):
        return _fixed(x)
    raise _UnknownError


def _fixed(x: Any) -> _Same:
    """The fingerprint of something that does not change, found by its id from then on."""
    _FIXED[id(x)] = found = _Same(x)
    return found


def _items(named: Mapping[str, Any], inside: tuple[CodeType, ...]) -> Hashable:
    return tuple((name, _value(x, inside)) for name, x in named.items())


def _function(f: FunctionType, inside: tuple[CodeType, ...]) -> Hashable:
    code = f.__code__
    if code in inside:
        return code
    if (f.__module__ or "").partition(".")[0] in LIBRARIES:
        return _Same(f)
    if f.__dict__:  # it may read its own attributes
        raise _UnknownError
    inside = (*inside, code)
    parts: list[Hashable] = [code, None, None]
    if f.__defaults__:
        parts[1] = _value(f.__defaults__, inside)
    if f.__kwdefaults__:
        parts[2] = _items(f.__kwdefaults__, inside)
    for cell in f.__closure__ or ():
        try:
            parts.append(_value(cell.cell_contents, inside))
        except ValueError:  # an empty cell
            raise _UnknownError from None
    named = f.__globals__
    for name in _names(code):
        if name in named:
            parts.append((name, _value(named[name], inside)))
    return tuple(parts)


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """Globals that a function may read, and attributes; those of functions inside it too."""
    inner = (name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant))
    return tuple(sorted({*code.co_names, *inner}))


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
