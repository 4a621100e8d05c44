"""mbarrier instructions of a lockstep group: init, arrive, expect_tx, test_wait and wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gemmsmith.backends.sim.memory.clocks import (
    ASYNC_PROXY_FENCED,
    EXECUTED,
    HAPPENS_BEFORE,
    MBARRIER_INIT_FENCED,
    ScopeLevel,
    VectorClock,
    scope_of,
)
from gemmsmith.backends.sim.memory.events import Event
from gemmsmith.backends.sim.memory.memory import OFFSET_MASK
from gemmsmith.backends.sim.memory.shadow import MBARRIER_BYTES
from gemmsmith.backends.sim.state.cta import Cta, Mbarrier
from gemmsmith.backends.sim.state.grid_state import BARRIER_CYCLES, INSTRUCTION_CYCLES
from gemmsmith.backends.sim.state.lockstep_group import ActiveLanes, LockstepGroup, Wait, mask_of
from gemmsmith.machine import Blocking


class Mbarriers:
    """The mbarrier instructions of a lockstep group."""

    def __init__(self, group: LockstepGroup) -> None:
        self.group = group

    def at(self, cta: Cta, address: int, clock: VectorClock, *, used_by_async_proxy: bool = False) -> Mbarrier:
        """Return the mbarrier at an address of a CTA; report an init that its use at `clock` does not come after.

        The use must be ordered after the init, or after the fence of mbarrier inits. For an mbarrier of another CTA, it
        must come after the fence. `used_by_async_proxy`: TMA signals the mbarrier, so either that fence or a proxy
        fence is needed.
        """
        group, remote = self.group, cta is not self.group.cta
        barrier = cta.mbarriers.get(address & OFFSET_MASK)
        name = group.state.describe_address(address)[0]
        if barrier is None:
            raise group.fatal("barrier", f"{name} is used but was never initialized [{group.title}]")
        agent, init_event = barrier.initializer
        ordered = [x >= init_event for x in clock.event_counts[:, agent].tolist()]
        if not ordered[HAPPENS_BEFORE] and not ordered[MBARRIER_INIT_FENCED]:
            group.report("barrier", f"{name} is used without synchronizing with its init; add a barrier after the init")
        elif (
            (remote or used_by_async_proxy)
            and not ordered[MBARRIER_INIT_FENCED]
            and (remote or not ordered[ASYNC_PROXY_FENCED])
        ):
            group.report("barrier", f"the init of {name} is not fenced for the cluster and the async proxy")
        return barrier

    def init(self, address: Any, count: int) -> None:
        """Initialize an mbarrier of this CTA that expects `count` arrivals per phase. One thread executes it."""
        group, state, cta = self.group, self.group.state, self.group.cta
        agent = group.active_lanes[0].agent()
        offset = int(address) & OFFSET_MASK
        name = state.describe_address(int(address))[0]
        if offset + MBARRIER_BYTES > len(cta.shared):
            raise group.fatal("out of bounds", f"{name}: the mbarrier is outside shared memory")
        if offset % MBARRIER_BYTES:
            group.report("alignment", f"{name}: mbarrier address is not a multiple of {MBARRIER_BYTES}")
        if offset in cta.mbarriers or np.count_nonzero(group.active) > 1:
            group.report("barrier", f"{name} is initialized twice")
        if count < 1:
            raise group.fatal("barrier", f"{name} is initialized for {count} arrivals")
        initializer = agent.index, agent.next_event
        cta.mbarriers[offset] = Mbarrier(name, count, initializer, group.location, state.num_agents, state.hazards)
        cta.shadow.add_barrier(offset)
        self._observe_state("init", cta, cta.mbarriers[offset], count)

    def arrive(self, address: Any, *, expect_tx: Any = 0, rank: Any = None, scope: str = "cta") -> None:
        """Arrive once per active thread, which publishes at `scope` what the thread has done.

        `address`, `expect_tx`, `rank` may differ between threads. `expect_tx`: bytes for which the phase then waits,
        too. `rank`: the CTA of the cluster that holds the barrier, None for this one.
        """
        group = self.group
        group.time += INSTRUCTION_CYCLES
        at_cluster_scope = scope_of(scope) >= ScopeLevel.CLUSTER
        bytes_ = group.broadcast(expect_tx)
        for part in group.active_lanes:
            for target, at, rows, lanes in self._targets(part, rank, address):
                cta, arrivals = group.peer(target), len(rows)
                agent, own = part.warp.agent(lanes), cta is group.cta
                barrier = self.at(cta, at, agent.clock)
                arrival = agent.index, agent.next_event
                barrier.check_order(agent.clock, "arrival", group.location)
                if not own:
                    event = Event(agent.index, agent.next_event, 0, "arrive", group.location, row=EXECUTED)
                    cta.remote.append(event)
                released, nbytes = part.warp.release(lanes), int(np.add.reduce(bytes_[rows]))
                if not barrier.arrive(
                    arrival, arrivals, nbytes, released, group.time, at_cta_scope=own, at_cluster_scope=at_cluster_scope
                ):  # fmt: skip
                    raise group.fatal(
                        "over-arrival",
                        f"{barrier.name} phase {barrier.phase} expects {barrier.count} arrivals, "
                        f"got {barrier.count - barrier.pending} [{group.title}]",
                    )
                self._observe_state("arrive", cta, barrier, arrivals)

    def _observe_state(self, kind: str, cta: Cta, barrier: Mbarrier, amount: int) -> None:
        """Tell the observer, if there is one, the state of a CTA's barrier after an instruction."""
        if (observer := self.group.state.observer) is not None:
            observer.barrier(kind, self.group, cta.index, barrier, amount)

    def _targets(self, part: ActiveLanes, rank: Any, address: Any) -> Iterator[tuple[int | None, int, np.ndarray, int]]:
        """Yield the barriers that a warp's active lanes arrive at: (rank, address, thread indices, lane mask)."""
        ranks, addresses = (
            self.group.broadcast(x)[part.thread_indices] for x in (-1 if rank is None else rank, address)
        )
        for target, at in sorted({*zip(ranks.tolist(), addresses.tolist(), strict=True)}):
            rows = part.thread_indices[(ranks == target) & (addresses == at)]
            yield None if rank is None else target, at, rows, mask_of(rows % 32)

    def expect_tx(self, address: Any, nbytes: Any) -> None:
        """Let the phase in progress wait for `nbytes` more bytes per active thread, without an arrival."""
        group, bytes_ = self.group, self.group.broadcast(nbytes)
        for lanes in group.active_lanes:
            agent = lanes.agent()
            barrier = self.at(group.cta, int(address), agent.clock)
            barrier.check_order(agent.clock, "expect_tx", group.location)
            barrier.expect_tx(agent, int(bytes_[lanes.thread_indices].sum()), group.location)
            self._observe_state("expect_tx", group.cta, barrier, int(bytes_[lanes.thread_indices].sum()))

    def test(self, address: Any, parity: Any, scope: str = "cta") -> bool:
        """Return whether the phase with this parity has completed.

        If so, what its arrivals published at `scope` happens before what follows.
        """
        barrier, phase = self._resolve_phase(int(address), int(parity))
        if not self.group.state.tests_only_skip_waits:
            self.group.depends_on_time("the result of test_wait decides more than whether a wait is executed")
        if not barrier.is_complete(int(parity)):
            return False
        self._observe(barrier, phase, scope)
        return True

    def wait(self, address: Any, parity: Any, scope: str = "cta") -> Blocking:
        """Wait until the phase with this parity has completed."""
        parity = int(parity)
        barrier, phase = self._resolve_phase(int(address), parity)
        if not barrier.is_complete(parity):
            yield Wait(
                lambda: barrier.is_complete(parity),
                lambda: (
                    f"{barrier.name} phase {phase} (parity {parity}): {barrier.pending} of {barrier.count} arrivals "
                    f"and {barrier.tx_count} bytes are missing in phase {barrier.phase}"
                ),
                barrier.name, phase,
            )  # fmt: skip
            self._resolve_phase(int(address), parity)
        start = self.group.time
        self._observe(barrier, phase, scope)
        self.group.record_wait(start, barrier.name, phase)

    def _resolve_phase(self, address: int, parity: int) -> tuple[Mbarrier, int]:
        """Return the mbarrier, and the number of the phase that a wait for `parity` means.

        Reports a wait whose parity is ambiguous, since the barrier is two phases further already.
        """
        clocks = [lanes.agent().clock for lanes in self.group.active_lanes]
        barrier, *_ = [self.at(self.group.cta, address, clock) for clock in clocks]
        phase = barrier.resolve_phase(self.group, clocks[0], parity)
        if barrier.phase - phase >= 2:
            self.group.report(
                "phase aliasing",
                f"wait for phase {phase} of {barrier.name} while phase {barrier.phase} is in progress; parity {parity} "
                "is ambiguous",
            )
        return barrier, phase

    def _observe(self, barrier: Mbarrier, phase: int, scope: str) -> None:
        """Record that the active threads have seen a phase complete: join the clocks that its arrivals have published.

        A wait at cluster scope also joins what was published at that scope.
        """
        group = self.group
        for lanes in group.active_lanes:
            lanes.acquire(barrier.completed_clocks.cta)
            if scope_of(scope) >= ScopeLevel.CLUSTER:
                lanes.acquire(barrier.completed_clocks.cluster)
            # Parity names a phase: a later one than the last completed is that one.
            observed_phase = min(phase, barrier.phase - 1)
            barrier.record_wait(group, lanes.agent(), observed_phase, group.location)
        group.time = max(group.time, barrier.completed_at) + BARRIER_CYCLES
