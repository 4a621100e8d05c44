"""The style of all pictures: they have no background, and their colors and text read on light and on dark pages."""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemmsmith.core.errors import MissingPackageError

TEXT = "#6f7b87"
"""Of text and lines: a contrast above 4 with white and with #0d1117, the background of dark pages on GitHub."""
PALETTE = ("#4a8fdb", "#e8833a", "#4ca35c", "#dd5560", "#a77bd1", "#2fa5a8", "#c29a1f", "#a0765b")
"""Colors of what a picture tells apart; black text reads on them."""
PINK, LIME, TAN, GRAY = "#d66ba0", "#9dba3c", "#c9a585", "#9aa3ad"
"""More of them, for what is not one of many."""
EDGE = (0, 0, 0, 0.35)
"""Of the edges of colored areas."""
FONT_SIZE = 10


def require_matplotlib() -> None:
    """Raise MissingPackageError if matplotlib, which draws the pictures, is not installed."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise MissingPackageError("pictures need matplotlib: pip install matplotlib")


def colors(count: int) -> list[str]:
    """Return `count` different colors: those of PALETTE, or, if these do not suffice, hues of two lightnesses."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    shades = (colorsys.hls_to_rgb(i / count, 0.54 if i % 2 else 0.42, 0.5) for i in range(count))
    return ["#" + "".join(f"{round(255 * x):02x}" for x in shade) for shade in shades]


def gradient() -> Any:
    """Return a matplotlib colormap for what is ordered."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("gradient", [PALETTE[i] for i in (4, 0, 2, 6)])


@contextmanager
def drawing(path: Path | str, width: float, height: float, title: str = "") -> Iterator[Any]:
    """Yield an empty matplotlib Figure, and write it to the file `path`.

    Sizes are in inches. The lines of `title` are wrapped to the width. Raises MissingPackageError without matplotlib,
    before the body of the `with` imports it.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # pyplot takes longer to import

    style: Any = {
        "font.size": FONT_SIZE, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
        "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color",
                         "legend.labelcolor"), TEXT),
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        columns = int(width * 72 / (0.58 * FONT_SIZE))  # of an average character
        lines = [part for line in title.splitlines() for part in textwrap.wrap(line, columns)]
        if lines:
            figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=FONT_SIZE)
        yield figure
        figure.savefig(path, dpi=130)


def legend(figure: Any, color_of: dict[str, str], *more: Any) -> None:
    """Put a legend below everything else, in as many lines as the figure's width needs.

    `color_of`: colors by text. `more`: labeled artists, which follow.
    """
    from matplotlib.patches import Patch

    handles = [*(Patch(color=color, label=text) for text, color in color_of.items()), *more]
    widest = max((len(x.get_label()) for x in handles), default=0)
    columns = max(1, int(figure.get_figwidth() * 72 / ((0.58 * widest + 4.5) * FONT_SIZE)))
    lines = max(1, -(-len(handles) // columns))
    figure.legend(handles=handles, ncols=-(-len(handles) // lines), loc="outside lower center")
