"""Block scales of one operand in shared memory: one scale per 1 or 128 rows (of M or N) and 128 of K.

They are loaded into the mainloop's stages, or into stages of their own. Each CTA loads its own scales, even if A and B
are multicast, so consumers release them to their own CTA only, which needs no wider scope. Scales of rows past the
operand's end multiply values that are never stored.
"""

from __future__ import annotations

from dataclasses import replace

from gemmsmith import hw
from gemmsmith.collective.global_array import RowIndices
from gemmsmith.collective.pipeline import PipelineState, PipelineTmaAsync
from gemmsmith.core.arguments import Pointer, TensorMap
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.grouping import GATHER
from gemmsmith.core.mma import WARP_THREADS
from gemmsmith.core.problem import BoundProblem, Matrix, operand_getter
from gemmsmith.core.product import Role
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.scale_spec import SCALES_PER_TMA_BOX, ScaleSpec
from gemmsmith.core.spec import KernelSpec
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedBuffer, SharedView
from gemmsmith.lang.types import I32, I64, U32, U64, ScalarType
from gemmsmith.lang.values import Constant, RegisterArray, Value
from gemmsmith.tile_scheduler.tiles import WorkTile


class StagedScales:
    """The fp32 block scales of A or of B (`role`) in shared memory, for tiles of `rows` rows and `stages` k-tiles."""

    def __init__(self, role: Role, scale: ScaleSpec, rows: int, stages: int) -> None:
        self.role, self.scale, self.name = role, scale, f"scale_{role}"
        self.source = operand_getter(self.name)
        self.num_scales, self.num_stages = scale.max_scales(rows), scale.num_stages(stages)
        nbytes, alignment = scale.staged_bytes(rows), 128 if scale.by_tma else 16
        self.stages = current_builder().shared(nbytes, stages=self.num_stages, alignment=alignment, name=self.name)

    def start_reader(self) -> ScaleReader:
        """Declare a consumer warpgroup's state, before its first tile."""
        return ScaleReader(self.stages)


class ScaleReader:
    """Reads an operand's scales from shared memory, in a consumer warpgroup.

    For each k-tile of a tile `wait` is called, then `read`, then `release`. Here only `read` does something, since the
    scales arrive and leave with the mainloop's stage; in KMajorScaleReader the scales have a pipeline of their own.
    """

    def __init__(self, stages: SharedBuffer) -> None:
        self.stages = stages

    def skip(self, k_tiles: Value, tiles: Value | int) -> None:
        """Skip `tiles` tiles of `k_tiles` k-tiles, which are another warpgroup's."""

    def begin_tile(self) -> None:
        """Begin a tile."""

    def wait(self, tile: WorkTile) -> None:
        """Wait for the scales of a tile's next k-tile, whose mainloop stage is full."""

    def read(self, stage: Value, first: Value, registers: RegisterArray, index: Value, count: int) -> None:
        """Load scales number `first` to `first + count - 1` of a stage into `registers`, from register `index` on."""
        hw.load_shared(registers.slice(index, count), self.stages[stage].at(first, 4).address)

    def release(self, tile: WorkTile) -> None:
        """Release the scales of a tile's k-tile after its last `read`. Called by all lanes of a warp."""


class TmaScales(StagedScales):
    """Scales per row, contiguous along the rows, which TMA loads into the mainloop's stages.

    Kernel argument: `scale_a` or `scale_b`, a tensor map.
    """

    def __init__(self, role: Role, scale: ScaleSpec, rows: int, stages: int) -> None:
        super().__init__(role, scale, rows, stages)
        self.map = current_builder().tensor_map(self.name, self._tensor_map)

    def limit_prologue(self, k_tiles: Value, tile: WorkTile) -> Value:
        """Return how many k-tiles of the first tile the prologue may load: at most `k_tiles`, here all of these."""
        return k_tiles

    def producer_start_state(self, prologue_k_tiles: Value) -> PipelineState | None:
        """Return the producer's state in the scales' own pipeline, after what the prologue has loaded.

        None: the scales have no pipeline.
        """
        return None

    def load(
        self, stage: Value, full: SharedView, tile: WorkTile, k_tile: Value, k_block_idx: Value,
        write: PipelineState | None,
    ) -> None:  # fmt: skip
        """Issue the load of a k-tile's scales into a stage. One thread executes it.

        `full`: the stage's full barrier. `k_tile`: number of the k-tile in the tile, in the order in which they are
        loaded. `k_block_idx`: index of its scale block along the GEMM's K. `write`: what `producer_start_state` has
        returned; None: there is no such pipeline, or the prologue issues the load, in place of the producer.
        """
        coord = tile.coord(self.role)
        hw.tma_load(self.map, coord.mn, k_block_idx, coord.batch, self.stages[stage], full, EVICT_NORMAL)

    def stage_bytes(self, p: BoundProblem) -> int:
        """Return the bytes that a load adds to those of a mainloop stage."""
        return self.num_scales * 4 if p.k else 0

    def _tensor_map(self, p: BoundProblem) -> TensorMap:
        scales, pointer = self.source(p)
        return _make_tensor_map(pointer, scales.T, p, (self.num_scales, 1, 1))


class TmaKMajorScales(TmaScales):
    """Scales per row, contiguous along K, which TMA loads into stages of their own.

    A TMA box is at least 16 bytes, at a multiple of 16, so it holds the scales of SCALES_PER_TMA_BOX k-tiles. It stays
    longer than a stage of the mainloop, and therefore has its own pipeline. Each tile starts a new box.
    `consumer_groups`: consumer warpgroups that take boxes in turn (pingpong: all of them; else 1, since they share each
    box).
    """

    def __init__(self, role: Role, scale: ScaleSpec, rows: int, stages: int, consumer_groups: int) -> None:
        super().__init__(role, scale, rows, stages)
        box_bytes = SCALES_PER_TMA_BOX * self.num_scales * 4
        self.pipeline = PipelineTmaAsync(
            self.num_stages, transaction_bytes=box_bytes, consumer_groups=consumer_groups, name=self.name
        )

    def stage_bytes(self, p: BoundProblem) -> int:
        """Return 0: a box completes on a barrier of its own pipeline."""
        return 0

    def _tensor_map(self, p: BoundProblem) -> TensorMap:
        scales, pointer = self.source(p)
        return _make_tensor_map(pointer, scales, p, (SCALES_PER_TMA_BOX, self.num_scales, 1))

    def limit_prologue(self, k_tiles: Value, tile: WorkTile) -> Value:
        """Return how many of the first `k_tiles` k-tiles have their scales in the first box, the only one it loads."""
        in_first_box = SCALES_PER_TMA_BOX - tile.k_tile_index(Constant(I32, 0)) % SCALES_PER_TMA_BOX
        return current_builder().minimum(k_tiles, in_first_box)

    def producer_start_state(self, prologue_k_tiles: Value) -> PipelineState:
        """Return the producer's state, after the box that the prologue has loaded, if it has."""
        return self.pipeline.producer_start_state(current_builder().select(prologue_k_tiles > 0, 1, 0))

    def load(
        self, stage: Value, full: SharedView, tile: WorkTile, k_tile: Value, k_block_idx: Value,
        write: PipelineState | None,
    ) -> None:  # fmt: skip
        """Issue the load of a box if the k-tile is the box's first one. One thread executes it.

        `write` None: the prologue issues it, into the stage of k-tile 0.
        """
        k, coord, is_first = current_builder(), tile.coord(self.role), k_tile == 0
        with k.when(is_first | _is_box_boundary(tile, k_block_idx, 0) if write else is_first):
            box = write.index if write else k_tile
            if write:
                self.pipeline.producer_acquire(write)
            else:
                self.pipeline.producer_expect_bytes(box)
            coords = k_block_idx - k_block_idx % SCALES_PER_TMA_BOX, coord.mn, coord.batch
            hw.tma_load(self.map, *coords, self.stages[box], self.pipeline.full_barrier(box), EVICT_NORMAL)
            if write:
                write.advance()

    def start_reader(self) -> KMajorScaleReader:
        return KMajorScaleReader(self)


class KMajorScaleReader(ScaleReader):
    """Reads scales out of boxes, each of which is released after its last k-tile."""

    def __init__(self, scales: TmaKMajorScales) -> None:
        super().__init__(scales.stages)
        self._pipeline, self._name = scales.pipeline, scales.name
        self._read_state = scales.pipeline.consumer_start_state()
        self._k_tile = current_builder().var(I32, 0, f"{scales.name}_k_tile")

    def skip(self, k_tiles: Value, tiles: Value | int) -> None:
        self._read_state.skip((k_tiles + (SCALES_PER_TMA_BOX - 1)) // SCALES_PER_TMA_BOX * tiles)

    def begin_tile(self) -> None:
        """Begin a tile, and a box."""
        self._k_tile.set(0)

    def wait(self, tile: WorkTile) -> None:
        self._pipeline.consumer_wait(self._read_state)
        self._k_block = tile.k_tile_index(self._k_tile.get()).named("k_block_idx")

    def read(self, stage: Value, first: Value, registers: RegisterArray, index: Value, count: int) -> None:
        """Load scales number `first` to `first + count - 1` of the current k-tile from its box.

        They go into `registers`, from register `index` on. The scales of one row are contiguous in a box, by k-tile.
        """
        box = self.stages[self._read_state.index].at(self._k_block % SCALES_PER_TMA_BOX, 4)
        with current_builder().unroll(count) as i:
            hw.load_shared(registers.slice(index + i, 1), box.at(first + i, 4 * SCALES_PER_TMA_BOX).address)

    def release(self, tile: WorkTile) -> None:
        """Advance to the next k-tile, and release the box after its last one."""
        k, next_k_tile = current_builder(), (self._k_tile.get() + 1).with_name_hint(f"{self._name}_next_k_tile")
        is_tile_end = next_k_tile == tile.k_tiles
        with k.when(is_tile_end | _is_box_boundary(tile, self._k_block, SCALES_PER_TMA_BOX - 1)):
            self._pipeline.consumer_release(self._read_state)
            self._read_state.advance()
        self._k_tile.set(next_k_tile)


def _is_box_boundary(tile: WorkTile, k_block_idx: Value, boundary: int) -> Value:
    """Return whether a scale block is number `boundary` of its box, in the order in which the tile uses them.

    The order is reversed if the tile sums its k-tiles from the last to the first.
    """
    if tile.reverse_k is None:
        return k_block_idx % SCALES_PER_TMA_BOX == boundary
    reverse_boundary = SCALES_PER_TMA_BOX - 1 - boundary
    return k_block_idx % SCALES_PER_TMA_BOX == current_builder().select(tile.reverse_k, reverse_boundary, boundary)


class LaneCopiedScales(StagedScales):
    """Scales in any layout, which the lanes of one warp copy one by one into the mainloop's stages.

    They use cp.async if the scales are fp32; ue8m0 scales are loaded, converted and stored. If the operand's rows
    alternate between two matrices (`scale.interleaved`), so do the scales in a stage.

    Kernel arguments: `scale_a` or `scale_b`, the address of the scales; their extent along M or N (in scales), and
    their strides; `scale_a_second` or `scale_b_second`, the address of the second matrix's scales. If the operand's
    rows are gathered (`gathers`): those of RowIndices.
    """

    def __init__(self, role: Role, scale: ScaleSpec, rows: int, stages: int, gathers: bool) -> None:
        def parameter(name: str, attribute: str, scalar_type: ScalarType = I64) -> Value:
            return k.parameter(f"{self.name}_{name}", scalar_type, lambda p: getattr(self.source(p)[0], attribute))

        super().__init__(role, scale, rows, stages)
        k = current_builder()
        self.address = k.pointer(self.name, lambda p: self._addresses(p)[0])
        self.second = k.pointer(f"{self.name}_second", lambda p: self._addresses(p)[1]) if scale.interleaved else None
        self.mn_extent = parameter("mn_extent", "rows", I32)
        self.row_stride = parameter("mn_stride", "row_stride")
        self.k_stride = parameter("k_stride", "col_stride")
        self.batch_stride = parameter("batch_stride", "batch_stride")
        self.indices = RowIndices(GATHER, self.name, lambda p: self.source(p)[0].rows) if gathers else None

    @property
    def uses_cp_async(self) -> bool:
        """True if the scales are copied by cp.async; False if they must be converted on the way to shared memory."""
        return self.scale.dtype == FP32

    def _addresses(self, p: BoundProblem) -> tuple[Pointer, Pointer]:
        """Return the addresses of the scales of two alternating matrices, in the order in which their rows alternate.

        A tile begins with rows of the matrix at the lower address (see InterleaveOrder). The scales are two arrays,
        too, and the array at the lower address may belong to the other matrix.
        """
        (scales, first), (operand, _) = self.source(p), operand_getter(self.role)(p)
        distance = abs(scales.interleave_stride) * self.scale.dtype.bytes
        second = replace(first, offset=distance, reaches_other=True)
        # A stride is negative if the second array is at the lower address. With equal signs the lower array of scales
        # belongs to the lower matrix.
        in_order = (scales.interleave_stride < 0) == (operand.interleave_stride < 0)
        return (first, second) if in_order else (second, first)


class LaneCopies:
    """The copies of a tile's scales by one warp: for each k-tile, lane l copies scales l, l + 32, ... of the tile."""

    def __init__(self, scales: LaneCopiedScales, tile: WorkTile) -> None:
        """Compute the address of this lane's first scale, and load the indices of its rows if they are gathered."""
        k, x, nbytes, coord = current_builder(), scales, scales.scale.dtype.bytes, tile.coord(scales.role)
        self._scales, matrices = scales, x.scale.matrices
        address: Value = x.address
        row = (coord.mn // x.scale.period * matrices + k.lane).with_name_hint(f"{x.name}_mn")
        k_block = tile.k_tile_index(Constant(I32, 0))
        self._gathered_rows: RegisterArray | None = None
        if x.indices:
            self._gathered_rows = k.registers(I32, ceil_div(x.num_scales, WARP_THREADS), f"{x.name}_row")
            for i in range(len(self._gathered_rows)):
                in_tile = row + i * WARP_THREADS < coord.end(x.mn_extent)
                self._gathered_rows[i] = x.indices.load(row + i * WARP_THREADS, in_tile)
            row = Constant(I32, 0)
        else:
            self._rows_remaining = (x.mn_extent - row).named(f"{x.name}_mn_remaining")
        if x.second is not None:
            address = k.select(row % matrices != 0, x.second, address)
        batch_offset, row_offset = coord.batch.to(I64) * x.batch_stride, (row // matrices).to(I64) * x.row_stride
        offset = batch_offset + row_offset + k_block.to(I64) * x.k_stride
        self._next_address = k.var(I64, address.to(I64) + offset * nbytes, f"{x.name}_ptr")
        self._step = (x.k_stride * nbytes).with_name_hint(f"{x.name}_k_stride_bytes")
        """Bytes from one scale block to the next."""
        if tile.reverse_k is not None:
            self._step = k.select(tile.reverse_k, -self._step, self._step).named(f"{x.name}_step")

    def copy_next(self, stage: Value) -> None:
        """Issue the copies of the next scale block along K into a stage."""
        k, x, address = current_builder(), self._scales, self._next_address.get()
        # Opaque: recompute addresses instead of keeping one register pair per copy.
        base = hw.opaque(address).with_name_hint(f"{x.name}_opaque_ptr")
        with k.unroll(0, x.num_scales, WARP_THREADS, name="first") as first:
            row, has_row = self._row(first)
            row_of_matrix = row // x.scale.matrices
            source = (base + row_of_matrix.to(I64) * x.row_stride * x.scale.dtype.bytes).to(U64)
            with k.when(first + k.lane < x.num_scales):
                self._copy(x.stages[stage].at(first + k.lane, 4), source, has_row)
        self._next_address.set(address + self._step)

    def _row(self, first: Value) -> tuple[Value, Value]:
        """Return (row, exists) of this lane's scale among the 32 from number `first` on.

        `row` counts from the row at the lane's address, `_next_address`. `exists`: the operand has such a row.
        """
        if self._gathered_rows is None:
            return first, first < self._rows_remaining
        row = hw.opaque(self._gathered_rows[first // WARP_THREADS])  # for the same reason as the address
        return row, row >= 0

    def _copy(self, destination: SharedView, source: Value, pred: Value) -> None:
        """Copy one scale from `source` in global memory to `destination`, as fp32; it is zero if `pred` is false."""
        k = current_builder()
        if self._scales.uses_cp_async:
            hw.cp_async_copy(destination.address, source, k.select(pred, 4, 0).to(U32), 4)
        else:
            scale = hw.unpack_ue8m0(hw.load_global_u8_or_u16(source, pred, 8).to(U32))
            hw.store_shared_word(destination.address, scale, f"{self._scales.name}_scalar")


def _make_tensor_map(address: Pointer, matrix: Matrix, p: BoundProblem, box: tuple[int, int, int]) -> TensorMap:
    """Return the tensor map of a row-major matrix of scales, with boxes of shape `box`: (columns, rows, batch).

    Without K nothing is loaded; the map is then any that can be encoded, since it cannot have an extent of 0.
    """
    if not p.k:
        return TensorMap(0, FP32, (16, 1, 1), (64, 0), (16, 1, 1), 0)
    extents, strides = (matrix.cols, matrix.rows, matrix.batch), (matrix.row_stride * 4, matrix.batch_stride * 4)
    return TensorMap(address, FP32, extents, strides, box, 0)


def make_staged_scales(spec: KernelSpec, consumer_groups: int) -> list[StagedScales]:
    """Return the staged scales of the operands that have block scales: of A, then of B."""
    staged: list[StagedScales] = []
    for operand, scale in zip(spec.operands, spec.scales, strict=True):
        if scale:
            arguments = operand.role, scale, operand.tile.mn, spec.config.stages
            if scale.by_tma == "K":
                staged.append(TmaKMajorScales(*arguments, consumer_groups))
            elif scale.by_tma == "MN":
                staged.append(TmaScales(*arguments))
            else:
                staged.append(LaneCopiedScales(*arguments, spec.gathers_rows_of(operand.role)))
    return staged
