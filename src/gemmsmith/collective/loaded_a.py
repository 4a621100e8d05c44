"""An MN-major A of 32-bit elements, which wgmma reads K-major only: threads load its fragments into registers."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.swizzle import CHUNK_BYTES, chunk_offset
from gemmsmith.core.mma import FRAGMENT_REGISTERS, HALF_ROWS, QUAD, WARP_ROWS, WGMMA_M
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import PRED, U32
from gemmsmith.lang.values import Registers, Value, ValueLike, as_value


def accumulator_of(spec: KernelSpec) -> Accumulator:
    """The accumulator of a math warpgroup, for A as it lies. Recorded in its role."""
    if spec.a_in_registers:
        return AccumulatorOfLoadedA(spec)
    return Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)


class AccumulatorOfLoadedA(Accumulator):
    """The same, of a k-tile whose k-steps are groups of their own: the fragments of a k-step are loaded while the
    k-steps before it, up to `spec.a_steps` less one, are multiplied."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)
        k, blocks = current(), len(self.blocks)
        self._fragments = [
            k.register_rows(U32, blocks, FRAGMENT_REGISTERS, f"a_fragments_{i}") for i in range(spec.a_steps)
        ]
        self._lanes = LanesOfA(spec)

    def multiply(self, a: SharedView, b: SharedView, accumulate: ValueLike) -> None:
        """Issues acc = a @ b^T (+ acc) over the tile's whole depth, and returns while its last k-steps run; what was
        issued before is done."""
        assert b.tile is not None
        held = len(self._fragments)
        with current().unroll(b.tile.k // self.mma.k // held, name="k_steps") as steps:
            for i, fragments in enumerate(self._fragments):
                step = steps * held + i
                hw.wgmma_wait(held - 1)
                for block, fragment in enumerate(fragments):
                    hw.compiler_fence(fragment)
                    self._lanes.load(fragment, a, step, block)
                keep = (as_value(accumulate, PRED) | (step > 0)).named("accumulate")
                b_step = hw.descriptor(b, step).named("b_descriptor")
                hw.wgmma_fence()
                for d, fragment in zip(self.blocks, fragments, strict=True):
                    hw.wgmma_mma_register_a(d, fragment, b_step, keep, self.n, self.mma, b.tile.major)
                hw.wgmma_commit()
        hw.sync_warp()  # one lane hands the stage back for all

    def wait(self, pending: int) -> None:
        """As of any accumulator; behind `multiply` only the k-tile just issued runs."""
        if pending == 0:
            self.finish()


class LanesOfA:
    """A thread's elements of a k-step of 64 rows of A: of every 8 x 4 elements (M x K) of its warp's 16 x 8 one.

    A row of a box, of one k, is 128 bytes, 32 of M; the numbers of its 16-byte chunks are xor-ed with k % 8. So 8 rows
    of M lie in the same two of eight for two neighbors of K. Of two neighboring lanes one therefore loads first what
    lies 4 of K further, and no two meet in a bank.
    """

    def __init__(self, spec: KernelSpec) -> None:
        lane, warp = current().lane, current().warp_index % 4
        row, column, self._odd = warp * WARP_ROWS + lane // QUAD, lane % QUAD, (lane % 2 == 1).named("odd")
        self._offsets = [
            [
                self._offset(spec.tiles[0], row + half * HALF_ROWS, column + (lane + turn) % 2 * QUAD)
                for turn in range(2)
            ]
            for half in range(2)
        ]

    @staticmethod
    def _offset(tile: Tile, row: Value, column: Value) -> Value:
        """Bytes from a tile's start to an element."""
        of_chunk = CHUNK_BYTES // tile.dtype.bytes
        return chunk_offset(tile, column, row // of_chunk, row % of_chunk * tile.dtype.bytes).named("a_offset")

    def load(self, fragment: Registers, a: SharedView, step: Value, block: int) -> None:
        """Loads those of a k-step, in the `block`-th 64 rows, into the registers of A (PTX ISA, wgmma .tf32): the rows
        of both halves, then those 4 of K further."""
        k, tile = current(), a.tile
        assert tile is not None
        at = a.at(step, 2 * QUAD * tile.pitch).at(block, WGMMA_M // tile.box_inner * tile.box_bytes)
        for half, offsets in enumerate(self._offsets):
            first, second = (hw.load_shared_word(at.address + offset, U32, "word") for offset in offsets)
            fragment[half] = k.select(self._odd, second, first)
            fragment[half + 2] = k.select(self._odd, first, second)
