"""A warp's fragments of A and B for mma.sync: some are multiplied while the next ones are loaded."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.swizzle import chunk_offset
from gemmsmith.core.mma import CHUNK, WARP_ROWS, WGMMA_M
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Registers, Value

PAIR = 2 * CHUNK
"""Columns of B that one ldmatrix brings."""
MOST_REGISTERS = 200
"""Of accumulators, A's fragments of a k-step and B's of two, and low parts; what takes more spilled."""


class Fragments:
    """Of every 64 rows of a warpgroup's part of a tile its warps have 16 each, and of its columns, which begin
    `first_column` behind the tile's, all. ldmatrix brings four matrices of 8 rows of 16 bytes: of A both halves of the
    warp's rows, of B two chunks of 8 columns, and of both the two halves of a k-step's 32 bytes. If an operand is
    MN-major the rows that lie in shared memory are of K, and it transposes.

    A k-tile is multiplied in `parts`: k-`steps`, or where registers are few, of a k-step 16 columns after the other.
    Registers hold A's fragments of a k-step, and B's of two parts: one is multiplied while the other is loaded."""

    def __init__(self, spec: KernelSpec, first_column: Value) -> None:
        k, (self._a_tile, self._b_tile) = current(), spec.tiles
        self._mma, blocks, pairs = spec.mma, spec.warpgroup_rows // WGMMA_M, spec.warpgroup_columns // PAIR
        taken = 4 * blocks + 8 * pairs + spec.accumulator_registers
        if spec.promoted:
            taken += spec.accumulator_registers + 4 * (blocks + pairs)
        self._wide = pairs if taken <= MOST_REGISTERS else 1
        self._a = k.register_rows(U32, blocks, 4, "a_fragments")
        self._b = k.register_rows(U32, 2 * self._wide, 4, "b_fragments")
        self._of_step = pairs // self._wide
        self.steps = self._a_tile.k // spec.mma.k
        self.parts = self._of_step * self.steps
        low, high = k.lane % 16, k.lane // 16
        mixed, middle = k.lane % 8 + high * 8, k.lane // 8 % 2
        first_row = k.warp_index % 4 * WARP_ROWS
        if self._a_tile.major == "K":
            self._a_row, self._a_chunk = first_row + low, high
        else:
            self._a_row, self._a_chunk = mixed, first_row // CHUNK + middle
        if self._b_tile.major == "K":
            self._b_row, self._b_chunk = first_column + mixed, middle
        else:
            self._b_row, self._b_chunk = low, first_column // CHUNK + high
        for value, name in (
            (self._a_row, "a_row"), (self._a_chunk, "a_chunk"), (self._b_row, "b_row"), (self._b_chunk, "b_chunk"),
        ):  # fmt: skip
            value.named(name)

    def start(self, stage: list[SharedView]) -> None:
        """Loads those of a k-tile's first part."""
        first = Constant(I32, 0)
        with current().unroll(len(self._a), name="block") as block:
            self._load_a(stage, first, block)
        self._load_b(stage, first)

    def multiply(self, accumulator: Accumulator, part: Value, stage: list[SharedView]) -> None:
        """accumulator += the product of a part. Meanwhile the next part's fragments are loaded from `stage`; the last
        part is followed by the first of the next k-tile. Those of A take the place of those just multiplied."""
        k, count, after = current(), self._mma.registers(CHUNK), (part + 1) % self.parts
        self._load_b(stage, after)
        self._split(part)
        with k.unroll(len(self._a), name="block") as block:
            with k.unroll(self._wide, name="pair") as pair, k.unroll(2, name="chunk") as chunk:
                first = ((part % self._of_step * self._wide + pair) * 2 + chunk) * count
                self._multiply(accumulator.blocks[block].part(first, count), block, part, pair, chunk)
            with k.when(after % self._of_step == 0):
                self._load_a(stage, after, block)

    def _split(self, part: Value) -> None:
        """Before a part is multiplied: nothing."""

    def _held(self, part: Value, pair: Value) -> Registers:
        """B's fragments of some 16 columns of a part."""
        return self._b[part % 2 * self._wide + pair]

    def _multiply(self, d: Registers, block: Value, part: Value, pair: Value, chunk: Value) -> None:
        b = self._held(part, pair).part(chunk * 2, 2)
        hw.mma_sync(d, self._a[block].part(0, 4), b, self._mma)

    def _load_a(self, stage: list[SharedView], part: Value, block: Value) -> None:
        tile, step = self._a_tile, part // self._of_step
        offset = _offset(tile, self._a_row, self._a_chunk, step, block * WGMMA_M)
        hw.load_matrix(self._a[block].part(0, 4), stage[0].address + offset, tile.major == "MN")

    def _load_b(self, stage: list[SharedView], part: Value) -> None:
        tile, step = self._b_tile, part // self._of_step
        with current().unroll(self._wide, name="pair") as pair:
            columns = (part % self._of_step * self._wide + pair) * PAIR
            offset = _offset(tile, self._b_row, self._b_chunk, step, columns)
            hw.load_matrix(self._held(part, pair).part(0, 4), stage[1].address + offset, tile.major == "MN")


class SplitFragments(Fragments):
    """Of 3xTF32: what the instruction does not read of A's and B's elements lies in registers of its own, and is
    multiplied by the other operand. What is left of both is not."""

    def __init__(self, spec: KernelSpec, first_column: Value) -> None:
        super().__init__(spec, first_column)
        self._a_low = current().register_rows(U32, len(self._a), 4, "a_low")
        self._b_low = current().register_rows(U32, self._wide, 4, "b_low")

    def _split(self, part: Value) -> None:
        k = current()
        with k.when(part % self._of_step == 0), k.unroll(len(self._a), name="block") as block, k.unroll(4) as i:
            self._a_low[block][i] = hw.low_part(self._a[block][i])
        with k.unroll(self._wide, name="pair") as pair, k.unroll(4) as i:
            self._b_low[pair][i] = hw.low_part(self._held(part, pair)[i])

    def _multiply(self, d: Registers, block: Value, part: Value, pair: Value, chunk: Value) -> None:
        a, b = self._a[block].part(0, 4), self._held(part, pair).part(chunk * 2, 2)
        hw.mma_sync(d, self._a_low[block].part(0, 4), b, self._mma)
        hw.mma_sync(d, a, self._b_low[pair].part(chunk * 2, 2), self._mma)
        hw.mma_sync(d, a, b, self._mma)


def _offset(tile: Tile, row: Value, chunk: Value, step: Value, below: Value) -> Value:
    """Where a lane's row of a ldmatrix lies: `row` and `chunk` are those of the operand's first rows (of M or N) in
    k-step 0; it begins `below` these."""
    if tile.major == "K":  # a multiple of 8 rows further the swizzle is the same
        return chunk_offset(tile, row, step * 2 + chunk) + (below * tile.pitch).to(U32)
    return chunk_offset(tile, step * (32 // tile.dtype.bytes) + row, below // CHUNK + chunk)
