"""log(sum(exp(x - shift))) is logsumexp(x) - shift, whatever the shift is. While products are fused it is a node of its
own, so that it becomes a reduction in an epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemmsmith.torch.compiler.nodes import Emitter, Node, name, same, shape

aten = torch.ops.aten


@dataclass(frozen=True)
class LogSumExp:
    """A node `made` for logsumexp(x), and the one that stands for the logarithm: this minus the shift."""

    made: Node
    log: Node
    shift: Node


def recognise(graph: torch.fx.Graph) -> list[LogSumExp]:
    """Puts aten.logsumexp where a graph computes it step by step."""
    found = []
    for node in list(graph.nodes):
        if (steps := _steps(node)) is None:
            continue
        sum_, x, shift = steps
        with graph.inserting_before(node):
            emit = Emitter(graph)
            made = emit(aten.logsumexp.default, x, *sum_.args[1:])
            log = emit(aten.sub.Tensor, made, shift)
        node.replace_all_uses_with(log)
        found.append(LogSumExp(made, log, shift))
    graph.eliminate_dead_code()
    return found


def restore(graph: torch.fx.Graph, known: list[LogSumExp]) -> None:
    """Takes those apart again that no product has taken: Inductor makes one kernel of the steps."""
    for x in known:
        if x.made in x.log.all_input_nodes:
            inner, *dims = x.made.args
            with graph.inserting_before(x.made):
                emit = Emitter(graph)
                exp = emit(aten.exp.default, emit(aten.sub.Tensor, inner, x.shift))
                log = emit(aten.log.default, emit(aten.sum.dim_IntList, exp, *dims))
            x.log.replace_all_uses_with(log)
            graph.erase_node(x.log)
            graph.erase_node(x.made)


def _steps(log: Node) -> tuple[Node, Node, Node] | None:
    """The sum, x and the shift of a node that is this logarithm."""
    sum_ = _argument(log, "log")
    exp = _argument(sum_, "sum")
    inner = _argument(exp, "exp")
    if sum_ is None or inner is None or name(inner) != "sub" or inner.kwargs or sum_.kwargs:
        return None
    x, shift = inner.args
    if not (isinstance(x, torch.fx.Node) and isinstance(shift, torch.fx.Node)):
        return None
    kept = len(shape(sum_)) == len(shape(inner)) and same(shape(x), shape(inner)) and same(shape(shift), shape(sum_))
    return (sum_, x, shift) if kept and len(sum_.args) == 3 else None


def _argument(node: Node | None, op: str) -> Node | None:
    """The first argument of a node that is this operation."""
    return node.args[0] if node is not None and name(node) == op else None
