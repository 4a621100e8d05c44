"""Ready-made epilogues: those of CUTLASS's epilogue/fusion/operations.hpp for Hopper, and others by common names.

Each factory gives an ordinary function of the accumulator and named operands, for gemmsmith.gemm(..., epilogue=...) as
well as for tensors of torch. What an operand is follows from its shape: the same function takes a bias of one value a
column, (N,), which CUTLASS calls PerCol, and of one a row, (M, 1), PerRow. Scalars may be numbers or 0-d tensors.
`FUSIONS` says which of CUTLASS's names is which function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Real
from typing import Any

from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.switches import switches
from gemmsmith.epilogue.frontend.gating import deinterleave
from gemmsmith.epilogue.frontend.values import Traced, is_recorded, quantize, top_k_softmax
from gemmsmith.epilogue.functions import FUNCTIONS

Epilogue = Callable[..., Any]

# -- activations ------------------------------------------------------------------------------------------------------


def _method(name: str, **arguments: Any) -> Epilogue:
    """A method of traced values; tensors of torch have some of them as functions only."""

    def call(x: Any) -> Any:
        if hasattr(x, name):
            return getattr(x, name)(**arguments)
        from torch.nn import functional

        return getattr(functional, name)(x, **arguments)

    return call


def _gradient(name: str, function: Epilogue, *parameters: float) -> Epilogue:
    """dy * function'(z), by the rule of the functions' table."""
    rule = FUNCTIONS[name].gradient
    assert rule

    def derivative(dy: Any, z: Any) -> Any:
        found = rule(dy, function(z), z, *parameters)
        return found[0] if parameters else found

    return derivative


@dataclass(frozen=True)
class Activation:
    """`function(z)`, `derivative(dy, z)` = dy * function'(z), and where the function is from."""

    function: Epilogue
    derivative: Epilogue
    source: str


def _known(function: Epilogue, source: str, name: str, *parameters: float) -> Activation:
    return Activation(function, _gradient(name, function, *parameters), source)


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(lambda z: z, lambda dy, z: dy, "none"),
    "relu": _known(_method("relu"), "Nair and Hinton, ICML 2010; the derivative at 0 is 0, as in torch", "relu"),
    "leaky_relu": _known(_method("leaky_relu", negative_slope=0.01), "Maas, Hannun and Ng, ICML 2013; slope 0.01",
                         "leaky_relu", 0.01),
    "elu": _known(_method("elu", alpha=1.0), "Clevert, Unterthiner and Hochreiter, ICLR 2016; alpha 1", "elu", 1.0),
    "gelu": _known(_method("gelu"), "Hendrycks and Gimpel, arXiv:1606.08415, by erf", "gelu"),
    "gelu_tanh": _known(_method("gelu", approximate="tanh"), "Hendrycks and Gimpel, arXiv:1606.08415, by tanh; "
                        "CUTLASS's GELU_taylor and dGELU", "gelu_tanh"),
    "silu": _known(_method("silu"), "Elfwing, Uchibe and Doya, Neural Networks 107, 2018; swish", "silu"),
    "sigmoid": _known(_method("sigmoid"), "the logistic function", "sigmoid"),
    "tanh": _known(_method("tanh"), "the hyperbolic tangent", "tanh"),
    "hardswish": _known(_method("hardswish"), "Howard et al., MobileNetV3, ICCV 2019", "hardswish"),
    "mish": _known(_method("mish"), "Misra, BMVC 2020", "mish"),
    "softplus": _known(_method("softplus"), "Dugas et al., NIPS 2000", "softplus"),
}  # fmt: skip


def function_of(which: str | Epilogue | None) -> Epilogue:
    """What an activation's name stands for; a function of z stands for itself, for a gradient one of (dy, z)."""
    return which if callable(which) else _named(which or "identity").function


def _derivative(which: str | Epilogue) -> Epilogue:
    return which if callable(which) else _named(which).derivative


def _named(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise EpilogueError(f"activation: got {name!r}; use a function or one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _stored(x: Any, dtype: Any) -> Any:
    return x if dtype is None else x.to(dtype)


def _source(c: Any, beta: Any) -> Any:
    """c, and zeros where beta is the number 0: what c holds does not come through then, as in BLAS and CUTLASS. Where
    beta is on the device c is read."""
    if not isinstance(beta, Real):
        return c.where(beta != 0, 0.0) if getattr(beta, "is_number", False) is True else c
    if beta:
        return c
    return c.where(False, 0.0) if isinstance(c, Traced) or is_recorded(c) else c.new_zeros(c.shape)


# -- CUTLASS's --------------------------------------------------------------------------------------------------------


def scaled_acc(activation: str | Epilogue | None = None) -> Epilogue:
    """activation(alpha * acc)."""
    act = function_of(activation)

    def epilogue(acc: Any, alpha: Any = 1.0) -> Any:
        return act(acc * alpha)

    return epilogue


def linear_combination(activation: str | Epilogue | None = None) -> Epilogue:
    """activation(alpha * acc + beta * c)."""
    act = function_of(activation)

    def epilogue(acc: Any, c: Any, alpha: Any = 1.0, beta: Any = 1.0) -> Any:
        return act(acc * alpha + _source(c, beta) * beta)

    return epilogue


def linear_combination_bias(
    activation: str | Epilogue | None = None, aux: bool = False, aux_dtype: Any = None
) -> Epilogue:
    """activation(z), z = alpha * acc + beta * c + bias; with `aux`, (activation(z), z), z stored as aux_dtype.

    alpha, beta and bias may be scalars, rows or columns.
    """
    (aux,), act = switches(aux=aux), function_of(activation)

    def epilogue(acc: Any, c: Any, bias: Any, alpha: Any = 1.0, beta: Any = 1.0) -> Any:
        z = acc * alpha + _source(c, beta) * beta + bias
        return (act(z), _stored(z, aux_dtype)) if aux else act(z)

    return epilogue


def residual_add_bias(activation: str | Epilogue | None = None) -> Epilogue:
    """activation(alpha * acc + bias) + beta * c."""
    act = function_of(activation)

    def epilogue(acc: Any, c: Any, bias: Any, alpha: Any = 1.0, beta: Any = 1.0) -> Any:
        return act(acc * alpha + bias) + _source(c, beta) * beta

    return epilogue


def linear_combination_top_k_softmax(k: int) -> Epilogue:
    """The softmax over the k largest elements of a row of alpha * acc + beta * c, 0 elsewhere; N fits a tile."""

    def epilogue(acc: Any, c: Any, alpha: Any = 1.0, beta: Any = 1.0) -> Any:
        return top_k_softmax(acc * alpha + _source(c, beta) * beta, k)

    return epilogue


def scaled_linear_combination_bias(activation: str | Epilogue | None = None) -> Epilogue:
    """For fp8: scale_d * activation(z), z = scale_a * scale_b * alpha * acc + scale_c * beta * c + bias.

    A scale that is not given is 1, as scale_d is where D is not fp8.
    """
    act = function_of(activation)

    def epilogue(
        acc: Any, c: Any, bias: Any, alpha: Any = 1.0, beta: Any = 1.0,
        scale_a: Any = 1.0, scale_b: Any = 1.0, scale_c: Any = 1.0, scale_d: Any = 1.0,
    ) -> Any:  # fmt: skip
        return act(acc * (scale_a * scale_b * alpha) + _source(c, beta) * (scale_c * beta) + bias) * scale_d

    return epilogue


def scaled_linear_combination_bias_amax_aux(
    activation: str | Epilogue | None = None, aux_dtype: Any = None
) -> Epilogue:
    """For fp8: (scale_d * y, scale_aux * z stored as aux_dtype, the largest |y|, the largest |z|).

    y = activation(z), z as in `scaled_linear_combination_bias`.
    """
    act = function_of(activation)

    def epilogue(
        acc: Any, c: Any, bias: Any, alpha: Any = 1.0, beta: Any = 1.0,
        scale_a: Any = 1.0, scale_b: Any = 1.0, scale_c: Any = 1.0, scale_d: Any = 1.0, scale_aux: Any = 1.0,
    ) -> Any:  # fmt: skip
        z = acc * (scale_a * scale_b * alpha) + _source(c, beta) * (scale_c * beta) + bias
        y = act(z)
        return y * scale_d, _stored(z * scale_aux, aux_dtype), y.abs().max(), z.abs().max()

    return epilogue


def linear_combination_gradient(activation: str | Epilogue, *, bias_gradient: bool = False) -> Epilogue:
    """dz = (alpha * acc + beta * c) * activation'(aux), aux being the pre-activation that the forward pass stored.

    With `bias_gradient`, (dz, its sums over each row): the gradient of a bias of one value a row.
    """
    (bias_gradient,), d_act = switches(bias_gradient=bias_gradient), _derivative(activation)

    def epilogue(acc: Any, c: Any, aux: Any, alpha: Any = 1.0, beta: Any = 1.0) -> Any:
        dz = d_act(acc * alpha + _source(c, beta) * beta, aux)
        return (dz, dz.sum(-1)) if bias_gradient else dz

    return epilogue


# -- by plain names ---------------------------------------------------------------------------------------------------


def bias_activation(activation: str | Epilogue | None = None) -> Epilogue:
    """activation(acc + bias)."""
    act = function_of(activation)

    def epilogue(acc: Any, bias: Any) -> Any:
        return act(acc + bias)

    return epilogue


def residual_before(activation: str | Epilogue | None = None) -> Epilogue:
    """activation(acc + bias + residual)."""
    act = function_of(activation)

    def epilogue(acc: Any, residual: Any, bias: Any = 0.0) -> Any:
        return act(acc + bias + residual)

    return epilogue


def residual_after(activation: str | Epilogue | None = None) -> Epilogue:
    """activation(acc + bias) + residual."""
    act = function_of(activation)

    def epilogue(acc: Any, residual: Any, bias: Any = 0.0) -> Any:
        return act(acc + bias) + residual

    return epilogue


def gated(activation: str | Epilogue | None = None) -> Epilogue:
    """activation(gate) * up, (M, N/2), of acc + bias with columns packed by `interleave`.

    Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
    """
    act = function_of(activation)

    def epilogue(acc: Any, bias: Any = 0.0) -> Any:
        gate, up = deinterleave(acc + bias)
        return act(gate) * up

    return epilogue


def activation_gradient(activation: str | Epilogue, *, bias_gradient: bool = False) -> Epilogue:
    """dz = acc * activation'(z), z a matrix; with `bias_gradient`, (dz, its sums over each column)."""
    (bias_gradient,), d_act = switches(bias_gradient=bias_gradient), _derivative(activation)

    def epilogue(acc: Any, z: Any) -> Any:
        dz = d_act(acc, z)
        return (dz, dz.sum(-2)) if bias_gradient else dz

    return epilogue


def amax(acc: Any) -> Any:
    """(acc, the largest |acc|)."""
    return acc, acc.abs().max()


def quantized(activation: str | Epilogue | None = None, dtype: Any = None, amax: bool = False) -> Epilogue:
    """scale_d * y, y = activation(acc + bias), as dtype (None: as the output's); with `amax`, also the largest |y|."""
    (amax,), act = switches(amax=amax), function_of(activation)

    def epilogue(acc: Any, bias: Any = 0.0, scale_d: Any = 1.0) -> Any:
        y = act(acc + bias)
        d = _stored(y * scale_d, dtype)
        return (d, y.abs().max()) if amax else d

    return epilogue


def block_quantized(epilogue: Epilogue, dtype: Any = "fp8_e4m3", block: int = 128) -> Epilogue:
    """`epilogue` with D in fp8 over one scale a row and `block` columns; the scales, (M, N / block), follow D."""

    @wraps(epilogue)
    def with_scales(*args: Any, **operands: Any) -> Any:
        results = epilogue(*args, **operands)
        d, *others = results if isinstance(results, (tuple, list)) else (results,)
        return (*quantize(d, dtype, block), *others)

    return with_scales


_COMMON = ("relu", "gelu", "gelu_tanh", "silu")
"""Activations whose epilogues have names of their own."""
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
"""Gated units -> the activation of their gate."""
bias_relu, bias_gelu, bias_gelu_tanh, bias_silu = map(bias_activation, _COMMON)
bias_residual = residual_before()
swiglu, geglu, geglu_tanh, reglu = map(gated, GATED.values())
drelu, dgelu, dgelu_tanh, dsilu = map(activation_gradient, _COMMON)
drelu_dbias, dgelu_dbias, dgelu_tanh_dbias, dsilu_dbias = (
    activation_gradient(name, bias_gradient=True) for name in _COMMON
)

# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fusion:
    """`make(...)` gives the epilogue function; operands' and results' names say what each is.

    A kind is "scalar", "row" (N,), "column" (M, 1), "matrix" (M, N) or "half" (M, N/2); a reduced column is (M,).
    """

    make: Callable[..., Epilogue]
    meaning: str
    operands: Mapping[str, str]
    results: Mapping[str, str]


_SOURCE = {"c": "matrix", "alpha": "scalar", "beta": "scalar"}
_SCALES = {f"scale_{x}": "scalar" for x in "abcd"}
_BIAS, _RESIDUAL, _Z = {"bias": "row"}, {"residual": "matrix", "bias": "row"}, {"z": "matrix"}
_D, _D_AUX, _D_AMAX = {"D": "matrix"}, {"D": "matrix", "aux": "matrix"}, {"D": "matrix", "amax_d": "scalar"}


def _per(per: str, kind: str) -> dict[str, Fusion]:
    """The names with PerRow, whose vectors are columns, or with PerCol, whose vectors are rows."""
    bias = {**_SOURCE, "bias": kind}
    z, scaled = "alpha * acc + beta * c + bias", "scale_a * scale_b * alpha * acc + scale_c * beta * c + bias"
    return {
        f"LinComb{per}Bias": Fusion(linear_combination_bias, z, bias, _D),
        f"LinComb{per}BiasEltAct": Fusion(linear_combination_bias, f"activation({z})", bias, _D),
        f"LinComb{per}BiasEltActAux": Fusion(
            partial(linear_combination_bias, aux=True), f"D = activation(aux), aux = {z}", bias, _D_AUX
        ),
        f"{per}LinComb{per}BiasEltAct": Fusion(
            linear_combination_bias, f"activation({z})", {**bias, "alpha": kind, "beta": kind}, _D
        ),
        f"ScaledLinComb{per}BiasEltAct": Fusion(
            scaled_linear_combination_bias, f"scale_d * activation({scaled})", {**bias, **_SCALES}, _D
        ),
        f"ScaledLinComb{per}BiasEltActAmaxAux": Fusion(
            scaled_linear_combination_bias_amax_aux,
            f"D = scale_d * y, aux = scale_aux * z, the largest |y| and |z|; y = activation(z), z = {scaled}",
            {**bias, **_SCALES, "scale_aux": "scalar"},
            {**_D_AUX, "amax_d": "scalar", "amax_aux": "scalar"},
        ),
    }


FUSIONS: dict[str, Fusion] = {
    "ScaledAcc": Fusion(scaled_acc, "alpha * acc", {"alpha": "scalar"}, _D),
    "LinearCombination": Fusion(linear_combination, "alpha * acc + beta * c", _SOURCE, _D),
    "LinCombEltAct": Fusion(linear_combination, "activation(alpha * acc + beta * c)", _SOURCE, _D),
    "LinCombTopKSoftmaxCol": Fusion(
        linear_combination_top_k_softmax, "softmax over the k largest of a row of alpha * acc + beta * c", _SOURCE, _D
    ),
    **_per("PerRow", "column"),
    **_per("PerCol", "row"),
    "PerColResAddPerColBiasEltAct": Fusion(
        residual_add_bias, "activation(alpha * acc + bias) + beta * c",
        {"c": "matrix", "alpha": "row", "beta": "row", "bias": "row"}, _D,
    ),
    "LinCombDeEltAct": Fusion(
        linear_combination_gradient, "(alpha * acc + beta * c) * activation'(aux)", {**_SOURCE, "aux": "matrix"}, _D
    ),
    "LinCombDeEltActDePerRowBias": Fusion(
        partial(linear_combination_gradient, bias_gradient=True),
        "D = (alpha * acc + beta * c) * activation'(aux), dbias = sums over D's rows",
        {**_SOURCE, "aux": "matrix"}, {**_D, "dbias": "column"},
    ),
    "bias_residual": Fusion(residual_before, "acc + bias + residual", _RESIDUAL, _D),
    "residual_before": Fusion(residual_before, "activation(acc + bias + residual)", _RESIDUAL, _D),
    "residual_after": Fusion(residual_after, "activation(acc + bias) + residual", _RESIDUAL, _D),
    "amax": Fusion(lambda: amax, "D = acc, the largest |acc|", {}, _D_AMAX),
    "quantized": Fusion(quantized, "scale_d * activation(acc + bias)", {**_BIAS, "scale_d": "scalar"}, _D),
    "block_quantized": Fusion(
        block_quantized, "another epilogue's D in fp8, over a scale for each row and 128 columns of it",
        {}, {**_D, "scale": "matrix (M, N/128)"},
    ),
    **{
        f"bias_{name}": Fusion(partial(bias_activation, name), f"{name}(acc + bias)", _BIAS, _D)
        for name in _COMMON
    },
    **{
        glu: Fusion(partial(gated, name), f"{name}(gate) * up of acc + bias", _BIAS, {"D": "half"})
        for glu, name in GATED.items()
    },
    **{
        f"d{name}": Fusion(partial(activation_gradient, name), f"acc * {name}'(z)", _Z, _D)
        for name in _COMMON
    },
    **{
        f"d{name}_dbias": Fusion(
            partial(activation_gradient, name, bias_gradient=True),
            f"D = acc * {name}'(z), dbias = sums over D's columns", _Z, {**_D, "dbias": "row"},
        )
        for name in _COMMON
    },
}  # fmt: skip
"""CUTLASS's names, then plain ones, which also are functions of this module where they need no choice."""

ABSENT: dict[str, str] = {
    "LinearCombinationGroupedWgrad": "not an epilogue alone: it moves blocks of the accumulator within a tile of a "
    "grouped convolution",
    **{
        f"LinComb{which}BlockScaleFactor": "Blackwell only, scales of 16 or 32 elements; here: block_quantized"
        for which in ("", "EltAct", "PerRowBias", "PerColBias", "PerRowBiasEltAct", "PerColBiasEltAct")
    },
}
"""The other names of operations.hpp, and why they are not in `FUSIONS`."""
