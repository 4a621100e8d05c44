"""Barriers among threads of a CTA, of its cluster, or of a warp: bar, barrier.cluster and __syncwarp."""

from __future__ import annotations

from typing import Any

from gemmsmith.backends.sim.memory.clocks import ScopeLevel, VectorClock, Warp
from gemmsmith.backends.sim.state.cta import ThreadBarrier
from gemmsmith.backends.sim.state.grid_state import BARRIER_CYCLES, INSTRUCTION_CYCLES
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup, Wait
from gemmsmith.lang.kernel import NAMED_BARRIERS_PER_CTA
from gemmsmith.machine import Blocking


class ThreadBarriers:
    """The thread barrier instructions of a lockstep group: bar, barrier.cluster and __syncwarp.

    `cluster_arrivals`: warp -> (generation, relaxed) of its arrival at the cluster barrier, until it waits.
    """

    def __init__(self, group: LockstepGroup) -> None:
        self.group = group
        self.cluster_arrivals: dict[Warp, tuple[int, bool]] = {}

    def sync(self, identifier: Any, threads: int) -> Blocking:
        """Execute bar.sync: arrive at a named barrier for `threads` threads, and wait for its other threads.

        If the arrival was the last one, the barrier has begun its next generation: the wait is for the previous one.
        """
        barrier = self._arrive_at(int(identifier), threads)
        yield from self._wait(barrier, barrier.generation - (barrier.arrived == 0))

    def arrive(self, identifier: Any, threads: int) -> None:
        self._arrive_at(int(identifier), threads)

    def warp_sync(self) -> None:
        """Execute __syncwarp, which all lanes of a warp must execute."""
        self.group.require_converged("__syncwarp")
        for lanes in self.group.active_lanes:
            if not lanes.is_partial:
                lanes.warp.sync()

    def cluster_arrive(self, *, relaxed: bool = False) -> None:
        """Arrive at the cluster's barrier; `relaxed`: without ordering the threads' memory accesses."""
        barrier = self.group.cta.cluster.barrier
        for lanes in self.group.active_lanes:
            if lanes.warp in self.cluster_arrivals:
                self.group.report("barrier", "barrier.cluster.arrive twice without a wait")
            self.cluster_arrivals[lanes.warp] = barrier.generation, relaxed
        self._arrive(barrier, relaxed=relaxed)

    def cluster_wait(self) -> Blocking:
        self.group.require_converged("barrier.cluster.wait")
        arrivals = {lanes.warp: self.cluster_arrivals.pop(lanes.warp, None) for lanes in self.group.active_lanes}
        generations = [arrival[0] for arrival in arrivals.values() if arrival is not None]
        if len(generations) < len(arrivals):
            self.group.report("barrier", "barrier.cluster.wait without an arrive")
            return
        relaxed = frozenset(warp for warp, arrival in arrivals.items() if arrival and arrival[1])
        yield from self._wait(self.group.cta.cluster.barrier, max(generations), relaxed)

    def _arrive_at(self, identifier: int, threads: int) -> ThreadBarrier:
        """Arrive at the named barrier `identifier`, which `threads` arrivals release, and return it."""
        group = self.group
        if not 0 <= identifier < NAMED_BARRIERS_PER_CTA or threads % 32:
            group.report(
                "barrier",
                f"named barrier {identifier} with {threads} threads: use a barrier below {NAMED_BARRIERS_PER_CTA} and "
                "a multiple of 32 threads",
            )
        barrier = group.cta.named_barriers.setdefault(identifier, ThreadBarrier(f"named barrier {identifier}", threads))
        if barrier.expected != threads and barrier.arrived:
            group.report(
                "barrier",
                f"{barrier.name}: thread count {threads} differs from {barrier.expected} used by other threads",
            )
        barrier.expected = threads
        self._arrive(barrier)
        return barrier

    def _arrive(self, barrier: ThreadBarrier, *, relaxed: bool = False) -> None:
        """Arrive at a barrier, and publish the active threads' clocks.

        With `relaxed` only what they have executed is published, and what a fence has ordered before.
        """
        group = self.group
        group.require_converged(barrier.name)
        clock, arrivals = VectorClock(group.state.num_agents), []
        for lanes in group.active_lanes:
            agent = lanes.agent()
            if not barrier.previous.executed_before(agent.clock):
                group.report(
                    "barrier",
                    f"{barrier.name}: this arrival is not ordered after the previous generation and may be counted in "
                    "it",
                )
            if not relaxed:
                lanes.warp.sync()
            arrivals.append((agent.index, agent.next_event))
            if relaxed:
                scope, published = lanes.warp.release_for_relaxed_write(lanes.mask)
                clock.join(published) if scope >= ScopeLevel.CLUSTER else clock.join_executed_events(published)
            else:
                clock.join(lanes.release())
        group.time += INSTRUCTION_CYCLES
        is_within_count = barrier.arrive(int(group.active.sum()), clock, arrivals, group.time)
        if (observer := group.state.observer) is not None:
            observer.barrier("arrive", group, group.cta.index, barrier, int(group.active.sum()))
        if not is_within_count:
            group.report("barrier", f"{barrier.name}: more threads have arrived than the {barrier.expected} expected")

    def _wait(self, barrier: ThreadBarrier, generation: int, relaxed: frozenset[Warp] = frozenset()) -> Blocking:
        """Wait until a generation of the barrier is complete, and join the clocks that its arrivals published.

        `generation`: a use of the barrier, counted from 0. `relaxed`: warps that arrived relaxed, so that their lanes'
        accesses are not ordered.
        """
        group = self.group
        if barrier.generation <= generation:
            yield Wait(
                lambda: barrier.generation > generation,
                lambda: f"{barrier.name}: {barrier.arrived} of {barrier.expected} threads have arrived",
                barrier.name, generation,
            )  # fmt: skip
        start = group.time
        group.time = max(group.time, barrier.opened_at) + BARRIER_CYCLES
        assert barrier.released_clock is not None
        for lanes in group.active_lanes:
            lanes.acquire(barrier.released_clock)
            if lanes.warp not in relaxed:
                lanes.warp.sync()
        group.record_wait(start, barrier.name, generation)
