"""Products of 8 and 32 bits are chosen for as 16-bit ones of as many bytes of K."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.dtypes import BF16, E4M3, FP32, INT8, TF32, DType, as_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.tuning.choose import choose, rank_configs
from gemmsmith.tuning.config_table import ConfigTable
from gemmsmith.tuning.dtype_equivalence import as_16bit_problem, config_for_16bit, config_for_dtype
from gemmsmith.tuning.model import estimate

OPTIONS: dict[str, dict[str, Any]] = {"fp8_e4m3": {"accumulate": "fast"}, "int8": {}, "fp32": {"precision": "tf32"}}


def problem(dtype: str, m: int, n: int, k: int, *, output: str = "bf16", k_major: bool = True) -> Problem:
    b = Spec((k, n), dtype, (1, k) if k_major else None)
    return bind(Request(Spec((m, k), dtype), b, out_dtype=output, **OPTIONS.get(dtype, {}))).problem


@pytest.mark.parametrize(("dtype", "k"), [("fp8_e4m3", 8192), ("int8", 8192), ("fp32", 2048)])
@pytest.mark.parametrize("m", [1, 64, 300, 4096])
def test_the_same_bytes_have_the_same_choice(dtype: str, k: int, m: int) -> None:
    """By the model alone: what it misses was measured of 16 bits. Of equal ones, as a square's transposed, any."""
    alike = problem("bf16", m, 4096, 4096)

    def cycles(config: Config) -> float:
        return float(estimate(alike, ConfigTable.from_configs([config])).cycles[0])

    wanted = choose(alike)
    found = problem(dtype, m, 4096, k)
    assert as_16bit_problem(found) == problem("bf16", m, 4096, 4096)
    if dtype != "int8" or wanted.tile[1] % 16 == 0:
        assert cycles(config_for_16bit(choose(found), found.a.dtype)) == cycles(wanted)


@pytest.mark.parametrize(("dtype", "k"), [(BF16, 64), (E4M3, 128), (INT8, 128), (TF32, 32)])
def test_a_tile_has_as_many_bytes(dtype: DType, k: int) -> None:
    config = Config(tile=(128, 128, 64))
    assert config_for_dtype(config, dtype) == config.replace(tile=(128, 128, k))
    assert config_for_16bit(config_for_dtype(config, dtype), dtype) == config


@pytest.mark.parametrize("dtype", OPTIONS)
def test_what_is_packed_is_k_major(dtype: str) -> None:
    packed = as_16bit_problem(problem(dtype, 100, 200, 301, k_major=False))
    assert all(x.is_tma_compatible and not x.is_column_major for x in packed.operands)
    assert packed.k == -(-301 * as_dtype(dtype, allow_integers=True).bytes // 2)


@pytest.mark.parametrize("dtype", OPTIONS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (64, 2112, 7168), (2048, 1000, 512), (7, 3, 0), (3, 5, 17)])
def test_all_that_are_ranked_can_be_built(dtype: str, m: int, n: int, k: int) -> None:
    found = rank_configs(problem(dtype, m, n, k), limit=12)
    assert found
    for config in found:
        a, b = Spec((m, k), dtype), Spec((k, n), dtype)
        plan = gemmsmith.plan(a, b, out_dtype="bf16", config=config, **OPTIONS[dtype])
        assert plan._planned.kernel.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("scale_b", [(56, 32), (56, 4096)])
def test_promoted_sums(scale_b: tuple[int, int]) -> None:
    """Of designs that can, a block deep; promoting is slower than not, most of all with one warpgroup."""
    a, b = Spec((4096, 7168), "fp8_e4m3"), Spec((7168, 4096), "fp8_e4m3", (1, 7168))
    scales = {"scale_a": Spec((4096, 56), "fp32"), "scale_b": Spec(scale_b, "fp32")}
    config = Config(tile=(128, 128, 128), cluster=(1, 1))  # not swapped
    scaled, fast = (gemmsmith.plan(a, b, config=config, **x) for x in (scales, {"accumulate": "fast"}))
    for config in rank_configs(scaled.problem, limit=20):
        assert (config.design, config.tile[2]) == ("cooperative", 128)
    some = ConfigTable.from_configs([Config(tile=(64, 128, 64), consumers=1), Config(tile=(128, 128, 64), consumers=2)])
    promoted, unpromoted = (estimate(as_16bit_problem(p.problem), some).math_cycles for p in (scaled, fast))
    assert unpromoted[0] == pytest.approx(256, rel=0.03)
    assert promoted[0] > 1.2 * unpromoted[0]  # one warpgroup promotes while nobody multiplies
    of_one, of_two = promoted / unpromoted
    assert 1 < of_two < of_one  # another one multiplies meanwhile


def test_scales_of_columns_and_borders_within_tiles_take_time() -> None:
    a, b = Spec((4096, 7168), "fp8_e4m3"), Spec((7168, 4096), "fp8_e4m3", (1, 7168))
    some = ConfigTable.from_configs([Config(tile=(128, n, 64), consumers=2) for n in (128, 192, 160, 176, 168)])
    for_blocks, for_columns = (
        estimate(
            as_16bit_problem(gemmsmith.plan(a, b, scale_a=Spec((4096, 56), "fp32"), scale_b=x).problem), some
        ).math_cycles
        for x in (Spec((56, 32), "fp32"), Spec((56, 4096), "fp32"))
    )
    assert (for_columns > for_blocks).all()
    assert (np.diff(for_blocks / some.tile_n) > 0).all()
    without = estimate(as_16bit_problem(gemmsmith.plan(a, b, accumulate="promoted").problem), some).math_cycles
    whole, within = without <= for_blocks, without < for_blocks
    assert whole.all()
    assert list(within) == [False, False, True, True, True]  # no scales, no borders


@pytest.mark.parametrize("m", [17, 20, 24])
def test_up_to_eight_rows_more_have_one_choice(m: int) -> None:
    a, b = Spec((m, 1024), "fp8_e4m3"), Spec((1024, 4096), "fp8_e4m3", (1, 1024))
    plan = gemmsmith.plan(a, b, scale_a=Spec((m, 8), "fp32"), scale_b=Spec((8, 32), "fp32"))
    whole = gemmsmith.plan(
        Spec((24, 1024), "fp8_e4m3"), b, scale_a=Spec((24, 8), "fp32"), scale_b=Spec((8, 32), "fp32")
    )
    assert plan.config == whole.config
    assert plan.problem.accumulator_dtype is FP32
