"""mma.sync: a warp multiplies fragments in registers. PTX ISA, "Matrix fragments for mma.m16n8k16" and its neighbors.

The fragments of all types are the same in words of 32 bits, of which A (16 rows) and B (8 columns) have 8 a row: lane l
holds, of rows l / 4 and l / 4 + 8 of A, words l % 4 and l % 4 + 4; of column l / 4 of B the same words. D is the
fragment of core/mma.py. So ldmatrix brings A and B of any type.
"""

from __future__ import annotations

import numpy as np

from gemmsmith.core.dtypes import FP16, TF32, TF32_BITS, DType
from gemmsmith.core.errors import KernelError
from gemmsmith.core.mma import MMA_SYNC, QUAD, Mma, fragment_element
from gemmsmith.hw.fused_sum import fused_product
from gemmsmith.lang.instruction import Instruction, registers_in, registers_inout
from gemmsmith.lang.machine import Machine

M, N, WORDS = 16, 8, 8
"""Rows of A, columns of B, and words of each."""
_LANE = np.arange(32)[:, None]
_A = _LANE // QUAD + 8 * (np.arange(4) % 2), _LANE % QUAD + QUAD * (np.arange(4) // 2)
_B = np.broadcast_to(_LANE // QUAD, (32, 2)), _LANE % QUAD + QUAD * np.arange(2)
_D = fragment_element(_LANE, np.arange(4))


def numbers(words: np.ndarray, dtype: DType) -> np.ndarray:
    """Words as what is multiplied: float64, in which products are exact; int64 for integers."""
    if dtype == TF32:
        words = words & TF32_BITS
    return np.ascontiguousarray(words).view(dtype.numpy).astype(np.int64 if dtype.is_integer else np.float64)


def multiplied(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
    """A B^T + C of every warp, as D's registers hold elements: a (warps, m, k), b (warps, n, k), c (warps, m, n)."""
    if mma.d.is_integer:  # they wrap
        return np.asarray(a @ b.swapaxes(-1, -2) + c).astype(np.int32)
    return fused_product(a, b, c.astype(np.float64), mma)


def unpacked(registers: np.ndarray, dtype: DType) -> np.ndarray:
    """Registers (..., count) as the elements of an accumulator; fp16 lies in pairs."""
    held = np.ascontiguousarray(registers)
    return held.astype(np.uint32).view(np.float16) if dtype == FP16 else held


def packed(elements: np.ndarray, dtype: DType) -> np.ndarray:
    """The reverse."""
    return np.ascontiguousarray(elements).view(np.uint32) if dtype == FP16 else elements


class MmaSync(Instruction):
    """D (16 x 8) = A (16 x k) B (k x 8) + D."""

    d: registers_inout
    a: registers_in
    b: registers_in
    mma: Mma
    pure = True

    def check(self) -> None:
        if self.mma not in MMA_SYNC:
            raise KernelError(f"mma.sync: got {self.mma}; use one of {', '.join(map(str, MMA_SYNC))}")
        need = self.mma.registers(N), 4, 2
        given = self.d.count, self.a.count, self.b.count
        if given != need:
            raise KernelError(f"mma.sync: got {given} registers of d, a and b; it takes {need}")

    @property
    def products(self) -> int:
        return M * N * self.mma.k // 32

    @property
    def wrapper_name(self) -> str:
        types = dict.fromkeys((self.mma.d.ptx, self.mma.a.ptx))
        return f"mma_m16n8k{self.mma.k}_{'_'.join(types)}"

    def text(self) -> str:
        mma = self.mma
        return f"mma.sync.aligned.m16n8k{mma.k}.row.col.{mma}.{mma.d.ptx} {{d}}, {{a}}, {{b}}, {{d}};"

    def simulate(self, m: Machine) -> None:
        m.converged("mma.sync")
        warps, mma = len(m.threads) // 32, self.mma
        a, b = np.zeros((warps, M, WORDS), np.uint32), np.zeros((warps, N, WORDS), np.uint32)
        for matrix, words, registers in ((a, _A, self.a), (b, _B, self.b)):
            matrix[:, words[0], words[1]] = m.registers(registers).reshape(warps, 32, -1).astype(np.uint32)
        c = np.zeros((warps, M, N), np.int64 if mma.d.is_integer else np.float64)
        d = m.registers(self.d)
        c[:, _D[0], _D[1]] = unpacked(d.reshape(warps, 32, -1), mma.d)
        result = multiplied(numbers(a, mma.a), numbers(b, mma.b), c, mma)[:, _D[0], _D[1]]
        d[m.active] = packed(result, mma.d).reshape(d.shape)[m.active]
