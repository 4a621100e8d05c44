"""Happens-before: vector clocks over agents, plus one bit per completed asynchronous operation; memory scopes.

PTX ISA, "Memory consistency model": synchronization through a barrier, a memory word or a fence is limited to its
scope. That an event has been executed follows at any scope.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np

HAPPENS_BEFORE, ASYNC_PROXY_FENCED, GLOBAL_PROXY_FENCED, MBARRIER_INIT_FENCED, EXECUTED = range(5)
"""Rows of `VectorClock.event_counts`."""
ALL_LANES = 0xFFFF_FFFF
AGENTS_PER_WARP = 4
"""Agents per warp: the full warp, and up to three subsets of lanes; further subsets share the last."""
PREREQUISITE_GRIDS_BIT = 1
"""Bit of `VectorClock.completed_bits` for the prerequisite grids (programmatic dependent launch)."""


class ScopeLevel(IntEnum):
    """The threads that a synchronization includes: those of the CTA, its cluster, or the GPU (PTX ISA, "Scope")."""

    CTA = 0
    CLUSTER = 1
    GPU = 2


class HasClusterRank(Protocol):
    """A CTA, with its index in the grid and its rank in the cluster."""

    index: int
    rank: int


def scope_of(name: str) -> ScopeLevel:
    """Return the level of a PTX scope qualifier: cta, cluster or gpu."""
    return ScopeLevel[name.upper()]


def narrowest_common_scope(one: HasClusterRank, other: HasClusterRank) -> ScopeLevel:
    """Return the narrowest scope that contains both CTAs: that of the CTA, of the cluster, or of the GPU."""
    if one is other:
        return ScopeLevel.CTA
    is_one_cluster = one.index - one.rank == other.index - other.rank  # the index of the cluster's first CTA
    return ScopeLevel.CLUSTER if is_one_cluster else ScopeLevel.GPU


class VectorClock:
    """The events that happen before an agent's next one.

    `event_counts[row, a]` counts events of agent a. Depending on the row, the events up to that count

    - HAPPENS_BEFORE: happen before, with their memory accesses;
    - ASYNC_PROXY_FENCED: if ordinary accesses to shared memory, come before those of the async proxy, since their agent
      has executed a proxy fence;
    - GLOBAL_PROXY_FENCED: if ordinary accesses to global memory, come before those of the async proxy, since an agent
      that is ordered after them has executed a proxy fence;
    - MBARRIER_INIT_FENCED: if mbarrier inits, have been made visible to the cluster by a fence;
    - EXECUTED: have been executed, whether or not their accesses are visible.

    `completed_bits` has a bit for each asynchronous operation that is known to have completed. `fenced_bits` has those
    that had completed before a proxy fence: the async proxy sees what cp.async writes only after a fence.
    """

    __slots__ = ("completed_bits", "event_counts", "fenced_bits")

    def __init__(self, num_agents: int) -> None:
        self.event_counts = np.zeros((5, num_agents), np.int32)
        self.completed_bits = self.fenced_bits = 0

    def copy(self) -> VectorClock:
        clock = VectorClock.__new__(VectorClock)
        clock.event_counts = self.event_counts.copy()
        clock.completed_bits, clock.fenced_bits = self.completed_bits, self.fenced_bits
        return clock

    def join(self, other: VectorClock) -> None:
        """Join all rows and completed bits of another clock."""
        np.maximum(self.event_counts, other.event_counts, out=self.event_counts)
        self.completed_bits |= other.completed_bits
        self.fenced_bits |= other.fenced_bits

    def has_executed(self, agent: int, count: int) -> bool:
        """Return whether event number `count` of an agent has been executed before, whether or not it is visible."""
        return self.event_counts.item(EXECUTED, agent) >= count

    def join_executed_events(self, other: VectorClock) -> None:
        """Join only the rows EXECUTED and MBARRIER_INIT_FENCED of another clock.

        A synchronization with too narrow a scope orders no accesses, but still implies that the events have been
        executed.
        """
        executed = self.event_counts[MBARRIER_INIT_FENCED:]
        np.maximum(executed, other.event_counts[MBARRIER_INIT_FENCED:], out=executed)


@dataclass(eq=False)
class Agent:
    """A set of a warp's lanes that act together, with one vector clock for all (in the literature each thread has one).

    `index`: its column in vector clocks. `fenced`: scope and clock of the last fence; relaxed writes publish that
    clock. `pending`: (scope, clock) that relaxed reads have observed; the next fence joins them.
    """

    index: int
    clock: VectorClock
    fenced: tuple[ScopeLevel, VectorClock] | None = None
    pending: list[tuple[ScopeLevel, VectorClock]] = field(default_factory=list)

    def advance(self) -> None:
        self.clock.event_counts[HAPPENS_BEFORE, self.index] += 1
        self.clock.event_counts[EXECUTED, self.index] += 1

    @property
    def next_event(self) -> int:
        return self.clock.event_counts.item(HAPPENS_BEFORE, self.index)


class Warp:
    """The agents of a warp: `all_lanes`, and one for each subset of lanes that acts by itself, in a branch.

    A subset starts with the warp's clock, but without the warp's own accesses and fences since the last __syncwarp:
    lanes outside the subset may have executed them. The next __syncwarp joins the subsets' clocks into the warp's. An
    instruction that all lanes execute together (.aligned) orders the execution of the warp's earlier instructions, not
    their accesses.

    `subset_agents`: the agents by their lanes, a bit mask. `synced_counts`: the numbers of the warp's own events, by
    row and agent, that all of its lanes have observed. `converged_counts`: those that were executed before the last
    instruction of all lanes, by agent.
    """

    def __init__(self, index: int, num_agents: int) -> None:
        """Begin without any accesses.

        The first event is number 1, of which other clocks, which are 0, do not know.
        """
        self.first_agent = AGENTS_PER_WARP * index
        self.agent_slice = slice(self.first_agent, self.first_agent + AGENTS_PER_WARP)
        self.all_lanes = Agent(self.first_agent, VectorClock(num_agents))
        self.subset_agents: dict[int, Agent] = {}
        self.all_lanes.clock.event_counts[[HAPPENS_BEFORE, EXECUTED], self.first_agent] = 1
        self.synced_counts = np.zeros((EXECUTED, AGENTS_PER_WARP), np.int32)
        self.converged_counts = np.zeros(AGENTS_PER_WARP, np.int32)

    def agent(self, lanes: int) -> Agent:
        """Return the agent of the lanes that execute now. `lanes`: a bit mask.

        Its clock first joins the clocks of all supersets: what a superset has executed, each of these lanes has
        executed. A set that only overlaps may have executed something in lanes that are not among these.
        """
        if lanes == ALL_LANES:
            return self.all_lanes
        agent = self.subset_agents.get(lanes)
        if agent is None:
            agent = self.subset_agents[lanes] = self._agent_of_new_subset()
        self._join_synced(agent.clock, self.all_lanes)
        for other_lanes, other in self.subset_agents.items():
            if other is not agent and other_lanes & lanes == lanes:
                self._join_synced(agent.clock, other)
        return agent

    def _agent_of_new_subset(self) -> Agent:
        """Return a new agent for a subset of lanes.

        If all AGENTS_PER_WARP are in use, the last one serves further subsets, too. Its event numbers continue after
        those that the agent of this index had before the last __syncwarp. It has executed the last fence of the whole
        warp.
        """
        index = self.first_agent + min(len(self.subset_agents) + 1, AGENTS_PER_WARP - 1)
        for agent in self.subset_agents.values():
            if agent.index == index:
                return agent
        counts = self.all_lanes.clock.event_counts
        agent = Agent(index, VectorClock(counts.shape[1]))
        agent.clock.event_counts[[HAPPENS_BEFORE, EXECUTED], index] = counts[HAPPENS_BEFORE, index] + 1
        if self.all_lanes.fenced:
            scope, clock_then = self.all_lanes.fenced
            agent.fenced = scope, VectorClock(counts.shape[1])
            self._join_synced(agent.fenced[1], self.all_lanes, clock_then)
        return agent

    def _join_synced(self, clock: VectorClock, other: Agent, clock_then: VectorClock | None = None) -> None:
        """Join another agent's clock into `clock`, but not its own accesses and fences since the last __syncwarp.

        `clock_then`: the other agent's clock at an earlier time, to use instead of its current one.
        """
        clock_then = clock_then or other.clock
        counts, slot = clock_then.event_counts.copy(), other.index - self.first_agent
        slots = slice(None) if other is self.all_lanes else slice(slot, slot + 1)
        own = counts[:EXECUTED, self.agent_slice][:, slots]
        np.minimum(own, self.synced_counts[:, slots], out=own)
        executed = counts.item(EXECUTED, other.index), self.converged_counts.item(slot)
        counts[EXECUTED, other.index] = min(executed)
        np.maximum(clock.event_counts, counts, out=clock.event_counts)
        clock.completed_bits |= clock_then.completed_bits
        clock.fenced_bits |= clock_then.fenced_bits

    def converge(self) -> None:
        """Record that all lanes execute an instruction together, so all have executed what came before it."""
        self.converged_counts = np.maximum(
            self.converged_counts, self.all_lanes.clock.event_counts[EXECUTED, self.agent_slice]
        )
        for agent in self.subset_agents.values():
            self.converged_counts[agent.index - self.first_agent] = agent.clock.event_counts[EXECUTED, agent.index]
            agent.advance()
        self.all_lanes.advance()

    def sync(self) -> None:
        """Execute __syncwarp: order the accesses of all lanes."""
        for agent in self.subset_agents.values():
            self.all_lanes.clock.join(agent.clock)
            self.all_lanes.pending += agent.pending
            self.all_lanes.fenced = agent.fenced or self.all_lanes.fenced
        self.subset_agents.clear()
        self.synced_counts = self._observed_by_all(self.all_lanes.clock)
        self.converged_counts = self.synced_counts[HAPPENS_BEFORE]
        self.all_lanes.advance()

    def _observed_by_all(self, clock: VectorClock) -> np.ndarray:
        """Return the counts of the warp's own events, by row and agent, in a clock that all of its lanes have observed.

        The row of global proxy fences has the counts of HAPPENS_BEFORE: a later fence by any lane also covers the
        accesses of other lanes that it has observed.
        """
        counts = clock.event_counts[:EXECUTED, self.agent_slice].copy()
        counts[GLOBAL_PROXY_FENCED] = counts[HAPPENS_BEFORE]
        return counts

    def release(self, lanes: int) -> VectorClock:
        """Return a copy of the lanes' clock, and advance the clock, so that the copy does not cover later events.

        `lanes`: a bit mask. Subsets of the lanes are included. Of a set that overlaps, its own accesses since the last
        __syncwarp are not, since other lanes may have made them.
        """
        agent = self.agent(lanes)
        copy = agent.clock.copy()
        for other_lanes, other in self.subset_agents.items():
            if other is agent:
                continue
            if other_lanes & ~lanes == 0:
                copy.join(other.clock)
                other.advance()
            elif other_lanes & lanes:
                self._join_synced(copy, other)
        agent.advance()
        return copy

    def release_for_relaxed_write(self, lanes: int) -> tuple[ScopeLevel, VectorClock]:
        """Return (scope, clock) that a relaxed write by `lanes`, a bit mask, publishes.

        The clock has the events that the lanes have executed, of which no accesses are visible. If a fence precedes the
        write, it also has all that happens before that fence, at the fence's scope. Without a fence no accesses are
        published, so the scope is the widest.
        """
        agent = self.agent(lanes)
        published = VectorClock(agent.clock.event_counts.shape[1])
        scope, before = agent.fenced or (ScopeLevel.GPU, published)
        published.join(before)
        published.join_executed_events(self.release(lanes))
        return scope, published

    def acquire(self, lanes: int, clock: VectorClock) -> None:
        """Join a clock into that of the lanes, a bit mask.

        If these are all lanes, all have then observed the warp's own events in that clock.
        """
        self.agent(lanes).clock.join(clock)
        if lanes == ALL_LANES:
            self.synced_counts = np.maximum(self.synced_counts, self._observed_by_all(clock))
            executed = clock.event_counts[EXECUTED, self.agent_slice]
            self.converged_counts = np.maximum(self.converged_counts, executed)

    def _agents_within(self, lanes: int) -> dict[int, Agent]:
        """Return the agent of the lanes, and then those of their subsets, by bit mask of lanes."""
        return {lanes: self.agent(lanes)} | {
            subset: x for subset, x in self.subset_agents.items() if subset & ~lanes == 0
        }

    def fence(self, scope: ScopeLevel, lanes: int) -> None:
        """Execute a memory fence at `scope` in the lanes, a bit mask.

        Their earlier relaxed reads then acquire what they have read, if the scope suffices, and their later relaxed
        writes publish what is before the fence.
        """
        agents = self._agents_within(lanes)
        for agent in agents.values():
            for needed_scope, clock in agent.pending:
                if scope >= needed_scope:
                    agent.clock.join(clock)
            agent.pending.clear()
        for subset, agent in agents.items():  # each subset publishes its own clock
            agent.fenced = scope, self.release(subset)

    def fence_proxy(self, row: int, lanes: int) -> None:
        """Execute a proxy fence, or a fence of mbarrier inits, in the lanes, a bit mask.

        Their earlier accesses count in `row` from then on, so they are ordered before accesses of the async proxy
        (mbarrier inits: before uses in the cluster); see VectorClock.

        PTX ISA, "Causality order", keeps base causality only within a proxy. It does not say where on the way from one
        access to the other fence.proxy.async stands. In shared memory the accessing thread must execute it, as in
        CUTLASS; in global memory also a thread that has acquired the data may, since the writer may be in another CTA.
        """
        acting = self.agent(lanes)
        if row == GLOBAL_PROXY_FENCED:
            for agent in self._agents_within(lanes).values():
                counts = agent.clock.event_counts
                np.maximum(counts[row], counts[HAPPENS_BEFORE], out=counts[row])
                agent.advance()
            return
        if row == ASYNC_PROXY_FENCED:
            acting.clock.fenced_bits |= acting.clock.completed_bits
        if lanes == ALL_LANES:  # includes accesses of subsets before the last __syncwarp
            counts = acting.clock.event_counts
            own = counts[row, self.agent_slice]
            np.maximum(own, counts[HAPPENS_BEFORE, self.agent_slice], out=own)
        for agent in self._agents_within(lanes).values():
            agent.clock.event_counts[row, agent.index] = acting.clock.event_counts[row, agent.index] = agent.next_event
            agent.advance()
