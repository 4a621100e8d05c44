"""Display of a graph as text (a visitor tree with CUTLASS's names) and as a plot."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemmsmith.core import pictures
from gemmsmith.core.graph import EpilogueGraph

_NODE_STYLES: dict[str, tuple[str, str]] = {
    "input": ("#cfe3f7", "read"),
    "compute": ("#f6f1e7", "compute"),
    "special": ("#fbd9b5", "compute, on the special-function unit"),
    "reduce": ("#d9efd2", "reduce"),
    "result": ("#e9dcf4", "store"),
}


def format_tree(graph: EpilogueGraph) -> str:
    """Format a graph as an indented tree: one line per node, with its inputs below it.

    A node with several users is printed once, with a number such as %3, by which the other users refer to it.
    """
    lines: list[str] = []
    used = Counter(source for source, _ in graph.edges())
    printed: set[int] = set()

    def visit(root: int) -> None:
        """Append the lines of a node and, indented, of its inputs. The stack is explicit: trees may be deep."""
        stack = [(root, 1)]
        while stack:
            i, depth = stack.pop()
            node = graph.nodes[i]
            if i in printed and node.inputs:
                lines.append("  " * depth + f"%{i}")
                continue
            printed.add(i)
            is_shared = used[i] > 1 and bool(node.inputs)
            lines.append("  " * depth + node.operation.label(graph, node) + (f"  -> %{i}" if is_shared else ""))
            stack += [(j, depth + 1) for j in reversed(node.inputs)]

    for r in graph.results:
        reduced = graph.is_reduction(r)
        dtype = f", {r.dtype}" if r.dtype else ""
        lines.append(
            f"{r.name} = {'' if reduced else f'AuxStore({r.name}{dtype})' if r.name != 'out' else f'D{dtype}'}"
        )
        visit(r.node)
    return "\n".join(lines)


def plot_graphs(graphs: Sequence[tuple[str, EpilogueGraph]], path: Path | str) -> None:
    """Plot graphs, given as (title, graph), side by side into the file `path`, with matplotlib; data flow downwards."""
    layouts = [_layout(graph) for _, graph in graphs]
    widest = [max(len(layer) for layer in rows) for rows, _ in layouts]
    num_layers = max(len(rows) for rows, _ in layouts)
    width, styles = max(7, sum(2.0 * w for w in widest) + 0.8), {text: color for color, text in _NODE_STYLES.values()}
    with pictures.drawing(path, width, 0.8 * num_layers + 1.0) as figure:
        axes = figure.subplots(1, len(graphs), squeeze=False, width_ratios=widest)
        for (title, graph), (rows, paths), ax in zip(graphs, layouts, axes[0], strict=True):
            _draw(graph, rows, paths, ax, title, num_layers)
        pictures.legend(figure, styles)


Item = int
"""What a layer has: a node by its index, then the results; beyond these, points where an arrow crosses the layer."""
Arrow = list[Item]
"""The items from a node to its user, one per layer."""


def _layout(graph: EpilogueGraph) -> tuple[list[list[Item]], list[Arrow]]:
    """Return the items of each layer, from left to right, and the arrows (Sugiyama et al., 1981).

    A node is in the layer below its lowest input. An arrow that crosses layers gets an item in each, so that it can be
    drawn around the nodes there.
    """
    count = len(graph.nodes)
    arrows = dict.fromkeys([*graph.edges(), *((r.node, count + i) for i, r in enumerate(graph.results))])
    layer_of = [0] * (count + len(graph.results))
    for source, user in sorted(arrows, key=lambda arrow: arrow[1]):
        layer_of[user] = max(layer_of[user], layer_of[source] + 1)
    for i, node in enumerate(graph.nodes):  # leaves move down to the layer above their first user
        users = [layer_of[user] for source, user in graph.edges() if source == i]
        if users and not node.inputs:
            layer_of[i] = min(users) - 1
    rows: list[list[Item]] = [[] for _ in range(max(layer_of) + 1)]
    for item, layer in enumerate(layer_of):
        rows[layer].append(item)
    paths: list[Arrow] = []
    crossings = itertools.count(len(layer_of))
    for source, user in arrows:
        crossed = rows[layer_of[source] + 1 : layer_of[user]]
        path = [source, *itertools.islice(crossings, len(crossed)), user]
        for row, item in zip(crossed, path[1:], strict=False):
            row.append(item)
        paths.append(path)
    return _barycenter_ordered(rows, paths), paths


def _barycenter_ordered(rows: list[list[Item]], paths: list[Arrow]) -> list[list[Item]]:
    """Sort the items of each layer by the mean position of their neighbors, so that fewer arrows cross.

    The neighbors are the items joined by an arrow, in the layer above and in the layer below alternately.
    """
    above: dict[Item, list[Item]] = {}
    below: dict[Item, list[Item]] = {}
    for path in paths:
        for upper, lower in itertools.pairwise(path):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    for sweep in range(12):
        position = {item: j - (len(row) - 1) / 2 for row in rows for j, item in enumerate(row)}
        neighbors = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            mean = {
                x: sum(position[y] for y in neighbors[x]) / len(neighbors[x]) if neighbors.get(x) else position[x]
                for x in row
            }
            row.sort(key=mean.__getitem__)
            position |= {item: j - (len(row) - 1) / 2 for j, item in enumerate(row)}
    return rows


def _draw(
    graph: EpilogueGraph, rows: list[list[Item]], paths: list[Arrow], ax: Any, title: str, num_layers: int
) -> None:
    """Draw one graph into the matplotlib axes `ax`, which have the height of `num_layers` layers.

    Layers are 1 apart; half the height of a box is 0.24.
    """
    positions = {
        item: (j - (len(row) - 1) / 2, -float(depth)) for depth, row in enumerate(rows) for j, item in enumerate(row)
    }
    for path in paths:
        points = [(positions[path[0]][0], positions[path[0]][1] - 0.24)]
        for item in path[1:-1]:
            x, y = positions[item]
            points += [(x, y + 0.24), (x, y - 0.24)]
        if len(points) > 1:
            ax.plot(*zip(*points, strict=True), color=pictures.TEXT, lw=0.9, zorder=1)
        (x0, y0), (x1, y1) = points[-1], positions[path[-1]]
        ax.annotate(
            "", xy=(x1, y1 + 0.24), xytext=(x0, y0), zorder=1,
            arrowprops={"arrowstyle": "-|>", "color": pictures.TEXT, "lw": 0.9, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
    for item, (text, style) in enumerate(_labels_and_styles(graph)):
        (x, y), (color, _) = positions[item], _NODE_STYLES[style]
        ax.text(
            x, y, text, ha="center", va="center", fontsize=7.5, zorder=2, color="black",
            bbox={"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": pictures.TEXT, "linewidth": 0.8},
        )  # fmt: skip
    width = max(len(row) for row in rows)
    ax.set_xlim(-width / 2, width / 2)
    ax.set_ylim(-num_layers + 0.4, 0.6)
    ax.set_title(title, fontsize=10)
    ax.axis("off")


def _labels_and_styles(graph: EpilogueGraph) -> list[tuple[str, str]]:
    """Return (text, style) of each node, then of each result; styles are keys of _NODE_STYLES."""
    nodes = [(node.operation.label(graph, node).replace("(", "\n(", 1), node.operation.style) for node in graph.nodes]
    return [*nodes, *((f"{r.name}{f': {r.dtype}' if r.dtype else ''}", "result") for r in graph.results)]
