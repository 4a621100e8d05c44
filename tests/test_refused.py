"""What a chip, or a dtype, does not have is refused before anything is compiled, by one error that says what works."""

from __future__ import annotations

from typing import Any

import pytest

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, DeviceError, GemmsmithError, Spec
from gemmsmith.arrays import ArrayInfo
from gemmsmith.backends.cuda import driver
from gemmsmith.core.dtypes import BF16
from gemmsmith.host import plans


def multistage(**changes: Any) -> dict[str, Config]:
    return {"config": Config("mma_multistage", (128, 128, 32), (1, 1), 3, 2, chip="sm_80").replace(**changes)}


def hoppers(design: str, chip: str) -> dict[str, Config]:
    return {"config": Config(design, chip=chip)}


def in_fp8(acc: Any) -> Any:
    return gemmsmith.quantize(acc, "1x128")


CASES: list[tuple[str, str | None, dict[str, Any], type[GemmsmithError], str]] = [
    # fp16 sums
    ("bf16", None, {"accumulate": "fp16"}, ArgumentError,
     "accumulate: got 'fp16' for operands of bf16; use fp32"),
    ("fp32", None, {"accumulate": "fp16"}, ArgumentError,
     "accumulate: got 'fp16' for operands of fp32; use fp32"),
    ("fp32", None, {"accumulate": "fp16", "precision": "tf32"}, ArgumentError,
     "accumulate: got 'fp16' for operands of fp32; use fp32"),
    ("int8", None, {"accumulate": "fp16"}, ArgumentError,
     "accumulate: got 'fp16' for operands of int8; use int32"),
    # mixed operands
    ("bf16", "fp16", {}, ArgumentError, "b: got dtype fp16 with a of bf16; use the same for both"),
    ("fp32", "bf16", {"precision": "tf32"}, ArgumentError, "b: got dtype bf16 with a of fp32; use the same for both"),
    ("int8", "fp32", {}, ArgumentError, "b: got dtype fp32 with a of int8; use the same for both"),
    # a precision
    *((dtype, None, {"precision": precision}, ArgumentError,
       f"precision: got '{precision}' for operands of {dtype}; it is for fp32 operands")
      for dtype, precision in (("bf16", "tf32"), ("fp16", "3xtf32"), ("int8", "tf32"))),
    ("fp32", None, {"precision": "fp32"}, ArgumentError,
     "precision: got 'fp32'; use 'tf32' or '3xtf32', or None for fp32"),
    # what a chip does not have
    ("bf16", None, multistage(cluster=(2, 1)), ConfigError,
     r"cluster: got \(2, 1\); mma_multistage does not support clusters, use 1x1"),
    ("bf16", None, multistage(cluster_splits=2), ConfigError,
     "cluster_splits: got 2; mma_multistage does not support split-K, use 1, or cooperative"),
    ("bf16", None, hoppers("tma", "sm_86"), ConfigError,
     "design: got tma for sm_86; use mma_multistage or sgemm"),
    ("bf16", None, hoppers("cooperative", "sm_100"), ConfigError,
     "design: got cooperative for sm_100; use mma_multistage or sgemm"),
    ("bf16", None, multistage(pdl=True), ConfigError,
     "pdl: got sm_80, which does not support programmatic dependent launch; use False"),
    ("bf16", None, multistage(stages=12), ConfigError,
     "shared memory: .* exceed the 166912 available per CTA by 33792; use"),
    *(("bf16", None, multistage(stages=6, chip=chip), ConfigError,
       "shared memory: .* exceed the 101376 available per CTA by 1024; use fewer stages or a smaller tile")
      for chip in ("sm_86", "sm_89", "sm_120")),
    ("bf16", None, {"epilogue": lambda acc: acc.relu(), "out_dtype": "fp8_e4m3", **multistage()}, ConfigError,
     "out: got fp8_e4m3 for sm_80, which cannot convert it; use sm_89 or later"),
    ("bf16", None, {"epilogue": in_fp8, **multistage(chip="sm_86")}, ConfigError,
     "out: got fp8_e4m3 for sm_86, which cannot convert it; use sm_89 or later"),
    ("bf16", None, {"epilogue": lambda acc: acc.to("fp8_e5m2") * 2, **multistage(chip="sm_86")}, ConfigError,
     "cast: got fp8_e5m2 for sm_86, which cannot convert it; use sm_89 or later"),
    ("fp8_e4m3", None, multistage(chip="sm_89"), ConfigError,
     "mma: got fp8_e4m3 x fp8_e4m3 .*; it supports f32.bf16.bf16"),
    # rows that do not fit a swizzle
    ("bf16", None, multistage(tile=(128, 128, 16)), ConfigError,
     "tile K: got 16 of bf16; mma_multistage needs a multiple of 32"),
    ("bf16", None, multistage(tile=(128, 128, 48)), ConfigError,
     "tile K: got 48; use rows of 32, 64, or a multiple of 128 bytes up to 512"),
    ("bf16", None, multistage(tile=(128, 128, 96)), ConfigError,
     "tile K: got 96 with operands of bf16; use 16, 32, or a multiple of 64 up to 256"),
    ("bf16", None, multistage(tile=(128, 48, 32)), ConfigError,
     "tile N: got 48; f32.bf16.bf16 supports a multiple of 16 from 16 to 256 for each of 2 warpgroups"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "options", "error", "message"), CASES)
def test_what_is_refused(a: str, b: str | None, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemmsmith.plan(Spec((256, 256), a), Spec((256, 256), b or a), **options).kernel  # noqa: B018


def test_chips_that_are_not_known() -> None:
    with pytest.raises(ConfigError, match="chip: got 'sm_75'; use one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"):
        Config(chip="sm_75")


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_gpus_before_8_0(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "is_available", lambda: True)
    monkeypatch.setattr(
        driver, "device_attributes", lambda _: driver.DeviceAttributes("Tesla T4", capability, 40, 64 * 1024)
    )
    here = ArrayInfo(BF16, (8, 8), (8, 1), 0, "cuda", 0, True)
    message = "device 0 is a Tesla T4 of compute capability 7..; use a GPU of 8.0 or later"
    with pytest.raises(DeviceError, match=message):
        plans.chip_of(here)
