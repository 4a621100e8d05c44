"""What a launch's tensor maps and byte counts say of operands smaller than a tile."""

from __future__ import annotations

import pytest

import gemmsmith
from gemmsmith import ArgumentError, Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.host.launch_sequence import build_launches


def test_the_last_rows_have_a_tensor_map_of_their_own() -> None:
    config = Config(tile=(64, 64, 64), cluster=(1, 2), consumers=1, raster="n")
    for m, first, rows, whole in ((1, 0, 1, 1), (16, 8, 8, 8), (20, 16, 4, 16), (64, 32, 32, 32), (300, 288, 12, 32)):
        p = bind(Request(Spec((m, 512), "bf16"), Spec((512, 4096), "bf16", (1, 512))))
        arguments = build_launches(p, p.kernel_spec(config)).all[0].arguments
        assert (arguments["a_tail_row"], arguments["a_tail_rows"]) == (first, rows)
        assert (arguments["a_tail"].box[1], arguments["a"].box[1]) == (rows, whole)
        assert (arguments["b_tail_row"], arguments["b_tail_rows"]) == (4096 - 64, 64)
        assert "stage_bytes" not in arguments  # all operands skip rows


def test_stages_of_operands_that_are_loaded_as_a_whole() -> None:
    p = bind(Request(Spec((304, 512), "bf16", (1, 304)), Spec((512, 4096), "bf16")))  # MN-major
    arguments = build_launches(p, p.kernel_spec(Config(tile=(128, 64, 64), cluster=(1, 1)))).all[0].arguments
    assert arguments["stage_bytes"] == (128 + 64) * 128
    assert "a_tail" not in arguments


def test_reductions_that_are_too_large_say_so() -> None:
    million = 1 << 20
    for a, b, reduction in (
        ((6 * million, 8), (8, 6 * million), lambda acc: acc.abs().amax()),
        ((4, 1024 * million, 8), (8, 16), lambda acc: acc.sum(-1)),
        ((4, 64, 8), (8, 1024 * million), lambda acc: acc.sum(-2).half()),
    ):
        plan = gemmsmith.plan(Spec(a, "bf16"), Spec(b, "bf16"), epilogue=reduction)
        for whole, name in ((plan, "workspace_bytes"), (plan._planned, "launches")):
            with pytest.raises(ArgumentError, match=r"out: got .* partial results, .*; split the GEMM along M or N"):
                getattr(whole, name)


@pytest.mark.parametrize("shape", [(1, 0, 100_001), (1, 100_001, 0), (0, 5001, 5001)])
def test_an_empty_product_needs_no_memory(shape: tuple[int, int, int]) -> None:
    """Its operands, of which one may have elements, are not packed, and nothing is shared."""
    batch, m, n = shape

    def sums(acc):
        return acc, acc.sum(-1), acc.sum(-2), acc.sum(), acc.logsumexp(-1)

    a, b = Spec((batch, m, 4097), "bf16"), Spec((batch, 4097, n), "bf16")
    full = gemmsmith.plan(Spec((2, 300, 4097), "bf16"), Spec((2, 4097, 301), "bf16"), epilogue=sums)
    assert full.workspace_bytes > 0
    for config in (None, Config(splits=2), Config(sync_clusters=True, cluster=(2, 1))):
        found = gemmsmith.plan(a, b, epilogue=sums, config=config)._planned.launches
        assert (found.workspace_bytes, found.flag_bytes) == (0, 0)
        assert not any("workspace" in str(launch.arguments) for launch in found.all)
