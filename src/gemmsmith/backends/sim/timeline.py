"""The timeline: who did what when, as a picture and as a Chrome/Perfetto trace."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d"]
IDLE, BUSY, STORE = "#e6e6e6", "#bab0ac", "#7f7f7f"
MOST_COLUMNS = 9
"""Of the legend."""


class Span(NamedTuple):
    """Something that took from `start` to `end` (cycles) in a row of a CTA; `stage` is the pipeline slot, if any.

    kind: "load", "mma", "store" (asynchronous work), "wait" or "busy" (a warp's own time).
    """

    cta: int
    row: str
    kind: str
    start: int
    end: int
    label: str
    stage: int | None = None


@dataclass
class Timeline:
    """All spans of an execution, in cycles of the cost model."""

    spans: list[Span] = field(default_factory=list)

    @property
    def cycles(self) -> int:
        return max((s.end for s in self.spans), default=0)

    def add(self, span: Span) -> None:
        if span.end > span.start:
            self.spans.append(span)

    def picture(self, path: str | Path, ctas: tuple[int, ...] = (0,)) -> None:
        """Draws some CTAs: roles as rows, stages colored, waits light. PNG or SVG by the suffix."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.patches import Patch

        spans = [s for s in self.spans if s.cta in ctas]
        ends = {(s.cta, s.row): s.end for s in sorted(spans, key=lambda s: s.end)}
        last = max(ends.values(), default=1)
        spans = [s for s in spans if ends[s.cta, s.row] > last / 20]  # not the warps that have nothing to do
        rows = sorted({(s.cta, s.row) for s in spans}, key=lambda r: (r[0], _order(r[1]), r[1]))
        position = {row: len(rows) - 1 - i for i, row in enumerate(rows)}
        figure, axes = pyplot.subplots(figsize=(13, 1.3 + 0.55 * len(rows)), layout="constrained")
        for s in spans:
            asynchronous = s.kind in ("load", "mma", "store")
            y, height = position[s.cta, s.row], 0.8 if asynchronous else 0.5
            color = {"wait": IDLE, "busy": BUSY, "store": STORE}.get(s.kind)
            if color is None:
                color = COLORS[(s.stage or 0) % len(COLORS)]
            axes.barh(
                y, s.end - s.start, left=s.start, height=height, color=color, linewidth=0.3, edgecolor="white",
                hatch="////" if s.kind == "wait" else None,
            )  # fmt: skip
        axes.set_yticks([position[r] for r in rows], [r[1] if len(ctas) == 1 else f"CTA {r[0]} {r[1]}" for r in rows])
        axes.set_xlabel("cycles of the cost model")
        axes.set_xlim(0, max((s.end for s in spans), default=1))
        axes.set_title(f"CTA {', '.join(map(str, ctas))}: {self.cycles} cycles", loc="left")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        stages = sorted({s.stage for s in spans if s.stage is not None and s.kind in ("load", "mma")})
        legend = [Patch(color=COLORS[s % len(COLORS)], label=f"stage {s}") for s in stages]
        legend += [Patch(color=STORE, label="store of D"), Patch(color=BUSY, label="instructions")]
        legend += [Patch(facecolor=IDLE, hatch="////", edgecolor="white", label="waiting")]
        columns = math.ceil(len(legend) / math.ceil(len(legend) / MOST_COLUMNS))
        axes.legend(handles=legend, ncols=columns, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)

    def trace(self, path: str | Path) -> None:
        """Writes a trace for ui.perfetto.dev or chrome://tracing; a cycle is shown as a nanosecond."""
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
    order = ["TMA", "tensor", "copy"]
    return next((i for i, name in enumerate(order) if row.startswith(name)), len(order))
