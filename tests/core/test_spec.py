"""What a kernel is made for: how the bare product's D leaves it, and its name."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import BF16, E4M3, FP16, FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.mma import WGMMA, Major
from gemmsmith.core.problem import Matrix
from gemmsmith.core.register_budgets import plan_promotion
from gemmsmith.core.scale_spec import ScaleSpec
from gemmsmith.core.spec import KernelSpec


@pytest.mark.parametrize(
    ("d", "tma", "column_major"),
    [
        (Matrix(BF16, 64, 256, 256, 1), True, False),  # row-major
        (Matrix(BF16, 256, 64, 1, 256), True, True),  # the same, swapped
        (Matrix(BF16, 256, 1, 1, 256), True, True),  # one row, swapped
        (Matrix(BF16, 64, 255, 255, 1), False, False),  # rows that TMA cannot reach
        (Matrix(BF16, 255, 64, 1, 255), False, True),
        (Matrix(E4M3, 256, 64, 1, 256), False, True),  # stmatrix transposes 16-bit elements
        (Matrix(BF16, 64, 256, 512, 2), False, False),  # no index is contiguous
    ],
)
def test_d_is_stored_along_what_is_contiguous(d: Matrix, tma: bool, column_major: bool) -> None:
    found = EpilogueSpec.identity(d.canonical())
    assert (bool(found.tma_eligible), bool(found.column_major)) == (tma, column_major)


def test_names_are_short_symbols_and_of_one_kernel_each() -> None:
    configs = [
        Config(), Config(tile=(256, 256, 256)), Config("pingpong"), Config(cluster=(1, 2)), Config(stages=3),
        Config(consumers=1), Config(raster="n"), Config(raster_group=4), Config(splits=4), Config(cluster_splits=2),
        Config(swap_ab=True), Config(evict=("first", "normal")), Config(alias_epilogue=True),
        Config(serpentine=True), Config(sync_clusters=True),
    ]  # fmt: skip
    epilogues = [
        EpilogueSpec(identity_graph(FP32), frozenset({"out"})),
        EpilogueSpec(identity_graph(FP16), frozenset({"out"})),
    ]
    epilogues += [
        EpilogueSpec(identity_graph(FP32), frozenset(), frozenset({"out"})),
        EpilogueSpec(identity_graph(FP32), frozenset()),
    ]
    epilogues += [replace(epilogues[0], fast_math=False), replace(epilogues[0], deterministic=False)]
    specs = [
        KernelSpec(config, mma, (a, b), epilogue)
        for config, mma, a, b, epilogue in product(configs, WGMMA.instructions, ("K", "MN"), ("K", "MN"), epilogues)
    ]
    names = {spec.name for spec in specs}
    assert len(names) == len(specs)
    assert all(name.isidentifier() and len(name) < 48 for name in names)
    split = replace(specs[0], config=Config(splits=4))
    assert split.name == replace(specs[0], config=Config(splits=0)).name  # an argument says how many


def test_the_line_of_an_epilogue_does_not_name_another_kernel() -> None:
    graph = identity_graph(FP32)
    moved = replace(graph, nodes=tuple(replace(node, location="mine.py:7: acc") for node in graph.nodes))
    specs = [
        KernelSpec(Config(), WGMMA.instructions[0], ("K", "K"), EpilogueSpec(x, frozenset({"out"})))
        for x in (graph, moved)
    ]
    assert specs[0].name == specs[1].name


def test_k_tiles_in_flight_with_promoted_sums() -> None:
    """Each takes half a register per column of a warpgroup's 64 rows, beside as many for the accumulator; a cluster's
    reduction needs a dozen where two warpgroups share an SM's registers, and half of the stages are in flight."""

    def in_flight(tile_n: int, consumers: int, cluster_splits: int = 1, stages: int = 8, scales: bool = False) -> int:
        tile = (64 * consumers, tile_n, 128)
        config = Config(tile=tile, cluster=(1, 1), stages=stages, consumers=consumers, cluster_splits=cluster_splits)
        return plan_promotion(config, scales).k_tiles_in_flight

    assert [in_flight(n, 1) for n in (64, 80, 88, 136, 144)] == [4, 4, 2, 2, 1]  # of 208 registers
    assert [in_flight(n, 1, 2) for n in (64, 80, 88, 136, 144)] == [4, 4, 2, 2, 1]
    assert [in_flight(n, 2) for n in (64, 72, 96, 128, 136)] == [1, 4, 2, 2, 1]  # of 192; narrow ones alternate
    assert [in_flight(n, 2, 2) for n in (64, 72, 96, 128, 136)] == [1, 4, 2, 1, 1]
    assert [in_flight(64, 1, stages=stages) for stages in (3, 4, 7, 8)] == [1, 2, 2, 4]
    assert [in_flight(n, 1, scales=True) for n in (40, 48, 88, 96)] == [4, 2, 2, 1]


@pytest.mark.parametrize(("by_tma", "rows", "nbytes"), [
    ("MN", 64, 256), ("MN", 40, 256), ("MN", 192, 768), ("K", 64, 1024), ("K", 24, 384), (None, 64, 256), (None, 5, 32),
])  # fmt: skip
def test_scales_of_a_stage(by_tma: Major | None, rows: int, nbytes: int) -> None:
    """Words, four k-tiles of them in a box along K; TMA writes to multiples of 128 bytes, threads of 16."""
    assert ScaleSpec(1, FP32, by_tma).staged_bytes(rows) == nbytes


def test_scales_of_blocks_that_a_tile_cuts() -> None:
    """A tile of 192 rows begins at the middle of a block or at its first row: parts of two blocks."""
    found = {rows: ScaleSpec(128, FP32).max_scales(rows) for rows in (64, 96, 128, 192, 256)}
    assert found == {64: 1, 96: 2, 128: 1, 192: 2, 256: 2}
