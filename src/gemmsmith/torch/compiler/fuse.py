"""The post-grad pass over one graph: fuses into each matmul the operations after it that save memory traffic there.

On a GPU it also replaces matmuls that gemmsmith is faster for without an epilogue.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.passes import optimize
from gemmsmith.graph.source_location import format_location
from gemmsmith.torch.compiler.kernel_choice import Choice, Times, choose_kernel
from gemmsmith.torch.compiler.logsumexp import replace_log_sum_exp, restore
from gemmsmith.torch.compiler.matmuls import Matmul, match_matmul, match_pairs, unsupported_reason
from gemmsmith.torch.compiler.measure import Timer
from gemmsmith.torch.compiler.nodes import Node, node_kind
from gemmsmith.torch.compiler.region import FusionCandidate, Region
from gemmsmith.torch.compiler.rewrite import insert_fused_op
from gemmsmith.torch.compiler.traffic import InductorTraffic


@dataclass(frozen=True)
class Outcome:
    """The outcome for one matmul: its `epilogue` and `bytes_saved`, or the `reason` why nothing is fused.

    `replaced` says whether a kernel of gemmsmith takes its place, with an epilogue or without. `source_line` is the
    line of the model that the matmul comes from. `times` are those by which its kernel was chosen; None on the CPU, and
    where there was no choice.
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
    """Replace matmuls of a graph, in place, with what can be fused into them, and return the outcome for each.

    `timer` measures kernels on a GPU; without it they are chosen by the cost model.
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
    """Fuse a matmul and another one that a node of their epilogue needs, too; None if there is none."""
    for pair in match_pairs(matmul):
        if pair.second and pair.second.node not in done:
            outcome = _fuse_matmul(pair, traffic, timer)
            if outcome.epilogue:
                done.add(pair.second.node)
                return outcome
    return None


def _fuse_matmul(matmul: Matmul, traffic: InductorTraffic, timer: Timer | None) -> Outcome:
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
    """Return why nothing is fused, whatever the times; "" if the candidate may be."""
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
