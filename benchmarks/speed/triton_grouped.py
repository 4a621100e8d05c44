"""A persistent grouped GEMM in Triton, an opponent of grouped.py, with TMA loads and the offsets on the device.

Each program walks the groups with its own counter of tiles, as in Triton's tutorial on grouped GEMMs; the offsets are
int32 ends. Stores are predicated, since a tile may end behind its group. One of CONFIGS is selected by timing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.timing import captured, fastest

CONFIGS = {
    "large": ((128, 256, 64, 3, 8), (128, 128, 64, 4, 8), (128, 256, 64, 4, 8)),
    "middle": ((128, 128, 64, 4, 8), (64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (128, 256, 64, 3, 8)),
    "small": ((16, 128, 128, 4, 4), (32, 128, 128, 4, 4), (64, 128, 64, 5, 4), (16, 64, 256, 4, 4)),
}
"""(BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps) by the mean rows of a group: from 512, from 48, fewer."""


@triton.jit
def grouped_kernel(
    a_desc, b_desc, d_ptr, offsets_ptr, groups, n, k, programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,  # noqa: N803
):  # fmt: skip
    tile = tl.program_id(0)
    n_tiles = tl.cdiv(n, BLOCK_N)
    first_tile, begin = 0, 0
    for group in range(groups):
        end = tl.load(offsets_ptr + group)
        m_tiles = tl.cdiv(end - begin, BLOCK_M)
        last_tile = first_tile + m_tiles * n_tiles
        while tile < last_tile:
            row = begin + (tile - first_tile) % m_tiles * BLOCK_M
            column = (tile - first_tile) // m_tiles * BLOCK_N
            accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for k_tile in range(0, tl.cdiv(k, BLOCK_K)):
                a = a_desc.load([row, k_tile * BLOCK_K])
                b = b_desc.load([group * n + column, k_tile * BLOCK_K])
                accumulator = tl.dot(a, b.T, accumulator)
            rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            at = d_ptr + rows[:, None].to(tl.int64) * n + columns[None, :]
            tl.store(at, accumulator.to(d_ptr.dtype.element_ty), (rows < end)[:, None] & (columns < n)[None, :])
            tile += programs
        first_tile, begin = last_tile, end


def call(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, offsets: torch.Tensor, config: tuple[int, ...]) -> None:
    """Compute d = a @ b by groups of rows. Shapes: a (M, K), b (G, K, N) with contiguous columns, d (M, N)."""
    block_m, block_n, block_k, stages, warps = config
    groups, k, n = b.shape
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    a_desc = TensorDescriptor.from_tensor(a, [block_m, block_k])
    b_desc = TensorDescriptor.from_tensor(b.mT.reshape(groups * n, k), [block_n, block_k])
    grouped_kernel[(programs,)](
        a_desc, b_desc, d, offsets, groups, n, k, programs, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_stages=stages, num_warps=warps,
    )  # fmt: skip


def tuned(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, offsets: torch.Tensor) -> Any:
    """Return `call` with the fastest config for operands like these."""
    rows = len(a) / len(b)
    configs = CONFIGS["large" if rows >= 512 else "middle" if rows >= 48 else "small"]
    graphs = {config: captured(partial(call, config=config), [(a, b, d, offsets)]) for config in configs}
    return partial(call, config=fastest(graphs, 1, ((2, 0.01), (1, 0.05))))
