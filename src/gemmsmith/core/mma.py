"""Tensor-core instructions as rows of data, and which element of a matrix each register of a thread holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8, INT32, TF32, UINT8, DType
from gemmsmith.core.errors import ConfigError

Major = Literal["K", "MN"]
"""The index along which an operand's neighbors in memory lie."""
WARPGROUP = 128
"""Threads of a warpgroup: four warps."""
WGMMA_M = 64
"""Rows of D of one instruction."""
K_BITS = 256
"""Bits of a row of A, or of B, that an instruction multiplies."""
FRAGMENT_REGISTERS = 4
"""32-bit registers a thread that hold A (64 x k) of one instruction."""


@dataclass(frozen=True)
class Mma:
    """D (m x n) += A (m x k) @ B (k x n), computed by one warpgroup: the dtypes of A, B and D, and the layouts that A
    and B may have in shared memory. `by`: "wgmma", which multiplies in one instruction (PTX ISA, "wgmma.mma_async"),
    "mma" (PTX ISA, "mma.sync"), of which each warp multiplies 16 rows by 8 columns at a time; ldmatrix reads its
    operands, for which n is a multiple of 16; or "fma", an instruction a product, on CUDA cores."""

    a: DType
    b: DType
    d: DType
    majors: tuple[Major, ...] = ("K",)
    register_majors: tuple[Major, ...] = ()
    """Layouts that A may have besides, of which threads load their fragments into registers."""
    fraction: int = 25
    """The bits it keeps of what it adds, below the largest exponent (hw/fused_sum.py). Integers keep all."""
    m: int = WGMMA_M
    by: Literal["wgmma", "mma", "fma"] = "wgmma"

    @property
    def k(self) -> int:
        return K_BITS // self.a.bits

    def has_n(self, n: int) -> bool:
        """Whether D may have n columns."""
        if self.by != "wgmma":
            return 16 <= n <= 256 and n % 16 == 0
        return 8 <= n <= 256 and n % 8 == 0 and (self.d != INT32 or n <= 24 or n % 16 == 0)

    @property
    def n_listed(self) -> str:
        """The n that it has, as an error lists them."""
        if self.by != "wgmma":
            return "a multiple of 16 from 16 to 256"
        steps = "a multiple of 16, or 8 or 24," if self.d == INT32 else "a multiple of 8"
        return f"{steps} from 8 to 256"

    def registers(self, n: int) -> int:
        """32-bit registers a thread that hold D; fp16 lies in pairs."""
        return self.m * n * self.d.bits // (32 * WARPGROUP)

    def __str__(self) -> str:
        return f"{self.d.ptx}.{self.a.ptx}.{self.b.ptx}"


WGMMA = (
    Mma(BF16, BF16, FP32, ("K", "MN")),
    Mma(FP16, FP16, FP32, ("K", "MN")),
    Mma(FP16, FP16, FP16, ("K", "MN")),
    Mma(TF32, TF32, FP32, register_majors=("MN",)),
    *(Mma(a, b, d, fraction=13) for d in (FP32, FP16) for a in (E4M3, E5M2) for b in (E4M3, E5M2)),
    Mma(INT8, INT8, INT32),
)
"""What Hopper's warpgroups multiply."""


MMA_SYNC = (
    *(Mma(a, a, d, ("K", "MN"), by="mma") for a, d in ((BF16, FP32), (FP16, FP32), (FP16, FP16))),
    *(Mma(a, a, d, by="mma") for a, d in ((TF32, FP32), (INT8, INT32), (UINT8, INT32))),
)
"""What warps multiply from Ampere on. How they round was seen on an H200; Ampere adds half as much of K at once."""


FMA = (Mma(FP32, FP32, FP32, ("K", "MN"), fraction=24, by="fma"),)
"""What CUDA cores multiply: `k` products are counted as one instruction, each of which rounds once."""
TABLES = {"wgmma": WGMMA, "mma": MMA_SYNC, "fma": FMA}


def find_mma(a: DType, b: DType, d: DType, by: str = "wgmma") -> Mma:
    """The instruction for these dtypes. ConfigError where there is none."""
    table = TABLES[by]
    for mma in table:
        if (mma.a, mma.b, mma.d) == (a, b, d):
            return mma
    raise ConfigError(f"{by}: got {a} x {b} accumulated in {d}; it has {', '.join(map(str, table))}")


PRODUCTS = 3
"""Of 3xTF32, for each k-tile: A's low part times B, A times B's low part, and A times B, which are read without those
parts; the product of the low parts is left out."""


# -- the fragment --------------------------------------------------------------------------------------------------
# A warp of the four has 16 rows of D's 64. Its lanes lie as 8 rows of 4 (a quad shares a row), and a thread holds pairs
# of neighbors: of every 8 columns (a chunk) one pair in each half of its warp's rows. Element e of a thread is one of
# pair e / 2, which lies in chunk e / 4 and half e / 2 % 2. (PTX ISA, "Register fragments for wgmma.mma_async"; with
# four warps along M those of mma.sync m16n8 are the same.) The functions take numbers, arrays and a kernel's Values.

CHUNK, HALF_ROWS, WARP_ROWS, QUAD = 8, 8, 16, 4
OF_QUAD, OF_COLUMN = (1, 2), (4, 8, 16)
"""The bits in which the lanes differ that share a row, and those that share columns."""


def fragment_row(warp: Any, lane: Any, height: int = 1) -> Any:
    """The row of a thread's elements in the first half; the second half is HALF_ROWS below. `warp`: of the four.
    Where rows are paired (`height` 2) a warp has 8, one of each pair of its halves, and there is no second half."""
    return warp * (WARP_ROWS // height) + lane // QUAD


def fragment_column(lane: Any) -> Any:
    """The column of a thread's first element in a chunk; the second is its right neighbor."""
    return lane % QUAD * 2


def fragment_element(thread: Any, e: Any) -> tuple[Any, Any]:
    """(row, column) of element `e` of a warpgroup's thread."""
    row = fragment_row(thread // 32, thread % 32) + HALF_ROWS * (e // 2 % 2)
    return row, CHUNK * (e // 4) + fragment_column(thread % 32) + e % 2
