"""The accumulator of one math warpgroup: wgmma issue and wait, and which element each register holds."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.dtypes import BF16, FP16, DType
from gemmsmith.hw.wgmma import K
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import F32, PRED, U32
from gemmsmith.lang.values import Registers, Value, ValueLike, as_value

Index = int | Value
"""Known at build time, or the index of an unrolled loop."""
BLOCK = 64
"""Rows of one wgmma."""


class Accumulator:
    """rows x n of fp32 (or packed fp16 pairs), a row of registers for every 64 rows.

    Element i of thread t lies in row 16 * (t / 32) + (t % 32) / 4 + 8 * (i / 2 % 2) and column
    8 * (i / 4) + 2 * (t % 4) + i % 2 (PTX ISA, register fragments of wgmma).
    """

    def __init__(self, rows: int, n: int, operand: DType, accumulate: DType) -> None:
        k = current()
        self.n, self.accumulate = n, accumulate
        self.mma = {"n": n, "dtype": {BF16: "bf16", FP16: "f16"}[operand], "accumulator": "f32"}
        if accumulate == FP16:
            self.mma["accumulator"] = "f16"
        type, count = (U32, n // 4) if accumulate == FP16 else (F32, n // 2)
        self.blocks = k.register_rows(type, rows // BLOCK, count, "accumulator")

    def clear(self) -> None:
        """All zeros."""
        k = current()
        with k.unroll(len(self.blocks), name="block") as block, k.unroll(self.blocks.count) as i:
            self.blocks[block][i] = 0

    def multiply(self, a: SharedView, b: SharedView, accumulate: ValueLike) -> None:
        """Issues acc = a @ b^T (+ acc) over the tile's whole depth as one group, and returns while it runs."""
        assert a.tile is not None
        assert b.tile is not None
        hw.wgmma_fence()
        with current().unroll(b.tile.k // K, name="k_step") as step:
            keep = (as_value(accumulate, PRED) | (step > 0)).named("accumulate")
            b_step = hw.descriptor(b, step).named("b_descriptor")
            for i, block in enumerate(self.blocks):
                a_step = hw.descriptor(a.rows(i * BLOCK, BLOCK), step).named("a_descriptor")
                hw.wgmma_mma(block, a_step, b_step, keep, **self.mma, a_major=a.tile.major, b_major=b.tile.major)
        hw.wgmma_commit()

    def wait(self, pending: int) -> None:
        """Until at most `pending` groups run; with 0 the registers may be read."""
        hw.wgmma_wait(pending)
        if pending == 0:
            for block in self.blocks:
                hw.compiler_fence(block)

    def add(self, block: Registers, index: Index, other: Value) -> None:
        """Adds another accumulator's register to that of a block."""
        if self.accumulate == FP16:
            (low, high), (other_low, other_high) = self._unpacked(block[index]), self._unpacked(other)
            block[index] = hw.pack(low + other_low, high + other_high, FP16)
        else:
            block[index] = block[index] + other

    def pair(self, block: ValueLike, index: Index, output: DType) -> Value:
        """Elements 2 * index and 2 * index + 1 of a block, rounded to `output` (16 bits) and packed."""
        registers = self.blocks[block]
        if self.accumulate == FP16:
            return registers[index] if output == FP16 else hw.pack(*self._unpacked(registers[index]), output)
        return hw.pack(registers[2 * index], registers[2 * index + 1], output)

    def element(self, block: ValueLike, index: Index, second: int) -> Value:
        """Element 2 * index + second of a block, as fp32."""
        registers = self.blocks[block]
        if self.accumulate == FP16:
            return hw.unpack_fp16(registers[index], second)
        return registers[2 * index + second]

    @staticmethod
    def _unpacked(pair: Value) -> tuple[Value, Value]:
        return hw.unpack_fp16(pair, 0), hw.unpack_fp16(pair, 1)
