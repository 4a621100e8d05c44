"""Conversions between fp32 and narrower types, in packed pairs. PTX ISA, "cvt"."""

from __future__ import annotations

import numpy as np

from gemmsmith.core.dtypes import E4M3, E5M2, FP16, FP32, INT8, MAX_FINITE, TF32_BITS, DType
from gemmsmith.hw.arithmetic import Array, Elementwise
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.instruction import f32, u16, u32
from gemmsmith.lang.types import U16, U32
from gemmsmith.lang.values import Constant, Value

_FP8 = {dtype.ptx: dtype for dtype in (E4M3, E5M2)}
"""The fp8 dtypes by the PTX names of their formats."""


class Pack(Elementwise):
    """Rounds two fp32 to nearest even to `dtype` (bf16 or fp16), and packs them, `low` in the low half."""

    low: f32
    high: f32
    dtype: DType
    result = U32
    ptx = "cvt.rn.{dtype.ptx}x2.f32 {result}, {high}, {low};"

    def compute(self, low: Array, high: Array) -> Array:
        """Return the pairs' bits. Every NaN becomes the canonical one, as on hardware."""
        with np.errstate(over="ignore", invalid="ignore"):
            pair = np.stack([low, high], axis=-1).astype(self.dtype.numpy)
        bits = pair.view(np.uint16)
        bits[np.isnan(pair)] = 0x7FFF  # the canonical NaN
        return bits.view(np.uint32)[:, 0].astype(np.int64)


class Unpack(Elementwise):
    """Converts one half of a packed `pair` of `dtype` (bf16 or fp16) to fp32, exactly.

    `half`: 0 is the low one, 1 the high.
    """

    pair: u32
    half: int
    dtype: DType
    wrapper = "unpack_{dtype}_{half}"

    def text(self) -> str:
        """Return the PTX. A bf16 becomes fp32 by 16 zero bits below it; fp16 is converted by cvt."""
        if self.dtype == FP16:
            return f"""{{
            .reg .b16 h0, h1;
            mov.b32 {{h0, h1}}, {{pair}};
            cvt.f32.f16 {{result}}, h{self.half};
            }}"""
        move = "shl.b32 bits, {pair}, 16;" if self.half == 0 else "and.b32 bits, {pair}, 0xffff0000;"
        return f"""{{
        .reg .b32 bits;
        {move}
        mov.b32 {{result}}, bits;
        }}"""

    def compute(self, pair: Array) -> Array:
        halves = np.ascontiguousarray(pair.astype(np.uint32)).view(self.dtype.numpy)
        return halves[self.half :: 2].astype(np.float32)


class AsUnsigned(Elementwise):
    """__float_as_uint: the bit pattern of an fp32."""

    value: f32
    result = U32
    cuda = "__float_as_uint({value})"

    def compute(self, value: Array) -> Array:
        return value.view(np.uint32).astype(np.int64)


class AsFloat(Elementwise):
    """__uint_as_float: the fp32 with a bit pattern."""

    bits: u32
    cuda = "__uint_as_float({bits})"

    def compute(self, bits: Array) -> Array:
        return bits.astype(np.uint32).view(np.float32)


def tf32_residual(bits: Value) -> Value:
    """Return the bits of x - tf32(x), the part of an fp32 x that truncation to TF32 drops; the difference is exact.

    `bits`: the bits of x (u32). CUTLASS's 3xTF32 calls the residual "small".
    """
    return AsUnsigned(AsFloat(bits).issue() - AsFloat(bits & int(TF32_BITS)).issue()).issue()


class PackFp8(Elementwise):
    """Rounds two fp32 to fp8 (`format` e4m3 or e5m2), saturating, and packs them, `low` in the low byte."""

    required_arch = "sm_89"
    low: f32
    high: f32
    format: str
    result = U16
    ptx = "cvt.rn.satfinite.{format}x2.f32 {result}, {high}, {low};"

    def compute(self, low: Array, high: Array) -> Array:
        return _pack_8_bits(low, high, _FP8[self.format])


def unpack_ue8m0(byte: Value) -> Value:
    """Convert a ue8m0 scale to fp32. `byte`: a u32 that holds the scale 2^(byte - 127).

    cvt supports ue8m0 only from sm_100 on.
    """
    k = current_builder()
    # The byte is the exponent field of fp32, but for 255, which is NaN, and 0.
    bits = k.select(byte == 255, Constant(U32, 0x7FC00000), byte << 23)
    return AsFloat(k.select(byte == 0, Constant(U32, 0x00400000), bits)).issue()  # 2^-127 is subnormal


class PackInt8(Elementwise):
    """Rounds two fp32 to nearest even to int8, saturating (NaN becomes 0), and packs them, `low` in the low byte."""

    low: f32
    high: f32
    result = U16
    ptx = """{
    .reg .b32 low, high, pair;
    cvt.rni.s32.f32 low, {low};
    cvt.rni.s32.f32 high, {high};
    cvt.pack.sat.s8.s32.b32 pair, high, low, 0;
    cvt.u16.u32 {result}, pair;
    }"""

    def compute(self, low: Array, high: Array) -> Array:
        return _pack_8_bits(low, high, INT8)


def round_to_8_bits(x: Array, dtype: DType) -> Array:
    """Return fp32 rounded to `dtype`, fp8 or int8: to nearest even, saturating.

    Every NaN has the same bits in fp8, and is 0 in int8.
    """
    if dtype == INT8:
        return np.asarray(np.rint(np.clip(np.nan_to_num(x), -128, 127)), np.int8)
    limit = np.float32(MAX_FINITE[dtype])
    with np.errstate(invalid="ignore"):
        bits = np.clip(x, -limit, limit).astype(dtype.numpy).view(np.uint8)
    rounded: Array = np.where(np.isnan(x), np.uint8(0x7F), bits).view(dtype.numpy)
    return rounded


def _pack_8_bits(low: Array, high: Array, dtype: DType) -> Array:
    """Return two fp32 of each thread, rounded to `dtype`, as the low and the high byte of 16 bits."""
    pair = np.ascontiguousarray(round_to_8_bits(np.stack([low, high], axis=-1), dtype))
    return pair.view(np.uint16)[:, 0].astype(np.int64)


class UnpackFp8(Elementwise):
    """Converts a packed fp8 pair (`format` e4m3 or e5m2) to a packed fp16 pair, exactly."""

    required_arch = "sm_89"
    pair: u16
    format: str
    result = U32
    ptx = "cvt.rn.f16x2.{format}x2 {result}, {pair};"

    def compute(self, pair: Array) -> Array:
        """Return the pairs' bits as fp16. Every NaN becomes the canonical one, as on hardware."""
        packed = np.ascontiguousarray(pair.astype(np.uint16)[:, None])
        pairs = packed.view(_FP8[self.format].numpy).astype(np.float16)
        bits = np.where(np.isnan(pairs), np.uint16(0x7FFF), pairs.view(np.uint16))  # the canonical NaN
        return np.ascontiguousarray(bits).view(np.uint32)[:, 0].astype(np.int64)


def unpack_pair(pair: Value, dtype: DType) -> tuple[Value, Value]:
    """Convert both halves of a packed pair of `dtype` (bf16 or fp16) to fp32."""
    return Unpack(pair, 0, dtype).issue(), Unpack(pair, 1, dtype).issue()


def round_pair(low: Value, high: Value, dtype: DType) -> tuple[Value, Value]:
    """Round two fp32 values to `dtype` and return them as fp32. fp8 saturates to its largest finite value."""
    if dtype.bits == 8:
        return unpack_pair(UnpackFp8(PackFp8(low, high, dtype.ptx).issue(), dtype.ptx).issue(), FP16)
    return (low, high) if dtype == FP32 else unpack_pair(Pack(low, high, dtype).issue(), dtype)
