"""mma_multistage compiled for every chip: no spills, the instructions that the chip has; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, ConfigError, Spec
from gemmsmith.backends.cuda.listing import build_listing
from gemmsmith.core.chip import CHIPS

A, B = Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))


def config(tile: tuple[int, int, int] = (128, 128, 32), chip: str = "sm_80", **changes: Any) -> Config:
    return Config("mma_multistage", tile, (1, 1), 3, 2, chip=chip).replace(**changes)


def fused(acc: Any, bias: Any, c: Any) -> Any:
    x = (acc + bias).relu() + c
    return x, x.sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip(chip: str) -> None:
    plan = gemmsmith.plan(A, B, config=config(chip=chip))
    given = {"bias": Spec((4096,), "fp32"), "c": Spec((4096, 4096), "bf16")}
    more = gemmsmith.plan(A, B, epilogue=fused, operands=given, config=config(chip=chip))
    ragged = gemmsmith.plan(Spec((999, 777), "bf16"), Spec((777, 555), "bf16"), config=config(chip=chip))
    for each in (plan, more, ragged):
        r = each.resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.advisories) == (0, 0, ())
        assert r.shared_bytes <= CHIPS[chip].max_shared_bytes_per_cta
    assert f".target {chip}" in plan.ptx.replace("sm_90a", "sm_90")
    for instruction in ("HMMA.16816.F32.BF16", "LDGSTS", "LDSM.16.M88.4"):
        assert instruction in plan.sass
    for hoppers in ("UTMASTG", "STSM"):
        assert (hoppers in plan.sass) == (chip not in ("sm_80", "sm_86", "sm_89"))


@pytest.mark.parametrize(("dtype", "k", "options", "instruction"), [
    ("fp16", 32, {"accumulate": "fp16"}, "HMMA.16816.F16"), ("fp32", 16, {"precision": "tf32"}, "HMMA.1688.F32.TF32"),
    ("int8", 64, {}, "IMMA.16832.S8.S8"), ("fp32", 16, {"precision": "3xtf32"}, "HMMA.1688.F32.TF32"),
])  # fmt: skip
def test_types(dtype: str, k: int, options: dict[str, str], instruction: str) -> None:
    """With the largest accumulators."""
    a, b = Spec((4096, 4096), dtype), Spec((4096, 4096), dtype, (1, 4096))
    tile = (128, 128, k) if options.get("precision") == "3xtf32" else (256, 192, k)
    plan = gemmsmith.plan(a, b, config=config(tile), **options)  # type: ignore[arg-type]
    r = plan.resources
    assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
    assert instruction in plan.sass


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_fp32_on_cuda_cores(chip: str) -> None:
    """8x16 results a thread, 6 loads from shared memory for 128 products."""
    a, b = Spec((4096, 4096), "fp32"), Spec((4096, 4096), "fp32", (1, 4096))
    plan = gemmsmith.plan(a, b, config=Config("sgemm", (256, 128, 8), (1, 1), 3, 2, chip=chip))
    r = plan.resources
    assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
    listing = build_listing(plan._planned.kernel, "sass")
    (loop,) = listing.mainloops
    count = listing.count(loop.unconditional)
    assert listing.count()["tensor"] == 0
    assert count["multiply-add"] == 8 * 128
    assert count["shared load"] == 8 * 6 + 3  # three of nothing, which ptxas puts before a burst of copies
    assert count.total() < 8 * 128 / 0.89


@pytest.mark.parametrize(("changes", "message"), [
    ({"evict": ("first", "normal")}, "evict: got .*; mma_multistage does not support L2 eviction policies"),
    ({"serpentine": True}, "serpentine: not supported by mma_multistage"),
    ({"sync_clusters": True}, "sync_clusters: got mma_multistage"),
    ({"alias_epilogue": True}, "alias_epilogue: got mma_multistage; it needs cooperative"),
    ({"consumers": 3}, "consumers: got 3; use 1, 2 or 4 with mma_multistage"),
    ({"tile": (256, 256, 32)}, "registers: the accumulator of 256x128 needs 256 per thread, 64 more than fit"),
])  # fmt: skip
def test_what_it_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gemmsmith.plan(A, B, config=config().replace(**changes))._planned.kernel  # noqa: B018


def test_what_3xtf32_refuses() -> None:
    a = Spec((64, 64), "fp32")
    with pytest.raises(ConfigError, match='tile K: got 32 with precision="3xtf32"; use 16'):
        gemmsmith.plan(a, a, precision="3xtf32", config=config())
    with pytest.raises(
        ConfigError, match="registers: the accumulators of 256x64 need 256 per thread, 128 more than fit"
    ):
        gemmsmith.plan(a, a, precision="3xtf32", config=config((256, 128, 16)))
