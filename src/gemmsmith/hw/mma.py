"""mma.sync: a warp multiplies fragments in registers. PTX ISA, "Matrix fragments for mma.m16n8k16" and its siblings.

In units of 32-bit words the fragment layout is the same for all types (8 words per row), so ldmatrix loads A and B of
any type.
"""

from __future__ import annotations

import numpy as np

from gemmsmith.core.dtypes import FP16, TF32, TF32_BITS, DType
from gemmsmith.core.errors import KernelError
from gemmsmith.core.mma import A_FRAGMENT, B_FRAGMENT, D_FRAGMENT, MMA_SYNC, Mma
from gemmsmith.hw.fused_sum import fused_mma
from gemmsmith.lang.instruction import Instruction, registers_in, registers_inout
from gemmsmith.machine import Machine

M = 16
"""Rows of A and of D."""
N = 8
"""Columns of B and of D."""
WORDS = 8
"""32-bit words along K, per row of A and per column of B."""
_LANE = np.arange(32)[:, None]
_A, _B, _D = (
    fragment.element(_LANE, np.arange(count))
    for fragment, count in ((A_FRAGMENT, A_FRAGMENT.registers), (B_FRAGMENT, B_FRAGMENT.registers), (D_FRAGMENT, 4))
)


def decode_elements(words: np.ndarray, dtype: DType) -> np.ndarray:
    """Decode 32-bit words to the multiplied elements: float64, in which products are exact; int64 for integers."""
    if dtype == TF32:
        words = words & TF32_BITS
    return np.ascontiguousarray(words).view(dtype.numpy).astype(np.int64 if dtype.is_integer else np.float64)


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
    """Return A B^T + C per warp, in the dtype of D: a (warps, m, k), b (warps, n, k), c (warps, m, n)."""
    if mma.d.is_integer:  # fp32 is exact: products are at most 2^14, and there are 32; sums with c wrap
        product = a.astype(np.float32) @ b.swapaxes(-1, -2).astype(np.float32)
        return np.asarray(product.astype(np.int64) + c).astype(np.int32)
    return fused_mma(a, b, c.astype(np.float64), mma)


def unpack_accumulator(registers: np.ndarray, dtype: DType) -> np.ndarray:
    """Return registers (..., count) as accumulator elements. An fp16 register holds a pair."""
    words = np.ascontiguousarray(registers)
    return words.astype(np.uint32).view(np.float16) if dtype == FP16 else words


def pack_accumulator(elements: np.ndarray, dtype: DType) -> np.ndarray:
    """Return accumulator elements as registers, the inverse of `unpack_accumulator`."""
    return np.ascontiguousarray(elements).view(np.uint32) if dtype == FP16 else elements


class MmaSync(Instruction):
    """mma.sync: D (16 x 8) = A (16 x k) B (k x 8) + D."""

    d: registers_inout
    a: registers_in
    b: registers_in
    mma: Mma
    pure = True

    def check(self) -> None:
        if self.mma not in MMA_SYNC.instructions:
            raise KernelError(f"mma.sync: got {self.mma}; use one of {', '.join(map(str, MMA_SYNC.instructions))}")
        expected = self.mma.accumulator_registers(N), A_FRAGMENT.registers, B_FRAGMENT.registers
        counts = self.d.count, self.a.count, self.b.count
        if counts != expected:
            raise KernelError(f"mma.sync: got {counts} registers of d, a and b; use {expected}")

    @property
    def required_arch(self) -> str:  # type: ignore[override]
        """That of its dtypes."""
        return self.mma.required_arch

    @property
    def macs_per_thread(self) -> int:
        return M * N * self.mma.k // 32

    @property
    def wrapper_name(self) -> str:
        types = dict.fromkeys((self.mma.d.ptx, self.mma.a.ptx))
        return f"mma_m16n8k{self.mma.k}_{'_'.join(types)}"

    def text(self) -> str:
        mma = self.mma
        return f"mma.sync.aligned.m16n8k{mma.k}.row.col.{mma}.{mma.d.ptx} {{d}}, {{a}}, {{b}}, {{d}};"

    def simulate(self, m: Machine) -> None:
        m.require_converged("mma.sync")
        warps, mma = len(m.threads) // 32, self.mma
        a, b = np.zeros((warps, M, WORDS), np.uint32), np.zeros((warps, N, WORDS), np.uint32)
        for matrix, words, registers in ((a, _A, self.a), (b, _B, self.b)):
            matrix[:, words[0], words[1]] = m.registers.view(registers).reshape(warps, 32, -1).astype(np.uint32)
        c = np.zeros((warps, M, N), np.int64 if mma.d.is_integer else np.float64)
        d = m.registers.view(self.d)
        c[:, _D[0], _D[1]] = unpack_accumulator(d.reshape(warps, 32, -1), mma.d)
        result = multiply(decode_elements(a, mma.a), decode_elements(b, mma.b), c, mma)[:, _D[0], _D[1]]
        d[m.active] = pack_accumulator(result, mma.d).reshape(d.shape)[m.active]
