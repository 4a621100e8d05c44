"""The tensor-core instructions, and which element of D each register of a thread holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8, INT32, TF32, UINT8, DType
from gemmsmith.core.errors import ConfigError

MmaKind = Literal["wgmma", "mma", "fma"]
"""Instruction family (CUTLASS: OpClass): wgmma, one instruction of a warpgroup per 64 x n x k (PTX ISA,
"wgmma.mma_async"); mma, mma.sync m16n8 by each warp, with operands loaded by ldmatrix, for which n is a multiple of 16
(PTX ISA, "mma.sync"); fma, CUDA cores, one instruction per multiply-add."""
Major = Literal["K", "MN"]
"""Major-ness of an operand: the dimension with unit stride."""
THREADS_PER_WARPGROUP = 128
"""Four warps."""
WGMMA_M = 64
"""Rows of D that one wgmma computes."""
MMA_K_BITS = 256
"""Bits of K per row of A, or column of B, that one instruction multiplies."""
A_FRAGMENT_REGISTERS = 4
"""32-bit registers per thread of A's fragment (64 x k) for one instruction."""


@dataclass(frozen=True)
class Mma:
    """An instruction that computes D (m x n) += A (m x k) @ B (k x n) with one warpgroup.

    `a`, `b`, `d`: the dtypes. `majors`: layouts of A and B that it reads from shared memory. `register_majors`: further
    layouts of A, of which threads load their fragments into registers. `aligned_fraction_bits`: fraction bits that are
    kept when addends are aligned to the largest exponent (hw/fused_sum.py); integer sums are exact.
    """

    a: DType
    b: DType
    d: DType
    majors: tuple[Major, ...] = ("K",)
    register_majors: tuple[Major, ...] = ()
    aligned_fraction_bits: int = 25
    m: int = WGMMA_M
    kind: MmaKind = "wgmma"

    @property
    def k(self) -> int:
        """K of one instruction."""
        return MMA_K_BITS // self.a.bits

    def supports_n(self, n: int) -> bool:
        """Return whether D may have `n` columns."""
        if self.kind != "wgmma":
            return 16 <= n <= 256 and n % 16 == 0
        return 8 <= n <= 256 and n % 8 == 0 and (self.d != INT32 or n <= 24 or n % 16 == 0)

    @property
    def supported_n_text(self) -> str:
        """The supported n, as text for an error."""
        if self.kind != "wgmma":
            return "a multiple of 16 from 16 to 256"
        steps = "a multiple of 16, or 8 or 24," if self.d == INT32 else "a multiple of 8"
        return f"{steps} from 8 to 256"

    def accumulator_registers(self, n: int) -> int:
        """Return the 32-bit registers per thread of D with `n` columns; fp16 is packed in pairs."""
        return self.m * n * self.d.bits // (32 * THREADS_PER_WARPGROUP)

    def __str__(self) -> str:
        return f"{self.d.ptx}.{self.a.ptx}.{self.b.ptx}"


WGMMA = (
    Mma(BF16, BF16, FP32, ("K", "MN")),
    Mma(FP16, FP16, FP32, ("K", "MN")),
    Mma(FP16, FP16, FP16, ("K", "MN")),
    Mma(TF32, TF32, FP32, register_majors=("MN",)),
    *(Mma(a, b, d, aligned_fraction_bits=13) for d in (FP32, FP16) for a in (E4M3, E5M2) for b in (E4M3, E5M2)),
    Mma(INT8, INT8, INT32),
)
"""wgmma, sm_90a."""


MMA_SYNC = (
    *(Mma(a, a, d, ("K", "MN"), kind="mma") for a, d in ((BF16, FP32), (FP16, FP32), (FP16, FP16))),
    *(Mma(a, a, d, kind="mma") for a, d in ((TF32, FP32), (INT8, INT32), (UINT8, INT32))),
)
"""mma.sync, sm_80 and later. Rounding as measured on an H200; Ampere sums half as many products per step."""


FMA = (Mma(FP32, FP32, FP32, ("K", "MN"), aligned_fraction_bits=24, kind="fma"),)
"""CUDA cores. `k` multiply-adds, each of which rounds once, count as one instruction."""
INSTRUCTIONS_BY_KIND = {"wgmma": WGMMA, "mma": MMA_SYNC, "fma": FMA}


def select_mma(a: DType, b: DType, d: DType, kind: MmaKind = "wgmma") -> Mma:
    """Return the instruction for these dtypes. Raises ConfigError if there is none."""
    table = INSTRUCTIONS_BY_KIND[kind]
    for mma in table:
        if (mma.a, mma.b, mma.d) == (a, b, d):
            return mma
    raise ConfigError(f"{kind}: got {a} x {b} accumulated in {d}; it supports {', '.join(map(str, table))}")


TF32X3_MMAS = 3
"""MMAs per k-tile of 3xTF32: small(A) x big(B), big(A) x small(B), big(A) x big(B); small x small is omitted."""


# -- the accumulator fragment --------------------------------------------------------------------------------------
# Each of the four warps has 16 of D's 64 rows. Its lanes form 8 rows of 4 (a quad shares a row), and a thread holds
# pairs of neighboring columns: of every 8 columns (an n8 block) one pair in each half of its warp's rows. Element e of
# a thread is in pair e / 2, which is in n8 block e / 4 and half e / 2 % 2. (PTX ISA, "Register fragments for
# wgmma.mma_async"; with four warps along M those of mma.sync m16n8 are the same.) The functions accept ints, arrays and
# a kernel's Values.

N8_COLUMNS = 8
FRAGMENT_HALF_ROWS = 8
FRAGMENT_ROWS_PER_WARP = 16
LANES_PER_QUAD = 4
QUAD_XOR_MASKS = (1, 2)
"""XOR masks between lanes that share a row."""
COLUMN_XOR_MASKS = (4, 8, 16)
"""XOR masks between lanes that share columns."""


def fragment_row(warp: Any, lane: Any, rows_per_value: int = 1) -> Any:
    """Return the row of a thread's elements in its warp's first half; the second half is FRAGMENT_HALF_ROWS below.

    `warp`: 0 to 3. `rows_per_value`: 2 if rows are paired; a warp then has 8 rows of values, and no second half.
    """
    return warp * (FRAGMENT_ROWS_PER_WARP // rows_per_value) + lane // LANES_PER_QUAD


def fragment_column(lane: Any) -> Any:
    """Return the column of a thread's first element in a group of 8; its second element is in the next column."""
    return lane % LANES_PER_QUAD * 2


def fragment_element(thread: Any, e: Any) -> tuple[Any, Any]:
    """Return (row, column) of element `e` of a thread of the warpgroup."""
    row = fragment_row(thread // 32, thread % 32) + FRAGMENT_HALF_ROWS * (e // 2 % 2)
    return row, N8_COLUMNS * (e // 4) + fragment_column(thread % 32) + e % 2
