"""An epilogue graph as text, which another process reads back to an equal graph.

    bias n bf16 | accumulator; operand: bias; add 0 1; gelu 2 | out 3 bf16

Operands: the name, what it varies along (batch, m, n; m2 and n2 for values of halves; "one" for a scalar), its dtype or
"number". Nodes, numbered from 0: the operation, its inputs, and after a colon its value. Results: the name, the node,
the dtype where it has one, "keepdim".
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.core.graph import Extent, Graph, Node, Operand, Result

SECTIONS, ENTRIES = " | ", "; "
NUMBER, SCALAR, KEEPDIM = "number", "one", "keepdim"


@lru_cache(maxsize=1024)
def write(graph: Graph) -> str:
    """The graph's text. It has no sizes and no lines of the user's."""
    operands = [f"{o.name} {_extent(o.extent)} {o.dtype or NUMBER}" for o in graph.operands]
    results = [" ".join([r.name, str(r.node), *_known(r.dtype), *[KEEPDIM] * r.keepdim]) for r in graph.results]
    return SECTIONS.join(map(ENTRIES.join, (operands, map(_node, graph.nodes), results)))


@lru_cache(maxsize=1024)
def read(text: str) -> Graph:
    """The graph that `write` gave as this text."""
    operands, nodes, results = (part.split(ENTRIES) if part else [] for part in text.split(SECTIONS))
    return Graph(
        tuple(_read_node(entry) for entry in nodes),
        tuple(_read_operand(*entry.split()) for entry in operands),
        tuple(_read_result(*entry.split()) for entry in results),
    )


def unbatched(graph: Graph) -> Graph:
    """The graph whose operands have no batch."""
    return replace(graph, operands=tuple(replace(o, extent=o.extent._replace(batch=False)) for o in graph.operands))


def key(text: str) -> int:
    """A number that stands for the text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _known(x: Any) -> list[str]:
    return [] if x is None else [str(x)]


def _extent(extent: Extent) -> str:
    lengths = {0: "", 1: "{}", 2: "{}2"}
    along = ("batch" * extent.batch, lengths[extent.height].format("m"), lengths[extent.width].format("n"))
    return ",".join(filter(None, along)) or SCALAR


def _node(node: Node) -> str:
    value = node.value if isinstance(node.value, tuple) else _known(node.value)
    return " ".join(map(str, (node.op, *node.inputs))) + (": " + " ".join(map(str, value)) if value else "")


def _read_operand(name: str, extent: str, dtype: str) -> Operand:
    along = extent.split(",")
    lengths = {axis: next((n for n, word in ((1, axis), (2, axis + "2")) if word in along), 0) for axis in "mn"}
    kind = Extent("batch" in along, lengths["m"], lengths["n"])  # type: ignore[arg-type]
    return Operand(name, kind, None if dtype == NUMBER else _dtype(dtype))


def _read_node(entry: str) -> Node:
    made, _, value = entry.partition(": ")
    op, *inputs = made.split()
    words = value.split()
    match op:
        case "constant":
            found: Any = float(value)
        case "chunk":
            found = int(words[0]), words[1]
        case "cast":
            found = _dtype(value)
        case "reduce":
            found = words[0], words[1]
        case "quantize":
            found = _dtype(words[0]), int(words[1])
        case "top_k_softmax":
            found = int(value)
        case _:
            found = value or None
    return Node(op, tuple(map(int, inputs)), found)


def _read_result(name: str, node: str, *rest: str) -> Result:
    dtype = next((_dtype(word) for word in rest if word != KEEPDIM), None)
    return Result(name, int(node), dtype, KEEPDIM in rest)


def _dtype(name: str) -> DType:
    return as_dtype(name, integers=True)
