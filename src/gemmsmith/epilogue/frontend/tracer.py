"""From a Python function to a graph: it runs once, on values that record what is done to them (values.py). Functions of
math are replaced by ones that take these (copies.py)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gemmsmith.core.dtypes import BOOL, DType
from gemmsmith.core.errors import meant
from gemmsmith.core.graph import Extent, Graph, Operand, Result
from gemmsmith.epilogue.frontend.copies import Copies, is_module
from gemmsmith.epilogue.frontend.values import Traced, Tracing, call
from gemmsmith.epilogue.lines import line, refused, user_line
from gemmsmith.epilogue.passes.rewrite import pruned


def trace(
    function: Callable[..., Any], product: tuple[int, ...], operands: Mapping[str, tuple[Extent, DType | None]]
) -> Graph:
    """The graph of an epilogue function for a product of shape (M, N) or (B, M, N).

    Its first parameter is the accumulator, every other one the operand of that name; a default stands for an operand
    that is not given, and **kwargs takes those that no parameter names. It returns a value, a tuple or list of them
    (out, out1, out2 ...), or a dict. A last cast is the result's dtype. Any callable is as good: a bound method, a
    functools.partial, an object with __call__, a torch.nn.Module without parameters, whose forward it is.
    Raises EpilogueError, which quotes the function's line, for what cannot be fused.
    """
    return trace_sized(function, product, operands)[0]


def trace_sized(
    function: Callable[..., Any], product: tuple[int, ...], operands: Mapping[str, tuple[Extent, DType | None]]
) -> tuple[Graph, bool]:
    """The graph, and whether the function asked for a shape, so that products with other numbers of rows may have
    another one."""
    function = _called(function)
    where = _definition(function)
    parameters = _parameters(function, operands, where)
    t = Tracing(product)
    accumulator = t.add("accumulator", Extent(True, 1, 1), where=where)
    values: dict[str, Traced] = {}
    for name in parameters:
        if name not in operands:
            continue
        extent, dtype = operands[name]
        values[name] = t.add("operand", extent, value=name, where=where)
        values[name].condition, values[name].is_number = dtype == BOOL, dtype is None
    positional = [values.get(p.name, p.default) for p in parameters.values() if p.kind == p.POSITIONAL_ONLY]
    keywords = {name: x for name, x in values.items() if parameters[name].kind != inspect.Parameter.POSITIONAL_ONLY}
    try:
        returned = Copies(_traced_math).of(function)(accumulator, *positional, **keywords)
    except TypeError as error:
        raise refused(f"{error}; use traced values and numbers", user_line(error.__traceback__)) from error
    except RecursionError:
        message = "its functions are nested deeper than sys.getrecursionlimit(); raise that, or nest them less"
        raise refused(message, where) from None
    results = _results(returned, t, where)
    made = tuple(Result(name, x.node, x.stored, x.keepdim) for name, x in results.items())
    graph = pruned(Graph(tuple(t.nodes), tuple(Operand(name, *operands[name]) for name in values), made))
    read = {operand.name for operand in graph.operands}
    for name in values:
        if name not in read:
            raise refused(f"{name}: no result needs this operand; use it, or do not pass it", where)
        if name in results:
            raise refused(f"{name}: a result has an operand's name; give it another", where)
    return graph, t.sized


def _traced_math(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for a function of math, which accepts traced values."""

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Traced) for x in args):
            return call(f"math.{function.__name__}", function.__name__, args, kwargs)
        return function(*args, **kwargs)

    return either


def _called(function: Any) -> Any:
    """What is called of a module: its forward, whose parameters are named."""
    if isinstance(function, functools.partial):
        return functools.partial(_called(function.func), *function.args, **function.keywords)
    if not is_module(function):
        return function
    kind = type(function).__name__
    held = [name for name, _ in (*function.named_parameters(), *function.named_buffers())]
    if held:
        message = f"{kind} has parameters or buffers ({', '.join(held)}); write a function that takes them as operands"
        raise refused(message, _definition(function.forward))
    if function._forward_hooks or function._forward_pre_hooks:  # those of modules inside it run
        raise refused(f"{kind} has hooks; write a function that computes what they do", _definition(function.forward))
    return function.forward


def _definition(function: Any) -> str:
    """The line where the function is defined."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return line(code.co_filename, code.co_firstlineno) if code else getattr(function, "__name__", repr(function))


def _parameters(function: Callable[..., Any], operands: Mapping[str, Any], where: str) -> dict[str, inspect.Parameter]:
    """Parameters by name, without the accumulator; those of **kwargs are the operands that nothing else names."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin that does not tell
        found = [inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY)]
    if not found or found[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        got = found[0] if found else "no parameters"
        raise refused(f"got {got}; the first parameter is the product: use def epilogue(acc, ...)", where)
    first, *others = found
    named: dict[str, inspect.Parameter] = {}
    for p in others:
        if p.kind == p.VAR_POSITIONAL:
            raise refused(f"{p}: operands are found by name; name each of them", where)
        if p.kind == p.VAR_KEYWORD:
            taken = {first.name, *(q.name for q in others)}
            extra = [name for name in operands if name not in taken]
            named.update({name: inspect.Parameter(name, p.KEYWORD_ONLY) for name in extra})
        elif p.name not in operands and p.default is p.empty:
            given = ", ".join(operands) or "none"
            raise refused(f"{p.name}: no operand has this name; pass {p.name}=..., the operands are {given}", where)
        else:
            named[p.name] = p
    for name in operands:
        if name not in named:
            expected = ", ".join(named) or "none"
            message = f"{name}: the function takes no operand of this name; those it takes are {expected}"
            raise refused(message + meant(name), where)
    return named


def _results(returned: Any, t: Tracing, where: str) -> dict[str, Traced]:
    """The values that the function returned, by the names of the results."""
    if isinstance(returned, Mapping):
        results = dict(returned)
    else:
        several = returned if isinstance(returned, (tuple, list)) else (returned,)
        results = {f"out{i or ''}": x for i, x in enumerate(several)}
    for name, x in results.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise refused(f"a result is named {name!r}; use a string that could be a variable's name", where)
        if not isinstance(x, Traced) or x.tracing is not t:
            raise refused(f"{name}: the function returns {x!r}; return values computed from its parameters", where)
    if not results:
        raise refused("the function returns nothing; return values computed from its parameters", where)
    return results
