"""The picture of a timeline has a bar for each span, in its row and color."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from gemmsmith.backends.sim import Span, Timeline
from gemmsmith.backends.sim.report.timeline import BUSY_COLOR, STAGE_COLORS, STORE_COLOR, WAIT_COLOR

SPANS = [
    Span(0, "TMA", "load", 0, 10, "", 0), Span(0, "TMA", "load", 10, 30, "", 1), Span(0, "TMA", "load", 30, 45, "", 0),
    Span(0, "tensor core", "mma", 20, 60, "", 1), Span(0, "TMA store", "store", 70, 90, ""),
    Span(0, "warp", "wait", 0, 20, ""), Span(0, "warp", "busy", 20, 25, ""), Span(0, "warp", "wait", 25, 90, ""),
    Span(0, "idle warp", "busy", 0, 1, ""), Span(1, "TMA", "load", 5, 90, "", 2),
]  # fmt: skip


def test_each_span_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CTA 0, without rows that end early; those that wait are hatched."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figures.append(figure))
    Timeline(SPANS).plot("timeline.png")
    (axes,) = figures[0].axes
    rows = dict(zip(axes.get_yticks(), (text.get_text() for text in axes.get_yticklabels()), strict=True))
    bars = []
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            row, color = rows[round((box.y0 + box.y1) / 2)], to_hex(collection.get_facecolor()[0])
            bars.append((row, color, box.x0, box.x1, round(box.height, 3), bool(collection.get_hatch())))
    load, store = STAGE_COLORS, STORE_COLOR
    want = [
        ("TMA", load[0], 0, 10, 0.8, False), ("TMA", load[1], 10, 30, 0.8, False), ("TMA", load[0], 30, 45, 0.8, False),
        ("tensor core", load[1], 20, 60, 0.8, False), ("TMA store", store, 70, 90, 0.8, False),
        ("warp", WAIT_COLOR, 0, 20, 0.5, True), ("warp", BUSY_COLOR, 20, 25, 0.5, False),
        ("warp", WAIT_COLOR, 25, 90, 0.5, True),
    ]  # fmt: skip
    assert sorted(bars) == sorted(want)
