"""The accumulator of one math warpgroup: issue and wait of its instructions, promotion, and its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gemmsmith import hw
from gemmsmith.core.dtypes import FP16, FP32, INT32, DType
from gemmsmith.core.mma import Mma
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import F32, I32, PRED, U32
from gemmsmith.lang.values import Registers, Value, ValueLike, as_value

Index = int | Value
"""Known at build time, or the index of an unrolled loop."""
Factor = Value | None
"""What a sum is multiplied by; None: by nothing."""
Factors = tuple[int, int, Callable[[Index, int], tuple[Factor, Factor]]]
"""The first of some chunks of 8 columns, how many they are, and by (chunk, half) what a thread's two elements are
multiplied by."""
_REGISTERS = {FP32: F32, FP16: U32, INT32: I32}
"""What holds an accumulator's elements; fp16 ones lie in pairs."""


class Accumulator:
    """rows x n of fp32, int32 or fp16, a row of registers for the rows of each instruction; which element a register
    holds is said in core/mma.py."""

    def __init__(self, mma: Mma, rows: int, n: int, name: str = "accumulator") -> None:
        k = current()
        self.mma, self.n, self.dtype = mma, n, mma.d
        type, count = _REGISTERS[mma.d], mma.registers(n)
        self.blocks = k.register_rows(type, rows // mma.m, count, name)

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
        m, majors = self.mma.m, (a.tile.major, b.tile.major)
        with current().unroll(b.tile.k // self.mma.k, name="k_step") as step:
            keep = (as_value(accumulate, PRED) | (step > 0)).named("accumulate")
            b_step = hw.descriptor(b, step).named("b_descriptor")
            for i, block in enumerate(self.blocks):
                a_step = hw.descriptor(a.rows(i * m, m), step).named("a_descriptor")
                hw.wgmma_mma(block, a_step, b_step, keep, self.n, self.mma, *majors)
        hw.wgmma_commit()

    def wait(self, pending: int) -> None:
        """Until at most `pending` groups run; with 0 the registers may be read."""
        if pending == 0:
            self.finish()
        else:
            hw.wgmma_wait(pending)

    def finish(self, behind: int = 0) -> None:
        """Until its last group is done, though `behind` later ones of other accumulators may run: the registers may be
        read."""
        hw.wgmma_wait(behind)
        for block in self.blocks:
            hw.compiler_fence(block)

    def promote(self, into: Registers, offset: int, factors: Iterable[Factors]) -> None:
        """Adds its elements, each times its factor, to fp32 registers from `offset` on; it has one block."""
        for first, chunks, of_chunk in factors:
            with current().unroll(first, first + chunks, name="chunk") as chunk:
                for half in range(2):
                    pair = chunk * 2 + half
                    for second, factor in enumerate(of_chunk(chunk, half)):
                        i, element = pair * 2 + (offset + second), self.element(0, pair, second)
                        into[i] = into[i] + element if factor is None else hw.fma(element, factor, into[i])

    def move(self, total: Accumulator) -> None:
        """Adds its elements to another's, and clears it."""
        with current().unroll(len(self.blocks), name="block") as block, current().unroll(self.blocks.count) as i:
            sums = self.blocks[block]
            self.add(total.blocks[block], i, sums[i])
            sums[i] = 0

    def add(self, block: Registers, index: Index, other: Value) -> None:
        """Adds another accumulator's register to that of a block."""
        if self.dtype == FP16:
            (low, high), (other_low, other_high) = hw.unpack_pair(block[index], FP16), hw.unpack_pair(other, FP16)
            block[index] = hw.pack(low + other_low, high + other_high, FP16)
        elif self.dtype == INT32:  # modulo 2^32
            block[index] = (block[index].to(U32) + other.to(U32)).to(I32)
        else:
            block[index] = block[index] + other

    def pair(self, block: ValueLike, index: Index, output: DType) -> Value:
        """Elements 2 * index and 2 * index + 1 of a block, rounded to `output` (16 bits) and packed."""
        registers = self.blocks[block]
        if self.dtype == FP16:
            return registers[index] if output == FP16 else hw.pack(*hw.unpack_pair(registers[index], FP16), output)
        return hw.pack(self.element(block, index, 0), self.element(block, index, 1), output)

    def integers(self, block: ValueLike, index: Index) -> tuple[Value, Value]:
        """Elements 2 * index and 2 * index + 1 of a block of int32."""
        registers = self.blocks[block]
        return registers[2 * index], registers[2 * index + 1]

    def element(self, block: ValueLike, index: Index, second: int) -> Value:
        """Element 2 * index + second of a block, as fp32."""
        registers = self.blocks[block]
        if self.dtype == FP16:
            return hw.unpack_fp16(registers[index], second)
        return registers[2 * index + second].to(F32)
