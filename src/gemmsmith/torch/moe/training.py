"""The experts of a mixture-of-experts layer in training: an operator for the forward pass and one for backward.

    gated_experts_forward(Tensor x, Tensor[] table, Tensor row_weights, Tensor gate_up, Tensor down, Tensor? bias,
        str activation, bool interleaved, bool sums, bool in_fp8) -> (Tensor, Tensor[])
    gated_experts_backward(Tensor gradient, Tensor x, Tensor[] halves, Tensor[] table, Tensor row_weights,
        Tensor gate_up, Tensor down, str activation, bool interleaved, bool sums, bool in_fp8, bool[] needs)
        -> (Tensor, Tensor, Tensor, Tensor, Tensor)

Rows are slots in the order of their experts; `table` has offsets, token_of_row and row_of_slot of `SortedSlots`.
Forward returns the sum of each token's rows, or with `sums` False the rows, and then the `halves` that backward reads:
gate and up, (rows, hidden) each, or one matrix of both with gate_up's order of columns. Backward returns the gradients
of x, row_weights, gate_up, down and bias; `needs` says which of x, gate_up, down and bias need one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from gemmsmith.api import grouped_gemm as launch
from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.backends import Backend
from gemmsmith.core.errors import ArgumentError
from gemmsmith.graph.frontend.values import quantize as quantize_traced
from gemmsmith.host.quantization import quantize
from gemmsmith.torch.autograd import is_column_major, transposed, weight_gradient
from gemmsmith.torch.autograd_state import check_once_differentiable
from gemmsmith.torch.define_op import define_op, record_gradients
from gemmsmith.torch.graph_serialization import PLAIN_GEMM, deserialize
from gemmsmith.torch.mlp.gated_epilogues import HALVES, epilogue_of, gate_and_up, weighted_gate_and_halves, width
from gemmsmith.torch.moe.slots import sum_slots
from gemmsmith.torch.ops import by_rows, call_op, fp32_precision, multiply_slices, run_by_torch
from gemmsmith.torch.plain_tensors import runs_kernels


class ExpertsFunction(torch.autograd.Function):
    """The operator FORWARD as an autograd function, with gradients of its first result.

    h, the gate's result, is weighted before down multiplies it. So backward does not need down's results: the gradient
    of a weight is the sum of h times the gradient of weighted h (as in sonic-moe). Of the activations only x, gate and
    up are saved: backward gathers the rows of x, and computes h, again.
    """

    @staticmethod
    def forward(
        x: Any, weights: Any, row_weights: Any, gate_up: Any, down: Any, bias: Any, offsets: Any, token_of_row: Any,
        row_of_slot: Any, options: tuple[Any, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the results of FORWARD as one tuple; the arguments are those of the operator, except two.

        `weights`: the router's weights (tokens, top_k), which get the gradient; only their shape and dtype are read, as
        row_weights has their values. `options`: the operator's last four arguments.
        """
        table = [offsets, token_of_row, row_of_slot]
        y, halves = FORWARD(x, table, row_weights, gate_up, down, bias, *options)
        return y, *halves

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save what backward reads: x, the weights, gate and up, but neither gathered rows nor h."""
        x, weights, row_weights, gate_up, down, _, *table, ctx.options = inputs
        ctx.top_k, ctx.dtype = weights.shape[1], weights.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, row_weights, gate_up, down, *table, *output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of forward's first six inputs, by the operator BACKWARD, from the first result's."""
        check_once_differentiable()
        if gradients[0] is None:
            return (None,) * 10
        x, row_weights, gate_up, down, *table_and_halves = ctx.saved_tensors
        table, halves = table_and_halves[:3], table_and_halves[3:]
        needs_x, needs_weights, needs_row_weights, *needs = ctx.needs_input_grad[:6]
        grad_x, of_rows, *others = BACKWARD(
            gradients[0].contiguous(), x, halves, table, row_weights, gate_up, down, *ctx.options, [needs_x, *needs]
        )
        grad_weights = None
        if needs_weights:
            grad_weights = of_rows.index_select(0, table[2]).view(-1, ctx.top_k).to(ctx.dtype)
        return (
            grad_x if needs_x else None, grad_weights, of_rows if needs_row_weights else None,
            *[g if is_needed else None for g, is_needed in zip(others, needs, strict=True)], *[None] * 4,
        )  # fmt: skip


def _forward(
    x: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any, bias: Any, *options: Any
) -> tuple[Any, list[Any]]:
    (offsets, token_of_row, row_of_slot), (activation, interleaved, sums, in_fp8) = table, options
    if in_fp8:
        y, *halves = forward_in_fp8(x, table, row_weights, gate_up, down, activation)
    else:
        h, *halves = _multiply_by_gate_and_up(
            x.index_select(0, token_of_row), gate_up, bias, offsets, row_weights, activation, interleaved
        )
        y = call_op(PLAIN_GEMM, h, down.mT, offsets=offsets)
        del h
    return sum_slots(y, x.shape[0], row_of_slot=row_of_slot) if sums else y, halves


def _decompose(*arguments: Any) -> tuple[Any, list[Any]]:
    """Compute FORWARD by other operators. Raises ArgumentError with operands in FP8."""
    *_, in_fp8 = arguments
    if in_fp8:
        raise ArgumentError("program: got experts with multiply_in_fp8=True, which cannot be decomposed; use False")
    return _forward(*arguments)


def _fake_forward(
    x: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any, bias: Any, *options: Any
) -> tuple[Any, list[Any]]:
    activation, interleaved, sums, in_fp8 = options
    rows, hidden, count = row_weights.shape[0], down.shape[2], width(activation)
    widths = [hidden] * count if in_fp8 or _is_separated(count, hidden, interleaved) else [count * hidden]
    return x.new_empty(x.shape if sums else (rows, x.shape[1])), [x.new_empty(rows, n) for n in widths]


def _backward(
    gradient: Any, x: Any, halves: list[Any], table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any,
    *options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute the operator BACKWARD; the module's docstring explains arguments and results.

    A gradient that is not needed is an empty tensor. What no later step reads is freed: the gathered rows are most
    of the memory beside the gradients.
    """
    (offsets, token_of_row, row_of_slot), (activation, interleaved, sums, in_fp8, needs) = table, options
    needs_x, needs_gate_up, needs_down, needs_bias = needs
    grad_x, grad_gate_up, grad_down, grad_bias = (x.new_empty(0) for _ in needs)
    if in_fp8:
        grads = backward_in_fp8(gradient, x, halves, table, row_weights, gate_up, down, activation, needs)
        return *grads, grad_bias
    gradient = gradient.index_select(0, token_of_row) if sums else gradient
    arrays = {"a": gradient, "b": down, "precision": fp32_precision(gradient)}
    grad_both, grad_weights, h = gate_gradients(arrays, halves, row_weights, offsets, activation, interleaved)
    if needs_x:
        grad_rows = call_op(PLAIN_GEMM, grad_both, gate_up, offsets=offsets)
        grad_x = sum_slots(grad_rows, x.shape[0], row_of_slot=row_of_slot)
        del grad_rows
    if needs_gate_up:
        by_columns = is_column_major(transposed(gate_up))
        grad_gate_up = weight_gradient(x.index_select(0, token_of_row), grad_both, by_columns, offsets).mT
    if needs_bias:
        ones = grad_both.new_ones(1, grad_both.shape[0])  # a product with it is each expert's sum over rows
        grad_bias = multiply_slices(ones, grad_both, offsets).squeeze(1)
    del grad_both
    if needs_down:
        grad_down = weight_gradient(h, gradient, is_column_major(transposed(down)), offsets).mT
    return grad_x, grad_weights, grad_gate_up, grad_down, grad_bias


def _fake_backward(
    gradient: Any, x: Any, halves: list[Any], table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any,
    *options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    *_, in_fp8, needs = options
    is_row_major = [in_fp8 or is_column_major(transposed(w)) for w in (gate_up, down)]
    of_weights = [
        w.new_empty(w.shape) if row_major else transposed(w.new_empty(transposed(w).shape))
        for w, row_major in zip((gate_up, down), is_row_major, strict=True)
    ]
    grads = x.new_empty(x.shape), *of_weights, x.new_empty(gate_up.shape[:2])
    grad_x, *others = (g if is_needed else x.new_empty(0) for g, is_needed in zip(grads, needs, strict=True))
    return grad_x, torch.empty_like(row_weights), *others


def _count_flops(row_weights: Any, gate_up: Any, down: Any) -> int:
    return 2 * int(row_weights[0]) * (int(gate_up[1]) * int(gate_up[2]) + int(down[1]) * int(down[2]))


FORWARD = define_op(
    "gated_experts_forward(Tensor x, Tensor[] table, Tensor row_weights, Tensor gate_up, Tensor down, Tensor? bias, "
    "str activation, bool interleaved, bool sums, bool in_fp8) -> (Tensor, Tensor[])", _fake_forward, _forward,
    count_flops=lambda x, table, *weights, **_: _count_flops(*weights[:3]), by_torch=_decompose,
)  # fmt: skip
BACKWARD = define_op(
    "gated_experts_backward(Tensor gradient, Tensor x, Tensor[] halves, Tensor[] table, Tensor row_weights, "
    "Tensor gate_up, Tensor down, str activation, bool interleaved, bool sums, bool in_fp8, bool[] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)", _fake_backward, _backward,
    count_flops=lambda gradient, x, halves, table, *weights, **_: 2 * _count_flops(*weights[:3]),
)  # fmt: skip


def _record(
    x: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any, bias: Any, *options: Any
) -> tuple[Any, list[Any]]:
    """Return the results of FORWARD, with gradients of x, row_weights, gate_up, down and bias.

    Its Autograd kernel calls this, as in exported programs. There row_weights gets the gradient, not the router's
    weights.
    """
    weights = row_weights.detach().unsqueeze(1)
    y, *halves = ExpertsFunction.apply(x, weights, row_weights, gate_up, down, bias, *table, options)
    return y, halves


record_gradients(FORWARD, _record)


def _is_separated(count: int, hidden: int, interleaved: bool) -> bool:
    """Return whether one kernel computes gate and up as matrices of their own, `hidden` columns each.

    `count`: 2, or 1 if the gate reads one product only. `interleaved`: single rows of gate and up alternate in gate_up,
    which no kernel reads as two arrays b.
    """
    return count == 1 or not (interleaved or hidden % INTERLEAVE_COLUMNS)


def _multiply_by_gate_and_up(
    rows: Any, gate_up: Any, bias: Any, offsets: Any, row_weights: Any, activation: str, interleaved: bool
) -> tuple[Any, ...]:
    """Return the weighted h (rows, hidden), and gate and up, or one matrix of both with gate_up's order of columns.

    Args:
        rows: (rows, dim), the rows of x in the order of experts.
        gate_up: (count, 2 * hidden, dim), or (count, hidden, dim) if the gate reads one product.
        bias: its bias, (count, 2 * hidden) or (count, hidden), or None.
        offsets: (count,), the ends of the experts' rows.
        row_weights: (rows,).
        activation: the gate.
        interleaved: whether single rows of gate and up alternate in gate_up.
    """
    weight, dtypes, count = row_weights.unsqueeze(1), (str(rows.dtype), str(row_weights.dtype)), width(activation)
    biases = () if bias is None else (rows_of_experts(bias, offsets, rows),)
    hidden = gate_up.shape[1] // count
    if _is_separated(count, hidden, interleaved):
        b = gate_and_up(gate_up) if count == 2 else gate_up.mT
        halves = [half for both in biases for half in both.chunk(count, 1)]
        epilogue = epilogue_of("weighted_gate_and_halves", activation, *dtypes, bias is not None)
        return call_op(epilogue, rows, b, [], [weight, *halves], offsets)  # type: ignore[no-any-return]
    epilogue = PLAIN_GEMM if bias is None else epilogue_of("added", activation, dtypes[0])
    both = call_op(epilogue, rows, gate_up.mT, [], biases, offsets)
    a, b = rows.new_empty((rows.shape[0], 0)), rows.new_empty((0, hidden))
    epilogue = epilogue_of("weighted_gate", activation, *dtypes)
    return call_op(epilogue, a, b, [], [weight, *_split(both, interleaved)]), both


def rows_of_experts(x: Any, offsets: Any, rows: Any) -> Any:
    """Return (rows, n): for each row, its expert's row of x (count, n); the last expert's for rows of no expert.

    `offsets`: (count,), the ends of the experts' rows. `rows`: any tensor with these rows.
    """
    experts = torch.searchsorted(offsets, torch.arange(rows.shape[0], device=rows.device), right=True)
    return x.index_select(0, experts.clamp(max=x.shape[0] - 1))


def _split(both: Any, interleaved: bool) -> tuple[Any, Any]:
    """Return gate and up of a matrix of both, whose columns alternate if `interleaved`; otherwise gate's are first."""
    return (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, 1)


def gate_gradients(
    arrays: Mapping[str, Any], halves: Sequence[Any], row_weights: Any, offsets: Any, activation: str,
    interleaved: bool = False, backend: Backend = "auto",
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the gradients of gate and up, the gradients of the rows' weights, and the weighted h, by one grouped GEMM.

    The gradients of gate and up are one matrix, with gate_up's order of columns.

    Args:
        arrays: arguments of `grouped_gemm`: a, the gradient of down's results, and b, down; scales if both are in FP8.
        halves: gate and up, or one matrix of both.
        row_weights: (rows,).
        offsets: (count,), the ends of the experts' rows.
        activation: the gate.
        interleaved: whether single rows of gate and up alternate in gate_up.
        backend: as in `gemm`.
    """
    count = width(activation)
    hidden = sum(x.shape[1] for x in halves) // count
    parts = halves if len(halves) == count else _split(halves[0], interleaved)
    epilogue = epilogue_of("weighted_backward", activation, str(halves[0].dtype), str(row_weights.dtype))
    operands = row_weights.unsqueeze(1), *parts
    if backend == "auto" and "scale_a" not in arrays and not runs_kernels(arrays["a"]):
        *grads, grad_weights, h = run_by_torch(epilogue, arrays["a"], arrays["b"], offsets, [], operands)
        return torch.stack(grads, 2).flatten(1) if interleaved else torch.cat(grads, 1), grad_weights, h
    grad_both, h = (halves[0].new_empty(halves[0].shape[0], n) for n in (count * hidden, hidden))
    grad_weights = torch.empty_like(row_weights)
    grads = [torch.empty_like(h) for _ in HALVES] if interleaved else grad_both.chunk(count, 1)
    launch(
        **arrays, offsets=offsets, epilogue=deserialize(epilogue), out_dtype=h.dtype, backend=backend,
        operands={name: by_rows(x) for name, x in zip(("weight", *HALVES), operands, strict=False)},
        out={f"out{i or ''}": x for i, x in enumerate((*grads, grad_weights, h))},
    )  # fmt: skip
    return torch.stack(grads, 2).flatten(1) if interleaved else grad_both, grad_weights, h


# -- in FP8 ------------------------------------------------------------------------------------------------------------
# Each operand is quantized where it is multiplied (DeepSeek-V3's recipe, arXiv:2412.19437, section 3.3): activations
# and their gradients with a scale for each row and 128 columns, weights with one for each 128 x 128, and what is
# multiplied along the tokens, for the gradients of weights, with one for each 128 rows and column.


def forward_in_fp8(
    x: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any, activation: str, backend: Backend = "auto"
) -> tuple[Any, Any, Any]:
    """Return down's results (rows, dim), and gate and up (rows, hidden), which backward reads.

    The arguments are those of the operator FORWARD; `backend`: as in `gemm`.
    """
    offsets, token_of_row, _ = table
    multiply = partial(launch, offsets=offsets, backend=backend)
    h, h_scales, gate, up = multiply(
        **_rows(x, backend), **_gate_and_up(gate_up, backend), gather=token_of_row,
        epilogue=_weighted_gated(activation), weight=by_rows(row_weights.unsqueeze(1)), out_dtype=x.dtype,
    )  # fmt: skip
    return multiply(h, scale_a=h_scales, **_transposed(down, backend), out_dtype=x.dtype), gate, up


def backward_in_fp8(
    gradient: Any, x: Any, halves: Sequence[Any], table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any,
    activation: str, needs: Sequence[bool], backend: Backend = "auto",
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the gradients of x, of the rows' weights (rows,), of gate_up and of down.

    `gradient`: that of the tokens' sums, (tokens, dim). `halves`: gate and up. `needs`: whether those of x, gate_up and
    down are needed; others are empty. The other arguments are those of the operator BACKWARD; `backend`: as in `gemm`.
    """
    offsets, token_of_row, row_of_slot = table
    grad_both, grad_weights, h = gate_gradients(
        {**_rows(gradient, backend), **_transposed(down.mT, backend), "gather": token_of_row},
        halves, row_weights, offsets, activation, backend=backend,
    )  # fmt: skip
    grad_x, grad_gate_up, grad_down = (x.new_empty(0) for _ in range(3))
    if needs[0]:
        factors = {**_rows(grad_both, backend), **_transposed(gate_up.mT, backend)}
        grad_rows = launch(**factors, offsets=offsets, out_dtype=x.dtype, backend=backend)
        del factors
        grad_x = sum_slots(grad_rows, x.shape[0], row_of_slot=row_of_slot)
        del grad_rows
    along_rows = partial(_multiply_along_rows, offsets=offsets, backend=backend)
    if needs[1]:
        grad_gate_up = along_rows(grad_both, x.index_select(0, token_of_row), dtype=gate_up.dtype)
    del grad_both
    if needs[2]:
        grad_down = along_rows(gradient.index_select(0, token_of_row), h, dtype=down.dtype)
    return grad_x, grad_weights, grad_gate_up, grad_down


def _rows(x: Any, backend: Backend) -> dict[str, Any]:
    """Return the arguments a and scale_a of `grouped_gemm` for x (rows, k), quantized."""
    values, scales = quantize(x, "1x128", backend=backend)
    return {"a": values, "scale_a": scales}


def _gate_and_up(gate_up: Any, backend: Backend) -> dict[str, Any]:
    """Return the arguments b and scale_b of `grouped_gemm` for gate_up (count, 2 * hidden, dim), quantized.

    Both are tuples of gate's and up's; each array b is (count, dim, hidden).
    """
    matrices = gate_up.unflatten(1, (2, -1)).flatten(0, 1)
    b, scale_b = (x.unflatten(0, (-1, 2)).mT.unbind(1) for x in quantize(matrices, "128x128", backend=backend))
    return {"b": tuple(b), "scale_b": tuple(scale_b)}


def _transposed(weight: Any, backend: Backend) -> dict[str, Any]:
    """Return the arguments b (count, k, n) and scale_b of `grouped_gemm` for a weight (count, n, k), quantized."""
    values, scales = quantize(weight, "128x128", backend=backend)
    return {"b": values.mT, "scale_b": scales.mT}


def _multiply_along_rows(x: Any, y: Any, offsets: Any, dtype: Any, backend: Backend) -> Any:
    """Return (count, m, n), x.T @ y of each group's rows of x (rows, m) and y (rows, n), both quantized.

    `offsets`: (count,), the ends of the groups' rows. `dtype`: the result's.
    """
    a, scale_a, filled = quantize(x, "128x1", offsets=offsets, backend=backend)
    b, scale_b, _ = quantize(y, "128x1", offsets=offsets, backend=backend)
    return launch(
        a.T, b, scale_a=scale_a.T, scale_b=scale_b, offsets=filled, along="k", out_dtype=dtype, backend=backend
    )


@lru_cache(maxsize=16)
def _weighted_gated(activation: str) -> Callable[..., Any]:
    """Return the epilogue of the first GEMM: the weighted h, quantized, which down multiplies; and gate and up."""

    def epilogue(acc: Any, weight: Any) -> Any:
        h, *halves = weighted_gate_and_halves(activation, acc, weight)
        return *quantize_traced(h), *halves

    return epilogue
