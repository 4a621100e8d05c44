"""Epilogues of QuACK's tests: vectors, C, aux matrices, activations' gradients, norms and sums, batches and
layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from tests.foreign.comparison import close, wide

import gemmsmith

BF16, FP16, FP32 = (np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32))
M, K, N = 75, 40, 48
SHAPES: dict[str, tuple[int, ...]] = {"scalar": (), "row": (N,), "column": (M, 1), "matrix": (M, N)}


class Case(NamedTuple):
    """An epilogue of numpy's functions, which also define the expected result, and its operands."""

    function: Callable[..., Any]
    operands: dict[str, str]


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def dgelu_tanh(acc: Any, z: Any) -> Any:
    t = np.tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
    slope = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * z * z)
    return acc * slope, gelu_tanh(z)


def dsilu(acc: Any, z: Any) -> Any:
    s = sigmoid(z)
    return acc * s * (1 + z * (1 - s)), z * s


def drelu(acc: Any, z: Any) -> Any:
    dz = np.where(z > 0, acc, 0)
    return dz, np.maximum(z, 0), dz.sum(-2)


def drelu_sq(acc: Any, z: Any) -> Any:
    return acc * 2 * np.maximum(z, 0), np.maximum(z, 0) * z


def dswiglu(acc: Any, gate: Any, up: Any) -> Any:
    """Return the gradients of gate and up from that of silu(gate) * up, and this value, which was not stored before."""
    s = sigmoid(gate)
    h = gate * s
    return acc * up * (s + h * (1 - s)), acc * h, h * up


def dswiglu_of_weights(acc: Any, gate: Any, up: Any, row: Any) -> Any:
    """Return those of `dswiglu`, and the gradient of a router's weight of each row."""
    s = sigmoid(gate)
    h = gate * s * up
    return acc * row * up * s * (1 + gate * (1 - s)), acc * row * gate * s, (acc * h).sum(-1)


def gated(activation: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def epilogue(acc: Any) -> Any:
        gate, up = gemmsmith.deinterleave(acc)
        return activation(gate) * up, acc

    return epilogue


CASES = {
    "row": Case(lambda acc, u: acc + u, {"u": "row"}),
    "column": Case(lambda acc, u: acc + u, {"u": "column"}),
    "row_and_column": Case(lambda acc, u, v: acc * u + v, {"u": "column", "v": "row"}),
    "alpha_and_beta": Case(
        lambda acc, alpha, c, beta: alpha * acc + beta * c, {"alpha": "scalar", "c": "matrix", "beta": "scalar"}
    ),
    "c_and_bias": Case(lambda acc, c, u: np.maximum(acc + u + c, 0), {"c": "matrix", "u": "row"}),
    "relu_sq": Case(lambda acc: np.maximum(acc, 0) * np.maximum(acc, 0), {}),
    "gelu_and_before": Case(lambda acc, u: (gelu_tanh(acc + u), acc + u), {"u": "row"}),
    "swiglu_and_before": Case(gated(silu), {}),
    "glu_and_before": Case(gated(sigmoid), {}),
    "drelu": Case(drelu, {"z": "matrix"}),
    "drelu_sq": Case(drelu_sq, {"z": "matrix"}),
    "dsilu": Case(dsilu, {"z": "matrix"}),
    "dgelu_tanh": Case(dgelu_tanh, {"z": "matrix"}),
    "dswiglu": Case(dswiglu, {"gate": "matrix", "up": "matrix"}),
    "dswiglu_of_weights": Case(dswiglu_of_weights, {"gate": "matrix", "up": "matrix", "row": "column"}),
    "squares": Case(lambda acc, c: (acc + c, np.square(acc + c).sum(-1)), {"c": "matrix"}),
    "norm_of_k": Case(lambda acc, rstd, u: acc * rstd * u, {"rstd": "column", "u": "row"}),
    "sums": Case(lambda acc, u: ((acc * u).sum(-1), (acc * u).sum(-2)), {"u": "row"}),
    "largest": Case(lambda acc, u: (acc + u, (acc + u).max(-1)), {"u": "column"}),
}  # fmt: skip


def drawn(rng: np.random.Generator, *shape: int, dtype: np.dtype = BF16) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def several(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def column_major(x: Any) -> Any:
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def check(case: Case, a: Any, b: Any, operands: Any, dtype: np.dtype, backend: Any, transposed: bool = False) -> None:
    """Matrices are of `dtype`, the transposes of row-major ones or these; reductions are fp32."""
    expected = several(case.function(wide(a) @ wide(b), **{name: wide(x) for name, x in operands.items()}))
    matrix = (np.matmul(a, b) if a.ndim == 2 else wide(a) @ wide(b)).ndim
    outs = []
    for y in expected:
        empty = np.full(y.shape, np.nan, dtype if y.ndim == matrix else FP32)
        outs.append(column_major(empty) if transposed and y.ndim == matrix else empty)
    out = outs[0] if len(outs) == 1 else {"out" if i == 0 else f"out{i}": x for i, x in enumerate(outs)}
    gemmsmith.gemm(a, b, epilogue=case.function, operands=operands, out=out, out_dtype=dtype, backend=backend)
    for actual, right in zip(outs, expected, strict=True):
        close(actual, right, backend=backend, terms=1 if actual.ndim == matrix else max(M, N))


def operands(case: Case, rng: np.random.Generator, dtype: np.dtype = BF16) -> dict[str, Any]:
    return {name: drawn(rng, *SHAPES[kind], dtype=dtype) for name, kind in case.operands.items()}


@pytest.mark.parametrize("backend", ["reference", "sim"])
@pytest.mark.parametrize("name", CASES)
def test_epilogue(name: str, backend: str, rng: np.random.Generator) -> None:
    a, b = drawn(rng, M, K), drawn(rng, N, K).T
    check(CASES[name], a, b, operands(CASES[name], rng), BF16, backend)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("c", [False, True])
@pytest.mark.parametrize("b", [False, True])
@pytest.mark.parametrize("a", [False, True])
def test_layouts(a: bool, b: bool, c: bool, transposed: bool, rng: np.random.Generator) -> None:
    """A, B, C and D row-major or column-major; the simulator supports those where C and D are alike."""
    x, y, z = drawn(rng, M, K), drawn(rng, K, N), drawn(rng, M, N)
    x, y, z = (column_major(m) if turned else m for m, turned in ((x, a), (y, b), (z, c)))
    case = CASES["c_and_bias"]
    for backend in ("reference", "sim")[: 1 + (a == b and c == transposed)]:
        check(case, x, y, {"c": z, "u": drawn(rng, N)}, BF16, backend, transposed)


@pytest.mark.parametrize("d", [BF16, FP16, FP32])
@pytest.mark.parametrize("c", [BF16, FP16, FP32])
@pytest.mark.parametrize("ab", [BF16, FP16])
def test_dtypes(ab: np.dtype, c: np.dtype, d: np.dtype, rng: np.random.Generator) -> None:
    case = CASES["squares"]
    check(case, drawn(rng, M, K, dtype=ab), drawn(rng, K, N, dtype=ab), operands(case, rng, c), d, "reference")


@pytest.mark.parametrize("name", ["c_and_bias", "dswiglu", "squares", "swiglu_and_before"])
@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_batched(name: str, backend: str, rng: np.random.Generator) -> None:
    """With vectors and matrices for each batch."""
    own = {"row": (3, 1, N), "matrix": (3, M, N), "scalar": ()}
    more = {key: drawn(rng, *own[kind]) for key, kind in CASES[name].operands.items()}
    check(CASES[name], drawn(rng, 3, M, K), drawn(rng, 3, N, K).swapaxes(-1, -2), more, BF16, backend)


@pytest.mark.parametrize("backend", ["reference", "sim"])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_added_in_place(beta: float, backend: str, rng: np.random.Generator) -> None:
    """D is stored over C."""
    a, b, c = drawn(rng, M, K), drawn(rng, K, N), drawn(rng, M, N, dtype=FP32)
    expected = wide(a) @ wide(b) + beta * wide(c)
    options: Any = {"out": c, "out_dtype": FP32, "backend": backend}
    gemmsmith.gemm(a, b, epilogue=lambda acc, c, beta: acc + beta * c, c=c, beta=beta, **options)
    close(c, expected, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "sim"])
@pytest.mark.parametrize("m", [24, 33])
def test_symmetric(m: int, backend: str, rng: np.random.Generator) -> None:
    """To the bit, though all of it is computed."""
    x, c = drawn(rng, m, K), drawn(rng, m, m)
    c = (wide(c) + wide(c).T).astype(BF16)
    out = np.full((m, m), np.nan, BF16)
    gemmsmith.gemm(x, x.T, epilogue=lambda acc, c: 1.5 * acc - 0.5 * c, c=c, out=out, backend=backend)
    close(out, 1.5 * wide(x) @ wide(x).T - 0.5 * wide(c), backend=backend)
    np.testing.assert_array_equal(out, out.T)


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_a_norm_between_two_products(backend: str, rng: np.random.Generator) -> None:
    """The first sums the squares of what it stores, the second multiplies by 1 / sqrt(mean); none reads h between."""
    x, w, residual, v = drawn(rng, M, K), drawn(rng, K, N), drawn(rng, M, N), drawn(rng, N, 56)

    def first(acc: Any, residual: Any) -> Any:
        h = (acc + residual).to("bf16")
        return h, h.square().sum(-1)

    out = {"out": np.full((M, N), np.nan, BF16), "out1": np.full(M, np.nan, FP32)}
    gemmsmith.gemm(x, w, epilogue=first, residual=residual, out=out, backend=backend)
    h, squares = out.values()
    close(h, wide(x) @ wide(w) + wide(residual), backend=backend)
    np.testing.assert_allclose(squares, np.square(wide(h)).sum(-1), rtol=1e-5)
    rstd = (squares / N + 1e-6)[:, None] ** -0.5
    gain = drawn(rng, N)
    weighted = (wide(gain)[:, None] * wide(v)).astype(BF16)
    y = np.full((M, 56), np.nan, BF16)
    gemmsmith.gemm(h, weighted, epilogue=lambda acc, rstd: acc * rstd, rstd=rstd, out=y, backend=backend)
    normed = wide(h) / np.sqrt(np.square(wide(h)).mean(-1, keepdims=True) + 1e-6)
    close(y, normed @ wide(weighted), roundings=0.01, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_a_softmax_s_statistics(backend: str, rng: np.random.Generator) -> None:
    """The maximum of a row, and the logarithm of the sum, of scaled and masked scores."""
    q, k = drawn(rng, M, K), drawn(rng, N, K)
    mask = np.tril(np.ones((M, N), bool))
    outs = {"largest": np.full(M, np.nan, FP32), "lse": np.full(M, np.nan, FP32)}

    def statistics(acc: Any, scale: Any, mask: Any) -> Any:
        s = acc.masked_fill(~mask, -1e30) * scale
        return {"largest": s.max(-1), "lse": s.logsumexp(-1)}

    gemmsmith.gemm(q, k.T, epilogue=statistics, scale=K**-0.5, mask=mask, out=outs, backend=backend)
    s = np.where(mask, wide(q) @ wide(k).T * K**-0.5, -1e30)
    close(outs["largest"], s.max(-1), backend=backend)
    close(outs["lse"], np.log(np.exp(s).sum(-1)), backend=backend)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 8, 8), (3, 129, 1), (17, 1, 33), (2, 7, 300), (257, 24, 5), (64, 0, 40)])
@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_sizes(m: int, k: int, n: int, backend: str, rng: np.random.Generator) -> None:
    more = {"c": drawn(rng, m, n), "u": drawn(rng, n)}
    check(CASES["c_and_bias"], drawn(rng, m, k), drawn(rng, n, k).T, more, BF16, backend)
