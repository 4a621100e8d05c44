"""wgmma with A in registers (CUTLASS: GMMA RS), for an MN-major A of 32-bit elements.

From shared memory wgmma reads 32-bit elements K-major only.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.swizzle import VECTOR_BYTES, swizzled_vector_offset
from gemmsmith.core.mma import A_FRAGMENT, FRAGMENT_HALF_ROWS, FRAGMENT_ROWS_PER_WARP, LANES_PER_QUAD, WGMMA_M
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import PRED, U32
from gemmsmith.lang.values import RegisterArray, Value, ValueLike, as_value

K_PER_STEP = 2 * LANES_PER_QUAD
"""Elements of K of one wgmma of 32-bit elements (PTX ISA)."""


def make_accumulator(spec: KernelSpec) -> Accumulator:
    """Return a consumer warpgroup's accumulator; if wgmma cannot read A's layout from shared memory, A is in registers.

    Call it inside the consumer warpgroups' branch.
    """
    if spec.a_in_registers:
        return RegisterAAccumulator(spec)
    return Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)


class RegisterAAccumulator(Accumulator):
    """An accumulator that multiplies with A in registers, one wgmma group per k-step (the K of one wgmma).

    There are `spec.a_k_steps` buffers of A's fragments: those of a k-step are loaded while the k-steps before it, at
    most `spec.a_k_steps` - 1, are multiplied.
    """

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)
        k, num_mma_m = current_builder(), len(self.fragments)
        self._a_fragments = [
            k.registers_2d(U32, num_mma_m, A_FRAGMENT.registers, f"a_frag_{i}") for i in range(spec.a_k_steps)
        ]
        self._loader = AFragmentLoader(spec)

    @property
    def widths(self) -> list[int]:
        """All columns."""
        return [self.n]

    def multiply(self, a: SharedView, b: SharedView, accumulate: ValueLike, n: int | None = None) -> None:
        """Issue acc = a @ b^T (+ acc if `accumulate`) over the tile's whole K, for all columns.

        Afterwards the last `spec.a_k_steps` - 1 k-steps may still be in flight; all earlier ones are complete.
        """
        assert b.tile is not None
        buffers = len(self._a_fragments)
        with current_builder().unroll(b.tile.k // self.mma.k // buffers, name="k_steps") as k_steps:
            for i, a_fragments in enumerate(self._a_fragments):
                k_step = k_steps * buffers + i
                hw.wgmma_wait(buffers - 1)
                for mma_m, a_fragment in enumerate(a_fragments):
                    hw.fence_operand(a_fragment)
                    self._loader.load(a_fragment, a, k_step, mma_m)
                scale_d = (as_value(accumulate, PRED) | (k_step > 0)).named("accumulate")
                b_descriptor = hw.descriptor(b, k_step).named("b_descriptor")
                hw.wgmma_fence()
                for d, a_fragment in zip(self.fragments, a_fragments, strict=True):
                    hw.wgmma_mma_rs(d, a_fragment, b_descriptor, scale_d, self.n, self.mma, b.tile.major)
                hw.wgmma_commit()
        hw.fence_proxy_async()  # orders the reads of A before TMA writes the stage
        current_builder().comment("wait until all lanes have read the stage that is released next")
        hw.sync_warp()

    def wait(self, pending: int) -> None:
        """Wait until at most `pending` k-tiles are in flight; `multiply` leaves one, which it has just issued."""
        if pending == 0:
            self.wait_complete()


class AFragmentLoader:
    """Loads a thread's elements of A for a k-step: one of every 8 x 4 elements (M x K) of its warp's 16 x 8, so four.

    A row of a box has one index k of K and 32 elements along M, 128 bytes. The swizzle xors the indices of its 16-byte
    vectors with k % 8. 8 consecutive rows of M fill two vectors, and for two neighboring k these are the same two
    places, that is the same banks. Therefore, of two adjacent lanes, the odd one loads its two elements of a row in
    reverse order, the one at k + 4 first; then no two lanes access the same bank at the same time.
    """

    def __init__(self, spec: KernelSpec) -> None:
        """Compute the offsets in a tile of the four elements that this thread loads per k-step."""
        lane, warp = current_builder().lane, current_builder().warp_index % 4
        row = (warp * FRAGMENT_ROWS_PER_WARP + lane // LANES_PER_QUAD).with_name_hint("a_row")
        column = (lane % LANES_PER_QUAD).with_name_hint("a_k")
        self._is_odd_lane = (lane % 2 == 1).named("is_odd_lane")
        a_tile, _ = spec.tiles
        per_vector = VECTOR_BYTES // a_tile.dtype.bytes

        def offset(row_half: int, load: int) -> Value:
            """Return the byte offset in a tile of the element that this thread loads as number `load` of a row.

            `row_half`: its row is `row`, or FRAGMENT_HALF_ROWS below. Odd lanes have the opposite order along K.
            """
            element_row = (row + row_half * FRAGMENT_HALF_ROWS).with_name_hint("a_row")
            element_k = column + (lane + load) % 2 * LANES_PER_QUAD
            vector_idx = (element_row // per_vector).with_name_hint("a_vector")
            byte = element_row % per_vector * a_tile.dtype.bytes
            element_k.with_name_hint("a_smem_row")
            return swizzled_vector_offset(a_tile, element_k, vector_idx, byte).named("a_smem_offset")

        self._offsets = [[offset(row_half, load) for load in range(2)] for row_half in range(2)]

    def load(self, fragment: RegisterArray, a: SharedView, k_step: Value, mma_m: int) -> None:
        """Load A's fragment of a k-step and of the `mma_m`-th 64 rows.

        Registers 0 and 1 hold rows r and r + 8 at index k of K, registers 2 and 3 the same rows at k + 4 (PTX ISA,
        wgmma .tf32). Odd lanes load the element at k + 4 first.
        """
        k, tile = current_builder(), a.tile
        assert tile is not None
        view = a.at(k_step, K_PER_STEP * tile.pitch).at(mma_m, WGMMA_M // tile.box_inner * tile.box_bytes)
        for row_half, offsets in enumerate(self._offsets):
            first, second = (hw.load_shared_word(view.address + offset, U32, "a_word") for offset in offsets)
            fragment[row_half] = k.select(self._is_odd_lane, second, first)
            fragment[row_half + 2] = k.select(self._is_odd_lane, first, second)
