"""The result follows whatever an epilogue reads, wherever that lies: what is remembered of it is never stale."""

from __future__ import annotations

import contextvars
import functools
import itertools
import math
import operator
import os
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmsmith
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.errors import RetraceWarning
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.frontend.fingerprint import fingerprint, restore
from gemmsmith.graph.frontend.tracer import trace

pytestmark = pytest.mark.filterwarnings("ignore::gemmsmith.RetraceWarning")

A, B = np.ones((2, 16), np.float16), np.ones((16, 2), np.float16)  # the product is 16 everywhere
DRAWS = int(os.environ.get("GEMMSMITH_STALENESS_DRAWS", "100"))
SETTINGS = types.ModuleType("gemmsmith_test_settings")
SETTINGS.VALUE = 1.0  # type: ignore[attr-defined]
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=1.0)

Epilogue = Callable[..., Any]
Place = tuple[Epilogue, Callable[[float], None]]
"""An epilogue that reads a number somewhere, and what puts another number there."""


@pytest.fixture(autouse=True)
def settings_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)


def result(epilogue: Epilogue) -> float:
    return float(gemmsmith.gemm(A, B, epilogue=epilogue, out_dtype="fp32")[0, 0])


def module_of(name: str, source: str) -> types.ModuleType:
    """A module with a source of its own."""
    module = types.ModuleType(name)
    exec(source, vars(module))
    return module


def importable(source: str) -> types.ModuleType:
    """The same with a name that nothing else has, which can be imported: compilers look functions' modules up."""
    name = f"gemmsmith_test_{next(NUMBERED)}"
    sys.modules[name] = module_of(name, source)
    return sys.modules[name]


NUMBERED = itertools.count()


# -- the places ------------------------------------------------------------------------------------------------------
def closure(v: float) -> Place:
    def change(x: float) -> None:
        nonlocal v
        v = x

    return lambda acc: acc * v, change


def closed_container(v: float) -> Place:
    box: dict[str, Any] = {"a": [v]}
    return lambda acc: acc * box["a"][0], lambda x: operator.setitem(box["a"], 0, x)


def default(v: float) -> Place:
    def f(acc: Any, k: float = v) -> Any:
        return acc * k

    return f, lambda x: setattr(f, "__defaults__", (x,))


def default_container(v: float) -> Place:
    box = {"a": v}

    def f(acc: Any, box: Any = box) -> Any:
        return acc * box["a"]

    return f, lambda x: operator.setitem(box, "a", x)


def keyword_default(v: float) -> Place:
    def f(acc: Any, *, k: float = v) -> Any:
        return acc * k

    return f, lambda x: setattr(f, "__kwdefaults__", {"k": x})


def code(v: float) -> Place:
    def f(acc: Any) -> Any:
        return acc * 1.0

    def change(x: float) -> None:
        f.__code__ = f.__code__.replace(co_consts=tuple(x if type(c) is float else c for c in f.__code__.co_consts))

    change(v)
    return f, change


def attribute_of_function(v: float) -> Place:
    def f(acc: Any) -> Any:
        return acc * f.k  # type: ignore[attr-defined]

    f.k = v  # type: ignore[attr-defined]
    return f, lambda x: setattr(f, "k", x)


def partial_of_container(v: float) -> Place:
    box = [v]
    return functools.partial(lambda acc, box: acc * box[0], box=box), lambda x: operator.setitem(box, 0, x)


def attribute(v: float) -> Place:
    held = types.SimpleNamespace(inner=types.SimpleNamespace(k=v))
    return lambda acc: acc * held.inner.k, lambda x: setattr(held.inner, "k", x)


class Own:
    def __init__(self, v: float) -> None:
        self.k = v

    def __call__(self, acc: Any) -> Any:
        return acc * self.k

    def method(self, acc: Any) -> Any:
        return acc * self.k


def callable_object(v: float) -> Place:
    own = Own(v)
    return own, lambda x: setattr(own, "k", x)


def bound_method(v: float) -> Place:
    own = Own(v)
    return own.method, lambda x: setattr(own, "k", x)


def class_attribute(v: float) -> Place:
    class Held:
        k = v

        def __call__(self, acc: Any) -> Any:
            return acc * self.k

    return Held(), lambda x: setattr(Held, "k", x)


def class_in_closure(v: float) -> Place:
    class Held:
        k = v

    return lambda acc: acc * Held.k, lambda x: setattr(Held, "k", x)


def descriptor(v: float) -> Place:
    box = [v]

    class Held:
        @property
        def k(self) -> float:
            return box[0]

        @classmethod
        def of(cls, acc: Any) -> Any:
            return acc * box[0]

    held = Held()
    return lambda acc: held.of(acc) * held.k, lambda x: operator.setitem(box, 0, x)


def number_subclass(v: float) -> Place:
    class Number(float):
        k = v

    number = Number(2.0)
    return lambda acc: acc * number.k, lambda x: setattr(Number, "k", x)


def other_module(v: float) -> Place:
    module = importable("def f(acc): return acc * K")
    module.K = v  # type: ignore[attr-defined]
    return module.f, lambda x: setattr(module, "K", x)


def module_attribute(v: float) -> Place:
    SETTINGS.VALUE = v  # type: ignore[attr-defined]
    return lambda acc: acc * SETTINGS.VALUE, lambda x: setattr(SETTINGS, "VALUE", x)  # type: ignore[attr-defined]


def imported(v: float) -> Place:
    def f(acc: Any) -> Any:
        import gemmsmith_test_settings

        return acc * gemmsmith_test_settings.VALUE

    SETTINGS.VALUE = v  # type: ignore[attr-defined]
    return f, lambda x: setattr(SETTINGS, "VALUE", x)


def imported_name(v: float) -> Place:
    def f(acc: Any) -> Any:
        from gemmsmith_test_settings import VALUE

        return acc * VALUE

    SETTINGS.VALUE = v  # type: ignore[attr-defined]
    return f, lambda x: setattr(SETTINGS, "VALUE", x)


def written(expression: str) -> Callable[[float], Place]:
    """A place that this expression reads; `K` is a global of its module."""

    def place(v: float) -> Place:
        module = importable(f"import importlib, sys, builtins\ndef f(acc): return {expression}")
        module.K = v  # type: ignore[attr-defined]
        SETTINGS.VALUE = v  # type: ignore[attr-defined]

        def change(x: float) -> None:
            module.K = x  # type: ignore[attr-defined]
            SETTINGS.VALUE = x  # type: ignore[attr-defined]

        return module.f, change

    return place


def context_variable(v: float) -> Place:
    VARIABLE.set(v)
    return lambda acc: acc * VARIABLE.get(), VARIABLE.set


def wrapping(v: float) -> Place:
    @functools.wraps(np.clip)
    def f(acc: Any) -> Any:
        return acc * v

    def change(x: float) -> None:
        nonlocal v
        v = x

    return f, change


def named_as_ours(v: float) -> Place:
    module = module_of("gemmsmith.graph.frontend.op_table", "def f(acc): return acc * K")
    module.K = v  # type: ignore[attr-defined]
    return module.f, lambda x: setattr(module, "K", x)


def own_builtins(v: float) -> Place:
    builtins = {"float": lambda x: x * v}
    f = types.FunctionType(
        compile("lambda acc: acc * float(1.0)", "<test>", "eval").co_consts[0], {"__builtins__": builtins}
    )

    def change(x: float) -> None:
        builtins["float"] = lambda y: y * x

    return f, change


def nested_assignment(v: float) -> Place:
    def f(acc: Any) -> Any:
        nonlocal v
        v += 0.0
        return acc * v

    def change(x: float) -> None:
        nonlocal v
        v = x

    return f, change


def random_number(v: float) -> Place:
    np.random.seed(int(v * 1000))
    return lambda acc: acc * np.random.rand(), lambda x: np.random.seed(int(x * 1000))


PLACES: dict[str, Callable[[float], Place]] = {
    f.__name__: f for f in (
        closure, closed_container, default, default_container, keyword_default, code, attribute_of_function,
        partial_of_container, attribute, callable_object, bound_method, class_attribute, class_in_closure, descriptor,
        number_subclass, other_module, module_attribute, imported, imported_name, context_variable, wrapping,
        named_as_ours, own_builtins, nested_assignment,
    )
} | {
    expression: written(f"acc * {expression}") for expression in (
        "K", "globals()['K']", "eval('K')", "[exec('x = K', globals()), x][1]", "getattr(builtins, 'eval')('K')",
        "__import__('gemmsmith_test_settings').VALUE", "importlib.import_module('gemmsmith_test_settings').VALUE",
        "vars(sys.modules['gemmsmith_test_settings'])['VALUE']", "f.__globals__['K']", "(lambda: K)()",
        "[K for _ in range(1)][0]", "sum(K for _ in range(1))",
    )
}  # fmt: skip
"""By name."""
WRAPPERS: dict[str, Callable[[Epilogue], Epilogue]] = {
    "compose": lambda f: lambda acc: f(acc + 1.0),
    "after": lambda f: lambda acc: f(acc) * 0.5,
    "twice": lambda f: lambda acc: f(f(acc)),
    "partial": lambda f: functools.partial(lambda g, acc: g(acc), f),
    "keyword partial": lambda f: functools.partial(lambda acc, g: g(acc), g=f),
    "default": lambda f: lambda acc, g=f: g(acc),
    "tuple": lambda f: lambda acc, fs=(f, f): fs[1](acc),
    "object": lambda f: types.MethodType(lambda self, acc: f(acc), object()),
    "dictionary": lambda f: lambda acc, d={"f": f}: d["f"](acc),
    "reduce": lambda f: lambda acc: functools.reduce(lambda x, g: g(x), (f, f), acc),
}
NUMBERS = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, 3.0, -1.0, math.inf, 1e-3])


# -- the tests -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PLACES)
def test_gemm_follows(name: str) -> None:
    epilogue, change = PLACES[name](1.0)
    for x in (1.0, 2.0, 0.5, 2.0):
        change(x)
        assert result(epilogue) == 16 * (x * x if name == "descriptor" else x)


def test_what_the_library_says_at_the_moment() -> None:
    epilogue, seed = random_number(1.0)
    found = []
    for x in (1.0, 2.0, 1.0):
        seed(x)
        found.append(result(epilogue))
    assert found[0] == found[2] != found[1]


@given(
    st.sampled_from(sorted(PLACES)), st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=4), NUMBERS, NUMBERS,
    st.booleans(),
)  # fmt: skip
@settings(max_examples=DRAWS)
def test_nests_follow(name: str, wrappers: list[str], before: float, after: float, beside: bool) -> None:
    """Whatever is wrapped around it: what is bound is the graph that a new trace gives."""

    def bound(f: Epilogue) -> EpilogueGraph:
        return bind(Request(A, B, epilogue=f)).source_graph

    def traced(f: Epilogue) -> EpilogueGraph:
        return trace(f, (2, 2), {})

    epilogue, change = PLACES[name](before)
    inner = epilogue
    for wrapper in wrappers:
        epilogue = WRAPPERS[wrapper](epilogue)
        if beside:  # the same function twice
            epilogue = functools.partial(lambda f, g, acc: f(acc) + g(acc), epilogue, inner)
    assert bound(epilogue) == traced(epilogue)
    change(after)
    assert bound(epilogue) == traced(epilogue)
    change(before)
    assert bound(epilogue) == traced(epilogue)


@given(st.lists(st.tuples(st.sampled_from(["scale", "add", "compose"]), NUMBERS), min_size=1, max_size=6), st.data())
@settings(max_examples=DRAWS)
def test_closures_of_one_factory(steps: list[tuple[str, float]], data: st.DataObject) -> None:
    """Nested in one another, and one number changed in another nest like it: both have their own graph."""

    def made(numbers: list[float]) -> Epilogue:
        f: Epilogue = scale(1.0)
        for (kind, _), x in zip(steps, numbers, strict=True):
            f = {"scale": scale, "add": add}[kind](x, f) if kind != "compose" else compose(f, scale(x))
        return f

    numbers = [x for _, x in steps]
    i = data.draw(st.integers(0, len(steps) - 1))
    other = [*numbers[:i], data.draw(NUMBERS), *numbers[i + 1 :]]
    for each in (numbers, other):
        assert bind(Request(A, B, epilogue=made(each))).source_graph == trace(made(each), (2, 2), {})


def scale(k: float, inner: Epilogue | None = None) -> Epilogue:
    return lambda x: (inner(x) if inner else x) * k


def add(k: float, inner: Epilogue | None = None) -> Epilogue:
    return lambda x: (inner(x) if inner else x) + k


def compose(f: Epilogue, g: Epilogue) -> Epilogue:
    return lambda x: f(g(x))


def test_compositions() -> None:
    def twice(x: Any) -> Any:
        return x * 2

    def square(x: Any) -> Any:
        return x * x

    def plus(x: Any) -> Any:
        return x + 1

    assert result(compose(compose(twice, plus), square)) == 514
    assert result(compose(compose(square, plus), square)) == 66049
    assert result(scale(2.0, scale(3.0))) == 96
    assert result(scale(2.0, scale(5.0))) == 160


def test_a_loop_variable() -> None:
    for _ in range(2):
        for s in (1.0, 2.0):
            for rows in (2, 3):  # which a plan must be told of
                a = np.ones((rows, 16), np.float16)
                d = gemmsmith.gemm(a, B, epilogue=lambda acc: acc * s * acc.shape[0])  # noqa: B023
                assert (d == 16 * s * rows).all()


@pytest.mark.torch
def test_a_mode_of_torch() -> None:
    """One that changes what a function does, but not that of torch.device, which every model is made under."""
    torch = pytest.importorskip("torch")

    class Doubled(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            return found * 2 if func is torch.relu else found

    def epilogue(acc: Any) -> Any:
        return torch.relu(acc)

    assert result(epilogue) == 16
    with Doubled():
        assert result(epilogue) == 32
        assert fingerprint(epilogue) is None
    assert result(epilogue) == 16
    with torch.device("meta"):
        assert fingerprint(epilogue) is not None


def test_many_nested_functions() -> None:
    """Those that Python can call are called, or refused in words."""
    epilogue = scale(1.0)
    for _ in range(450):
        epilogue = add(1.0, epilogue)
    assert result(epilogue) == 16 + 450
    for _ in range(2000):
        epilogue = add(1.0, epilogue)
    assert fingerprint(epilogue) is None
    with pytest.raises(gemmsmith.EpilogueError, match="nested deeper than sys.getrecursionlimit"):
        result(epilogue)


def test_it_says_so_once() -> None:
    def epilogue(acc: Any) -> Any:
        from gemmsmith_test_settings import VALUE

        return acc * VALUE

    with pytest.warns(
        RetraceWarning, match=r"epilogue \(test_staleness.py:\d+: .*since it imports gemmsmith_test_settings"
    ) as warned:
        result(epilogue)
    assert (warned[0].filename, warned[0].lineno) == (__file__, epilogue.__code__.co_firstlineno)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result(epilogue)
        result(lambda acc: np.maximum(acc, math.pi) + np.float32(2) + functools.reduce(operator.mul, (1.0, 2.0)))


def test_a_closure_that_changes_while_it_is_traced() -> None:
    """Another thread changes a number all the time. What was found meanwhile may be of either; what is found
    afterwards is of the number that there is then."""
    k, going = 1.0, True

    def change() -> None:
        nonlocal k
        while going:
            k = random.choice((1.0, 2.0, 3.0))

    def epilogue(acc: Any) -> Any:
        return acc * k + acc * k

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(20):
            bind(Request(A, B, epilogue=epilogue))
    finally:
        going = False
        thread.join()
        sys.setswitchinterval(interval)
    for k in (1.0, 2.0, 3.0):  # noqa: B007
        assert bind(Request(A, B, epilogue=epilogue)).source_graph == trace(epilogue, (2, 2), {})


@given(st.sampled_from(sorted(PLACES)), st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3))
def test_what_is_restored_is_alike_and_does_not_change(name: str, wrappers: list[str]) -> None:
    epilogue, change = PLACES[name](1.0)
    for wrapper in wrappers:
        epilogue = WRAPPERS[wrapper](epilogue)
    if (key := fingerprint(epilogue)) is None:
        return
    graph, restored = trace(epilogue, (2, 2), {}), restore(key)
    assert fingerprint(restored) == key
    change(2.0)
    assert trace(restored, (2, 2), {}) == graph


def test_what_becomes_known_while_it_is_traced() -> None:
    """A trace that read an object is not remembered under the number that stands in its place afterwards."""
    k: Any

    class Turning:
        def __float__(self) -> float:
            nonlocal k
            k = 2.0
            return 5.0

    def epilogue(acc: Any) -> Any:
        return acc * float(k)

    k = Turning()
    assert [result(epilogue), result(epilogue)] == [16 * 5, 16 * 2]


def test_a_plan_is_of_the_function_as_it_was() -> None:
    k = 2.0
    plan = gemmsmith.plan(A, B, epilogue=lambda acc: acc * k, out_dtype="fp32")
    k = 3.0
    for rows in (2, 5):
        assert (plan.run(np.ones((rows, 16), np.float16), B) == 32).all()
