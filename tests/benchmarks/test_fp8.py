"""The FP8 benchmark's shapes, plans and summary. Its times need a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from benchmarks.speed import fp8  # noqa: E402

pytestmark = pytest.mark.torch


def test_layers_are_those_of_the_weights_and_two_cubes() -> None:
    shapes = fp8.SUITES["layers"]()
    assert len(shapes) == len(set(shapes)) == len(fp8.ROWS) * len(fp8.WEIGHTS) + 2


def test_unseen_shapes_are_sixty_that_all_peers_take() -> None:
    shapes = fp8.unseen()
    assert len(set(shapes)) == 60
    assert all(n % 64 == 0 and k % fp8.BLOCK == 0 for _, n, k in shapes)
    assert not {(n, k) for _, n, k in shapes} & {*fp8.WEIGHTS}
    assert shapes == fp8.unseen()


@pytest.mark.parametrize("shape", [(1, 2112, 7168), (64, 7168, 2048), (4096, 4096, 4096), (300, 192, 256)])
def test_plans_have_block_scales_in_the_mainloop(shape: tuple[int, int, int]) -> None:
    plan = fp8.planned(shape)
    assert plan.spec.promoted
    assert sorted(scale.granularity for scale in plan.spec.scales if scale) == [1, 128]


def test_the_summary_has_a_line_for_each_class_and_peer() -> None:
    row = {"n": 1, "k": 1, "us": 2.0, "floor_us": 1.0, "lt_ratio": 2.0}
    rows = [{**row, "m": 1, "torch_ratio": 2.0}, {**row, "m": 1, "torch_ratio": 0.5}, {**row, "m": 4096}]
    assert fp8.summary(rows) == [
        "M <= 128    2 shapes   torch / ours 1.000, least 0.500", "M <= 128    2 shapes   lt / ours 2.000, least 2.000",
        "M = 1       2 shapes   ours / floor 2.000, most 2.000", "M > 128     1 shapes   lt / ours 2.000, least 2.000",
    ]  # fmt: skip
