"""Mapping of GEMMs with 8-bit and 32-bit operands to the 16-bit GEMM with the same number of K bytes.

The cost model assumes that both take the same time: wgmma multiplies 32 bytes of K in the same time for every dtype,
and copies and stages count bytes. So the candidates and the model know 16-bit operands only, and the chosen config's
tile K is scaled to the same number of bytes.
"""

from __future__ import annotations

from dataclasses import replace

from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import BF16, FP32, DType
from gemmsmith.core.mma import TF32X3_MMAS
from gemmsmith.core.problem import Matrix, Problem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.kernels.pack import Packing, with_packed_operands


def as_16bit_problem(problem: Problem) -> Problem:
    """Return the equivalent GEMM of 16-bit operands; a 16-bit problem itself.

    Other operands become K-major, as they are packed. For 3xTF32 the equivalent GEMM has three times the K.
    """
    if problem.a.dtype.bits == 16:
        return problem
    a, b = map(_as_16bit_matrix, with_packed_operands(problem).operands)
    if problem.is_3xtf32:
        a, b = (replace(x, cols=TF32X3_MMAS * x.cols) for x in (a, b))
    return replace(problem, a=a, b=b.T, accumulator_dtype=FP32)


def _as_16bit_matrix(x: Matrix) -> Matrix:
    """Return the K-major 16-bit matrix whose rows have as many bytes as the rows of `x`.

    A column-major `x` counts as its packed copy, even if the kernel reads it in place (a TF32 A in registers).
    """
    x = Packing(x).packed if x.is_column_major else x
    row, columns, batch = (ceil_div(n * x.dtype.bytes, BF16.bytes) for n in (x.row_stride, x.cols, x.batch_stride))
    return replace(x, dtype=BF16, cols=columns, row_stride=row, batch_stride=batch)


def config_for_dtype(config: Config, dtype: DType) -> Config:
    """Return the config for operands of `dtype` that corresponds to one for 16-bit operands."""
    return _with_tile_k(config, config.tile[2] * BF16.bytes // dtype.bytes)


def config_for_16bit(config: Config, dtype: DType) -> Config:
    """Return the config for 16-bit operands that corresponds to one for operands of `dtype`."""
    return _with_tile_k(config, config.tile[2] * dtype.bytes // BF16.bytes)


def _with_tile_k(config: Config, k: int) -> Config:
    m, n, tile_k = config.tile
    return config if k == tile_k else config.replace(tile=(m, n, k))
