"""How DTensor may split a product with its epilogue: by rows, columns, the batch or K."""

from __future__ import annotations

import sys
from typing import Any

from gemmsmith.core.graph import Extent, Graph, Result, over
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
    """All placements of the arguments and results that are possible, for one index of the mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    graph, rank = text.read(epilogue), max(a.ndim, b.ndim)
    names = [o.name for o in graph.operands if o.dtype is not None]
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
    if (added := addends(graph)) is not None:
        parts = [Partial("sum") if name in added else Replicate() for name in names]
        made = [Partial("sum")] * len(graph.results)
        found.append((made, [Shard(a.ndim - 1), Shard(b.ndim - 2), *none, *parts]))
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
    own, index = {"batch": (0, "b"), "m": (rank - 2, "m"), "n": (rank - 1, "n")}[axis]
    if node.op != "reduce":
        return own
    kind, summed = node.value[0], over(node.value[1])
    if index in summed:
        return _PARTIAL.get(kind, False)
    before = "bmn"[3 - rank :].partition(index)[0]
    return own if r.keepdim else own - sum(x in summed for x in before)


def addends(graph: Graph) -> frozenset[str] | None:
    """If K may be split: the operands that are added to the product. The results of the parts of a sum are summed where
    each part has its share of these, and all of the operands that it is multiplied by. None if that is not the sum's
    result."""
    depends: list[bool] = []
    for node in graph.nodes:
        depends.append(node.op == "accumulator" or any(depends[i] for i in node.inputs))
    tensors = {o.name for o in graph.operands if o.dtype is not None and not o.dtype.is_integer}
    added: set[str] = set()
    factors: set[str] = set()
    linear, free = [r.node for r in graph.results], list[int]()  # nodes that have to be linear, or free of the product
    for i in linear:
        node = graph.nodes[i]
        match node.op:
            case "accumulator":
                pass
            case "operand" if node.value in tensors:
                added.add(node.value)
            case "neg" | "add" | "sub" | "chunk" | "interleave":
                linear += [x for x in node.inputs if x not in linear]
            case "mul" | "div":
                x, y = node.inputs
                x, y = (y, x) if node.op == "mul" and depends[y] else (x, y)
                linear += [x] * (x not in linear)
                free.append(y)
            case "reduce" if node.value[0] in ("sum", "mean"):
                linear += node.inputs
            case _:
                return None
    for i in free:
        node = graph.nodes[i]
        if depends[i]:
            return None
        if node.op == "operand":
            factors.add(node.value)
        free += [x for x in node.inputs if x not in free]
    if added & factors:
        return None
    return frozenset(added)
