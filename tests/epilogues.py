"""Epilogues that are tested end to end, in the simulator and on a GPU: one case for every kind of node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import gemmsmith
from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.core.graph import EpilogueGraph

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """An epilogue and what its operands are: number, scalar, row, column, matrix; with half_ for N / 2 columns; with a
    dtype behind a colon where it is not that of A and B."""

    function: Callable[..., Any]
    operands: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    whole_rows: int = 0
    """Columns that must lie in one tile: 0 for any."""


def residual_and_stats(acc: Any, residual: Any, scale: Any) -> Any:
    x = acc * scale + residual
    return x, x.square().sum(-1), x.abs().max()


def bce(acc: Any, bias: Any, labels: Any) -> Any:
    x = acc + bias
    return ((labels - 1) * x + x.sigmoid().clamp(1e-3, 1 - 1e-3).log()).sum()


def cross_entropy(acc: Any, labels: Any) -> Any:
    """Its loss is logsumexp - of_label, a value a row."""
    selected = labels.one_hot(acc.shape[-1])  # torch.nn.functional.one_hot, where there is torch
    return {"logsumexp": acc.logsumexp(-1), "of_label": (acc * selected).sum(-1), "chosen": acc.where(selected, 0)}


def _gated(activation: Callable[[Any], Any]) -> Callable[..., Any]:
    def gated(acc: Any) -> Any:
        gate, up = gemmsmith.deinterleave(acc)
        return activation(gate) * up

    return gated


def gated_everything(acc: Any, bias: Any, factor: Any, more: Any) -> Any:
    x = acc + bias
    gate, up = gemmsmith.deinterleave(x)
    h = gate.silu() * up * factor + more
    return {"h": h, "x": x, "rows": h.sum(-1), "columns": h.sum(-2)}


def interleaved(acc: Any, more: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    x = gemmsmith.interleave(gate.silu() * up + more, gate)
    return x, x.sum(-2)


def quantized(acc: Any) -> Any:
    return gemmsmith.quantize(acc * 0.5)


def gated_quantized(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gemmsmith.quantize(gate.silu() * up)


def best_of_row(acc: Any) -> Any:
    return gemmsmith.top_k_softmax(acc, min(3, acc.shape[-1]))


def integers(acc: Any, ids: Any, counts: Any, mask: Any, more: Any, on: Any, keep: Any) -> Any:
    x = (acc + ids * counts).where(mask & ~keep, more)
    return x, x.where(ids > on, -1.0), acc.where(mask, 0).sum(-1)


def everything(acc: Any, s: Any, t: Any, r: Any, c: Any, x: Any, y: Any) -> Any:
    z = acc * s + r * c - x
    return z.tanh() + t, (z * y).to("fp16"), z.amax(-2), z.mean(-1), z.logsumexp(-1)


def long(acc: Any, bias: Any, x: Any) -> Any:
    """Of so many instructions that a run-time loop computes its subtiles."""
    shifted, waves = acc + bias, x
    for i in (1, 2, 3, 4, 5, 6):
        waves = waves + (shifted * (i / 4)).cos()
    return waves, waves.sum(-1), shifted.max(-2)


CASES: dict[str, Case] = {
    "scale": Case(lambda acc, alpha: acc * alpha, {"alpha": "number"}),
    "device_scale": Case(lambda acc, alpha: acc * alpha, {"alpha": "scalar"}),
    "row": Case(lambda acc, bias: (acc + bias).relu(), {"bias": "row"}),
    "column": Case(lambda acc, bias: acc * bias, {"bias": "column"}),
    "matrix": Case(lambda acc, alpha, beta, c: alpha * acc + beta * c,
                   {"alpha": "number", "beta": "number", "c": "matrix"}),
    "two_matrices": Case(lambda acc, x, y: acc * x + y, {"x": "matrix", "y": "matrix"}),
    "bias_gelu": Case(lambda acc, bias: (acc + bias).gelu(approximate="tanh"), {"bias": "row"}),
    "aux": Case(lambda acc, bias: ((acc + bias).relu(), acc + bias), {"bias": "row"}),
    "backward": Case(lambda acc, aux: (acc.where(aux > 0, 0.0), acc.where(aux > 0, 0.0).sum(-2)), {"aux": "matrix"}),
    "stats": Case(residual_and_stats, {"residual": "matrix", "scale": "number"}),
    "reductions": Case(lambda acc: (acc, acc.sum(-1), acc.max(-2), acc.min(-1), acc.mean(), acc.logsumexp(-2))),
    "loss": Case(bce, {"bias": "column", "labels": "matrix"}),
    "cross_entropy": Case(cross_entropy, {"labels": "labels"}),
    "integers": Case(integers, {"ids": "column:int64", "counts": "row:int32", "mask": "matrix:bool",
                                "more": "matrix:int64", "on": "scalar:int64", "keep": "row:bool"}),
    "masked": Case(lambda acc, mask, more: ((acc + more) * mask, acc.where(mask, more)),
                   {"mask": "matrix:bool", "more": "matrix:int32"}),
    "small_reductions": Case(lambda acc: (acc, acc.sum(-1).half(), acc.max(-2).bfloat16(), acc.mean(dtype="fp16"))),
    "swiglu": Case(_gated(lambda x: x.silu()), gated=True),
    "geglu": Case(_gated(lambda x: x.gelu()), gated=True),
    "gated_everything": Case(gated_everything, {"bias": "row", "factor": "half_row", "more": "half_matrix"}, True),
    "interleaved": Case(interleaved, {"more": "half_matrix"}, True),
    "everything": Case(everything, {"s": "number", "t": "scalar", "r": "row", "c": "column", "x": "matrix",
                                    "y": "matrix"}),
    "long": Case(long, {"bias": "row", "x": "matrix"}),
    "fp8": Case(lambda acc, scale: (acc * scale).to("fp8_e4m3"), {"scale": "number"}),
    "quantized": Case(quantized, whole_rows=128),
    "gated_quantized": Case(gated_quantized, gated=True, whole_rows=256),
    "top_k_softmax": Case(best_of_row, whole_rows=-1),
}  # fmt: skip


def operands(case: Case, rng: np.random.Generator, m: int, n: int, dtype: DType, batch: int | None) -> dict[str, Any]:
    """The case's operands, random normal; those of a batched product are batched half of the time."""
    made: dict[str, Any] = {}
    for name, given in case.operands.items():
        kind, _, own = given.partition(":")
        width = n // 2 if kind.startswith("half_") else n
        shapes = {"scalar": (), "row": (width,), "column": (m, 1), "matrix": (m, width)}
        if kind == "labels":
            made[name] = np.where(rng.random((m, 1)) < 0.2, -100, rng.integers(max(n, 1), size=(m, 1)))
            continue
        if kind == "number":
            made[name] = float(rng.standard_normal())
            continue
        shape: tuple[int, ...] = shapes[kind.removeprefix("half_")]
        if batch is not None and rng.random() < 0.5:
            shape = (batch, *((1,) * (2 - len(shape))), *shape)
        if own:
            made[name] = rng.integers(-5, 6, shape).astype(own) if own != "bool" else rng.random(shape) < 0.7
        else:
            made[name] = rng.standard_normal(shape).astype(np.float32).astype(dtype.numpy)
    return made


def judge(graph: EpilogueGraph, actual: dict[str, Array], expected: dict[str, Array], product: Array) -> None:
    """Every element within its dtype's rounding, plus what fp32 and the coarse functions may lose at its scale."""
    scale = max(1.0, float(np.abs(product).max(initial=0)))
    for result in graph.results:
        x, y = np.asarray(actual[result.name]).astype(np.float64), expected[result.name]
        dtype = result.dtype or as_dtype(actual[result.name].dtype)
        assert x.shape == y.shape, (result.name, x.shape, y.shape)
        reduced = graph.nodes[result.node].op == "reduce"
        loss = 2.0**-11 if dtype.bits < 32 else 2.0**-15
        if reduced:  # a sum's error grows with its terms
            loss *= max(1.0, math.sqrt(product.size)) if graph.nodes[result.node].attribute[0] == "sum" else 1.0
        largest = max(scale, float(np.abs(y[np.isfinite(y)]).max(initial=0)))
        bound = (1.01 if dtype.bits >= 16 else 2.02) * dtype.roundoff * np.abs(y) + loss * largest
        if not dtype.is_integer:
            bound += 0.51 * float(ml_dtypes.finfo(dtype.numpy).smallest_subnormal)
        wrong = ~((np.abs(x - y) <= bound) | (x == y) | (np.isnan(x) & np.isnan(y)))  # the mean of nothing is NaN
        assert not wrong.any(), (
            f"{result.name} at {np.argwhere(wrong)[0]}: got {x[wrong].flat[0]}, want {y[wrong].flat[0]}"
            f" +- {np.broadcast_to(bound, y.shape)[wrong].flat[0]}; {wrong.sum()} of {wrong.size}"
        )


def columns_of(case: Case, n: int) -> int:
    """n made suitable: gated products come in groups of 16."""
    return max(16, n // 16 * 16) if case.gated else n


def fusion(name: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """A ready-made epilogue and what its operands are."""
    from gemmsmith.graph.frontend.fusions import NAMED_FUSIONS, bias_activation

    needs: dict[str, tuple[Any, ...]] = {
        "LinCombTopKSoftmaxCol": (2,), "LinCombDeEltAct": ("gelu",), "LinCombDeEltActDePerRowBias": ("silu",),
        "block_quantized": (bias_activation("silu"),),
    }  # fmt: skip
    kinds = {key: "number" if kind == "scalar" else kind for key, kind in NAMED_FUSIONS[name].operands.items()}
    more = {"bias": "row"} if name == "block_quantized" else {}
    return NAMED_FUSIONS[name].make(*needs.get(name, ())), {**kinds, **more}


POSITIVE = {"log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal", "pow"}


def function_graph(name: str) -> tuple[EpilogueGraph, Callable[[Array], list[Array]]]:
    """The function of the product, made positive where its domain is, and of constants; and its float64 inputs."""
    from gemmsmith.core.graph import Node, Result
    from gemmsmith.graph.functions import FUNCTIONS

    arity = FUNCTIONS[name].arity
    nodes = [Node("accumulator"), Node("constant", (), 0.25), Node("constant", (), 0.7), Node("abs", (0,)),
             Node("add", (3, 2)), Node("gt", (0, 1)), Node("mul", (0, 1)), Node("sigmoid", (0,))]  # fmt: skip
    x = 4 if name in POSITIVE else 6 if name in ("exp", "exp2", "expm1", "sin", "cos") else 0
    inputs: tuple[int, ...] = (x, 1, 2)[:arity]
    if name in ("and", "or", "not"):
        inputs = (5, 5)[:arity]
    if name == "where":
        inputs = (5, 0, 2)
    if name == "div":
        inputs = (1, 4)
    if name == "softplus_of_sigmoid":
        inputs = (0, 7)
    nodes.append(Node(name, inputs))

    def values(product: Array) -> list[Array]:
        buffers_: list[Any] = [product, np.float64(0.25), np.float64(0.7), np.abs(product), np.abs(product) + 0.7,
                           product > 0.25, product * 0.25, 1 / (1 + np.exp(-product))]  # fmt: skip
        return [buffers_[i] for i in inputs]

    return EpilogueGraph(tuple(nodes), (), (Result("out", len(nodes) - 1),)), values


def check_function(
    name: str, actual: Array, product: Array, output: str, fast_math: bool, domain: Callable[[Array], list[Array]]
) -> None:
    """Within the stated error of the function, what the accumulator's rounding may change, and the output's."""
    from gemmsmith.graph.functions import FUNCTIONS

    f = FUNCTIONS[name]
    with np.errstate(all="ignore"):
        expected = np.asarray(f.reference(*domain(product)), np.float64) * np.ones_like(product)
        nearby = [np.asarray(f.reference(*domain(product * (1 + s * 2e-6) + s * 2e-6)), np.float64) for s in (-1, 1)]
    slope = np.maximum(*(np.abs(x - expected) for x in nearby))
    loss = 2.0**-18 if fast_math else 2.0**-20
    bound = slope + loss * np.maximum(np.abs(expected), 1) + as_dtype(output).roundoff * 1.01 * np.abs(expected)
    if output == "bf16":
        bound = bound + 2.0**-11 * np.maximum(np.abs(product), 1)  # the coarse forms
    error = np.abs(np.asarray(actual).astype(np.float64) - expected)
    worst = np.unravel_index(int((error - bound).argmax()), error.shape)
    assert (error <= bound).all(), (
        f"{name}({product[worst]}): got {actual[worst]}, want {expected[worst]} +- {bound[worst]}"
    )


def judge_random(
    graph: EpilogueGraph, actual: dict[str, Array], expected: dict[str, Array], product: Array, given: Any
) -> None:
    """Functions may amplify what others lose, and jump: disturbed values show by how much."""
    from gemmsmith.backends.reference.epilogue import execute
    from gemmsmith.backends.reference.tolerances import tolerances

    dtypes = {name: as_dtype(x.dtype) for name, x in actual.items()}
    allowed = tolerances(graph, expected, dtypes, product.size, lambda x: execute(x, product, given), np.maximum)
    for name, y in expected.items():
        x = np.asarray(actual[name]).astype(np.float64)
        assert x.shape == y.shape
        error = np.abs(x - y)
        assert (error <= allowed[name]).all(), (name, (error - allowed[name]).max())
