"""Clusters that keep step: every few k-tiles the producers meet.

What several clusters read they then read at one time: the GPCs merge more of it, and what the L2 is told to evict first
is not gone before the last of them has come. Left to themselves, clusters drift apart.

A meeting is for speed alone, and so has an end: clusters that wait for one that has not been started, because the chip
has other work, go on without meetings. So nothing hangs, whatever runs beside.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.schedule.tiles import ClusterPosition, TileScheduler, WorkTile

EVERY = 4
"""K-tiles between meetings: with 2, 4, 8 and 16 large products take the same time within 0.6 % (tries-h200.json)."""
PATIENCE = 32
"""Reads of the word, by the L2's latency some 10 us: several times what clusters of a launch start apart on a chip of
their own."""
WORD_BYTES = 4


class NoSync:
    """Clusters that do not meet."""

    def start(self) -> None:
        """In the producer, before its first tile."""

    def meet(self, tile: WorkTile, k_tile: Value) -> None:
        """In the producer, at each k-tile."""

    def finish(self) -> None:
        """In the producer, after its last tile."""


class ClusterSync(NoSync):
    """Kernel argument: `meetings`, two words, how many arrivals there were and how many clusters are done. The last to
    be done makes both zero again."""

    def __init__(self, scheduler: TileScheduler, place: ClusterPosition) -> None:
        self._scheduler, self._place = scheduler, place
        self._arrived = current().scratch("meetings", lambda p: 2 * WORD_BYTES, zeroed=True)
        self._done = (self._arrived + WORD_BYTES).named("meetings_done")

    def start(self) -> None:
        self._due, self._patient = current().var(U32, 0, "due"), current().var(I32, 1, "patient")

    def meet(self, tile: WorkTile, k_tile: Value) -> None:
        """Now and then waits for the others, where all have a tile. The CTAs of a cluster keep together by themselves,
        so one of them meets for all."""
        assert tile.whole_wave is not None
        k = current()
        with k.when((k_tile % EVERY == 0) & (self._place.rank == 0)):
            hw.reduce_add_u32(self._arrived, Constant(U32, 1))
            self._due.set(self._due.get() + self._scheduler.clusters.to(U32))
            with k.when(tile.whole_wave & (self._patient.get() == 1)):
                found = hw.wait_reached(self._arrived, self._due.get(), Constant(U32, PATIENCE))
                with k.when(found < self._due.get()):
                    self._patient.set(0)

    def finish(self) -> None:
        k = current()
        with k.when(self._place.rank == 0):
            hw.fence_acq_rel()  # arrivals that nobody waited for come before
            before = hw.atomic_add(self._done, Constant(U32, 1))
            with k.when(before == self._scheduler.clusters.to(U32) - 1):
                hw.fence_acq_rel()
                for word in (self._arrived, self._done):
                    hw.store_strong(word, Constant(U32, 0), "relaxed", "gpu")


def meetings(spec: KernelSpec, scheduler: TileScheduler, place: ClusterPosition) -> NoSync:
    """What a config has."""
    return ClusterSync(scheduler, place) if spec.config.sync_clusters else NoSync()
