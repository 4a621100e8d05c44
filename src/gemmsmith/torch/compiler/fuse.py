"""The pass over one graph: every product takes into its epilogue what saves bytes there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import Graph
from gemmsmith.epilogue.lines import line
from gemmsmith.epilogue.passes import optimize
from gemmsmith.torch import text
from gemmsmith.torch.compiler import forge
from gemmsmith.torch.compiler.nodes import Node, kind, value
from gemmsmith.torch.compiler.products import Product, product, refusal
from gemmsmith.torch.compiler.region import Region
from gemmsmith.torch.compiler.rewrite import replace
from gemmsmith.torch.compiler.softmax import recognize, restore
from gemmsmith.torch.compiler.traffic import Traffic


@dataclass(frozen=True)
class Outcome:
    """What became of a product: its `epilogue` and the bytes `saved`, or `why` there is none. `line`: the user's."""

    product: str
    shape: tuple[Any, ...]
    line: str
    why: str = ""
    saved: int = 0
    epilogue: Graph | None = None

    @property
    def computed(self) -> tuple[str, ...]:
        """The operations in its epilogue, such as "gelu" and "sum m", a sum over rows."""
        if self.epilogue is None:
            return ()
        of_reduction = (" ".join(node.value) if node.op == "reduce" else node.op for node in self.epilogue.nodes)
        return tuple(x for x in of_reduction if x not in ("accumulator", "operand", "constant", "cast"))


def fuse(graph: torch.fx.Graph) -> list[Outcome]:
    """Fuses in place, and says of each product what became of it."""
    written_out = recognize(graph)
    traffic = Traffic(graph)
    outcomes = [_outcome(found, traffic) for node in list(graph.nodes) if (found := product(node))]
    restore(graph, written_out)
    return outcomes


def _outcome(found: Product, traffic: Traffic) -> Outcome:
    left = partial(Outcome, found.node.name, found.shape, user_line(found.node))
    if why := refusal(found):
        return left(why)
    try:
        region = Region(found, traffic)
        choice = region.choice()
        if choice is None:
            return left(_why_not(region))
        if value(found.a).is_cuda and (why := forge.refusal(region, choice)):
            return left(why)
        node = replace(region, choice)
    except EpilogueError as error:
        return left(str(error).rpartition("\n")[2].strip())
    return left(saved=choice.saved, epilogue=_optimized(node.args[3]))


@lru_cache(maxsize=1024)
def _optimized(epilogue: str) -> Graph:
    return optimize(text.read(epilogue))


def _why_not(region: Region) -> str:
    refused = next(iter(region.refused.values()), "")
    if any(kind(x) != "view" for x in region.members[len(region.own) :]):
        return f"no fewer bytes would be moved{'; ' * bool(refused)}{refused}"
    if refused:
        return refused
    returned = any(user.op == "output" for x in region.members for user in x.users)
    return "it is a result of the graph" if returned else "only operations that are not fused read it"


def user_line(node: Node) -> str:
    """Where a node comes from, "file.py:12: text of the line"; "" where that is not known."""
    frames = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    return line(frames[-1][0], int(frames[-1][1])) if frames else ""
