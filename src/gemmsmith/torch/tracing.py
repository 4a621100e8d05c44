"""Serialization of a call's epilogue for its operands, in eager mode or while torch.compile traces."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from gemmsmith.binding.graphs import build_source_graph, with_result_dtypes
from gemmsmith.binding.scaling import multiply_by_scales
from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Operand
from gemmsmith.graph.frontend.fingerprint import fingerprint
from gemmsmith.torch import graph_serialization
from gemmsmith.torch.backward_plan import dynamo_constant
from gemmsmith.torch.graph_serialization import graph_dtype
from gemmsmith.torch.recording import Tape, encode_argument, replay

OperandSignature = tuple[tuple[str, tuple[Any, ...], str], ...]
"""For each operand its name, its extent (the fields of `BroadcastDims` as integers), its dtype or "" for a number."""
CACHE_SIZE = 1024
"""Entries of the caches by call and by epilogue. Chosen; not measured."""
_EPILOGUE_CACHE: dict[Hashable, str] = BoundedCache(CACHE_SIZE)
"""Serialized epilogues of functions that do not read the number of rows."""


def serialize_epilogue(
    epilogue: Any, shape: tuple[Any, ...], operands: OperandSignature, scales: OperandSignature,
    source: Hashable = None,
) -> str:  # fmt: skip
    """Return the serialized graph of an epilogue, in eager mode or while Dynamo traces the call.

    `shape`: that of a @ b: (m, n) with any leading dimensions. `scales`: the signature of operands by which a @ b is
    multiplied before the epilogue. `source`: the epilogue's fingerprint; None: it is computed here. Raises
    EpilogueError for an invalid epilogue.
    """
    if epilogue is None:
        return _serialize_plain_gemm(scales)
    if torch.compiler.is_dynamo_compiling():
        return _serialize_under_dynamo(epilogue, shape, operands, scales)
    source = source or fingerprint(epilogue)
    signature = len(shape), shape[-1], operands, scales
    if source is not None and (cached := _EPILOGUE_CACHE.get((source, signature))):
        return cached
    graph, sized = build_source_graph(epilogue, source, shape, _operands(operands))
    serialized = _serialize_scaled(graph, scales)
    if source is not None and not sized:
        _EPILOGUE_CACHE[source, signature] = serialized
    return serialized


def _serialize_under_dynamo(
    epilogue: Any, shape: tuple[Any, ...], operands: OperandSignature, scales: OperandSignature
) -> str:
    """Return an epilogue's serialized graph while Dynamo traces the call: run it on proxies that record operations.

    The ordinary tracer then replays the recorded calls, outside of what Dynamo traces.
    """
    if not callable(epilogue) or isinstance(epilogue, type):
        raise ArgumentError(f"epilogue: got {type(epilogue).__name__}; use a function in compiled code")
    tape = Tape(shape)
    acc = tape.value(shape)
    proxies = {}
    for name, _, dtype in operands:
        proxies[name] = tape.value(None, not dtype)
    returned = encode_argument(epilogue(acc, **proxies))
    columns = len(range(shape[-1]))  # makes a symbolic size a guarded number
    return _replay_and_serialize(tuple(tape.entries), returned, len(shape), columns, operands, scales)


@dynamo_constant
def _replay_and_serialize(
    entries: Any, returned: Any, rank: int, columns: int, operands: OperandSignature, scales: OperandSignature
) -> str:
    """Replay the recorded calls of a `Tape`, and return the serialized graph of what they compute.

    `returned`: what the epilogue returned, by `encode_argument`. `rank`: the dimensions of a @ b, all leading ones
    included; `columns`: its columns.
    """
    # The graph does not depend on the number of rows: a function that reads it gets it as a number from Dynamo.
    shape = (*(2,) * (rank - 1), columns)
    return _serialize_scaled(replay(entries, returned, shape, _operands(operands)), scales)


@dynamo_constant
def with_out_dtype(epilogue: str, out_dtype: str) -> str:
    """Return a serialized epilogue whose matrices without a dtype get one. Raises ArgumentError for a wrong dtype."""
    graph = with_result_dtypes(graph_serialization.deserialize(epilogue), as_dtype(out_dtype, "out_dtype"))
    return graph_serialization.serialize(graph)


@dynamo_constant
def _serialize_plain_gemm(scales: OperandSignature) -> str:
    return _serialize_scaled(graph_serialization.deserialize(graph_serialization.PLAIN_GEMM), scales)


def _serialize_scaled(graph: EpilogueGraph, scales: OperandSignature) -> str:
    """Return a graph, with its accumulator multiplied by these scales first, as a string."""
    return graph_serialization.serialize(
        multiply_by_scales(graph, [Operand(name, *kind) for name, kind in _operands(scales).items()])
    )


def _operands(signature: OperandSignature) -> Mapping[str, tuple[BroadcastDims, DType | None]]:
    """Return the dims and dtypes of a signature's operands by name, as the tracer takes them."""
    return {
        name: (BroadcastDims(bool(batch), rows, columns), graph_dtype(dtype) if dtype else None)
        for name, (batch, rows, columns), dtype in signature
    }
