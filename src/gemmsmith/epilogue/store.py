"""Storing D: through swizzled shared memory by TMA, or directly where TMA cannot write the rows.

An epilogue has four hooks that a design calls: `declare` (its shared memory), `load` (in a warp of its own),
`consume` (the accumulator of one tile) and `finish`. Storing alone loads nothing.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import BLOCK, Accumulator
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32, I64, U16, U32, U64
from gemmsmith.lang.values import Value, ValueLike
from gemmsmith.schedule.tiles import WorkTile

_FIRST_BARRIER = 1
"""Named barrier 0 is __syncthreads."""


class TmaStoreEpilogue:
    """Each warpgroup stores its rows in pieces of 64 by up to 128 bytes, through buffers of its own, in rounds.

    stmatrix (or st.shared for fp32) writes a round's pieces in the swizzled layout, one thread issues their TMA
    stores, and the next round waits only for its own buffers: the last stores drain under the next tile's mainloop.
    """

    def __init__(self, spec: KernelSpec) -> None:
        k = current()
        self.spec, self.tile = spec, spec.store_tile
        self.map = k.tensor_map("d")
        self.round, self.sets = spec.store_rounds
        self.buffers = k.shared(self.tile, stages=self.round * self.sets * spec.config.consumers, name="D")

    def consume(self, accumulator: Accumulator, work: WorkTile, warpgroup: Value, rows: ValueLike) -> None:
        """Stores the warpgroup's rows, which start `rows` below the tile's first."""
        k = current()
        leader = (k.thread % 128 == 0).named("store_leader")
        barrier = warpgroup + _FIRST_BARRIER
        parts = self.spec.config.tile[1] // self.tile.k
        rounds = self.spec.stores // self.round
        for turn in range(rounds):
            first = (turn % self.sets) * self.round
            size = self.sets * self.round * self.tile.bytes  # of a warpgroup's buffers
            pieces = [
                (divmod(turn * self.round + i, parts), self.buffers[first + i].at(warpgroup, size))
                for i in range(self.round)
            ]
            # After an odd number of rounds a tile begins with the buffers that the last one ended with.
            others = 0 if turn == 0 and rounds % self.sets else self.sets - 1
            with k.when(leader):
                hw.bulk_wait_read(others)
            hw.barrier_sync(barrier, 128)
            for (block, part), buffer in pieces:
                self._write(accumulator, block, part * self.tile.k, buffer.address)
            hw.fence_proxy_async()
            hw.barrier_sync(barrier, 128)
            with k.when(leader):
                for (block, part), buffer in pieces:
                    n, m = work.n + part * self.tile.k, work.m + rows + block * BLOCK
                    hw.tma_store(self.map, n, m, work.batch, buffer)
                hw.bulk_commit()

    def finish(self) -> None:
        """Shared memory must outlive the stores that read it."""
        k = current()
        with k.when(k.thread % 128 == 0):
            hw.bulk_wait_read(0)

    def _write(self, accumulator: Accumulator, block: int, column: int, buffer: Value) -> None:
        """Columns column.. of a block into a buffer."""
        k = current()
        row = (k.warp_index % 4) * 16 + k.lane % 16
        swizzle_row = _chunk_swizzle(row, self.tile.pitch if self.tile.swizzle else 0)
        if self.spec.output != FP32:
            # Matrices of a x4 store: rows 0-7 and 8-15 of the warp's 16, at two neighbouring 16-byte chunks.
            matrices = 4 if self.tile.k % 16 == 0 else 2
            with k.unroll(0, self.tile.k // 8, matrices // 2, name="chunk") as chunk:
                values = k.registers(U32, matrices, "packed")
                for i in range(matrices):
                    values[i] = accumulator.pair(block, (chunk + column // 8) * 2 + i, self.spec.output)
                place = k.lane // 16 + chunk if matrices == 4 else chunk
                hw.store_matrix(values, buffer + (row * self.tile.pitch + ((place ^ swizzle_row) << 4)).to(U32))
            return
        quad_row = (k.warp_index % 4) * 16 + k.lane // 4
        for half in range(2):
            row = quad_row + 8 * half
            swizzle_row = _chunk_swizzle(row, self.tile.pitch if self.tile.swizzle else 0)
            with k.unroll(self.tile.k // 8, name="chunk") as chunk:
                values = k.registers(F32, 2, "pair")
                for i in range(2):
                    values[i] = accumulator.element(block, (chunk + column // 8) * 2 + half, i)
                # Eight fp32 are two 16-byte chunks; the lane's pair is half of one.
                place = (k.lane % 4 // 2 + 2 * chunk) ^ swizzle_row
                offset = row * self.tile.pitch + (place << 4) + (k.lane % 2) * 8
                hw.store_shared(values, buffer + offset.to(U32))


def _chunk_swizzle(row: Value, pitch: int) -> Value:
    """What the 16-byte chunk index of a row is xor-ed with, for rows of `pitch` swizzled bytes."""
    return {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}.get(pitch, row * 0)


class DirectStoreEpilogue:
    """Each thread stores its elements one by one, inside the matrix only: any strides, any alignment.

    Kernel arguments: d (address), m, n, d_row, d_column, d_batch (strides in elements).
    """

    def __init__(self, spec: KernelSpec) -> None:
        k = current()
        self.spec = spec
        self.d = k.pointer("d")
        self.m, self.n = k.parameter("m"), k.parameter("n")
        self.strides = [k.parameter(f"d_{name}", I64) for name in ("row", "column", "batch")]

    def consume(self, accumulator: Accumulator, work: WorkTile, warpgroup: Value, rows: ValueLike) -> None:
        """Stores the warpgroup's rows, which start `rows` below the tile's first."""
        k = current()
        size = self.spec.output.bytes
        row_stride, column_stride, batch_stride = self.strides
        quad_row = (k.warp_index % 4) * 16 + k.lane // 4
        for block in range(len(accumulator.blocks)):
            for half in range(2):
                row = (work.m + rows + (block * BLOCK + 8 * half) + quad_row).named("row")
                first = (work.n + (k.lane % 4) * 2).named("column")
                offset = row.to(I64) * row_stride + first.to(I64) * column_stride + work.batch.to(I64) * batch_stride
                start = (self.d + (offset * size).to(U64)).named("start")
                step = (column_stride * size).to(U64).named("step")
                inside = (row < self.m).named("inside")
                with k.unroll(self.spec.config.tile[1] // 8, name="chunk") as chunk:
                    index = 2 * chunk + half
                    pair = None if self.spec.output == FP32 else accumulator.pair(block, index, self.spec.output)
                    for i in range(2):
                        column = 8 * chunk + i
                        address = start + step * column.to(U64)
                        stored = inside & (first + column < self.n)
                        if pair is None:
                            value = k.registers(F32, 1, "value")
                            value[0] = accumulator.element(block, index, i)
                            hw.store_global(value, address, stored)
                        else:
                            hw.store_global_16(address, (pair >> 16 * i).to(U16), stored)

    def finish(self) -> None:
        """Nothing is under way."""


def store_epilogue(spec: KernelSpec) -> TmaStoreEpilogue | DirectStoreEpilogue:
    """The epilogue of the bare product; its arguments and shared memory are declared here."""
    return TmaStoreEpilogue(spec) if spec.store == "tma" else DirectStoreEpilogue(spec)
