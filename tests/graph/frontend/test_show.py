"""Graphs as text and as pictures."""

from __future__ import annotations

from pathlib import Path

from gemmsmith.core.dtypes import BF16
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.show import format_tree, plot_graphs
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.passes import optimize

KINDS = {
    "bias": (BroadcastDims(rows_per_value=1), BF16),
    "labels": (BroadcastDims(rows_per_value=1, columns_per_value=1), BF16),
}


def bce(acc, bias, labels):
    x = acc + bias
    return {"loss": ((labels - 1) * x + x.sigmoid().log()).sum()}


def test_tree() -> None:
    graph = trace(bce, (64, 64), KINDS)
    text = format_tree(graph)
    for part in (
        "loss = ",
        "ScalarReduction(sum)",
        "ColBroadcast(bias)",
        "AuxLoad(labels)",
        "AccFetch",
        "Compute(log)",
    ):
        assert part in text
    assert text.count("AccFetch") == 1  # the logits are printed once


def test_pictures(tmp_path: Path) -> None:
    graph = trace(bce, (64, 64), KINDS)
    plot_graphs([("before", graph), ("after", optimize(graph))], tmp_path / "graph.png")
    assert (tmp_path / "graph.png").stat().st_size > 5000
