"""The record of a kernel's execution: every event, in columns. The timeline is made from it."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gemmsmith.backends.sim.report.hazards import Hazard, Loops
from gemmsmith.backends.sim.report.timeline import AFTER_THE_LAST, NO_WAIT, Idle, Span, Timeline
from gemmsmith.lang import statements as st
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.location import SourceLocation
from gemmsmith.machine import Access, AsyncOperation

BARRIER_EVENTS = ("init", "arrive", "expect_tx", "complete_tx")
"""Kinds of events that change a barrier."""
_CAUSES = ("instruction", "complete")
"""Kinds of events that have no entry of their own if an effect is recorded."""
COUNTS = "multiplies", "macs", "wavefronts", "ideal_wavefronts", "sectors", "ideal_sectors", "loaded"
"""What is counted, of each CTA: instructions of warps that multiply, their multiply-adds, wavefronts of shared memory
and sectors of global memory (see execute/counters.py), and bytes that asynchronous copies have brought to shared
memory."""
_DIFFERENCES = ("event", "time", "start", "end", "issue", "complete", "commit", "wait")
"""Columns of JSON whose values are given as differences to the one before."""


class Event(NamedTuple):
    """An event. A field that the kind does not have is -1, or None.

    Attributes:
        kind: instruction (with no effect below), issue (of an operation), complete (of one that signals no barrier),
            commit (of a group), init, arrive, expect_tx, complete_tx (of a barrier), block, resume (of a wait), exit.
        time: In cycles.
        agent: (CTA, name) of the threads, or of the engine that executes an operation.
        loops: Name and index of each loop, outermost first.
        object: (CTA, name) of the barrier, or of what is waited for.
        phase: Of a barrier, after the event. For block and resume, the phase that is waited for.
        pending: Arrivals that the phase misses. For block and resume, the groups that may be pending.
        bytes: Bytes that the phase misses.
        amount: Arrivals, bytes or operations. For resume, the cycle in which the wait began.
    """

    kind: str
    time: int
    agent: tuple[int, str]
    statement: int
    loops: Loops
    object: tuple[int, str] | None = None
    phase: int = -1
    pending: int = -1
    bytes: int = -1
    amount: int = -1


class Route(NamedTuple):
    """What an asynchronous operation accesses.

    `label`, `engine`: its name, and the engine that executes it. `reads`, `writes`: (CTA, buffer with its slot) in
    shared memory, (-1, buffer) in global memory, by name. `registers`: the register arrays that it uses until it has
    been waited for.
    """

    label: str
    engine: str
    reads: tuple[tuple[int, str], ...]
    writes: tuple[tuple[int, str], ...]
    registers: tuple[str, ...]


@dataclass(slots=True)
class Operation:
    """An asynchronous operation.

    Attributes:
        coordinates: Of a TMA box.
        cycles: Cycles of the tensor core.
        stage: Stage of the pipeline, -1 for none.
        start, end: When its engine works on it, in cycles.
        issue, complete, commit, wait: The numbers of these events, -1 if there is none.
    """

    route: Route
    coordinates: tuple[int, ...]
    bytes: int
    cycles: float
    stage: int
    start: int
    end: int
    issue: int
    complete: int = -1
    commit: int = -1
    wait: int = -1

    def is_over_at(self, event: int) -> bool:
        """Return whether it has completed before an event, and no thread waits for it from there on."""
        waited = 0 <= self.wait < event or (self.wait < 0 and not self.route.registers)
        return 0 <= self.complete < event and waited


class _Threads(Protocol):
    """A lockstep group."""

    row: tuple[int, str]
    line: SourceLocation
    loops: Loops
    time: int


class _Barrier(Protocol):
    """An mbarrier, a named barrier or a cluster barrier."""

    name: str

    @property
    def state(self) -> tuple[int, int, int]:
        """Its phase, and the arrivals and the bytes that are missing."""


class Counted(NamedTuple):
    """What an event adds to the counts of a CTA. `event`: its number. `counts`: in the order of COUNTS."""

    event: int
    cta: int
    counts: tuple[int, ...]


class Record:
    """Everything that happens while a kernel executes, in the simulated order; times are those of the cost model."""

    def __init__(
        self, kernel: Kernel, grid: int, seed: int, name_of: Callable[[Access], str], hazards: list[Hazard]
    ) -> None:
        self.kernel, self.grid, self.seed, self._name_of, self.hazards = kernel, grid, seed, name_of, hazards
        self.operations: list[Operation] = []
        self._events: list[tuple[Any, ...]] = []
        self._counts: list[tuple[int, int, Counter[str]]] = []
        self._products: list[tuple[tuple[int, str], str, int, int]] = []
        self._started: dict[int, tuple[Operation, tuple[int, str]]] = {}

    # -- hooks: called by the simulator ---------------------------------------------------------------
    def instruction(self, threads: _Threads) -> None:
        self._add("instruction", threads)

    def issue(
        self, threads: _Threads, operation: AsyncOperation, engine: str, span: tuple[int, int], stage: int | None
    ) -> None:
        """Record that threads issue an operation.

        `span`: (first, end) of the cycles in which the engine works on it.
        """
        self._add("issue", threads)
        cta, x = threads.row[0], operation
        registers = tuple([array.name for array in x.register_operands])
        route = Route(x.label, engine, self._buffers(cta, x.reads), self._buffers(cta, x.writes), registers)
        stage, number = -1 if stage is None else stage, len(self._events) - 1
        started = Operation(route, x.coordinates, x.nbytes, x.tensor_cycles, stage, *span, number)
        self.operations.append(started)
        self._started[id(operation)] = started, (cta, engine)

    def count(self, cta: int, **counts: int) -> None:
        """Add to the counts of a CTA, by their names of COUNTS, in the last event."""
        event = len(self._events) - 1
        if not self._counts or self._counts[-1][:2] != (event, cta):
            self._counts.append((event, cta, Counter()))
        self._counts[-1][2].update(counts)

    def multiply(self, threads: _Threads, label: str, begin: int) -> None:
        """Record that threads executed a synchronous instruction of the tensor cores, since the cycle `begin`."""
        last = self._products[-1] if self._products else None
        if last and (last[0], last[1], last[3]) == (threads.row, label, begin):
            begin = self._products.pop()[2]
        self._products.append((threads.row, label, begin, threads.time))

    def complete(self, operation: AsyncOperation) -> None:
        """Record that an operation has completed, at the time at which its engine ends.

        The place in the kernel, fields 3 and 4 of an event, is that of the instruction that issued the operation.
        """
        started, engine = self._started[id(operation)]
        started.complete = len(self._events)
        self._events.append(("complete", started.end, engine, *self._events[started.issue][3:5]))
        if started.route.reads and not started.cycles:
            for cta in sorted({cta for cta, _ in started.route.writes if cta >= 0}):
                self.count(cta, loaded=started.bytes)

    def signal(self, kind: str, operation: AsyncOperation, cta: int, barrier: _Barrier, amount: int) -> None:
        started, engine = self._started[id(operation)]
        cause = self._events[started.issue][3:5]
        self._append(kind, started.end, engine, *cause, (cta, barrier.name), *barrier.state, amount)

    def barrier(self, kind: str, threads: _Threads, cta: int, barrier: _Barrier, amount: int) -> None:
        self._add(kind, threads, self._object(cta, barrier.name), *barrier.state, amount)

    def commit(self, threads: _Threads, name: str, operations: Iterable[AsyncOperation]) -> None:
        """Record that threads commit `operations` as a group, such as the "wgmma group" that `name` says."""
        members = [self._started[id(x)][0] for x in operations]
        self._add("commit", threads, (threads.row[0], name), -1, -1, -1, len(members))
        for x in members:
            x.commit = len(self._events) - 1

    def block(self, threads: _Threads, name: str, phase: int, pending: int) -> None:
        """Record that threads cannot proceed: they wait for `name`. `phase`, `pending`: see Event."""
        self._add("block", threads, self._object(threads.row[0], name), phase, pending)

    def resume(
        self, threads: _Threads, begin: int, name: str, phase: int, pending: int, operations: Iterable[AsyncOperation]
    ) -> None:
        """Record the end of a wait for `name` that began at the cycle `begin`.

        `phase`, `pending`: see Event. `operations`: those that the threads now know to have completed.
        """
        self._add("resume", threads, self._object(threads.row[0], name), phase, pending, -1, begin)
        for started, _ in (self._started[id(x)] for x in operations):
            started.wait = len(self._events) - 1 if started.wait < 0 else started.wait

    def exit(self, threads: _Threads) -> None:
        self._events.append(("exit", threads.time, threads.row, -1, ()))

    def end(self) -> None:
        """Drop the references to the simulated machine, which is not needed any more."""
        self._started.clear()
        del self._name_of

    def _buffers(self, cta: int, accesses: list[Access]) -> tuple[tuple[int, str], ...]:
        """Return (CTA, buffer's name) of each access by an operation of a CTA; the CTA is -1 for global memory.

        An access has the rank of its CTA in the cluster, or None for the operation's own CTA.
        """
        first = cta - cta % self.kernel.cluster[0]
        ctas = [-1 if x.space == "global" else cta if x.rank is None else first + x.rank for x in accesses]
        return tuple(zip(ctas, map(self._name_of, accesses), strict=True))

    def _object(self, cta: int, name: str) -> tuple[int, str]:
        """Return (CTA, name) of what is signaled or waited for in a CTA.

        A cluster's barrier is that of its first CTA.
        """
        return (cta - cta % self.kernel.cluster[0] if name == "cluster barrier" else cta), name

    def _add(self, kind: str, threads: _Threads, *fields: Any) -> None:
        """Add an event of threads at the statement that they execute; `fields`: those of Event from `object` on."""
        self._append(kind, threads.time, threads.row, threads.line.number, threads.loops, *fields)

    def _append(self, *event: Any) -> None:
        """Append an event (the fields of Event), or put it in the place of the last one.

        An instruction, and the completion of an operation, have an event of their own only if they have no effect. So
        an effect by the same agent at the same statement replaces it.
        """
        last = self._events[-1] if self._events else event
        if last[0] in _CAUSES and event[0] != "instruction" and last[2:5] == event[2:5]:
            self._events[-1] = event
        else:
            self._events.append(event)

    # -- what it shows -------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._events)

    def last_event(self, exited: int | None = None) -> int:
        """Return the number of the last event or, given a CTA, of the exit of its last threads."""
        end = len(self._events)
        if exited is None:
            return end - 1
        return max(i for i in range(end) if self._events[i][0] == "exit" and self._events[i][2][0] == exited)

    @property
    def events(self) -> list[Event]:
        return [Event(*x) for x in self._events]

    def of_kind(self, *kinds: str) -> list[Event]:
        return [Event(*x) for x in self._events if x[0] in kinds]

    @property
    def counts(self) -> list[Counted]:
        """What each event that multiplies or accesses memory adds to the counts, in the order of the events."""
        return [Counted(event, cta, tuple(x[name] for name in COUNTS)) for event, cta, x in self._counts]

    @property
    def cycles(self) -> int:
        """Cycles of the cost model until the last thread has finished."""
        return max((x.time for x in self.of_kind("exit", "resume")), default=0)

    def window(self, first: int, end: int) -> Window:
        """Return the events from `first` on, before `end`, after those that the state at the first one depends on.

        Those are, of each barrier, its init and all of its phase; of all threads and engines, the last one; and those
        of the operations that are not over. The counts of all before are added up.
        """
        needed, phases = dict[Any, int](), dict[Any, tuple[int, list[int]]]()
        for i, (kind, _, agent, _, _, *state) in enumerate(self._events[:first]):
            needed["agent", agent] = i
            if kind in BARRIER_EVENTS:
                barrier, phase = state[:2]
                needed.setdefault(("init", barrier), i)
                if barrier not in phases or phases[barrier][0] != phase:
                    phases[barrier] = phase, []
                phases[barrier][1].append(i)
        operations = [x for x in self.operations if x.issue < end and not x.is_over_at(first)]
        of_operations = {i for x in operations for i in (x.issue, x.complete, x.commit) if 0 <= i < first}
        of_phases = {i for _, own in phases.values() for i in own}
        window = Window(copy(self), first, sorted({*needed.values(), *of_phases, *of_operations}))
        window.record._events = [*map(self._events.__getitem__, window.before), *self._events[first:end]]
        local = window.local
        window.record.operations = [
            replace(x, issue=local(x.issue), complete=local(x.complete), commit=local(x.commit), wait=local(x.wait))
            for x in operations
        ]
        sums = defaultdict[int, Counter[str]](Counter)
        for event, cta, counts in self._counts:
            if event < first:
                sums[cta].update(counts)
        window.record._counts = [(len(window.before) - 1, cta, x) for cta, x in sums.items()]
        window.record._counts += [(local(event), cta, x) for event, cta, x in self._counts if first <= event < end]
        return window

    def timeline(self) -> Timeline:
        """Return the timeline: when each engine works on what, and when each group of threads executes or waits."""
        result, busy_since = Timeline(), Counter[tuple[int, str]]()
        for x in self.operations:
            kind = {"tensor core": "mma", "TMA store": "store"}.get(x.route.engine, "load")
            stage, cta = None if x.stage < 0 else x.stage, self._events[x.issue][2][0]
            result.add(Span(cta, x.route.engine, kind, x.start, x.end, x.route.label, stage))
        for (cta, _), label, begin, end in self._products:
            result.add(Span(cta, "tensor core", "mma", begin, end, label))
        for event in self.of_kind("resume", "exit"):
            start = event.amount if event.object else event.time
            result.add(Span(*event.agent, "busy", busy_since[event.agent], start, "instructions"))
            if event.object:
                result.add(Span(*event.agent, "wait", start, event.time, f"wait for {event.object[1]}"))
            busy_since[event.agent] = event.time
        return result

    def idle(self) -> list[Idle]:
        """Return when and why each CTA's tensor core is idle.

        The causes are what the warpgroup that issues the tensor core's next wgmma waits for meanwhile.
        """
        waits, ends = defaultdict[tuple[int, str], list[Event]](list), Counter[int]()
        for x in self.of_kind("resume", "exit"):
            ends[x.agent[0]] = max(ends[x.agent[0]], x.time)
            if x.object:
                waits[x.agent].append(x)
        products = [(x.start, x.end, self._events[x.issue][2]) for x in self.operations if x.cycles]
        result, busy_until = [], dict.fromkeys((agent[0] for *_, agent in products), 0)
        for start, end, agent in sorted(products):
            cta, own = agent[0], waits[agent]
            time = busy_until[cta]
            # The waits of that warpgroup which end after the tensor core became idle.
            for wait in own[bisect_right(own, time, key=lambda wait: wait.time) :]:
                if wait.amount >= start:
                    break
                assert wait.object
                stop, cause = min(start, wait.time), wait.object[1].partition("[")[0]
                result += [Idle(cta, time, wait.amount, NO_WAIT), Idle(cta, max(time, wait.amount), stop, cause)]
                time = stop
            result.append(Idle(cta, time, start, NO_WAIT))
            busy_until[cta] = end
        result += [Idle(cta, time, ends[cta], AFTER_THE_LAST) for cta, time in busy_until.items()]
        return [x for x in result if x.start < x.end]

    def columns(self) -> dict[str, Any]:
        """Return all of it for JSON.

        `events`, `operations`, `idle`, `counted`: a list for each field; for those named in `differences`, of the
        differences to the value before. The values of kind, agent, object, loops, route, cause and counts are indices
        into the lists kinds, agents, objects, loops, routes, causes and counts, -1 for none. An entry of loops is an
        index into `nests`, which has the names, and the index of each loop; one of counts has those of `count_names`.
        `statements`, by number: the instruction, its lines of Python and of CUDA, and the stack.
        """
        statements = {
            location.number: {
                "instruction": x.mnemonic, "python": location.call._asdict() | {"text": location.call.text},
                "cuda": self.kernel.cuda_lines.get(location.number), "stack": [str(call) for call in location.stack],
            }
            for block in (self.kernel.body, *(function.body for function in self.kernel.functions))
            for x, location in st.instructions(block)
        }  # fmt: skip
        tables: dict[str, dict[Any, int]] = {
            name: {} for name in ("kind", "agent", "object", "loops", "route", "cause", "counts")
        }  # fmt: skip
        names = Operation.__slots__
        parts = {
            "events": in_columns(Event._fields, self.events, tables),
            "operations": in_columns(names, ([getattr(x, name) for name in names] for x in self.operations), tables),
            "idle": in_columns(Idle._fields, self.idle(), tables),
            "counted": in_columns(Counted._fields, self.counts, tables),
        }
        nests: dict[tuple[str, ...], int] = {}
        loops = [
            [nests.setdefault(tuple(name for name, _ in x), len(nests)), *(i for _, i in x)] for x in tables["loops"]
        ]
        return {
            "kernel": self.kernel.name, "threads": self.kernel.threads, "cluster": self.kernel.cluster,
            "grid": self.grid, "seed": self.seed, "cuda": self.kernel.source, "differences": _DIFFERENCES,
            "statements": statements, "kinds": list(tables["kind"]), "agents": list(tables["agent"]),
            "objects": list(tables["object"]), "nests": list(nests), "loops": loops,
            "routes": [x._asdict() for x in tables["route"]], "causes": list(tables["cause"]),
            "count_names": COUNTS, "counts": list(tables["counts"]),
            "hazards": [hazard.to_json() for hazard in self.hazards],
        } | parts  # fmt: skip

    def to_json(self, path: str | Path) -> None:
        """Write `columns()` to a JSON file."""
        Path(path).write_text(json.dumps(self.columns(), separators=(",", ":")))


class Window(NamedTuple):
    """A part of a record: `record` has the events of the numbers `before`, and then those from `first` on."""

    record: Record
    first: int
    before: list[int]

    def local(self, event: int) -> int:
        """Return the place in the window of an event's number, or of the one before that it has; -1 stays."""
        if event >= self.first:
            return len(self.before) + event - self.first
        return event if event < 0 else max(0, bisect_right(self.before, event) - 1)


def in_columns(
    names: Iterable[str], rows: Iterable[Sequence[Any]], tables: dict[str, dict[Any, int]]
) -> dict[str, Any]:
    """Return rows as columns: a list for each field, by its name.

    A value of a field in `tables` is added to that table and replaced by its index; None becomes -1. Fields in
    _DIFFERENCES are stored as differences.
    """
    columns = {name: [*values] for name, *values in zip(names, *rows, strict=True)}
    for name, values in columns.items():
        if name in tables:
            table = tables[name]
            columns[name] = [-1 if x is None else table.setdefault(x, len(table)) for x in values]
        elif name in _DIFFERENCES:
            columns[name] = values[:1] + [b - a for a, b in pairwise(values)]
    return columns
