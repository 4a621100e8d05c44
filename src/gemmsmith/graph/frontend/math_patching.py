"""Clones of user functions in which `math.*` is replaced by traced versions: math.exp(x) would call float(x)."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from gemmsmith.core.cached_property import cached_property
from gemmsmith.graph.frontend.purity import find_reads

_UNPATCHED_MODULES = {"torch", "numpy", "gemmsmith", *sys.stdlib_module_names}


def is_module(x: Any) -> bool:
    """Return whether x is a torch.nn.Module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.nn.Module)


class PatchedFunctions:
    """Clones of functions, and of the helpers in their globals and closures, each made once.

    `traced_version` returns the replacement of a function of math. The originals and their modules are not changed.
    """

    def __init__(self, traced_version: Callable[[BuiltinFunctionType], Any]) -> None:
        self._traced_version = traced_version
        self._functions: dict[int, FunctionType] = {}
        self._globals: dict[int, dict[str, Any]] = {}

    def patched(self, function: Any) -> Any:
        """Return a patched clone of any callable."""
        if isinstance(function, FunctionType):
            return self._function(function)
        clone = self._helper(function)
        if clone is function and isinstance(call := type(function).__call__, FunctionType):
            return MethodType(self._helper(call), function)
        return clone

    def _helper(self, x: Any) -> Any:
        if x is math:
            return self._math
        if isinstance(x, BuiltinFunctionType):
            return self._traced_version(x) if x.__module__ == "math" else x
        if isinstance(x, FunctionType):
            return x if x.__globals__.get("__name__", "").partition(".")[0] in _UNPATCHED_MODULES else self._function(x)
        if isinstance(x, MethodType):
            return MethodType(self._helper(x.__func__), x.__self__)
        if isinstance(x, functools.partial):
            return functools.partial(self._helper(x.func), *x.args, **x.keywords)
        return x

    @cached_property
    def _math(self) -> SimpleNamespace:
        public = {name: x for name, x in vars(math).items() if not name.startswith("_")}
        return SimpleNamespace(**{name: self._helper(x) for name, x in public.items()})

    def _function(self, f: FunctionType) -> FunctionType:
        if id(f) in self._functions:
            return self._functions[id(f)]
        module = self._globals.setdefault(id(f.__globals__), dict(f.__globals__))
        cells = tuple(CellType() for _ in f.__closure__ or ())
        clone = FunctionType(f.__code__, module, f.__name__, f.__defaults__, cells)
        clone.__kwdefaults__ = f.__kwdefaults__
        clone.__dict__.update(f.__dict__)
        self._functions[id(f)] = clone  # before its helpers, which may call it
        for name in find_reads(f.__code__).names:
            if name in f.__globals__:
                module[name] = self._helper(f.__globals__[name])
        for cell, original in zip(cells, f.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self._helper(original.cell_contents)
            except ValueError:  # not assigned yet
                pass
        return clone
