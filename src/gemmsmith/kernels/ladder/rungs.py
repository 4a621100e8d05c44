"""The rungs by name, and the launches of one for matrices of any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import BF16, FP16, FP32, INT8, INT32, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import TMA_ALIGNMENT, Matrix
from gemmsmith.kernels.ladder.block_tile import block_tile
from gemmsmith.kernels.ladder.double_buffer import double_buffer
from gemmsmith.kernels.ladder.dp4a import dp4a
from gemmsmith.kernels.ladder.mma_naive import mma_naive
from gemmsmith.kernels.ladder.naive import naive
from gemmsmith.kernels.ladder.product import Operands
from gemmsmith.kernels.ladder.thread_tile import thread_tile
from gemmsmith.kernels.ladder.vectorized import vectorized
from gemmsmith.kernels.ladder.wmma import wmma
from gemmsmith.kernels.ladder.wmma_naive import wmma_naive
from gemmsmith.kernels.pack import BoundPacking, Packing
from gemmsmith.lang.kernel import Kernel, aligned
from gemmsmith.lang.launch import WORKSPACE, Launch, Launches


@dataclass(frozen=True)
class Rung:
    """`make` gives the kernel for a dtype of the operands and a chip. `along`: the index along which it wants A and B
    contiguous, in whole chunks of 16 bytes, if it does. `whole`: what M, N and K are multiples of."""

    make: Callable[[DType, Chip], Kernel]
    dtypes: tuple[DType, ...]
    tensor_cores: bool = False
    along: Literal["", "K", "MN"] = ""
    whole: int = 1

    def output(self, dtype: DType) -> DType:
        """D's dtype: tensor cores' sums are stored as they are."""
        return INT32 if dtype == INT8 else FP32 if self.tensor_cores else dtype


HALVES = (BF16, FP16)
RUNGS = {
    "naive_m": Rung(partial(naive, order="m"), (FP32, FP16)),
    "naive": Rung(naive, (FP32, FP16)),
    "block_tile": Rung(block_tile, (FP32, FP16)),
    "thread_tile": Rung(thread_tile, (FP32, FP16)),
    "vectorized": Rung(vectorized, (FP32,), along="MN"),
    "double_buffer": Rung(double_buffer, (FP32,), along="MN"),
    "wmma_naive": Rung(wmma_naive, HALVES, tensor_cores=True, whole=16),
    "wmma": Rung(wmma, HALVES, tensor_cores=True, along="K"),
    "mma_naive": Rung(mma_naive, HALVES, tensor_cores=True),
    "dp4a": Rung(dp4a, (INT8,), along="K"),
}
"""From the plainest on; sgemm, mma_multistage and Hopper's designs are kernels of a `Config`."""


def launches(name: str, a: Matrix, b: Matrix, d: Matrix, chip: Chip) -> Launches:
    """D (m, n) = A (m, k) B (k, n) by a rung: packings of operands that lie otherwise than it wants, and its kernel.
    The matrices lie at the Pointers "a", "b" and "d". Raises ArgumentError for what it does not take."""
    rung = RUNGS[name]
    if a.dtype not in rung.dtypes:
        raise ArgumentError(f"{name}: got {a.dtype}; use {' or '.join(map(str, rung.dtypes))}")
    rows_and_columns = (a.row_stride, a.col_stride), (b.row_stride, b.col_stride), (d.row_stride, d.col_stride)
    if rung.whole > 1 and (
        any(x % rung.whole for x in (a.rows, b.cols, a.cols))
        or (a.col_stride, b.row_stride, d.col_stride) != (1, 1, 1)
        or any(max(strides) % rung.whole for strides in rows_and_columns)
    ):
        raise ArgumentError(
            f"{name}: got {a.rows}x{b.cols}x{a.cols}; use multiples of {rung.whole}, A and D row-major, B "
            f"column-major, of strides that are multiples too"
        )
    arrays, at, packs, workspace = {"a": a, "b": b, "d": d}, {}, [], WORKSPACE
    for key, operand in (("a", a), ("b", b.T)):
        packing = _packing(operand, rung.along)
        if packing and packing.total:
            packing = replace(packing, chip=chip)
            packs.append(Launch.of(packing.kernel, BoundPacking(packing, Pointer(key), workspace)))
            at[key], workspace = workspace, workspace + aligned(packing.bytes)
        if packing:
            arrays[key] = packing.packed if key == "a" else packing.packed.T
    product = Launch.of(rung.make(a.dtype, chip), Operands(arrays))
    product = replace(product, arguments={**product.arguments, **at})
    return Launches(None, False, (*packs, product), workspace.offset)


def _packing(operand: Matrix, along: str) -> Packing | None:
    """The packing of an (M or N) x K matrix that is to lie along an index, None where it does."""
    lines = operand.cols if along == "K" else operand.rows
    whole = lines * operand.dtype.bytes % TMA_ALIGNMENT == 0
    if not along or (whole and operand.tma_ready and operand.column_major == (along == "MN")):
        return None
    return Packing(operand.T if along == "MN" else operand, along == "MN")
