"""The timeline of a simulation, as a plot and as a Chrome/Perfetto trace."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gemmsmith.core.errors import require_matplotlib

STAGE_COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d"]
"""Colors of the pipeline stages."""
WAIT_COLOR = "#e6e6e6"
BUSY_COLOR = "#bab0ac"
STORE_COLOR = "#7f7f7f"
MAX_LEGEND_COLUMNS = 9
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
        """The end of the last span."""
        return max((s.end for s in self.spans), default=0)

    def add(self, span: Span) -> None:
        """Add a span, unless it is empty."""
        if span.end > span.start:
            self.spans.append(span)

    def plot(self, path: str | Path, ctas: tuple[int, ...] = (0,)) -> None:
        """Plot the timelines of `ctas` (their indices) to a PNG or SVG file.

        Each engine and each group of threads has a row; colors are pipeline stages, waits are light gray. Raises
        MissingPackageError without matplotlib.
        """
        require_matplotlib()
        from matplotlib.figure import Figure  # pyplot takes longer to import
        from matplotlib.patches import Patch

        spans = [s for s in self.spans if s.cta in ctas]
        ends = {(s.cta, s.row): s.end for s in sorted(spans, key=lambda s: s.end)}
        last = max(ends.values(), default=1)
        spans = [s for s in spans if ends[s.cta, s.row] > last / 20]  # drops idle warps
        rows = sorted({(s.cta, s.row) for s in spans}, key=lambda r: (r[0], _order(r[1]), r[1]))
        position = {row: len(rows) - 1 - i for i, row in enumerate(rows)}
        figure = Figure(figsize=(13, 1.3 + 0.55 * len(rows)), layout="constrained")
        axes = figure.subplots()
        bars = defaultdict[tuple[tuple[int, str], float, str, str | None], list[tuple[int, int]]](list)
        colors = {"wait": WAIT_COLOR, "busy": BUSY_COLOR, "store": STORE_COLOR}
        for s in spans:
            color = colors.get(s.kind, STAGE_COLORS[(s.stage or 0) % len(STAGE_COLORS)])
            height, hatch = 0.5 if s.kind in ("wait", "busy") else 0.8, "////" if s.kind == "wait" else None
            bars[(s.cta, s.row), height, color, hatch].append((s.start, s.end - s.start))
        for (row, height, color, hatch), ranges in bars.items():
            axes.broken_barh(
                ranges, (position[row] - height / 2, height), facecolor=color, linewidth=0.3, edgecolor="white",
                hatch=hatch,
            )  # fmt: skip
        axes.set_yticks([position[r] for r in rows], [r[1] if len(ctas) == 1 else f"CTA {r[0]} {r[1]}" for r in rows])
        axes.set_xlabel("cycles of the cost model")
        axes.set_xlim(0, max((s.end for s in spans), default=1))
        axes.set_title(f"CTA {', '.join(map(str, ctas))}: {self.cycles} cycles", loc="left")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        stages = sorted({s.stage for s in spans if s.stage is not None and s.kind in ("load", "mma")})
        legend = [Patch(color=STAGE_COLORS[s % len(STAGE_COLORS)], label=f"stage {s}") for s in stages]
        legend += [Patch(color=STORE_COLOR, label="store of D"), Patch(color=BUSY_COLOR, label="instructions")]
        legend += [Patch(facecolor=WAIT_COLOR, hatch="////", edgecolor="white", label="waiting")]
        columns = math.ceil(len(legend) / math.ceil(len(legend) / MAX_LEGEND_COLUMNS))
        axes.legend(handles=legend, ncols=columns, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
        figure.savefig(path, dpi=130)

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


def _order(row: str) -> int:
    """Return the position of a row in the plot: engines first, then threads."""
    order = ["TMA", "tensor", "copy"]
    return next((i for i, name in enumerate(order) if row.startswith(name)), len(order))
