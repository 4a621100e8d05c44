"""The colors of pictures are different and read on light and on dark pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from gemmsmith.core import pictures

LIGHT, DARK = "#ffffff", "#0d1117"


def luminance(color: str) -> float:
    """As WCAG 2 defines it."""
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(color)]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("count", [1, 4, 8, 9, 16, 33, 64])
def test_colors_are_different_and_read_on_both_pages(count: int) -> None:
    found = pictures.colors(count)
    assert len({*found}) == count
    others = (pictures.PINK, pictures.LIME, pictures.TAN, pictures.GRAY)
    assert not {*found} & {*others}
    assert all(contrast(x, page) > 1.8 for x in (*found, *others) for page in (LIGHT, DARK))
    assert all(contrast(pictures.TEXT, page) > 4 for page in (LIGHT, DARK))


@pytest.mark.parametrize("title", ["", "short", "a title of many words " * 8, "two\nlines"])
def test_a_title_is_within_the_figure(title: str, tmp_path: Path) -> None:
    with pictures.drawing(tmp_path / "a.png", 4, 3, title) as figure:
        figure.subplots()
        pictures.legend(figure, {f"entry {i}": pictures.TEXT for i in range(12)})
        figure.draw_without_rendering()
        artists = [*([figure._suptitle] if title else []), *figure.legends]
        boxes = [x.get_window_extent() for x in artists]
        assert all(0 <= x.x0 and x.x1 <= figure.bbox.x1 and 0 <= x.y0 and x.y1 <= figure.bbox.y1 for x in boxes)
    assert np.asarray(Image.open(tmp_path / "a.png"))[0, -1, 3] == 0  # no background
