"""Grouped GEMMs whose rows are added to those of `out` by atomics, in the simulator and by the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.groups import NUMPY, random
from tests.simulated.test_grouped_gather import CONFIGS, SM80, gathered, products, random_rows

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Grouping

SIZES = np.array([0, 65, 0, 130, 7, 1, 63, 64, 127, 0], np.int32)
SCATTERS = Grouping("sizes", scatters=True)
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


def added(out: Any, values: Any, rows: Any) -> tuple[Any, Any]:
    """Return `out` with rows added, and the magnitudes that were added, both in float64."""
    total, magnitude = out.astype(float), np.abs(out.astype(float))
    for row, x in zip(rows[: len(values)], values, strict=True):
        if 0 <= row < len(out):
            total[row] += x
            magnitude[row] += np.abs(x)
    return total, magnitude


def check(found: Any, before: Any, values: Any, rows: Any, dtype: str, additions: int = 40) -> None:
    """Each addition rounds to the dtype of `out`; rows that no index names are as they were, bit by bit."""
    want, magnitude = added(before, values, rows)
    assert (np.abs(found.astype(float) - want) <= additions * UNIT[dtype] * magnitude + 1e-5).all()
    others = np.setdiff1d(np.arange(len(before)), rows[: len(values)])
    assert (found[others].view(np.uint8) == before[others].view(np.uint8)).all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rows_with_one_destination_are_added(config: Config | None, dtype: str) -> None:
    """Rows behind the last group, which are NaN, are not."""
    if config is SM80 and dtype == "bf16":
        return
    rng, kind, gathers = np.random.default_rng(1), "fp16" if dtype == "fp16" else "bf16", dtype == "bf16"
    total, n, k, t, s = int(SIZES.sum()), 72, 72, 90, 100
    m = total + 30
    a, b = random(rng, kind, t if gathers else m, k), random(rng, kind, len(SIZES), k, n)
    arrays: dict[str, Any] = {"sizes": SIZES, "scatter": random_rows(rng, m, s)}
    rows_of_a = a.astype(float)
    if gathers:
        arrays["gather"] = random_rows(rng, m, t)
        rows_of_a = gathered(a, arrays["gather"])
    else:
        a[total:] = np.nan
    before = random(rng, dtype, s, n)
    out, by_reference = before.copy(), before.copy()
    options: dict[str, Any] = {"out_dtype": dtype, "deterministic": False}
    grouping = Grouping("sizes", gathers=gathers, scatters=True)
    done = gemmsmith.simulate(a, b, **arrays, **options, grouping=grouping, out=out, config=config, seed=1)
    assert done.hazards == []
    gemmsmith.grouped_gemm(a, b, **arrays, **options, out=by_reference, backend="reference")
    want = products(rows_of_a, b.astype(float), SIZES)
    check(out, before, want, arrays["scatter"], dtype)
    check(by_reference, before, want, arrays["scatter"], dtype, additions=1)


def test_rows_with_one_destination_that_are_stored_are_a_race() -> None:
    rng = np.random.default_rng(2)
    a, b, rows = random(rng, "bf16", 200, 64), random(rng, "bf16", 2, 64, 64), np.arange(200, dtype=np.int32) // 2
    arrays: dict[str, Any] = {"sizes": np.array([99, 101], np.int32), "scatter": rows, "grouping": SCATTERS}
    for deterministic in (False, True):
        out = np.zeros((100, 64), np.float32)
        done = gemmsmith.simulate(a, b, **arrays, out=out, out_dtype="fp32", deterministic=deterministic)
        assert any("race" in str(x) for x in done.hazards) == deterministic


def weighted(acc: Any, weight: Any, bias: Any, group: Any) -> Any:
    y = (acc + bias) * weight
    return {"sum": y, "gated": y.silu() * group}


@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[3], CONFIGS[8], SM80], ids=str)
def test_several_results_are_added(config: Config) -> None:
    rng, total, n = np.random.default_rng(3), int(SIZES.sum()), 40
    a, b = random(rng, "bf16", total, 64), random(rng, "bf16", len(SIZES), 64, n)
    weight, bias = random(rng, "fp32", total, 1), random(rng, "fp32", len(SIZES), 1, n)
    before, rows = random(rng, "fp32", 2, 60, n), random_rows(rng, total, 60)
    group, (out, gated) = np.repeat(np.arange(len(SIZES)), SIZES), before.copy()
    options: dict[str, Any] = {"epilogue": weighted, "weight": weight, "bias": bias, "out_dtype": "fp32"}
    done = gemmsmith.simulate(
        a, b, sizes=SIZES, scatter=rows, **options, grouping=SCATTERS, out={"sum": out, "gated": gated},
        deterministic=False, config=config,
    )  # fmt: skip
    assert done.hazards == []
    y = (products(a.astype(float), b.astype(float), SIZES) + bias[group, 0]) * weight
    for found, start, want in ((out, before[0], y), (gated, before[1], y / (1 + np.exp(-y)) * group[:, None])):
        total_, magnitude = added(start, want, rows)
        assert (np.abs(found - total_) <= 1e-3 * magnitude + 1e-3).all()


@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[3], SM80], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["odd", "columns", "apart"])
def test_layouts(config: Config, dtype: str, layout: str) -> None:
    """Rows that are no multiples of 16 bytes, columns, and arrays with gaps, which survive."""
    if config is SM80 and dtype == "bf16":
        return
    rng, sizes, n = np.random.default_rng(4), np.array([33, 70], np.int32), 71 if layout == "odd" else 72
    kind = "fp16" if dtype == "fp16" else "bf16"
    a, b, rows = random(rng, kind, 103, 64), random(rng, kind, 2, 64, n), random_rows(rng, 103, 50)
    memory = random(rng, dtype, 50, 2 * n)
    out = memory[:, n // 2 : n // 2 + n] if layout == "apart" else memory[:, :n].copy()
    out, gaps = np.asfortranarray(out) if layout == "columns" else out, memory.copy()
    before = out.copy()
    gemmsmith.grouped_gemm(
        a, b, sizes=sizes, scatter=rows, out=out, out_dtype=dtype, deterministic=False, config=config, backend="sim"
    )
    check(np.ascontiguousarray(out), before, products(a.astype(float), b.astype(float), sizes), rows, dtype)
    assert (memory[:, : n // 2] == gaps[:, : n // 2]).all()
    assert (memory[:, n // 2 + n :] == gaps[:, n // 2 + n :]).all()


@pytest.mark.parametrize("backend", ["sim", "reference"])
def test_an_invalid_table_yields_nan(backend: Any) -> None:
    a, b, rows = np.ones((64, 64), NUMPY["fp16"]), np.ones((2, 64, 64), NUMPY["fp16"]), np.zeros(64, np.int32)
    out = np.zeros((80, 64), np.float16)
    gemmsmith.grouped_gemm(
        a, b, sizes=np.array([70, 66], np.int32), scatter=rows, out=out, deterministic=False, backend=backend
    )
    assert np.isnan(out).all()


def test_the_experts_of_a_token_are_summed() -> None:
    rng, tokens, experts, top_k = np.random.default_rng(5), 40, 6, 2
    x, down = random(rng, "bf16", tokens, 64), random(rng, "bf16", experts, 64, 48)
    chosen = np.argsort(rng.random((tokens, experts)), 1)[:, :top_k]
    order = np.argsort(chosen.ravel(), kind="stable").astype(np.int32)
    offsets, y = np.cumsum(np.bincount(chosen.ravel(), minlength=experts)).astype(np.int32), np.zeros((tokens, 48), "f")
    gemmsmith.grouped_gemm(
        x, down, offsets=offsets, gather=order // top_k, scatter=order // top_k, out=y, out_dtype="fp32",
        deterministic=False, backend="sim",
    )  # fmt: skip
    want = np.einsum("th,tshn->tn", x.astype(float), down.astype(float)[chosen])
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_added_is_refused() -> None:
    rows, sizes = np.zeros(64, np.int32), np.array([30, 30], np.int32)
    a, b = np.ones((64, 128), np.int8), np.ones((2, 128, 128), np.int8).swapaxes(1, 2)
    out = np.zeros((80, 128), np.int32)
    options: dict[str, Any] = {"sizes": sizes, "scatter": rows, "deterministic": False, "backend": "sim"}
    with pytest.raises(ArgumentError, match="out: got int32 with scatter and deterministic=False, which adds rows"):
        gemmsmith.grouped_gemm(a, b, **options, out=out)
    a, b, q = a.astype(NUMPY["bf16"]), b.astype(NUMPY["bf16"]), np.zeros((80, 128), NUMPY["e4m3"])
    with pytest.raises(ArgumentError, match="out: got fp8_e4m3 with scatter"):
        gemmsmith.grouped_gemm(a, b, **options, out=(q, np.zeros((80, 1), "f")), epilogue=gemmsmith.quantize)
    with pytest.raises(ConfigError, match="out: got bf16 with deterministic=False for sm_80"):
        gemmsmith.grouped_gemm(a, b, **options, out=out.astype(NUMPY["bf16"]), config=SM80)
