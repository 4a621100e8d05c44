"""Recognition of logsumexp written out: log(sum(exp(x - shift))) is logsumexp(x) - shift for every shift.

While epilogues are fused it is one node, so that it can become a reduction of an epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gemmsmith.torch.compiler.nodes import (
    Emitter,
    Node,
    belongs_to_training,
    dtype,
    fake_tensor,
    op_name,
    shape,
    statically_equal,
    strip_views,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class LogSumExp:
    """A logsumexp that was recognized.

    Attributes:
        logsumexp: the new node of aten.logsumexp.
        log: the new node logsumexp - shift, which has replaced the logarithm.
    """

    logsumexp: Node
    log: Node


def replace_log_sum_exp(graph: torch.fx.Graph) -> list[LogSumExp]:
    """Replace log(sum(exp(x - shift))) by aten.logsumexp(x) - shift, in place, and return the replacements.

    Where the shift is added again, as in logsumexp written out for numerical stability, only aten.logsumexp remains.
    """
    replacements = []
    for node in list(graph.nodes):
        if (match := _match_log_sum_exp(node)) is None:
            continue
        sum_, x, shift = match
        with graph.inserting_before(node):
            emit = Emitter(graph)
            logsumexp = emit(aten.logsumexp.default, x, *sum_.args[1:])
            keeps_dims = statically_equal(shape(shift), shape(sum_))
            reduced_shift = shift if keeps_dims else emit(aten.squeeze.dims, shift, sum_.args[1])
            log = emit(aten.sub.Tensor, logsumexp, reduced_shift)
        node.replace_all_uses_with(log)
        replacements.append(LogSumExp(logsumexp, log))
        for user in list(log.users):
            if op_name(user) == "add" and not user.kwargs and any(_is_view(x, shift, node) for x in user.args):
                user.replace_all_uses_with(logsumexp)
    graph.eliminate_dead_code()
    return replacements


def _is_view(x: Any, shift: Node, log: Node) -> bool:
    """Return whether x is the shift in the shape and dtype of the logarithm.

    Not so if a backward pass, which has been made already, may compute the sum again with a shift that is no maximum:
    it might differ in a bit.
    """
    if belongs_to_training(log) and not _is_maximum(shift):
        return False
    return strip_views(x) is shift and statically_equal(shape(x), shape(log)) and dtype(x) == dtype(log)


def _is_maximum(shift: Node) -> bool:
    """Return whether a shift is a maximum, or a maximum if that is finite and else 0."""
    values = shift.args[1:] if op_name(shift) == "where" else [shift]
    return any(op_name(x) == "amax" for x in values if isinstance(x, torch.fx.Node))


def restore(graph: torch.fx.Graph, replacements: list[LogSumExp]) -> None:
    """Replace each aten.logsumexp that no matmul has fused by its steps, which Inductor computes in one kernel."""
    for x in replacements:
        if not x.logsumexp.users:  # it was fused into a matmul
            continue
        inner, dims, *keepdim = x.logsumexp.args
        with graph.inserting_before(x.log if x.log.users else x.logsumexp):
            emit = Emitter(graph)
            if x.log.users:
                shift = x.log.args[1]  # a matmul that has fused it has replaced it
                for dim in [] if any(keepdim) else sorted(d % len(shape(inner)) for d in dims):
                    shift = emit(aten.unsqueeze.default, shift, dim)
            else:  # any shift will do: the maximum, or 0 if it is infinite, since inf - inf is NaN
                largest = emit(aten.amax.default, inner, dims, True)
                zero = emit(aten.full.default, [], 0.0, dtype=dtype(inner), device=fake_tensor(inner).device)
                infinite = emit(aten.eq.Scalar, emit(aten.abs.default, largest), float("inf"))
                shift = emit(aten.where.self, infinite, zero, largest)
            exp = emit(aten.exp.default, emit(aten.sub.Tensor, inner, shift))
            log = emit(aten.log.default, emit(aten.sum.dim_IntList, exp, dims, *keepdim))
            x.log.replace_all_uses_with(log)
            if set(x.logsumexp.users) - {x.log}:
                reduced_shift = shift if any(keepdim) else emit(aten.squeeze.dims, shift, dims)
                x.logsumexp.replace_all_uses_with(emit(aten.add.Tensor, log, reduced_shift))
    graph.eliminate_dead_code()


def _match_log_sum_exp(log: Node) -> tuple[Node, Node, Node] | None:
    """Return the nodes of the sum, of x and of the shift if a node is log(sum(exp(x - shift))), else None.

    The shift must be constant along the summed dimensions.
    """
    sum_ = _input_of(log, "log")
    exp = _input_of(sum_, "sum")
    inner = _input_of(exp, "exp")
    if sum_ is None or sum_.kwargs or not any(sum_.args[1:2]):  # of all dimensions: None or []
        return None
    if inner is None or op_name(inner) != "sub" or inner.kwargs:
        return None
    x, shift = inner.args
    are_nodes = isinstance(x, torch.fx.Node) and isinstance(shift, torch.fx.Node)
    if not are_nodes or not statically_equal(shape(x), shape(inner)) or not dtype(x) == dtype(inner) == dtype(log):
        return None
    dims = {d % len(shape(x)) for d in sum_.args[1]}
    keepdim_shape = tuple(1 if d in dims else extent for d, extent in enumerate(shape(x)))
    return (sum_, x, shift) if dims and statically_equal(shape(shift), keepdim_shape) else None


def _input_of(node: Node | None, op: str) -> Node | None:
    """Return the first argument of a node that calls the operation `op`, else None."""
    return node.args[0] if node is not None and op_name(node) == op else None
