"""mbarriers, barriers of threads and clusters, fences, and the register pool, as a unit uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gemmsmith.backends.sim.accesses import Accessing
from gemmsmith.backends.sim.barriers import Mbarrier, ThreadBarrier
from gemmsmith.backends.sim.clocks import ASYNC_PROXY, MBARRIER_INIT, Clock
from gemmsmith.backends.sim.memory import OFFSET_MASK
from gemmsmith.backends.sim.shadow import GRANULE, Event
from gemmsmith.backends.sim.state import Cta
from gemmsmith.backends.sim.timeline import Span
from gemmsmith.backends.sim.unit import Wait
from gemmsmith.lang.machine import Blocking

NAMED_BARRIERS = 16
"""Of a CTA. PTX ISA, "barrier"."""
MBARRIER_BYTES = 8


class Synchronising(Accessing):
    """A unit that arrives, waits and fences."""

    def mbarrier(self, cta: Cta, address: int, clock: Clock, remote: bool) -> Mbarrier:
        """The mbarrier at an address, which `clock` must know to be initialised."""
        found = cta.mbarriers.get(address & OFFSET_MASK)
        name = self.state.place(address)[0]
        if found is None:
            raise self.state.stop("barrier", f"{name} is used but was never initialised [{self.title}]", self.where)
        agent, count = found.initialiser
        fenced = clock.vector[MBARRIER_INIT, agent] >= count
        if clock.vector[0, agent] < count and not fenced:
            self.hazard("barrier", f"{name} is used before its init is known: a barrier of all threads must follow it")
        elif remote and not fenced:
            self.hazard("barrier", f"the init of {name} is not fenced for the cluster and the async proxy")
        return found

    def mbarrier_init(self, address: Any, count: int) -> None:
        part = self.parts[0]
        agent, clock = part.warp.enter(part.partial)
        offset = int(address) & OFFSET_MASK
        name = self.state.place(int(address))[0]
        if offset % MBARRIER_BYTES:
            self.hazard("alignment", f"{name}: an mbarrier at an address that is no multiple of {MBARRIER_BYTES}")
        if offset in self.cta.mbarriers:
            self.hazard("barrier", f"{name} is initialised twice")
        if count < 1:
            raise self.state.stop("barrier", f"{name} is initialised for {count} arrivals", self.where)
        initialiser = agent, int(clock.vector[0, agent])
        self.cta.mbarriers[offset] = Mbarrier(name, count, initialiser, self.where, self.state.agents)
        self.cta.shadow.barriers[offset // GRANULE : (offset + MBARRIER_BYTES) // GRANULE] = True

    def mbarrier_arrive(self, address: Any, *, count: int = 1, expect_tx: Any = 0, rank: Any = None) -> None:
        self.time += self.state.chip.instruction
        for part in self.parts:
            lanes = len(part.rows)
            addresses = np.broadcast_to(np.asarray(address), len(self.threads))[part.rows]
            ranks = np.broadcast_to(np.asarray(-1 if rank is None else rank), len(self.threads))[part.rows]
            bytes_ = np.broadcast_to(np.asarray(expect_tx), len(self.threads))[part.rows]
            agent, clock = part.warp.enter(part.partial)
            event = Event(agent, int(clock.vector[0, agent]), 0, "arrive", self.title, self.where)
            released = part.warp.release(part.partial)
            for where in sorted({(int(r), int(a)) for r, a in zip(ranks, addresses, strict=True)}):
                cta = self.peer(None if rank is None else where[0])
                chosen = (ranks == where[0]) & (addresses == where[1])
                arrivals = lanes if chosen.all() else int(chosen.sum())
                barrier = self.mbarrier(cta, where[1], clock, remote=cta is not self.cta)
                if cta is not self.cta:
                    cta.remote.append(event)
                if not barrier.arrive(arrivals * count, int(bytes_[chosen].sum()), released, self.time):
                    raise self.state.stop(
                        "over-arrival",
                        f"{barrier.name} phase {barrier.phase} takes {barrier.count} arrivals, "
                        f"{barrier.count - barrier.pending} came [{self.title}]", self.where,
                    )  # fmt: skip

    def mbarrier_expect_tx(self, address: Any, nbytes: Any) -> None:
        part = self.parts[0]
        barrier = self.mbarrier(self.cta, int(address), part.warp.enter(part.partial)[1], remote=False)
        lanes = sum(len(part.rows) for part in self.parts)
        barrier.tx += int(nbytes) * lanes if np.ndim(nbytes) == 0 else int(np.asarray(nbytes)[self.active].sum())

    def mbarrier_test(self, address: Any, parity: Any) -> bool:
        barrier, phase = self._awaited(int(address), int(parity))
        if not barrier.done(int(parity)):
            return False
        self._observe(barrier, phase)
        return True

    def mbarrier_wait(self, address: Any, parity: Any) -> Blocking:
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
        began = self.time
        self._observe(barrier, phase)
        self.waited(began, barrier.name)

    def _awaited(self, address: int, parity: int) -> tuple[Mbarrier, int]:
        part = self.parts[0]
        clock = part.warp.enter(part.partial)[1]
        barrier = self.mbarrier(self.cta, address, clock, remote=False)
        phase = barrier.awaited(self, clock, parity)
        if barrier.phase - phase >= 2:
            self.hazard(
                "phase aliasing",
                f"a wait for phase {phase} of {barrier.name} while phase {barrier.phase} runs: parity {parity} "
                "does not tell them apart",
            )
        return barrier, phase

    def _observe(self, barrier: Mbarrier, phase: int) -> None:
        agent, clock = self.parts[0].warp.enter(self.parts[0].partial)
        barrier.observe(self, min(phase, barrier.phase - 1), agent, clock)  # it may have asked again for the last one
        for part in self.parts:
            part.warp.acquire(part.partial, barrier.completed)
        self.time = max(self.time, barrier.completed_at) + self.state.chip.barrier

    def waited(self, began: int, what: str) -> None:
        """The unit stood still from `began` until now; before that it was busy."""
        add = self.state.timeline.add
        add(Span(self.block, self.name, "busy", self.busy_since, began, "instructions"))
        add(Span(self.block, self.name, "wait", began, self.time, f"wait for {what}"))
        self.busy_since = self.time

    def wait_word(
        self, address: Any, ready: Callable[[int], bool], what: str, order: Literal["acquire", "relaxed"]
    ) -> Blocking:
        address = int(address)

        def word() -> int:
            return int(self._gather("global", self.cta, np.array([address]), 4).view(np.uint32)[0, 0])

        self.check_aligned(np.array([address]), 4)
        began = self.time
        if not ready(word()):
            buffer = self.state.memory.find(address)
            name = buffer.name if buffer else "a word"
            yield Wait(lambda: ready(word()), lambda: f"{name}: a word is {word()}, {what}")
        if order == "acquire" and (released := self.state.releases.get(address)):
            self.time = max(self.time, self.state.released_at.get(address, 0))
            for part in self.parts:
                part.warp.acquire(part.partial, released)
        self.time += self.state.chip.barrier
        self.waited(began, "another CTA")
        return word()

    # -- barriers of threads -----------------------------------------------------------------------------
    def barrier_sync(self, identifier: Any, threads: int) -> Blocking:
        barrier = self._arrive_at(int(identifier), threads)
        yield from self._wait_for(barrier, barrier.generation - (barrier.arrived == 0), "barrier")

    def barrier_arrive(self, identifier: Any, threads: int) -> None:
        self._arrive_at(int(identifier), threads)

    def _arrive_at(self, identifier: int, threads: int) -> ThreadBarrier:
        if not 0 <= identifier < NAMED_BARRIERS or threads % 32:
            self.hazard("barrier", f"named barrier {identifier} with {threads} threads: there are {NAMED_BARRIERS}, "
                        "for multiples of 32 threads")  # fmt: skip
        barrier = self.cta.named.setdefault(identifier, ThreadBarrier(f"named barrier {identifier}", threads))
        if barrier.expected != threads and barrier.arrived:
            self.hazard("barrier", f"{barrier.name} with {threads} threads where others said {barrier.expected}")
        barrier.expected = threads
        self._arrive(barrier)
        return barrier

    def _arrive(self, barrier: ThreadBarrier, *, relaxed: bool = False) -> None:
        if any(part.partial for part in self.parts):
            self.hazard("barrier", f"{barrier.name} reached by a part of a warp")
        clock = Clock(self.state.agents)
        for part in self.parts:
            if relaxed:
                clock.join(part.warp.release_relaxed())
            else:
                part.warp.sync()
                clock.join(part.warp.release(partial=False))
        self.time += self.state.chip.instruction
        if not barrier.arrive(int(self.active.sum()), clock, self.time):
            self.hazard(
                "barrier", f"{barrier.name}: more than the {barrier.expected} threads that it takes have arrived"
            )

    def _wait_for(self, barrier: ThreadBarrier, generation: int, what: str, *, relaxed: bool = False) -> Blocking:
        if barrier.generation <= generation:
            yield Wait(
                lambda: barrier.generation > generation,
                lambda: f"{barrier.name}: {barrier.arrived} of {barrier.expected} threads have arrived",
            )
        began = self.time
        self.time = max(self.time, barrier.opened_at) + self.state.chip.barrier
        assert barrier.opened is not None
        for part in self.parts:
            part.warp.acquire(False, barrier.opened)
            if not relaxed:
                part.warp.sync()
        self.waited(began, what)

    def warp_sync(self) -> None:
        for part in self.parts:
            if part.partial:
                self.hazard("barrier", "__syncwarp of all lanes reached by some")
            else:
                part.warp.sync()

    def cluster_arrive(self, *, relaxed: bool = False) -> None:
        number = self.block // self.cluster_size
        barrier = self.state.cluster_barriers.setdefault(
            number, ThreadBarrier("cluster barrier", self.cluster_size * self.state.kernel.threads)
        )
        if self.cluster_arrival is not None:
            self.hazard("barrier", "barrier.cluster.arrive twice without a wait")
        self.cluster_arrival = barrier.generation, relaxed
        self._arrive(barrier, relaxed=relaxed)

    def cluster_wait(self) -> Blocking:
        if self.cluster_arrival is None:
            self.hazard("barrier", "barrier.cluster.wait without an arrive")
            return
        barrier = self.state.cluster_barriers[self.block // self.cluster_size]
        (generation, relaxed), self.cluster_arrival = self.cluster_arrival, None
        yield from self._wait_for(barrier, generation, "cluster", relaxed=relaxed)

    def fence(self, kind: str) -> None:
        self.time += self.state.chip.instruction
        if kind == "wgmma":
            self.dirty.clear()
            return
        for part in self.parts:
            if kind == "proxy.async":
                part.warp.fence(ASYNC_PROXY, part.partial)
            elif kind == "mbarrier_init":
                part.warp.fence(MBARRIER_INIT, part.partial)

    def set_register_budget(self, registers: int) -> Blocking:
        warps, change = len(self.warps), registers - self.budget
        self.budget = registers
        if change > 0 and self.cta.free_registers < change * warps:
            yield Wait(
                lambda: self.cta.free_registers >= change * warps,
                lambda: f"{change} more registers a thread: the pool has {self.cta.free_registers // warps}",
            )
        self.cta.free_registers -= change * warps
