"""Comparisons, choices, & | ^ ~, isnan and one_hot as operands of everything: numbers 0 and 1 in the reference, in the
simulator, in the fallback and in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import gemmsmith
from gemmsmith import Config
from gemmsmith.core.dtypes import FP32, INT32
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch import gemm
from gemmsmith.torch.fallback import evaluate_graph

M, N, K = 24, 32, 16
TILE = Config(tile=(64, 64, 32), cluster=(1, 1), stages=2, consumers=1)
OPERANDS = {"x": (BroadcastDims(True, 1, 1), FP32), "labels": (BroadcastDims(rows_per_value=1), INT32)}
COMPARISONS = {name: getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
LOGICAL = {name: getattr(torch, name) for name in ("logical_and", "logical_or")}
BITWISE: dict[str, Any] = {"and": lambda p, q: p & q, "or": lambda p, q: p | q, "xor": lambda p, q: p ^ q}
CLASSES = {name: getattr(torch, name) for name in ("isnan", "isinf", "isfinite")}
EXACT = {name: getattr(torch, name) for name in ("neg", "abs", "sign", "floor", "ceil", "trunc", "round", "relu")}
SMOOTH = {name: getattr(torch, name) for name in ("sigmoid", "tanh", "exp", "erf", "expm1", "cos")}
SMOOTH |= {name: getattr(functional, name) for name in ("silu", "gelu", "softplus", "mish", "elu")}
BINARY = {name: getattr(torch, name) for name in ("add", "sub", "maximum", "minimum")}
CASTS = {"half": lambda x: x.half().float(), "bfloat16": lambda x: x.bfloat16().float()}
REDUCTIONS = {name: getattr(torch, name) for name in ("sum", "mean", "amax", "amin", "logsumexp")}
KINDS = ("comparison", "class", "not", "bitwise", "logical", "choice", "choice of predicates", "exact", "binary",
         "masked", "smooth", "cast")  # fmt: skip

Step = tuple[str, str, int, int, int]


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[Step, ...], tuple[tuple[str, int, int], ...]]:
    """Return steps, (kind, function, indices of three inputs), and results, (reduction or "", its axis, index)."""
    index = st.integers(0, 100)
    functions = {"comparison": COMPARISONS, "class": CLASSES, "bitwise": BITWISE, "logical": LOGICAL, "exact": EXACT,
                 "binary": BINARY, "smooth": SMOOTH, "cast": CASTS}  # fmt: skip
    steps = []
    for _ in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(KINDS))
        function = draw(st.sampled_from(sorted(functions.get(kind, {"": None}))))
        steps.append((kind, function, draw(index), draw(index), draw(index)))
    reduction = st.sampled_from(("", *REDUCTIONS))
    results = draw(st.lists(st.tuples(reduction, st.sampled_from((-1, -2)), index), min_size=1, max_size=3))
    return tuple(steps), tuple(results)


def evaluate(program: Any, acc: Any, x: Any, one_hot: Any) -> tuple[Any, ...]:
    """Run a program on traced values or tensors, and return its results."""
    all_values = values_of(program, acc, x, one_hot)
    returned = [torch.where(one_hot, x, acc)]  # every operand is read
    for reduction, axis, i in program[1]:
        y = all_values[-1 - i % len(all_values)].float()
        returned.append(REDUCTIONS[reduction](y, axis) if reduction else y)
    return tuple(returned)


def values_of(program: Any, acc: Any, x: Any, one_hot: Any) -> list[Any]:
    """Return the operands and the value of each step. A predicate is a bool, of which .float() is the number."""
    numbers, predicates, smooth, all_values = [acc, x], [one_hot, x > 0], [acc], [acc, x, one_hot]

    def number(i: int) -> Any:
        """One of the predicates half of the time."""
        return predicates[i // 2 % len(predicates)].float() if i % 2 else numbers[i // 2 % len(numbers)]

    def predicate(i: int) -> Any:
        return predicates[i % len(predicates)]

    for kind, name, i, j, k in program[0]:
        if kind == "smooth":  # not among the numbers, as comparisons of rounded values differ
            y = SMOOTH[name](predicate(i).float() if j % 2 else torch.clamp(number(i), -4.25, 4.25))
            smooth.append(y)
        elif kind in ("exact", "binary", "masked", "choice", "choice of predicates", "cast"):
            if kind == "exact":
                y = EXACT[name](number(i))
            elif kind == "binary":
                y = BINARY[name](number(i), number(j))
            elif kind == "masked":
                y = number(i) * predicate(j).float()
            elif kind == "cast":
                y = CASTS[name](predicate(i).float())
            elif kind == "choice":
                y = torch.where(predicate(i), number(j), number(k))
            else:
                y = torch.where(predicate(i), predicate(j), predicate(k)).float()
            numbers.append(y)
        else:
            if kind == "comparison":
                y = COMPARISONS[name](number(i), number(j))
            elif kind == "class":
                y = CLASSES[name](number(i))
            elif kind == "not":
                y = ~predicate(i)
            elif kind == "bitwise":
                y = BITWISE[name](predicate(i), predicate(j))
            else:
                y = LOGICAL[name](predicate(i), predicate(j))
            predicates.append(y)
        all_values.append(y)
    return all_values


def data(seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-2, 3, shape).astype(np.float16) for shape in ((M, K), (K, N)))
    x = rng.choice([0, 1, -1, 2, -3, np.nan, np.inf, -np.inf], (M, N), p=[0.2, 0.2, 0.2, 0.2, 0.17, 0.01, 0.01, 0.01])
    return a, b, x.astype(np.float32), rng.integers(-2, N, (M, 1)).astype(np.int32)


def epilogue_of(program: Any) -> Callable[..., Any]:
    return lambda acc, x, labels: evaluate(program, acc, x, labels.one_hot(N))


@settings(max_examples=30)
@given(program=programs(), seed=st.integers(0, 2**32 - 1))
def test_values(program: Any, seed: int) -> None:
    (a, b, x, labels), epilogue = data(seed), epilogue_of(program)
    product = torch.from_numpy(a).double() @ torch.from_numpy(b).double()
    one_hot = torch.from_numpy(labels) == torch.arange(N)
    wants = [y.double() for y in evaluate(program, product.float(), torch.from_numpy(x), one_hot)]
    operands = {"x": x, "labels": labels}
    graph = trace(epilogue, (M, N), OPERANDS)
    by_fallback = evaluate_graph(graph, product, {name: torch.from_numpy(y) for name, y in operands.items()})
    computed = {"fallback": [by_fallback[r.name] for r in graph.results]}
    for backend in ("reference", "sim"):
        results = gemmsmith.gemm(a, b, epilogue=epilogue, operands=operands, out_dtype="fp32", backend=backend,
                                 config=TILE)  # fmt: skip
        computed[backend] = [torch.from_numpy(y) for y in results]
    for backend, values in computed.items():
        for value, want in zip(values, wants, strict=True):
            torch.testing.assert_close(
                value.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda text, of=backend: f"{of}: {text}"
            )


@settings(max_examples=30)
@given(program=programs(), seed=st.integers(0, 2**32 - 1))
def test_gradients(program: Any, seed: int) -> None:
    """They are finite where torch's are: nothing multiplies an infinity by the 0 of a predicate.

    They are torch's where no value is NaN: at NaN, abs(relu(x)) may have relu(x)'s, and maximum(x, x) that of x.
    """
    program = program[0], program[1][:1]  # values that are saved count as results, of which there are at most 4
    a, b, x, labels = map(torch.from_numpy, data(seed))
    acc, x = (y.double().requires_grad_() for y in (a.double() @ b.double(), x))
    identity = torch.eye(N, dtype=torch.float64)
    gradients = []
    for values in (
        evaluate(program, acc @ identity, x, labels == torch.arange(N)),  # its gradient spreads NaN over rows as gemm's
        gemm(acc, identity, epilogue=epilogue_of(program), operands={"x": x, "labels": labels}),
    ):
        rng = torch.Generator().manual_seed(seed)
        weights = [torch.randint(-2, 3, y.shape, generator=rng) for y in values]
        total = sum((y.double() * w).sum() for y, w in zip(values, weights, strict=True) if y.requires_grad)
        gradients.append(torch.autograd.grad(total, (acc, x)))
    values = values_of(program, acc, x, labels == torch.arange(N))
    defined = ~torch.stack([y.isnan() for y in values]).any(0)
    for want, got in zip(*gradients, strict=True):
        finite = want.isfinite()
        assert got[finite].isfinite().all()
        torch.testing.assert_close(got[finite & defined], want[finite & defined], rtol=1e-5, atol=1e-5)


def test_a_logit_of_minus_infinity_beside_the_label() -> None:
    """The label's logit is selected, as the loss is finite."""
    a, b, x, labels = data(seed=np.random.default_rng().integers(2**32))
    x, labels = np.where(np.isfinite(x), x, -np.inf).astype(np.float32), labels % N
    x[:, 0] = -np.inf
    x[np.arange(M), labels[:, 0]] = 1

    def cross_entropy(acc: Any, x: Any, labels: Any) -> Any:
        z = acc + x
        return z.logsumexp(-1), z.where(labels.one_hot(N), 0.0).sum(-1)

    operands = {"x": x, "labels": labels}
    factors = [torch.from_numpy(y).double() for y in (a, b)]
    z = factors[0] @ factors[1] + torch.from_numpy(x)
    target = torch.from_numpy(labels[:, 0]).long()
    want = functional.cross_entropy(z, target, reduction="none")
    for backend in ("reference", "sim"):
        lse, of_label = gemmsmith.gemm(a, b, epilogue=cross_entropy, operands=operands, backend=backend, config=TILE)
        torch.testing.assert_close(torch.from_numpy(lse - of_label).double(), want, rtol=1e-5, atol=1e-5)
    rows = torch.from_numpy(x).double().requires_grad_()
    tensors = {"x": rows, "labels": torch.from_numpy(labels)}
    lse, of_label = gemm(*factors, epilogue=cross_entropy, operands=tensors)
    (got,) = torch.autograd.grad((lse - of_label).sum(), rows)
    expected = z.clone().requires_grad_()
    functional.cross_entropy(expected, target, reduction="sum").backward()
    torch.testing.assert_close(got, expected.grad, rtol=1e-6, atol=1e-6)
