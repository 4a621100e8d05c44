"""Memory instructions of the active threads: loads, stores, strong accesses, atomics and polling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from gemmsmith.backends.sim.execute.checked_memory import CheckedMemory, ResolvedAccess
from gemmsmith.backends.sim.execute.counters import AccessCounter
from gemmsmith.backends.sim.memory.clocks import EXECUTED, ScopeLevel, scope_of
from gemmsmith.backends.sim.memory.events import Event, LaneAccesses
from gemmsmith.backends.sim.memory.sync_variables import ReleasedClock, synchronizing_scope
from gemmsmith.backends.sim.state.grid_state import BARRIER_CYCLES, MEMORY_INSTRUCTION_CYCLES, STORE_LATENCY
from gemmsmith.backends.sim.state.lockstep_group import ActiveLanes, ActiveWarps, LockstepGroup, Wait
from gemmsmith.machine import Access, Blocking, Space

LOG2_STEPS_PER_POLL = (-6, 8)
"""Range of log2 of the scheduler steps in the time of one poll, for waits with a poll limit; drawn by the seed, since
other groups may be delayed for long or arrive immediately. Chosen; not measured."""


class MemoryInstructions(CheckedMemory):
    """The memory instructions of a lockstep group; `counter`, if given, is told of each."""

    def __init__(self, group: LockstepGroup, counter: AccessCounter | None) -> None:
        super().__init__(group)
        self.counter = counter

    def load(
        self, space: Space, address: Any, nbytes: int, *, rank: Any = None, order: str = "weak", scope: str = "gpu",
        mask: Any = None,
    ) -> np.ndarray:  # fmt: skip
        if order != "weak":
            self.group.depends_on_time("a strong load reads what has been written by then")
        result = np.zeros((len(self.group.threads), nbytes), np.uint8)
        for _, thread_indices, resolved in self._accesses("read", space, address, nbytes, order, scope, rank, mask):
            if resolved:
                result[thread_indices] = resolved.read()
        return result

    def store(
        self, space: Space, address: Any, data: np.ndarray, *, rank: Any = None, order: str = "weak",
        scope: str = "gpu", mask: Any = None,
    ) -> None:  # fmt: skip
        """Store `data`, (threads, nbytes), of the active threads.

        Weak stores of two threads to one address are a race (PTX ISA, "Data races"). A read gets one of their values,
        so within one instruction it is reported only if the values differ.
        """
        nbytes = data.shape[1]
        for _, thread_indices, resolved in self._accesses("write", space, address, nbytes, order, scope, rank, mask):
            if resolved:
                values = data[thread_indices]
                resolved.write(values)
                if order == "weak" and resolved.read().tobytes() != values.tobytes():
                    self.group.report("race", "threads store different values to one address in one instruction")

    def atomic(
        self, address: Any, dtype: Any, update: Callable[[Any, Any], Any], operand: np.ndarray, *,
        order: str = "relaxed", scope: str = "gpu", returns: bool = True, rounds: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Update a word of global memory for each active thread, in their order; return the old words.

        `update` computes the new word from the old one and the thread's `operand`.
        """
        if returns:
            self.group.depends_on_time("an atomic returns what has been written by then")
        kind = np.dtype(dtype)
        old = np.zeros(len(self.group.threads), kind)
        for access, thread_indices, _ in self._accesses(
            "atomic", "global", address, kind.itemsize, order, scope, returns=returns, rounds=rounds
        ):
            for row, at in zip(thread_indices, access.addresses.reshape(-1, 1), strict=True):
                one = replace(access, addresses=at)
                old[row] = self.peek(one).view(kind)[0, 0]
                new = np.asarray(update(old[row], kind.type(operand[row])), kind).reshape(1, 1)
                self.poke(one, new.view(np.uint8))
        return old if old.dtype == np.float32 else old.astype(np.int64)

    def spin_wait(
        self, address: Any, ready: Callable[[int], bool], description: str, order: str, scope: str = "gpu",
        max_polls: int | None = None,
    ) -> Blocking:  # fmt: skip
        """Poll a word of global memory until `ready(word)`, at most `max_polls` times, and return it.

        Only the load that ends the wait is checked and ordered. `description`: what the word is before, such as "not
        1", for reports of deadlocks.
        """
        group, address = self.group, int(address)
        polls_left = math.inf if max_polls is None else self._choose_polls(max_polls)
        access = Access("global", np.array([address]), 4)

        def word() -> int:
            return int(self.peek(access).view(np.uint32)[0, 0])

        def done() -> bool:
            nonlocal polls_left
            polls_left -= 1
            return ready(word()) or polls_left < 0

        self.check_aligned(access, 4)
        start = group.time
        if not done():
            buffer = group.state.memory.buffer_at(address)
            name = buffer.name if buffer else "a word"
            yield Wait(done, lambda: f"{name}: a word is {word()}, {description}", "another CTA")
        word_state = group.state.sync_variables[address]
        if max_polls is not None:
            group.depends_on_time("a poll ends after a number of loads")
        else:
            self._check_started(address)
            if word_state.previous is not None and ready(word_state.previous):
                group.depends_on_time("a spin may end before the last write to its word")
        group.time = max(group.time, word_state.visible_at)
        for _ in self._accesses("read", "global", address, 4, order, scope):
            pass  # the load that ends the wait
        word_state.spins += [(lanes.agent().index, lanes.agent().next_event) for lanes in group.active_lanes]
        group.time += BARRIER_CYCLES
        group.record_wait(start, "another CTA")
        return word()

    def _choose_polls(self, limit: int) -> float:
        """Return after how many steps of the scheduler a poll of at most `limit` loads ends.

        Any number is possible, since other groups may be delayed: seed 0 waits without limit, others draw one.
        """
        state = self.group.state
        return limit * 2 ** state.random.uniform(*LOG2_STEPS_PER_POLL) if state.seed else math.inf

    def _check_started(self, address: int) -> None:
        """Report a wait at an address to which a CTA wrote that might not have started in another schedule.

        Only CTAs of lower clusters and of the first wave have surely started. CTAs start in order of index and as
        others exit, so a CTA may keep waiting for one that has no SM (CUDA C++ Programming Guide, "Cooperative Groups":
        only CTAs that are co-resident may wait for one another).
        """
        group, state = self.group, self.group.state
        for _, event in state.sync_variables[address].writes:
            assert event.strong is not None
            # index - rank is the index of the cluster's first CTA.
            writer, own = event.strong[1], group.cta
            if writer.index - writer.rank > own.index - own.rank and writer.index >= state.resident_ctas:
                group.report(
                    "deadlock",
                    f"CTA {own.index} waits for CTA {writer.index}, which may not have started: {state.resident_ctas} "
                    f"of {state.grid} CTAs are resident",
                )

    def _accesses(
        self, kind: Literal["read", "write", "atomic"], space: Space, address: Any, width: int, order: str, scope: str,
        rank: Any = None, mask: Any = None, *, returns: bool = True, rounds: bool = False,
    ) -> Iterator[tuple[Access, np.ndarray, ResolvedAccess | None]]:  # fmt: skip
        """Check and record the accesses of an instruction of the active threads; yield them, for the caller to perform.

        Each is (access, thread indices, resolved access). `mask`: a bool per thread; None for all active ones.
        """
        if self.counter:
            self.counter.count(space, address, width, mask)
        self.group.time += MEMORY_INSTRUCTION_CYCLES
        strong = None if order == "weak" else scope_of(scope)
        for access, warps in self._split(space, address, width, rank, mask):
            resolved = self.resolve(access)
            for lanes, warp_slice in warps.slices:
                event = self._record(access, resolved, lanes, warp_slice, kind, strong)
                if strong is None:
                    continue
                part = replace(access, addresses=access.addresses[warp_slice])
                if kind != "write" and returns:
                    self._strong_read(lanes, part.addresses, strong, acquires=order in ("acquire", "acq_rel"))
                if kind != "read":
                    self._strong_write(lanes, part, event, order, strong, rounds=rounds)
            yield access, warps.thread_indices, resolved

    def _split(
        self, space: Space, address: Any, width: int, rank: Any, mask: Any
    ) -> Iterator[tuple[Access, ActiveWarps]]:
        """Yield the active threads' access in parts of one buffer each, with the lanes that make it.

        It is split by `rank`, the target CTA of each thread, or by warp if warps access different global buffers.
        """
        group, addresses = self.group, self.group.broadcast(address)
        active = group.active_lanes if mask is None else group.active_lanes_of(np.asarray(mask))
        if not active:
            return
        own, buffer_at = addresses[active.thread_indices], group.state.memory.buffer_at
        parts: list[tuple[ActiveWarps, int | None]] = [(active, None)]
        if rank is not None:
            ranks = group.broadcast(rank)
            of_rank = {
                int(r): [replace(x, thread_indices=x.thread_indices[ranks[x.thread_indices] == r]) for x in active]
                for r in np.unique(ranks[active.thread_indices])
            }
            parts = [(ActiveWarps(x for x in warps if len(x.thread_indices)), r) for r, warps in of_rank.items()]
        elif space == "global" and buffer_at(int(own.min())) is not buffer_at(int(own.max())):
            parts = [(ActiveWarps([one]), None) for one in active]
        for warps, target in parts:
            access = Access(space, addresses[warps.thread_indices], width, target)
            self.check_aligned(access, width)
            yield access, warps

    def _record(
        self, access: Access, resolved: ResolvedAccess | None, lanes: ActiveLanes, warp_slice: slice, label: str,
        scope: ScopeLevel | None,
    ) -> Event:  # fmt: skip
        """Check and record one warp's share of an access, and return its event."""
        group, agent, cta = self.group, lanes.agent(), self.group.peer(access.rank)
        offsets = resolved.offsets if resolved else access.addresses
        accesses = LaneAccesses(offsets[warp_slice], access.width, lanes.thread_indices)
        strong = None if scope is None else (scope, group.cta)
        event = Event(
            agent.index, agent.next_event, 0, label, group.location_of(lanes.warp), warp=lanes.warp,
            lanes=accesses, strong=strong, is_read=label == "read", is_atomic=label == "atomic",
        )  # fmt: skip
        if resolved:
            self.record(resolved, event, agent.clock, warp_slice)
        if cta is not group.cta:
            cta.remote.append(event)
            # Counts of a CTA's warps are 0 in clocks that know nothing of it.
            if not any(agent.clock.event_counts[EXECUTED, warp.first_agent] for warp in cta.warps):
                group.report("barrier", f"access to shared memory of CTA {cta.index}, which may not have started; "
                             "add a cluster barrier before it")  # fmt: skip
        return event

    def _strong_read(self, lanes: ActiveLanes, addresses: np.ndarray, scope: ScopeLevel, *, acquires: bool) -> None:
        """Record a strong read, at `scope`, of the words at `addresses` by some lanes of a warp.

        An acquire joins the clocks that the words' writes have published, a relaxed read does so at the next fence. If
        a scope is too narrow, it only joins what has been executed.
        """
        agent = lanes.agent()
        for x in np.unique(addresses):
            for released_clock in self.group.state.sync_variables[int(x)].read(agent.index):
                level = synchronizing_scope(self.group.cta, scope, released_clock)
                if level is not None and acquires:
                    agent.clock.join(released_clock.clock)
                    continue
                agent.clock.join_executed_events(released_clock.clock)
                if level is not None:
                    agent.pending.append((level, released_clock.clock))

    def _strong_write(
        self, lanes: ActiveLanes, access: Access, event: Event, order: str, scope: ScopeLevel, *, rounds: bool = False
    ) -> None:
        """Record a strong write by some lanes of a warp, before it is performed.

        A release publishes the lanes' clock, and a relaxed write that of the last fence. What makes the result depend
        on time is recorded, too. `rounds`: the result depends on the order of the writes, as floating-point sums do.
        """
        group, agent = self.group, lanes.agent()
        if order in ("release", "acq_rel"):
            fenced_scope, clock = ScopeLevel.GPU, lanes.release()
        else:
            fenced_scope, clock = lanes.warp.release_for_relaxed_write(lanes.mask)
        released_clock = ReleasedClock(min(scope, fenced_scope), group.cta, clock)

        addresses = np.unique(access.addresses)
        several_lanes = len(addresses) < len(access.addresses)
        for x in addresses:
            word = group.state.sync_variables[int(x)]
            if rounds and (several_lanes or not all(x.happens_before(agent.clock) for _, x in word.writes)):
                group.depends_on_time("floating-point atomics round in the order in which they are executed")
            if not word.is_spin_free(agent.clock):
                group.depends_on_time("a word is written again before all that spin on it have read it")
            racing = word.write(event, released_clock, agent.clock)
            if racing:
                group.report("race", f"{event} of a word is not ordered after {racing}", racing.place)
            if not rounds:
                word.previous = int(self.peek(replace(access, addresses=np.array([x]), width=4)).view(np.uint32)[0, 0])
            word.visible_at = group.time + STORE_LATENCY
