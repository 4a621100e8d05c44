"""The fp32 GEMM of a warpgroup on CUDA cores (CUTLASS: SIMT): operands and fragments.

Each thread multiplies the rows of A and the columns of B of its elements in the fragment of core/mma.py, so that the
epilogue is the same as with tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.mma import (
    FMA,
    FRAGMENT_HALF_ROWS,
    FRAGMENT_ROWS_PER_WARP,
    LANES_PER_QUAD,
    N8_COLUMNS,
    WARP_THREADS,
    WGMMA_M,
)
from gemmsmith.core.register_budgets import MAX_DOUBLE_BUFFERED_REGISTERS
from gemmsmith.core.spec import KernelSpec, MmaOperand
from gemmsmith.core.tile import Tile
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import F32, I32, I64, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value, ValueLike, as_value
from gemmsmith.tile_scheduler.tiles import OperandCoord

VECTOR_ELEMENTS = 4
"""Elements of a thread's shared memory load."""
WORD_BYTES = 4
"""Bytes of an element."""
K_PER_BANK_PERIOD = 8
"""Indices along K after which the elements of one smem index are in the same banks again."""
MAX_COPY_LANES_ALONG_K = 16
"""Maximum lanes that copy consecutive elements of one row along K: an SM's L1 serves each 128-byte line separately
(docs/notebook/simulator-counters.md)."""


class SmemVectorLayout:
    """The order in which the rows of A (columns of B) of a tile are stored in shared memory.

    A row's (column's) position in that order is its smem index. The elements that one thread multiplies are stored as
    vectors, and the vectors of adjacent lanes are adjacent, so loads have no bank conflicts. The two columns of a pair
    are swapped so that FFMA reads a column and its accumulator from different register banks. `name`: "a" or "b".
    """

    def __init__(self, spec: KernelSpec, name: str) -> None:
        """Derive the order from the rows and columns that a thread has in a wgmma accumulator (core/mma.py)."""
        self.is_a = name == "a"
        num_mma_m, self._columns = spec.warpgroup_rows // WGMMA_M, spec.warpgroup_columns
        self.elements_per_thread = 2 * num_mma_m if self.is_a else self._columns // N8_COLUMNS * 2
        """Rows of A, or columns of B, that a thread computes."""
        self.vector_elements = min(VECTOR_ELEMENTS, self.elements_per_thread)
        """Elements of one load."""
        self.lanes_along_mn = 32 // LANES_PER_QUAD if self.is_a else LANES_PER_QUAD
        """Lanes of a warp along M (A) or N (B); the other lanes hold the same rows (columns)."""

    def mn_of_smem_index(self, smem_index: ValueLike) -> Value:
        """Return the tile's row (column) that is stored at a smem index.

        A smem index counts, from the innermost on: the elements of a vector, the lanes, the vectors of a thread, and
        the units: warps for A, warpgroups for B.
        """
        per_unit = self.lanes_along_mn * self.elements_per_thread
        per_vector = self.lanes_along_mn * self.vector_elements
        smem_index = as_value(smem_index, I32)
        unit_idx, lane = smem_index // per_unit, smem_index % per_vector // self.vector_elements
        element = smem_index % per_unit // per_vector * self.vector_elements + smem_index % self.vector_elements
        element.with_name_hint("frag_element_idx")
        if self.is_a:
            return element // 2 * WGMMA_M + unit_idx * FRAGMENT_ROWS_PER_WARP + element % 2 * FRAGMENT_HALF_ROWS + lane
        return unit_idx * self._columns + element // 2 * N8_COLUMNS + lane * 2 + (element + 1) % 2

    def vector_smem_index(self, unit_idx: Value, lane: Value, vector_idx: Value) -> Value:
        """Return the smem index of the first element of a lane's `vector_idx`-th vector.

        `unit_idx`: the lane's warp in its warpgroup for A, its warpgroup for B.
        """
        lane_along_mn = lane // LANES_PER_QUAD if self.is_a else lane % LANES_PER_QUAD
        per_unit, per_row = (self.lanes_along_mn * x for x in (self.elements_per_thread, self.vector_elements))
        return unit_idx * per_unit + vector_idx * per_row + lane_along_mn * self.vector_elements

    def xor_mask(self, tile: Tile, k: Value) -> Value:
        """Return the mask that smem indices at element `k` of K are xor-ed with.

        In a K-major tile the halves of the vectors are swapped at every other K_PER_BANK_PERIOD of K, so that a warp's
        copies of consecutive elements of K of one row hit different banks.
        """
        swaps = tile.major == "K" and tile.k > K_PER_BANK_PERIOD
        return k // K_PER_BANK_PERIOD % 2 * (self.vector_elements // 2) if swaps else Constant(I32, 0)


class SimtOperand:
    """An fp32 operand of any strides, copied word by word into a tile in each of `stages` stages.

    A tile holds all rows (columns) of index 0 of K, then those of index 1, and so on. Elements out of bounds are zeros.
    Kernel arguments: `name`, its address; `name`_mn_extent, its rows (columns of B); `name`_mn_stride_bytes (if
    K-major), `name`_k_stride_bytes and `name`_batch_stride_bytes.
    """

    def __init__(self, spec: KernelSpec, operand: MmaOperand, stages: int, threads: int) -> None:
        k, name, tile, source = current_builder(), operand.name, operand.tile, operand.source
        self.role, self.tile, self.threads = operand.role, tile, threads
        self.address = k.pointer(name, lambda p: source(p)[1])
        self.mn_extent: Value = k.parameter(f"{name}_mn_extent", compute=lambda p: source(p)[0].rows)
        self.mn_stride: Value = Constant(I64, WORD_BYTES)
        if tile.major == "K":
            self.mn_stride = k.parameter(f"{name}_mn_stride_bytes", I64, lambda p: source(p)[0].row_stride * WORD_BYTES)
        self.k_stride = k.parameter(f"{name}_k_stride_bytes", I64, lambda p: source(p)[0].col_stride * WORD_BYTES)
        self.batch_stride = k.parameter(
            f"{name}_batch_stride_bytes", I64, lambda p: source(p)[0].batch_stride * WORD_BYTES
        )
        self.stages = k.shared(tile.k * _smem_k_stride_bytes(tile), stages=stages, alignment=128, name=name.upper())
        self.name, self.layout = name, SmemVectorLayout(spec, name)

    def start_copies(self) -> SimtCopies:
        return SimtCopies(self)


class SimtCopies:
    """One thread's copies of an operand: where its next ones read from, and the cp.async instructions.

    Consecutive lanes copy consecutive elements along the operand's contiguous dimension. If that is K, a run is at most
    half a 128-byte line, and the next lanes continue at the next smem index (see `SmemVectorLayout`). The writes to
    shared memory have no bank conflicts.
    """

    def __init__(self, operand: SimtOperand) -> None:
        k, tile, name, threads = current_builder(), operand.tile, operand.name, operand.threads
        self._operand, self._tile, self._layout = operand, tile, operand.layout
        line, is_k_major = "row" if self._layout.is_a else "column", tile.major == "K"
        k.comment(f"shared memory has {name.upper()}'s {line}s in the order of fragments")
        inner_threads = min(max(WARP_THREADS, threads // tile.k), tile.mn)
        if is_k_major:
            inner_threads = min(tile.k, MAX_COPY_LANES_ALONG_K)
        inner_idx, outer_idx = k.thread % inner_threads, k.thread // inner_threads
        outer_threads = threads // inner_threads
        smem_index, self._thread_k = (outer_idx, inner_idx) if is_k_major else (inner_idx, outer_idx)
        self._mn_and_k_per_iter = (outer_threads, inner_threads) if is_k_major else (inner_threads, outer_threads)
        """Rows, and elements of K, that the threads copy per iteration."""
        self._thread_mn = self._layout.mn_of_smem_index(smem_index).named(f"{name}_thread_mn")
        smem_index.named(f"{name}_smem_{line}")
        self._thread_k.named(f"{name}_thread_k")
        swizzled_index = smem_index ^ self._layout.xor_mask(tile, self._thread_k)
        smem_offset = self._thread_k * _smem_k_stride_bytes(tile) + swizzled_index * WORD_BYTES
        self._thread_smem_offset = smem_offset.to(U32).named(f"{name}_thread_smem_offset")
        self._gmem_ptr = k.var(U64, operand.address, f"{name}_gmem_ptr")
        # Rows of the operand from this thread's first on.
        self._mn_remaining = k.var(I32, 0, f"{name}_mn_remaining")

    def set_tile(self, coord: OperandCoord, first_k: Value) -> None:
        row_offset = (coord.mn + self._thread_mn).to(I64) * self._operand.mn_stride
        offset = row_offset + (first_k + self._thread_k).to(I64) * self._operand.k_stride
        self._gmem_ptr.set(self._operand.address + (coord.batch.to(I64) * self._operand.batch_stride + offset).to(U64))
        self._mn_remaining.set(self._operand.mn_extent - coord.mn - self._thread_mn)

    def copies(self, stage: Value, k_remaining: Value | None) -> list[Callable[[], None]]:
        rows, k_per_iter = self._mn_and_k_per_iter
        return [
            partial(self._copy, stage, k_remaining, k_offset, mn_offset)
            for k_offset in range(0, self._tile.k, k_per_iter)
            for mn_offset in range(0, self._tile.mn, rows)
        ]

    def _copy(self, stage: Value, k_remaining: Value | None, k_offset: int, mn_offset: int) -> None:
        """Copy the word that is `k_offset` elements of K and `mn_offset` smem indices after the thread's first."""
        k, tile = current_builder(), self._tile
        iter_offset = k_offset * _smem_k_stride_bytes(tile) + mn_offset * WORD_BYTES
        destination = self._operand.stages[stage].address + self._thread_smem_offset + iter_offset
        # mn_offset is a multiple of a power of two that is larger than the thread's first index, so it adds the same
        # row_delta to the row of every thread.
        row_delta = as_value(self._layout.mn_of_smem_index(mn_offset) - self._layout.mn_of_smem_index(0), I32)
        offset = row_delta.to(I64) * self._operand.mn_stride + self._operand.k_stride * k_offset
        address = self._gmem_ptr.get() + offset.to(U64)
        nbytes: Value = Constant(U32, WORD_BYTES)
        if k_remaining is not None:
            is_row_valid = self._mn_remaining.get() > row_delta
            nbytes = k.select(is_row_valid & (self._thread_k + k_offset < k_remaining), nbytes, 0)
        hw.cp_async_copy(destination, address, nbytes, WORD_BYTES)

    def advance(self) -> None:
        self._gmem_ptr.set(self._gmem_ptr.get() + (self._operand.k_stride * self._tile.k).to(U64))


class SimtFragments:
    """A thread's register fragments of A and B at one index of K, double-buffered if registers suffice.

    Without double buffering, B's fragment has one vector of columns at a time. Each lane computes the elements of the
    lane whose number has bits 1 and 2 swapped: then lanes that differ in bit 0 load the same words of A, and lanes that
    differ in bit 1 the same words of B, and shared memory serves more lanes at once (see
    backends/sim/execute/counters.py). `unpermute_lanes` restores the lane order of the accumulator.
    """

    def __init__(self, spec: KernelSpec, warpgroup: Value) -> None:
        """Declare the registers. `warpgroup`: the number of this warpgroup, which has its own columns of the tile."""
        k, self._tiles = current_builder(), spec.tiles
        self._layouts = SmemVectorLayout(spec, "a"), SmemVectorLayout(spec, "b")
        a, b = self._layouts
        self.double_buffered = a.elements_per_thread + b.elements_per_thread <= MAX_DOUBLE_BUFFERED_REGISTERS
        count_b = b.elements_per_thread if self.double_buffered else b.vector_elements
        self._a = k.registers_2d(F32, 1 + self.double_buffered, a.elements_per_thread, "a_frag")
        self._b = k.registers_2d(F32, 1 + self.double_buffered, count_b, "b_frag")
        self._unit_indices, lane = ((k.warp_index % 4).with_name_hint("warp_in_group"), warpgroup), k.lane
        self._lane = (lane // 8 * 8 + lane // 2 % 2 * 4 + lane // 4 % 2 * 2 + lane % 2).named("lane_bits_1_2_swapped")

    def load(self, stage: list[SharedView], k_idx: Value, buffer: ValueLike) -> None:
        """Load the fragments of A and B at index `k_idx` of a stage's K into buffer 0 or 1."""
        for operand, (fragments, layout) in enumerate(zip((self._a, self._b), self._layouts, strict=True)):
            vectors = layout.elements_per_thread // layout.vector_elements
            with current_builder().unroll(vectors, name="vector") as vector:
                self._load(operand, stage, k_idx, vector, fragments[buffer], vector)

    def load_and_multiply(self, accumulator: Accumulator, stage: list[SharedView], k_idx: Value) -> None:
        """Load the fragments at index `k_idx` of a stage's K, B's a vector at a time, and multiply them."""
        k, (a, b) = current_builder(), self._layouts
        with k.unroll(a.elements_per_thread // a.vector_elements, name="vector") as vector:
            self._load(0, stage, k_idx, vector, self._a[0], vector)
        with k.unroll(b.elements_per_thread // b.vector_elements, name="vector") as vector:
            self._load(1, stage, k_idx, vector, self._b[0], 0)
            self._multiply(accumulator, 0, vector * b.vector_elements, b.vector_elements)

    def multiply(self, accumulator: Accumulator, buffer: ValueLike) -> None:
        """Add the outer product of a buffer's fragments to the accumulator."""
        self._multiply(accumulator, buffer, 0, self._layouts[1].elements_per_thread)

    def _load(
        self, operand: int, stage: list[SharedView], k_idx: Value, vector_idx: Value, fragment: RegisterArray,
        fragment_vector_idx: ValueLike,
    ) -> None:  # fmt: skip
        """Load the thread's `vector_idx`-th vector of an operand into vector `fragment_vector_idx` of `fragment`.

        Elements of a swizzled vector are put back in order by the register index.
        """
        tile, layout, unit_idx = self._tiles[operand], self._layouts[operand], self._unit_indices[operand]
        smem_offset = (
            k_idx * _smem_k_stride_bytes(tile) + layout.vector_smem_index(unit_idx, self._lane, vector_idx) * WORD_BYTES
        )
        values = current_builder().registers(F32, layout.vector_elements, "values")
        hw.load_shared(values, stage[operand].address + smem_offset.to(U32))
        with current_builder().unroll(layout.vector_elements) as i:
            fragment[fragment_vector_idx * layout.vector_elements + (layout.xor_mask(tile, k_idx) ^ i)] = values[i]

    def _multiply(self, accumulator: Accumulator, buffer: ValueLike, first_column: ValueLike, columns: int) -> None:
        """Add the outer product of A's fragment and `columns` columns of B's to the accumulator.

        Columns run in reverse in every other row, so that each FFMA has an operand in common with the FFMA before,
        which is then not read again from the register file. `^ 1` is the swap of SmemVectorLayout's pairs of columns.
        """
        k = current_builder()
        with (
            k.unroll(len(accumulator.fragments), name="mma_m") as mma_m,
            k.unroll(2, name="row_half") as row_half,
            k.unroll(columns, name="serpentine_idx") as serpentine_idx,
        ):
            frag_column = (serpentine_idx ^ row_half * (columns - 1)).with_name_hint("frag_column")
            acc_idx = ((first_column + frag_column) // 2 * 4 + row_half * 2 + frag_column % 2).with_name_hint("acc_idx")
            acc = accumulator.fragments[mma_m]
            acc[acc_idx] = hw.fma(self._a[buffer][mma_m * 2 + row_half], self._b[buffer][frag_column ^ 1], acc[acc_idx])

    def unpermute_lanes(self, accumulator: Accumulator) -> None:
        """Move each accumulator element to the lane that has it in a wgmma accumulator, after the last k-tile."""
        with current_builder().unroll(len(accumulator.fragments), name="mma_m") as mma_m:
            acc = accumulator.fragments[mma_m]
            with current_builder().unroll(acc.count, name="i") as i:
                acc[i] = hw.as_float(hw.shuffle_index(hw.as_unsigned(acc[i]), self._lane.to(U32)))


def _smem_k_stride_bytes(tile: Tile) -> int:
    """Return the bytes from one index of K of a tile to the next."""
    return tile.mn * WORD_BYTES + FMA.k_padding_bytes
