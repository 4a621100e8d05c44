"""The instructions that multiply tiles, and which element of a matrix each register of a thread holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.errors import ConfigError

Major = Literal["K", "MN"]
"""Major-ness of an operand: the dimension with unit stride."""
WARP_THREADS = 32
"""Threads of a warp."""
THREADS_PER_WARPGROUP = 128
"""Four warps."""
WGMMA_M = 64
"""Rows of D that one wgmma computes."""
MMA_K_BITS = 256
"""Bits of K per row of A, or column of B, that one instruction multiplies."""


@dataclass(frozen=True)
class Mma:
    """An instruction that computes D (m x n) += A (m x k) @ B (k x n) with one warpgroup.

    `a`, `b`, `d`: the dtypes. `majors`: layouts of A and B that it reads from shared memory. `register_majors`: further
    layouts of A, of which threads load their fragments into registers. `aligned_fraction_bits`: fraction bits that are
    kept when addends are aligned to the largest exponent (hw/mma.py); integer sums are exact. `n`, `more_n`: the
    columns that D may have. `signed_zero`: a sum that rounds to zero keeps its sign. `required_arch`: as for a Design.
    """

    a: DType
    b: DType
    d: DType
    majors: tuple[Major, ...] = ("K",)
    register_majors: tuple[Major, ...] = ()
    aligned_fraction_bits: int = 25
    m: int = WGMMA_M
    n: range = range(8, 257, 8)
    more_n: tuple[int, ...] = ()
    signed_zero: bool = True
    required_arch: str = "sm_80"

    @property
    def k(self) -> int:
        """K of one instruction."""
        return MMA_K_BITS // self.a.bits

    def supports_n(self, n: int) -> bool:
        """Return whether D may have `n` columns."""
        return n in self.n or n in self.more_n

    @property
    def supported_n_text(self) -> str:
        """The supported n, as text for an error."""
        return " or ".join([f"a multiple of {self.n.step} from {self.n.start} to {self.n[-1]}", *map(str, self.more_n)])

    def accumulator_registers(self, n: int) -> int:
        """Return the 32-bit registers per thread of D with `n` columns; fp16 is packed in pairs."""
        return self.m * n * self.d.bits // (32 * THREADS_PER_WARPGROUP)

    def __str__(self) -> str:
        return f"{self.d.ptx}.{self.a.ptx}.{self.b.ptx}"


@dataclass(frozen=True, eq=False)
class MmaOp:
    """A family of instructions that multiply, and what kernels with it must know (CUTLASS: OpClass).

    `name`: in messages. `mnemonic`: in a kernel's header. `instructions`: one for each combination of dtypes.
    `uses_tensor_cores`: else an instruction is one multiply-add of each thread. `reads_smem`: operands are read from
    shared memory, so 3xTF32's residuals must be there; else threads load fragments into registers. `tile_k_bytes`: what
    a tile's K is a multiple of. `k_padding_bytes`: padding in shared memory after each index of K. `promotion_k_bytes`:
    K after which sums are promoted.
    """

    name: str
    mnemonic: str
    instructions: tuple[Mma, ...]
    uses_tensor_cores: bool = True
    reads_smem: bool = False
    tile_k_bytes: int = 32
    k_padding_bytes: int = 0
    promotion_k_bytes: int = 128

    def multiplies(self, dtype: DType) -> bool:
        """Return whether some instruction multiplies operands of `dtype`."""
        return any(mma.a == dtype for mma in self.instructions)

    def find(self, a: DType | None, b: DType | None, d: DType) -> Mma | None:
        """Return the instruction for these dtypes; None if there is none."""
        return next((mma for mma in self.instructions if (mma.a, mma.b, mma.d) == (a, b, d)), None)


_WarpgroupMma = partial(Mma, required_arch="sm_90a")
WGMMA = MmaOp("wgmma", "wgmma", (
    _WarpgroupMma(BF16, BF16, FP32, ("K", "MN")),
    _WarpgroupMma(FP16, FP16, FP32, ("K", "MN")),
    _WarpgroupMma(FP16, FP16, FP16, ("K", "MN")),
    _WarpgroupMma(TF32, TF32, FP32, register_majors=("MN",)),
    *(_WarpgroupMma(a, b, d, aligned_fraction_bits=13)
      for d in (FP32, FP16) for a in (E4M3, E5M2) for b in (E4M3, E5M2)),
    _WarpgroupMma(INT8, INT8, INT32, n=range(16, 257, 16), more_n=(8, 24)),
), reads_smem=True)  # fmt: skip
"""sm_90a: one instruction of a warpgroup per 64 x n x k (PTX ISA, "wgmma.mma_async")."""
_WarpMma = partial(Mma, n=range(16, 257, 16), signed_zero=False)
MMA_SYNC = MmaOp("mma", "mma.sync", (
    *(_WarpMma(a, a, d, ("K", "MN")) for a, d in ((BF16, FP32), (FP16, FP32), (FP16, FP16))),
    *(_WarpMma(a, a, d) for a, d in ((TF32, FP32), (INT8, INT32))),
), tile_k_bytes=64, promotion_k_bytes=64)  # fmt: skip
"""sm_80 and later: m16n8 by each warp, with fragments loaded by ldmatrix (PTX ISA, "mma.sync"). Rounding as measured on
an H200; Ampere sums half as many products per step. 3xTF32 has one accumulator for all three MMAs of a k-tile, while
wgmma's designs sum each separately; so the short sums that are promoted truncate no more (reference/bounds.py)."""
FMA = MmaOp("fma", "FFMA", (_WarpMma(FP32, FP32, FP32, ("K", "MN"), aligned_fraction_bits=24),),
            uses_tensor_cores=False, k_padding_bytes=16)  # fmt: skip
"""CUDA cores; `k` multiply-adds, each of which rounds once, count as one instruction. The padding makes 8 k-rows x 4
elements free of bank conflicts."""


def select_mma(a: DType, b: DType, d: DType, op: MmaOp = WGMMA) -> Mma:
    """Return the instruction of the family `op` (`WGMMA`, `MMA_SYNC`) for A, B and the accumulator of these dtypes.

    Raises ConfigError if there is none.
    """
    if mma := op.find(a, b, d):
        return mma
    supported = ", ".join(map(str, op.instructions))
    raise ConfigError(f"{op.name}: got {a} x {b} accumulated in {d}; it supports {supported}")


TF32X3_MMAS = 3
"""MMAs per k-tile of 3xTF32: small(A) x big(B), big(A) x small(B), big(A) x big(B); small x small is omitted."""


# -- fragments -----------------------------------------------------------------------------------------------------
# Each of the four warps has 16 of 64 rows. Its lanes form 8 rows of 4 (a quad shares a row). (PTX ISA, "Register
# fragments for wgmma.mma_async"; with four warps along M those of mma.sync m16n8 are the same.) The functions accept
# ints, arrays and a kernel's Values.

N8_COLUMNS = 8
FRAGMENT_HALF_ROWS = 8
FRAGMENT_ROWS_PER_WARP = 16
LANES_PER_QUAD = 4
QUAD_XOR_MASKS = (1, 2)
"""XOR masks between lanes that share a row."""
COLUMN_XOR_MASKS = (4, 8, 16)
"""XOR masks between lanes that share columns."""


def fragment_row(warp: Any, lane: Any, rows_per_value: int = 1) -> Any:
    """Return the row, of a fragment's 64, of a thread's elements in the first half of its warp's 16 rows.

    Its row in the second half is FRAGMENT_HALF_ROWS below. `warp`: 0 to 3. `lane`: 0 to 31. `rows_per_value`: 2 if two
    rows share a value; a warp then has 8 rows of values, and no second half. Else 1.
    """
    return warp * (FRAGMENT_ROWS_PER_WARP // rows_per_value) + lane // LANES_PER_QUAD


def fragment_column(lane: Any) -> Any:
    """Return the column of a thread's first element in a group of 8; its second element is in the next column."""
    return lane % LANES_PER_QUAD * 2


@dataclass(frozen=True)
class Fragment:
    """The elements of a matrix that the threads of a warpgroup hold (CuTe: thread-value layout).

    `columns_per_lane`: adjacent columns of a thread. `modes`: (count, rows, columns) of each level of a thread's
    elements, the innermost first: `count` elements, each `rows` below and `columns` right of the one before.
    """

    columns_per_lane: int
    modes: tuple[tuple[int, int, int], ...]

    def element(self, thread: Any, i: Any) -> tuple[Any, Any]:
        """Return (row, column) of element `i` of a thread of the warpgroup, 0 to 127."""
        row, column = fragment_row(thread // 32, thread % 32), thread % LANES_PER_QUAD * self.columns_per_lane
        for count, rows, columns in self.modes:
            row, column, i = row + i % count * rows, column + i % count * columns, i // count
        return row, column

    @property
    def registers(self) -> int:
        """The number of a thread's registers, if each holds one element."""
        return prod(count for count, *_ in self.modes)


D_FRAGMENT = Fragment(2, ((2, 0, 1), (2, FRAGMENT_HALF_ROWS, 0), (256 // N8_COLUMNS, 0, N8_COLUMNS)))
"""D: of every 8 columns (an n8 block) a pair in each half of the warp's rows."""
A_FRAGMENT = Fragment(1, ((2, FRAGMENT_HALF_ROWS, 0), (2, 0, LANES_PER_QUAD)))
"""A's 8 32-bit words per row of one instruction."""
B_FRAGMENT = Fragment(1, ((2, 0, LANES_PER_QUAD),))
"""B's 8 32-bit words per column, a row here, of one mma.sync."""
