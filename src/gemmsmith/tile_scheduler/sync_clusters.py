"""Grid-wide synchronization along K: every few k-tiles the producers of all clusters wait for one another.

Clusters that share operands then read them at about the same time, so a GPC merges more L2 reads, and data loaded with
evict_first is still resident for its last reader. Without it, clusters diverge.

A performance hint only: after MAX_POLLS_PER_SYNC polls a cluster stops synchronizing, so the kernel cannot hang if some
clusters are not resident.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value

SYNC_INTERVAL_K_TILES = 4
"""K-tiles between two synchronizations. With 2, 4, 8 and 16 large GEMMs take the same time within 0.6 %
(tries-h200)."""
MAX_POLLS_PER_SYNC = 32
"""Reads of the counter per synchronization, about 10 us at the L2's latency: several times the difference between the
start times of a launch's clusters on an otherwise idle GPU."""
COUNTER_BYTES = 4
"""Bytes of each of the two counters."""


class ClusterKSync:
    """Synchronization of the grid's `cluster_count` clusters, by the CTA of rank 0 (`cta_rank`) of each.

    Kernel argument: `sync_counter`, the address of two counters, of the arrivals and of the clusters that are done. The
    last cluster resets both to zero.
    """

    def __init__(self, cluster_count: Value, cta_rank: Value) -> None:
        self.cluster_count, self.cta_rank = cluster_count, cta_rank
        self.sync_counter = current_builder().scratch(
            "sync_counter", lambda p: 2 * COUNTER_BYTES, zero_initialized=True
        )
        self.exit_counter = (self.sync_counter + COUNTER_BYTES).named("sync_exit_counter")

    def start_producer(self) -> None:
        """Declare the state of the producer, before its first tile; the other methods are called in the producer."""
        k = current_builder()
        self._target, self._enabled = k.var(U32, 0, "sync_target"), k.var(I32, 1, "sync_enabled")

    def sync(self, k_tile: Value, is_full_wave: Value) -> None:
        """Wait for all clusters, every SYNC_INTERVAL_K_TILES k-tiles of a full wave.

        The producer calls it at each k-tile, number `k_tile` of its tile. One CTA per cluster takes part, since the
        pipeline keeps the CTAs of a cluster together. `is_full_wave`: all clusters have a tile in this wave; otherwise
        the CTA counts its arrival, but does not wait, since some clusters do not arrive.
        """
        k = current_builder()
        with k.when((k_tile % SYNC_INTERVAL_K_TILES == 0) & (self.cta_rank == 0)):
            k.comment("sync_clusters: clusters that share operands keep pace; no correctness depends on it")
            hw.red_add_u32(self.sync_counter, Constant(U32, 1))
            self._target.set(self._target.get() + self.cluster_count.to(U32))
            with k.when(is_full_wave & (self._enabled.get() == 1)):
                arrived = hw.spin_until_at_least(
                    self.sync_counter, self._target.get(), Constant(U32, MAX_POLLS_PER_SYNC)
                ).named("arrived")
                with k.when(arrived < self._target.get()):
                    self._enabled.set(0)

    def finish(self) -> None:
        """Count this cluster as done, after the producer's last tile; the last cluster resets the counters."""
        k = current_builder()
        with k.when(self.cta_rank == 0):
            hw.fence_acq_rel()  # orders the arrivals that no cluster has waited for before the reset
            finished_clusters = hw.atom_add_u32(self.exit_counter, Constant(U32, 1)).named("finished_clusters")
            with k.when(finished_clusters == self.cluster_count.to(U32) - 1):
                hw.fence_acq_rel()
                for counter in (self.sync_counter, self.exit_counter):
                    hw.store_strong(counter, Constant(U32, 0), "relaxed", "gpu")
