"""The last k-tile of a group along K: what follows the end of the group is zeroed in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from gemmsmith import hw
from gemmsmith.collective.swizzle import VECTOR_BYTES
from gemmsmith.core.mma import THREADS_PER_WARPGROUP
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.tile_scheduler.tiles import WorkTile


class RaggedK:
    """Zeroes what follows the end of a group along K in the group's last k-tile.

    TMA has loaded the next group's elements there. The consumer warpgroups zero both operands: if only one were zero,
    its product with NaN in the other would be NaN. The operands are MN-major, so the elements are whole rows of the
    boxes, whatever the swizzle.
    """

    def __init__(self, spec: KernelSpec) -> None:
        """Declare the barrier that the consumer warpgroups share; their threads follow those of the producers."""
        self._operand_tiles, self._tile_k = spec.tiles, spec.config.tile[2]
        self._num_threads = THREADS_PER_WARPGROUP * spec.config.consumers
        self._first_thread = THREADS_PER_WARPGROUP * spec.design.producer_warpgroups
        self._barrier = current_builder().named_barriers(1)

    def zero_past_end(self, tile: WorkTile, k_tile: Value, stage: Sequence[SharedView]) -> None:
        """Zero the elements past the end of the tile's group in k-tile number `k_tile` of the tile.

        The `stage` of the k-tile is full. All threads of the consumer warpgroups execute it.
        """
        k = current_builder()
        k_valid = (tile.group_k_extent - k_tile * self._tile_k).named("k_valid")
        with k.when(k_valid < self._tile_k):
            k.comment("the rest of the k-tile is the next group's")
            thread = k.thread - self._first_thread
            for operand, view in zip(self._operand_tiles, stage, strict=True):
                per_row = operand.pitch // VECTOR_BYTES
                rows = self._num_threads // per_row
                with k.range(k_valid, self._tile_k, rows, name="first_row") as first_row:
                    row = first_row + thread // per_row
                    with k.when(row < self._tile_k), k.unroll(operand.boxes, name="box") as box:
                        row_in_box = view.at(box, operand.box_bytes).at(row, operand.pitch)
                        vector = row_in_box.at(thread % per_row, VECTOR_BYTES)
                        zeros = k.registers(U32, 4, "zeros")
                        with k.unroll(4) as i:
                            zeros[i] = Constant(U32, 0)
                        hw.store_shared(zeros, vector.address)
            hw.fence_proxy_async()
            hw.barrier_sync(self._barrier, self._num_threads)
