"""Hazards that the simulator reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemmsmith.lang.location import SourceLocation


@dataclass(frozen=True)
class Hazard:
    """One error of a kernel: its kind, a message, and the kernel's source line being executed.

    Kinds: race, missing proxy fence, uninitialized read, deadlock, phase aliasing, over-arrival, barrier, unconsumed
    phase, unwritten result, access to exited CTA, wgmma register hazard, missing wait_group, registers, out of bounds,
    alignment, overflow, uniformity, divergence, issued by several threads, flags not reset.
    """

    kind: str
    message: str
    location: SourceLocation

    def __str__(self) -> str:
        return f"{self.kind} at {self.location}: {self.message}"


@dataclass
class Hazards:
    """Collects hazards, once per kind and pair of source lines. Raises SimulationAborted when `limit` is reached."""

    limit: int
    reported: list[Hazard] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)

    def report(self, kind: str, message: str, location: SourceLocation, other: object = None) -> None:
        """Record a hazard, unless one of its kind was reported for the same source lines."""
        key = (kind, location, other)
        if key in self._seen:
            return
        self._seen.add(key)
        self.reported.append(Hazard(kind, message, location))
        if len(self.reported) >= self.limit:
            raise SimulationAborted(f"{self.limit} hazards")


class SimulationAborted(Exception):  # noqa: N818 - no error of the user's program
    """The simulation cannot continue; the reason has been reported as a hazard."""
