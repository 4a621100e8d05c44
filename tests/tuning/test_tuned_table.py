"""Tuned configs: which one a problem gets, and when it gets none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.problem import Problem
from gemmsmith.tuning import tuned_table
from gemmsmith.tuning.choose import choose, estimate_us
from gemmsmith.tuning.config_table import is_single_wave, with_single_wave_raster
from gemmsmith.tuning.gpus import H100, H200, Gpu, nearest_gpu
from gemmsmith.tuning.tuned_table import TunedTable, builtin_rows, builtin_table

SMALL, LARGE = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, splits=2), Config(tile=(256, 128, 64))
ROWS = [{"m": m, "n": 4096, "k": 1024, "config": str(c)} for m, c in ((64, SMALL), (512, LARGE))]


def problem(m: int, n: int, k: int, dtype: str = "bf16") -> Problem:
    return bind(Request(Spec((m, k), dtype), Spec((k, n), dtype, (1, k)))).problem


def problem_with_scales(m: int, n: int, k: int) -> Problem:
    """FP8 with block scales as DeepGEMM takes them, whose rows begin at multiples of 16 bytes."""
    blocks, wide = -(-k // 128), -(-n // 128)
    of_a, of_b = (1, -(-m // 4) * 4), (1, -(-blocks // 4) * 4)
    scales = {"scale_a": Spec((m, blocks), "fp32", of_a), "scale_b": Spec((blocks, wide), "fp32", of_b)}
    a, b = Spec((m, k), "fp8_e4m3"), Spec((k, n), "fp8_e4m3", (1, k))
    unswapped = Config(tile=(64, 64, 128), cluster=(1, 1), consumers=1, stages=3)
    return gemmsmith.plan(a, b, **scales, out_dtype="bf16", config=unswapped).problem


def test_the_next_tuned_m(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_table, "MAX_MODEL_SLOWDOWN", math.inf)
    table = TunedTable(reversed(ROWS))
    got = {m: table.get(problem(m, 4096, 1024)) for m in (1, 64, 65, 255, 256, 512, 513)}
    assert got == {1: SMALL, 64: SMALL, 65: None, 255: None, 256: LARGE, 512: LARGE, 513: None}
    assert TunedTable([{**ROWS[0], "m": 65}]).get(problem(32, 4096, 1024)) is None
    assert table.get(problem(64, 4096, 1032)) is None
    assert table.get(problem(512, 4096, 1024, "fp16")) == LARGE


def test_a_config_that_does_not_suit_is_none() -> None:
    deep = LARGE.replace(stages=9)
    assert TunedTable([{**ROWS[1], "config": str(deep)}]).get(problem(512, 4096, 1024)) == LARGE  # as many as fit
    wide = LARGE.replace(consumers=1)  # its accumulator does not fit
    assert TunedTable([{**ROWS[1], "config": str(wide)}]).get(problem(512, 4096, 1024)) is None


def test_few_rows_do_not_keep_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_table, "MAX_MODEL_SLOWDOWN", math.inf)
    config = Config(tile=(128, 256, 64), cluster=(2, 1), serpentine=True, sync_clusters=True)
    table = TunedTable([{"m": 256, "n": 57344, "k": 1024, "config": str(config)}])
    assert table.get(problem(256, 57344, 1024)) == config
    assert table.get(problem(128, 57344, 1024)) == config.replace(serpentine=False, sync_clusters=False)
    assert table.get(problem(256, 4096, 1024)) is None


def test_every_shipped_config_is_taken() -> None:
    rows = builtin_rows()
    assert len(rows) > 80
    for row in rows:
        p = (problem if row["operands"] == "16 bits" else problem_with_scales)(row["m"], row["n"], row["k"])
        config = Config.parse(row["config"])
        assert builtin_table().get(p) == (with_single_wave_raster(config, p) if is_single_wave(config, p) else config)
    assert builtin_table().get(problem(3, 5, 7)) is None


def test_an_epilogue_takes_the_bare_products_tile_where_it_has_room() -> None:
    a, b = Spec((8192, 8192), "bf16"), Spec((8192, 8192), "bf16", (1, 8192))
    bare = gemmsmith.plan(a, b)
    assert "tuned" in bare.why
    assert bare.config.tile[0] == 256
    fused = gemmsmith.plan(a, b, epilogue=lambda acc: acc.relu())
    assert "tuned without its epilogue" in fused.why
    assert fused.config.tile == bare.config.tile
    residual = gemmsmith.plan(a, b, epilogue=lambda acc, c: acc + c, operands={"c": a})
    assert "chosen by the model" in residual.why
    assert math.prod(residual.config.tile[:2]) < math.prod(bare.config.tile[:2])


def gated(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gate.silu() * up


def test_an_epilogue_that_slows_an_entry_down_has_a_config_of_its_own() -> None:
    """By the model, relative to its own choice."""
    a, b = Spec((1024, 4096), "bf16"), Spec((4096, 512), "bf16", (1, 4096))
    assert "tuned" in gemmsmith.plan(a, b).why
    assert "tuned without its epilogue" in gemmsmith.plan(a, b, epilogue=lambda acc: acc.relu()).why
    assert "chosen by the model" in gemmsmith.plan(a, b, epilogue=gated).why


def plans(
    m: int, n: int, k: int, epilogue: Callable[..., Any], **operands: Spec
) -> tuple[gemmsmith.Plan, gemmsmith.Plan]:
    """Of the bare product and of a fused one."""
    a, b = Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k))
    return gemmsmith.plan(a, b), gemmsmith.plan(a, b, epilogue=epilogue, operands=operands)


@pytest.mark.parametrize(("m", "n", "k"), [(256, 8192, 8192), (256, 6144, 4096), (128, 28672, 4096)])
def test_with_one_tile_a_cta_too(m: int, n: int, k: int) -> None:
    bare, fused = plans(m, n, k, lambda acc: acc.relu())
    assert "tuned without its epilogue" in fused.why
    assert fused.config.replace(stages=1) == bare.config.replace(stages=1)


def test_a_loaded_matrix_has_the_room_of_results_that_leave_through_the_stages() -> None:
    bare, fused = plans(256, 6144, 4096, lambda acc, c: acc + c, c=Spec((256, 6144), "bf16"))
    assert not bare.config.alias_epilogue
    assert fused.config.alias_epilogue
    assert fused.config.tile == bare.config.tile
    bare, fused = plans(128, 28672, 4096, lambda acc, c: acc + c, c=Spec((128, 28672), "bf16"))
    assert not fused.config.alias_epilogue  # two warpgroups lose by it
    assert fused.config.tile == bare.config.tile


def test_results_that_do_not_fit_the_stages_do_not_leave_through_them() -> None:
    bare, fused = plans(256, 4096, 4096, lambda acc: (acc, acc.relu(), acc.tanh(), acc.exp()))
    assert bare.config.alias_epilogue
    assert not fused.config.alias_epilogue


def test_a_tile_is_widened_where_results_need_whole_halves() -> None:
    def swiglu(acc: Any) -> Any:
        gate, up = gemmsmith.deinterleave(acc)
        return gate.silu() * up

    bare, fused = plans(8192, 28672, 4096, swiglu)
    assert bare.config.tile == (256, 184, 64)
    assert "tuned without its epilogue" in fused.why
    assert fused.config == bare.config.replace(tile=(256, 192, 64))


def test_turned_results_are_left_to_the_model() -> None:
    bare, fused = plans(1, 57344, 8192, lambda acc: acc.relu())
    assert bare.config.swap_ab
    assert "chosen by the model" in fused.why


def test_blocks_that_do_not_fit_the_tile_are_left_to_the_model() -> None:
    bare, fused = plans(64, 4096, 4096, lambda acc: gemmsmith.quantize(acc))
    assert bare.config.tile[1] < 128
    assert fused.config.tile[1] % 128 == 0


def test_a_row_in_one_tile_is_left_to_the_model() -> None:
    bare, fused = plans(256, 256, 256, lambda acc: gemmsmith.top_k_softmax(acc, 4))
    assert bare.config.tile[1] < 256
    assert fused.config.tile[1] == 256


def test_why_says_where_it_comes_from() -> None:
    a, b = Spec((520, 4096), "bf16"), Spec((4096, 4088), "bf16", (1, 4096))
    assert "chosen by the model" in gemmsmith.plan(a, b).why
    said = gemmsmith.plan(a, b, config=Config(tile=(64, 256, 64), cluster=(1, 1), consumers=1, swap_ab=True)).why
    assert "given" in said
    assert "swap_ab" in said
    assert said.count("best other config: ") == 1


def in_layout(layout: str, m: int = 4096, n: int = 4096, k: int = 4096) -> Problem:
    a = Spec((m, k), "bf16", (1, m) if layout[0] == "t" else None)
    return bind(Request(a, Spec((k, n), "bf16", (1, k) if layout[1] == "t" else None))).problem


def test_an_entry_belongs_to_its_layout() -> None:
    """Another layout has its own, or one of another layout that the model takes for about as fast as its choice."""
    slow = Config(tile=(64, 136, 64), cluster=(1, 1), consumers=1)
    fast = {layout: choose(in_layout(layout)) for layout in ("nt", "nn", "tn", "tt")}
    row = {"m": 4096, "n": 4096, "k": 4096}
    assert TunedTable([{**row, "config": str(slow)}]).get(in_layout("nt")) is not None
    for layout, config in fast.items():
        other = "nt" if layout != "nt" else "nn"
        table = TunedTable([{**row, "layout": other, "config": str(slow)}])
        assert table.get(in_layout(layout)) is None
        table = TunedTable([{**row, "layout": other, "config": str(config)}])
        assert table.get(in_layout(layout)) == config
        table = TunedTable(
            [{**row, "layout": layout, "config": str(slow)}, {**row, "layout": other, "config": str(config)}]
        )
        found = table.get(in_layout(layout))
        assert found is not None
        assert found.tile == slow.tile


def test_the_gpus_own_entry_comes_first() -> None:
    row = {"m": 4096, "n": 4096, "k": 4096}
    both = [
        {**row, "gpu": gpu, "config": str(Config(tile=tile))}
        for gpu, tile in (("NVIDIA H100 80GB HBM3", (128, 256, 64)), ("NVIDIA H200", (256, 128, 64)))
    ]
    for gpu, tile in ((H100, (128, 256, 64)), (H200, (256, 128, 64))):
        for rows in (both, both[::-1]):
            found = TunedTable(rows).get(in_layout("nt"), gpu=gpu)
            assert found is not None
            assert found.tile == tile
        (other,) = [x for x in both if gpu.name not in x["gpu"]]
        assert TunedTable([other]).get(in_layout("nt"), gpu=gpu) is not None


@pytest.mark.parametrize(
    ("m", "n", "k", "tuned_m", "config"),
    [
        (136, 2048, 7168, 256, Config(tile=(64, 224, 64), cluster=(1, 2), consumers=1, alias_epilogue=True)),
        (4097, 4096, 4096, 8192, Config(tile=(256, 128, 64), cluster=(2, 1), serpentine=True, sync_clusters=True)),
    ],
)
def test_an_entry_serves_another_m_only_where_the_model_expects_no_loss(
    m: int, n: int, k: int, tuned_m: int, config: Config
) -> None:
    """Its tiles may waste most of their rows there, or a wave."""
    table = TunedTable([{"m": tuned_m, "n": n, "k": k, "config": str(config)}])
    assert table.get(problem(tuned_m, n, k)) is not None
    found = table.get(problem(m, n, k))
    at_m, at_tuned_m = (
        estimate_us(p, config) / estimate_us(p, choose(p)) for p in (problem(m, n, k), problem(tuned_m, n, k))
    )
    assert (found is None) == (at_m > 1.02 * max(1, at_tuned_m))
    near = table.get(problem(tuned_m - 8, n, k))
    assert near is not None
    assert near.tile == config.tile


@pytest.mark.parametrize(("bandwidth", "gpu"), [(3.35e12, H100), (2.0e12, H100), (4.0e12, H100), (4.9e12, H200)])
def test_a_gpu_has_the_row_whose_memory_is_most_like_its_own(bandwidth: float, gpu: Gpu) -> None:
    assert nearest_gpu(bandwidth) is gpu
