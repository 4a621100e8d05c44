"""The post-grad pass over one graph: fuses into each matmul the operations after it that save memory traffic there.

On a GPU it also replaces matmuls that gemmsmith is faster for without an epilogue.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.passes import optimize
from gemmsmith.graph.source_location import epilogue_error, format_location
from gemmsmith.torch.compiler.kernel_choice import Choice, Times, choose_kernel
from gemmsmith.torch.compiler.logsumexp import replace_log_sum_exp, restore
from gemmsmith.torch.compiler.matmuls import Matmul, match_matmul, match_pairs, op_call, unsupported_reason
from gemmsmith.torch.compiler.measure import Timer
from gemmsmith.torch.compiler.nodes import Emitter, Node, later_sources, node_kind, shape, statically_equal
from gemmsmith.torch.compiler.region import FusionCandidate, Region
from gemmsmith.torch.compiler.traffic import InductorTraffic


@dataclass(frozen=True)
class Outcome:
    """What the pass did with one matmul, or with a pair of them.

    Attributes:
        matmul: the names of its nodes.
        shape: (m, n) or (batch, m, n).
        source_line: the line of the model that it comes from.
        reason: why nothing is fused; "" if something is.
        bytes_saved: the memory traffic that fusing saves.
        epilogue: what is fused, or None.
        replaced: whether a kernel of gemmsmith takes its place, with an epilogue or without.
        times: the times by which its kernel was chosen; None on the CPU, and where there was no choice.
    """

    matmul: str
    shape: tuple[Any, ...]
    source_line: str
    reason: str = ""
    bytes_saved: int = 0
    epilogue: EpilogueGraph | None = None
    replaced: bool = False
    times: Times | None = None

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations of the epilogue, such as "gelu" and "sum m" (a sum over rows)."""
        if self.epilogue is None:
            return ()
        names = (" ".join(node.attribute) if node.op == "reduce" else node.op for node in self.epilogue.nodes)
        return tuple(x for x in names if x not in ("accumulator", "operand", "constant", "cast"))


def fuse(graph: torch.fx.Graph, timer: Timer | None = None) -> list[Outcome]:
    """Replace matmuls of an FX graph, in place, by gemmsmith's operators where that is faster; return what was done.

    The operators also compute the operations after a matmul that can be fused into it. `timer` measures kernels on a
    GPU; without it they are chosen by the cost model.
    """
    recognized = replace_log_sum_exp(graph)
    traffic = InductorTraffic(graph)
    outcomes, done = [], set[Node]()
    for node in list(graph.nodes):
        if node in done or not (matmul := match_matmul(node)):
            continue
        outcome = _fuse_pair(matmul, traffic, done, timer) or _fuse_matmul(matmul, traffic, timer)
        outcomes.append(outcome)
    restore(graph, recognized)
    return outcomes


def _fuse_pair(matmul: Matmul, traffic: InductorTraffic, done: set[Node], timer: Timer | None) -> Outcome | None:
    """Replace a matmul and another one of the same a by one kernel, if an operation in its epilogue reads both.

    `done`: the second matmuls of earlier pairs; the pair's is added.
    """
    for pair in match_pairs(matmul):
        if pair.second and pair.second.node not in done:
            outcome = _fuse_matmul(pair, traffic, timer)
            if outcome.epilogue:
                done.add(pair.second.node)
                return outcome
    return None


def _fuse_matmul(matmul: Matmul, traffic: InductorTraffic, timer: Timer | None) -> Outcome:
    """Replace one matmul, or a pair of them, if that is faster; return what was done, or why nothing was."""
    name = ", ".join(x.name for x in matmul.nodes)
    outcome = partial(Outcome, name, matmul.shape, node_source_line(matmul.node))
    if reason := unsupported_reason(matmul):
        return outcome(reason)
    try:
        region = Region(matmul, traffic)
        candidate = region.best_candidate()
        reason = _reason_not_fused(region, candidate)
        choice = Choice(None if reason else candidate, reason)
        if matmul.is_on_gpu:
            choice = choose_kernel(region, choice.candidate, reason, timer)
        if choice.candidate is None:
            return outcome(choice.reason, times=choice.times)
        epilogue = insert_fused_op(region, choice.candidate)
    except EpilogueError as error:
        return outcome(str(error).rpartition("\n")[2].strip())
    outcome = partial(outcome, replaced=True, times=choice.times)
    if choice.reason and epilogue.is_identity:
        return outcome(choice.reason)
    return outcome(bytes_saved=choice.candidate.bytes_saved, epilogue=optimize(epilogue))


def _reason_not_fused(region: Region, candidate: FusionCandidate | None) -> str:
    """Return why nothing can be fused, whatever the times; "" if the candidate can be."""
    if candidate:
        is_half = region.matmul.second and not region.reads_both(candidate.nodes)
        return "no operation reads both" if is_half else ""
    reason = next(iter(region.rejected.values()), "")
    if any(node_kind(x) != "view" for x in region.nodes[len(region.roots) :]):
        return f"fusion would not reduce memory traffic{'; ' * bool(reason)}{reason}"
    if reason:
        return reason
    returned = any(user.op == "output" for x in region.nodes for user in x.users)
    return "it is a graph output" if returned else "it is consumed only by operations that cannot be fused"


def node_source_line(node: Node) -> str:
    """Return the user's line that a node comes from as "file.py:12: text of the line", or "" if it is not known."""
    frames = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    return format_location(frames[-1][0], int(frames[-1][1])) if frames else ""


def insert_fused_op(region: Region, candidate: FusionCandidate) -> EpilogueGraph:
    """Insert the operator that computes a candidate's nodes into the graph, and return its epilogue.

    Nodes that have no users any more are erased, and the traffic model is updated. Raises EpilogueError, before
    anything is changed, if a shape cannot be expressed in the graph.
    """
    matmul, epilogue, traffic = region.matmul, region.epilogue, region.traffic
    graph, fused = matmul.node.graph, epilogue.graph(candidate.outputs)
    numbers, tensors = epilogue.arguments(fused)
    for x in candidate.outputs:
        _shape_argument(shape(x), matmul.node)  # raises
    move_before([*(x for x, _ in tensors), *matmul.arrays], matmul.node)
    with graph.inserting_before(matmul.node):
        emit = Emitter(graph)
        operands = [_reshaped(emit, x, extents, matmul.node) for x, extents in tensors]
        node = emit(*op_call(fused, matmul.arrays, numbers, operands))
        node.meta["stack_trace"] = matmul.node.meta.get("stack_trace")
        count, replaced = len(fused.results), set(candidate.nodes) - candidate.recomputed
        results = [node] if count == 1 else [emit(operator.getitem, node, i) for i in range(count)]
        for output, result in zip(candidate.outputs, results, strict=True):
            new = _reshaped(emit, result, shape(output), matmul.node)
            output.replace_all_uses_with(new, delete_user_cb=lambda user: user not in replaced)
    changed = {*emit.nodes, *candidate.nodes, *(x for member in candidate.nodes for x in member.all_input_nodes)}
    traffic.opaque_depths[node] = max(traffic.opaque_depths[x] for x in candidate.nodes)
    for member in reversed(candidate.nodes):
        if not member.users and member not in candidate.recomputed:
            graph.erase_node(member)
            changed.remove(member)
    traffic.update(changed)
    return fused


def _reshaped(emit: Emitter, x: Node, extents: tuple[Any, ...], before: Node) -> Node:
    """Return a node of x in the shape `extents`: x itself, or a new reshape of it. `before`: see `_shape_argument`."""
    if statically_equal(shape(x), extents):
        return x
    return emit(torch.ops.aten.reshape.default, x, _shape_argument(extents, before))


def move_before(nodes: Sequence[Node], before: Node) -> None:
    """Move nodes, and the nodes that they are computed from, before another node of the graph.

    Raises RuntimeError if one of them is computed from that node.
    """
    later = later_sources(nodes, before)
    if before in nodes or any(before in x.all_input_nodes for x in later):
        raise RuntimeError(f"a cycle through {before} after fusing; please report this")
    for x in sorted(later):
        before.prepend(x)


def _shape_argument(extents: Sequence[Any], before: Node) -> list[Any]:
    """Return a shape as the argument of an aten.reshape that is inserted before a node.

    One symbolic extent becomes -1. Several are replaced by nodes before that one whose values they are; raises
    EpilogueError if there is no such node.
    """
    symbols = [x for x in extents if not isinstance(x, int)]
    if len(symbols) <= 1:
        return [x if isinstance(x, int) else -1 for x in extents]
    symint_nodes = (x for x in before.graph.nodes if isinstance(x.meta.get("val"), torch.SymInt) and x < before)
    node_of_symbol = {str(x.meta["val"]): x for x in symint_nodes}
    if missing := [x for x in symbols if str(x) not in node_of_symbol]:
        raise epilogue_error(f"symbolic size {missing[0]} is not available in the graph")
    return [x if isinstance(x, int) else node_of_symbol[str(x)] for x in extents]
