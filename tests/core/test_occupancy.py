"""Occupancy: what cuda_occupancy.h of CUDA 13.0 gives, and which resource limits."""

from __future__ import annotations

import pytest

from gemmsmith.core.chip import CHIPS, occupancy

OF_THE_TOOLKIT = """
sm_80 32 16 0 32, sm_80 128 96 16384 5, sm_80 160 63 1000 6, sm_86 32 32 1000 16, sm_86 96 168 0 4, sm_86 1024 40 0 1,
sm_89 32 16 1000 24, sm_89 384 40 16384 4, sm_90 96 63 0 10, sm_90 256 63 49152 4, sm_90 384 168 100000 1,
sm_90 128 255 0 2, sm_100 32 32 0 32, sm_100 256 32 0 8, sm_120 160 255 0 1, sm_120 32 63 0 24, sm_120 128 40 49152 2,
sm_80 160 16 0 12, sm_80 32 16 40960 4, sm_86 160 16 0 9, sm_90 160 16 0 12, sm_90 32 16 57344 4, sm_100 160 16 0 12,
sm_100 32 16 57344 4, sm_120 32 16 0 24, sm_120 160 16 0 9, sm_89 160 16 0 9, sm_86 32 16 24064 4, sm_89 32 16 24064 4
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


@pytest.mark.parametrize(("name", "kib", "sms"), [
    ("sm_80", 163, 108), ("sm_86", 99, 84), ("sm_89", 99, 142), ("sm_90", 227, 132), ("sm_100", 227, 148),
    ("sm_120", 99, 188),
])  # fmt: skip
def test_limits_of_chips(name: str, kib: int, sms: int) -> None:
    """Shared memory by the CUDA C++ Programming Guide, of which 1 KB per CTA is the system's; SMs by the datasheets of
    A100, RTX A6000, L40S, H100, B200 and RTX PRO 6000."""
    chip = CHIPS[name]
    assert (chip.max_shared_bytes_per_cta, chip.sm_count) == (kib * 1024, sms)
    assert chip.shared_bytes_per_sm == chip.max_shared_bytes_per_cta + 1024
    assert occupancy(chip, 32, 32, chip.max_shared_bytes_per_cta).ctas_per_sm == 1
