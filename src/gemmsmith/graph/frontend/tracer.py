"""Tracing of a Python epilogue function into a graph.

The function runs once, on traced values that record its operations (values.py). Functions of the math module are
replaced by versions that accept traced values.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from gemmsmith.core.dtypes import BOOL, DType
from gemmsmith.core.errors import did_you_mean
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Operand, Result
from gemmsmith.graph.frontend.purity import find_reads, is_module
from gemmsmith.graph.frontend.values import Traced, Tracer, call
from gemmsmith.graph.passes.rewrite import eliminate_dead_code
from gemmsmith.graph.source_location import epilogue_error, format_location, user_source_line

_UNPATCHED_MODULES = {"torch", "numpy", "gemmsmith", *sys.stdlib_module_names}
GROUP = "group"
"""The name of an epilogue's parameter that is the index of the group."""


def trace(
    function: Callable[..., Any], acc_shape: tuple[int, ...], operands: Mapping[str, tuple[BroadcastDims, DType | None]]
) -> EpilogueGraph:
    """Trace an epilogue function and return its graph.

    The function's first parameter is the accumulator, and the others are operands of those names. A default is used for
    an operand that is not given, and **kwargs takes operands that no parameter names. It returns a value, a tuple or
    list of values (out, out1, out2 ...), or a dict; a final cast is the result's dtype. Bound methods,
    functools.partial, objects with __call__, and the forward of a torch.nn.Module without parameters work, too.

    `acc_shape`: (M, N) or (B, M, N). `operands`: (broadcast dims, dtype) by name; the dtype of a Python number is None.
    Raises EpilogueError, with the function's line, for what cannot be fused.
    """
    return trace_with_shape_dependence(function, acc_shape, operands)[0]


def trace_with_shape_dependence(
    function: Callable[..., Any],
    acc_shape: tuple[int, ...],
    operands: Mapping[str, tuple[BroadcastDims, DType | None]],
    has_groups: bool = False,
) -> tuple[EpilogueGraph, bool]:
    """Trace an epilogue function as `trace` does; return the graph and whether it depends on the shape.

    A function that reads a shape may have another graph for another M. `has_groups`: the GEMM is grouped; a parameter
    "group" that is no operand and has no default is then the index of the group.
    """
    function = _resolve_callable(function)
    location = _definition_location(function)
    parameters = _parameters(function, operands, location, {GROUP} if has_groups else set())
    tracer = Tracer(acc_shape)
    accumulator = tracer.add("accumulator", location=location)
    values = {name: _traced_operand(tracer, name, *operands[name], location) for name in parameters if name in operands}
    if has_groups and GROUP in parameters.keys() - values and parameters[GROUP].default is inspect.Parameter.empty:
        values[GROUP] = tracer.add("group_index", location=location)
    positional = [values.get(p.name, p.default) for p in parameters.values() if p.kind == p.POSITIONAL_ONLY]
    keywords = {name: x for name, x in values.items() if parameters[name].kind != inspect.Parameter.POSITIONAL_ONLY}
    try:
        returned = _PatchedFunctions().patched(function)(accumulator, *positional, **keywords)
    except TypeError as error:
        raise epilogue_error(
            f"{error}; use traced values and numbers", user_source_line(error.__traceback__)
        ) from error
    except RecursionError:
        message = "its functions are nested deeper than sys.getrecursionlimit(); raise that, or nest them less"
        raise epilogue_error(message, location) from None
    results = _named_results(returned, tracer, location)
    graph_operands = tuple(Operand(name, *operands[name]) for name in values if name in operands)
    graph_results = tuple(Result(name, x.node, x.pending_cast, x.keepdim) for name, x in results.items())
    graph = eliminate_dead_code(EpilogueGraph(tuple(tracer.nodes), graph_operands, graph_results))
    read = {operand.name for operand in graph.operands}
    for name in (operand.name for operand in graph_operands):
        if name not in read:
            raise epilogue_error(f"{name}: no result needs this operand; use it, or do not pass it", location)
        if name in results:
            raise epilogue_error(f"{name}: is the name of an operand and of a result; rename one", location)
    return graph, tracer.shape_dependent


def _traced_operand(tracer: Tracer, name: str, dims: BroadcastDims, dtype: DType | None, location: str) -> Traced:
    """Add the node of the operand `name` and return its value. `dtype`: None for a Python number."""
    value = tracer.add("operand", attribute=name, location=location, dims=dims)
    value.is_bool, value.is_number = dtype == BOOL, dtype is None
    return value


class _PatchedFunctions:
    """Makes clones of functions in which the functions of the math module accept traced values.

    math.exp(x) itself would call float(x), which fails for a traced value. Functions in a clone's globals and closure
    are cloned, too, each once. The originals and their modules are not changed.
    """

    def __init__(self) -> None:
        self._functions: dict[int, FunctionType] = {}
        self._globals: dict[int, dict[str, Any]] = {}

    def patched(self, function: Any) -> Any:
        """Return a patched clone of a function, a method, a partial, or an object with `__call__`."""
        if isinstance(function, FunctionType):
            return self._function(function)
        clone = self._helper(function)
        if clone is function and isinstance(call := type(function).__call__, FunctionType):
            return MethodType(self._helper(call), function)
        return clone

    def _helper(self, x: Any) -> Any:
        """Return what a clone reads in place of the object x that the original reads.

        It is a clone of a Python function, a traced version of math or of a function of it, and otherwise x. Functions
        of torch, numpy, gemmsmith and the standard library are not cloned.
        """
        if x is math:
            return self._math
        if isinstance(x, BuiltinFunctionType):
            return _traced_version_of(x) if x.__module__ == "math" else x
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
        """Return the clone of a Python function, with globals of its own, of which those that it reads are patched."""
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


def _traced_version_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a function of the math module that also accepts traced values."""

    @functools.wraps(function)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Traced) for x in args):
            return call(f"math.{function.__name__}", function.__name__, args, kwargs)
        return function(*args, **kwargs)

    return dispatch


def _resolve_callable(function: Any) -> Any:
    """Return the function to trace: of a torch.nn.Module its forward, as __call__ does not have its parameters' names.

    Raises EpilogueError for a module with parameters, buffers or hooks.
    """
    if isinstance(function, functools.partial):
        return functools.partial(_resolve_callable(function.func), *function.args, **function.keywords)
    if not is_module(function):
        return function
    kind = type(function).__name__
    state_names = [name for name, _ in (*function.named_parameters(), *function.named_buffers())]
    if state_names:
        message = (
            f"{kind} has parameters or buffers ({', '.join(state_names)}); write a function that takes them as operands"
        )
        raise epilogue_error(message, _definition_location(function.forward))
    hooks = function._forward_hooks, function._forward_pre_hooks, function._backward_hooks, function._backward_pre_hooks
    if any(hooks):  # forward hooks of its submodules do run
        raise epilogue_error(
            f"{kind} has hooks; write a function that computes what they do", _definition_location(function.forward)
        )
    return function.forward


def _definition_location(function: Any) -> str:
    """Return the source location where a function is defined, "file.py:12: def f(x):"; without code, its name."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code:
        return format_location(code.co_filename, code.co_firstlineno)
    return getattr(function, "__name__", repr(function))


def _parameters(
    function: Callable[..., Any], operands: Mapping[str, Any], location: str, others_given: Collection[str]
) -> dict[str, inspect.Parameter]:
    """Return the parameters by name, without the first, the accumulator. **kwargs becomes one for each further operand.

    `others_given`: names of parameters that get a value although they are no operands. Raises EpilogueError, at
    `location`, if parameters and operands do not match.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        parameters = [inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY)]
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        received = parameters[0] if parameters else "no parameters"
        raise epilogue_error(
            f"got {received}; the first parameter is the accumulator: use def epilogue(acc, ...)", location
        )
    first, *others = parameters
    named: dict[str, inspect.Parameter] = {}
    for p in others:
        if p.kind == p.VAR_POSITIONAL:
            raise epilogue_error(f"{p}: operands are passed by name; name each of them", location)
        if p.kind == p.VAR_KEYWORD:
            named_explicitly = {first.name, *(q.name for q in others)}
            extra = [name for name in operands if name not in named_explicitly]
            named.update({name: inspect.Parameter(name, p.KEYWORD_ONLY) for name in extra})
        elif p.name not in operands and p.name not in others_given and p.default is p.empty:
            operand_names = ", ".join(operands) or "none"
            raise epilogue_error(
                f"{p.name}: no operand has this name; pass {p.name}=..., the operands are {operand_names}", location
            )
        else:
            named[p.name] = p
    for name in operands:
        if name not in named:
            expected = ", ".join(named) or "none"
            message = f"{name}: the function takes no operand of this name; those it takes are {expected}"
            raise epilogue_error(message + did_you_mean(name), location)
    return named


def _named_results(returned: Any, tracer: Tracer, location: str) -> dict[str, Traced]:
    """Return the values that the function returned by result name: the keys of a dict, or else out, out1, out2 ...

    Raises EpilogueError for a wrong name, and for what is no value of this trace.
    """
    if isinstance(returned, Mapping):
        results = dict(returned)
    else:
        several = returned if isinstance(returned, (tuple, list)) else (returned,)
        results = {f"out{i or ''}": x for i, x in enumerate(several)}
    for name, x in results.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise epilogue_error(f"a result is named {name!r}; use a string that could be a variable's name", location)
        if not isinstance(x, Traced) or x.tracer is not tracer:
            raise epilogue_error(
                f"{name}: the function returns {x!r}; return values computed from its parameters", location
            )
    if not results:
        raise epilogue_error("the function returns nothing; return values computed from its parameters", location)
    return results
