"""The ladder: counts of a tile at two depths give those of a product, and what they bound its time by."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from gemmsmith.backends.sim.execute.counters import Count, Counters
from gemmsmith.backends.sim.run import run
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.ladder.launches import LADDER_KERNELS
from gemmsmith.ladder.rungs import RUNG_CASES, RungCase, simulate_rung
from gemmsmith.lang.location import SourceLocation
from gemmsmith.tuning.roofline import compute_roofline

NUMBERS = ("instructions", "macs", "wavefronts", "ideal_wavefronts", "sectors", "ideal_sectors")


def step(name: str, dtype: Any) -> RungCase:
    (found,) = [x for x in RUNG_CASES if (x.name, x.dtype) == (name, dtype)]
    return found


def totals(lines: list[Count]) -> Counter[str]:
    return Counter({name: sum(getattr(x, name) for x in lines) for name in NUMBERS})


def test_every_rung_is_a_step() -> None:
    assert {x.name for x in RUNG_CASES} >= LADDER_KERNELS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("naive_m", FP32), ("wmma", BF16), ("mma_multistage", BF16), ("tma", BF16)],
)
def test_counts_are_linear_in_k_and_in_tiles(name: str, dtype: Any) -> None:
    """As a simulation of the whole product counts them, of one tile for Hopper's, whose CTAs start once."""
    x = step(name, dtype)
    (rows, columns), wider = x.tile, 1 if x.config else 2
    sizes = rows, columns * wider, 3 * x.simulated_k
    arrays, counters = x.arrays(sizes, sizes), Counters()
    found, arguments = x.launches(*arrays)
    assert run(found, arguments, 0, None, counters).hazards == []
    (kernel,) = counters.kernels
    same, lines = simulate_rung(x, sizes)
    assert same.name == kernel.name
    assert totals(lines) == totals(counters.lines(kernel))
    assert totals(lines)["macs"] == math.prod(sizes)


def test_sizes_that_are_no_multiples() -> None:
    """Of a tile: as if they were. Of 16: rungs would pack their operands."""
    x = step("block_tile", FP32)
    (_, whole), (_, ragged) = (simulate_rung(x, (32, n, 512)) for n in (64, 48))
    assert totals(whole) == totals(ragged)
    with pytest.raises(ArgumentError, match="m, n, k: got 64x80x500; use multiples of 16"):
        simulate_rung(x, (64, 80, 500))


def line(instruction: str, **numbers: int) -> Count:
    return Count(SourceLocation("a.py", len(instruction)), instruction, **numbers)


@pytest.mark.parametrize(
    ("lines", "limit", "us"),
    [
        ([line("fused_multiply_add", instructions=1, macs=53_700_000)], "math", 2),
        ([line("mma_m16n8k8_f32_tf32", macs=647_000_000)], "math", 4),
        ([line("wmma_row_col_s32_s8", macs=647_000_000)], "math", 1),
        ([line("load_shared", wavefronts=132 * 1600, instructions=9)], "L1", 1),
        ([line("load_global", sectors=8 * 132 * 1600, instructions=9)], "L1", 2),
        ([line("load_global", sectors=4, instructions=132 * 1600)], "L1", 1),
        ([line("cp_async_16", sectors=132 * 5000, wavefronts=132 * 1000)], "L2", 1),
        ([line("tma_load", sectors=132, wavefronts=132 * 1375)], "L2", 1),
        ([line("sync", instructions=132 * 6400)], "issue", 1),
        ([line("load_shared", wavefronts=1)], "DRAM", 1),
    ],
)
def test_limits(lines: list[Count], limit: str, us: float) -> None:
    nbytes = 2707 * 1600 if limit == "DRAM" else 0
    found = compute_roofline([line("none"), *lines], nbytes)
    assert (found.limiting_resource, found.limiting_line) == (
        limit,
        lines[0] if limit != "DRAM" else found.limiting_line,
    )
    assert found.lower_bound_us == pytest.approx(us)
    assert found.speed_of_light_us == pytest.approx(us if limit in ("math", "DRAM") else 0)
