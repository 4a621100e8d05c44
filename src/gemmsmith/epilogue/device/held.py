"""What an epilogue holds in registers beside the accumulator."""

from __future__ import annotations

from gemmsmith.core.graph import Graph
from gemmsmith.core.mma import WARPGROUP, WGMMA_M
from gemmsmith.epilogue.device.rows import WHOLE_ROWS


def sources(graph: Graph) -> dict[int, int]:
    """The functions of whole rows, and the nodes whose elements they hold."""
    return {i: node.inputs[0] for i, node in enumerate(graph.nodes) if node.op in WHOLE_ROWS}


def last_of_product(graph: Graph) -> set[int]:
    """The nodes through which everything reads the product: results themselves, or what functions of whole rows hold.
    Where it is one that is held, its elements may be kept in the accumulator."""
    held = set(sources(graph).values())
    found: set[int] = set()
    seen: set[tuple[int, int]] = set()
    stack = [(r.node, r.node) for r in graph.results]
    while stack:
        i, root = stack.pop()
        root = i if i in held else root
        if graph.nodes[i].op == "accumulator":
            found.add(root)
        elif (i, root) not in seen:
            seen.add((i, root))
            stack += [(j, root) for j in graph.nodes[i].inputs]
    return found


def held_registers(graph: Graph, columns: int) -> int:
    """Registers of a thread, beside the accumulator, for elements that are held of a piece of so many columns."""
    extents, last = graph.extents(), last_of_product(graph)
    apart = {i for i in sources(graph).values() if last != {i}}
    return sum(WGMMA_M * columns // (extents[i].width or 1) // WARPGROUP for i in apart)
