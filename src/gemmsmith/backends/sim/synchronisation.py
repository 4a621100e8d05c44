"""mbarriers, barriers of threads and clusters, fences, and the register pool, as a unit uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gemmsmith.backends.sim.accesses import Accessing
from gemmsmith.backends.sim.barriers import Mbarrier, Observation, ThreadBarrier
from gemmsmith.backends.sim.clocks import ASYNC_PROXY, EXECUTED, GRID_BEFORE, MBARRIER_INIT, MEMORY, Clock, Warp
from gemmsmith.backends.sim.memory import OFFSET_MASK
from gemmsmith.backends.sim.scopes import Scope, scope_of
from gemmsmith.backends.sim.shadow import GRANULE, Event
from gemmsmith.backends.sim.state import Cta, State
from gemmsmith.backends.sim.timeline import Span
from gemmsmith.backends.sim.unit import Wait, mask_of
from gemmsmith.lang.machine import Blocking
from gemmsmith.lang.values import Registers

NAMED_BARRIERS = 16
"""Of a CTA. PTX ISA, "barrier"."""
MBARRIER_BYTES = 8


class Synchronising(Accessing):
    """A unit that arrives, waits and fences."""

    def mbarrier(self, cta: Cta, address: int, clock: Clock, *, remote: bool = False, copies: bool = False) -> Mbarrier:
        """The mbarrier at an address, which `clock` must know to be initialised; by another CTA (`remote`), or by the
        copy engine."""
        found = cta.mbarriers.get(address & OFFSET_MASK)
        name = self.state.place(address)[0]
        if found is None:
            raise self.state.stop("barrier", f"{name} is used but was never initialised [{self.title}]", self.where)
        agent, count = found.initialiser
        known = clock.vector[:, agent] >= count
        if not known[MEMORY] and not known[MBARRIER_INIT]:
            self.hazard("barrier", f"{name} is used before its init is known: a barrier of all threads must follow it")
        elif (remote or copies) and not known[MBARRIER_INIT] and (remote or not known[ASYNC_PROXY]):
            self.hazard("barrier", f"the init of {name} is not fenced for the cluster and the async proxy")
        return found

    def mbarrier_init(self, address: Any, count: int) -> None:
        agent = self.parts[0].enter()
        offset = int(address) & OFFSET_MASK
        name = self.state.place(int(address))[0]
        if offset % MBARRIER_BYTES:
            self.hazard("alignment", f"{name}: an mbarrier at an address that is no multiple of {MBARRIER_BYTES}")
        if offset in self.cta.mbarriers:
            self.hazard("barrier", f"{name} is initialised twice")
        if count < 1:
            raise self.state.stop("barrier", f"{name} is initialised for {count} arrivals", self.where)
        initialiser = agent.number, agent.count
        made = Mbarrier(
            name, count, initialiser, self.where, self.state.agents, lambda seen: overrun(self.state, made, seen)
        )
        self.cta.mbarriers[offset] = made
        self.cta.shadow.barriers[offset // GRANULE : (offset + MBARRIER_BYTES) // GRANULE] = True

    def mbarrier_arrive(
        self, address: Any, *, count: int = 1, expect_tx: Any = 0, rank: Any = None, scope: str = "cta"
    ) -> None:
        self.time += self.state.chip.instruction
        wide = scope_of(scope) >= Scope.CLUSTER
        for part in self.parts:
            addresses = np.broadcast_to(np.asarray(address), len(self.threads))[part.rows]
            ranks = np.broadcast_to(np.asarray(-1 if rank is None else rank), len(self.threads))[part.rows]
            bytes_ = np.broadcast_to(np.asarray(expect_tx), len(self.threads))[part.rows]
            for where in sorted({(int(r), int(a)) for r, a in zip(ranks, addresses, strict=True)}):
                cta = self.peer(None if rank is None else where[0])
                chosen = (ranks == where[0]) & (addresses == where[1])
                arrivals = len(part.rows) if chosen.all() else int(chosen.sum())
                lanes = mask_of(part.rows[chosen] % 32)
                agent, own = part.warp.enter(lanes), cta is self.cta
                barrier = self.mbarrier(cta, where[1], agent.clock, remote=not own)
                if not own:
                    event = Event(agent.number, agent.count, 0, "arrive", self.title, self.where, row=EXECUTED)
                    cta.remote.append(event)
                released = part.warp.release(lanes)
                nbytes = int(bytes_[chosen].sum())
                if not barrier.arrive(arrivals * count, nbytes, released, self.time, near=own, far=wide):
                    raise self.state.stop(
                        "over-arrival",
                        f"{barrier.name} phase {barrier.phase} takes {barrier.count} arrivals, "
                        f"{barrier.count - barrier.pending} came [{self.title}]", self.where,
                    )  # fmt: skip

    def mbarrier_expect_tx(self, address: Any, nbytes: Any) -> None:
        barrier = self.mbarrier(self.cta, int(address), self.parts[0].enter().clock)
        lanes = sum(len(part.rows) for part in self.parts)
        barrier.tx += int(nbytes) * lanes if np.ndim(nbytes) == 0 else int(np.asarray(nbytes)[self.active].sum())

    def mbarrier_test(self, address: Any, parity: Any, scope: str = "cta") -> bool:
        barrier, phase = self._awaited(int(address), int(parity))
        if not barrier.done(int(parity)):
            return False
        self._observe(barrier, phase, scope)
        return True

    def mbarrier_wait(self, address: Any, parity: Any, scope: str = "cta") -> Blocking:
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
        self._observe(barrier, phase, scope)
        self.waited(began, barrier.name)

    def _awaited(self, address: int, parity: int) -> tuple[Mbarrier, int]:
        clock = self.parts[0].enter().clock
        barrier = self.mbarrier(self.cta, address, clock)
        phase = barrier.awaited(self, clock, parity)
        if barrier.phase - phase >= 2:
            self.hazard(
                "phase aliasing",
                f"a wait for phase {phase} of {barrier.name} while phase {barrier.phase} runs: parity {parity} "
                "does not tell them apart",
            )
        return barrier, phase

    def _observe(self, barrier: Mbarrier, phase: int, scope: str) -> None:
        for part in self.parts:
            part.acquire(barrier.completed.near)
            if scope_of(scope) >= Scope.CLUSTER:
                part.acquire(barrier.completed.far)
            last = min(phase, barrier.phase - 1)  # it may have asked again for the last one
            barrier.observe(self, part.enter(), last, self.title, self.where)
        self.time = max(self.time, barrier.completed_at) + self.state.chip.barrier

    def waited(self, began: int, what: str) -> None:
        """The unit stood still from `began` until now; before that it was busy."""
        add = self.state.timeline.add
        add(Span(self.block, self.name, "busy", self.busy_since, began, "instructions"))
        add(Span(self.block, self.name, "wait", began, self.time, f"wait for {what}"))
        self.busy_since = self.time

    def wait_word(
        self, address: Any, ready: Callable[[int], bool], what: str, order: Literal["acquire", "relaxed"],
        scope: str = "gpu",
    ) -> Blocking:  # fmt: skip
        address = int(address)

        def word() -> int:
            return int(self._gather("global", self.cta, np.array([address]), 4).view(np.uint32)[0, 0])

        self.check_aligned(np.array([address]), 4)
        began = self.time
        if not ready(word()):
            buffer = self.state.memory.find(address)
            name = buffer.name if buffer else "a word"
            yield Wait(lambda: ready(word()), lambda: f"{name}: a word is {word()}, {what}")
        self.time = max(self.time, self.state.released_at.get(address, 0))
        self.load("global", address, 4, order=order, scope=scope)
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
        self.converged(barrier.name)
        clock, arrivals = Clock(self.state.agents), []
        for part in self.parts:
            agent = part.enter()
            if barrier.mixes(agent.clock):
                self.hazard("barrier", f"{barrier.name}: this arrival may be counted in the round before, whose "
                            "threads it does not know to have come")  # fmt: skip
            if relaxed:
                arrivals.append((agent.number, agent.count))
                scope, told = part.warp.release_relaxed(part.lanes)
                clock.join(told) if scope >= Scope.CLUSTER else clock.follow(told)
            else:
                part.warp.sync()
                arrivals.append((agent.number, agent.count))
                clock.join(part.release())
        self.time += self.state.chip.instruction
        if not barrier.arrive(int(self.active.sum()), clock, arrivals, self.time):
            self.hazard(
                "barrier", f"{barrier.name}: more than the {barrier.expected} threads that it takes have arrived"
            )

    def _wait_for(
        self, barrier: ThreadBarrier, generation: int, what: str, relaxed: frozenset[Warp] = frozenset()
    ) -> Blocking:
        """`relaxed`: warps whose lanes' accesses their arrival has not ordered."""
        if barrier.generation <= generation:
            yield Wait(
                lambda: barrier.generation > generation,
                lambda: f"{barrier.name}: {barrier.arrived} of {barrier.expected} threads have arrived",
            )
        began = self.time
        self.time = max(self.time, barrier.opened_at) + self.state.chip.barrier
        assert barrier.opened is not None
        for part in self.parts:
            part.acquire(barrier.opened)
            if part.warp not in relaxed:
                part.warp.sync()
        self.waited(began, what)

    def warp_sync(self) -> None:
        self.converged("__syncwarp")
        for part in self.parts:
            if not part.partial:
                part.warp.sync()

    def cluster_arrive(self, *, relaxed: bool = False) -> None:
        number = self.block // self.cluster_size
        barrier = self.state.cluster_barriers.setdefault(
            number, ThreadBarrier("cluster barrier", self.cluster_size * self.state.kernel.threads)
        )
        for part in self.parts:
            if part.warp in self.cluster_arrivals:
                self.hazard("barrier", "barrier.cluster.arrive twice without a wait")
            self.cluster_arrivals[part.warp] = barrier.generation, relaxed
        self._arrive(barrier, relaxed=relaxed)

    def cluster_wait(self) -> Blocking:
        self.converged("barrier.cluster.wait")
        arrivals = {part.warp: self.cluster_arrivals.pop(part.warp, None) for part in self.parts}
        generations = [arrival[0] for arrival in arrivals.values() if arrival is not None]
        if len(generations) < len(arrivals):
            self.hazard("barrier", "barrier.cluster.wait without an arrive")
            return
        barrier = self.state.cluster_barriers[self.block // self.cluster_size]
        relaxed = frozenset(warp for warp, arrival in arrivals.items() if arrival and arrival[1])
        yield from self._wait_for(barrier, max(generations), "cluster", relaxed)

    def fence(self, kind: str, scope: str = "gpu") -> None:
        self.time += self.state.chip.instruction
        if kind == "wgmma":
            self.converged("wgmma.fence")
            self.dirty.clear()
            return
        for part in self.parts:
            if kind == "acq_rel":
                part.warp.fence(scope_of(scope), part.lanes)
            else:
                part.warp.fence_proxy({"proxy.async": ASYNC_PROXY, "mbarrier_init": MBARRIER_INIT}[kind], part.lanes)

    def compiler_fence(self, registers: Registers) -> None:
        self.unfenced.discard(registers)

    def grid_dependency_wait(self) -> None:
        for part in self.parts:
            part.enter().clock.done |= GRID_BEFORE

    def set_register_budget(self, registers: int, action: str) -> Blocking:
        self.converged("setmaxnreg")
        warps, change = len(self.warps), registers - self.budget
        if (action == "inc") != (change > 0) and change:
            self.hazard("registers", f"setmaxnreg.{action} to {registers} from {self.budget} registers a thread")
        self.budget = registers
        if change > 0 and self.cta.free_registers < change * warps:
            yield Wait(
                lambda: self.cta.free_registers >= change * warps,
                lambda: f"{change} more registers a thread: the pool has {self.cta.free_registers // warps}",
            )
        self.cta.free_registers -= change * warps


def overrun(state: State, barrier: Mbarrier, seen: Observation) -> None:
    """Reports a wait that nothing orders before the completion of the next phase."""
    state.hazards.report(
        "phase aliasing",
        f"a wait for phase {seen.phase} of {barrier.name} by {seen.who} is not ordered before the completion of phase "
        f"{barrier.phase}: where it comes later, the parity has changed under it", seen.where,
        barrier.name.partition("[")[0],
    )  # fmt: skip
