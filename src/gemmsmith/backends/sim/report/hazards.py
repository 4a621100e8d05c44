"""Hazards that the simulator reports: what, where, in which iteration, and what is missing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from posixpath import basename
from typing import Any, Protocol

from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.location import SourceLocation

Loops = tuple[tuple[str, int], ...]
"""Name and index of each loop, outermost first."""


class Place(SourceLocation):
    """A source line that threads execute. Compares by file and line.

    Attributes:
        agent: Name of the threads, such as "CTA 0 consumer warpgroup 0".
        loops: Name and index of each loop around the line, outermost first.
        access: The access made there, such as "read of wgmma m64n128k16", or "".
        engine: What makes it: threads, tma, bulk (TMA stores), tensor or copy (cp.async), or "".
    """

    __slots__ = ("access", "agent", "cta", "engine", "loops")

    def __init__(
        self, location: SourceLocation, cta: int, agent: str, loops: Loops, access: str = "", engine: str = ""
    ) -> None:
        super().__init__(location.file, location.line, location.calls, location.number)
        self.cta, self.agent, self.loops, self.access, self.engine = cta, agent, loops, access, engine

    def accessed(self, access: str, engine: str) -> Place:
        return Place(self, self.cta, self.agent, self.loops, access, engine)


MAX_PRINTED = 4
"""Calls of a stack, and places, that a hazard's text has. JSON has all. Chosen; not measured."""
_ORDER = {
    ("tma", "read"): "wait for the mbarrier on which the TMA load completes before its source is written",
    ("tma", "write"): "wait for the mbarrier on which the TMA load completes, in the phase of this load",
    ("bulk", "read"): "the thread that issued the TMA store executes cp.async.bulk.wait_group.read; a barrier follows",
    ("bulk", "write"): "the thread that issued the TMA store executes cp.async.bulk.wait_group; a barrier follows",
    ("tensor", "read"): "execute wgmma.wait_group before arriving on the barrier for which the writer waits",
    ("copy", "write"): "each thread waits for its copies (cp.async.wait_group, or an mbarrier on which they arrive); "
    "a barrier follows",
    ("threads", ""): "synchronize the threads: arrive after the first access and wait before the second, on a barrier "
    "or by release and acquire, at a scope that includes both",
}  # fmt: skip
"""What orders a second access after a first one by (engine, kind of the first access)."""
_PROXY_FENCE = (
    "execute fence.proxy.async (.global for global memory) in the threads that have made the first access, or waited "
    "for it, before they arrive on the barrier for which the issuer of the second waits"
)
_HINTS: dict[str, dict[str, str]] = {
    "missing proxy fence": {"": _PROXY_FENCE},
    "race": {
        "prerequisite grids": "execute griddepcontrol.wait before the first access to global memory",
        "one instruction": "let one thread store, or give each its own address",
    },
    "uninitialized read": {
        "register": "assign the register on every path to this line",
        "": "write the memory, and order the write before this read",
    },
    "deadlock": {
        "may not have started": "wait only for CTAs of lower index, or launch no more CTAs than are resident",
        "": "compare the phase for which each waits with the arrivals and bytes that are missing there",
    },
    "phase aliasing": {
        "": "the waiting threads must be among those whose arrival completes the next phase: arrive after this wait"
    },
    "over-arrival": {"": "initialize the barrier for all arrivals of a phase, or let fewer threads arrive"},
    "barrier": {
        "may be counted in": "wait for the previous phase, or synchronize with a thread that has, before this",
        "before this expect_tx": "execute expect_tx before an arrival of the same phase (arrive.expect_tx)",
        "in the middle of phase": "the kernel ends between phases: compare the arrivals and bytes with those of init",
        "synchronizing with its init": "execute a barrier after the init, of the cluster if its CTAs use it",
        "is not fenced": "execute fence.mbarrier_init after the init, and a barrier of the cluster or the CTA",
        "never initialized": "initialize it before its first use, and synchronize",
    },
    "unconsumed phase": {"": "wait for each load, or do not issue the last ones"},
    "unwritten result": {"": "compare the tiles that the scheduler gives out with the shape of the result"},
    "access to exited CTA": {
        "no thread waits": "wait for it before the CTA exits: wgmma.wait_group for wgmma, its mbarrier for a TMA load",
        "": "execute a cluster barrier, or wait for the last phase, before the CTA exits",
    },
    "wgmma register hazard": {
        "while": "execute wgmma.wait_group before the access",
        "compiler fence": "execute fence_operand of the registers after wgmma.wait_group",
        "no wgmma.fence": "execute wgmma.fence between the access and the wgmma",
    },
    "missing wait_group": {"": "the thread that issued the store executes cp.async.bulk.wait_group before it exits"},
    "registers": {"": "all warps of a warpgroup execute setmaxnreg, within the registers of the CTA"},
    "issued by several threads": {"": "guard it by elect_one"},
    "flags not reset": {"": "the last CTA to read a flag sets it to zero"},
}
"""Hints by kind, and by a phrase of the message; "" fits any."""


@dataclass
class Hazard:
    """One error of a kernel.

    Kinds: race, missing proxy fence, uninitialized read, deadlock, phase aliasing, over-arrival, barrier, unconsumed
    phase, unwritten result, access to exited CTA, wgmma register hazard, missing wait_group, registers, out of bounds,
    alignment, overflow, uniformity, divergence, issued by several threads, flags not reset.

    Attributes:
        kind: Its kind.
        message: What is wrong.
        location: The kernel's source line; a Place (with the threads, and the iteration of each loop) if threads were
            executing it.
        others: For a race, the access that this one is not ordered after; for registers, the access or wgmma before;
            for a deadlock, the other waits.
        subject: The buffer or the barrier, where hazards of one line are told apart by it.
        kernel: The kernel; None if the hazard is none of one kernel.
        event: The number of the event in the simulation's record in which it was found, if that is recorded; of what is
            wrong when a CTA exits, the exit of its last threads.
        count: How often it occurred.
    """

    kind: str
    message: str
    location: SourceLocation
    others: tuple[Place, ...] = ()
    subject: str = ""
    kernel: Kernel | None = field(default=None, repr=False)
    event: int | None = field(default=None, compare=False)
    count: int = field(default=1, compare=False)

    @property
    def places(self) -> list[SourceLocation]:
        """Where it occurred: the access, and the earlier one of a race; all waits of a deadlock."""
        return [self.location, *self.others]

    @property
    def id(self) -> str:
        """A hash of kind, subject, functions and code, so the same for all schedules, and after edits elsewhere."""
        lines = {f"{basename(x.file)} {x.call.function} {x.call.text} {_rule_key(x)}" for x in self.places}
        return hashlib.sha256("\n".join([self.kind, self.subject, *sorted(lines)]).encode()).hexdigest()[:8]

    @property
    def hint(self) -> str:
        """What to add, such as the fence or the order that is missing; empty if the message says it.

        For a race it depends on what has made the earlier access, and on whether both are made by threads.
        """
        by_phrase = _HINTS.get(self.kind, {})
        hint = next((hint for phrase, hint in by_phrase.items() if phrase in self.message), "")
        if hint or not self.others:
            return hint
        engine, access = _rule_key(self.others[0])
        order = _ORDER.get((engine, access)) or _ORDER["threads", ""]
        later = self.location.engine if isinstance(self.location, Place) else ""
        return order + (", with fence.proxy.async before the arrival" if engine == "threads" != later else "")

    def __str__(self) -> str:
        lines = [f"{self.kind} at {self.location}: {self.message}"]
        lines += [self._describe(place) for place in self.places[:MAX_PRINTED] if place.line]
        lines += [f"hint: {self.hint}"] if self.hint else []
        return "\n  ".join([*lines, f"id {self.id}" + (f", {self.count} times" if self.count > 1 else "")])

    def to_json(self) -> dict[str, Any]:
        """Return the hazard for JSON: kind, message, location, id, count, hint, and each place with its stack."""
        return {
            "kind": self.kind, "message": self.message, "location": f"{self.location}", "id": self.id,
            "count": self.count, "hint": self.hint, "kernel": self.kernel.name if self.kernel else None,
            "event": self.event, "places": [self._place_to_json(place) for place in self.places if place.line],
        }  # fmt: skip

    def _describe(self, place: SourceLocation) -> str:
        """Return a place as text: who made which access in which iteration, the Python calls, and the line of CUDA."""
        who = ""
        if isinstance(place, Place):
            loops = "".join(f", {name} {index}" for name, index in place.loops)
            who = f"{place.access or 'executed'} by {place.agent}{loops}: "
        line, stack = self._cuda_line(place), [*map(str, place.stack or [place.call])]
        if len(stack) > MAX_PRINTED:
            stack[MAX_PRINTED // 2 : -MAX_PRINTED // 2] = ["..."]
        return f"{who}{' < '.join(stack)}{f'; CUDA line {line}' if line else ''}"

    def _place_to_json(self, place: SourceLocation) -> dict[str, Any]:
        """Return a place for JSON: its lines of Python and CUDA, the stack, and who made which access."""
        line = self._cuda_line(place)
        result: dict[str, Any] = {
            "python": place.call._asdict() | {"text": place.call.text},
            "stack": [call._asdict() for call in place.stack],
            "cuda": {"line": line, "text": self.kernel.source.split("\n")[line - 1].strip()}
            if self.kernel and line else None,
        }  # fmt: skip
        if isinstance(place, Place):
            result |= {"access": place.access, "engine": place.engine, "agent": place.agent, "cta": place.cta,
                       "loops": dict(place.loops)}  # fmt: skip
        return result

    def _cuda_line(self, place: SourceLocation) -> int | None:
        return self.kernel.cuda_lines.get(place.number) if self.kernel else None


def _rule_key(place: SourceLocation) -> tuple[str, str]:
    """Return (engine, read or write) of an access."""
    return (place.engine, place.access.partition(" ")[0]) if isinstance(place, Place) else ("", "")


class _Observer(Protocol):
    """The record of a simulation."""

    def last_event(self, exited: int | None = None) -> int:
        """Return the number of the last event or, given a CTA, of the exit of its last threads."""


@dataclass
class Hazards:
    """Collects the hazards of a kernel; those of one kind, subject and place are counted.

    Raises SimulationAborted at `limit`. `observer`: the record of the simulation's events, if there is one.
    """

    limit: int
    kernel: Kernel
    observer: _Observer | None = None
    reported: list[Hazard] = field(default_factory=list)
    _seen: dict[object, Hazard] = field(default_factory=dict)

    def report(
        self, kind: str, message: str, location: SourceLocation, subject: str = "", others: tuple[Place, ...] = (),
        exited: int | None = None,
    ) -> None:  # fmt: skip
        """Record a hazard, or count it if one of its kind was reported for the same source lines and subject.

        `exited`: the CTA at whose exit it is wrong. Raises SimulationAborted if there are too many.
        """
        key = kind, frozenset((x, _rule_key(x)) for x in (location, *others)) if others else location, subject
        if key in self._seen:
            self._seen[key].count += 1
            return
        event = self.observer.last_event(exited) if self.observer is not None else None
        self._seen[key] = Hazard(kind, message, location, others, subject, self.kernel, event)
        self.reported.append(self._seen[key])
        if len(self.reported) >= self.limit:
            raise SimulationAborted(f"{self.limit} hazards")


class SimulationAborted(Exception):  # noqa: N818 - no error of the user's program
    """The simulation cannot continue; the reason has been reported as a hazard."""
