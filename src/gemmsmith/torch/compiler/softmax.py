"""log(sum(exp(x - shift))) is logsumexp(x) - shift, whatever the shift is. While products are fused it is a node of its
own, so that it becomes a reduction in an epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemmsmith.torch.compiler.nodes import Emitter, Node, dtype, kind, name, same, shape, value

aten = torch.ops.aten


@dataclass(frozen=True)
class LogSumExp:
    """A node `made` for logsumexp(x), and the one that stands for the logarithm: this minus the shift."""

    made: Node
    log: Node
    shift: Node


def recognize(graph: torch.fx.Graph) -> list[LogSumExp]:
    """Puts aten.logsumexp where a graph computes it step by step."""
    found = []
    for node in list(graph.nodes):
        if (steps := _steps(node)) is None:
            continue
        sum_, x, shift = steps
        with graph.inserting_before(node):
            emit = Emitter(graph)
            made = emit(aten.logsumexp.default, x, *sum_.args[1:])
            subtracted = shift if same(shape(shift), shape(sum_)) else emit(aten.squeeze.dims, shift, sum_.args[1])
            log = emit(aten.sub.Tensor, made, subtracted)
        node.replace_all_uses_with(log)
        found.append(LogSumExp(made, log, shift))
        for user in list(log.users):
            if name(user) == "add" and not user.kwargs and shift in map(_viewed, user.args):
                user.replace_all_uses_with(made)
    graph.eliminate_dead_code()
    return found


def _viewed(node: Node) -> Node:
    """What a node is a view of."""
    while isinstance(node, torch.fx.Node) and kind(node) == "view":
        node = node.args[0]
    return node


def restore(graph: torch.fx.Graph, known: list[LogSumExp]) -> None:
    """Takes those apart again that no product has taken: Inductor makes one kernel of the steps."""
    for x in known:
        if not x.made.users:  # a product's
            continue
        inner, dims, *keepdim = x.made.args
        with graph.inserting_before(x.made):
            emit = Emitter(graph)
            shift = x.shift
            if not x.log.users:  # 0 in place of an infinity, whose difference to itself is NaN
                largest = emit(aten.amax.default, inner, dims, True)
                zero = emit(aten.full.default, [], 0.0, dtype=dtype(inner), device=value(inner).device)
                infinite = emit(aten.eq.Scalar, emit(aten.abs.default, largest), float("inf"))
                shift = emit(aten.where.self, infinite, zero, largest)
            exp = emit(aten.exp.default, emit(aten.sub.Tensor, inner, shift))
            log = emit(aten.log.default, emit(aten.sum.dim_IntList, exp, dims, *keepdim))
            x.log.replace_all_uses_with(log)
            if set(x.made.users) - {x.log}:
                back = shift if any(keepdim) else emit(aten.squeeze.dims, shift, dims)
                x.made.replace_all_uses_with(emit(aten.add.Tensor, log, back))
    graph.eliminate_dead_code()


def _steps(log: Node) -> tuple[Node, Node, Node] | None:
    """The sum, x and the shift of a node that is this logarithm."""
    sum_ = _argument(log, "log")
    exp = _argument(sum_, "sum")
    inner = _argument(exp, "exp")
    if sum_ is None or inner is None or name(inner) != "sub" or inner.kwargs or sum_.kwargs or len(sum_.args) < 2:
        return None
    x, shift = inner.args
    if not (isinstance(x, torch.fx.Node) and isinstance(shift, torch.fx.Node) and same(shape(x), shape(inner))):
        return None
    dims = {d % len(shape(x)) for d in sum_.args[1]}
    kept = tuple(1 if d in dims else extent for d, extent in enumerate(shape(x)))
    return (sum_, x, shift) if dims and same(shape(shift), kept) else None


def _argument(node: Node | None, op: str) -> Node | None:
    """The first argument of a node that is this operation."""
    return node.args[0] if node is not None and name(node) == op else None
