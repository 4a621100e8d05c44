"""Serialization of an epilogue graph as a string, which another process deserializes to an equal graph.

    bias n bf16 | accumulator; operand: bias; add 0 1; gelu 2 | out 3 bf16

Two borders take a string: the operator's arguments, and torch.compile, which passes from one `dynamo_constant` to the
next only values of Python's own types. Inside of such functions graphs are graphs.

Operands: the name, the dimensions along which it varies (batch, m, n; m2 and n2 for values of halves; "one" for a
scalar), and its dtype or "number". Nodes, numbered from 0: the operation (after records have been replaced, "~" and how
many), its inputs, and after a colon its value.
Results: the name, the node, the dtype if it has one, "keepdim".
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.core.graph import OPERATIONS, BroadcastDims, EpilogueGraph, Node, Operand, Result
from gemmsmith.core.records import Records

SECTION_SEPARATOR = " | "
ENTRY_SEPARATOR = "; "
NUMBER = "number"
SCALAR = "one"
KEEPDIM = "keepdim"


@lru_cache(maxsize=1024)
def serialize(graph: EpilogueGraph) -> str:
    """Return a graph as a string, without sizes and source lines."""
    operands = [f"{o.name} {_serialize_dims(o.broadcast_dims)} {o.dtype or NUMBER}" for o in graph.operands]
    results = [" ".join([r.name, str(r.node), *_optional(r.dtype), *[KEEPDIM] * r.keepdim]) for r in graph.results]
    return SECTION_SEPARATOR.join(map(ENTRY_SEPARATOR.join, (operands, map(_serialize_node, graph.nodes), results)))


@lru_cache(maxsize=1024)
def deserialize(serialized: str) -> EpilogueGraph:
    """Return the graph that `serialize` returned this string for."""
    operands, nodes, results = (
        section.split(ENTRY_SEPARATOR) if section else [] for section in serialized.split(SECTION_SEPARATOR)
    )
    return EpilogueGraph(
        tuple(_read_node(entry) for entry in nodes),
        tuple(_read_operand(*entry.split()) for entry in operands),
        tuple(_read_result(*entry.split()) for entry in results),
    )


def digest(serialized: str) -> int:
    """Return a 56-bit hash of a serialized graph, equal in every process."""
    return int.from_bytes(hashlib.sha256(serialized.encode()).digest()[:7], "little")


def _optional(x: Any) -> list[str]:
    return [] if x is None else [str(x)]


def _serialize_dims(dims: BroadcastDims) -> str:
    # by the rows (columns) per value: 0 if it does not vary along m (n)
    suffix_formats = {0: "", 1: "{}", 2: "{}2"}
    names = (
        "batch" * dims.batch,
        suffix_formats[dims.rows_per_value].format("m"),
        suffix_formats[dims.columns_per_value].format("n"),
    )
    return ",".join(filter(None, names)) or SCALAR


def _serialize_node(node: Node) -> str:
    value = node.attribute if isinstance(node.attribute, tuple) else _optional(node.attribute)
    op = f"{node.op}~{Records.replaced}" if Records.replaced else node.op
    return " ".join(map(str, (op, *node.inputs))) + (": " + " ".join(map(str, value)) if value else "")


def _read_operand(name: str, dims: str, dtype: str) -> Operand:
    varying = dims.split(",")
    indices_per_value = {
        axis: next((n for n, suffixed in ((1, axis), (2, axis + "2")) if suffixed in varying), 0) for axis in "mn"
    }
    broadcast_dims = BroadcastDims("batch" in varying, indices_per_value["m"], indices_per_value["n"])  # type: ignore[arg-type]
    return Operand(name, broadcast_dims, None if dtype == NUMBER else _dtype(dtype))


def _read_node(entry: str) -> Node:
    call, _, value = entry.partition(": ")
    op, *inputs = call.split()
    op, _, _ = op.partition("~")
    kind = OPERATIONS[op].attribute_type
    parts = tuple(map(_read_attribute, kind, value.split())) if isinstance(kind, tuple) else None
    return Node(op, tuple(map(int, inputs)), parts or (_read_attribute(kind, value) if kind else None))


def _read_attribute(kind: Any, word: str) -> Any:
    return _dtype(word) if kind is DType else kind(word)


def _read_result(name: str, node: str, *rest: str) -> Result:
    dtype = next((_dtype(word) for word in rest if word != KEEPDIM), None)
    return Result(name, int(node), dtype, KEEPDIM in rest)


def _dtype(name: str) -> DType:
    return as_dtype(name, allow_integers=True)
