"""Epilogue visitor trees of CUTLASS's tests of EVT: loads, stores, reductions, functions, graphs, batches, layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from tests.foreign.comparison import close, wide

import gemmsmith
from gemmsmith.graph.frontend.visitors import (
    EVT,
    AccFetch,
    AuxLoad,
    AuxStore,
    ColBroadcast,
    ColReduction,
    Compute,
    RowBroadcast,
    RowReduction,
    ScalarBroadcast,
    ScalarReduction,
    SrcFetch,
    TopologicalVisitor,
    Visitor,
    Void,
)

BF16, FP16, FP32 = (np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32))
PROBLEMS = [(72, 64, 40, 1), (33, 19, 51, 1), (40, 24, 16, 3)]
"""M, N, K, batch."""
KINDS = {"row": RowBroadcast, "column": ColBroadcast, "aux": AuxLoad, "c": SrcFetch, "scalar": ScalarBroadcast}


class Case(NamedTuple):
    """A tree; its results by name, in float64, of the accumulator x and operands; the operands by name, of KINDS."""

    tree: Callable[[], Visitor]
    meaning: Callable[..., dict[str, Any]]
    operands: dict[str, str] = {}  # noqa: RUF012 - a default, never changed


def binary(op: str, left: Visitor, right: Visitor) -> Visitor:
    return EVT(Compute(op), left, right)


def loaded(kind: str) -> Case:
    """Return the case of the accumulator and one operand, on either side."""
    return Case(
        lambda: binary("plus", binary("multiplies", KINDS[kind]("u"), AccFetch()), KINDS[kind]("u")),
        lambda x, u: {"out": u * x + u}, {"u": kind},
    )  # fmt: skip


def computed(op: Compute, meaning: Callable[[Any], Any]) -> Case:
    return Case(lambda: EVT(op, AccFetch()), lambda x: {"out": meaning(x)})


REDUCED: dict[str, tuple[type[Any], Any]] = {"row": (RowReduction, -2), "column": (ColReduction, -1)}


def reduced(axis: str, kind: str) -> Case:
    """Return the case of D, stored and reduced by the functor; a scalar is one for all batches."""
    of = {"plus": np.sum, "maximum": np.max, "minimum": np.min}[kind]
    node, dim = REDUCED.get(axis, (ScalarReduction, None))
    return Case(
        lambda: EVT(node(kind, "r"), binary("plus", AccFetch(), SrcFetch("c"))),
        lambda x, c: {"out": x + c, "r": of(x + c, axis=dim)}, {"c": "c"},
    )  # fmt: skip


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def linear_combination() -> Visitor:
    scaled = binary("multiplies", ScalarBroadcast("alpha"), AccFetch())
    return EVT(Compute("homogeneous_multiply_add"), ScalarBroadcast("beta"), SrcFetch("c"), scaled)


def forward() -> Visitor:
    """Return the case of a layer with a bias and a residual, which also stores the pre-activation."""
    z = binary("plus", binary("plus", AccFetch(), RowBroadcast("bias")), SrcFetch("c"))
    return EVT(Compute("GELU_taylor"), EVT(AuxStore("z"), z))


def backward() -> Visitor:
    """Return the case of relu's gradient, with the bias's gradient."""
    mask = EVT(Compute("gt", 0), AuxLoad("z"))
    return EVT(RowReduction("plus", "dbias"), EVT(Compute("where", 0), mask, AccFetch()))


def silu_gradient() -> Visitor:
    """Return the case of a graph whose sigmoid is used twice."""
    return TopologicalVisitor(
        [(), (), (1,), (), (3, 2), (1, 4), (5,), (2, 6), (0, 7)],
        AccFetch(), AuxLoad("z"), Compute("sigmoid"), ScalarBroadcast(1), Compute("minus"), Compute("multiplies"),
        Compute("plus", 1), Compute("multiplies"), Compute("multiplies"),
    )  # fmt: skip


def diamond() -> Visitor:
    """Return the case of two results of one sum, one of which is a part of the other."""
    return TopologicalVisitor(
        [(), (), (), (), (), (0, 3), (1, 4, 2), (5, 6), (7,), (8,), (9,), (), (10, 11), (8, 12)],
        AccFetch(), SrcFetch("c"), AuxLoad("aux"), ScalarBroadcast("alpha"), ScalarBroadcast("beta"),
        Compute("multiplies"), Compute("multiply_add"), Compute("plus"), AuxStore("f"), Compute("plus", 1),
        Compute("ReLu"), ColBroadcast("bias"), Compute("plus"), Compute("plus"),
    )  # fmt: skip


def diamond_as_a_function(acc: Any, c: Any, aux: Any, alpha: Any, beta: Any, bias: Any) -> Any:
    f = alpha * acc + (c * beta + aux)
    return {"out": f + (np.maximum(f + 1, 0) + bias), "f": f}


def softmax() -> Visitor:
    """Return the case of softmax's first pass: each row's maximum, and the logarithm of the sum."""
    scaled = binary("multiplies", AccFetch(), ScalarBroadcast(0.3))
    return EVT(Void(), EVT(ColReduction("logsumexp", "lse"), EVT(ColReduction("maximum", "largest"), scaled)))


def norm() -> Visitor:
    """Return the case of what a normalization of columns needs."""
    x = EVT(RowReduction("plus", "total"), binary("plus", AccFetch(), RowBroadcast("bias")))
    return EVT(RowReduction("sum_of_squares", "squares"), x)


def everything() -> Visitor:
    z = EVT(
        AuxStore("z", "fp32"), binary("multiplies", binary("plus", AccFetch(), RowBroadcast("r")), ColBroadcast("s"))
    )
    return EVT(ScalarReduction("amax", "largest"), EVT(ColReduction("plus", "rows"), EVT(Compute("tanh"), z)))


def gelu_tanh(x: Any) -> Any:
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def relu_gradient(x: Any, z: Any) -> dict[str, Any]:
    d = np.where(z > 0, x, 0)
    return {"out": d, "dbias": d.sum(-2)}


def of_everything(x: Any, r: Any, s: Any) -> dict[str, Any]:
    z = (x + r) * s
    return {"out": np.tanh(z), "z": z, "rows": np.tanh(z).sum(-1), "largest": np.abs(np.tanh(z)).max()}


CASES = {
    "linear_combination": Case(
        linear_combination, lambda x, alpha, beta, c: {"out": alpha * x + beta * c},
        {"alpha": "scalar", "beta": "scalar", "c": "c"},
    ),
    **{f"load_{kind}": loaded(kind) for kind in KINDS},
    "number": Case(lambda: binary("minus", ScalarBroadcast(2.5), AccFetch()), lambda x: {"out": 2.5 - x}),
    "minus": Case(lambda: binary("minus", AuxLoad("u"), AccFetch()), lambda x, u: {"out": u - x}, {"u": "aux"}),
    "largest": Case(
        lambda: binary("maximum", binary("minimum", AccFetch(), ColBroadcast("u")), RowBroadcast("v")),
        lambda x, u, v: {"out": np.maximum(np.minimum(x, u), v)}, {"u": "column", "v": "row"},
    ),
    "divided": Case(
        lambda: binary("divides", AccFetch(), EVT(Compute("exp"), ColBroadcast("u"))),
        lambda x, u: {"out": x / np.exp(u)}, {"u": "column"},
    ),
    "store_aux": Case(lambda: EVT(Compute("ReLu"), EVT(AuxStore("z", "fp16"), AccFetch())),
                      lambda x: {"out": np.maximum(x, 0), "z": x}),
    "store_aux_alone": Case(lambda: EVT(Void(), EVT(AuxStore("z"), AccFetch())), lambda x: {"z": x}),
    **{
        f"{axis}_{kind}": reduced(axis, kind)
        for axis in ("row", "column", "scalar") for kind in ("plus", "maximum", "minimum")
    },
    "relu": computed(Compute("ReLu"), lambda x: np.maximum(x, 0)),
    "leaky_relu": computed(Compute("LeakyReLU", 0.1), lambda x: np.where(x > 0, x, 0.1 * x)),
    "tanh": computed(Compute("Tanh"), np.tanh),
    "sigmoid": computed(Compute("Sigmoid"), sigmoid),
    "silu": computed(Compute("SiLu"), lambda x: x * sigmoid(x)),
    "hardswish": computed(Compute("HardSwish"), lambda x: x * np.clip(x + 3, 0, 6) / 6),
    "gelu": computed(Compute("GELU"), lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / 2**0.5))),
    "gelu_taylor": computed(Compute("GELU_taylor"), gelu_tanh),
    "clamp": computed(Compute("Clamp", -1, 0.5), lambda x: np.clip(x, -1, 0.5)),
    "forward": Case(forward, lambda x, bias, c: {"out": gelu_tanh(x + bias + c), "z": x + bias + c},
                    {"bias": "row", "c": "c"}),
    "backward": Case(backward, relu_gradient, {"z": "aux"}),
    "silu_gradient": Case(
        silu_gradient, lambda x, z: {"out": x * sigmoid(z) * (1 + z * (1 - sigmoid(z)))}, {"z": "aux"}
    ),
    "diamond": Case(diamond, diamond_as_a_function, {
        "c": "c", "aux": "aux", "alpha": "scalar", "beta": "scalar", "bias": "column",
    }),
    "softmax": Case(
        softmax, lambda x: {"largest": 0.3 * x.max(-1), "lse": np.log(np.exp(0.3 * x).sum(-1))}
    ),
    "norm": Case(
        norm, lambda x, bias: {"out": x + bias, "total": (x + bias).sum(-2), "squares": np.square(x + bias).sum(-2)},
        {"bias": "row"},
    ),
    "everything": Case(everything, of_everything, {"r": "row", "s": "column"}),
}  # fmt: skip


def drawn(rng: np.random.Generator, *shape: int, dtype: np.dtype = BF16) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def inputs(case: Case, m: int, n: int, k: int, batch: int, rng: np.random.Generator, dtype: Any = BF16) -> Any:
    """Return a, b, and operands for each batch."""
    lead = (batch,) if batch > 1 else ()
    row = (*lead, 1, n) if lead else (n,)
    shapes = {"row": row, "column": (*lead, m, 1), "aux": (*lead, m, n), "c": (*lead, m, n), "scalar": ()}
    a, b = drawn(rng, *lead, m, k), drawn(rng, *lead, n, k).swapaxes(-1, -2)
    more = {name: drawn(rng, *shapes[kind], dtype=dtype) for name, kind in case.operands.items()}
    return a, b * np.asarray(k**-0.5 * 2, BF16), more


def check(case: Case, a: Any, b: Any, more: dict[str, Any], backend: Any, dtype: np.dtype = BF16) -> None:
    x, tree = wide(a) @ wide(b), case.tree()
    want = case.meaning(x, **{name: wide(y) for name, y in more.items()})
    fixed = {r.name: r.dtype.numpy for r in tree.graph().results if r.dtype is not None}
    outs = {
        name: np.full(np.shape(y), np.nan, fixed.get(name, dtype) if np.ndim(y) == x.ndim else FP32)
        for name, y in want.items()
    }
    out = outs if len(outs) > 1 else next(iter(outs.values()))
    gemmsmith.gemm(a, b, epilogue=tree, operands=more, out=out, out_dtype=dtype, backend=backend)
    for name, y in want.items():
        close(outs[name], y, backend=backend, terms=1 if np.ndim(y) == x.ndim else x.size)


@pytest.mark.parametrize("problem", PROBLEMS[1:], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_tree(name: str, problem: tuple[int, int, int, int], rng: np.random.Generator) -> None:
    check(CASES[name], *inputs(CASES[name], *problem, rng), "reference")


@pytest.mark.parametrize("problem", PROBLEMS[:2], ids=str)
@pytest.mark.parametrize("name", ["linear_combination", "store_aux", "scalar_maximum", "diamond", "backward",
                                  "softmax", "everything"])  # fmt: skip
def test_simulated(name: str, problem: tuple[int, int, int, int], rng: np.random.Generator) -> None:
    check(CASES[name], *inputs(CASES[name], *problem, rng), "sim")


@pytest.mark.parametrize("backend", ["reference", "sim"])
@pytest.mark.parametrize("name", ["linear_combination", "diamond", "norm", "scalar_plus", "everything"])
def test_shared_by_a_batch(name: str, backend: str, rng: np.random.Generator) -> None:
    """B and the operands are shared; a scalar is each GEMM's own."""
    case = CASES[name]
    a = inputs(case, 40, 24, 16, 3, rng)[0]
    _, b, more = inputs(case, 40, 24, 16, 1, rng)
    more |= {key: drawn(rng, 3, 1, 1) for key, kind in case.operands.items() if kind == "scalar"}
    check(case, a, b, more, backend)


@pytest.mark.parametrize("d", [BF16, FP16, FP32])
@pytest.mark.parametrize("c", [BF16, FP16, FP32])
def test_mixed_dtypes(c: np.dtype, d: np.dtype, rng: np.random.Generator) -> None:
    case = CASES["diamond"]
    check(case, *inputs(case, *PROBLEMS[1], rng, dtype=c), "reference", d)


def test_the_same_kernel_as_a_function(rng: np.random.Generator) -> None:
    a, b, more = inputs(CASES["diamond"], *PROBLEMS[0], rng)
    sources = {gemmsmith.plan(a, b, epilogue=f, operands=more).source for f in (diamond(), diamond_as_a_function)}
    assert len(sources) == 1


ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_permuted(backend: Any, order: tuple[int, int, int], rng: np.random.Generator) -> None:
    """D and the other outputs, (batch, M, N), have another order in memory."""
    case = CASES["forward"]
    a, b, more = inputs(case, 40, 24, 16, 3, rng)
    want = case.meaning(wide(a) @ wide(b), **{name: wide(x) for name, x in more.items()})
    stored = {name: np.full([y.shape[i] for i in order], np.nan, BF16) for name, y in want.items()}
    out = {name: y.transpose(np.argsort(order)) for name, y in stored.items()}
    gemmsmith.gemm(a, b, epilogue=case.tree(), operands=more, out=out, backend=backend)
    for name, y in want.items():
        close(stored[name], y.transpose(order), backend=backend)


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_heads(backend: Any, rng: np.random.Generator) -> None:
    """Rows of (batch, token), columns of (head, dim), stored as (batch, head, token, dim): one GEMM per batch."""
    batch, tokens, heads, dim, k = 2, 24, 3, 16, 40
    x, w, bias = drawn(rng, batch, tokens, k), drawn(rng, k, heads * dim), drawn(rng, heads * dim)
    out = np.full((batch, heads, tokens, dim), np.nan, BF16)
    weights, biases = w.reshape(k, heads, dim).transpose(1, 0, 2), bias.reshape(heads, 1, dim)
    for i in range(batch):
        tree = binary("plus", AccFetch(), RowBroadcast("bias"))
        gemmsmith.gemm(x[i], weights, epilogue=tree, bias=biases, out=out[i], backend=backend)
    want = (wide(x) @ wide(w) + wide(bias)).reshape(batch, tokens, heads, dim).transpose(0, 2, 1, 3)
    close(out, want, backend=backend)
