"""The tile schedulers: which output tiles, or which splits of a tile's K, each CTA computes, and in what order."""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.location import hide_frames
from gemmsmith.tile_scheduler.grouped import KGroupedTileScheduler, RowGroupedTileScheduler
from gemmsmith.tile_scheduler.stream_k import ClusterSplitKTileScheduler, StreamKTileScheduler
from gemmsmith.tile_scheduler.tiles import TileScheduler

hide_frames(__file__)

MakeScheduler = Callable[[KernelSpec], TileScheduler]


def make_tile_scheduler(spec: KernelSpec) -> TileScheduler:
    """Return the scheduler for a spec's groups, and for its config's `splits` and `cluster_splits`."""
    if spec.grouping:
        return (KGroupedTileScheduler if spec.grouping.along == "k" else RowGroupedTileScheduler)(spec)
    if spec.config.cluster_splits > 1:
        return ClusterSplitKTileScheduler(spec)
    return TileScheduler(spec) if spec.config.splits == 1 else StreamKTileScheduler(spec)
