"""Conversions between fp32 and 16-bit elements, in pairs as registers hold them. PTX ISA, "cvt"."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, LARGEST, TF32_BITS, DType
from gemmsmith.lang.builder import current
from gemmsmith.lang.instruction import Instruction, f32, u16, u32
from gemmsmith.lang.machine import Machine
from gemmsmith.lang.types import F32, U16, U32
from gemmsmith.lang.values import Constant, Value

_FP8 = {dtype.ptx: dtype for dtype in (E4M3, E5M2)}
"""The 8-bit floats by the names of their formats."""


def _pack(low: np.ndarray, high: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        pair = np.stack((low, high), axis=-1).astype(dtype)
    bits = np.where(np.isnan(pair), np.uint16(0x7FFF), pair.view(np.uint16))  # the canonical NaN
    return bits.view(np.uint32)[:, 0].astype(np.int64)


class PackBf16(Instruction):
    """Two fp32 rounded to nearest even, `low` in the low half."""

    low: f32
    high: f32
    result = U32
    pure = True
    ptx = "cvt.rn.bf16x2.f32 {result}, {high}, {low};"

    def simulate(self, m: Machine) -> np.ndarray:
        return _pack(m.column(self.low), m.column(self.high), ml_dtypes.bfloat16)


class PackFp16(Instruction):
    """Two fp32 rounded to nearest even, to fp16."""

    low: f32
    high: f32
    result = U32
    pure = True
    ptx = "cvt.rn.f16x2.f32 {result}, {high}, {low};"

    def simulate(self, m: Machine) -> np.ndarray:
        return _pack(m.column(self.low), m.column(self.high), np.float16)


class UnpackFp16(Instruction):
    """Half `half` (0 low, 1 high) of a packed pair of fp16, as fp32: exact."""

    pair: u32
    half: int
    result = F32
    pure = True

    def text(self) -> str:
        return f"""{{
        .reg .b16 h0, h1;
        mov.b32 {{h0, h1}}, {{pair}};
        cvt.f32.f16 {{result}}, h{self.half};
        }}"""

    def simulate(self, m: Machine) -> np.ndarray:
        pairs = m.column(self.pair).astype(np.uint32)
        return (pairs >> (16 * self.half)).astype(np.uint16).view(np.float16).astype(np.float32)


class AsUnsigned(Instruction):
    """The bits of an fp32."""

    value: f32
    result = U32
    pure = True
    cuda = "__float_as_uint({value})"

    def simulate(self, m: Machine) -> np.ndarray:
        return m.column(self.value).astype(np.float32).view(np.uint32).astype(np.int64)


class UnpackBf16(Instruction):
    """Half `half` (0 low, 1 high) of a packed pair of bf16, as fp32: exact."""

    pair: u32
    half: int
    result = F32
    pure = True

    def text(self) -> str:
        move = "shl.b32 bits, {pair}, 16;" if self.half == 0 else "and.b32 bits, {pair}, 0xffff0000;"
        return f"""{{
        .reg .b32 bits;
        {move}
        mov.b32 {{result}}, bits;
        }}"""

    def simulate(self, m: Machine) -> np.ndarray:
        pairs = m.column(self.pair).astype(np.uint32)
        bits = pairs << np.uint32(16) if self.half == 0 else pairs & np.uint32(0xFFFF0000)
        return bits.astype(np.uint32).view(np.float32)


class AsFloat(Instruction):
    """The fp32 with these bits."""

    bits: u32
    result = F32
    pure = True
    cuda = "__uint_as_float({bits})"

    def simulate(self, m: Machine) -> np.ndarray:
        return m.column(self.bits).astype(np.uint32).view(np.float32)


class RoundTf32(Instruction):
    """An fp32 rounded to the 19 bits of TF32, ties away from zero; tensor cores would truncate it. Of NaN an H200 keeps
    these bits, so that one with others alone becomes an infinity."""

    value: f32
    result = U32
    pure = True
    ptx = "cvt.rna.tf32.f32 {result}, {value};"

    def simulate(self, m: Machine) -> np.ndarray:
        value = m.column(self.value).astype(np.float32)
        half = np.where(np.isfinite(value), np.uint32(0x1000), np.uint32(0))
        return ((value.view(np.uint32) + half) & TF32_BITS).astype(np.int64)


def low_part(bits: Value) -> Value:
    """The bits of what is left of an fp32 element without those that tensor cores read: fp32 holds it."""
    return AsUnsigned.emit(AsFloat.emit(bits) - AsFloat.emit(bits & int(TF32_BITS)))


class PackFp8(Instruction):
    """Two fp32 rounded to fp8 (`format` e4m3 or e5m2), `low` in the low byte; beyond the range the largest finite."""

    architecture = "sm_89"
    low: f32
    high: f32
    format: str
    result = U16
    pure = True
    ptx = "cvt.rn.satfinite.{format}x2.f32 {result}, {high}, {low};"

    def simulate(self, m: Machine) -> np.ndarray:
        dtype = _FP8[self.format]
        limit = np.float32(LARGEST[dtype])
        pair = np.stack([m.column(self.low), m.column(self.high)], axis=-1).astype(np.float32)
        with np.errstate(invalid="ignore"):
            bits = np.clip(pair, -limit, limit).astype(dtype.numpy).view(np.uint8)
        bits = np.where(np.isnan(pair), np.uint8(0x7F), bits)  # the canonical NaN
        return np.ascontiguousarray(bits).view(np.uint16)[:, 0].astype(np.int64)


def unpack_ue8m0(byte: Value) -> Value:
    """The power of two whose exponent is a byte (in a u32), as fp32; cvt has it from compute capability 10.0 on."""
    k = current()
    number = k.select(byte == 255, Constant(U32, 0x7FC00000), byte << 23)
    return AsFloat.emit(k.select(byte == 0, Constant(U32, 0x00400000), number))  # 2^-127, which is subnormal


class PackInt8(Instruction):
    """Two fp32 rounded to integers of 8 bits, to nearest even, `low` in the low byte; saturated, and 0 for NaN."""

    low: f32
    high: f32
    result = U16
    pure = True
    ptx = """{
    .reg .b32 low, high, pair;
    cvt.rni.s32.f32 low, {low};
    cvt.rni.s32.f32 high, {high};
    cvt.pack.sat.s8.s32.b32 pair, high, low, 0;
    cvt.u16.u32 {result}, pair;
    }"""

    def simulate(self, m: Machine) -> np.ndarray:
        pair = np.stack([m.column(self.low), m.column(self.high)], axis=-1).astype(np.float32)
        numbers = np.clip(np.rint(np.nan_to_num(pair)), -128, 127).astype(np.int8)
        return np.ascontiguousarray(numbers).view(np.uint16)[:, 0].astype(np.int64)


class UnpackFp8(Instruction):
    """A packed pair of fp8 (`format` e4m3 or e5m2) as one of fp16: exact."""

    architecture = "sm_89"
    pair: u16
    format: str
    result = U32
    pure = True
    ptx = "cvt.rn.f16x2.{format}x2 {result}, {pair};"

    def simulate(self, m: Machine) -> np.ndarray:
        packed = np.ascontiguousarray(m.column(self.pair).astype(np.uint16)[:, None])
        pairs = packed.view(_FP8[self.format].numpy).astype(np.float16)
        bits = np.where(np.isnan(pairs), np.uint16(0x7FFF), pairs.view(np.uint16))  # the canonical NaN
        return np.ascontiguousarray(bits).view(np.uint32)[:, 0].astype(np.int64)


def unpack(pair: Value, half: int, dtype: DType) -> Value:
    """Half `half` (0 low, 1 high) of a pair of `dtype` (bf16 or fp16), as fp32."""
    return {BF16: UnpackBf16, FP16: UnpackFp16}[dtype].emit(pair, half)


def unpack_pair(pair: Value, dtype: DType) -> tuple[Value, Value]:
    """Both halves."""
    return unpack(pair, 0, dtype), unpack(pair, 1, dtype)


def pack(low: Value, high: Value, dtype: DType) -> Value:
    """Two fp32 values as a pair of `dtype` (bf16 or fp16) in a u32."""
    return {BF16: PackBf16, FP16: PackFp16}[dtype].emit(low, high)


def round_pair(low: Value, high: Value, dtype: DType) -> tuple[Value, Value]:
    """Two fp32 values rounded to `dtype`, as fp32; beyond the range of fp8 its largest value."""
    if dtype.bits == 8:
        return unpack_pair(UnpackFp8.emit(PackFp8.emit(low, high, dtype.ptx), dtype.ptx), FP16)
    return (low, high) if dtype == FP32 else unpack_pair(pack(low, high, dtype), dtype)
