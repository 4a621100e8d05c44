"""What an epilogue holds in registers beside the accumulator."""

from __future__ import annotations

from gemmsmith.core.graph import Graph
from gemmsmith.core.mma import WARPGROUP, WGMMA_M
from gemmsmith.epilogue.device.rows import WHOLE_ROWS


def last_of_product(graph: Graph) -> set[int]:
    """The nodes through which everything reads the product: results themselves, or functions of whole rows. Where it is
    one function of whole rows, that may keep its elements in the accumulator."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = [(r.node, r.node) for r in graph.results]
    while stack:
        i, root = stack.pop()
        root = i if graph.nodes[i].op in WHOLE_ROWS else root
        if graph.nodes[i].op == "accumulator":
            found.add(root)
        elif i not in seen or root not in found:
            seen.add(i)
            stack += [(j, root) for j in graph.nodes[i].inputs]
    return found


def held_registers(graph: Graph, columns: int) -> int:
    """Registers of a thread for the quantised elements of a piece of so many columns."""
    extents, held = graph.extents(), 0
    for i, node in enumerate(graph.nodes):
        if node.op == "quantize" and last_of_product(graph) != {i}:
            held += WGMMA_M * columns // (extents[i].width or 1) // WARPGROUP
    return held
