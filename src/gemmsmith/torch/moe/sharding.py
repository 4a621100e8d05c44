"""Experts whose weights are DTensors sharded by experts: each rank computes its own ones, of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch.api import is_dtensor


def check_count(count: int, mesh: Any) -> None:
    """Raise ArgumentError for a number of experts that is no multiple of the ranks."""
    if count % mesh.size():
        raise ArgumentError(f"gate_up, down: got {count} experts for {mesh.size()} ranks; use a multiple")


def sharded_experts(
    function: Callable[..., Any], x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, order: Any, addend: Any
) -> Any:  # fmt: skip
    """Return the sum of `function` on each rank's experts, a DTensor of partial sums.

    All are DTensors on one mesh; x, experts and weights are gathered if they are sharded. Other ranks' experts become
    indices outside of 0 ... count - 1. Raises ArgumentError for an `order` or `addend`, and for other placements.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import local_map

    if order is not None or addend is not None:
        raise ArgumentError("order, addend: got one with weights that are DTensors; use None")
    mesh = gate_up.device_mesh
    for name, array in (("x", x), ("experts", experts), ("weights", weights), ("down", down)):
        if not is_dtensor(array) or array.device_mesh != mesh:
            raise ArgumentError(
                f"{name}: got no DTensor on gate_up's mesh; use gemmsmith.torch.parallel.ExpertParallel"
            )
    replicated, partial, sharded = ([kind] * mesh.ndim for kind in (Replicate(), Partial(), Shard(0)))
    for name, array in (("gate_up", gate_up), ("down", down)):
        if list(array.placements) != sharded:
            raise ArgumentError(f"{name}: got {array.placements}; use Shard(0) in each dimension of the mesh")
    count, first = len(gate_up), 0
    check_count(count, mesh)
    for dim in range(mesh.ndim):
        count //= mesh.size(dim)
        first += mesh.get_local_rank(dim) * count
    return local_map(
        lambda x, experts, *others: function(x, experts - first, *others), out_placements=partial,
        in_placements=(*[replicated] * 3, sharded, sharded), in_grad_placements=(*[partial] * 3, sharded, sharded),
        device_mesh=mesh, redistribute_inputs=True,
    )(x, experts, weights, gate_up, down)  # fmt: skip
