"""A graph for people: as a visitor tree, in the field's terms, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemmsmith.core.graph import Graph, Node

_KINDS = {
    "input": ("#cfe3f7", "read"),
    "compute": ("#f6f1e7", "compute"),
    "special": ("#fbd9b5", "compute, on the special-function unit"),
    "reduce": ("#d9efd2", "reduce"),
    "result": ("#e9dcf4", "store"),
}


def label(graph: Graph, node: Node) -> str:
    """A node's name as a visitor."""
    match node.op:
        case "accumulator":
            return "AccFetch"
        case "constant":
            return f"ScalarBroadcast({node.value:.6g})"
        case "operand":
            extent = graph.operand(node.value).extent
            kind = "AuxLoad" if extent.is_matrix else "RowBroadcast" if extent.width else "ColBroadcast"
            return f"{kind if extent.width or extent.m else 'ScalarBroadcast'}({node.value})"
        case "reduce":
            kind, axis = node.value
            return f"{ {'n': 'ColReduction', 'm': 'RowReduction', 'all': 'ScalarReduction'}[axis] }({kind})"
        case "chunk":
            return "Chunk(up)" if node.value else "Chunk(gate)"
        case "cast":
            return f"Cast({node.value})"
        case "quantize":
            return f"Quantize({node.value[0]}, {node.value[1]} columns)"
        case "scale":
            return "Scale"
        case "top_k_softmax":
            return f"TopKSoftmax({node.value})"
    return f"Compute({node.op})"


def tree(graph: Graph) -> str:
    """One line a node, below its user; one that is used again is printed once and then named (%3)."""
    lines: list[str] = []
    used = [0] * len(graph.nodes)
    for source, _ in graph.users():
        used[source] += 1
    printed: set[int] = set()

    def visit(i: int, depth: int) -> None:
        node = graph.nodes[i]
        again = used[i] > 1 and bool(node.inputs)
        if i in printed and node.inputs:
            lines.append("  " * depth + f"%{i}")
            return
        printed.add(i)
        lines.append("  " * depth + label(graph, node) + (f"  -> %{i}" if again else ""))
        for j in node.inputs:
            visit(j, depth + 1)

    for r in graph.results:
        reduced = graph.nodes[r.node].op == "reduce"
        dtype = f", {r.dtype}" if r.dtype else ""
        lines.append(
            f"{r.name} = {'' if reduced else f'AuxStore({r.name}{dtype})' if r.name != 'out' else f'D{dtype}'}"
        )
        visit(r.node, 1)
    return "\n".join(lines)


def picture(graph: Graph, path: Path | str, title: str = "") -> None:
    """Draws a graph: data flows downwards. Raises ImportError without matplotlib."""
    pictures([(title, graph)], path)


def pictures(graphs: Sequence[tuple[str, Graph]], path: Path | str) -> None:
    """Draws several graphs side by side, each with its title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    layers = [_layers(graph) for _, graph in graphs]
    widest = [max(len(layer) for layer in rows) for rows in layers]
    deepest = max(len(rows) for rows in layers)
    figure, axes = pyplot.subplots(
        1, len(graphs), figsize=(sum(2.0 * w for w in widest) + 0.8, 0.8 * deepest + 1.0), squeeze=False,
        width_ratios=widest,
    )  # fmt: skip
    for (title, graph), rows, ax in zip(graphs, layers, axes[0], strict=True):
        _draw(graph, rows, ax, title, deepest)
    handles = [Patch(facecolor=colour, edgecolor="#555555", label=text) for colour, text in _KINDS.values()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


Item = tuple[str, int]
"""("node", index) or ("result", index)."""


def _layers(graph: Graph) -> list[list[Item]]:
    """Items by depth: a node stands just above the first of its users, results below their nodes."""
    depth = [0] * len(graph.nodes)
    for i, node in enumerate(graph.nodes):
        depth[i] = max((depth[j] + 1 for j in node.inputs), default=0)
    for i in range(len(graph.nodes) - 1, -1, -1):  # leaves come down to where they are used
        users = [depth[u] for source, u in graph.users() if source == i]
        if users and not graph.nodes[i].inputs:
            depth[i] = min(users) - 1
    rows: list[list[Item]] = [[] for _ in range(max(depth) + 2)]
    for i in range(len(graph.nodes)):
        rows[depth[i]].append(("node", i))
    for r, result in enumerate(graph.results):
        rows[depth[result.node] + 1].append(("result", r))
    return _untangled(graph, rows)


def _inputs(graph: Graph, item: Item) -> list[Item]:
    kind, i = item
    if kind == "result":
        return [("node", graph.results[i].node)]
    return [("node", j) for j in graph.nodes[i].inputs]


def _untangled(graph: Graph, rows: list[list[Item]]) -> list[list[Item]]:
    """Each layer in the order of the mean place of its neighbours above, then below, a few times (Sugiyama, 1981)."""
    users: dict[Item, list[Item]] = {}
    for row in rows:
        for item in row:
            for source in _inputs(graph, item):
                users.setdefault(source, []).append(item)
    for turn in range(8):
        place = {item: j - len(row) / 2 for row in rows for j, item in enumerate(row)}
        for row in rows:
            key: dict[Item, float] = {}
            for item in row:
                near = _inputs(graph, item) if turn % 2 == 0 else users.get(item, [])
                key[item] = sum(place[x] for x in near) / len(near) if near else place[item]
            row.sort(key=lambda item: key[item])
    return rows


def _draw(graph: Graph, rows: list[list[Item]], ax: Any, title: str, deepest: int) -> None:
    where: dict[Item, tuple[float, float]] = {}
    for depth, row in enumerate(rows):
        for j, item in enumerate(row):
            where[item] = (j - (len(row) - 1) / 2, -float(depth))
    for row in rows:
        for item in row:
            for source in _inputs(graph, item):
                (x0, y0), (x1, y1) = where[source], where[item]
                ax.annotate(
                    "", xy=(x1, y1 + 0.24), xytext=(x0, y0 - 0.24), zorder=1,
                    arrowprops={"arrowstyle": "-|>", "color": "#777777", "lw": 0.9, "shrinkA": 0, "shrinkB": 0},
                )  # fmt: skip
    for item, (x, y) in where.items():
        text, kind = _look(graph, item)
        ax.text(
            x, y, text, ha="center", va="center", fontsize=7.5, zorder=2,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": _KINDS[kind][0], "edgecolor": "#555555", "linewidth": 0.8},
        )  # fmt: skip
    width = max(len(row) for row in rows)
    ax.set_xlim(-width / 2, width / 2)
    ax.set_ylim(-deepest + 0.4, 0.6)
    ax.set_title(title, fontsize=10)
    ax.axis("off")


def _look(graph: Graph, item: Item) -> tuple[str, str]:
    from gemmsmith.epilogue.passes.fission import SPECIAL_FUNCTION_OPERATIONS

    kind, i = item
    if kind == "result":
        result = graph.results[i]
        return f"{result.name}{f': {result.dtype}' if result.dtype else ''}", "result"
    node = graph.nodes[i]
    text = label(graph, node).replace("(", "\n(", 1) if node.op != "accumulator" else "AccFetch"
    if not node.inputs:
        return text, "input"
    if node.op == "reduce":
        return text, "reduce"
    return text, "special" if SPECIAL_FUNCTION_OPERATIONS.get(node.op) else "compute"
