"""Fingerprints of epilogues: everything that a function's graph depends on besides its arguments.

A function whose fingerprint is unchanged need not be traced again. The function that is traced is restored from the
fingerprint, so that it reads nothing else, and other threads cannot change what it reads.
"""

from __future__ import annotations

import builtins
import linecache
import logging
import sys
import warnings
from collections.abc import Hashable
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np

from gemmsmith.core.dicts import BoundedCache, Records
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import RetraceWarning
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.frontend.op_table import EPILOGUE_FUNCTIONS
from gemmsmith.graph.frontend.purity import find_reads, is_listed_as_constant, is_module
from gemmsmith.graph.source_location import epilogue_error, format_location, user_stacklevel

_LOGGER = logging.getLogger("gemmsmith")
_LIBRARIES = ("torch", "numpy", "math", "functools", "operator")
_SCALAR_TYPES = (bool, int, str, bytes)
_NUMPY_SCALAR_TYPES = frozenset(x for x in np.sctypeDict.values() if issubclass(x, (np.number, np.bool_)))
Seen = dict[int, tuple[int, Any]]
"""Functions, lists and dictionaries that a fingerprint has already visited, by id: (number, object, which stays alive).

Their numbers stand for them when they are visited again.
"""


class _CannotFingerprintError(Exception):
    """Raised, with the reason, if `function` reads something that may change without changing its fingerprint."""

    function: Any = None


def fingerprint(source: Any) -> Hashable:
    """Return a key that is equal for two epilogues only if they have the same graph, or None if there is none.

    The fingerprint of a function is its code and the fingerprints of its defaults, closure variables and globals; of a
    functools.partial, those of its function and arguments; of a torch.nn module, its class and attributes. It exists
    only if all of these are known to depend on nothing else (purity.py); otherwise a RetraceWarning gives the reason,
    once. A fingerprint keeps its objects alive, so that no id is reused.
    """
    if source is None:
        return _NO_EPILOGUE
    if isinstance(source, EpilogueGraph):
        return source
    try:
        _check_no_torch_function_mode()
        if Records.replaced:
            return Records, Records.replaced, _fingerprint_value(source, {})
        if type(source) is FunctionType and (known := _STATELESS.get(id(source.__code__))) and _is_stateless(source):
            return known
        return _fingerprint_value(source, {})
    except (_CannotFingerprintError, RecursionError) as error:
        if callable(source) and not isinstance(source, type) and not callable(getattr(source, "graph", None)):
            _warn(getattr(error, "function", None) or source, str(error))
        return None


def restore(key: Hashable) -> Any:
    """Return an epilogue with this fingerprint. It shares no object that may change with the original.

    Raises EpilogueError if its values are nested deeper than Python can follow.
    """
    if type(key) is tuple and key[0] is Records:
        key = key[2]
    try:
        return _restore(key, [])
    except RecursionError:
        raise epilogue_error("it reads values nested deeper than sys.getrecursionlimit(); nest them less") from None


def register_constant(epilogue: Any) -> Any:
    """Make the identity of an epilogue that never changes its fingerprint, and return the epilogue."""
    _fingerprint_by_identity(epilogue)
    return epilogue


def _check_no_torch_function_mode() -> None:
    """Raise an error if a torch function mode is active, which may change what torch's functions do.

    The mode of `with torch.device(...)` changes nothing in an epilogue.
    """
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "overrides") and torch._C._len_torch_function_stack():
        device_context = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", None)
        for mode in torch.overrides._get_current_function_mode_stack():
            if type(mode) is not device_context:
                raise _CannotFingerprintError(f"{type(mode).__name__} is active")


def _fingerprint_value(x: Any, seen: Seen) -> Hashable:
    """Return the fingerprint of an object that an epilogue reads. Raises _CannotFingerprintError if it may change.

    `seen`: what was visited so far, which may contain itself; x is added.
    """
    if known := _STABLE_OBJECTS.get(id(x)):
        return known
    kind: Any = type(x)
    if kind is float:
        return kind, repr(x)  # 0.0 and -0.0, NaN
    if kind in _SCALAR_TYPES:
        return kind, x
    if x is None:
        return None
    if kind is FunctionType:
        return _fingerprint_function(x, seen)
    if kind is tuple:
        return kind, *[_fingerprint_value(y, seen) for y in x]
    if kind is list or kind is dict:
        if id(x) in seen:
            return seen[id(x)][0]
        seen[id(x)] = len(seen), x
        values = x if kind is list else [y for item in list(x.items()) for y in item]
        return kind, *[_fingerprint_value(y, seen) for y in values]
    if kind in _NUMPY_SCALAR_TYPES:
        return kind, x.tobytes()
    if kind is DType:
        return x  # type: ignore[no-any-return]
    if kind is partial and not vars(x):
        return kind, *[_fingerprint_value(y, seen) for y in (x.func, x.args, tuple(x.keywords.items()))]
    if is_module(x):
        return _fingerprint_module(x, seen)
    if is_listed_as_constant(x):
        return _fingerprint_by_identity(x)
    raise _CannotFingerprintError(f"it reads {_describe(x)}, which may change")


def _restore(key: Any, seen: list[Any]) -> Any:
    """Return an object with the fingerprint `key`.

    `seen`: the functions, lists and dictionaries restored so far; a fingerprint refers to them by number (`Seen`).
    """
    if type(key) is int:
        return seen[key]
    if type(key) is _IdentityKey:
        return key.thing
    if type(key) is not tuple:  # a DType, a graph, or None
        return key
    kind, *parts = key
    if kind is float or kind in _SCALAR_TYPES:
        return kind(parts[0])
    if kind in _NUMPY_SCALAR_TYPES:
        return np.frombuffer(parts[0], kind)[0]
    if kind is FunctionType:
        return _restore_function(seen, *parts)
    if type(kind) is _IdentityKey:  # the class of a torch.nn module
        module = kind.thing.__new__(kind.thing)
        sys.modules["torch"].nn.Module.__init__(module)  # with the dictionaries that were empty
        vars(module).update(_restore(parts[0], seen))
        return module
    if kind is list:
        seen.append(items := list[Any]())
        items += [_restore(part, seen) for part in parts]
        return items
    if kind is dict:
        seen.append(values_by_key := dict[Any, Any]())
        values = [_restore(part, seen) for part in parts]
        values_by_key |= zip(values[::2], values[1::2], strict=True)
        return values_by_key
    if kind is tuple:
        return tuple([_restore(part, seen) for part in parts])
    function, arguments, keywords = [_restore(part, seen) for part in parts]
    return partial(function, *arguments, **dict(keywords))


def _fingerprint_module(x: Any, seen: Seen) -> Hashable:
    """Return the fingerprint of a torch.nn module: its class and its attributes.

    Raises _CannotFingerprintError for a class that is not torch's own, and if global hooks are registered.
    """
    nn = sys.modules["torch"].nn
    if getattr(nn, type(x).__name__, None) is not type(x):
        raise _CannotFingerprintError(f"{type(x).__name__} is not a module of torch.nn")
    if nn.modules.module._has_any_global_hook():
        raise _CannotFingerprintError("global module hooks are registered")
    # hooks, parameters and buffers are dictionaries, which are left out if empty
    attributes = tuple([(name, y) for name, y in list(vars(x).items()) if not isinstance(y, (dict, set)) or y])
    return _fingerprint_by_identity(type(x)), _fingerprint_value(attributes, seen)


def _fingerprint_function(f: Any, seen: Seen) -> Hashable:
    """Return the fingerprint of a function: its code and all that it reads.

    It is the identity alone for functions that are listed as constant. A _CannotFingerprintError that it raises names
    the innermost function that reads what may change.
    """
    if id(f) in seen:
        return seen[id(f)][0]
    variables, code = f.__globals__, f.__code__
    module = variables.get("__name__", "")
    package = module.partition(".")[0]
    is_constant = EPILOGUE_FUNCTIONS.get(f.__name__) is f  # an `epilogue_function` (values.py)
    if is_constant or (package in _LIBRARIES and is_listed_as_constant(f)):
        return _fingerprint_by_identity(f)
    seen[id(f)] = len(seen), f
    if (code_key := _STABLE_OBJECTS.get(id(code))) is None:
        linecache.lazycache(code.co_filename, variables)  # for messages that quote a restored function
        code_key = _fingerprint_by_identity(code)
    is_ours = package == "gemmsmith" and getattr(sys.modules.get(module), "__dict__", None) is variables
    names, unknown_read = ((), "") if is_ours else find_reads(code)  # the package's own functions read nothing else
    try:
        if unknown_read:
            raise _CannotFingerprintError(unknown_read)
        parts: list[Hashable] = [FunctionType, code_key, module if is_ours else None]
        for x in (f.__defaults__, f.__kwdefaults__, f.__dict__):  # such as __wrapped__, which has the signature
            parts.append(_fingerprint_value(x, seen) if x else None)
        for cell in f.__closure__ or ():
            try:
                x = cell.cell_contents
            except ValueError:
                raise _CannotFingerprintError("a variable of its closure has no value yet") from None
            parts.append(_fingerprint_value(x, seen))
        for name in names:
            try:
                x = variables[name] if name in variables else f.__builtins__[name]
            except KeyError:
                raise _CannotFingerprintError(f"{name} is not defined") from None
            parts.append(_fingerprint_value(x, seen))
    except _CannotFingerprintError as error:
        error.function = error.function or f
        raise
    key = tuple(parts)
    if not (is_ours or names) and parts[3:] == [None, None, None]:
        _STATELESS[id(code)] = key
    return key


def _restore_function(
    seen: list[Any], code: _IdentityKey, module: str | None, defaults: Any, kwdefaults: Any, attributes: Any, *read: Any
) -> FunctionType:  # fmt: skip
    """Return the function with the fingerprint (FunctionType, code, module, ...), of which the parts are passed.

    `module`: the module of the package whose function it is; None for a user's function, which gets no other globals
    than it reads. `read`: the fingerprints of its closure variables, then of these globals.
    """
    # C functions import with the __import__ that they find here
    variables = vars(sys.modules[module]) if module else {"__builtins__": vars(builtins)}
    cells = tuple([CellType() for _ in code.thing.co_freevars])
    seen.append(f := FunctionType(code.thing, variables, closure=cells))
    f.__defaults__, f.__kwdefaults__ = _restore(defaults, seen), _restore(kwdefaults, seen)
    f.__dict__.update(_restore(attributes, seen) or {})
    for cell, key in zip(cells, read, strict=False):
        cell.cell_contents = _restore(key, seen)
    for name, key in zip(find_reads(code.thing).names, read[len(cells) :], strict=False):
        variables[name] = _restore(key, seen)
    return f


def _is_stateless(f: FunctionType) -> bool:
    """Return whether a function has no closure, defaults or attributes; it may read globals."""
    return not (f.__closure__ or f.__defaults__ or f.__kwdefaults__ or f.__dict__)


_STATELESS: dict[int, Hashable] = BoundedCache(4096)
"""Fingerprints of functions that are nothing but code without globals, by its id, which is not reused meanwhile."""


class _IdentityKey:
    """Wrapper of an object that is equal only to a wrapper of the same object."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


_STABLE_OBJECTS: dict[int, _IdentityKey] = BoundedCache(4096)
"""Keys of objects that do not change, by id, which is not reused while the entry keeps the object alive."""


def _fingerprint_by_identity(x: Any) -> _IdentityKey:
    """Return the fingerprint of an object that does not change, and register its id."""
    key = _STABLE_OBJECTS.get(id(x))
    if key is None:
        _STABLE_OBJECTS[id(x)] = key = _IdentityKey(x)
    return key


def _describe(x: Any) -> str:
    """Return what a warning calls an object that may change."""
    if isinstance(x, ModuleType):
        return f"the module {x.__name__}"
    name = getattr(x, "__qualname__", "")
    return name if isinstance(name, str) and name else f"an object of type {type(x).__name__}"


_NO_EPILOGUE: Hashable = _IdentityKey(None)
_WARNED: dict[Hashable, None] = BoundedCache(4096)
"""(code, reason) of the warnings given so far."""


def _warn(function: Any, reason: str) -> None:
    """Warn, once per function and reason, that it is traced again at every call.

    The warning is at the function's definition, or, without one, at the user's innermost frame.
    """
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    key = code or type(function), reason
    if key in _WARNED:
        return
    _WARNED[key] = None
    location = f" ({format_location(code.co_filename, code.co_firstlineno)})" if code else ""
    name = getattr(function, "__name__", type(function).__name__)
    _LOGGER.info("%s%s is traced again at each call, since %s", name, location, reason)
    message = (
        f"epilogue: {name}{location} is traced again at each call, since {reason}; let it capture only numbers, "
        "containers and functions, or pass what changes as an operand"
    )
    if code:
        warnings.warn_explicit(message, RetraceWarning, code.co_filename, code.co_firstlineno)
    else:
        warnings.warn(message, RetraceWarning, stacklevel=user_stacklevel())
