"""A warp's fragments of A and B for mma.sync, of two k-steps: one is multiplied while the other is loaded."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.swizzle import chunk_offset
from gemmsmith.core.mma import CHUNK, WARP_ROWS, WGMMA_M
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value, ValueLike

BUFFERS, PAIR = 2, 2 * CHUNK
"""K-steps that are held; columns of B that one ldmatrix brings."""


class Fragments:
    """Of every 64 rows of a warpgroup's part of a tile its warps have 16 each, and of its columns, which begin
    `first_column` behind the tile's, all. ldmatrix brings four matrices of 8 rows of 16 bytes: of A both halves of the
    warp's rows, of B two chunks of 8 columns, and of both the two halves of a k-step's 32 bytes. If an operand is
    MN-major the rows that lie in shared memory are of K, and it transposes."""

    def __init__(self, spec: KernelSpec, first_column: Value) -> None:
        k, (self._a_tile, self._b_tile) = current(), spec.tiles
        self._mma, blocks, pairs = spec.mma, spec.warpgroup_rows // WGMMA_M, spec.warpgroup_columns // PAIR
        self._a = k.register_rows(U32, BUFFERS, 4 * blocks, "a_fragments")
        self._b = k.register_rows(U32, BUFFERS, 4 * pairs, "b_fragments")
        self._blocks, self._pairs, self.steps = blocks, pairs, self._a_tile.k // spec.mma.k
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

    def load(self, stage: list[SharedView], step: Value, buffer: ValueLike) -> None:
        """The fragments of a k-step of a stage."""
        k, (a, b) = current(), (view.address for view in stage)
        with k.unroll(self._blocks, name="block") as block:
            offset = _offset(self._a_tile, self._a_row, self._a_chunk, step, block * WGMMA_M)
            hw.load_matrix(self._a[buffer].part(block * 4, 4), a + offset, self._a_tile.major == "MN")
        with k.unroll(self._pairs, name="pair") as pair:
            offset = _offset(self._b_tile, self._b_row, self._b_chunk, step, pair * PAIR)
            hw.load_matrix(self._b[buffer].part(pair * 4, 4), b + offset, self._b_tile.major == "MN")

    def multiply(self, accumulator: Accumulator, buffer: ValueLike) -> None:
        """accumulator += the product of a k-step."""
        k, count = current(), self._mma.registers(CHUNK)
        with k.unroll(self._blocks, name="block") as block, k.unroll(2 * self._pairs, name="chunk") as chunk:
            d = accumulator.blocks[block].part(chunk * count, count)
            hw.mma_sync(d, self._a[buffer].part(block * 4, 4), self._b[buffer].part(chunk * 2, 2), self._mma)


def _offset(tile: Tile, row: Value, chunk: Value, step: Value, below: Value) -> Value:
    """Where a lane's row of a ldmatrix lies: `row` and `chunk` are those of the operand's first rows (of M or N) in
    k-step 0; it begins `below` these."""
    if tile.major == "K":  # a multiple of 8 rows further the swizzle is the same
        return chunk_offset(tile, row, step * 2 + chunk) + (below * tile.pitch).to(U32)
    return chunk_offset(tile, step * (32 // tile.dtype.bytes) + row, below // CHUNK + chunk)
