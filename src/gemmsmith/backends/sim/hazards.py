"""What the simulator reports, and where it collects it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemmsmith.lang.statements import Where


@dataclass(frozen=True)
class Hazard:
    """One mistake: its kind, what happened, and the kernel line that was executing.

    Kinds: race, missing proxy fence, uninitialized read, deadlock, phase aliasing, over-arrival, barrier, unread
    phase, exited CTA, accumulator, group, registers, out of bounds, alignment, overflow, uniformity, divergence,
    duplicate issue, semaphore.
    """

    kind: str
    message: str
    where: Where

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.message}"


@dataclass
class Hazards:
    """Collects hazards, each kind once a line (and other line). With the last that it takes the kernel stops."""

    limit: int
    found: list[Hazard] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)

    def report(self, kind: str, message: str, where: Where, other: object = None) -> None:
        key = (kind, where, other)
        if key in self._seen:
            return
        self._seen.add(key)
        self.found.append(Hazard(kind, message, where))
        if len(self.found) >= self.limit:
            raise Stop(f"{self.limit} hazards")


class Stop(Exception):  # noqa: N818 - no error of the user's program
    """The kernel cannot go on (after a report)."""
