"""The timeline of a simulation, as a plot and as a Chrome/Perfetto trace."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gemmsmith.core import pictures

STORE, BUSY, WAITING, MULTIPLY, LOAD = "store of D", "instructions", "waiting", "mma.sync, wmma", "cp.async, st.async"
COLORS = {MULTIPLY: pictures.LIME, LOAD: pictures.TAN, STORE: pictures.PINK, BUSY: pictures.GRAY,
          WAITING: pictures.TEXT}  # fmt: skip
"""Colors by entry of the legend; those of the stages, "stage 0" and so on, depend on their number."""
HEIGHTS = {WAITING: 0.06, BUSY: 0.5}
"""Of bars that are not 0.8 high; 1 is the distance of two rows."""
NO_WAIT, AFTER_THE_LAST = "instructions", "no wgmma follows"
"""Causes of a tensor core's idle time that are no wait."""


class Span(NamedTuple):
    """A span of time from `start` to `end`, in cycles, in a row of a CTA.

    `kind`: "load", "mma", "store" (asynchronous work), "wait" or "busy" (a warp's own time). `stage`: the pipeline
    stage, if any.
    """

    cta: int
    row: str
    kind: str
    start: int
    end: int
    label: str
    stage: int | None = None


class Idle(NamedTuple):
    """Cycles from `start` to `end` in which a CTA's tensor core is idle. `cause`: what its next wgmma waits for."""

    cta: int
    start: int
    end: int
    cause: str


@dataclass
class Timeline:
    """All spans of an execution, in cycles of the cost model."""

    spans: list[Span] = field(default_factory=list)

    @property
    def cycles(self) -> int:
        return max((s.end for s in self.spans), default=0)

    def add(self, span: Span) -> None:
        """Add a span, unless it is empty."""
        if span.end > span.start:
            self.spans.append(span)

    def shown(self, ctas: Container[int]) -> list[Span]:
        """Return the spans of CTAs, without those of warps that end early: they are idle."""
        spans = [s for s in self.spans if s.cta in ctas]
        ends = {(s.cta, s.row): s.end for s in sorted(spans, key=lambda s: s.end)}
        last = max(ends.values(), default=1)
        return [s for s in spans if ends[s.cta, s.row] > last / 20]

    def plot(self, path: str | Path, ctas: tuple[int, ...] = (0,)) -> None:
        """Plot the timelines of `ctas` (their indices) to a PNG or SVG file.

        Each engine and each group of threads has a row; colors are pipeline stages, waits are thin lines. Raises
        MissingPackageError without matplotlib.
        """
        title = f"CTA {', '.join(map(str, ctas))}; the launch takes {self.cycles} cycles of the cost model"
        plot_timelines(path, {title: self}, ctas)

    def write_trace(self, path: str | Path) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing; a cycle is shown as a nanosecond."""
        rows = {row: i for i, row in enumerate(sorted({(s.cta, s.row) for s in self.spans}))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": cta, "tid": tid, "args": {"name": row}}
            for (cta, row), tid in rows.items()
        ]
        events += [
            {
                "ph": "X", "name": s.label, "cat": s.kind, "pid": s.cta, "tid": rows[s.cta, s.row],
                "ts": s.start / 1e3, "dur": (s.end - s.start) / 1e3, "args": {"stage": s.stage},
            }
            for s in self.spans
        ]  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def plot_timelines(path: str | Path, timelines: Mapping[str, Timeline], ctas: tuple[int, ...] = (0,)) -> None:
    """Plot timelines, by title, of `ctas` below one another on one scale of cycles, as `Timeline.plot` does."""
    shown = [x.shown(ctas) for x in timelines.values()]
    rows = [sort_rows((s.cta, s.row) for s in spans) for spans in shown]
    color_of = colors_of(s for spans in shown for s in spans)
    first, *others = timelines
    heights = [max(len(x), 1) for x in rows]
    with pictures.drawing(path, 10, 1.2 + 0.45 * sum(heights) + 0.6 * len(others), "" if others else first) as figure:
        from matplotlib.lines import Line2D

        all_axes = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, title, spans, names in zip(all_axes, timelines, shown, rows, strict=True):
            if others:
                axes.set_title(title, loc="left", fontsize=pictures.FONT_SIZE)
            _draw(axes, spans, names, color_of, len(ctas) > 1)
        axes.set_xlabel("cycles")
        axes.set_xlim(0, max((s.end for spans in shown for s in spans), default=1))
        line = Line2D([], [], color=COLORS[WAITING], linewidth=2, label=WAITING)
        pictures.legend(figure, {entry: color for entry, color in color_of.items() if entry != WAITING}, line)


def _draw(
    axes: Any, spans: list[Span], rows: list[tuple[int, str]], color_of: dict[str, Any], name_ctas: bool
) -> None:  # fmt: skip
    """Draw spans in `rows` (CTA and name), from the top."""
    position = {row: len(rows) - 1 - i for i, row in enumerate(rows)}
    bars = defaultdict[tuple[tuple[int, str], str], list[tuple[int, int]]](list)
    for s in spans:
        bars[(s.cta, s.row), entry_of(s)].append((s.start, s.end - s.start))
    for (row, entry), ranges in bars.items():
        height = HEIGHTS.get(entry, 0.8)
        axes.broken_barh(
            ranges, (position[row] - height / 2, height), facecolor=color_of[entry], linewidth=0.4,
            edgecolor=color_of[entry] if entry in HEIGHTS else pictures.EDGE, label=entry,
        )  # fmt: skip
    names = [f"CTA {cta} {row}" if name_ctas else row for cta, row in rows]
    axes.set_yticks([position[r] for r in rows], names)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def sort_rows(rows: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the different rows, (CTA, name), from the top: in each CTA the engines first, then the threads."""
    engines = ["TMA", "tensor", "copy"]

    def order(row: tuple[int, str]) -> tuple[int, int, str]:
        cta, name = row
        return cta, next((i for i, x in enumerate(engines) if name.startswith(x)), len(engines)), name

    return sorted(set(rows), key=order)


def colors_of(spans: Iterable[Span]) -> dict[str, str]:
    """Return the color of each entry of the legend of spans, the stages first."""
    entries = sorted({entry_of(s) for s in spans}, key=_order_of_entry)
    stages = pictures.colors(sum(entry.startswith("stage ") for entry in entries))
    return dict(zip(entries, stages, strict=False)) | {x: COLORS[x] for x in entries if x in COLORS}


def entry_of(span: Span) -> str:
    """Return the entry of the legend for a span."""
    if span.kind in ("load", "mma"):
        return f"stage {span.stage}" if span.stage is not None else MULTIPLY if span.kind == "mma" else LOAD
    return {"store": STORE, "busy": BUSY, "wait": WAITING}[span.kind]


def _order_of_entry(entry: str) -> tuple[int, int]:
    return (0, int(entry.removeprefix("stage "))) if entry.startswith("stage ") else (1, [*COLORS].index(entry))
