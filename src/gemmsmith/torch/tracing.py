"""From an epilogue and the operands of a call to a graph's text: at once, or while torch.compile traces."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from gemmsmith.binding import written_graph
from gemmsmith.core.bounded import Bounded
from gemmsmith.core.dtypes import FP32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Extent, Graph, Operand, bare
from gemmsmith.epilogue.frontend.fingerprint import fingerprint
from gemmsmith.epilogue.frontend.snapshot import snapshot
from gemmsmith.scaling import scaled
from gemmsmith.torch import text
from gemmsmith.torch.backward import constant
from gemmsmith.torch.recording import Tape, replayed
from gemmsmith.torch.recording import constant as recorded

Kinds = tuple[tuple[str, tuple[Any, ...], str], ...]
"""Of each operand its name, its extent, and its dtype, or nothing for a number."""
MOST_KNOWN = 1024
_KNOWN: dict[Hashable, str] = Bounded(MOST_KNOWN)
"""The texts of functions that do not ask for the number of rows."""

if getattr(torch._dynamo.config, "skip_guards_on_constant_func_defaults", False):  # as before torch 2.13
    torch._dynamo.config.skip_guards_on_constant_func_defaults = False  # else changed defaults would go stale


def epilogue_text(epilogue: Any, shape: tuple[Any, ...], kinds: Kinds, scales: Kinds) -> str:
    """The text of an epilogue's graph for a product of `shape`, (m, n) with any indices in front, which is multiplied
    by its `scales` before all else. Raises EpilogueError."""
    if epilogue is None:
        return _bare(scales)
    if torch.compiler.is_dynamo_compiling():
        return _compiled(epilogue, shape, kinds, scales)
    source = fingerprint(epilogue)
    rest = len(shape), shape[-1], kinds, scales
    if source is not None and (known := _KNOWN.get((source, rest))):
        return known
    epilogue, source = snapshot(epilogue)
    graph, sized = written_graph(epilogue, shape, _operands(kinds))
    found = _written(graph, scales)
    if source is not None and not sized:
        _KNOWN[source, rest] = found
    return found


def _compiled(epilogue: Any, shape: tuple[Any, ...], kinds: Kinds, scales: Kinds) -> str:
    """Runs the function on values that note what is done to them."""
    if not callable(epilogue) or isinstance(epilogue, type):
        raise ArgumentError("epilogue: got no function; use one in code that is compiled")
    tape = Tape(shape)
    acc = tape.value(shape)
    operands = {}
    for name, _, dtype in kinds:
        operands[name] = tape.value(None, not dtype)
    returned = epilogue(acc, **operands)
    form = "dict" if isinstance(returned, dict) else "tuple" if isinstance(returned, (tuple, list)) else "one"
    several = returned if form != "one" else (returned,)
    if form == "dict":
        results = tuple([(name, recorded(x)) for name, x in returned.items()])
    else:
        results = tuple([(f"out{i or ''}", recorded(x)) for i, x in enumerate(several)])
    columns = len(range(shape[-1]))  # a number, which is guarded, where it is a symbol
    return _replayed(tuple(tape.entries), results, form, len(shape), columns, kinds, scales)


@constant
def _replayed(entries: Any, results: Any, form: str, rank: int, columns: int, kinds: Kinds, scales: Kinds) -> str:
    # no text depends on the number of rows: a function that asked for it has it as a number
    shape = (*(2,) * (rank - 1), columns)
    return _written(replayed(entries, results, form, shape, _operands(kinds)), scales)


@constant
def _bare(scales: Kinds) -> str:
    graph = bare(FP32)
    graph = Graph(graph.nodes, (), tuple(r.__class__(r.name, r.node) for r in graph.results))
    return _written(graph, scales)


def _written(graph: Graph, scales: Kinds) -> str:
    """The text of the product that is multiplied by its scales first."""
    return text.write(scaled(graph, [Operand(name, *kind) for name, kind in _operands(scales).items()]))


def _operands(kinds: Kinds) -> Mapping[str, tuple[Extent, DType | None]]:
    return {name: (_extent(extent), dtype_of(dtype)) for name, extent, dtype in kinds}


def _extent(given: tuple[Any, ...]) -> Extent:
    batch, height, width = given
    return Extent(bool(batch), height, width)


def dtype_of(name: str) -> DType | None:
    """The dtype of a tensor, torch.float64 standing for fp32."""
    if not name:
        return None
    return FP32 if name == "torch.float64" else as_dtype(name.removeprefix("torch."), integers=True)
