"""Conversions: their PTX, and each format of the packed ones against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.hw.one import Forms, computed, ptx

from gemmsmith import hw
from gemmsmith.core.dtypes import BF16, FP16, DType
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, U32

FP8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def pair(k: Builder):
    return k.lane.to(F32), k.warp_index.to(F32)


FORMS: Forms = {
    # PTX takes the high element first.
    "cvt.rn.bf16x2.f32 %0, %2, %1;": lambda k: hw.pack(*pair(k), BF16),
    "cvt.rn.f16x2.f32 %0, %2, %1;": lambda k: hw.pack(*pair(k), FP16),
    "cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;": lambda k: hw.pack_fp8(*pair(k), "e4m3"),
    "cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;": lambda k: hw.pack_fp8(*pair(k), "e5m2"),
    "{ .reg .b16 h0, h1; mov.b32 {h0, h1}, %1; cvt.f32.f16 %0, h0; }": lambda k: hw.unpack(k.smem, 0, FP16),
    "{ .reg .b16 h0, h1; mov.b32 {h0, h1}, %1; cvt.f32.f16 %0, h1; }": lambda k: hw.unpack(k.smem, 1, FP16),
    "{ .reg .b32 bits; shl.b32 bits, %1, 16; mov.b32 %0, bits; }": lambda k: hw.unpack(k.smem, 0, BF16),
    "{ .reg .b32 bits; and.b32 bits, %1, 0xffff0000; mov.b32 %0, bits; }": lambda k: hw.unpack(k.smem, 1, BF16),
}


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


def test_bits_are_reinterpreted_by_cudas_functions() -> None:
    with Builder("k", threads=32) as k:
        with k.when(hw.as_unsigned(hw.as_float(k.smem) * 2.0) == 0):
            hw.sync_warp()
        source = k.finish().source
    assert "__uint_as_float(smem)" in source
    assert "__float_as_uint(" in source


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_pairs_go_there_and_back(dtype: DType, rng: np.random.Generator) -> None:
    low, high = (rng.standard_normal(128).astype(np.float32) for _ in range(2))
    halves = np.stack([low, high], 1).astype(dtype.numpy)
    packed = computed(lambda a, b: hw.pack(a, b, dtype), low, high)
    np.testing.assert_array_equal(packed, halves.view(np.uint32)[:, 0])
    for half in range(2):
        found = computed(lambda p, half=half: hw.unpack(p, half, dtype), packed)
        np.testing.assert_array_equal(found, halves[:, half].astype(np.float32))


@pytest.mark.parametrize("format", FP8)
def test_fp8_is_rounded_and_held_within_its_range(format: str, rng: np.random.Generator) -> None:
    dtype, limit = FP8[format]
    low, high = (rng.standard_normal(128).astype(np.float32) * np.exp2(rng.integers(-12, 18, 128)) for _ in range(2))
    low[:4], high[:4] = [np.inf, -np.inf, limit * 1.01, -0.0], [1e30, -1e30, -limit, 0]
    found = computed(lambda a, b: hw.pack_fp8(a, b, format), low.astype(np.float32), high.astype(np.float32))
    want = np.stack([low, high], 1).astype(np.float32).clip(-limit, limit).astype(dtype)
    np.testing.assert_array_equal(found, want.view(np.uint16)[:, 0])
    assert found.max() < 1 << 16


@pytest.mark.parametrize("format", FP8)
def test_nan_is_the_canonical_one(format: str) -> None:
    nan, one = np.array([np.nan, -np.nan], np.float32), np.ones(2, np.float32)
    assert set(computed(lambda a, b: hw.pack_fp8(a, b, format), nan, one) & 0xFF) == {0x7F}
    assert set(computed(lambda a, b: hw.pack(a, b, BF16), nan, one) & 0xFFFF) == {0x7FFF}


def test_bits_of_fp32(rng: np.random.Generator) -> None:
    x = rng.integers(0, 1 << 32, 128, np.uint32)
    x[np.isnan(x.view(np.float32))] = 0x3F800000
    np.testing.assert_array_equal(computed(hw.as_float, x).view(np.uint32), x)
    np.testing.assert_array_equal(computed(hw.as_unsigned, x.view(np.float32)), x)
    np.testing.assert_array_equal(computed(lambda v: hw.as_unsigned(v).to(U32), x.view(np.float32)), x)
