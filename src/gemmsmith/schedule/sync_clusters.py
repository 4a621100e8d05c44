"""Grid-wide synchronization of k-steps: every few k-tiles the producers of all clusters wait for one another.

What several clusters read they then read at one time: the GPCs merge more of it, and what the L2 is told to evict first
is not gone before the last of them has come. Left to themselves, clusters drift apart.

It is for speed alone, and so a wait ends after some time: clusters that wait for one that has not been started, because
the chip has other work, go on and wait no more. So nothing hangs, whatever runs beside.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value

EVERY = 4
"""K-tiles between waits: with 2, 4, 8 and 16 large products take the same time within 0.6 % (tries-h200.json)."""
POLLS = 32
"""Reads of the word in one wait, by the L2's latency some 10 us: several times what clusters of a launch start apart on
a chip of their own."""
WORD_BYTES = 4


class ClusterSync:
    """Kernel argument: `meetings`, two words, how many arrivals there were and how many clusters are done. The last to
    be done makes both zero again. `clusters`: of the grid. `rank`: this CTA's in its cluster."""

    def __init__(self, clusters: Value, rank: Value) -> None:
        self._clusters, self._rank = clusters, rank
        self._arrived = current().scratch("meetings", lambda p: 2 * WORD_BYTES, zeroed=True)
        self._done = (self._arrived + WORD_BYTES).named("meetings_done")

    def start(self) -> None:
        """In the producer, before its first tile."""
        self._expected, self._waits = current().var(U32, 0, "expected"), current().var(I32, 1, "waits")

    def meet(self, k_tile: Value, whole_wave: Value) -> None:
        """In the producer, at each k-tile: now and then waits for the others, where all have a tile. The CTAs of a
        cluster keep together by themselves, so one of them does it for all."""
        k = current()
        with k.when((k_tile % EVERY == 0) & (self._rank == 0)):
            hw.reduce_add_u32(self._arrived, Constant(U32, 1))
            self._expected.set(self._expected.get() + self._clusters.to(U32))
            with k.when(whole_wave & (self._waits.get() == 1)):
                found = hw.wait_reached(self._arrived, self._expected.get(), Constant(U32, POLLS))
                with k.when(found < self._expected.get()):
                    self._waits.set(0)

    def finish(self) -> None:
        """In the producer, after its last tile."""
        k = current()
        with k.when(self._rank == 0):
            hw.fence_acq_rel()  # arrivals that nobody waited for come before
            before = hw.atomic_add(self._done, Constant(U32, 1))
            with k.when(before == self._clusters.to(U32) - 1):
                hw.fence_acq_rel()
                for word in (self._arrived, self._done):
                    hw.store_strong(word, Constant(U32, 0), "relaxed", "gpu")
