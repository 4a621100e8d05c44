"""Serialization of an epilogue graph as a string, which another process deserializes to an equal graph.

    bias n bf16 | accumulator; operand: bias; add 0 1; gelu 2 | out 3 bf16

Operators take strings, and torch.compile passes only values of Python's own types from one `dynamo_constant` to the
next.

The string has three sections. Operands: the name, the dimensions along which it varies (batch, m, n; m2 and n2 for
values of halves; "one" for a scalar), and its dtype or "number". Nodes, numbered from 0: the operation, its inputs, and
after a colon its attribute. Results: the name, the node, the dtype if it has one, "keepdim" if it keeps reduced
dimensions. Once registered records (functions, reductions) have been replaced by others of the same names, "~" and how
many follow each operation, so that the string differs from one with the earlier meaning.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

from gemmsmith.core.dicts import Records
from gemmsmith.core.dtypes import FP32, DType, as_dtype
from gemmsmith.core.graph import OPERATIONS, BroadcastDims, EpilogueGraph, Node, Operand, Result, attribute_parts

SECTION_SEPARATOR = " | "
ENTRY_SEPARATOR = "; "
NUMBER = "number"
SCALAR = "one"
KEEPDIM = "keepdim"
PLAIN_GEMM = " | accumulator | out 0"
"""The epilogue that returns the accumulator in a's dtype."""


@lru_cache(maxsize=1024)
def serialize(graph: EpilogueGraph) -> str:
    """Return a graph as a string, without sizes and source lines."""
    operands = [f"{o.name} {_DIMS[o.broadcast_dims]} {o.dtype or NUMBER}" for o in graph.operands]
    entries = operands, map(_serialize_node, graph.nodes), map(_serialize_result, graph.results)
    return SECTION_SEPARATOR.join(map(ENTRY_SEPARATOR.join, entries))


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
    """Return a 56-bit hash of a serialized graph, equal in every process; an operator's int has 64 bits with sign."""
    return int.from_bytes(hashlib.sha256(serialized.encode()).digest()[:7], "little")


_DIMS = {
    BroadcastDims(bool(batch), rows, columns): ",".join(filter(None, ("batch" * batch, m, n))) or SCALAR  # type: ignore[arg-type]
    for batch in range(2)
    for rows, m in enumerate(("", "m", "m2"))
    for columns, n in enumerate(("", "n", "n2"))
}
_DIMS_OF_TEXT = {text: dims for dims, text in _DIMS.items()}


def _serialize_node(node: Node) -> str:
    op = f"{node.op}~{Records.replaced}" if Records.replaced else node.op
    value = " ".join(map(str, attribute_parts(node.attribute)))
    return " ".join(map(str, (op, *node.inputs))) + (f": {value}" if value else "")


def _serialize_result(r: Result) -> str:
    words = r.name, r.node, r.dtype, KEEPDIM if r.keepdim else None
    return " ".join(str(x) for x in words if x is not None)


def _read_operand(name: str, dims: str, dtype: str) -> Operand:
    return Operand(name, _DIMS_OF_TEXT[dims], None if dtype == NUMBER else graph_dtype(dtype))


def _read_node(entry: str) -> Node:
    """Return a node from its text, such as "reduce 1: sum m"."""
    call, _, value = entry.partition(": ")
    op, *inputs = call.split()
    op, _, _ = op.partition("~")
    kind = OPERATIONS[op].attribute_type
    parts = tuple(map(_read_attribute, kind, value.split())) if isinstance(kind, tuple) else None
    return Node(op, tuple(map(int, inputs)), parts or (_read_attribute(kind, value) if kind else None))


def _read_attribute(kind: Any, word: str) -> Any:
    return graph_dtype(word) if kind is DType else kind(word)


def _read_result(name: str, node: str, *rest: str) -> Result:
    dtype = next((graph_dtype(word) for word in rest if word != KEEPDIM), None)
    return Result(name, int(node), dtype, KEEPDIM in rest)


def graph_dtype(dtype: Any) -> DType:
    """Return the DType of a torch.dtype, or of a name such as "bf16" or "torch.bfloat16".

    float64 becomes FP32: with an a of float64, all that is fp32 otherwise is computed in float64.
    """
    name = str(dtype).removeprefix("torch.")
    return FP32 if name == "float64" else as_dtype(name, allow_integers=True)
