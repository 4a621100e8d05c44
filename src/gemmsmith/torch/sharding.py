"""How DTensor may split a product with its epilogue: by rows, columns, the batch or K."""

from __future__ import annotations

import sys
from typing import Any

from gemmsmith.core.graph import Extent, Graph, Result
from gemmsmith.torch import text

Sharding = tuple[list[Any], list[Any]]
"""Placements of results, and of a, b, three arguments that are no tensors, and operands."""
_WHOLE_ROWS = frozenset({"one_hot", "quantize", "scale", "top_k_softmax"})
_PARTIAL = {"sum": "sum", "max": "max", "min": "min"}
_registered = False


def register(operators: list[Any]) -> None:
    """Tells DTensor of the operators, once somebody has imported it."""
    global _registered
    if _registered or "torch.distributed.tensor" not in sys.modules:
        return
    _registered = True
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(operators)(shardings)


def shardings(a: Any, b: Any, key: int, epilogue: str, numbers: Any, *operands: Any) -> list[Sharding]:
    """All that may be, for one index of the mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    graph, rank = text.read(epilogue), max(a.ndim, b.ndim)
    kinds = [o.extent for o in graph.operands if o.dtype is not None]
    none = [None] * 3

    def split(axis: str, of_a: Any, of_b: Any) -> list[Sharding]:
        results = [_result(graph, r, axis, rank) for r in graph.results]
        if any(isinstance(x, bool) for x in results):
            return []
        made = [Shard(x) if isinstance(x, int) else Partial(x) for x in results]
        dims = [_dimension(extent, axis, x.ndim) for extent, x in zip(kinds, operands, strict=True)]
        return [(made, [of_a, of_b, *none, *(Replicate() if d is None else Shard(d) for d in dims)])]

    same = ([Replicate()] * len(graph.results), [Replicate(), Replicate(), *none, *[Replicate()] * len(kinds)])
    found: list[Sharding] = [same, *split("m", Shard(a.ndim - 2), Replicate())]
    if not graph.halves and not any(node.op in _WHOLE_ROWS for node in graph.nodes):
        found += split("n", Replicate(), Shard(b.ndim - 1))
    batches = {x.shape[0] for x in (a, b) if x.ndim == 3}
    if len(batches) == 1 and batches != {1}:
        found += split("batch", *(Shard(0) if x.ndim == 3 else Replicate() for x in (a, b)))
    if _linear(graph):
        made = [Partial("sum")] * len(graph.results)
        found.append((made, [Shard(a.ndim - 1), Shard(b.ndim - 2), *none, *[Replicate()] * len(kinds)]))
    return found


def _dimension(extent: Extent, axis: str, rank: int) -> int | None:
    """Which of an operand's indices is split with the product's rows (m), columns (n) or batch."""
    if axis == "batch":
        return 0 if extent.batch and rank == 3 else None
    if axis == "m":
        return rank - 2 if extent.height and rank > 1 else None
    return rank - 1 if extent.width else None


def _result(graph: Graph, r: Result, axis: str, rank: int) -> int | str | bool:
    """The result's index that is split, or how parts of it are put together; False if they cannot be."""
    node = graph.nodes[r.node]
    own = {"batch": 0, "m": rank - 2, "n": rank - 1}[axis]
    if node.op != "reduce":
        return own
    kind, over = node.value
    if over in (axis, "all"):
        return _PARTIAL.get(kind, False)
    return own - 1 if over == "m" and axis == "n" and not r.keepdim else own


def _linear(graph: Graph) -> bool:
    """Whether the results of a sum of products are the sums of their results: nothing is added to the product, and it
    is not rounded."""
    linear: list[bool] = []
    free: list[bool] = []
    for node in graph.nodes:
        inputs = node.inputs
        free.append(node.op != "accumulator" and all(free[i] for i in inputs))
        of = [linear[i] for i in inputs]
        match node.op:
            case "accumulator":
                linear.append(True)
            case "neg" | "add" | "sub" | "chunk" | "interleave":
                linear.append(all(of))
            case "mul":
                linear.append((of[0] and free[inputs[1]]) or (of[1] and free[inputs[0]]))
            case "div":
                linear.append(of[0] and free[inputs[1]])
            case "reduce":
                linear.append(of[0] and node.value[0] in ("sum", "mean"))
            case _:
                linear.append(False)
    return all(linear[r.node] for r in graph.results)
