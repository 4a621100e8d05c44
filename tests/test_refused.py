"""What a chip, or a dtype, does not have is refused before anything is compiled, by one error that says what works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, DeviceError, GemmsmithError, Spec
from gemmsmith.arrays import ArrayInfo
from gemmsmith.backends.cuda import driver
from gemmsmith.backends.sim import Hazard
from gemmsmith.core.dtypes import BF16, E4M3
from gemmsmith.host import planned_gemm
from gemmsmith.lang.location import SourceLocation


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
     "design: got tma for sm_86; use mma_multistage"),
    ("bf16", None, hoppers("cooperative", "sm_100"), ConfigError,
     "design: got cooperative for sm_100; use mma_multistage"),
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
     "design: got mma_multistage for operands of fp8_e4m3 accumulated in fp32; use the design .* on sm_90a$"),
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
        gemmsmith.plan(Spec((256, 256), a), Spec((256, 256), b or a), **options)._planned.kernel  # noqa: B018


A, B = np.ones((16, 32), np.float16), np.ones((32, 24), np.float16)
ARRAY = np.ones(3, np.float32)
WRONG_TYPES: list[tuple[Callable[[], Any], str]] = [
    *((lambda seed=seed: gemmsmith.simulate(A, B, seed=seed), "seed: got .*; use an integer")
      for seed in ("x", 1.5, None, True, [1], ARRAY)),
    (lambda: gemmsmith.plan(A, B).simulate(A, B, seed="x"), "seed: got 'x'; use an integer"),
    (lambda: gemmsmith.plan(A, B).simulate(A, B, counters=3), r"counters: got 3; use .*Counters\(\)"),
    (lambda: gemmsmith.plan(A, B).simulate(A, B, progress=3), "progress: got 3; use a function"),
    *((lambda call=call: call(gemmsmith.plan(A, B))(A, B, workspace="x"), "workspace: got str; use an array on the GPU")
      for call in (lambda plan: plan.run, lambda plan: plan.prepare)),
    *((lambda text=text: Config.parse(text), "text: got .*; use that of a Config, such as 'cooperative 128x256x64")
      for text in (None, 3, b"cooperative", "cooperative", ARRAY)),
    (lambda: gemmsmith.Plan("x"), r"planned: got str; use gemmsmith.plan\(a, b\)"),
    (lambda: Spec((3, 3), "bf16", 3), "Spec.strides: got 3; use 2 integers, in elements"),
    *((lambda name=name, x=x: gemmsmith.gemm(A, B, **{name: x}), f"{name}: got ")
      for name in ("out_dtype", "accumulate", "backend", "scale_a", "out", "config", "operands", "precision")
      for x in (ARRAY, "x", np.str_("x"), 1j)
      if (name, type(x)) != ("scale_a", np.ndarray)),
    (lambda: gemmsmith.gemm(A, B, epilogue=ARRAY), "epilogue: got ndarray; use a function"),
    (lambda: gemmsmith.plan(A, B, grouping=""), "grouping: got str; use gemmsmith.Grouping"),
    *((lambda name=name: gemmsmith.quantize(np.ones((16, 128), np.float32), **{name: ARRAY}), f"{name}: got ")
      for name in ("recipe", "dtype", "scale_dtype", "scale_order", "scale_padding", "backend")),
    (lambda: gemmsmith.tune(Spec((16, 32), "bf16"), Spec((32, 24), "bf16"), max_configs="x"), "max_configs: got 'x'"),
    (lambda: gemmsmith.tune(Spec((16, 32), "bf16"), Spec((32, 24), "bf16"), max_configs=0), "max_configs: got 0"),
    (lambda: gemmsmith.tune(Spec((16, 32), "bf16"), Spec((32, 24), "bf16"), on_progress=3), "on_progress: got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG_TYPES)
def test_arguments_of_wrong_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(GemmsmithError, match=message):
        call()


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
        planned_gemm.chip_of(here)


def bf16(*shape: int) -> np.ndarray:
    return np.ones(shape, BF16.numpy)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gemmsmith.plan(bf16(8, 16), bf16(16, 8)).run(*[np.ones(x, np.float16) for x in ((8, 16), (16, 8))]),
         "a, b: got fp16 and fp16, this plan multiplies bf16 and bf16; make a plan from arrays like these"),
        (lambda: gemmsmith.plan(bf16(8, 16), bf16(16, 8)).run(*[np.ones(x, E4M3.numpy) for x in ((8, 16), (16, 8))]),
         "a, b: got fp8_e4m3 and fp8_e4m3, this plan multiplies bf16 and bf16; make a plan from arrays like these"),
        (lambda: gemmsmith.gemm(np.ones((8, 8), np.uint8), np.ones((8, 8), np.uint8)),
         "a: got dtype uint8, or ue8m0, which are scales; operands are bf16, fp16"),
        (lambda: gemmsmith.simulate(Spec((8, 16), "bf16"), Spec((16, 8), "bf16")),
         "a: got a Spec, which has no data; use an array"),
        (lambda: gemmsmith.gemm(bf16(8, 16), bf16(16, 8), epilogue=lambda acc, x: acc + x, x=np.ones(8)),
         r"x: got dtype float64; use fp32, bf16 or fp16, such as x.astype\(numpy.float32\)$"),
        (lambda: gemmsmith.gemm(bf16(8, 16), bf16(16, 8), epilogue=lambda acc, x: acc + x, x=np.ones(8, np.int16)),
         "x: got dtype int16; use one of bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8 .*may also be int32"),
        (lambda: Spec((8, 8), "float64"),
         "Spec.dtype: got 'float64'; use one of bf16, fp16, fp32, fp8_e4m3, fp8_e5m2$"),
        (lambda: gemmsmith.gemm(bf16(8, 16), bf16(16, 8), epilogue=lambda acc, x: acc + x, x=np.ones(8, np.uint8)),
         "x: got dtype uint8, or ue8m0, which are scales; operands are fp32, fp16, bf16, int32, int64 or bool"),
        (lambda: gemmsmith.quantize(bf16(8, 128), dtype="fp4"),
         "dtype: got 'fp4'; use one of fp8_e4m3, fp8_e5m2, int8$"),
        (lambda: gemmsmith.gemm(bf16(64, 128), bf16(128, 8), scale_a=np.ones(64, np.float32)),
         r"scale_a: got shape \(64,\); for a of shape \(64, 128\) use one of \(\), \(1, 1\), \(64, 1\)$"),
    ],
)  # fmt: skip
def test_messages_name_what_would_work(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("record", [False, True])
def test_representations_fit_a_screen(record: bool) -> None:
    """Of a plan, and of a simulation with and without hazards."""
    a, b = bf16(256, 512), bf16(512, 512)
    plan = gemmsmith.plan(a, b, epilogue=lambda acc, bias, s: acc * s + bias, bias=bf16(512), s=2.0)
    lines = repr(plan).splitlines()
    assert lines[0] == "Plan of 256x512x512 bf16 -> bf16"
    assert f"config     {plan.config}" in lines
    assert "operands   bias, s" in lines
    simulation = plan.simulate(a, b, bias=bf16(512), s=2.0, record=record)
    assert "hazards  none" in repr(simulation).splitlines()
    hazard = Hazard("race", "message\nsecond line", SourceLocation("a.py", 3))
    text = repr(replace(simulation, hazards=[hazard] * 40))
    assert "hazards  40, the first:" in text
    assert len(text.splitlines()) <= 20
    assert max(map(len, text.splitlines())) <= 200


OF_FLOAT64: list[Callable[[Any], Any]] = [
    lambda x: gemmsmith.gemm(x, bf16(8, 8)), lambda x: gemmsmith.gemm(bf16(8, 8), x),
    lambda x: gemmsmith.plan(x, x), lambda x: gemmsmith.simulate(x, x),
    lambda x: gemmsmith.gemm(bf16(8, 8), bf16(8, 8), out=x), lambda x: gemmsmith.pack(x), gemmsmith.quantize,
    lambda x: gemmsmith.gemm(bf16(8, 8), bf16(8, 8), scale_a=x),
    lambda x: gemmsmith.grouped_gemm(x, bf16(1, 8, 8), sizes=np.array([8], np.int32)),
]  # fmt: skip


@pytest.mark.parametrize("call", OF_FLOAT64)
def test_float64_is_offered_narrower_floats(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ArgumentError, match=r"got dtype float64; use fp32, bf16 or fp16, such as x\.astype"):
        call(np.ones((8, 8)))


@pytest.mark.torch
@pytest.mark.parametrize("call", OF_FLOAT64)
def test_float64_of_torch_is_offered_narrower_floats(call: Callable[[Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match=r"of torch.float64; use one of .*torch.float32, such as x\.float\(\)$"):
        call(torch.ones(8, 8, dtype=torch.float64))
