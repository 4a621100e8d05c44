"""Occupancy: what cuda_occupancy.h of CUDA 13.0 gives, and which resource limits."""

from __future__ import annotations

import pytest

from gemmsmith.core.chip import CHIPS
from gemmsmith.core.occupancy import occupancy

OF_THE_TOOLKIT = """
sm_80 32 16 0 32, sm_80 128 96 16384 5, sm_80 160 63 1000 6, sm_86 32 32 1000 16, sm_86 96 168 0 4, sm_86 1024 40 0 1,
sm_89 32 16 1000 24, sm_89 384 40 16384 4, sm_90 96 63 0 10, sm_90 256 63 49152 4, sm_90 384 168 100000 1,
sm_90 128 255 0 2, sm_100 32 32 0 32, sm_100 256 32 0 8, sm_120 160 255 0 1, sm_120 32 63 0 24, sm_120 128 40 49152 2
"""
"""Chip, threads, registers, bytes of shared memory, CTAs per SM."""


@pytest.mark.parametrize("row", [row.split() for row in OF_THE_TOOLKIT.split(",")], ids=" ".join)
def test_ctas(row: list[str]) -> None:
    chip, threads, registers, shared, ctas = row
    assert occupancy(CHIPS[chip], int(threads), int(registers), int(shared)).ctas_per_sm == int(ctas)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "limit"),
    [(1024, 16, 0, "threads"), (256, 128, 0, "registers"), (128, 32, 100_000, "shared memory"), (32, 16, 0, "CTAs")],
)
def test_what_limits(threads: int, registers: int, shared: int, limit: str) -> None:
    found = occupancy(CHIPS["sm_90"], threads, registers, shared)
    assert found.limit == limit
    assert found.ctas_per_sm == found.limits[limit]


def test_a_cta_that_is_too_large() -> None:
    assert occupancy(CHIPS["sm_86"], 128, 32, 228 * 1024).ctas_per_sm == 0


def test_its_text() -> None:
    text = "1 CTA per SM, 12 of 64 warps, limited by registers"
    assert f"{occupancy(CHIPS['sm_90'], 384, 168, 100_000)}" == text
