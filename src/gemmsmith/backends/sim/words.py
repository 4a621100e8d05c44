"""Words of global memory through which threads signal one another by strong accesses: relaxed, acquire, release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gemmsmith.backends.sim.clocks import Clock
from gemmsmith.backends.sim.events import Event
from gemmsmith.backends.sim.scopes import Placed, Scope, between

Message = tuple[Scope, Placed, Clock]
"""What a write tells those who read it: as far as a scope from a CTA, that clock."""


@dataclass(eq=False)
class Word:
    """`messages`: of the last store and of the atomics since, for these hand on what they read (PTX ISA, "observation
    order"). `writes`: the same ones' events. `seen`: how many writes each agent has observed itself.
    `written_at`: when the last write is visible to those who poll the word."""

    messages: list[Message] = field(default_factory=list)
    writes: list[tuple[int, Event]] = field(default_factory=list)
    count: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    written_at: int = 0

    def read(self, agent: int) -> list[Message]:
        """An agent observes the word."""
        self.seen[agent] = self.count
        return self.messages

    def write(self, event: Event, message: Message, *, atomic: bool, ordered: Callable[[Event], bool]) -> Event | None:
        """An agent's store, or atomic. Gives a write that the store may be overtaken by: one of another agent that is
        neither ordered before it nor observed by its agent."""
        overtaken = None
        if not atomic:
            seen = self.seen.get(event.agent, 0)
            overtaken = next((e for number, e in self.writes if number > seen and not ordered(e)), None)
            self.messages, self.writes = [], []
        self.count += 1
        self.messages = [*self.messages, message]
        self.writes.append((self.count, event))
        return overtaken


def reach(reader: Placed, scope: Scope, message: Message) -> Scope | None:
    """The scope that reader and writer must have for the message to be an order; None where the writer's, or the
    reader's, is less."""
    written, writer, _ = message
    least = between(reader, writer)
    return least if min(scope, written) >= least else None
