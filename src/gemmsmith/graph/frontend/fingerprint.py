"""Fingerprints of epilogues: everything that a function's graph depends on besides its arguments.

A function whose fingerprint is unchanged need not be traced again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import RetraceWarning
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.frontend.math_patching import is_module
from gemmsmith.graph.frontend.op_table import EPILOGUE_FUNCTIONS
from gemmsmith.graph.frontend.purity import find_reads, is_listed_as_constant
from gemmsmith.graph.source_location import format_location, user_stacklevel

_LIBRARIES = ("torch", "numpy", "math", "functools", "operator")
_SCALAR_TYPES = (bool, int, float, str, bytes, type(None))
_NUMPY_SCALAR_TYPES = frozenset(x for x in np.sctypeDict.values() if issubclass(x, (np.number, np.bool_)))
SeenIds = dict[int, str]
"""Functions, lists and dictionaries that a fingerprint has already visited: id -> number."""


class _CannotFingerprintError(Exception):
    """Raised, with the reason, if `function` reads something that may change without changing its fingerprint."""

    function: Any = None


def fingerprint(source: Any) -> Hashable:
    """Return a key that is equal for two epilogues only if they have the same graph, or None if there is none.

    A function's fingerprint is its code and the values of its defaults, closure variables and globals, with functions
    and containers among them treated alike; a partial's is its function's and its arguments; that of a torch.nn module
    is its class and attributes. A fingerprint exists only if all of these are known to depend on nothing else
    (purity.py); otherwise a RetraceWarning gives the reason, once. A fingerprint keeps its objects alive, so that no id
    is reused.
    """
    if source is None:
        return "none"
    if isinstance(source, EpilogueGraph):
        return source
    try:
        _check_no_torch_function_mode()
        if type(source) is FunctionType and (known := _STATELESS.get(id(source.__code__))) and _is_stateless(source):
            return known
        return _fingerprint_value(source, {})
    except (_CannotFingerprintError, RecursionError) as error:
        if callable(source) and not isinstance(source, type) and not callable(getattr(source, "graph", None)):
            _warn(getattr(error, "function", None) or source, str(error))
        return None


def register_constant(epilogue: Any) -> Any:
    """Return an epilogue that never changes, after making its identity its fingerprint."""
    _fingerprint_by_identity(epilogue)
    return epilogue


def is_registered_constant(x: Any) -> bool:
    """Return whether an object's identity is its fingerprint."""
    return id(x) in _STABLE_OBJECTS or is_epilogue_function(x)


def is_epilogue_function(x: Any) -> bool:
    """Return whether x is an `epilogue_function` (values.py), which never changes."""
    return type(x) is FunctionType and EPILOGUE_FUNCTIONS.get(x.__name__) is x


def _check_no_torch_function_mode() -> None:
    """Raise an error if a torch function mode is active, except that of torch.device, which changes nothing."""
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "overrides") and torch._C._len_torch_function_stack():
        device_context = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", None)
        for mode in torch.overrides._get_current_function_mode_stack():
            if type(mode) is not device_context:
                raise _CannotFingerprintError(f"{type(mode).__name__} is active")


def _fingerprint_value(x: Any, seen: SeenIds) -> Hashable:
    if known := _STABLE_OBJECTS.get(id(x)):
        return known
    kind = type(x)
    if kind in _SCALAR_TYPES:
        return kind, repr(x)  # 0.0 and -0.0, NaN
    if kind is FunctionType:
        return _fingerprint_function(x, seen)
    if kind is tuple:
        return tuple([_fingerprint_value(y, seen) for y in x])
    if kind is list or kind is dict:
        return kind, _back_reference(x, seen) or tuple(
            [_fingerprint_value(y, seen) for y in (x if kind is list else list(x.items()))]
        )
    if kind in _NUMPY_SCALAR_TYPES:
        return kind, x.tobytes()
    if kind is DType:
        return x  # type: ignore[no-any-return]
    if kind is partial and not vars(x):
        return (
            partial,
            _fingerprint_value(x.func, seen),
            _fingerprint_value(x.args, seen),
            _fingerprint_items(x.keywords, seen),
        )
    if is_module(x):
        return _fingerprint_module(x, seen)
    if is_listed_as_constant(x):
        return _fingerprint_by_identity(x)
    raise _CannotFingerprintError(f"it reads {_describe(x)}, which may change")


def _fingerprint_module(x: Any, seen: SeenIds) -> Hashable:
    """Return the fingerprint of a torch.nn module: its class and its attributes."""
    nn = sys.modules["torch"].nn
    if getattr(nn, type(x).__name__, None) is not type(x):
        raise _CannotFingerprintError(f"{type(x).__name__} is not a module of torch.nn")
    if nn.modules.module._has_any_global_hook():
        raise _CannotFingerprintError("global module hooks are registered")
    # hooks, parameters and buffers are dictionaries, which are left out if empty
    attributes = {name: y for name, y in vars(x).items() if not (isinstance(y, (dict, set)) and not y)}
    return (
        _fingerprint_by_identity(type(x)),
        _fingerprint_items(attributes.pop("_modules", {}), seen),
        _fingerprint_items(attributes, seen),
    )


def _back_reference(x: Any, seen: SeenIds) -> Hashable:
    """Return a reference to a function or container that was visited before, or None and mark it as visited."""
    if id(x) in seen:
        return seen[id(x)]
    seen[id(x)] = f"number {len(seen)}"
    return None


def _fingerprint_function(f: Any, seen: SeenIds) -> Hashable:
    """Return the fingerprint of a function; an error that it raises names the innermost function."""
    if reference := _back_reference(f, seen):
        return reference
    if is_epilogue_function(f):
        return _fingerprint_by_identity(f)
    if f.__globals__.get("__name__", "").partition(".")[0] in _LIBRARIES and is_listed_as_constant(f):
        return _fingerprint_by_identity(f)
    try:
        return _fingerprint_function_parts(f, seen)
    except _CannotFingerprintError as error:
        error.function = error.function or f
        raise


def _fingerprint_function_parts(f: Any, seen: SeenIds) -> Hashable:
    parts: list[Hashable] = [_fingerprint_by_identity(f.__code__), None, None, None]
    if f.__defaults__:
        parts[1] = _fingerprint_value(f.__defaults__, seen)
    if f.__kwdefaults__:
        parts[2] = _fingerprint_items(f.__kwdefaults__, seen)
    if f.__dict__:  # such as __wrapped__, which determines the signature
        parts[3] = _fingerprint_items(f.__dict__, seen)
    for cell in f.__closure__ or ():
        try:
            contents = cell.cell_contents
        except ValueError:
            raise _CannotFingerprintError("a variable of its closure has no value yet") from None
        parts.append(_fingerprint_value(contents, seen))
    if is_package_function(f):
        return tuple(parts)  # the package's own functions read nothing else
    names, unknown_read = find_reads(f.__code__)
    if unknown_read:
        raise _CannotFingerprintError(unknown_read)
    if not names and _is_stateless(f):
        _STATELESS[id(f.__code__)] = tuple(parts)
    values_by_name = f.__globals__
    for name in names:
        if name in values_by_name:
            parts.append(_fingerprint_value(values_by_name[name], seen))
        elif name in f.__builtins__:
            parts.append(_fingerprint_value(f.__builtins__[name], seen))
        else:
            raise _CannotFingerprintError(f"{name} is not defined")
    return tuple(parts)


def _is_stateless(f: FunctionType) -> bool:
    """Return whether a function is nothing but its code, except for globals."""
    return not (f.__closure__ or f.__defaults__ or f.__kwdefaults__ or f.__dict__)


_STATELESS: dict[int, Hashable] = BoundedCache(4096)
"""Fingerprints of functions that are nothing but code without globals, by its id, which is not reused meanwhile."""


def is_package_function(f: FunctionType) -> bool:
    """Return whether a function is defined in this package."""
    name = f.__globals__.get("__name__", "")
    return name.startswith("gemmsmith.") and getattr(sys.modules.get(name), "__dict__", None) is f.__globals__


def _fingerprint_items(values_by_name: Mapping[str, Any], seen: SeenIds) -> Hashable:
    return tuple([(name, _fingerprint_value(x, seen)) for name, x in values_by_name.items()])


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
    if isinstance(x, ModuleType):
        return f"the module {x.__name__}"
    name = getattr(x, "__qualname__", "")
    return name if isinstance(name, str) and name else f"an object of type {type(x).__name__}"


_WARNED: dict[Hashable, None] = BoundedCache(4096)
"""(code, reason) of the warnings given so far."""


def _warn(function: Any, reason: str) -> None:
    """Warn once per function why it is traced at every call."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    key = code or type(function), reason
    if key in _WARNED:
        return
    _WARNED[key] = None
    location = f" ({format_location(code.co_filename, code.co_firstlineno)})" if code else ""
    name = getattr(function, "__name__", type(function).__name__)
    warnings.warn(
        f"epilogue: {name}{location} is traced again at each call, since {reason}; let it capture only numbers, "
        "containers and functions, or pass what changes as an operand",
        RetraceWarning,
        stacklevel=user_stacklevel(),
    )
