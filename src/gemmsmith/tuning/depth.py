"""Products of operands of 8 and 32 bits as the model sees them: of 16 bits, with as many bytes of K.

wgmma multiplies 32 bytes of K in the same time whatever their dtype, and copies and stages count bytes. So the configs
that are considered, and the model, know 16-bit operands only; what is chosen has a tile K of as many bytes.
"""

from __future__ import annotations

from dataclasses import replace

from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import BF16, FP32, DType
from gemmsmith.core.mma import PRODUCTS
from gemmsmith.core.problem import Matrix, Problem
from gemmsmith.kernels.pack import Packing, packed


def in_16_bits(problem: Problem) -> Problem:
    """The product of 16-bit operands that takes as long; itself if it is one. Others are K-major, perhaps packed. Of
    3xTF32 it is one of three times the K."""
    if problem.a.dtype.bits == 16:
        return problem
    a, b = map(_in_16_bits, packed(problem).operands)
    if problem.low_parts:
        a, b = (replace(x, cols=PRODUCTS * x.cols) for x in (a, b))
    return replace(problem, a=a, b=b.T, accumulate=FP32)


def _in_16_bits(x: Matrix) -> Matrix:
    """Rows of as many bytes, which are whole 16-byte chunks apart; also of an A that wgmma takes from registers."""
    x = Packing(x).packed if x.column_major else x
    row, columns, batch = (-(-n * x.dtype.bytes // BF16.bytes) for n in (x.row_stride, x.cols, x.batch_stride))
    return replace(x, dtype=BF16, cols=columns, row_stride=row, batch_stride=batch)


def for_operands(config: Config, dtype: DType) -> Config:
    """A config for 16-bit operands, for those of another dtype."""
    return _with_depth(config, config.tile[2] * BF16.bytes // dtype.bytes)


def for_16_bits(config: Config, dtype: DType) -> Config:
    """The reverse: a config for operands of another dtype, for 16-bit ones."""
    return _with_depth(config, config.tile[2] * dtype.bytes // BF16.bytes)


def _with_depth(config: Config, k: int) -> Config:
    m, n, now = config.tile
    return config if k == now else config.replace(tile=(m, n, k))
