"""Ready-made epilogues: those of CUTLASS's epilogue/fusion/operations.hpp for Hopper, and others by common names.

Each factory returns an ordinary function of the accumulator and named operands, which works in gemmsmith.gemm(...,
epilogue=...) and on torch tensors. The kind of an operand follows from its shape: the same function takes a bias with
one value per column, (N,), which CUTLASS calls PerCol, and one per row, (M, 1), PerRow. Scalars may be numbers or 0-d
tensors. `NAMED_FUSIONS` maps CUTLASS's names to these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from numbers import Real
from typing import Any, NamedTuple

from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.scalars import as_bools
from gemmsmith.graph.frontend.interleave import deinterleave
from gemmsmith.graph.frontend.values import Traced, is_compile_proxy, quantize, top_k_softmax
from gemmsmith.graph.functions import FUNCTIONS

EpilogueFunction = Callable[..., Any]

# -- activations ------------------------------------------------------------------------------------------------------


def _method(name: str, **arguments: Any) -> EpilogueFunction:
    """Return a function that calls the method `name` of its argument with `arguments`.

    Tensors that lack the method are passed to the function of torch.nn.functional of that name.
    """

    def call(x: Any) -> Any:
        if hasattr(x, name):
            return getattr(x, name)(**arguments)
        from torch.nn import functional

        return getattr(functional, name)(x, **arguments)

    return call


class Activation(NamedTuple):
    """An activation: `forward(z)`, and `derivative(dy, z)` = dy * forward'(z)."""

    forward: EpilogueFunction
    derivative: EpilogueFunction


def _activation(name: str, forward: EpilogueFunction | None = None, **parameters: float) -> Activation:
    """Return the activation with the gradient of the record FUNCTIONS[name].

    `forward`: the function; None: the method `name` with the arguments `parameters`. The record has further inputs for
    these, in the same order, and its gradient is then a tuple, of which the first one is that of z.
    """
    forward, rule = forward or _method(name, **parameters), FUNCTIONS[name].gradient
    assert callable(rule)

    def derivative(dy: Any, z: Any) -> Any:
        grads = rule(dy, forward(z), z, *parameters.values())
        return grads[0] if parameters else grads

    return Activation(forward, derivative)


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(lambda z: z, lambda dy, z: dy),
    "relu": _activation("relu"),  # Nair and Hinton, ICML 2010; the derivative at 0 is 0, as in torch
    "leaky_relu": _activation("leaky_relu", negative_slope=0.01),  # Maas, Hannun and Ng, ICML 2013
    "elu": _activation("elu", alpha=1.0),  # Clevert, Unterthiner and Hochreiter, ICLR 2016
    "gelu": _activation("gelu"),  # Hendrycks and Gimpel, arXiv:1606.08415, by erf
    # by tanh (same source); CUTLASS's GELU_taylor and dGELU
    "gelu_tanh": _activation("gelu_tanh", _method("gelu", approximate="tanh")),
    "silu": _activation("silu"),  # Elfwing, Uchibe and Doya, Neural Networks 107, 2018; swish
    "sigmoid": _activation("sigmoid"),
    "tanh": _activation("tanh"),
    "hardswish": _activation("hardswish"),  # Howard et al., MobileNetV3, ICCV 2019
    "mish": _activation("mish"),  # Misra, BMVC 2020
    "softplus": _activation("softplus"),  # Dugas et al., NIPS 2000
}


def resolve_activation(activation: str | EpilogueFunction | None) -> EpilogueFunction:
    """Return the function of an activation's name (None: the identity); a function is returned as it is."""
    return activation if callable(activation) else _get_activation(activation or "identity").forward


def _resolve_derivative(activation: str | EpilogueFunction) -> EpilogueFunction:
    return activation if callable(activation) else _get_activation(activation).derivative


def _get_activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise EpilogueError(f"activation: got {name!r}; use a function or one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _cast(x: Any, dtype: Any) -> Any:
    return x if dtype is None else x.to(dtype)


def _source_unless_beta_zero(c: Any, beta: Any) -> Any:
    """Return c, or zeros if beta is the number 0: then even a NaN in c has no effect, as in BLAS and CUTLASS.

    A beta that is a traced number is compared with 0 in the kernel. A beta in device memory is not: c is always used.
    """
    if not isinstance(beta, Real):
        return c.where(beta != 0, 0.0) if getattr(beta, "is_number", False) is True else c
    if beta:
        return c
    return c.where(False, 0.0) if isinstance(c, Traced) or is_compile_proxy(c) else c.new_zeros(c.shape)


# -- CUTLASS's --------------------------------------------------------------------------------------------------------


def scaled_acc(activation: str | EpilogueFunction | None = None) -> EpilogueFunction:
    """Return the epilogue activation(alpha * acc)."""
    act = resolve_activation(activation)
    return lambda acc, alpha=1.0: act(acc * alpha)


def linear_combination(activation: str | EpilogueFunction | None = None) -> EpilogueFunction:
    """Return the epilogue activation(alpha * acc + beta * c)."""
    act = resolve_activation(activation)
    return lambda acc, c, alpha=1.0, beta=1.0: act(acc * alpha + _source_unless_beta_zero(c, beta) * beta)


def linear_combination_bias(
    activation: str | EpilogueFunction | None = None, aux: bool = False, aux_dtype: Any = None
) -> EpilogueFunction:
    """Return the epilogue activation(z), z = alpha * acc + beta * c + bias.

    With `aux` it returns (activation(z), z), with z stored as aux_dtype.

    alpha, beta and bias may be scalars, rows or columns.
    """
    (aux,), act = as_bools(aux=aux), resolve_activation(activation)

    def epilogue(acc: Any, c: Any, bias: Any, alpha: Any = 1.0, beta: Any = 1.0) -> Any:
        z = acc * alpha + _source_unless_beta_zero(c, beta) * beta + bias
        return (act(z), _cast(z, aux_dtype)) if aux else act(z)

    return epilogue


def residual_add_bias(activation: str | EpilogueFunction | None = None) -> EpilogueFunction:
    """Return the epilogue activation(alpha * acc + bias) + beta * c."""
    act = resolve_activation(activation)
    return lambda acc, c, bias, alpha=1.0, beta=1.0: act(acc * alpha + bias) + _source_unless_beta_zero(c, beta) * beta


def linear_combination_top_k_softmax(k: int) -> EpilogueFunction:
    """Return the epilogue top_k_softmax(alpha * acc + beta * c, k). N must fit one tile."""
    return lambda acc, c, alpha=1.0, beta=1.0: top_k_softmax(acc * alpha + _source_unless_beta_zero(c, beta) * beta, k)


def scaled_linear_combination_bias(activation: str | EpilogueFunction | None = None) -> EpilogueFunction:
    """Return the fp8 epilogue scale_d * activation(z), z = scale_a * scale_b * alpha * acc + scale_c * beta * c + bias.

    A scale that is not given is 1. CUTLASS ignores scale_d if D is not fp8; here it is applied if it is given.
    """
    act = resolve_activation(activation)

    def epilogue(
        acc: Any, c: Any, bias: Any, alpha: Any = 1.0, beta: Any = 1.0,
        scale_a: Any = 1.0, scale_b: Any = 1.0, scale_c: Any = 1.0, scale_d: Any = 1.0,
    ) -> Any:  # fmt: skip
        return (
            act(acc * (scale_a * scale_b * alpha) + _source_unless_beta_zero(c, beta) * (scale_c * beta) + bias)
            * scale_d
        )

    return epilogue


def scaled_linear_combination_bias_amax_aux(
    activation: str | EpilogueFunction | None = None, aux_dtype: Any = None
) -> EpilogueFunction:
    """Return the fp8 epilogue (scale_d * y, scale_aux * z, max |y|, max |z|), with scale_aux * z stored as aux_dtype.

    y = activation(z), z as in `scaled_linear_combination_bias`.
    """
    act = resolve_activation(activation)

    def epilogue(
        acc: Any, c: Any, bias: Any, alpha: Any = 1.0, beta: Any = 1.0,
        scale_a: Any = 1.0, scale_b: Any = 1.0, scale_c: Any = 1.0, scale_d: Any = 1.0, scale_aux: Any = 1.0,
    ) -> Any:  # fmt: skip
        z = acc * (scale_a * scale_b * alpha) + _source_unless_beta_zero(c, beta) * (scale_c * beta) + bias
        y = act(z)
        return y * scale_d, _cast(z * scale_aux, aux_dtype), y.abs().max(), z.abs().max()

    return epilogue


def linear_combination_gradient(activation: str | EpilogueFunction, *, bias_gradient: bool = False) -> EpilogueFunction:
    """Return the epilogue dz = (alpha * acc + beta * c) * activation'(aux), aux the forward pass's pre-activation.

    With `bias_gradient` it returns (dz, row sums of dz), the latter the gradient of a bias with one value per row.
    """
    (bias_gradient,), d_act = as_bools(bias_gradient=bias_gradient), _resolve_derivative(activation)

    def epilogue(acc: Any, c: Any, aux: Any, alpha: Any = 1.0, beta: Any = 1.0) -> Any:
        dz = d_act(acc * alpha + _source_unless_beta_zero(c, beta) * beta, aux)
        return (dz, dz.sum(-1)) if bias_gradient else dz

    return epilogue


# -- by plain names ---------------------------------------------------------------------------------------------------


def bias_activation(activation: str | EpilogueFunction | None = None) -> EpilogueFunction:
    """Return the epilogue activation(acc + bias)."""
    act = resolve_activation(activation)
    return lambda acc, bias: act(acc + bias)


def residual_pre_activation(activation: str | EpilogueFunction | None = None) -> EpilogueFunction:
    """Return the epilogue activation(acc + bias + residual)."""
    act = resolve_activation(activation)
    return lambda acc, residual, bias=0.0: act(acc + bias + residual)


def residual_post_activation(activation: str | EpilogueFunction | None = None) -> EpilogueFunction:
    """Return the epilogue activation(acc + bias) + residual."""
    act = resolve_activation(activation)
    return lambda acc, residual, bias=0.0: act(acc + bias) + residual


def gated(activation: str | EpilogueFunction | None = None) -> EpilogueFunction:
    """Return the epilogue activation(gate) * up, (M, N/2), of acc + bias with columns packed by `interleave`.

    Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
    """
    act = resolve_activation(activation)

    def epilogue(acc: Any, bias: Any = 0.0) -> Any:
        gate, up = deinterleave(acc + bias)
        return act(gate) * up

    return epilogue


def activation_gradient(activation: str | EpilogueFunction, *, bias_gradient: bool = False) -> EpilogueFunction:
    """Return the epilogue dz = acc * activation'(z), z a matrix; with `bias_gradient`, (dz, column sums of dz)."""
    (bias_gradient,), d_act = as_bools(bias_gradient=bias_gradient), _resolve_derivative(activation)

    def epilogue(acc: Any, z: Any) -> Any:
        dz = d_act(acc, z)
        return (dz, dz.sum(-2)) if bias_gradient else dz

    return epilogue


def amax(acc: Any) -> Any:
    """Return (acc, max |acc|)."""
    return acc, acc.abs().max()


def quantized(
    activation: str | EpilogueFunction | None = None, dtype: Any = None, amax: bool = False
) -> EpilogueFunction:
    """Return the epilogue scale_d * y, y = activation(acc + bias), as dtype (None: D's); with `amax`, also max |y|."""
    (amax,), act = as_bools(amax=amax), resolve_activation(activation)

    def epilogue(acc: Any, bias: Any = 0.0, scale_d: Any = 1.0) -> Any:
        y = act(acc + bias)
        d = _cast(y * scale_d, dtype)
        return (d, y.abs().max()) if amax else d

    return epilogue


def block_quantized(epilogue: EpilogueFunction, dtype: Any = "fp8_e4m3", block: int = 128) -> EpilogueFunction:
    """Return `epilogue` with D quantized to fp8, with one scale per row and `block` columns.

    The scales, (M, N / block), follow D in the results.
    """

    @wraps(epilogue)
    def with_scales(*args: Any, **operands: Any) -> Any:
        results = epilogue(*args, **operands)
        d, *others = results if isinstance(results, (tuple, list)) else (results,)
        return (*quantize(d, dtype, block), *others)

    return with_scales


_NAMED_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
"""Activations whose epilogues are functions of this module."""
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
"""Gated linear units -> the activation of their gate."""
bias_relu, bias_gelu, bias_gelu_tanh, bias_silu = map(bias_activation, _NAMED_ACTIVATIONS)
bias_residual = residual_pre_activation()
swiglu, geglu, geglu_tanh, reglu = map(gated, GATED.values())
drelu, dgelu, dgelu_tanh, dsilu = map(activation_gradient, _NAMED_ACTIVATIONS)
drelu_dbias, dgelu_dbias, dgelu_tanh_dbias, dsilu_dbias = (
    activation_gradient(name, bias_gradient=True) for name in _NAMED_ACTIVATIONS
)

# -- the table --------------------------------------------------------------------------------------------------------


class NamedFusion(NamedTuple):
    """A named fusion: `make(...)` returns the epilogue function; `operands` maps the names of its operands to kinds.

    A kind is "scalar", "row" (N,), "column" (M, 1) or "matrix" (M, N).
    """

    make: Callable[..., EpilogueFunction]
    operands: Mapping[str, str]


_SOURCE = {"c": "matrix", "alpha": "scalar", "beta": "scalar"}
_SCALES = {f"scale_{x}": "scalar" for x in "abcd"}
_AUX = {**_SOURCE, "aux": "matrix"}
_BIAS = {"bias": "row"}
_RESIDUAL = {"residual": "matrix", **_BIAS}
_Z = {"z": "matrix"}


def _vector_fusions(vector_kind: str, shape_kind: str) -> dict[str, NamedFusion]:
    """Return CUTLASS's fusions with vectors, by name: with `vector_kind` "PerRow" or "PerCol".

    `shape_kind`: the kind of their vectors, "column" for PerRow (one value per row), "row" for PerCol.
    """
    biased = {**_SOURCE, "bias": shape_kind}
    scaled = {**biased, **_SCALES}
    return {
        f"LinComb{vector_kind}Bias": NamedFusion(partial(linear_combination_bias, None), biased),
        f"LinComb{vector_kind}BiasEltAct": NamedFusion(linear_combination_bias, biased),
        f"LinComb{vector_kind}BiasEltActAux": NamedFusion(partial(linear_combination_bias, aux=True), biased),
        f"{vector_kind}LinComb{vector_kind}BiasEltAct": NamedFusion(
            linear_combination_bias, {**biased, "alpha": shape_kind, "beta": shape_kind}
        ),
        f"ScaledLinComb{vector_kind}BiasEltAct": NamedFusion(scaled_linear_combination_bias, scaled),
        f"ScaledLinComb{vector_kind}BiasEltActAmaxAux": NamedFusion(
            scaled_linear_combination_bias_amax_aux, {**scaled, "scale_aux": "scalar"}
        ),
    }


NAMED_FUSIONS: dict[str, NamedFusion] = {
    "ScaledAcc": NamedFusion(partial(scaled_acc, None), {"alpha": "scalar"}),
    "LinearCombination": NamedFusion(partial(linear_combination, None), _SOURCE),
    "LinCombEltAct": NamedFusion(linear_combination, _SOURCE),
    "LinCombTopKSoftmaxCol": NamedFusion(linear_combination_top_k_softmax, _SOURCE),
    **_vector_fusions("PerRow", "column"),
    **_vector_fusions("PerCol", "row"),
    "PerColResAddPerColBiasEltAct": NamedFusion(
        residual_add_bias, {"c": "matrix", **dict.fromkeys(("alpha", "beta", "bias"), "row")}
    ),
    "LinCombDeEltAct": NamedFusion(linear_combination_gradient, _AUX),
    "LinCombDeEltActDePerRowBias": NamedFusion(partial(linear_combination_gradient, bias_gradient=True), _AUX),
    "bias_residual": NamedFusion(partial(residual_pre_activation, None), _RESIDUAL),
    "residual_pre_activation": NamedFusion(residual_pre_activation, _RESIDUAL),
    "residual_post_activation": NamedFusion(residual_post_activation, _RESIDUAL),
    "amax": NamedFusion(lambda: amax, {}),
    "quantized": NamedFusion(quantized, {**_BIAS, "scale_d": "scalar"}),
    "block_quantized": NamedFusion(block_quantized, {}),
    **{f"bias_{name}": NamedFusion(partial(bias_activation, name), _BIAS) for name in _NAMED_ACTIVATIONS},
    **{glu: NamedFusion(partial(gated, name), _BIAS) for glu, name in GATED.items()},
    **{f"d{name}": NamedFusion(partial(activation_gradient, name), _Z) for name in _NAMED_ACTIVATIONS},
    **{
        f"d{name}_dbias": NamedFusion(partial(activation_gradient, name, bias_gradient=True), _Z)
        for name in _NAMED_ACTIVATIONS
    },
}
"""Fusions by CUTLASS's names, then by common names."""
