"""A copy of an epilogue with all that it reads, which nobody else can change: what is traced is what the fingerprint
says, whatever other threads do meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from functools import partial
from types import CellType, FunctionType
from typing import Any

from gemmsmith.epilogue.frontend.copies import is_module
from gemmsmith.epilogue.frontend.fingerprint import fingerprint, is_ours
from gemmsmith.epilogue.frontend.purity import reads

_OF_A_MODULE = ("__name__", "__loader__", "__spec__")
"""What the lines of a module's source are found by."""


def snapshot(source: Any) -> tuple[Any, Hashable]:
    """A copy of a source that has a fingerprint, and that of the copy; any other source itself, and None."""
    try:
        copied = _copied(source, {})
    except RecursionError:  # too deep for a fingerprint, too
        return source, None
    found = fingerprint(copied)
    return (source, None) if found is None else (copied, found)


def _copied(x: Any, made: dict[int, Any]) -> Any:
    """`made`: the copies by the originals' ids."""
    kind = type(x)
    if kind is tuple:
        return tuple([_copied(y, made) for y in x])
    if id(x) in made:
        return made[id(x)]
    if kind is list:
        made[id(x)] = items = []
        items += [_copied(y, made) for y in x]
        return items
    if kind is dict:
        copied: dict[Any, Any] = {}
        made[id(x)] = copied
        copied |= [(_copied(key, made), _copied(y, made)) for key, y in list(x.items())]
        return copied
    if kind is partial and not vars(x):
        keywords = {name: _copied(y, made) for name, y in list(x.keywords.items())}
        return partial(_copied(x.func, made), *_copied(x.args, made), **keywords)
    if kind is FunctionType:
        return _function(x, made)
    return _module(x, made) if is_module(x) else x


def _function(f: Any, made: dict[int, Any]) -> Any:
    names, other = reads(f.__code__)
    ours, named = is_ours(f), f.__globals__
    if other and not ours:  # it has no fingerprint
        return f
    module = named if ours else {name: named[name] for name in _OF_A_MODULE if name in named}
    if not ours:  # set before the function is made, which takes them from there
        builtins = f.__builtins__
        module["__builtins__"] = {name: builtins[name] for name in names if name in builtins}
    cells = tuple([CellType() for _ in f.__closure__ or ()])
    made[id(f)] = copied = FunctionType(f.__code__, module, f.__name__, _copied(f.__defaults__, made), cells)
    copied.__kwdefaults__ = _copied(f.__kwdefaults__, made)
    copied.__dict__.update(_copied(f.__dict__, made))
    copied.__module__, copied.__qualname__ = f.__module__, f.__qualname__
    for cell, original in zip(cells, f.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _copied(original.cell_contents, made)
        except ValueError:  # it has no value yet
            pass
    if not ours:
        module |= {name: _copied(named[name], made) for name in names if name in named}
        own = module["__builtins__"]
        own |= {name: _copied(x, made) for name, x in own.items()}
    return copied


def _module(x: Any, made: dict[int, Any]) -> Any:
    """A module of torch.nn: its containers are its own, too."""
    made[id(x)] = copied = copy.copy(x)
    for name, y in list(vars(x).items()):
        contents = {key: _copied(z, made) for key, z in list(y.items())} if isinstance(y, dict) else _copied(y, made)
        vars(copied)[name] = contents
    return copied
