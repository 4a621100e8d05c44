"""The pass over one graph: every product takes into its epilogue what saves bytes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gemmsmith.core.errors import EpilogueError
from gemmsmith.torch.compiler.nodes import kind, name
from gemmsmith.torch.compiler.products import Product, product, refusal
from gemmsmith.torch.compiler.region import Region
from gemmsmith.torch.compiler.rewrite import replace
from gemmsmith.torch.compiler.softmax import recognise, restore
from gemmsmith.torch.compiler.traffic import Traffic
from gemmsmith.torch.operator import OPERATORS


@dataclass(frozen=True)
class Outcome:
    """What became of a product: the operations `fused` with it and the bytes `saved`, or `why` nothing was."""

    product: str
    shape: tuple[Any, ...]
    fused: tuple[str, ...] = ()
    saved: int = 0
    why: str = ""


def fuse(graph: torch.fx.Graph) -> list[Outcome]:
    """Fuses in place, and says of each product what became of it."""
    written_out = recognise(graph)
    traffic, outcomes = Traffic(graph.nodes), []
    for node in list(graph.nodes):
        if found := product(node):
            outcomes.append(_outcome(found, traffic))
            if outcomes[-1].fused:
                traffic = Traffic(graph.nodes)
    restore(graph, written_out)
    return outcomes


def _outcome(found: Product, traffic: Traffic) -> Outcome:
    title = found.node.name
    if why := refusal(found):
        return Outcome(title, found.shape, why=why)
    try:
        region = Region(found, traffic)
        choice = region.choice()
        if choice is None:
            return Outcome(title, found.shape, why=_why_not(region))
        replace(region, choice)
    except EpilogueError as error:
        return Outcome(title, found.shape, why=str(error).rpartition("\n")[2].strip())
    fused = tuple(name(x) for x in choice.members if x not in region.own and kind(x) != "view")
    return Outcome(title, found.shape, fused, choice.saved)


def _why_not(region: Region) -> str:
    if any(kind(x) != "view" for x in region.members[len(region.own) :]):
        return "no fewer bytes would be moved"
    if user := next((x for x in region.product.node.users if x.target in OPERATORS.values()), None):
        return f"{user.name} reads it in its epilogue"
    return next(iter(region.refused.values()), "only operations that are not fused read it")
