"""The ladder's kernels by name, and their launches for matrices of any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from gemmsmith.core.arguments import Pointer
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import BF16, FP16, FP32, INT8, INT32, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import TMA_ALIGNMENT_BYTES, Matrix
from gemmsmith.kernels.pack import BoundPacking, Packing
from gemmsmith.ladder.block_tile import block_tile
from gemmsmith.ladder.double_buffer import double_buffer
from gemmsmith.ladder.dp4a import dp4a
from gemmsmith.ladder.gemm_arguments import GemmArrays
from gemmsmith.ladder.mma_naive import mma_naive
from gemmsmith.ladder.naive import naive
from gemmsmith.ladder.thread_tile import thread_tile
from gemmsmith.ladder.vectorized import vectorized
from gemmsmith.ladder.wmma import wmma
from gemmsmith.ladder.wmma_naive import wmma_naive
from gemmsmith.lang.kernel import Kernel, align_scratch
from gemmsmith.lang.launch import WORKSPACE, Launch, Launches


@dataclass(frozen=True)
class LadderKernel:
    """A kernel of the ladder.

    Attributes:
        make: Returns the kernel for a dtype of the operands and a chip.
        dtypes: Supported dtypes of the operands.
        tensor_cores: The kernel uses tensor cores, and so accumulates to and stores fp32.
        contiguous_along: Dimension along which A and B must be contiguous, in whole 16-byte vectors; "": none. Others
            are copied into this layout by a packing kernel.
        multiple_of: Divisor of M, N and K.
    """

    make: Callable[[DType, Chip], Kernel]
    dtypes: tuple[DType, ...]
    tensor_cores: bool = False
    contiguous_along: Literal["", "K", "MN"] = ""
    multiple_of: int = 1

    def output(self, dtype: DType) -> DType:
        """Return D's dtype: with tensor cores the accumulator's."""
        return INT32 if dtype == INT8 else FP32 if self.tensor_cores else dtype


FP16_BF16 = (BF16, FP16)
"""16-bit operands."""
LADDER_KERNELS = {
    "naive_m": LadderKernel(partial(naive, order="m"), (FP32, FP16)),
    "naive": LadderKernel(naive, (FP32, FP16)),
    "block_tile": LadderKernel(block_tile, (FP32, FP16)),
    "thread_tile": LadderKernel(thread_tile, (FP32, FP16)),
    "vectorized": LadderKernel(vectorized, (FP32,), contiguous_along="MN"),
    "double_buffer": LadderKernel(double_buffer, (FP32,), contiguous_along="MN"),
    "wmma_naive": LadderKernel(wmma_naive, FP16_BF16, tensor_cores=True, multiple_of=16),
    "wmma": LadderKernel(wmma, FP16_BF16, tensor_cores=True, contiguous_along="K"),
    "mma_naive": LadderKernel(mma_naive, FP16_BF16, tensor_cores=True),
    "dp4a": LadderKernel(dp4a, (INT8,), contiguous_along="K"),
}
"""The kernels, simplest first; sgemm, mma_multistage and Hopper's designs are kernels of a `Config`."""


def ladder_launches(name: str, a: Matrix, b: Matrix, d: Matrix, chip: Chip) -> Launches:
    """Return the launches of D (m, n) = A (m, k) @ B (k, n) by a kernel of the ladder (docs/ladder.md).

    Before the kernel's launch there is a packing launch for each operand whose layout the kernel does not support; its
    copy is in the workspace. `name`: a key of LADDER_KERNELS. The matrices are at the Pointers "a", "b" and "d".

    Raises:
        ArgumentError: The kernel does not support the operands.
    """
    kernel = LADDER_KERNELS[name]
    if a.dtype not in kernel.dtypes:
        raise ArgumentError(f"{name}: got {a.dtype}; use {' or '.join(map(str, kernel.dtypes))}")
    along_rows = [a, b.T, d]  # what is row-major
    must_be_multiples = [a.rows, b.cols, a.cols, *(max(x.row_stride, x.col_stride) for x in along_rows)]
    if kernel.multiple_of > 1 and (
        any(x % kernel.multiple_of for x in must_be_multiples) or any(x.col_stride != 1 for x in along_rows)
    ):
        raise ArgumentError(
            f"{name}: got {a.rows}x{b.cols}x{a.cols}; use multiples of {kernel.multiple_of}, A and D row-major, B "
            f"column-major, of strides that are multiples too"
        )
    arrays, addresses, packs, workspace = {"a": a, "b": b, "d": d}, {}, [], WORKSPACE
    for key, operand in (("a", a), ("b", b.T)):
        packing = _packing(operand, kernel.contiguous_along)
        if packing and packing.total_vectors:
            packing = replace(packing, chip=chip)
            packs.append(Launch.from_kernel(packing.make_kernel(), BoundPacking(packing, Pointer(key), workspace)))
            addresses[key], workspace = workspace, workspace + align_scratch(packing.bytes)
        if packing:
            arrays[key] = packing.packed if key == "a" else packing.packed.T
    gemm = Launch.from_kernel(kernel.make(a.dtype, chip), GemmArrays(arrays))
    gemm = replace(gemm, arguments={**gemm.arguments, **addresses})
    return Launches(None, False, (*packs, gemm), workspace.offset)


def _packing(operand: Matrix, contiguous_along: str) -> Packing | None:
    """Return how to repack an (M or N) x K matrix so that it is contiguous along a dimension, in whole 16-byte vectors.

    `contiguous_along`: "K" or "MN"; if it is empty the kernel takes any strides. None: nothing must be repacked.
    """
    mn_major = contiguous_along == "MN"
    extent = operand.cols if contiguous_along == "K" else operand.rows
    has_whole_vectors = extent * operand.dtype.bytes % TMA_ALIGNMENT_BYTES == 0
    is_supported = has_whole_vectors and operand.is_tma_compatible and operand.is_column_major == mn_major
    if not contiguous_along or is_supported:
        return None
    return Packing(operand.T if mn_major else operand, mn_major)
