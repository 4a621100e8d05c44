"""Private copies of epilogues and of everything that they read.

Other threads cannot change a copy, so its graph always matches its fingerprint.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from functools import partial
from types import CellType, FunctionType
from typing import Any

from gemmsmith.graph.frontend.fingerprint import fingerprint, is_package_function, is_registered_constant
from gemmsmith.graph.frontend.math_patching import is_module
from gemmsmith.graph.frontend.purity import find_reads

_MODULE_ATTRIBUTES = ("__name__", "__loader__", "__spec__")
"""Module attributes by which linecache finds a module's source lines."""


def snapshot(source: Any) -> tuple[Any, Hashable]:
    """Return a copy of an epilogue and the copy's fingerprint; without a fingerprint, the epilogue itself and None."""
    try:
        copied = _copy(source, {})
    except RecursionError:  # too deep for a fingerprint, too
        return source, None
    copy_fingerprint = fingerprint(copied)
    return (source, None) if copy_fingerprint is None else (copied, copy_fingerprint)


def _copy(x: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of x; `copies` maps ids of originals to copies."""
    kind = type(x)
    if kind is tuple:
        return tuple([_copy(y, copies) for y in x])
    if is_registered_constant(x):
        return x
    if id(x) in copies:
        return copies[id(x)]
    if kind is list:
        copies[id(x)] = items = []
        items += [_copy(y, copies) for y in x]
        return items
    if kind is dict:
        copied: dict[Any, Any] = {}
        copies[id(x)] = copied
        copied |= [(_copy(key, copies), _copy(y, copies)) for key, y in list(x.items())]
        return copied
    if kind is partial and not vars(x):
        keywords = {name: _copy(y, copies) for name, y in list(x.keywords.items())}
        return partial(_copy(x.func, copies), *_copy(x.args, copies), **keywords)
    if kind is FunctionType:
        return _function(x, copies)
    return _module(x, copies) if is_module(x) else x


def _function(f: Any, copies: dict[int, Any]) -> Any:
    names, unknown_read = find_reads(f.__code__)
    is_ours, function_globals = is_package_function(f), f.__globals__
    if unknown_read and not is_ours:  # it has no fingerprint
        return f
    module = function_globals
    if not is_ours:  # with the builtins, since the function takes them from there when it is made
        module = {name: function_globals[name] for name in _MODULE_ATTRIBUTES if name in function_globals}
        module["__builtins__"] = dict(f.__builtins__)  # all of them: C functions import by the caller's __import__
    cells = tuple([CellType() for _ in f.__closure__ or ()])
    copies[id(f)] = copied = FunctionType(f.__code__, module, f.__name__, _copy(f.__defaults__, copies), cells)
    copied.__kwdefaults__ = _copy(f.__kwdefaults__, copies)
    copied.__dict__.update(_copy(f.__dict__, copies))
    copied.__module__, copied.__qualname__ = f.__module__, f.__qualname__
    for cell, original in zip(cells, f.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _copy(original.cell_contents, copies)
        except ValueError:  # it has no value yet
            pass
    if not is_ours:
        module |= {name: _copy(function_globals[name], copies) for name in names if name in function_globals}
        builtins = module["__builtins__"]
        builtins |= {name: _copy(builtins[name], copies) for name in names if name in builtins}
    return copied


def _module(x: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of a torch.nn module, with copies of its containers."""
    copies[id(x)] = copied = copy.copy(x)
    for name, y in list(vars(x).items()):
        contents = {key: _copy(z, copies) for key, z in list(y.items())} if isinstance(y, dict) else _copy(y, copies)
        vars(copied)[name] = contents
    return copied
