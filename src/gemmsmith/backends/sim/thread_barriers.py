"""Barriers of threads, as a unit arrives at them and waits for them: of a CTA, of its cluster, of a warp."""

from __future__ import annotations

from typing import Any

from gemmsmith.backends.sim.barriers import ThreadBarrier
from gemmsmith.backends.sim.clocks import Clock, Warp
from gemmsmith.backends.sim.scopes import Scope
from gemmsmith.backends.sim.unit import Unit, Wait
from gemmsmith.lang.machine import Blocking

NAMED_BARRIERS = 16
"""Of a CTA. PTX ISA, "barrier"."""


class ThreadBarriers:
    """bar, barrier.cluster and __syncwarp. `cluster_arrivals`: by warp, the round it arrived in, and whether relaxed;
    until it waits."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.cluster_arrivals: dict[Warp, tuple[int, bool]] = {}

    def sync(self, identifier: Any, threads: int) -> Blocking:
        barrier = self._arrive_at(int(identifier), threads)
        yield from self._wait(barrier, barrier.generation - (barrier.arrived == 0), "barrier")

    def arrive(self, identifier: Any, threads: int) -> None:
        self._arrive_at(int(identifier), threads)

    def warp_sync(self) -> None:
        self.unit.converged("__syncwarp")
        for part in self.unit.parts:
            if not part.partial:
                part.warp.sync()

    def cluster_arrive(self, *, relaxed: bool = False) -> None:
        barrier = self.unit.cta.cluster.barrier
        for part in self.unit.parts:
            if part.warp in self.cluster_arrivals:
                self.unit.hazard("barrier", "barrier.cluster.arrive twice without a wait")
            self.cluster_arrivals[part.warp] = barrier.generation, relaxed
        self._arrive(barrier, relaxed=relaxed)

    def cluster_wait(self) -> Blocking:
        self.unit.converged("barrier.cluster.wait")
        arrivals = {part.warp: self.cluster_arrivals.pop(part.warp, None) for part in self.unit.parts}
        generations = [arrival[0] for arrival in arrivals.values() if arrival is not None]
        if len(generations) < len(arrivals):
            self.unit.hazard("barrier", "barrier.cluster.wait without an arrive")
            return
        relaxed = frozenset(warp for warp, arrival in arrivals.items() if arrival and arrival[1])
        yield from self._wait(self.unit.cta.cluster.barrier, max(generations), "cluster", relaxed)

    def _arrive_at(self, identifier: int, threads: int) -> ThreadBarrier:
        unit = self.unit
        if not 0 <= identifier < NAMED_BARRIERS or threads % 32:
            unit.hazard("barrier", f"named barrier {identifier} with {threads} threads: there are {NAMED_BARRIERS}, "
                        "for multiples of 32 threads")  # fmt: skip
        barrier = unit.cta.named.setdefault(identifier, ThreadBarrier(f"named barrier {identifier}", threads))
        if barrier.expected != threads and barrier.arrived:
            unit.hazard("barrier", f"{barrier.name} with {threads} threads where others said {barrier.expected}")
        barrier.expected = threads
        self._arrive(barrier)
        return barrier

    def _arrive(self, barrier: ThreadBarrier, *, relaxed: bool = False) -> None:
        unit = self.unit
        unit.converged(barrier.name)
        clock, arrivals = Clock(unit.state.agents), []
        for part in unit.parts:
            agent = part.enter()
            if barrier.mixes(agent.clock):
                unit.hazard("barrier", f"{barrier.name}: this arrival may be counted in the round before, whose "
                            "threads it does not know to have come")  # fmt: skip
            if relaxed:
                arrivals.append((agent.number, agent.count))
                scope, told = part.warp.release_relaxed(part.lanes)
                clock.join(told) if scope >= Scope.CLUSTER else clock.follow(told)
            else:
                part.warp.sync()
                arrivals.append((agent.number, agent.count))
                clock.join(part.release())
        unit.time += unit.state.chip.instruction
        if not barrier.arrive(int(unit.active.sum()), clock, arrivals, unit.time):
            unit.hazard(
                "barrier", f"{barrier.name}: more than the {barrier.expected} threads that it takes have arrived"
            )

    def _wait(
        self, barrier: ThreadBarrier, generation: int, what: str, relaxed: frozenset[Warp] = frozenset()
    ) -> Blocking:
        """`relaxed`: warps whose lanes' accesses their arrival has not ordered."""
        unit = self.unit
        if barrier.generation <= generation:
            yield Wait(
                lambda: barrier.generation > generation,
                lambda: f"{barrier.name}: {barrier.arrived} of {barrier.expected} threads have arrived",
            )
        began = unit.time
        unit.time = max(unit.time, barrier.opened_at) + unit.state.chip.barrier
        assert barrier.opened is not None
        for part in unit.parts:
            part.acquire(barrier.opened)
            if part.warp not in relaxed:
                part.warp.sync()
        unit.waited(began, what)
