"""mbarriers, as a unit initializes them, arrives at them and waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gemmsmith.backends.sim.barriers import Mbarrier
from gemmsmith.backends.sim.clocks import ASYNC_PROXY, EXECUTED, MBARRIER_INIT, MEMORY, Clock
from gemmsmith.backends.sim.cta import Cta
from gemmsmith.backends.sim.events import Event
from gemmsmith.backends.sim.memory import OFFSET_MASK
from gemmsmith.backends.sim.scopes import Scope, scope_of
from gemmsmith.backends.sim.shadow import MBARRIER_BYTES
from gemmsmith.backends.sim.unit import Part, Unit, Wait, mask_of
from gemmsmith.lang.machine import Blocking


class Mbarriers:
    """The mbarrier instructions of a unit."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def at(self, cta: Cta, address: int, clock: Clock, *, copies: bool = False) -> Mbarrier:
        """The mbarrier at an address of a CTA, which `clock` must know to be initialized; for the copy engine where
        it `copies`."""
        unit, remote = self.unit, cta is not self.unit.cta
        found = cta.mbarriers.get(address & OFFSET_MASK)
        name = unit.state.place(address)[0]
        if found is None:
            raise unit.stop("barrier", f"{name} is used but was never initialized [{unit.title}]")
        agent, count = found.initializer
        known = [x >= count for x in clock.vector[:, agent].tolist()]
        if not known[MEMORY] and not known[MBARRIER_INIT]:
            unit.hazard("barrier", f"{name} is used before its init is known: a barrier of all threads must follow it")
        elif (remote or copies) and not known[MBARRIER_INIT] and (remote or not known[ASYNC_PROXY]):
            unit.hazard("barrier", f"the init of {name} is not fenced for the cluster and the async proxy")
        return found

    def init(self, address: Any, count: int) -> None:
        unit, state, cta = self.unit, self.unit.state, self.unit.cta
        agent = unit.parts[0].enter()
        offset = int(address) & OFFSET_MASK
        name = state.place(int(address))[0]
        if offset % MBARRIER_BYTES:
            unit.hazard("alignment", f"{name}: an mbarrier at an address that is no multiple of {MBARRIER_BYTES}")
        if offset in cta.mbarriers:
            unit.hazard("barrier", f"{name} is initialized twice")
        if count < 1:
            raise unit.stop("barrier", f"{name} is initialized for {count} arrivals")
        initializer = agent.number, agent.count
        cta.mbarriers[offset] = Mbarrier(name, count, initializer, unit.where, state.agents, state.hazards)
        cta.shadow.add_barrier(offset)

    def arrive(self, address: Any, *, count: int = 1, expect_tx: Any = 0, rank: Any = None, scope: str = "cta") -> None:
        unit = self.unit
        unit.time += unit.state.chip.instruction
        wide = scope_of(scope) >= Scope.CLUSTER
        bytes_ = unit.each(expect_tx)
        for part in unit.parts:
            for target, at, rows, lanes in self._targets(part, rank, address):
                cta, arrivals = unit.peer(target), len(rows)
                agent, own = part.warp.enter(lanes), cta is unit.cta
                barrier = self.at(cta, at, agent.clock)
                if not own:
                    event = Event(agent.number, agent.count, 0, "arrive", unit.title, unit.where, row=EXECUTED)
                    cta.remote.append(event)
                released = part.warp.release(lanes)
                nbytes = int(bytes_[rows].sum())
                if not barrier.arrive(arrivals * count, nbytes, released, unit.time, near=own, far=wide):
                    raise unit.stop(
                        "over-arrival",
                        f"{barrier.name} phase {barrier.phase} takes {barrier.count} arrivals, "
                        f"{barrier.count - barrier.pending} came [{unit.title}]",
                    )

    def _targets(self, part: Part, rank: Any, address: Any) -> Iterator[tuple[int | None, int, np.ndarray, int]]:
        """(rank, address, rows, lanes) of the barriers that a part's lanes arrive at."""
        if not isinstance(rank, np.ndarray) and not isinstance(address, np.ndarray):
            yield rank, int(address), part.rows, part.lanes
            return
        ranks, addresses = (self.unit.each(x)[part.rows] for x in (-1 if rank is None else rank, address))
        for target, at in sorted({*zip(ranks.tolist(), addresses.tolist(), strict=True)}):
            rows = part.rows[(ranks == target) & (addresses == at)]
            yield None if rank is None else target, at, rows, mask_of(rows % 32)

    def expect_tx(self, address: Any, nbytes: Any) -> None:
        unit = self.unit
        barrier = self.at(unit.cta, int(address), unit.parts[0].enter().clock)
        barrier.tx += int(unit.each(nbytes)[unit.active].sum())

    def test(self, address: Any, parity: Any, scope: str = "cta") -> bool:
        barrier, phase = self._awaited(int(address), int(parity))
        if not barrier.done(int(parity)):
            return False
        self._observe(barrier, phase, scope)
        return True

    def wait(self, address: Any, parity: Any, scope: str = "cta") -> Blocking:
        parity = int(parity)
        barrier, phase = self._awaited(int(address), parity)
        if not barrier.done(parity):
            yield Wait(
                lambda: barrier.done(parity),
                lambda: (
                    f"{barrier.name} phase {phase} (parity {parity}): {barrier.pending} of {barrier.count} arrivals "
                    f"and {barrier.tx} bytes are missing in phase {barrier.phase}"
                ),
            )
            self._awaited(int(address), parity)
        began = self.unit.time
        self._observe(barrier, phase, scope)
        self.unit.waited(began, barrier.name)

    def _awaited(self, address: int, parity: int) -> tuple[Mbarrier, int]:
        clock = self.unit.parts[0].enter().clock
        barrier = self.at(self.unit.cta, address, clock)
        phase = barrier.awaited(self.unit, clock, parity)
        if barrier.phase - phase >= 2:
            self.unit.hazard(
                "phase aliasing",
                f"a wait for phase {phase} of {barrier.name} while phase {barrier.phase} runs: parity {parity} "
                "does not tell them apart",
            )
        return barrier, phase

    def _observe(self, barrier: Mbarrier, phase: int, scope: str) -> None:
        unit = self.unit
        for part in unit.parts:
            part.acquire(barrier.completed.near)
            if scope_of(scope) >= Scope.CLUSTER:
                part.acquire(barrier.completed.far)
            last = min(phase, barrier.phase - 1)  # it may have asked again for the last one
            barrier.observe(unit, part.enter(), last, unit.title, unit.where)
        unit.time = max(unit.time, barrier.completed_at) + unit.state.chip.barrier
