"""Packing kernels: copy an operand whose layout a GEMM kernel cannot read into a workspace, in rows that TMA can load.

TMA loads rows (or columns) that begin at multiples of 16 bytes. wgmma reads 8-bit and 32-bit elements K-major only,
except that a 32-bit A may come from registers. There are two kernels: `strided_copy` reads along the rows, `transpose`
along its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gemmsmith import hw
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import Design, get_design
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.make_spec import mma_of
from gemmsmith.core.mma import Major
from gemmsmith.core.problem import TMA_ALIGNMENT_BYTES, Matrix, Problem
from gemmsmith.core.product import ROLES, Role
from gemmsmith.core.scalars import ceil_div
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I64, U32, U64
from gemmsmith.lang.values import Value

THREADS = 256
"""Threads per CTA."""
TILE_ROWS = 128
"""Rows of the copy per tile of `transpose`."""
TILE_WORDS = 32
"""4-byte words per row of a tile of `transpose`."""


@dataclass(frozen=True)
class Packing:
    """A matrix and its packed copy, whose rows are contiguous.

    Attributes:
        transposed: The operand, seen as (M or N) x K, is the transpose of `source`; its copy is then MN-major.
        tf32_residual: The copy holds the residuals of fp32 elements after rounding to TF32 (CUTLASS: small).
    """

    source: Matrix
    transposed: bool = False
    tf32_residual: bool = False
    chip: Chip = HOPPER

    @property
    def vectors_per_row(self) -> int:
        """16-byte vectors per packed row."""
        return ceil_div(self.source.cols * self.source.dtype.bytes, TMA_ALIGNMENT_BYTES)

    @property
    def num_matrices(self) -> int:
        """Number of matrices that are copied: the batch, or 1 if it is broadcast."""
        return self.source.batch if self.source.batch_stride else 1

    @property
    def bytes(self) -> int:
        return self.total_vectors * TMA_ALIGNMENT_BYTES

    @property
    def packed(self) -> Matrix:
        """The copy as an operand, with rows padded to 16 bytes."""
        s, pitch = self.source, self.vectors_per_row * TMA_ALIGNMENT_BYTES // self.source.dtype.bytes
        copy = Matrix(s.dtype, s.rows, s.cols, pitch, 1, s.batch, s.rows * pitch if s.batch_stride else 0)
        return copy.T if self.transposed else copy

    @property
    def total_vectors(self) -> int:
        """16-byte vectors of the copy."""
        return self.num_matrices * self.source.rows * self.vectors_per_row

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles of `transpose` along the rows and along the columns of the copy."""
        row_bytes = self.source.cols * self.source.dtype.bytes
        return ceil_div(self.source.rows, TILE_ROWS), ceil_div(row_bytes, 4 * TILE_WORDS)

    def make_kernel(self) -> Kernel:
        """Return the kernel that makes the copy, with reads along the source's contiguous dimension, so coalesced.

        It reads words of 4 bytes if rows (columns) begin at multiples of 4 bytes, and single elements otherwise.
        """
        s, make = self.source, strided_copy
        if s.row_stride < s.col_stride and s.rows > 1:
            s, make = s.T, transpose
        all_bits = s.cols | s.row_stride | s.batch_stride | s.alignment // s.dtype.bytes
        vectorized = s.col_stride == 1 and all_bits * s.dtype.bytes % 4 == 0
        return make(s.dtype.bits, vectorized, self.tf32_residual, self.chip)


def operand_packings(problem: Problem, design: Design | None = None) -> list[Packing | None]:
    """Return the packings of A and B, of which None is for an operand that the design can read as it is."""
    if problem.a.dtype == FP32:  # sgemm copies single words
        return [None, None]
    design = design or get_design(Config().design)
    mma = mma_of(problem, design)
    return [
        _packing(role, x, design.readable_majors(role, mma, promoted=problem.promoted, grouping=problem.grouping))
        for role, x in zip(ROLES, problem.operands, strict=True)
    ]


def _packing(role: Role, operand: Matrix, majors: Sequence[Major]) -> Packing | None:
    """Return the packing of an (M or N) x K matrix; None if kernels can read it.

    They can if TMA can, and if its layout is one of `majors`. Raises ArgumentError for operands that must be read in
    place: 4-bit elements, and two alternating arrays.
    """
    major = operand.major
    if operand.interleave_stride and not (operand.is_tma_compatible and major == "K" and "K" in majors):
        raise ArgumentError(
            "b: got a tuple of two arrays that TMA cannot read together; use K-major ones, such as the transposed "
            "weights of two torch.nn.Linear, whose rows along k begin at multiples of 16 bytes; or interleave(*b)"
        )
    if operand.is_tma_compatible and major in majors:
        return None
    if operand.dtype.bits < 8:
        raise ArgumentError(
            f"{role}: got {operand.dtype} elements that cannot be read in place, and are not copied; use an array that "
            "is contiguous along k, with rows that are multiples of 16 bytes at a 16-byte aligned address"
        )
    transposed = "MN" in majors and (operand.is_column_major or "K" not in majors)
    return Packing(operand.T if transposed else operand, transposed)


def with_packed_operands(problem: Problem, config: Config | None = None) -> Problem:
    """Return the problem with the operands as kernels read them."""
    return replace_packed_operands(problem, operand_packings(problem, get_design(config.design) if config else None))


def replace_packed_operands(problem: Problem, packings: Sequence[Packing | None]) -> Problem:
    """Return the problem with the packed copies of A and B in place of those that have packings; None: not packed."""
    if not any(packings):
        return problem
    a, b = (p.packed if p else x for p, x in zip(packings, problem.operands, strict=True))
    return problem.with_matrices(a, b.T, problem.d, problem.scales)


def tf32_residual_packings(problem: Problem, design: Design) -> list[Packing]:
    """Return the packings that compute the TF32 residuals of A and B for 3xTF32; none if threads compute them.

    Instructions that read operands from shared memory (wgmma) need the residuals there; others have the operands in
    registers, where threads compute the residuals.
    """
    if not problem.is_3xtf32 or not design.mma_op.reads_smem:
        return []
    return [Packing(x, tf32_residual=True) for x in problem.operands]


@dataclass(frozen=True)
class BoundPacking:
    """Launch arguments of a packing: the addresses of the matrix and of its copy."""

    packing: Packing
    source: Pointer
    packed: Pointer


class _PackArguments:
    """The kernel arguments that `strided_copy` and `transpose` share, and loads of the source's `bits`-bit elements."""

    def __init__(self, bits: int) -> None:
        """Declare the kernel arguments, which a launch gets from a BoundPacking. `bits`: bits of an element."""
        k, self.bits = current_builder(), bits
        self.source, self.packed = k.pointer("source", lambda p: p.source), k.pointer("packed", lambda p: p.packed)
        self.rows = k.parameter("rows", compute=lambda p: p.packing.source.rows)
        self.columns = k.parameter("columns", compute=lambda p: p.packing.source.cols)
        self.vectors_per_row = k.parameter("vectors_per_row", compute=lambda p: p.packing.vectors_per_row)
        self.row_stride = k.parameter("row_stride", I64, lambda p: p.packing.source.row_stride)
        self.column_stride = k.parameter("column_stride", I64, lambda p: p.packing.source.col_stride)
        self.batch_stride = k.parameter("batch_stride", I64, lambda p: p.packing.source.batch_stride)

    def element(self, batch: Value, row: Value, column: Value) -> Value:
        """Return the element offset of (batch, row, column) in the source."""
        rows, columns = row.to(I64) * self.row_stride, column.to(I64) * self.column_stride
        return rows + columns + batch.to(I64) * self.batch_stride

    def load(self, element: Value, in_bounds: Value) -> Value:
        """Load the element at element offset `element` as u32; zero if not `in_bounds`."""
        if self.bits == 32:
            return self.word(element, in_bounds)
        return hw.load_global_u8_or_u16(self._address(element), in_bounds, self.bits).to(U32)

    def word(self, element: Value, in_bounds: Value) -> Value:
        """Load the 4 bytes that begin at element offset `element`; zeros if not `in_bounds`."""
        return hw.load_global_word(self._address(element), in_bounds, U32, "loaded_word")

    def _address(self, element: Value) -> Value:
        return self.source + (element * (self.bits // 8)).to(U64)


@lru_cache(maxsize=32)
def strided_copy(bits: int, vectorized: bool, tf32_residual: bool, chip: Chip) -> Kernel:
    """Build the kernel whose threads each read 16 bytes of a row and store them at once, in a grid-stride loop.

    `vectorized`: it loads 4 bytes at once, which requires contiguous, aligned rows of whole words; else single
    elements.
    """
    per_word, count = 32 // bits, 8 * TMA_ALIGNMENT_BYTES // bits
    name = f"pack_{bits}{'_vectorized' * vectorized}{'_tf32_residual' * tf32_residual}"
    with Builder(name, threads=THREADS, chip=chip) as k:
        k.header += ["gemmsmith: pack", f"copies a matrix of {bits}-bit elements into rows of whole 16-byte vectors"]
        k.work_clusters, k.persistent = lambda p: ceil_div(p.packing.total_vectors, THREADS), True
        x = _PackArguments(bits)
        total = k.parameter("total_vectors", compute=lambda p: p.packing.total_vectors)
        hw.grid_dependency_wait()
        threads = (hw.grid_size() * THREADS).named("threads")
        first = (hw.block_index() * THREADS + k.thread).named("first")
        rounds = (total - 1) // threads + 1  # round * threads + first might exceed int32
        with k.range(rounds, name="round") as round:
            in_bounds = (first < total - round * threads).named("in_bounds")
            index = (round * threads + k.select(in_bounds, first, 0)).named("index")
            column = (index % x.vectors_per_row * count).with_name_hint("column")
            row = index // x.vectors_per_row % x.rows
            start = x.element(index // x.vectors_per_row // x.rows, row, column).with_name_hint("start")
            values = k.registers(U32, 4, "values")
            with k.unroll(4, name="word") as word_idx:
                loaded = []
                for i in range(1 if vectorized else per_word):
                    offset = (word_idx * per_word + i).with_name_hint("column_offset")
                    element = start + x.column_stride * offset.to(I64)
                    exists = in_bounds & (column + offset < x.columns)
                    loaded.append(x.word(element, exists) if vectorized else x.load(element, exists))
                word = _pack_word(loaded, bits)
                values[word_idx] = hw.tf32_residual(word) if tf32_residual else word
            hw.store_global(values, x.packed + index.to(U64) * TMA_ALIGNMENT_BYTES, in_bounds)
        return k.finish()


@lru_cache(maxsize=32)
def transpose(bits: int, vectorized: bool, tf32_residual: bool, chip: Chip) -> Kernel:
    """Build the kernel that transposes tiles of TILE_ROWS x 128 bytes through shared memory.

    Consecutive threads load along the copy's columns, which are contiguous in the source, and store along its rows. A
    thread loads and transposes micro-tiles of w x w elements, where w elements fill a 4-byte word.

    `vectorized`: a thread loads a column of a micro-tile, one word, at once, which requires columns of whole aligned
    words; else single elements.

    The word index is XORed with the micro-tile's row index, so neither the column writes nor the row reads have bank
    conflicts.
    """
    per_word = 32 // bits
    micro_tiles_along_m = TILE_ROWS // per_word
    word_step = THREADS // micro_tiles_along_m  # from one micro-tile of a thread to the next, along the columns
    name = f"pack_transposed_{bits}{'_vectorized' * vectorized}{'_tf32_residual' * tf32_residual}"
    with Builder(name, threads=THREADS, chip=chip) as k:
        k.header += ["gemmsmith: pack", f"copies the transpose of a matrix of {bits}-bit elements"]
        k.work_clusters, k.persistent = lambda p: p.packing.num_matrices * p.packing.tiles[0] * p.packing.tiles[1], True
        x = _PackArguments(bits)
        tiles_m = k.parameter("tiles_m", compute=lambda p: p.packing.tiles[0])
        tiles_n = k.parameter("tiles_n", compute=lambda p: p.packing.tiles[1])
        tiles = k.parameter("tiles", compute=lambda p: p.packing.num_matrices * p.packing.tiles[0] * p.packing.tiles[1])
        shared = k.shared(TILE_ROWS * TILE_WORDS * 4, name="tile")[0].address.with_name_hint("smem_tile")
        hw.grid_dependency_wait()
        micro_tile = (k.thread % micro_tiles_along_m).named("micro_tile")
        word = (k.thread // micro_tiles_along_m).named("word")
        vector, copy_row = (k.thread % 8).named("vector"), (k.thread // 8).named("copy_row")
        with k.range(hw.block_index(), tiles, hw.grid_size(), name="tile") as tile:
            batch = (tile // tiles_m // tiles_n).named("batch")
            first_row = (tile % tiles_m * TILE_ROWS).named("first_row")
            first_word = (tile // tiles_m % tiles_n * TILE_WORDS).named("first_word")
            row = (first_row + micro_tile * per_word).named("row")
            column = ((first_word + word) * per_word).named("column")
            start = x.element(batch, row, column).named("start")
            loaded = k.registers(U32, 16, "loaded")
            with k.unroll(0, 16, per_word, name="first") as first, k.unroll(per_word, name="j") as j:
                column_offset = (first * word_step + j).with_name_hint("column_offset")
                in_bounds = (row < x.rows) & (column + column_offset < x.columns)
                element = start + column_offset.to(I64) * x.column_stride
                if vectorized:
                    loaded[first + j] = x.word(element, in_bounds)
                else:
                    offsets = [x.row_stride * i for i in range(per_word)]
                    elements = [x.load(element + y, in_bounds & (row + i < x.rows)) for i, y in enumerate(offsets)]
                    loaded[first + j] = _pack_word(elements, bits)
            with k.unroll(0, 16, per_word, name="first") as first:
                columns = [loaded[first + j].with_name_hint("column_word") for j in range(per_word)]
                rows = _transpose_micro_tile(columns, bits)
                swizzled_word = (word + first // per_word * word_step) ^ micro_tile % TILE_WORDS
                swizzled_word.with_name_hint("swizzled_word")
                for i, micro_tile_row in enumerate(rows):
                    smem_word = (micro_tile * per_word + i) * TILE_WORDS + swizzled_word
                    stored = hw.tf32_residual(micro_tile_row) if tf32_residual else micro_tile_row
                    hw.store_shared_word(shared + (smem_word * 4).to(U32), stored, "stored_word")
            k.comment("all threads have written the tile that is read now")
            hw.sync_threads()
            with k.unroll(TILE_ROWS * 8 // THREADS, name="copy_iter") as copy_iter:
                index_in_tile = (copy_row + copy_iter * (THREADS // 8)).named("index_in_tile")
                row_in_tile = index_in_tile % micro_tiles_along_m * per_word + index_in_tile // micro_tiles_along_m
                row_in_tile = row_in_tile.named("row_in_tile")
                values = k.registers(U32, 4, "values")
                with k.unroll(4, name="j") as j:
                    smem_word = row_in_tile * TILE_WORDS + ((vector * 4 + j) ^ copy_row)
                    hw.load_shared(values.slice(j, 1), shared + (smem_word * 4).to(U32))
                out_row = (first_row + row_in_tile).named("out_row")
                out_vector = (first_word // 4 + vector).named("out_vector")
                row_index = batch.to(U64) * x.rows.to(U64) + out_row.to(U64)
                index = row_index * x.vectors_per_row.to(U64) + out_vector.to(U64)
                in_bounds = (out_row < x.rows) & (out_vector < x.vectors_per_row)
                hw.store_global(values, x.packed + index * TMA_ALIGNMENT_BYTES, in_bounds)
            k.comment("all threads have read the tile that the next one overwrites")
            hw.sync_threads()
        return k.finish()


def _pack_word(elements: list[Value], bits: int) -> Value:
    """Pack elements of `bits` bits, as u32 each, into one word, the first in the low bits."""
    word = elements[0]
    for i, x in enumerate(elements[1:], 1):
        word = word | x << (bits * i)
    return word


def _transpose_micro_tile(words: list[Value], bits: int) -> list[Value]:
    """Return the rows, one word each, of a micro-tile whose columns are `words`.

    It is a transpose by halves: swap elements across the diagonal of each 2 x 2 block, then, for 8-bit elements, 2 x 2
    blocks.
    """
    for step, shift in {8: ((1, 8), (2, 16)), 16: ((1, 16),), 32: ()}[bits]:
        mask = {8: 0x00FF00FF, 16: 0x0000FFFF}[shift]
        for i in range(len(words)):
            if not i & step:
                x, y = words[i], words[i + step]
                words[i] = (x & mask | (y & mask) << shift).with_name_hint("transposed")
                words[i + step] = (x >> shift & mask | y & (mask << shift)).with_name_hint("transposed")
    return words
