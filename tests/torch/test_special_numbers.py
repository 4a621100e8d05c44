"""Every elementwise function and reduction, and its gradient, at the numbers where formulas break: NaN, infinities,
both zeros, subnormal numbers, the largest ones and each kink. As in torch, in float64 or in fp32, or as
docs/guides/epilogues.md says otherwise (`OTHERWISE`, `flushed`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gemmsmith
from gemmsmith import Config
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.derivative import GRAD_OUTPUT_PREFIX, GRAD_PREFIX, INPUT_PREFIX, derivative
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch import gemm

Array = np.ndarray[Any, Any]
INF, NAN, MAX, TINY = float("inf"), float("nan"), 3.4028234663852886e38, 1.1754943508222875e-38
NUMBERS = [NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, TINY, -TINY, MAX, -MAX, 1e30, 2e21, -3e20, 2e19, 1.5, 1.0, -1.0,
           3.0, -3.0, 6.0, 0.5, -0.5, 20.0, -20.0, 2.0, 100.0, -100.0, 0.3, 1e-3]  # fmt: skip
SIZE = len(NUMBERS)
X = np.repeat(np.array(NUMBERS, np.float32)[:, None], SIZE, 1)
Y = np.ascontiguousarray(X.T)
TILE = Config(tile=(64, 64, 32), cluster=(1, 1), stages=2, consumers=1)
TOLERANCE = 2.0**-17
"""Of fp32 results: twice 2^-18, relative to the value or to 1."""

UNARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in (
        "neg", "abs", "sign", "floor", "ceil", "trunc", "round", "exp", "exp2", "expm1", "log", "log2", "log10",
        "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "relu", "square",
        "isnan", "isinf", "isfinite",
    )},
    **{name: getattr(F, name) for name in (
        "silu", "mish", "hardswish", "gelu", "softplus", "leaky_relu", "elu", "celu", "selu", "relu6", "hardtanh",
        "hardsigmoid", "softsign", "tanhshrink", "logsigmoid",
    )},
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "celu_of_2": lambda x: F.celu(x, 2.0),
    "softplus_of_2": lambda x: F.softplus(x, beta=2.0, threshold=3.0),
    "clamp": lambda x: torch.clamp(x, -1.0, 3.0),
    "clamp_min": lambda x: torch.clamp(x, min=0.5),
    "not": lambda x: torch.where(~(x > 0.5), x, 1.0),
    "square_root": lambda x: x**0.5,
    "cube": lambda x: x**3,
    "inverse": lambda x: x**-1,
    "power": lambda x: x**2.5,
    "reglu": lambda x: F.relu(x) * 2.0,
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in (
        "add", "sub", "mul", "div", "maximum", "minimum", "pow", "hypot", "logaddexp", "lt", "le", "gt", "ge", "eq",
        "ne",
    )},
    "where": lambda x, y: torch.where(x > y, x, y),
    "prelu": lambda x, y: torch.where(x > 0, x, x * y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "both": lambda x, y: torch.where((x > 0) & (y > 0), x, y),
    "either": lambda x, y: torch.where((x > 0) | (y > 0), x, y),
    "fma": lambda x, y: x * y + y,
}  # fmt: skip
FUNCTIONS = {**UNARY, **BINARY}
OTHERWISE: dict[str, Array] = {"square_root": X == -INF}
"""Where a function is not as torch has it, and neither is its gradient."""
BOUNDS: dict[str, Array] = {"clamp": (X == -1.0) | (X == 3.0), "clamp_min": X == 0.5}
"""Where the gradient is 0, as in torch since 2.14, which had 1 there before."""
SUBNORMAL = (np.abs(X) < TINY) | (np.abs(Y) < TINY)
BY_RECIPROCALS: dict[str, Array] = {"div": np.abs(Y) > 2.0**126, "pow": SUBNORMAL}
BY_RECIPROCALS["hypot"] = SUBNORMAL | (np.abs(X) > 2.0**126) | (np.abs(Y) > 2.0**126)
"""Where kernels' gradients are not, since the special-function unit's reciprocals and logarithms flush."""


def inputs(function: Callable[..., Any]) -> list[Array]:
    return [X, Y] if function in BINARY.values() else [X]


def flushed(x: Array) -> Array:
    """Return an array with zeros for subnormal numbers, as the special-function unit reads them."""
    return np.where(np.abs(x) < TINY, np.copysign(0, x), x).astype(np.float32)


def matches_any(actual: Any, wants: list[Any], tolerance: float) -> Array:
    """Return whether each element equals one of the expected ones."""
    actual = np.asarray(actual, np.float64)
    with np.errstate(all="ignore"):
        all_values = [np.asarray(expected, np.float64) for expected in wants]
        all_values += [expected.astype(np.float32).astype(np.float64) for expected in all_values]
        same = [
            (np.isnan(actual) & np.isnan(expected)) | (actual == expected)
            | (np.abs(actual - expected) <= tolerance * np.maximum(np.abs(expected), 1))
            for expected in all_values
        ]  # fmt: skip
    return np.any(same, axis=0)


def check(
    name: str, actual: Any, wants: list[Any], given: list[Array], tolerance: float, otherwise: Any = False
) -> None:
    right = matches_any(actual, wants, tolerance) | OTHERWISE.get(name, False) | otherwise
    wrong = np.argwhere(~right)
    told = [([float(x[tuple(i)]) for x in given], float(np.asarray(actual)[tuple(i)]), float(wants[0][tuple(i)]))
            for i in wrong[:4]]  # fmt: skip
    assert right.all(), f"{name}: (at, got, want) {told}, {len(wrong)} in all"


def by_torch(function: Callable[..., Any], given: list[Array], dtype: torch.dtype) -> tuple[Array, list[Array]]:
    """Return the values, and the gradients of their sum."""
    tensors = [torch.from_numpy(x.copy()).to(dtype).requires_grad_() for x in given]
    y = function(*tensors)
    if not y.requires_grad:
        return y.double().numpy(), []
    grads = torch.autograd.grad(y, tensors, torch.ones_like(y), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(tensors, grads, strict=True)]
    at_bounds = next((BOUNDS[name] for name in BOUNDS if FUNCTIONS[name] is function), False)
    return y.detach().double().numpy(), [np.where(at_bounds, 0.0, g.double().numpy()) for g in zeros]


def epilogue_of(function: Callable[..., Any]) -> Callable[..., Any]:
    if function in BINARY.values():
        return lambda acc, x, y: function(x, y)
    return lambda acc, x: function(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    function = FUNCTIONS[name]
    given = inputs(function)
    wants = [by_torch(function, given, dtype)[0] for dtype in (torch.float64, torch.float32)]
    without_subnormal, _ = by_torch(function, [flushed(x) for x in given], torch.float32)
    a, b = np.zeros((SIZE, 16), np.float16), np.zeros((16, SIZE), np.float16)
    for fast_math in (True, False):
        for backend, config in (("reference", None), ("sim", TILE)):
            actual = gemmsmith.gemm(
                a, b, epilogue=epilogue_of(function), operands=dict(zip("xy", given, strict=False)), out_dtype="fp32",
                backend=backend, config=config, fast_math=fast_math,
            )  # fmt: skip
            also = [] if not fast_math or backend == "reference" else [without_subnormal]
            check(name, actual, [*wants, *also], given, TOLERANCE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str) -> None:
    """By the reference in float64, and of the derivative's graph in the simulator."""
    function = FUNCTIONS[name]
    given = inputs(function)
    (_, wants), (_, wants_32) = (by_torch(function, given, dtype) for dtype in (torch.float64, torch.float32))
    if not wants:
        return
    tensors = [torch.from_numpy(x).double().requires_grad_() for x in given]
    a, b = torch.zeros(SIZE, 16, dtype=torch.float64), torch.zeros(16, SIZE, dtype=torch.float64)
    y = gemm(a, b, epilogue=epilogue_of(function), operands=dict(zip("xy", tensors, strict=False)))
    if not y.requires_grad:  # flat wherever it has a gradient
        assert not any(expected.any() for expected in wants)
        return
    grads = torch.autograd.grad(y, tensors, torch.ones_like(y), allow_unused=True)
    for x, actual, expected in zip(tensors, grads, wants, strict=True):
        check(name, torch.zeros_like(x) if actual is None else actual, [expected], given, 1e-7)
    kinds = {key: (BroadcastDims(True, 1, 1), FP32) for key, _ in zip("xy", given, strict=False)}
    graph = derivative(trace(epilogue_of(function), (SIZE, SIZE), kinds), ["out"], list(kinds), [], FP32)
    known = {
        GRAD_OUTPUT_PREFIX + "out": np.ones_like(X),
        **{INPUT_PREFIX + key: x for key, x in zip("xy", given, strict=False)},
    }
    read = {o.name: known[o.name] for o in graph.operands}
    simulated = gemmsmith.gemm(
        a.numpy().astype(np.float16), b.numpy().astype(np.float16), epilogue=graph, operands=read, out_dtype="fp32",
        backend="sim", config=TILE,
    )  # fmt: skip
    by_name = (
        simulated
        if isinstance(simulated, dict)
        else dict(
            zip(
                [r.name for r in graph.results],
                simulated if isinstance(simulated, tuple) else (simulated,),
                strict=True,
            )
        )
    )
    _, also = by_torch(function, [flushed(x) for x in given], torch.float32)
    for key, *of_key in zip(kinds, wants, wants_32, also, strict=True):
        if GRAD_PREFIX + key in by_name:
            check(name, by_name[GRAD_PREFIX + key], of_key, given, TOLERANCE, BY_RECIPROCALS.get(name, False))


ROWS = [[1, 2, 3, 4], [1, NAN, 2, 3], [INF, 1, 2, 3], [-INF, 1, 2, 3], [INF, -INF, 1, 2], [INF, INF, 1, 2], [-INF] * 4,
        [NAN] * 4, [MAX] * 4, [-MAX] * 4, [-MAX, -INF, -INF, -INF], [0.0, -0.0, 0.0, -0.0], [1e-45] * 4,
        [MAX, -MAX, 0, 1], [NAN, INF, 0, 1], [NAN, -INF, 0, 1], [88, 89, 90, 100], [2, 2, 1, 0]]  # fmt: skip


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("reduce", [
    lambda x, dim: x.sum(dim), lambda x, dim: x.mean(dim), lambda x, dim: x.amax(dim), lambda x, dim: x.amin(dim),
    lambda x, dim: x.logsumexp(dim),
], ids=["sum", "mean", "amax", "amin", "logsumexp"])  # fmt: skip
def test_reductions(reduce: Callable[..., Any], dim: int) -> None:
    """The gradient of a logsumexp of nothing but -Inf is 0, where torch has NaN."""
    rows = np.array(ROWS, np.float32)
    x = np.ascontiguousarray(rows if dim == -1 else rows.T)
    (m, n), tensor = x.shape, torch.from_numpy(x).double().requires_grad_()
    wants = [reduce(torch.from_numpy(x).to(dtype), dim).double().numpy() for dtype in (torch.float64, torch.float32)]
    a, b = np.zeros((m, 16), np.float16), np.zeros((16, n), np.float16)

    def reduced(acc: Any, x: Any) -> Any:
        return reduce(x, dim)

    for backend, config in (("reference", None), ("sim", TILE)):
        actual = gemmsmith.gemm(a, b, epilogue=reduced, x=x, backend=backend, config=config)
        right = matches_any(actual, wants, 1e-5)
        assert right.all(), [(ROWS[i], actual[i], wants[0][i]) for i in np.flatnonzero(~right)]
    (expected,) = torch.autograd.grad(reduce(tensor, dim).sum(), tensor)
    y = gemm(torch.from_numpy(a).double(), torch.from_numpy(b).double(), epilogue=reduced, x=tensor)
    (actual,) = torch.autograd.grad(y.sum(), tensor)
    actual, expected = (g if dim == -1 else g.T for g in (actual, expected))
    nothing = torch.tensor([row == [-INF] * 4 for row in ROWS])
    torch.testing.assert_close(actual[~nothing], expected[~nothing], equal_nan=True)
    logsumexp = expected[nothing].isnan().all()
    torch.testing.assert_close(actual[nothing], torch.zeros(1, 4).double() if logsumexp else expected[nothing])
