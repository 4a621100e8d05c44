"""The picture of a timeline has a bar for each span, in its row and color."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import gemmsmith
from gemmsmith.backends.sim import Span, Timeline
from gemmsmith.backends.sim.report.timeline import BUSY, COLORS, HEIGHTS, STORE, WAITING, plot_timelines
from gemmsmith.core.pictures import PALETTE, colors

SPANS = [
    Span(0, "TMA", "load", 0, 10, "", 0), Span(0, "TMA", "load", 10, 30, "", 1), Span(0, "TMA", "load", 30, 45, "", 0),
    Span(0, "tensor core", "mma", 20, 60, "", 1), Span(0, "TMA store", "store", 70, 90, ""),
    Span(0, "warp", "wait", 0, 20, ""), Span(0, "warp", "busy", 20, 25, ""), Span(0, "warp", "wait", 25, 90, ""),
    Span(0, "idle warp", "busy", 0, 1, ""), Span(1, "TMA", "load", 5, 90, "", 2),
]  # fmt: skip


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, in place of files."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    return drawn


def test_each_span_has_a_bar(figures: list[Figure]) -> None:
    """Of CTA 0, without rows that end early; those of a warp that waits are thin."""
    Timeline(SPANS).plot("timeline.png")
    (axes,) = figures[0].axes
    rows = dict(zip(axes.get_yticks(), (text.get_text() for text in axes.get_yticklabels()), strict=True))
    bars = []
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            row, color = rows[round((box.y0 + box.y1) / 2)], to_hex(collection.get_facecolor()[0])
            bars.append((row, color, box.x0, box.x1, round(box.height, 3)))
    load, store, wait, busy = PALETTE, COLORS[STORE], COLORS[WAITING], COLORS[BUSY]
    want = [
        ("TMA", load[0], 0, 10, 0.8), ("TMA", load[1], 10, 30, 0.8), ("TMA", load[0], 30, 45, 0.8),
        ("tensor core", load[1], 20, 60, 0.8), ("TMA store", store, 70, 90, 0.8),
        ("warp", wait, 0, 20, HEIGHTS[WAITING]), ("warp", busy, 20, 25, 0.5), ("warp", wait, 25, 90, HEIGHTS[WAITING]),
    ]  # fmt: skip
    assert sorted(bars) == sorted(want)
    assert HEIGHTS[WAITING] < 0.1


@pytest.mark.parametrize("stages", [1, 2, 6, 8, 9, 16, 33])
def test_no_two_entries_of_the_legend_have_one_color(figures: list[Figure], stages: int) -> None:
    """And the title, the plot and the legend are below each other, within the figure."""
    loads = [Span(0, "TMA", "load", 100 + 3 * i, 102 + 3 * i, "", i) for i in range(stages)]
    others = [Span(0, "TMA store", "store", 300, 400, ""), Span(0, "copy", "load", 300, 400, "")]
    threads = [Span(0, "tensor core", "mma", 0, 400, ""), *(Span(0, "w", x, 0, 400, "") for x in ("busy", "wait"))]
    Timeline(loads + others + threads).plot("timeline.png")
    (figure,) = figures
    figure.draw_without_rendering()
    title, (legend,), (axes,) = figure._suptitle, figure.legends, figure.axes
    shown = {text.get_text(): handle for text, handle in zip(legend.texts, legend.legend_handles, strict=True)}
    assert len(shown) == stages + 5
    handles = [x.get_facecolor() if isinstance(x, Patch) else x.get_color() for x in shown.values()]
    assert len({*map(to_hex, handles)}) == len(shown)
    assert len({*colors(stages)}) == stages
    boxes = [x.get_window_extent() for x in (title, legend)]
    plot = axes.get_tightbbox()
    assert all(figure.bbox.x0 <= x.x0 and x.x1 <= figure.bbox.x1 for x in (*boxes, plot))
    assert 0 <= boxes[1].y0 < boxes[1].y1 <= plot.y0 < plot.y1 <= boxes[0].y0 < boxes[0].y1 <= figure.bbox.y1


def test_timelines_below_one_another_have_one_scale_and_one_legend(figures: list[Figure]) -> None:
    """Each has its title and its rows."""
    short = Timeline([Span(0, "TMA", "load", 0, 20, "", 2), Span(1, "copy", "load", 0, 500, "")])
    plot_timelines("timelines.png", {"before": Timeline(SPANS), "after": short})
    (figure,) = figures
    assert [x.get_title(loc="left") for x in figure.axes] == ["before", "after"]
    assert [x.get_xlim() for x in figure.axes] == [(0, 90), (0, 90)]
    rows = [[text.get_text() for text in axes.get_yticklabels()] for axes in figure.axes]
    assert rows == [["TMA", "TMA store", "tensor core", "warp"], ["TMA"]]
    assert {f"stage {i}" for i in range(3)} <= {text.get_text() for text in figure.legends[0].texts}


@pytest.mark.parametrize(("design", "tile"), [("mma_multistage", (64, 64, 32))])
def test_synchronous_instructions_of_the_tensor_cores(design: str, tile: tuple[int, int, int]) -> None:
    """They have a row; copies by threads have their stage."""
    a = np.ones((64, 256), np.float16)
    config = gemmsmith.Config(design, tile, (1, 1), 3, 1, chip="sm_80")
    spans = gemmsmith.simulate(a, a.T, config=config, record=True).timeline.spans
    products = [x for x in spans if x.kind == "mma"]
    assert {(x.row, x.label) for x in products} == {("tensor core", "mma.sync")}
    assert sum(x.end - x.start for x in products) == 64 * 64 * 256 // 2048  # multiply-adds per cycle
    assert {x.stage for x in spans if x.kind == "load"} == {0, 1, 2}
