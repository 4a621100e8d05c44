"""The record as one HTML file, in which a kernel is stepped through: page.html with page.css, page.js and the data."""

from __future__ import annotations

import base64
import gzip
import html
import json
import sys
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from gemmsmith.backends.sim.report.hazards import Hazard, Loops, Place
from gemmsmith.backends.sim.report.record import Record, Window, in_columns
from gemmsmith.backends.sim.report.timeline import HEIGHTS, Idle, colors_of, entry_of, sort_rows
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.templates import make_html_page

MAX_EVENTS = 200_000
"""Events that a page shows: a browser opens a page of as many in seconds. Chosen; not measured."""


class Fill(NamedTuple):
    """A slot of a buffer in shared memory, from one load to the next; the numbers are those of events, -1 for none.

    Attributes:
        buffer: The buffer with its slot, such as "A[2]".
        holds: The k-tile or, where no loop around the load has it, the coordinates of the load.
        load: The issue of the first load.
        full: The completion of the last one.
        read: The issue of the first operation that reads the slot.
        free: The wait after which all operations that read it are known to have completed.
    """

    cta: int
    buffer: str
    holds: str
    load: int
    full: int
    read: int
    free: int


def write_page(
    path: str | Path, record: Record, hazards: Sequence[Hazard], verdict: str, first_step: int = 0,
    others: Sequence[tuple[Record, Sequence[Hazard], str]] = (),
) -> None:  # fmt: skip
    """Write the page of a record.

    The page jumps to those of the `hazards` that the record has. `verdict`: whether other schedules do the same, as
    text. `first_step`: the first event that is shown, of MAX_EVENTS. `others`: the same three of other schedules of the
    launch, between which the page changes. Raises ArgumentError if the record has no such event.
    """
    first, *rest = (page_data(*x, first_step) for x in ((record, hazards, verdict), *others))
    parts = [first, *({key: x for key, x in data.items() if x != first[key]} for data in rest)]
    if rest:
        first["schedules"] = [{"seed": x["seed"], "hazards": len(x["hazards"])} for x in (first, *rest)]
    packed = (gzip.compress(json.dumps(x, separators=(",", ":")).encode(), mtime=0) for x in parts)
    data = "\n".join(base64.b64encode(x).decode() for x in packed)
    text = make_html_page(Path(__file__).parent, title=html.escape(record.kernel.name), data=data)
    Path(path).write_text(text, "utf-8")


def page_data(record: Record, hazards: Sequence[Hazard], verdict: str, first_step: int = 0) -> dict[str, Any]:
    """Return the data of the page: the columns of MAX_EVENTS events from `first_step` on, and what is drawn of them.

    `before`: the numbers of the events that come before these in the columns (see `Record.window`). `lanes`: [CTA,
    name] of each, from the top. `spans`: columns lane, entry (of the legend), start, end and label. `legend`: name,
    color and height of each entry. `fills`: columns of Fill. `engines`: the lanes that are no threads. `all_events`:
    those of the whole record.

    Raises ArgumentError if the record has no event `first_step`.
    """
    if not 0 <= first_step < max(1, len(record)):
        raise ArgumentError(f"first_step: got {first_step}; use 0 to {len(record) - 1}, the steps of the record")
    window = record.window(first_step, first_step + MAX_EVENTS)
    shown = window.record
    data = shown.columns()
    start, end = _cycles_of(record, first_step)
    spans = [x for x in record.timeline().shown(range(record.grid)) if x.start <= end and x.end >= start]
    idle = [x._replace(start=max(x.start, start), end=min(x.end, end)) for x in record.idle()]
    at_hazards = [x.agent for hazard in hazards for x in hazard.places if isinstance(x, Place)]
    agents = {x.agent: x.kind for x in shown.events}  # their last events
    threads = [
        (cta, row) for (cta, row), last in agents.items()
        if last != "exit" or any(x.startswith(f"CTA {cta} {row}") for x in at_hazards)
    ]  # fmt: skip
    lanes = sort_rows([*((s.cta, s.row) for s in spans), *threads])
    number = {lane: i for i, lane in enumerate(lanes)}
    colors = colors_of(spans)
    entries = {entry: i for i, entry in enumerate(colors)}
    tables: dict[str, dict[Any, int]] = {"entry": entries, "label": {}, "buffer": {}, "holds": {}, "cause": {}}
    rows = sorted(((number[s.cta, s.row], entry_of(s), s.start, s.end, s.label) for s in spans), key=itemgetter(0, 2))
    data["spans"] = in_columns(("lane", "entry", "start", "end", "label"), rows, tables)
    data["idle"] = in_columns(Idle._fields, (x for x in idle if x.start < x.end), tables)
    data["fills"] = in_columns(Fill._fields, _fills_in(record, window), tables)
    own = {id(x) for x in record.hazards}
    steps = _steps(record) if own else {}
    for statement in data["statements"].values():
        statement["python"]["file"] = Path(statement["python"]["file"]).name
    return data | {
        "lanes": lanes, "labels": list(tables["label"]), "buffers": list(tables["buffer"]),
        "holds": list(tables["holds"]), "causes": list(tables["cause"]), "verdict": verdict,
        "engines": sorted({x.route.engine for x in record.operations}), "all_events": len(record),
        "all_cycles": record.cycles, "first": first_step, "before": window.before, "start": start,
        "legend": [[entry, color, HEIGHTS.get(entry, 0.8)] for entry, color in colors.items()],
        "hazards": [_hazard(x, steps if id(x) in own else {}) for x in hazards],
    }  # fmt: skip


def _cycles_of(record: Record, first: int) -> tuple[int, int]:
    """Return the first and the last cycle of the MAX_EVENTS events from `first` on.

    It is 0 for the record's first events; for its last ones it is what no operation exceeds.
    """
    times = [x.time for x in record.events[first : first + MAX_EVENTS]]
    end = max(times, default=0) if first + MAX_EVENTS < len(record) else sys.maxsize
    return min(times, default=0) if first else 0, end


def _fills_in(record: Record, window: Window) -> Iterable[Fill]:
    """Return the fills of a window: the last one of each slot before it, and those that begin in it."""
    fills = [*fills_of(record)]
    earlier = {(x.cta, x.buffer): x for x in fills if x.load < window.first}
    own = (x for x in fills if window.first <= x.load < window.first + MAX_EVENTS)
    return (Fill(*x[:3], *map(window.local, x[3:])) for x in (*earlier.values(), *own))


_Where = tuple[int, int, Loops]
"""A statement's number, a CTA, and the iteration of each loop."""


def _steps(record: Record) -> dict[_Where, list[tuple[int, str]]]:
    """Return the events, (number, name of the threads), of each statement of a CTA in each iteration."""
    result: dict[_Where, list[tuple[int, str]]] = {}
    for i, x in enumerate(record.events):
        result.setdefault((x.statement, x.agent[0], x.loops), []).append((i, f"CTA {x.agent[0]} {x.agent[1]}"))
    return result


def _hazard(hazard: Hazard, steps: dict[_Where, list[tuple[int, str]]]) -> dict[str, Any]:
    """Return a hazard for the page, and of each place its last event before the hazard, else its first one, or None.

    `steps`: those of the record that is shown, empty for a hazard of another launch.
    """
    result = hazard.to_json()
    last = hazard.event if steps and hazard.event is not None else -1
    result["event"] = last if last >= 0 else None
    for place, fields in zip((x for x in hazard.places if x.line), result["places"], strict=True):
        for call in (fields["python"], *fields["stack"]):
            call["file"] = Path(call["file"]).name
        if isinstance(place, Place):
            made = steps.get((place.number, place.cta, place.loops), [])
            # The threads may be one warp of a group, whose name is then longer.
            own = [i for i, who in made if place.agent.startswith(who)]
            fields["event"] = max((i for i in own if i <= last), default=min(own, default=None))
    return result


def fills_of(record: Record) -> Iterable[Fill]:
    """Return the fills of all slots that asynchronous operations load, in the order of their first load."""
    events = record.events
    fills: list[_Fill] = []
    current: dict[tuple[int, str], _Fill] = {}
    for x in record.operations:
        loops = dict(events[x.issue].loops)
        holds = f"k-tile {loops['k_tile']}" if "k_tile" in loops else f"{x.coordinates}" if x.coordinates else ""
        for slot in x.route.reads:
            fill = current.get(slot)
            # A store from a stage that was multiplied reads results that the epilogue's threads have written there.
            if fill and not (fill.reads and x.route.engine == "TMA store"):
                fill.reads.append((x.issue, x.wait))
        for cta, buffer in x.route.writes:
            if cta < 0:
                continue
            fill = current.get((cta, buffer))
            # Several loads may fill a slot, such as halves from two CTAs; the next fill comes after reads.
            if fill is None or fill.reads or fill.holds != holds:
                fill = current[cta, buffer] = _Fill(cta, buffer, holds)
                fills.append(fill)
            fill.loads.append((x.issue, x.complete))
    return (fill.finished() for fill in fills)


class _Fill:
    """A fill in the making. `loads`, `reads`: (issue, completion) and (issue, wait) of the operations."""

    def __init__(self, cta: int, buffer: str, holds: str) -> None:
        self.cta, self.buffer, self.holds = cta, buffer, holds
        self.loads: list[tuple[int, int]] = []
        self.reads: list[tuple[int, int]] = []

    def finished(self) -> Fill:
        first, full = self.loads[0][0], _last(end for _, end in self.loads)
        read = self.reads[0][0] if self.reads else -1
        return Fill(self.cta, self.buffer, self.holds, first, full, read, _last(end for _, end in self.reads))


def _last(events: Iterable[int]) -> int:
    """Return the last of events; -1 if there is none, or if one has not happened."""
    numbers = [*events]
    return -1 if -1 in numbers else max(numbers, default=-1)
