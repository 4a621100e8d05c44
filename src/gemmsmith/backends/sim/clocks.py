"""What is ordered before what: vector clocks over agents, and a bit for every asynchronous operation known to be over.

PTX ISA, "Memory consistency model": an order through a barrier, a word or a fence reaches as far as its scope. That an
event has been executed is known whatever the scope.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gemmsmith.backends.sim.scopes import Scope

MEMORY, ASYNC_PROXY, MBARRIER_INIT, EXECUTED = range(4)
"""Rows of `Clock.vector`."""
ALL_LANES = 0xFFFF_FFFF
AGENTS = 4
"""Of a warp: all its lanes together, and up to three sets of lanes that act alone; further sets share the last."""
GRID_BEFORE = 1
"""The bit of `Clock.done` that stands for the grids which this one depends on."""


class Clock:
    """What an agent knows. `vector[row, a]`: of agent a's events, those up to that count,

    MEMORY: are ordered before, their accesses too;
    ASYNC_PROXY: are ordinary writes that a proxy fence has made visible to the async proxy;
    MBARRIER_INIT: are mbarrier inits that a fence has made visible to the cluster;
    EXECUTED: have been executed, whatever is visible of them.
    `done`: the asynchronous operations that are over.
    """

    __slots__ = ("done", "vector")

    def __init__(self, agents: int) -> None:
        self.vector = np.zeros((4, agents), np.int32)
        self.done = 0

    def copy(self) -> Clock:
        clock = Clock.__new__(Clock)
        clock.vector, clock.done = self.vector.copy(), self.done
        return clock

    def join(self, other: Clock) -> None:
        """Learns everything."""
        np.maximum(self.vector, other.vector, out=self.vector)
        self.done |= other.done

    def follow(self, other: Clock) -> None:
        """Learns what has been executed, and of fenced inits: what an order of too small a scope, or none, tells."""
        np.maximum(self.vector[MBARRIER_INIT:], other.vector[MBARRIER_INIT:], out=self.vector[MBARRIER_INIT:])


@dataclass(eq=False)
class Agent:
    """Lanes of a warp that act together. `fenced`: since a fence of that scope, what their relaxed writes publish;
    `pending`: what their relaxed reads have seen, each as far as a scope, which a fence makes known."""

    number: int
    clock: Clock
    fenced: tuple[Scope, Clock] | None = None
    pending: list[tuple[Scope, Clock]] = field(default_factory=list)

    def advance(self) -> None:
        self.clock.vector[MEMORY, self.number] += 1
        self.clock.vector[EXECUTED, self.number] += 1

    @property
    def count(self) -> int:
        return self.clock.vector.item(MEMORY, self.number)


class Warp:
    """The agents of a warp.

    A set of lanes knows what the whole warp knows, but of the warp's own accesses only those before the last
    warp_sync: others may be of other lanes. The whole learns what a set knows at the next warp_sync. Instructions that
    all lanes execute together (.aligned) order what has been executed among them, not their accesses.
    """

    def __init__(self, index: int, agents: int) -> None:
        self.first = AGENTS * index
        self.own = slice(self.first, self.first + AGENTS)
        self.all = Agent(self.first, Clock(agents))
        self.sets: dict[int, Agent] = {}
        self.all.clock.vector[[MEMORY, EXECUTED], self.first] = 1
        self.synced, self.converged = (np.zeros(AGENTS, np.int32) for _ in range(2))

    def enter(self, lanes: int) -> Agent:
        """The agent of those lanes, which act now."""
        if lanes == ALL_LANES:
            return self.all
        agent = self.sets.get(lanes)
        if agent is None:
            agent = self.sets[lanes] = self._new_set()
        self._inform(agent.clock, self.all)
        for others, other in self.sets.items():
            if other is not agent and others & lanes == lanes:
                self._inform(agent.clock, other)
        return agent

    def _new_set(self) -> Agent:
        number = self.first + min(len(self.sets) + 1, AGENTS - 1)
        shared = next((a for a in self.sets.values() if a.number == number), None)
        if shared:
            return shared
        agent = Agent(number, Clock(self.all.clock.vector.shape[1]))
        agent.clock.vector[[MEMORY, EXECUTED], number] = self.all.clock.vector[MEMORY, number] + 1
        if self.all.fenced:
            scope, before = self.all.fenced
            agent.fenced = scope, Clock(agent.clock.vector.shape[1])
            self._inform(agent.fenced[1], self.all, before)
        return agent

    def _inform(self, clock: Clock, other: Agent, known: Clock | None = None) -> None:
        """Tells a set of lanes what others know (now, or when they knew `known`), but for what those did themselves
        since the warp's lanes last met."""
        known = known or other.clock
        vector, column, slot = known.vector.copy(), other.number, other.number - self.first
        vector[:EXECUTED, column] = np.minimum(vector[:EXECUTED, column], self.synced[slot])
        vector[EXECUTED, column] = min(vector[EXECUTED, column], self.converged[slot])
        np.maximum(clock.vector, vector, out=clock.vector)
        clock.done |= known.done

    def converge(self) -> None:
        """All lanes execute an instruction together."""
        self.converged = np.maximum(self.converged, self.all.clock.vector[EXECUTED, self.own])
        for agent in self.sets.values():
            self.converged[agent.number - self.first] = agent.clock.vector[EXECUTED, agent.number]

    def sync(self) -> None:
        """All lanes order their accesses among themselves."""
        for agent in self.sets.values():
            self.all.clock.join(agent.clock)
            self.all.pending += agent.pending
            self.all.fenced = agent.fenced or self.all.fenced
        self.sets.clear()
        self.synced = self.all.clock.vector[MEMORY, self.own].copy()
        self.converged = self.synced
        self.all.advance()

    def release(self, lanes: int) -> Clock:
        """A copy of what the acting lanes know and did, with which their later events are not confused."""
        agent = self.enter(lanes)
        copy = agent.clock.copy()
        for others, other in self.sets.items():
            if other is agent:
                continue
            if others & ~lanes == 0:
                copy.join(other.clock)
                other.advance()
            elif others & lanes:
                self._inform(copy, other)
        agent.advance()
        return copy

    def release_relaxed(self, lanes: int) -> tuple[Scope, Clock]:
        """What a relaxed write of the acting lanes tells others: what has been executed, fenced mbarrier inits; and,
        as far as that scope, what came before a fence."""
        agent = self.enter(lanes)
        copy = Clock(agent.clock.vector.shape[1])
        scope, before = agent.fenced or (Scope.GPU, copy)
        copy.join(before)
        copy.follow(self.release(lanes))
        return scope, copy

    def acquire(self, lanes: int, clock: Clock) -> None:
        self.enter(lanes).clock.join(clock)

    def _within(self, lanes: int) -> dict[int, Agent]:
        """The agent of those lanes first, and those of parts of them, which execute what they do; by lanes."""
        return {lanes: self.enter(lanes)} | {part: x for part, x in self.sets.items() if part & ~lanes == 0}

    def fence(self, scope: Scope, lanes: int) -> None:
        """Orders the acting lanes' relaxed accesses before with those after it, as far as the scope."""
        agents = self._within(lanes)
        for agent in agents.values():
            for reach, clock in agent.pending:
                if scope >= reach:
                    agent.clock.join(clock)
            agent.pending.clear()
        for part, agent in agents.items():  # each lane publishes what it knows itself
            agent.fenced = scope, self.release(part)

    def fence_proxy(self, row: int, lanes: int) -> None:
        """The acting lanes' ordinary writes, or mbarrier inits, so far become visible where others are not."""
        acting = self.enter(lanes)
        if lanes == ALL_LANES:  # each lane's own, of what sets of lanes did before the lanes last met
            known = acting.clock.vector
            known[row, self.own] = np.maximum(known[row, self.own], known[MEMORY, self.own])
        for agent in self._within(lanes).values():
            agent.clock.vector[row, agent.number] = acting.clock.vector[row, agent.number] = agent.count
            agent.advance()
