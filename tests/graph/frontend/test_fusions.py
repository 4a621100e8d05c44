"""Every ready-made epilogue against its formula in float64, and every derivative against differences and autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.graph.frontend.test_visitors import evaluated

import gemmsmith
from gemmsmith import Spec
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP32
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.frontend import fusions
from gemmsmith.graph.frontend.classify import classify
from gemmsmith.graph.frontend.fusions import ACTIVATIONS, NAMED_FUSIONS, EpilogueFunction
from gemmsmith.graph.frontend.interleave import deinterleave
from gemmsmith.graph.frontend.tracer import trace

M, N = 6, 32
SHAPES = {"scalar": (), "row": (N,), "column": (M, 1), "matrix": (M, N)}
Array = np.ndarray[Any, Any]


def normal(*shape: int) -> Array:
    return np.random.default_rng().standard_normal(shape)


def traced(epilogue: EpilogueFunction, **operands: Any) -> EpilogueGraph:
    kinds = {name: (classify(name, np.shape(x), (M, N)), FP32) for name, x in operands.items()}
    return trace(epilogue, (M, N), kinds)


def run(epilogue: EpilogueFunction, acc: Array, **operands: Any) -> list[Array]:
    return list(evaluated(traced(epilogue, **operands), acc, operands).values())


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def d_silu(x: Array) -> Array:
    return (silu(x + 1e-6) - silu(x - 1e-6)) / 2e-6


def magnitude(x: Array) -> Array:
    return np.abs(x).max()


# acc and operands -> results
Formula = Callable[..., list[Array]]


def bias(acc: Array, c: Array, bias: Array, alpha: Array, beta: Array) -> Array:
    return alpha * acc + beta * c + bias


def scaled(acc: Array, c: Array, bias: Array, alpha: Array, beta: Array, **s: Array) -> Array:
    return s["scale_a"] * s["scale_b"] * alpha * acc + s["scale_c"] * beta * c + bias


def amax_aux(**x: Array) -> list[Array]:
    z = scaled(**x)
    return [x["scale_d"] * silu(z), x["scale_aux"] * z, magnitude(silu(z)), magnitude(z)]


def gradient(acc: Array, c: Array, aux: Array, alpha: Array, beta: Array) -> Array:
    return (alpha * acc + beta * c) * d_silu(aux)


def both(per: str) -> dict[str, tuple[tuple[str, ...], Formula]]:
    return {
        f"LinComb{per}Bias": ((), lambda **x: [bias(**x)]),
        f"LinComb{per}BiasEltAct": (("silu",), lambda **x: [silu(bias(**x))]),
        f"LinComb{per}BiasEltActAux": (("silu",), lambda **x: [silu(bias(**x)), bias(**x)]),
        f"{per}LinComb{per}BiasEltAct": (("silu",), lambda **x: [silu(bias(**x))]),
        f"ScaledLinComb{per}BiasEltAct": (("silu",), lambda **x: [x["scale_d"] * silu(scaled(**x))]),
        f"ScaledLinComb{per}BiasEltActAmaxAux": (("silu",), amax_aux),
    }


FORMULAS: dict[str, tuple[tuple[str, ...], Formula]] = {
    "ScaledAcc": ((), lambda acc, alpha: [alpha * acc]),
    "LinearCombination": ((), lambda acc, c, alpha, beta: [alpha * acc + beta * c]),
    "LinCombEltAct": (("silu",), lambda acc, c, alpha, beta: [silu(alpha * acc + beta * c)]),
    **both("PerRow"),
    **both("PerCol"),
    "PerColResAddPerColBiasEltAct": (
        ("silu",), lambda acc, c, bias, alpha, beta: [silu(alpha * acc + bias) + beta * c]
    ),
    "LinCombDeEltAct": (("silu",), lambda **x: [gradient(**x)]),
    "LinCombDeEltActDePerRowBias": (("silu",), lambda **x: [gradient(**x), gradient(**x).sum(1)]),
    "bias_residual": ((), lambda acc, bias, residual: [acc + bias + residual]),
    "residual_pre_activation": (("silu",), lambda acc, bias, residual: [silu(acc + bias + residual)]),
    "residual_post_activation": (("silu",), lambda acc, bias, residual: [silu(acc + bias) + residual]),
    "amax": ((), lambda acc: [acc, magnitude(acc)]),
    "quantized": (("silu",), lambda acc, bias, scale_d: [scale_d * silu(acc + bias)]),
    "bias_silu": ((), lambda acc, bias: [silu(acc + bias)]),
    "bias_relu": ((), lambda acc, bias: [np.maximum(acc + bias, 0)]),
    "dsilu": ((), lambda acc, z: [acc * d_silu(z)]),
    "dsilu_dbias": ((), lambda acc, z: [acc * d_silu(z), (acc * d_silu(z)).sum(0)]),
    "drelu": ((), lambda acc, z: [acc * (z > 0)]),
    "drelu_dbias": ((), lambda acc, z: [acc * (z > 0), (acc * (z > 0)).sum(0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_operands_and_results(name: str) -> None:
    """Operands of the kinds that the table says give the formula's results."""
    fusion, (choices, formula) = NAMED_FUSIONS[name], FORMULAS[name]
    acc, operands = normal(M, N), {x: normal(*SHAPES[kind]) for x, kind in fusion.operands.items()}
    got, expected = run(fusion.make(*choices), acc, **operands), formula(acc=acc, **operands)
    for x, y in zip(got, expected, strict=True):
        assert np.shape(x) == np.shape(y)
        np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", sorted(NAMED_FUSIONS.keys() - {"block_quantized"}))
def test_every_fusion_is_traced_and_needs_no_scalar(name: str) -> None:
    """Scalars, which have defaults, may be left out; each is a parameter of the function."""
    fusion = NAMED_FUSIONS[name]
    parameters = inspect.signature(fusion.make).parameters
    chosen = {"activation": "gelu"} if "activation" in parameters else {"k": 2} if "k" in parameters else {}
    epilogue = fusion.make(**chosen)
    operands = {x: normal(*SHAPES[kind]) for x, kind in fusion.operands.items()}
    _, *taken = inspect.signature(epilogue).parameters
    assert set(taken) == operands.keys()
    results = [r.name for r in traced(epilogue, **operands).results]
    needed = {x: operands[x] for x, kind in fusion.operands.items() if kind != "scalar"}
    assert [r.name for r in traced(epilogue, **needed).results] == results


def test_names_of_operations_hpp() -> None:
    camel = {name for name in NAMED_FUSIONS if name[0].isupper()}
    assert len(camel) == 19


GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


@pytest.mark.parametrize("name", GATES)
def test_gated(name: str) -> None:
    acc, bias = normal(M, N), normal(N)
    gate, up = deinterleave(acc + bias)
    (act,) = run(fusions.bias_activation(GATES[name]), np.tile(gate, 2), bias=np.zeros(N))
    for epilogue in (getattr(fusions, name), NAMED_FUSIONS[name].make()):
        (got,) = run(epilogue, acc, bias=bias)
        np.testing.assert_allclose(got, act[:, : N // 2] * up, rtol=1e-12)


@pytest.mark.parametrize("name", ["drelu", "dgelu", "dgelu_tanh", "dsilu", "bias_relu", "bias_gelu", "bias_gelu_tanh"])
def test_functions_of_the_module_are_those_of_the_table(name: str) -> None:
    epilogue = NAMED_FUSIONS[name].make()
    acc, operands = normal(M, N), {x: normal(*SHAPES[kind]) for x, kind in NAMED_FUSIONS[name].operands.items()}
    np.testing.assert_array_equal(run(getattr(fusions, name), acc, **operands), run(epilogue, acc, **operands))


@given(st.sampled_from(sorted(ACTIVATIONS.keys() - {"identity"})), st.integers(0, 2**32))
def test_derivatives_are_those_of_the_functions(name: str, seed: int) -> None:
    """Central differences, in float64, away from kinks."""
    z, dy, h = np.random.default_rng(seed).uniform(-6, 6, (M, N)), normal(M, N), 1e-5
    z[np.abs(np.abs(z) % 3) < 1e-3] += 0.01
    act = fusions.scaled_acc(name)
    difference = (run(act, z + h)[0] - run(act, z - h)[0]) / (2 * h)
    for make in (fusions.activation_gradient, fusions.linear_combination_gradient):
        names = ("z",) if make is fusions.activation_gradient else ("aux", "c")
        operands = dict(zip(names, (z, np.zeros((M, N))), strict=False))
        (got,) = run(make(name), dy, **operands)
        np.testing.assert_allclose(got, dy * difference, atol=1e-7)


@pytest.mark.torch
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions_and_derivatives_on_tensors_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    z, dy = torch.randn(M, N, dtype=torch.float64, requires_grad=True), torch.randn(M, N, dtype=torch.float64)
    y = fusions.scaled_acc(name)(z)
    np.testing.assert_allclose(y.detach().numpy(), run(fusions.scaled_acc(name), z.detach().numpy())[0], atol=1e-12)
    y.backward(dy)
    dz, dbias = fusions.activation_gradient(name, bias_gradient=True)(dy, z.detach())
    np.testing.assert_allclose(dz, z.grad, atol=1e-12)
    np.testing.assert_allclose(dbias, z.grad.sum(0), atol=1e-12)


@pytest.mark.torch
def test_a_layer_and_its_gradient_on_tensors_of_torch() -> None:
    """aux of the forward fusion is what the backward fusion takes; SwiGLU takes halves, as they are, there."""
    torch = pytest.importorskip("torch")
    x, c = torch.randn(2, M, N, dtype=torch.float64)
    bias = torch.randn(M, 1, dtype=torch.float64, requires_grad=True)
    y, aux = fusions.linear_combination_bias("gelu_tanh", aux=True, aux_dtype=torch.float64)(x, c, bias, 0.5, 2.0)
    expected = torch.nn.functional.gelu(0.5 * x + 2 * c + bias, approximate="tanh")
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    gradient = NAMED_FUSIONS["LinCombDeEltActDePerRowBias"].make("gelu_tanh")
    _, dbias = gradient(dy, torch.zeros_like(dy), aux.detach())
    torch.testing.assert_close(dbias[:, None], bias.grad)
    gate, up = deinterleave(x)
    torch.testing.assert_close(fusions.swiglu(x), torch.nn.functional.silu(gate) * up)


def test_an_activation_may_be_a_function() -> None:
    acc = normal(M, N)
    np.testing.assert_allclose(run(fusions.scaled_acc(lambda x: 2 * x), acc)[0], 2 * acc)
    gradient = fusions.activation_gradient(lambda dy, z: dy * 3 * z * z)
    np.testing.assert_allclose(run(gradient, acc, z=acc)[0], 3 * acc**3)
    np.testing.assert_array_equal(run(fusions.scaled_acc(), acc)[0], acc)
    for make in (fusions.scaled_acc, fusions.activation_gradient):
        with pytest.raises(EpilogueError, match="activation: got 'geluu'; use a function or one of identity, relu"):
            make("geluu")


def test_dtypes_of_results() -> None:
    c = normal(M, N)
    aux = fusions.linear_combination_bias("relu", aux=True, aux_dtype="bf16")
    assert [r.dtype for r in traced(aux, c=c, bias=c).results] == [None, BF16]
    amax_aux = fusions.scaled_linear_combination_bias_amax_aux("relu", aux_dtype="fp8_e5m2")
    assert [r.dtype for r in traced(amax_aux, c=c, bias=c).results] == [None, E5M2, None, None]
    (d, largest) = traced(fusions.quantized("relu", "fp8_e4m3", amax=True), scale_d=np.float64(2)).results
    assert (d.dtype, largest.dtype) == (E4M3, None)


def test_block_quantized_puts_scales_behind_d() -> None:
    graph = traced(fusions.block_quantized(fusions.amax, block=16))
    assert [graph.nodes[r.node].op for r in graph.results] == ["quantize", "scale", "reduce"]
    assert graph.nodes[graph.results[0].node].attribute == (E4M3, 16)
    graph = traced(fusions.block_quantized(fusions.bias_gelu, "fp8_e5m2"), bias=normal(N))
    assert [graph.nodes[r.node].op for r in graph.results] == ["quantize", "scale"]
    assert graph.nodes[graph.results[0].node].attribute == (E5M2, 128)


def test_top_k_softmax() -> None:
    graph = traced(NAMED_FUSIONS["LinCombTopKSoftmaxCol"].make(4), c=normal(M, N))
    assert (graph.nodes[-1].op, graph.nodes[-1].attribute) == ("top_k_softmax", 4)
    assert graph.results[0].node == len(graph.nodes) - 1


@pytest.mark.parametrize("make", [
    lambda x: fusions.linear_combination_bias("relu", aux=x),
    lambda x: fusions.linear_combination_gradient("relu", bias_gradient=x),
    lambda x: fusions.activation_gradient("relu", bias_gradient=x),
    lambda x: fusions.quantized("relu", amax=x),
])  # fmt: skip
def test_a_switch_is_true_or_false(make: Any) -> None:
    for x in ("no", 1, None):
        with pytest.raises(ArgumentError, match="(aux|bias_gradient|amax): got .*; use True or False"):
            make(x)


@pytest.mark.parametrize(
    "name", [name for name, x in NAMED_FUSIONS.items() if "beta" in x.operands and "c" in x.operands]
)
def test_c_is_not_read_where_beta_is_the_number_0(name: str) -> None:
    """NaN in C does not come through; of a beta on the device it does."""
    from tests.epilogues import fusion

    epilogue, operands = fusion(name)
    n = 128 if name == "block_quantized" else N
    shapes = {"row": (n,), "column": (M, 1), "matrix": (M, n), "scalar": ()}
    a, b = normal(M, 8).astype(np.float32), normal(8, n).astype(np.float32)
    given: dict[str, Any] = {
        key: 0.5 if kind == "number" else np.abs(normal(*shapes[kind])).astype(np.float32)
        for key, kind in operands.items()
    }
    given["c"] = np.full((M, n), np.nan, np.float32)
    for beta, read in ((0.0, False), (-0.0, False), (0.5, True), (np.float32([0.0]), True)):
        given["beta"] = beta
        found = gemmsmith.gemm(a, b, epilogue=epilogue, operands=given)
        results = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
        assert any(np.isnan(np.asarray(x, np.float64)).any() for x in results) == read, beta


def test_a_constant_beta_of_0_leaves_c_out() -> None:
    epilogue = partial(fusions.linear_combination("relu"), beta=0)
    a = Spec((64, 64), "bf16")
    assert (
        gemmsmith.plan(a, a, epilogue=epilogue, c=a).source
        == gemmsmith.plan(a, a, epilogue=fusions.scaled_acc("relu")).source
    )
