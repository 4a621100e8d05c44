"""WMMA with tiles staged in shared memory by cp.async, padded rows, and several fragments per warp."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.mma import MMA_SYNC, select_mma
from gemmsmith.core.product import ROLES
from gemmsmith.hw.wmma import TILE_MN as FRAGMENT
from gemmsmith.hw.wmma import fragment_registers
from gemmsmith.ladder.gemm_arguments import ZERO, GemmArguments, zeros
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, U32, U64
from gemmsmith.lang.values import Constant, Value

TILE_M = 256
"""Rows of a CTA's tile."""
TILE_N = 128
"""Columns of a CTA's tile."""
WARPS = 8
"""Warps per CTA."""
MAX_STAGES = 4
"""Maximum stages; chosen, not measured."""
WARP_TILE = 64
"""Rows and columns per warp."""
TILE_K_CHOICES = (64, 32)
"""Values of tile K; the first with `MIN_STAGES` stages in shared memory is used."""
MIN_STAGES = 3
"""Minimum stages; chosen, not measured."""
ROW_PADDING_BYTES = 16
"""Padding of a k-tile's rows, so that 8 rows begin in different banks."""
WARPS_N = TILE_N // WARP_TILE
"""Warps along N."""
FRAGMENTS_PER_WARP = WARP_TILE // FRAGMENT
"""Fragments per warp along M, and along N."""


def wmma(dtype: DType, chip: Chip) -> Kernel:
    """Build the kernel: fp32 D = A @ B by WMMA, where a CTA computes 256x128 results, and a warp 64x64.

    A and B must be contiguous along K, in whole 16-byte vectors; `ladder_launches` packs other operands. Copies by
    cp.async run `stages` - 1 k-tiles ahead, and the fragments of a step of 16 elements of K are loaded while those of
    the step before are multiplied. Results are stored through shared memory, since WMMA does not specify which lane
    holds which element.
    """
    mma = select_mma(dtype, dtype, FP32, MMA_SYNC)
    max_shared_bytes = chip.max_shared_bytes_per_cta
    max_stages = {x: max_shared_bytes // ((TILE_M + TILE_N) * (2 * x + ROW_PADDING_BYTES)) for x in TILE_K_CHOICES}
    tile_k = next(x for x in TILE_K_CHOICES if max_stages[x] >= MIN_STAGES)
    stages, pitch = min(MAX_STAGES, max_stages[tile_k]), 2 * tile_k + ROW_PADDING_BYTES
    vectors_per_row, k_steps = tile_k // 8, tile_k // FRAGMENT
    with Builder(f"wmma_{dtype}", threads=32 * WARPS, chip=chip) as k:
        gemm = GemmArguments(dtype, FP32, TILE_M, TILE_N)
        gemm.use_grouped_order()
        a_stages = k.shared(TILE_M * pitch, stages=stages, alignment=128, name="A")
        b_stages = k.shared(TILE_N * pitch, stages=stages, alignment=128, name="B")
        row = (k.warp_index // WARPS_N * WARP_TILE).named("row")
        column = (k.warp_index % WARPS_N * WARP_TILE).named("column")
        a = k.registers_2d(U32, 2 * FRAGMENTS_PER_WARP, fragment_registers(mma, "a"), "a_fragments")
        b = k.registers_2d(U32, 2 * FRAGMENTS_PER_WARP, fragment_registers(mma, "b"), "b_fragments")
        d = zeros(FRAGMENTS_PER_WARP * FRAGMENTS_PER_WARP, fragment_registers(mma, "d"), name="d_fragments")

        def copy(k_tile: Value, slice_idx: int = 0, num_slices: int = 1) -> None:
            """Issue slice `slice_idx` of `num_slices` of this thread's copies of a k-tile; zeros beyond K.

            The copies of a k-tile form one cp.async group, which the last slice commits.
            """
            for operand, tile, tile_rows in zip(ROLES, (a_stages, b_stages), (TILE_M, TILE_N), strict=True):
                copy_iters = tile_rows * vectors_per_row // (32 * WARPS)
                begin, end = (i * copy_iters // num_slices for i in (slice_idx, slice_idx + 1))
                with k.unroll(begin, end, name="copy_iter") as copy_iter:
                    vector_index = copy_iter * (32 * WARPS) + k.thread
                    row_in_8 = vector_index // vectors_per_row % 8
                    vector = (vector_index % vectors_per_row).named("vector")
                    # rows 0, 4, 1, 5 ... of 8: two rows of 64 bytes that are written at once are in different banks
                    smem_row = vector_index // vectors_per_row // 8 * 8 + row_in_8 // 2 + row_in_8 % 2 * 4
                    smem_row = smem_row.named("smem_row")
                    k_offset = vector * 8
                    source, in_bounds = gemm.locate(operand, smem_row, k_offset)
                    nbytes = k.select(in_bounds & (k_offset < gemm.k - k_tile * tile_k), Constant(U32, 16), 0)
                    destination = tile[k_tile % stages].address + (smem_row * pitch + vector * 16).to(U32)
                    hw.cp_async_copy(destination, source + (k_tile * (2 * tile_k)).to(U64), nbytes, 16)
            if slice_idx == num_slices - 1:
                hw.cp_async_commit()

        def load(k_tile: Value, step: Value, buffer: Value) -> None:
            """Load the fragments of A and B of step number `step` of a k-tile into buffer 0 or 1."""
            operands = zip(ROLES, (a, b), (a_stages, b_stages), (row, column), strict=True)
            for operand, fragments, tile, first in operands:
                with k.unroll(FRAGMENTS_PER_WARP, name="n") as n:
                    offset = ((first + n * FRAGMENT) * pitch + step * (2 * FRAGMENT)).to(U32)
                    fragment = fragments[buffer * FRAGMENTS_PER_WARP + n].slice(0, fragments.count)
                    address = tile[k_tile % stages].address + offset
                    hw.wmma_load(fragment, address, pitch // 2, operand, "row" if operand == "a" else "col", mma)

        def wait_stage(groups_in_flight: int) -> None:
            """Wait until the oldest of `groups_in_flight` k-tiles is copied, and all threads have read the last one."""
            hw.cp_async_wait(groups_in_flight - 1)
            k.comment("all threads' copies of the oldest k-tile are complete, and none reads the stage filled next")
            hw.sync_threads()

        for stage in range(stages - 1):
            copy(Constant(I32, stage))
        wait_stage(stages - 1)
        load(ZERO, ZERO, ZERO)
        with (
            k.range((gemm.k + (tile_k - 1)) // tile_k, name="k_tile") as k_tile,
            k.unroll(k_steps, name="step") as step,
        ):
            next_step = step + 1
            with k.when(next_step == k_steps):
                wait_stage(stages - 1)
            load(k_tile + next_step // k_steps, next_step % k_steps, next_step % 2)
            with (
                k.unroll(FRAGMENTS_PER_WARP, name="mma_m") as mma_m,
                k.unroll(FRAGMENTS_PER_WARP, name="mma_n") as mma_n,
            ):
                d_fragment = d[mma_m * FRAGMENTS_PER_WARP + mma_n].slice(0, d.count)
                first = step % 2 * FRAGMENTS_PER_WARP
                a_fragment, b_fragment = a[first + mma_m].slice(0, a.count), b[first + mma_n].slice(0, b.count)
                hw.wmma_mma(d_fragment, a_fragment, b_fragment, "row", "col", mma)
            for slice_idx in range(k_steps - 1):
                with k.when(step == slice_idx):
                    copy(k_tile + (stages - 1), slice_idx, k_steps - 1)
        hw.cp_async_wait(0)
        k.comment("all threads have read the stages that the results overwrite")
        hw.sync_threads()
        results = a_stages[0].at(k.warp_index, 4 * FRAGMENT * FRAGMENT)  # this warp's, in the stages
        for n in range(len(d)):
            out_row, out_column = row + n // FRAGMENTS_PER_WARP * FRAGMENT, column + n % FRAGMENTS_PER_WARP * FRAGMENT
            if n:
                k.comment("all lanes have read the previous results, which are overwritten now")
                hw.sync_warp()
            hw.wmma_store(d.rows[n], results, FRAGMENT, "row", mma)
            k.comment("all lanes have written the results that are read now")
            hw.sync_warp()
            with k.unroll(FRAGMENT * FRAGMENT // 32, name="copy_iter") as copy_iter:
                element = (copy_iter * 32 + k.lane).named("element")
                value = hw.load_shared_word(results.address + (element * 4).to(U32), F32, "result")
                d_row, d_column = (
                    gemm.row + out_row + element // FRAGMENT,
                    gemm.column + out_column + element % FRAGMENT,
                )
                gemm.store(d_row, d_column, value)
        return k.finish()
