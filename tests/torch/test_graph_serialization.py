"""A serialized graph deserializes to an equal graph, and contains no sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from tests.epilogue.graphs import graphs
from tests.epilogues import CASES

from gemmsmith.core.dtypes import BF16, E4M3, FP32, INT64, as_dtype
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Operand, Result, identity_graph
from gemmsmith.graph.frontend.classify import classify
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch.graph_serialization import deserialize, digest, serialize

SHAPES = {"scalar": (), "labels": (6, 1), "column": (6, 1), "row": (32,), "matrix": (6, 32), "half_row": (16,),
          "half_matrix": (6, 16)}  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(graph=graphs())
def test_random_graphs_read_back(graph: EpilogueGraph) -> None:
    assert deserialize.__wrapped__(serialize(graph)) == graph


def kinds_of(name: str) -> dict[str, Any]:
    """Return the operands of a case, for a GEMM of 6 x 32."""
    kinds = {}
    for operand, spelled in CASES[name].operands.items():
        kind, _, dtype = spelled.partition(":")
        extent = BroadcastDims() if kind == "number" else classify(operand, SHAPES[kind], (6, 32))
        kinds[operand] = extent, None if kind == "number" else as_dtype(dtype or "bf16", allow_integers=True)
    return kinds


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_node_reads_back(name: str) -> None:
    graph = trace(CASES[name].function, (6, 32), kinds_of(name))
    assert deserialize.__wrapped__(serialize(graph)) == graph


def test_values_extents_and_results_read_back() -> None:
    numbers = [0.1, -0.0, 1e-30, math.inf, -math.inf, math.nan]
    nodes = (
        Node("accumulator"), *(Node("constant", (), x) for x in numbers), Node("operand", (), "x"), Node("add", (0, 7)),
        Node("cast", (8,), E4M3), Node("reduce", (8,), ("sum", "all")),
    )  # fmt: skip
    operands = (Operand("x", BroadcastDims(True, 2, 1), INT64), Operand("s", BroadcastDims()))
    results = (Result("y", 9), Result("z", 10, FP32, keepdim=True), Result("w", 10, keepdim=True))
    graph = EpilogueGraph(nodes, operands, results)
    again = deserialize.__wrapped__(serialize(graph))
    assert again == graph
    assert [math.copysign(1, n.attribute) for n in again.nodes[1:3]] == [1, -1]


def test_the_text_is_readable_and_its_key_fits_an_int() -> None:
    def bias_gelu(acc, bias):
        return (acc + bias).gelu()

    graph = trace(bias_gelu, (6, 32), {"bias": (BroadcastDims(columns_per_value=1), BF16)})
    assert serialize(graph) == "bias n bf16 | accumulator; operand: bias; add 0 1; gelu 2 | out 3"
    assert serialize(identity_graph(BF16)) == " | accumulator | out 0 bf16"
    assert 0 <= digest(serialize(graph)) < 2**63
    assert digest(serialize(graph)) != digest(serialize(identity_graph(BF16)))
