"""Traced functions against the functions themselves, in float64, and what cannot be traced."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmsmith
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, overflow_as_fp32
from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Result
from gemmsmith.graph.frontend.classify import classify
from gemmsmith.graph.frontend.op_table import METHODS, UNSUPPORTED_HINTS, op_names
from gemmsmith.graph.frontend.show import format_tree
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.frontend.values import quantize, top_k_softmax
from gemmsmith.graph.functions import FUNCTIONS
from gemmsmith.graph.passes import optimize

try:
    import torch
    import torch.nn.functional as F  # noqa: N812
except ImportError:
    torch = F = None

M, N = 5, 32
PRODUCT = (M, N)
Array = np.ndarray


def traced(function: Callable[..., Any], product: tuple[int, ...] = PRODUCT, **operands: Any) -> EpilogueGraph:
    """With operands given as arrays (bf16), or as numbers."""
    kinds = {
        name: (classify(name, x.shape, product), BF16) if isinstance(x, np.ndarray) else (BroadcastDims(), None)
        for name, x in operands.items()
    }
    return trace(function, product, kinds)


def evaluate(graph: EpilogueGraph, accumulator: Array, **operands: Any) -> list[Array]:
    """The results in float64."""
    values: list[Array] = []
    for node in graph.nodes:
        inputs = [values[i] for i in node.inputs]
        match node.op:
            case "accumulator":
                value = accumulator
            case "constant":
                value = np.float64(node.attribute)
            case "operand":
                value = np.asarray(operands[node.attribute], np.float64)
            case "chunk":
                groups = inputs[0].reshape(*inputs[0].shape[:-1], -1, 2, 8)
                value = groups[..., node.attribute[0], :].reshape(*inputs[0].shape[:-1], -1)
            case "one_hot":
                value = np.arange(accumulator.shape[-1]) == inputs[0]
            case "cast":
                value = inputs[0].astype(node.attribute.numpy).astype(np.float64)
            case "reduce":
                kind, axis = node.attribute
                where = {"n": -1, "m": -2, "all": None}[axis]
                x = np.exp(inputs[0]) if kind == "logsumexp" else inputs[0]
                value = np.log(x.sum(where)) if kind == "logsumexp" else getattr(np, kind)(x, axis=where)
            case _:
                assert len(inputs) == FUNCTIONS[node.op].arity
                with np.errstate(all="ignore"):
                    value = FUNCTIONS[node.op].reference(*inputs)
        values.append(value)
    return [values[r.node] for r in graph.results]


def one(function: Callable[..., Any], accumulator: Array, **operands: Any) -> Array:
    graph = traced(function, accumulator.shape, **operands)
    (value,) = evaluate(graph, accumulator, **operands)
    return np.broadcast_to(value, accumulator.shape)


def close(got: Array, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-12, atol=1e-12)


# -- every name of the table ---------------------------------------------------------------------------
POSITIVE = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow", "power", "float_power"}
ODD = {"isnan", "isinf", "isfinite"}
NAMES = op_names()
REDUCTIONS = {"sum", "mean", "logsumexp", "max", "min", "amax", "amin", "count_nonzero"}
CASTS = {"to", "type_as", "float", "half", "bfloat16", "astype", "type"}
LIBRARIES = {"expit", "swish", "log_sigmoid", "special_exp2", "fma"}
ELSEWHERE = {*REDUCTIONS, *CASTS, *LIBRARIES, "one_hot", "masked_fill"}
"""Tested below, or other libraries' names."""


def other(f: Any, x: Any) -> Any:
    return f(x, 0.7 - x * x)


def bits(f: Any, x: Any) -> Any:
    return f(x > 0, x < 1)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide"), other),
    **dict.fromkeys(("maximum", "minimum", "hypot", "logaddexp"), other),
    **dict.fromkeys(("lt", "less", "le", "less_equal", "gt", "greater", "ge", "greater_equal"), other),
    **dict.fromkeys(("eq", "ne", "not_equal"), lambda f, x: f(x, x.clip(-1, 1))),
    **dict.fromkeys(("pow", "power", "float_power"), lambda f, x: f(x, 1.7)),
    **dict.fromkeys(("logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_xor"), bits),
    **dict.fromkeys(("logical_not", "bitwise_not", "invert"), lambda f, x: f(x > 0.5)),
    **dict.fromkeys(("clamp", "clip"), lambda f, x: f(x, -0.5, 0.7)),
    **dict.fromkeys(("clamp_min", "clamp_max"), lambda f, x: f(x, 0.3)),
    **dict.fromkeys(("addcmul", "addcdiv"), lambda f, x: f(x, x - 1, x * x + 1, value=0.3)),
    "lerp": lambda f, x: f(x, x * x, 0.3),
    "where": lambda f, x: f(x > 0.2, x, -x),
    "threshold": lambda f, x: f(x, 0.4, 9.0),
    "dropout": lambda f, x: f(x, 0.5, False),
    "leaky_relu": lambda f, x: f(x, 0.2),
    "elu": lambda f, x: f(x, 0.7),
    "celu": lambda f, x: f(x, 0.7),
    "hardtanh": lambda f, x: f(x, -0.4, 0.9),
}


def accumulator(name: str, rng: np.random.Generator) -> Array:
    x = rng.normal(size=PRODUCT) * 2
    if name in POSITIVE:
        x = np.abs(x) + 0.01
    if name in ODD:
        x[:2, :3] = [[np.inf, -np.inf, np.nan]] * 2
    return x


def check(name: str, f: Callable[..., Any], x: Array, of: Callable[[Array], Any] = lambda x: x) -> None:
    call = CALLS.get(name, lambda f, x: f(x))

    def epilogue(acc: Any) -> Any:
        return call(f, acc)

    close(one(epilogue, x), call(f, of(x)))


@pytest.mark.parametrize("name", sorted(name for name in NAMES if hasattr(np, name) and name not in ELSEWHERE))
def test_numpy(name: str, rng: np.random.Generator) -> None:
    check(name, getattr(np, name), accumulator(name, rng))


@pytest.mark.parametrize("name", sorted(name for name in NAMES if hasattr(math, name) and name not in ELSEWHERE))
def test_math(name: str, rng: np.random.Generator) -> None:
    f, x = getattr(math, name), accumulator(name, rng)
    call = CALLS.get(name, lambda f, x: f(x))
    close(one(lambda acc: call(f, acc), x), np.vectorize(lambda v: call(f, v))(x))


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(set(NAMES) - ELSEWHERE))
def test_torch(name: str, rng: np.random.Generator) -> None:
    """As functions, as functions of nn.functional and as methods."""
    pytest.importorskip("torch")
    tensor = torch.from_numpy
    x = accumulator(name, rng)

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    if name == "prelu":
        weight = torch.tensor([0.3], dtype=torch.float64)
        close(one(lambda acc, w: F.prelu(acc, w), x, w=0.3), F.prelu(tensor(x), weight))
        return
    found = []
    for owner, f in [(torch, getattr(torch, name, None)), (F, getattr(F, name, None)), (torch.Tensor, method)]:
        if f is None or not hasattr(owner, name) or (owner is torch.Tensor and name == "where"):
            continue
        found.append(f)
        check(name, f, x, tensor)
    assert found or hasattr(np, name)


@pytest.mark.torch
def test_arguments_by_name_as_torch_has_them(rng: np.random.Generator) -> None:
    pytest.importorskip("torch")
    x = rng.uniform(-9, 9, size=PRODUCT)  # torch's softplus(x, beta=2) is x beyond 10
    for f in [
        lambda x: F.gelu(x),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.softplus(x, beta=2.0),
        lambda x: F.softplus(x, threshold=1.0),
        lambda x: F.leaky_relu(x, negative_slope=0.1),
        lambda x: F.elu(input=x, alpha=0.3),
        lambda x: F.hardtanh(x, min_val=-0.2),
        lambda x: torch.clamp(x, max=0.5),
        lambda x: x.clamp(min=-0.5, max=0.5),
        lambda x: torch.add(x, x * x, alpha=0.3),
        lambda x: x.sub(1.0, alpha=3),
        lambda x: torch.rsub(x, 1.0),
        lambda x: torch.div(x, 0.3, rounding_mode="floor"),
        lambda x: x.masked_fill(x > 0, -1.0),
        lambda x: x.where(x > 0.1, -2.0),
        lambda x: torch.max(x, -x),
        lambda x: torch.special.exp2(x),
        lambda x: torch.special.expit(x),
        lambda x: torch.nn.SiLU()(x),
        lambda x: x.contiguous().detach().clone(),
    ]:
        close(one(f, x), f(torch.from_numpy(x)))


def test_other_names(rng: np.random.Generator) -> None:
    x = rng.normal(size=PRODUCT)
    close(one(lambda acc: acc.swish(), x), x / (1 + np.exp(-x)))
    close(one(lambda acc: acc.expit(), x), 1 / (1 + np.exp(-x)))
    close(one(lambda acc: acc.masked_fill(acc > 0, 3), x), np.where(x > 0, 3, x))
    close(one(lambda acc: np.clip(acc, a_min=-0.2, a_max=0.2), x), np.clip(x, -0.2, 0.2))
    close(one(lambda acc: math.log(acc, 3), np.exp(x)), x / math.log(3))
    same = np.array([[np.inf, -np.inf, 1.0, 0.0]])
    close(one(lambda acc: np.logaddexp(acc, acc), same), np.logaddexp(same, same))


def test_every_name_of_the_table_is_reached() -> None:
    assert set(CALLS) <= set(NAMES) - ELSEWHERE
    assert set(METHODS) <= set(NAMES)
    assert not set(UNSUPPORTED_HINTS) & set(NAMES)


def test_operators(rng: np.random.Generator) -> None:
    x = rng.normal(size=PRODUCT)
    for f in [
        lambda x: 2 + x - 1,
        lambda x: 1 - x * 3 + x / 2 - 2 / x,
        lambda x: abs(x) ** 1.5 + 2**x,
        lambda x: -x + +x * 0.3,
        lambda x: np.float64(2) * x + x * np.array(3.0),
        lambda x: (x > 0) * x,
        lambda x: np.where((x > -1) & (x < 1) | (x == 2), x, 0),
        lambda x: np.where(~(x >= 0.5) ^ (x <= -0.5), x, 1),
        lambda x: (x != 0) * 2.0,
        lambda x: sum([x, x, x]),
    ]:
        close(one(f, x), f(x))
    close(one(lambda x: round(x * 10), x), np.rint(x * 10))


# -- random expressions --------------------------------------------------------------------------------
UNARY = ["tanh", "sin", "cos", "abs", "square", "sign", "negative"]
BINARY = ["add", "subtract", "multiply", "maximum", "minimum", "greater", "less_equal"]


@st.composite
def expressions(draw: Any) -> Callable[[dict[str, Any]], Any]:
    """A DAG of up to 12 numpy functions of the four values, as a function of them."""
    names = ["acc", "row", "column", "matrix", "scalar"]
    steps = []
    for i in range(draw(st.integers(1, 12))):
        f = draw(st.sampled_from([*UNARY, *BINARY, "where"]))
        pick = st.sampled_from([*names, *range(i)])
        number = st.floats(-2, 2, width=32, allow_subnormal=False)  # constants that are 0 in fp32 become 0
        count = 1 if f in UNARY else 2 if f in BINARY else 3
        steps.append((f, [draw(st.one_of(pick, pick, number) if j else pick) for j in range(count)]))

    def function(values: dict[str, Any]) -> Any:
        made: list[Any] = []

        def get(x: Any) -> Any:
            return made[x] if type(x) is int else values[x] if isinstance(x, str) else x

        for f, inputs in steps:
            a, *rest = map(get, inputs)
            a = a > 0 if f == "where" else a * 1.0  # numpy has no arithmetic of conditions
            made.append(getattr(np, f)(a, *[x * 1.0 for x in rest]))
        return made[-1] + values["acc"] + values["row"] + values["column"] + values["matrix"] * values["scalar"]

    return function


@given(expressions(), st.integers(0, 2**32 - 1), st.sampled_from([(M, N), (1, N), (M, 1), (2, M, N)]))
def test_random_expressions(f: Callable[[dict[str, Any]], Any], seed: int, product: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    acc = rng.normal(size=product)
    *_, m, n = product
    operands = {
        "row": rng.normal(size=n), "column": rng.normal(size=(m, 1)), "matrix": rng.normal(size=product), "scalar": 0.3,
    }  # fmt: skip

    def epilogue(acc: Any, row: Any, column: Any, matrix: Any, scalar: Any) -> Any:
        return f({"acc": acc, "row": row, "column": column, "matrix": matrix, "scalar": scalar})

    close(one(epilogue, acc, **operands), epilogue(acc, **operands))
    graph = traced(epilogue, product, **operands)
    assert [o.name for o in graph.operands] == ["row", "column", "matrix", "scalar"]
    assert graph.nodes_needed_by(r.node for r in graph.results) == set(range(len(graph.nodes)))
    assert all(i < at for at, node in enumerate(graph.nodes) for i in node.inputs)


# -- reductions, halves, casts, results ----------------------------------------------------------------
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize(("dim", "axis"), [(-1, "n"), (1, "n"), (0, "m"), (-2, "m"), (None, "all"), ((0, 1), "all")])
def test_reductions(kind: str, dim: Any, axis: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=PRODUCT)
    for f in (
        lambda acc: getattr(np, kind)(acc * 2, axis=dim),
        lambda acc: getattr(acc * 2, kind)(dim),
        lambda acc: getattr(acc * 2, kind)(axis=dim, keepdims=False),
    ):
        graph = traced(f)
        close(evaluate(graph, x)[0], getattr(np, kind)(x * 2, axis=dim))
        assert graph.nodes[-1].attribute == (kind, axis)
        assert graph.results == (Result("out", len(graph.nodes) - 1),)
    kept = traced(lambda acc: getattr(acc, kind)(dim, True))
    assert kept.results == (Result("out", 1, None, True),)


@pytest.mark.torch
def test_reductions_of_torch(rng: np.random.Generator) -> None:
    pytest.importorskip("torch")
    x = rng.normal(size=PRODUCT)
    for f in [
        lambda x: torch.sum(x, dim=-1),
        lambda x: x.abs().amax(dim=-1),
        lambda x: torch.amin(x, 0),
        lambda x: torch.logsumexp(x, dim=-1),
        lambda x: x.logsumexp(0),
        lambda x: torch.max(x, dim=1).values,
        lambda x: x.min(0)[0],
        lambda x: torch.max(x),
        lambda x: torch.count_nonzero(torch.relu(x), -1),
        lambda x: x.mean((0, 1)),
    ]:
        close(evaluate(traced(f), x)[0], f(torch.from_numpy(x)))


def test_dimensions_of_a_batch() -> None:
    product = (3, M, N)

    def axis(dim: Any) -> str:
        return traced(lambda acc: acc.sum(dim), product).nodes[-1].attribute[1]

    assert [axis(d) for d in (-1, 2, -2, 1, None, (0, 1, 2))] == ["n", "n", "m", "m", "all", "all"]
    assert [axis(d) for d in (0, (1, 2), (-1, -2), (0, 1), (-1, 0), -3)] == ["b", "mn", "mn", "bm", "bn", "b"]
    for dim in (3, -4, (0, 3), ()):
        with pytest.raises(EpilogueError, match="sum: dim: got"):
            axis(dim)


def test_dimensions_of_several_batches() -> None:
    """All in front of rows and columns are reduced together, or none."""
    product = (2, 3, M, N)

    def axis(dim: Any) -> str:
        return traced(lambda acc: acc.sum(dim), product).nodes[-1].attribute[1]

    assert [axis(d) for d in (2, -1, (0, 1), (0, 1, 2), (2, 3), None)] == ["m", "n", "b", "bm", "mn", "all"]
    for dim in (0, 1, (0, 2), (0, 2, 3)):
        with pytest.raises(EpilogueError, match="sum: dim: got .* all dimensions before these"):
            axis(dim)


def test_halves_and_casts(rng: np.random.Generator) -> None:
    def swiglu(acc: Any, bias: Any, half_row: Any) -> Any:
        gate, up = gemmsmith.deinterleave(acc + bias)
        assert gate.shape == (M, N // 2)
        return (gate.sigmoid() * up + half_row).astype(np.float16)

    x, bias, half = rng.normal(size=PRODUCT), rng.normal(size=N), rng.normal(size=N // 2)
    graph = traced(swiglu, bias=bias, half_row=half)
    groups = (x + bias).reshape(M, -1, 16)
    gate, up = (groups[..., s].reshape(M, -1) for s in (slice(8), slice(8, 16)))
    close(evaluate(graph, x, bias=bias, half_row=half)[0], up / (1 + np.exp(-gate)) + half)
    assert graph.results[0].dtype == FP16
    assert graph.broadcast_dims[-1] == BroadcastDims(True, 1, 2)


def test_one_hot(rng: np.random.Generator) -> None:
    x, labels = rng.normal(size=PRODUCT), rng.integers(N, size=(M, 1)).astype(np.float64)
    graph = traced(lambda acc, labels: (acc * labels.one_hot(N)).sum(-1), labels=labels)
    close(evaluate(graph, x, labels=labels)[0], np.take_along_axis(x, labels.astype(int), 1)[:, 0])
    assert traced(lambda acc, labels: acc + labels.one_hot(num_classes=N), labels=labels).broadcast_dims[2].is_matrix
    assert traced(lambda acc, x: acc * x.one_hot(1), (M, 1), x=labels).nodes[3].op == "eq"  # a column is all of it
    for bad, message in (
        (lambda acc, labels: acc + labels.one_hot(7), "num_classes: got 7; use 32"),
        (lambda acc, labels: acc + labels + acc.one_hot(N), "one label a row"),
    ):
        with pytest.raises(EpilogueError, match=message):
            traced(bad, labels=labels)


@pytest.mark.torch
def test_torch_one_hot() -> None:
    pytest.importorskip("torch")
    labels = np.zeros((M, 1))
    want = traced(lambda acc, labels: acc + labels.one_hot(N), labels=labels)
    assert traced(lambda acc, labels: acc + F.one_hot(labels, N), labels=labels) == want


def test_casts() -> None:
    def casts(acc: Any) -> Any:
        inside = acc.half() * 2
        return acc, acc.bfloat16(), acc.to("fp8_e4m3").float(), acc.float() + 1, inside, acc.bfloat16().to(acc.dtype)

    graph = traced(casts)
    assert [r.dtype for r in graph.results] == [None, BF16, FP32, None, None, None]
    assert [n.attribute for n in graph.nodes if n.op == "cast"] == [FP16, E4M3, BF16]
    reduced = traced(lambda acc: acc.sum(-1).astype(np.float16))
    assert (reduced.results[0].dtype, len(reduced.nodes)) == (FP16, 2)
    assert traced(lambda acc: acc.sum(-1, dtype=np.float16)) == reduced


@pytest.mark.torch
def test_torch_dtypes() -> None:
    pytest.importorskip("torch")
    kinds = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32, torch.float8_e5m2: E5M2}
    for name, dtype in kinds.items():
        assert traced(lambda acc: acc.to(name)).results == (Result("out", 0, dtype),)  # noqa: B023


def test_quantize_and_softmax() -> None:
    def f(acc: Any) -> Any:
        q, scale = quantize((acc * 2).half(), "fp8_e5m2", block=64)
        return {"q": q, "scale": scale, "p": top_k_softmax(acc, 3)}

    graph = traced(f, (M, 128))
    assert [n.op for n in graph.nodes] == [
        "accumulator",
        "constant",
        "mul",
        "cast",
        "quantize",
        "scale",
        "top_k_softmax",
    ]
    assert [r.name for r in graph.results] == ["q", "scale", "p"]
    assert (graph.results[0].dtype, graph.nodes[4].attribute, graph.nodes[6].attribute) == (E5M2, (E5M2, 64), 3)
    for bad in (lambda x: quantize(x, "bf16"), lambda x: quantize(x, block=0), lambda x: top_k_softmax(x, 0)):
        with pytest.raises(EpilogueError, match="use"):
            traced(bad)
    with pytest.raises(EpilogueError, match="quantize: got ndarray"):
        quantize(np.ones(3))


def test_results_have_names() -> None:
    def names(f: Any) -> list[str]:
        return [r.name for r in traced(f).results]

    assert names(lambda acc: acc) == ["out"]
    assert names(lambda acc: (acc, acc + 1, acc.sum())) == ["out", "out1", "out2"]
    assert names(lambda acc: {"d": acc, "amax": acc.abs().max()}) == ["d", "amax"]


# -- functions and what they see -----------------------------------------------------------------------
def helper(x: Any, depth: int = 2) -> Any:
    return math.exp(x) if depth == 0 else helper(x, depth - 1)


def test_math_in_helpers_closures_methods_and_partials(rng: np.random.Generator) -> None:
    from math import tanh

    class Scaled:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, acc: Any) -> Any:
            return math.sqrt(abs(acc)) * self.factor * math.sqrt(4)

        def method(self, acc: Any) -> Any:
            return tanh(acc) * self.factor

    def wrapped(f: Any) -> Any:
        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return f(*args, **kwargs) * math.pi

        return wrapper

    x = rng.normal(size=PRODUCT)
    close(one(helper, x), np.exp(x))
    close(one(lambda acc: helper(acc) + tanh(acc), x), np.exp(x) + np.tanh(x))
    close(one(Scaled(3.0), x), np.sqrt(np.abs(x)) * 6)
    close(one(Scaled(3.0).method, x), np.tanh(x) * 3)
    close(one(functools.partial(helper, depth=1), x), np.exp(x))
    close(one(wrapped(lambda acc, bias: math.cos(acc) + bias), x, bias=x[0]), (np.cos(x) + x[0]) * np.pi)
    assert math.exp(1.0) == np.exp(1.0)
    assert helper(0.0) == 1.0


def test_parameters(rng: np.random.Generator) -> None:
    x, row = rng.normal(size=PRODUCT), rng.normal(size=N)

    def defaults(whatever: Any, /, bias: Any = None, *, scale: float = 2.0) -> Any:
        return whatever * scale + (0 if bias is None else bias)

    close(one(defaults, x), x * 2)
    close(one(defaults, x, bias=row), x * 2 + row)
    close(one(defaults, x, scale=0.3, bias=row), x * 0.3 + row)
    assert [o.name for o in traced(defaults, scale=0.3, bias=row).operands] == ["bias", "scale"]
    assert traced(defaults, scale=0.3).operands[0].dtype is None
    close(one(lambda acc, **others: acc + others["a"] * others["b"], x, a=row, b=2.0), x + row * 2)
    close(one(np.exp, x), np.exp(x))


def test_shapes() -> None:
    def f(acc: Any, row: Any, column: Any, scalar: Any, each: Any) -> Any:
        assert (acc.shape, row.shape, column.shape) == ((2, M, N), (N,), (M, 1))
        assert (scalar.shape, each.shape, (row + column).shape) == ((), (2, 1, 1), (M, N))
        assert (acc.ndim, scalar.ndim, acc.dtype) == (3, 0, FP32)
        assert not hasattr(acc, "no_such_thing")
        return acc + row + column + scalar + each

    rows = {"row": np.ones(N), "column": np.ones((M, 1)), "scalar": 1.0, "each": np.ones((2, 1, 1))}
    traced(f, (2, M, N), **rows)


@given(st.floats(-4, 4), st.floats(-4, 4))
def test_closures_and_defaults_are_seen(a: float, b: float) -> None:
    def make(x: float) -> Any:
        return lambda acc: acc * x

    graphs, same = (
        [traced(make(a)), traced(make(b))],
        overflow_as_fp32(a).hex() == overflow_as_fp32(b).hex(),
    )  # 0.0 is not -0.0
    assert (graphs[0] == graphs[1]) == same
    assert graphs[0] == traced(make(a))
    assert hash(graphs[0]) == hash(traced(make(a)))
    assert (traced(lambda acc, x=a: acc * x) == graphs[1]) == same


def test_only_what_is_needed_stays() -> None:
    def f(acc: Any) -> Any:
        acc.exp()
        return acc.tanh()

    assert [n.op for n in traced(f).nodes] == ["accumulator", "tanh"]
    assert traced(lambda acc: acc) == EpilogueGraph((Node("accumulator"),), (), (Result("out", 0),))


def test_threads(rng: np.random.Generator) -> None:
    graphs: dict[int, EpilogueGraph] = {}

    def work(i: int) -> None:
        for _ in range(20):
            graphs[i] = traced(lambda acc: math.exp(acc) * i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(graphs[i].nodes[2].attribute == i for i in range(4))


# -- what cannot be fused ------------------------------------------------------------------------------
def branches(acc: Any) -> Any:
    if acc > 0:  # the branch
        return acc
    return -acc


def reduced_again(acc: Any) -> Any:
    total = acc.sum(-1)
    return acc / total  # the division


def in_torch(acc: Any) -> Any:
    return torch.cumsum(acc, 0)  # the sum


@pytest.mark.torch
@pytest.mark.parametrize(
    ("function", "text", "instead"),
    [
        (branches, "if acc > 0:  # the branch", r"use where\(condition, a, b\)"),
        (reduced_again, "return acc / total  # the division", "only known after the kernel; return it"),
        (in_torch, "return torch.cumsum(acc, 0)  # the sum", "would depend on other elements"),
    ],
)
def test_errors_quote_the_line(function: Any, text: str, instead: str) -> None:
    if function is in_torch:
        pytest.importorskip("torch")
    with pytest.raises(EpilogueError, match=instead) as caught:
        traced(function)
    first, _ = str(caught.value).split("\n")
    assert first.startswith("test_tracer.py:")
    assert first.endswith(": " + text)
    assert text in Path(__file__).read_text().split("\n")[int(first.split(":")[1]) - 1]


def test_nodes_know_their_line() -> None:
    graph = traced(lambda acc: helper(acc))
    assert graph.nodes[1].location.endswith("return math.exp(x) if depth == 0 else helper(x, depth - 1)")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda acc: acc if acc > 0 and acc < 1 else 0, "use where"),
        (lambda acc: max(acc, 0), "minimum and maximum"),
        (lambda acc: float(acc), "no number yet"),
        (lambda acc: int(acc), "no number yet"),
        (lambda acc: [1, 2][acc], "no number yet"),
        (lambda acc: list(acc), "no elements yet"),
        (lambda acc: np.asarray(acc), "no number yet"),
        (lambda acc: acc[0], "cannot be indexed"),
        (lambda acc: dict([acc.max(-1)]), r"max\(dim\).values"),
        (lambda acc: acc.size(-1), "use .shape"),
        (lambda acc: acc // 2, r"use floor\(x / y\)"),
        (lambda acc: acc % 2, "use x - floor"),
        (lambda acc: acc @ acc, "one product"),
        (lambda acc: acc.T, "transposed array"),
        (lambda acc: acc.max(-1).indices, "use .values"),
        (lambda acc: acc.sum(-1).values, "only max"),
        (lambda acc: acc.relu_(), "in place; use relu"),
        (lambda acc: acc.frobnicate(), ".frobnicate cannot"),
        (lambda acc: acc.argmax(-1), "other elements"),
        (lambda acc: acc.softmax(-1), "top_k_softmax"),
        (lambda acc: np.sort(acc), "numpy.sort cannot"),
        (lambda acc: np.linalg.norm(acc), "square root afterwards"),
        (lambda acc: np.add.reduce(acc), "use sum"),
        (lambda acc: np.exp(acc, out=np.ones(3)), "pass it as an operand"),
        (lambda acc: acc + np.ones(N), "make it a parameter"),
        (lambda acc: np.ones(N) + acc, "make it a parameter"),
        (lambda acc: acc + "x", "got 'x'; use"),
        (lambda acc: acc << 2, "unsupported operand"),
        (lambda acc: acc & 1, "comparisons on both sides"),
        (lambda acc: (acc > 0) + (acc < 1), "booleans only"),
        (lambda acc: acc.to(np.float64), "dtype: got"),
        (lambda acc: acc.clamp(), "neither min nor max"),
        (lambda acc: acc.clamp(1, 2, 3), r"too many .*its arguments are input, min=None, max=None"),
        (lambda acc: acc.round(2), "decimals"),
        (lambda acc: acc.gelu("fast"), "approximate: got 'fast'"),
        (
            lambda acc: acc.chunk(2, -1),
            r"\.chunk cannot .*use gate, up = gemmsmith.deinterleave\(x\), with b = gemmsmi",
        ),
        (lambda acc: acc.split(16, -1), r"\.split cannot .*, or gemmsmith.interleave\(\*b.chunk"),
        (lambda acc: np.array_split(acc, 2, -1), "array_split cannot be part of an epilogue; no tile of the product"),
        (lambda acc: acc[:, :16] * acc[:, 16:], r"cannot be indexed; .* gate, up = gemmsmith.deinterleave\(x\)"),
        (lambda acc: acc + gemmsmith.deinterleave(acc)[0], "32 and 16 columns"),
        (lambda acc: acc.sum().sum(), "whole grid"),
        (lambda acc: acc.sum("n"), "dim: got 'n'"),
        (lambda acc: math.gamma(acc), "math.gamma cannot"),
        (lambda acc: 1.0, "the function returns 1.0"),
        (lambda acc: None, "returns None"),
        (lambda acc: [], "returns nothing"),
        (lambda acc: (acc, [acc]), "out1: the function returns"),
        (lambda acc: {"a b": acc}, "'a b'; use a string"),
        (lambda acc, bias: acc, "bias: no operand has this name"),
        (lambda acc, *rest: acc, "name each of them"),
        (lambda *, acc: acc, "the first parameter is the accumulator"),
        (lambda: 1, "got no parameters; the first"),
        (lambda acc: acc.add(), "missing a required argument"),
        (lambda acc: acc.equal(acc), "element by element"),
    ],
)
def test_refused(function: Any, message: str) -> None:
    with pytest.raises(EpilogueError, match=message) as caught:
        traced(function)
    assert str(caught.value).startswith("test_tracer.py:")


def test_operands_must_be_used() -> None:
    row = np.ones(N)
    with pytest.raises(EpilogueError, match="bias: no result needs"):
        traced(lambda acc, bias: acc, bias=row)
    with pytest.raises(EpilogueError, match="b: the function takes no operand of this name; .* bias"):
        traced(lambda acc, bias: acc + bias, bias=row, b=row)
    with pytest.raises(EpilogueError, match="acc: the function takes no operand"):
        traced(lambda acc, **others: acc, acc=row)
    with pytest.raises(EpilogueError, match="c: is the name of an operand and of a result"):
        traced(lambda acc, c: {"c": acc + c}, c=row)
    with pytest.raises(EpilogueError, match="expected a value of the accumulator"):
        traced(lambda acc, bias: (acc, bias.sum()), bias=row)
    with pytest.raises(EpilogueError, match="got 40 columns"):
        traced(lambda acc: gemmsmith.deinterleave(acc), (M, 40))


def test_values_do_not_outlive_their_call() -> None:
    kept: list[Any] = []

    def keeps(acc: Any) -> Any:
        kept.append(acc)
        return acc + kept[0]

    traced(keeps)
    with pytest.raises(EpilogueError, match="another call"):
        traced(keeps)


# -- callables that are no functions -----------------------------------------------------------------
class Scaled:
    """Called, or by its method."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, acc: Any, bias: Any) -> Any:
        return math.exp(acc * self.factor) + bias

    method = __call__


def test_callables(rng: np.random.Generator) -> None:
    x, bias = rng.normal(size=PRODUCT), rng.normal(size=N)
    want = np.exp(x * 0.5) + bias
    scaled = Scaled(0.5)
    for epilogue in (scaled, scaled.method, functools.partial(scaled.method), functools.partial(Scaled.method, scaled)):
        close(one(epilogue, x, bias=bias), want)
    close(one(functools.partial(lambda f, acc: acc * f, 3.0), x), 3 * x)
    close(one(functools.partial(lambda acc, f, bias: acc * f + bias, f=2.0), x, bias=bias), 2 * x + bias)


@pytest.mark.torch
@pytest.mark.skipif(torch is None, reason="needs torch")
def test_modules(rng: np.random.Generator) -> None:
    nn, x = torch.nn, rng.normal(size=PRODUCT) * 3
    activations = [
        nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.Mish(), nn.Softplus(),
        nn.Softplus(beta=2.0, threshold=5.0), nn.LeakyReLU(0.2), nn.ELU(0.3), nn.CELU(0.3), nn.SELU(), nn.Tanh(),
        nn.Sigmoid(), nn.LogSigmoid(), nn.Softsign(), nn.Tanhshrink(), nn.Hardtanh(-0.3, 0.4), nn.Hardswish(),
        nn.Hardsigmoid(), nn.Threshold(0.1, 7.0), nn.Identity(), nn.Dropout(0.5).eval(), nn.Dropout(0.0),
        nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.LeakyReLU(0.1)).eval(),
    ]  # fmt: skip
    for module in activations:
        want = module(torch.from_numpy(x))
        close(one(module, x), want)
        close(one(functools.partial(module), x), want)
        close(one(lambda acc: module(acc) + 1, x), want + 1)  # noqa: B023


class Exponential(torch.nn.Module if torch else object):  # type: ignore[misc]
    """One of a user's own, with an operand and with a helper of math's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = torch.nn.LeakyReLU(0.2), 0.5

    def forward(self, acc: Any, bias: Any) -> Any:
        return self.inner(math.exp(acc * self.factor) + bias)


@pytest.mark.torch
@pytest.mark.skipif(torch is None, reason="needs torch")
def test_modules_of_ones_own(rng: np.random.Generator) -> None:
    x, bias = rng.normal(size=PRODUCT), rng.normal(size=N)
    y = np.exp(x * 0.5) + bias
    close(one(Exponential(), x, bias=bias), np.where(y > 0, y, 0.2 * y))


@pytest.mark.torch
@pytest.mark.skipif(torch is None, reason="needs torch")
def test_modules_that_hold_more_than_numbers() -> None:
    nn = torch.nn
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda module, args, result: result + 1)
    hooked_backward = nn.SiLU()
    hooked_backward.register_full_backward_hook(lambda module, grads, of_results: grads)
    assert traced(nn.Sequential(hooked)).nodes[-1].op == "add"
    for module, message in (
        (nn.PReLU(), r"PReLU has parameters or buffers \(weight\); write a function that takes them as operands"),
        (nn.Sequential(nn.ReLU(), nn.Linear(N, N)), r"Sequential has parameters or buffers \(1.weight, 1.bias\)"),
        (nn.BatchNorm1d(N, affine=False), r"buffers \(running_mean, running_var, num_batches_tracked\)"),
        (functools.partial(nn.PReLU()), r"PReLU has parameters"),
        (hooked, "ReLU has hooks; write a function"),
        (hooked_backward, "SiLU has hooks; write a function"),
        (nn.Dropout(0.5), "dropout: got training=True; pass the mask"),
        (nn.Softmax(-1), "softmax cannot be part of an epilogue; use gemmsmith's top_k_softmax"),
    ):
        with pytest.raises(EpilogueError, match=message):
            traced(module)


def test_a_column_without_its_index_of_one_column() -> None:
    """Where there are twice as many columns as rows it could be a row of halves."""
    kinds = {"c": (classify("c", (8,), (8, 16)), FP32)}
    with pytest.raises(EpilogueError, match=r"add: got 16 and 8 columns; .* one value per row has the shape \(8, 1\)"):
        trace(lambda acc, c: acc + c, (8, 16), kinds)


@pytest.mark.parametrize("count", [400, 2000])
def test_long_chains(count: int) -> None:
    """As deep as graphs get: they are traced, optimized, printed, and computed by the reference."""

    def chain(acc: Any) -> Any:
        for i in range(count):
            acc = acc.tanh() if i % 3 == 0 else acc * 1.01 if i % 3 == 1 else acc + 0.125
        return acc

    x = np.random.default_rng().standard_normal((4, 8))
    want = x
    for i in range(count):
        want = np.tanh(want) if i % 3 == 0 else want * 1.01 if i % 3 == 1 else want + 0.125
    graph = trace(chain, (4, 8), {})
    assert format_tree(optimize(graph)).count("\n") > count // 2
    np.testing.assert_allclose(execute(graph, x, {})["out"], want, rtol=1e-5)


def test_a_kernel_of_a_long_chain() -> None:
    def chain(acc: Any) -> Any:
        for _ in range(400):
            acc = (acc - 0.001).tanh()
        return acc, acc.sum(-1)

    a = np.eye(8, dtype=np.float16)
    found, want = (
        gemmsmith.gemm(a, a, epilogue=chain, backend=name, out_dtype="fp32") for name in ("sim", "reference")
    )
    for got, right in zip(found, want, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-5)
