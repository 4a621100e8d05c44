"""gemmsmith.torch.gemm: a differentiable GEMM with a fused epilogue that can be compiled."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, NoReturn, TypeAlias, overload

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import has_static_value

from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.binding import checks
from gemmsmith.binding.request import Epilogue, Request
from gemmsmith.binding.results import arrange_results
from gemmsmith.core.dtypes import validate_fp32_scalar
from gemmsmith.core.errors import ARGUMENTS, PYTORCH_PAGE, ArgumentError, did_you_mean
from gemmsmith.core.graph import reduced_dims
from gemmsmith.core.scalars import as_bools
from gemmsmith.graph.frontend.classify import classify
from gemmsmith.graph.frontend.fingerprint import fingerprint
from gemmsmith.host.cached_run import record_runs, run_cached
from gemmsmith.torch import graph_serialization
from gemmsmith.torch.autograd import differentiable_gemm
from gemmsmith.torch.autograd_state import in_functorch_transform
from gemmsmith.torch.backward_plan import dynamo_constant, numbers_and_tensors, result_names, tensor_names
from gemmsmith.torch.cached_call import cache_call
from gemmsmith.torch.fallback import FLOAT_DTYPES
from gemmsmith.torch.ops import fp32_precision, matmul_shape, read_together
from gemmsmith.torch.plain_tensors import (
    NUMBER_TYPES,
    TENSOR_TYPES,
    Arguments,
    read_arguments,
    run_cached_call,
    run_or_call,
    runs_kernels,
    sees_operators,
)
from gemmsmith.torch.tracing import OperandSignature, serialize_epilogue, with_out_dtype

FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
UE8M0 = torch.float8_e8m0fnu
GEMM_DTYPES = (*FLOAT_DTYPES, *FP8, torch.int8)
"""Dtypes of a and b."""
OPERAND_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
"""Dtypes of an epilogue's operands; float64 too if a is float64."""
Tensors: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Operand: TypeAlias = torch.Tensor | float
Scale: TypeAlias = torch.Tensor | float | None
OutDtype: TypeAlias = torch.dtype | str | None
_UNSUPPORTED_ARGUMENTS = frozenset(ARGUMENTS) - {"scale_a", "scale_b", "epilogue", "operands", "out_dtype"}
_INSTEAD = {
    "out": "the tensor that is returned",
    "config": "gemmsmith.tune, whose configs later calls take",
    "precision": "torch.set_float32_matmul_precision",
    "scale_a": "an operand of the epilogue",
    "scale_b": "an operand of the epilogue",
    "sizes": "offsets=sizes.cumsum(0, dtype=torch.int32)",
    "counts": "offsets",
    "gather": "a[gather]",
    "scatter": "torch.index_add of the result",
}
"""What works with gradients in place of an argument."""


@overload
def gemm(
    a: torch.Tensor, b: Tensors, *, epilogue: None = None, recompute: bool = False, out_dtype: OutDtype = None,
    scale_a: Scale = None, scale_b: Scale | Tensors = None, operands: Mapping[str, Operand] | None = None,
    **named: Operand,
) -> torch.Tensor: ...  # fmt: skip


@overload
def gemm(
    a: torch.Tensor, b: Tensors, *, epilogue: Epilogue | None = None, recompute: bool = False,
    out_dtype: OutDtype = None, scale_a: Scale = None, scale_b: Scale | Tensors = None,
    operands: Mapping[str, Operand] | None = None, **named: Operand,
) -> Any: ...  # fmt: skip


def gemm(
    a: torch.Tensor, b: Tensors, *, epilogue: Epilogue | None = None, recompute: bool = False,
    out_dtype: OutDtype = None, scale_a: Scale = None, scale_b: Scale | Tensors = None,
    operands: Mapping[str, Operand] | None = None, **named: Operand,
) -> Any:  # fmt: skip
    """Differentiable `epilogue(a @ b)`; works with autograd, torch.compile and torch.func transforms.

    Args:
        a: (..., m, k), in a dtype of gemmsmith.gemm, or float64 on the CPU, where all is computed in float64. fp32 is
            multiplied as torch.set_float32_matmul_precision says: "highest" by 3xTF32, otherwise by TF32.
        b: (k, n), or (batch, k, n) for an a of (batch, m, k) or (m, k), in a's dtype. A tuple of two such tensors is
            multiplied as `gemmsmith.interleave(*b)`, (k, 2n); in 16 or 8 bits, without gradients, no copy is made.
        epilogue: a function of a @ b and of operands by name, as in gemmsmith.gemm; a @ b has a's leading dimensions.
        recompute: save nothing beyond the outputs and recompute the GEMM in backward. By default at most one extra
            matrix (the pre-activation) is saved, and none if the epilogue is linear or if its output suffices (relu,
            sigmoid, tanh).
        out_dtype: dtype of the matrices that the epilogue does not convert, such as torch.float32 or "fp32"; default:
            a's. With a float64 a, fp32 is float64.
        scale_a: a scale of the whole of a, or of its rows; block scales only without gradients.
        scale_b: a scale of the whole of b, or of its columns; block scales only without gradients; a tuple of those of
            128 x 128 with a tuple b.
        operands: operands whose names are also arguments of this function.
        **named: the other operands. The shape selects the kind: () a scalar, (n,) a row, (m, 1) a column, (m, n) a
            matrix, with or without a's leading dimensions. Numbers are operands without a gradient.

    Returns:
        A tensor, a tuple or a dict, as the function returns; results are row-major. A maximum or minimum divides its
        gradient among equal elements, as torch.amax does. There are no gradients for quantize, top_k_softmax and fp8
        results, for fp8 and int8 operands, and in forward mode.

    Raises:
        ArgumentError: an argument, which the message names, is not valid.
        EpilogueError: the function is not a valid epilogue, or has no gradient.
    """
    if recompute is not False:
        (recompute,) = as_bools(recompute=recompute)
    operand_values = checks.merge_operands(operands, named)
    if named and not _UNSUPPORTED_ARGUMENTS.isdisjoint(named):
        refuse_arguments("gemm", named, _UNSUPPORTED_ARGUMENTS)
    if isinstance(b, tuple):
        scales_b = scale_b if isinstance(scale_b, tuple) else (scale_b,)
        b = combine_two(a, b, scale_a, *scales_b, *operand_values.values())
    if isinstance(scale_b, tuple) and not isinstance(b, tuple):
        raise ArgumentError(
            "scale_b: got a tuple; use one with a tuple b, and block scales with no_grad() on a GPU, where TMA must be "
            "able to read both arrays b together"
        )
    a, b = autocast(a, b)
    has_scales = scale_a is not None or scale_b is not None
    if isinstance(b, tuple) or (has_scales and is_fast_path(a, b, scale_a, scale_b, *operand_values.values())):
        fields = None, operand_values, epilogue, scale_a, scale_b, out_dtype
        return run_cached(Request(a, b, *fields, precision=fp32_precision(a)))
    scales = _scale_operands(scale_a, scale_b, operand_values) if has_scales else {}
    inputs = {**operand_values, **scales} if has_scales else operand_values
    arguments = None
    if not sees_operators():
        arguments = read_arguments(fingerprint(epilogue), (recompute, out_dtype, tuple(scales)), a, b, inputs)
        if (cached := run_cached_call(arguments, a, b, inputs)) is not None:
            return cached
    if not has_scales and is_fast_path(a, b, *inputs.values()):
        source = arguments and arguments.source
        request = Request(
            a, b, None, operand_values, epilogue, out_dtype=out_dtype, precision=fp32_precision(a), fingerprint=source
        )
        return run_or_call(arguments, a, partial(run_cached, request))
    return _prepare_and_run(a, b, epilogue, recompute, out_dtype, operand_values, scales, arguments)


def _prepare_and_run(
    a: Any, b: Any, epilogue: Any, recompute: bool, out_dtype: Any, operands: Mapping[str, Any],
    scales: Mapping[str, Any], arguments: Arguments | None,
) -> Any:  # fmt: skip
    """Return the results of a GEMM that goes through the operator, with gradients if they are recorded.

    `b` is one tensor. `scales` have names that no operand has. `arguments`: the signature under which the call is
    cached; None: it is not cached.
    """
    serialized_epilogue, x, y, prepared, leading_shape, shape = prepare(
        a, b, epilogue, operands, scales, None if arguments is None else arguments.source
    )
    if out_dtype is not None:
        serialized_epilogue = convert_results(serialized_epilogue, out_dtype, x)
    arrays = x, y, *numbers_and_tensors(serialized_epilogue, prepared)
    run = partial(differentiable_gemm, serialized_epilogue, *arrays, recompute)
    results, runs = (run(), []) if arguments is None else record_runs(run)
    names, reduced = result_names(serialized_epilogue), _reduced_dims(serialized_epilogue)
    values = [
        _unflatten_leading(value, *of_result, leading_shape, shape)
        for value, of_result in zip(results, reduced, strict=True)
    ]
    # A cached call prepares no tensors, except that it may flatten a to (m, k)
    if arguments is not None and arguments.call.needs_grad and y is b:
        inputs, folds_batch = {**operands, **scales}, x is not a
        takes_inputs = all(prepared[name] is inputs[name] for name in tensor_names(serialized_epilogue))
        if takes_inputs and (x.dim() == 2 or not folds_batch):
            cache_call(arguments, runs, serialized_epilogue, x, b, prepared, recompute, values, names, folds_batch)
    return arrange_results(dict(zip(names, values, strict=True)), names)


def refuse_arguments(function: str, named: Mapping[str, Any], unsupported: Collection[str]) -> NoReturn:
    """Raise ArgumentError for the first of the `named` arguments that gemmsmith's function has, and torch's lacks."""
    name = next(name for name in named if name in unsupported)
    instead = f"use {_INSTEAD[name]}, or call that" if name in _INSTEAD else "call that"
    raise ArgumentError(
        f"{name}: got an argument of gemmsmith.{function}, which has no gradients; {instead}, or give an operand of "
        f"this name in `operands` ({PYTORCH_PAGE})"
    )


def convert_results(epilogue: str, out_dtype: Any, a: Any) -> str:
    """Return a serialized epilogue with `out_dtype` for the matrices that it does not convert.

    Raises ArgumentError for a dtype that results cannot have.
    """
    name = str(out_dtype).removeprefix("torch.")
    if (name == "float64" and a.dtype == torch.float64) or (
        name == "int32" and a.dtype == torch.int8 and epilogue == graph_serialization.PLAIN_GEMM
    ):
        return epilogue
    return with_out_dtype(epilogue, name)


def _scale_operands(scale_a: Any, scale_b: Any, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the scales that are not None, ue8m0 converted to fp32, by name.

    They become further operands: the names are "scale_a" and "scale_b", with "_" appended while an operand has the
    name.
    """
    scales = {}
    for name, x in (("scale_a", scale_a), ("scale_b", scale_b)):
        while name in operands:
            name += "_"
        if x is not None:
            is_ue8m0 = isinstance(x, torch.Tensor) and x.dtype in (UE8M0, torch.uint8)
            scales[name] = x.view(UE8M0).float() if is_ue8m0 else x
    return scales


def autocast(a: Any, *others: Any) -> tuple[Any, ...]:
    """Return a and the others, cast to torch.autocast's dtype if autocast is enabled for a's device.

    As in torch.matmul; tensors of other dtypes than fp32, fp16 and bf16 stay as they are.
    """
    if not (torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled()):
        return a, *others
    if not isinstance(a, torch.Tensor) or not is_autocast(a):
        return a, *others
    dtype = torch.get_autocast_dtype(a.device.type)
    castable = (torch.float32, torch.float16, torch.bfloat16)
    return tuple([x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in castable else x for x in (a, *others)])


def is_autocast(x: Any) -> bool:
    """Return whether torch.autocast is enabled for a tensor's device; the device meta has no autocast."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def is_dtensor(x: Any) -> bool:
    """Return whether a tensor is a DTensor, without an import of torch.distributed."""
    return hasattr(x, "device_mesh")


def combine_two(a: Any, b: tuple[Any, ...], *others: Any) -> Any:
    """Return two tensors b as gemm multiplies them.

    On the fast path, if TMA can read both together, that is the tuple; otherwise it is a copy, one tensor whose columns
    are theirs in turns, 8 at a time. Raises ArgumentError for a tuple that is not of two tensors of the same shape.
    """
    for x in b:
        if isinstance(x, torch.Tensor):
            expect_tensor("b", x)
    if len(b) != 2 or not all(isinstance(x, torch.Tensor) for x in b) or b[0].shape != b[1].shape:
        described = ", ".join(str(tuple(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__ for x in b)
        raise ArgumentError(f"b: got a tuple of {described}; use one tensor, or two of the same shape")
    if b[0].shape[-1] % INTERLEAVE_COLUMNS:
        raise ArgumentError(f"b: got two tensors of {b[0].shape[-1]} columns; use a multiple of {INTERLEAVE_COLUMNS}")
    b = autocast(a, *b)[1:]
    if is_fast_path(a, *b, *others):
        return read_together(*b)
    return torch.stack([x.unflatten(-1, (-1, INTERLEAVE_COLUMNS)) for x in b], -2).flatten(-3)


def check_operands_are_read(epilogue: Any, operands: Mapping[str, Any]) -> None:
    """Raise ArgumentError if there are operands, but no epilogue that could read them."""
    if epilogue is None and operands:
        name = next(iter(operands))
        raise ArgumentError(f"{name}: operands need an `epilogue` that reads them{did_you_mean(name)}")


def prepare(
    a: Any, b: Any, epilogue: Any, operands: Mapping[str, Any], scales: Mapping[str, Any], source: Hashable = None
) -> tuple[str, Any, Any, dict[str, Any], tuple[Any, ...], tuple[Any, ...]]:
    """Check the arguments of a GEMM, and prepare them for the operator.

    `b` is one tensor. `scales` have names that no operand has. `source`: the epilogue's fingerprint, or None. Returns
    the serialized epilogue; a, b and the operands as they are passed to the operator, with the batch folded into M if
    possible; a's leading dimensions; and the shape of a @ b before folding.
    """
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x, a)
        if x.dtype not in GEMM_DTYPES:
            raise ArgumentError(f"{name}: got {x.dtype}; use one of {', '.join(map(str, GEMM_DTYPES))}")
    if a.dtype != b.dtype and not {a.dtype, b.dtype} <= FP8:
        raise ArgumentError(f"b: got {b.dtype} with a of {a.dtype}; use the same for both")
    check_operands_are_read(epilogue, operands)
    if a.dim() < 2 or b.dim() not in (2, 3) or (b.dim() == 3 and a.dim() > 3):
        raise ArgumentError(
            f"a, b: got {a.dim()} and {b.dim()} dimensions; use a (..., m, k) and b (k, n), or both (batch, ., .)"
        )
    leading_shape = a.shape[:-2]
    a = a.flatten(0, -3) if a.dim() > 3 else a
    shape = matmul_shape(a.shape, b.shape)
    leading_shape = leading_shape if len(leading_shape) > 1 else shape[:-2]
    for name, x in scales.items():
        if isinstance(x, torch.Tensor):
            _check_scale_shape(name, tuple(x.shape), shape)
    operand_values, signature = read_operands({**operands, **scales}, a, shape, leading_shape)
    serialized_epilogue = serialize_epilogue(
        epilogue, (*leading_shape, *shape[-2:]), signature[: len(operands)], signature[len(operands) :], source
    )
    if len(shape) == 3 and b.dim() == 2 and a.dim() == 3:
        serialized_epilogue, folds_batch, batched_names = _fold_batch_into_m(serialized_epilogue)
        if folds_batch:  # the rows of all batches become rows of one GEMM
            a = a.flatten(0, 1)
            operand_values = {
                name: x.flatten(0, 1) if name in batched_names else x for name, x in operand_values.items()
            }
    return serialized_epilogue, a, b, operand_values, leading_shape, shape


def read_operands(
    operands: Mapping[str, Any], a: Any, shape: tuple[Any, ...], leading_shape: tuple[Any, ...] = ()
) -> tuple[dict[str, Any], OperandSignature]:
    """Return an epilogue's operands, by name, as the operator takes them, and their signature.

    `shape`: that of a @ b, (m, n) or (batch, m, n). `leading_shape`: the leading dimensions of the caller's a, which
    are flattened to the batch; those of operands are flattened, too. Raises ArgumentError for an operand of a wrong
    type, dtype or device, EpilogueError for one that does not broadcast to a @ b.
    """
    values: dict[str, Any] = {}
    signature: OperandSignature = ()
    for name, x in operands.items():
        extent, dtype = (0, 0, 0), ""
        is_number = isinstance(x, (int, float, Real))
        if is_number and not _is_symbolic(x):
            values[name] = float(x) if torch.compiler.is_dynamo_compiling() else validate_fp32_scalar(name, x)
        else:
            if is_number:
                x = a.new_ones((), dtype=torch.float64 if a.dtype == torch.float64 else torch.float32) * x
            _check_operand(name, x, a)
            x = _flatten_leading(name, x, leading_shape)
            dims = classify(name, tuple(x.shape), shape)
            batch = 1 if dims.batch else 0  # the branch makes a symbolic condition a constant
            extent, dtype = (batch, dims.rows_per_value, dims.columns_per_value), str(x.dtype)
            values[name] = x.squeeze(0) if x.dim() == 3 and not batch else x
        signature = (*signature, (name, extent, dtype))
    return values, signature


def is_fast_path(a: Any, *others: Any) -> bool:
    """Return whether gemmsmith.gemm can run without torch's dispatcher.

    It can if a, of at most three dimensions, is on a Hopper GPU, all of them are plain tensors, numbers or None, and
    no gradients are recorded, nor any mode, transform or trace is active.
    """
    if sees_operators() or not isinstance(a, torch.Tensor) or a.dim() > 3 or not runs_kernels(a):
        return False
    grad_enabled = torch.is_grad_enabled()
    for x in (a, *others):
        if type(x) in TENSOR_TYPES:
            if grad_enabled and x.requires_grad:
                return False
        elif x is not None and type(x) not in NUMBER_TYPES:
            return False
    return True


def _is_symbolic(x: Any) -> bool:
    """Return whether a number is symbolic: Dynamo compiles code for all its values, and does not know the value.

    Such a number is passed as a tensor: as a float argument of the operator it would be specialized, and each value
    would be compiled anew.
    """
    return torch.compiler.is_dynamo_compiling() and not has_static_value(x)


def expect_tensor(name: str, x: Any) -> None:
    """Raise ArgumentError if x is not a tensor, or is a nested one."""
    if isinstance(x, torch.fx.Proxy):
        raise ArgumentError(f"{name}: got a Proxy of torch.fx.symbolic_trace; use torch.export, or a leaf module")
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name}: got {type(x).__name__}; use a tensor")
    if x.is_nested:
        raise ArgumentError(
            f"{name}: got a nested tensor; use a dense one: x.values() of a jagged one, or x.to_padded_tensor(0)"
        )


def check_tensor(name: str, x: Any, a: Any) -> None:
    """Raise ArgumentError if x is no dense, real tensor on a's device, or has a tangent of forward mode."""
    expect_tensor(name, x)
    if x.layout is not torch.strided:
        raise ArgumentError(f"{name}: got a {x.layout} tensor; use a dense one, for instance x.to_dense()")
    if x.is_complex():
        raise ArgumentError(f"{name}: got a tensor of {x.dtype}; use a real one")
    if x.device != a.device:
        raise ArgumentError(f"{name}: got a tensor on {x.device} with a on {a.device}; use one device")
    if in_functorch_transform() and forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise ArgumentError(f"{name}: got a dual tensor, of forward mode; use reverse mode: backward, torch.func.grad")


def _check_operand(name: str, x: Any, a: Any) -> None:
    """Raise ArgumentError if x cannot be an epilogue's operand of this name, for this tensor a."""
    check_tensor(name, x, a)
    if x.dtype not in OPERAND_DTYPES and not (x.dtype == a.dtype == torch.float64):
        offered = ", ".join(map(str, OPERAND_DTYPES))
        if x.dtype == torch.float64:
            offered = "torch.float32, torch.float16, torch.bfloat16, such as x.float()"
        raise ArgumentError(f"{name}: got {x.dtype}; use one of {offered}")


def as_batched_input(x: Any, weight: Any) -> Any:
    """Return a layer's input (..., features), as (1, features) if it has one dimension.

    Raises ArgumentError if the shape, dtype or device does not match the layer's weight (out_features, features).
    """
    expect_tensor("input", x)
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ArgumentError(f"input: got shape {tuple(x.shape)}; use (..., {weight.shape[-1]})")
    if x.device != weight.device:
        raise ArgumentError(f"input: got a tensor on {x.device} with a weight on {weight.device}; use one device")
    if x.dtype != weight.dtype and not (x.is_meta or torch.is_autocast_enabled(x.device.type)):
        raise ArgumentError(f"input: got {x.dtype} with a weight of {weight.dtype}; use the same for both")
    return x.unsqueeze(0) if x.dim() == 1 else x


def _flatten_leading(name: str, x: Any, leading_shape: tuple[Any, ...]) -> Any:
    """Return an operand with one batch dimension: (3, 4, m, n) becomes (12, m, n).

    `leading_shape`: the leading dimensions of the caller's a, here (3, 4), to which the operand's own are broadcast; if
    all of these are 1, the operand becomes (1, m, n). Raises ArgumentError if the operand, `name`, has more of them.
    """
    if x.dim() <= 2 or (x.dim() == 3 and len(leading_shape) < 2):
        return x
    own_leading = x.shape[:-2]
    if all(n == 1 for n in own_leading):
        return x.reshape(1, *x.shape[-2:])
    if len(own_leading) > len(leading_shape):
        raise ArgumentError(f"{name}: got shape {tuple(x.shape)} for an a with {len(leading_shape)} leading dimensions")
    return x.expand(*leading_shape, *x.shape[-2:]).flatten(0, -3)


def _check_scale_shape(name: str, scale: tuple[Any, ...], shape: tuple[Any, ...]) -> None:
    """Raise ArgumentError unless a scale is a scalar, one per row of a (m, 1), or one per column of b (1, n).

    `name` begins with "scale_a" or "scale_b".
    """
    vector = (shape[-2], 1) if name.startswith("scale_a") else (1, shape[-1])
    if scale[-2:] not in ((), (1,), (1, 1), vector):
        raise ArgumentError(
            f"{name}: got shape {scale}; use () or {vector}; block scales need torch.no_grad() and a GPU"
        )


@dynamo_constant
def _fold_batch_into_m(epilogue: str) -> tuple[str, bool, tuple[str, ...]]:
    """Change an epilogue so that the rows of all batches are the rows of one GEMM.

    That is possible if no operand and no reduction distinguishes batches from rows: an operand varies along both or
    neither, and a reduction sums both or neither. Returns the serialized epilogue for the folded GEMM (unchanged if
    that is impossible), whether it is possible, and the names of the operands with a batch, which is to be folded, too.
    """
    graph = graph_serialization.deserialize(epilogue)
    divides_rows = any(n.op in ("chunk", "interleave") and n.attribute[-1] == "m" for n in graph.nodes)
    reduced = [reduced_dims(n.attribute[1]) for n in graph.nodes if n.op == "reduce"]
    differs = any(o.broadcast_dims.batch != o.broadcast_dims.varies_along_m for o in graph.operands)
    if divides_rows or differs or any(("b" in dims) != ("m" in dims) for dims in reduced):
        return epilogue, False, ()
    batched_names = tuple(o.name for o in graph.operands if o.broadcast_dims.batch)
    operands = tuple(replace(o, broadcast_dims=o.broadcast_dims._replace(batch=False)) for o in graph.operands)
    return graph_serialization.serialize(replace(graph, operands=operands)), True, batched_names


@dynamo_constant
def _reduced_dims(epilogue: str) -> tuple[tuple[str, bool], ...]:
    """Return for each result the dimensions that it reduces (letters of "bmn"), and whether it keeps them as 1."""
    graph = graph_serialization.deserialize(epilogue)
    nodes = [(graph.nodes[r.node], r.keepdim) for r in graph.results]
    return tuple((reduced_dims(n.attribute[1]) if n.op == "reduce" else "", keepdim) for n, keepdim in nodes)


def _unflatten_leading(
    x: Any, reduced: str, keepdim: bool, leading_shape: tuple[Any, ...], shape: tuple[Any, ...]
) -> Any:
    """Return a result with the leading dimensions of the caller's a in place of the batch, or of rows folded with it.

    `reduced`: the dimensions that it reduces: letters of "bmn". `shape`: that of a @ b before batches were folded into
    M.
    """
    if not leading_shape:
        return x
    result_shape: list[Any] = []
    for dim, sizes in (("b", leading_shape), ("m", shape[-2:-1]), ("n", x.shape[-1:])):
        result_shape += sizes if dim not in reduced else [1] * len(sizes) * keepdim
    return x.reshape(result_shape)
