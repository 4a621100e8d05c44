"""DTensor shardings of a GEMM with a fused epilogue: along rows, columns, the batch or K."""

from __future__ import annotations

import sys
from typing import Any

from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Result, reduced_dims
from gemmsmith.graph.reductions import REDUCTIONS
from gemmsmith.torch import graph_serialization

Sharding = tuple[list[Any], list[Any]]
"""The placements of the results; and those of the arguments a, b, key, epilogue, numbers and operands, where key,
epilogue and numbers have None."""
_registered = False


def register(operators: list[Any]) -> None:
    """Register the operators with DTensor, if torch.distributed.tensor has been imported."""
    global _registered
    if _registered or "torch.distributed.tensor" not in sys.modules:
        return
    _registered = True
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(operators)(shardings)


def shardings(
    a: Any, b: Any, b2: Any, offsets: Any, key: int, epilogue: str, numbers: Any, operands: Any
) -> list[Sharding]:  # fmt: skip
    """Return all placements of the arguments and results along one mesh dimension that DTensor may choose."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if b2 is not None or offsets is not None:
        raise NotImplementedError("b, offsets: got DTensors with two arrays b, or with groups; use local tensors")
    graph, rank = graph_serialization.deserialize(epilogue), max(a.ndim, b.ndim)
    operand_dims = [o.broadcast_dims for o in graph.operands if o.dtype is not None]

    def sharding(of_results: list[Any], of_a: Any, of_b: Any, of_operands: list[Any]) -> Sharding:
        return of_results, [of_a, of_b, None, None, None, *of_operands]

    def split(axis: str, of_a: Any, of_b: Any) -> list[Sharding]:
        """Return the sharding of the results along `axis`, in a list; [] if it is impossible.

        `axis`: "m" (rows), "n" (columns) or "batch".
        """
        results = [_sharded_result(graph, r, axis, rank) for r in graph.results]
        if any(isinstance(x, bool) for x in results):
            return []
        dims = [_sharded_dim(dims_, axis, x.ndim) for dims_, x in zip(operand_dims, operands, strict=True)]
        of_operands = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return [sharding([Shard(x) if isinstance(x, int) else Partial(x) for x in results], of_a, of_b, of_operands)]

    whole = Replicate()
    replicated = sharding([whole] * len(graph.results), whole, whole, [whole] * len(operand_dims))
    shardings_: list[Sharding] = [replicated, *split("m", Shard(a.ndim - 2), Replicate())]
    if not graph.has_interleaved_columns and not any(n.operation.depends_on_columns for n in graph.nodes):
        shardings_ += split("n", Replicate(), Shard(b.ndim - 1))
    batches = {x.shape[0] for x in (a, b) if x.ndim == 3}
    if len(batches) == 1 and batches != {1}:
        shardings_ += split("batch", *(Shard(0) if x.ndim == 3 else Replicate() for x in (a, b)))
    if (partial_operands := partial_sum_operands(graph)) is not None:
        of_operands = [Partial("sum") if name in partial_operands else Replicate() for name in graph.tensor_names]
        of_results = [Partial("sum")] * len(graph.results)
        shardings_.append(sharding(of_results, Shard(a.ndim - 1), Shard(b.ndim - 2), of_operands))
    return shardings_


def _sharded_dim(dims: BroadcastDims, axis: str, rank: int) -> int | None:
    """Return which dimension of an operand is sharded if the results are along `axis`; None if it is replicated."""
    dim, varies = {
        "batch": (0, dims.batch and rank == 3), "m": (rank - 2, dims.varies_along_m and rank > 1),
        "n": (rank - 1, dims.varies_along_n),
    }[axis]  # fmt: skip
    return dim if varies else None


def _sharded_result(graph: EpilogueGraph, r: Result, axis: str, rank: int) -> int | str | bool:
    """Return how a result is placed if the GEMM is sharded along `axis`: "m" (rows), "n" (columns) or "batch".

    That is the sharded dimension; or, if the result is reduced over `axis`, how the shards' partial results are
    combined, such as "sum"; or False if they cannot be. `rank`: of a @ b.
    """
    node = graph.nodes[r.node]
    dim, index = {"batch": (0, "b"), "m": (rank - 2, "m"), "n": (rank - 1, "n")}[axis]
    if node.op != "reduce":
        return dim
    kind, summed = node.attribute[0], reduced_dims(node.attribute[1])
    if index in summed:
        return REDUCTIONS[kind].partial or False
    outer_dims = "bmn"[3 - rank :].partition(index)[0]  # without keepdim, a result lacks the reduced ones
    return dim if r.keepdim else dim - sum(x in summed for x in outer_dims)


def partial_sum_operands(graph: EpilogueGraph) -> frozenset[str] | None:
    """Return the operands that must be partial sums if K is sharded; None if K cannot be.

    K can be sharded if the results are linear in the accumulator. The results of the shards are then partial sums:
    operands that are added must be partial sums too, and operands that multiply must be replicated.
    """
    depends: list[bool] = []  # whether a node depends on the accumulator, whose leaf name is ""
    for node in graph.nodes:
        depends.append(node.operation.leaf_name(node) == "" or any(depends[i] for i in node.inputs))
    tensors = {o.name for o in graph.operands if o.dtype is not None and not o.dtype.is_integer}
    added: set[str] = set()
    factors: set[str] = set()
    # Nodes that have to be linear in the accumulator, and nodes that have to be independent of it.
    linear, independent = [r.node for r in graph.results], list[int]()
    for i in linear:
        node = graph.nodes[i]
        linearity, name = node.operation.linearity_of(node.attribute), node.operation.leaf_name(node)
        if linearity == "sum":
            linear += [x for x in node.inputs if x not in linear]
        elif linearity:
            x, y = node.inputs
            x, y = (y, x) if linearity == "product" and depends[y] else (x, y)
            linear += [x] * (x not in linear)
            independent.append(y)
        elif name in tensors:
            added.add(name)
        elif name != "":
            return None
    for i in independent:
        node = graph.nodes[i]
        if depends[i]:
            return None
        if name := node.operation.leaf_name(node):
            factors.add(name)
        independent += [x for x in node.inputs if x not in independent]
    if added & factors:  # an operand cannot be a partial sum and replicated
        return None
    return frozenset(added)
