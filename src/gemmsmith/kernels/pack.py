"""Packing: copies an operand that kernels cannot read as it lies into a workspace, in rows that TMA can take.

TMA reads rows (or columns) that begin at multiples of 16 bytes; wgmma reads elements of 8 and 32 bits K-major only,
but A of 32 bits from registers too. Two kernels: `gather` reads along the copy's rows, `transpose` across them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from gemmsmith import hw
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import find
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.mma import find_mma
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import TMA_ALIGNMENT, Matrix, Problem
from gemmsmith.lang.builder import Builder, current
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I64, U32, U64
from gemmsmith.lang.values import Value

THREADS = 256
ROWS, WORDS = 128, 32
"""A tile of `transpose`: rows of the copy, and words of 4 bytes of each, 128 bytes."""


@dataclass(frozen=True)
class Packing:
    """A matrix and its packed copy, whose rows are contiguous. `transposed`: the operand, (M or N) x K, is the matrix's
    transpose, since its copy is MN-major. `low`: the copy is of what tensor cores leave of its fp32 elements."""

    source: Matrix
    transposed: bool = False
    low: bool = False
    chip: Chip = HOPPER

    @property
    def chunks(self) -> int:
        """16-byte chunks of a packed row."""
        return -(-self.source.cols * self.source.dtype.bytes // TMA_ALIGNMENT)

    @property
    def copies(self) -> int:
        """Matrices that are copied: a batch; 1 where it is broadcast."""
        return self.source.batch if self.source.batch_stride else 1

    @property
    def bytes(self) -> int:
        """Workspace bytes of the packed copy."""
        return self.total * TMA_ALIGNMENT

    @property
    def packed(self) -> Matrix:
        """The copy as the operand: rows padded to 16 bytes."""
        s, pitch = self.source, self.chunks * TMA_ALIGNMENT // self.source.dtype.bytes
        copy = Matrix(s.dtype, s.rows, s.cols, pitch, 1, s.batch, s.rows * pitch if s.batch_stride else 0)
        return copy.T if self.transposed else copy

    @property
    def total(self) -> int:
        """16-byte chunks in all."""
        return self.copies * self.source.rows * self.chunks

    @property
    def tiles(self) -> tuple[int, int]:
        """How many tiles `transpose` copies, along the rows and along the columns."""
        return -(-self.source.rows // ROWS), -(-self.source.cols * self.source.dtype.bytes // (4 * WORDS))

    @property
    def kernel(self) -> Kernel:
        """The one that makes the copy: neighboring threads read what is near in memory."""
        s = self.source
        across = s.row_stride < s.col_stride and s.rows > 1
        along, count, apart = (s.row_stride, s.rows, s.col_stride) if across else (s.col_stride, s.cols, s.row_stride)
        per_word = 4 // s.dtype.bytes
        steps = [count, apart, s.batch_stride, s.alignment // s.dtype.bytes]
        words = along == 1 and all(step % per_word == 0 for step in steps)
        return (transpose if across else gather)(s.dtype.bits, words, self.low, self.chip)


def packings(problem: Problem, config: Config | None = None) -> list[Packing | None]:
    """The packings of A and of B, None where the config's design, by default one of wgmma, reads it as it lies."""
    if problem.a.dtype == FP32:  # CUDA cores' operands are copied a word at a time
        return [None, None]
    mma = find_mma(problem.a.dtype, problem.b.dtype, problem.accumulate)
    mn_major, wgmma = "MN" in mma.majors, config is None or find(config.design).multiplies == "wgmma"
    in_registers = "MN" in mma.register_majors and wgmma and not problem.promoted
    a, b = problem.operands
    return [_packing(a, mn_major=mn_major or in_registers), _packing(b, mn_major=mn_major)]


def _packing(operand: Matrix, *, mn_major: bool) -> Packing | None:
    """The packing of an (M or N) x K matrix, which may be MN-major."""
    if operand.tma_ready and (mn_major or not operand.column_major):
        return None
    transposed = mn_major and operand.column_major
    return Packing(operand.T if transposed else operand, transposed)


def packed(problem: Problem, config: Config | None = None) -> Problem:
    """The problem of operands as kernels read them."""
    copies = packings(problem, config)
    if all(packing is None for packing in copies):
        return problem
    a, b = (p.packed if p else x for p, x in zip(copies, problem.operands, strict=True))
    return replace(problem, a=a, b=b.T)


def low_parts(problem: Problem, config: Config) -> list[Packing]:
    """The low parts of A and B, if they are multiplied and the design reads them from memory: wgmma reads B there."""
    if not problem.low_parts or find(config.design).multiplies != "wgmma":
        return []
    return [Packing(x, low=True) for x in problem.operands]


@dataclass(frozen=True)
class BoundPacking:
    """A packing with where the matrix and its copy lie."""

    packing: Packing
    source: Pointer
    packed: Pointer


class _Copy:
    """Kernel arguments that both kernels have, and loads of elements of `bits`."""

    def __init__(self, bits: int) -> None:
        k, self.bits = current(), bits
        self.source, self.packed = k.pointer("source", lambda p: p.source), k.pointer("packed", lambda p: p.packed)
        self.rows = k.parameter("rows", bind=lambda p: p.packing.source.rows)
        self.columns = k.parameter("columns", bind=lambda p: p.packing.source.cols)
        self.chunks = k.parameter("chunks", bind=lambda p: p.packing.chunks)
        self.row_stride = k.parameter("row_stride", I64, lambda p: p.packing.source.row_stride)
        self.column_stride = k.parameter("column_stride", I64, lambda p: p.packing.source.col_stride)
        self.batch_stride = k.parameter("batch_stride", I64, lambda p: p.packing.source.batch_stride)

    def element(self, batch: Value, row: Value, column: Value) -> Value:
        """Elements before it in the source."""
        rows, columns = row.to(I64) * self.row_stride, column.to(I64) * self.column_stride
        return rows + columns + batch.to(I64) * self.batch_stride

    def load(self, element: Value, inside: Value) -> Value:
        """An element as u32, zero outside."""
        if self.bits == 32:
            return self.word(element, inside)
        return hw.load_global_narrow(self._address(element), inside, self.bits).to(U32)

    def word(self, element: Value, inside: Value) -> Value:
        """The 4 bytes from an element on."""
        return hw.load_global_word(self._address(element), inside, U32, "loaded_word")

    def _address(self, element: Value) -> Value:
        return self.source + (element * (self.bits // 8)).to(U64)


@lru_cache(maxsize=32)
def gather(bits: int, words: bool, low: bool, chip: Chip) -> Kernel:
    """Each thread gathers 16 bytes and stores them, or their `low` parts, at once; a grid-stride loop over all chunks.
    With `words` it reads 4 bytes at once, which takes contiguous, aligned rows of whole words; else single elements."""
    per_word, count = 32 // bits, 8 * TMA_ALIGNMENT // bits
    with Builder(f"pack_{bits}{'_words' * words}{'_low' * low}", threads=THREADS, chip=chip) as k:
        k.header += ["gemmsmith: pack", f"copies a matrix of {bits}-bit elements into rows of whole 16-byte chunks"]
        k.grid = lambda p: -(-p.packing.total // THREADS)
        x = _Copy(bits)
        total = k.parameter("total", bind=lambda p: p.packing.total)
        hw.grid_dependency_wait()
        threads = (hw.grid_size() * THREADS).named("threads")
        first = (hw.block_index() * THREADS + k.thread).named("first")
        rounds = (total - 1) // threads + 1  # sums beyond the total might not be int32
        with k.range(rounds, name="round") as round:
            inside = (first < total - round * threads).named("inside")
            index = (round * threads + k.select(inside, first, 0)).named("index")
            column, row = index % x.chunks * count, index // x.chunks % x.rows
            start = x.element(index // x.chunks // x.rows, row, column)
            load, step = (x.word, per_word) if words else (x.load, 1)
            places = [(start + x.column_stride * i, inside & (column + i < x.columns)) for i in range(0, count, step)]
            loaded = [load(*place) for place in places]
            values = k.registers(U32, 4, "values")
            for i in range(4):
                word = loaded[i] if words else _word(loaded[i * per_word : (i + 1) * per_word], bits)
                values[i] = hw.low_part(word) if low else word
            hw.store_global(values, x.packed + index.to(U64) * TMA_ALIGNMENT, inside)
        return k.finish()


@lru_cache(maxsize=32)
def transpose(bits: int, words: bool, low: bool, chip: Chip) -> Kernel:
    """A CTA reads tiles of ROWS x 128 bytes with neighboring threads along the rows and writes them along the columns,
    through shared memory. A thread reads squares of as many elements each way as a word of 4 bytes holds: with `words`
    a column of one at once.

    A word of a square in rows i, i + 1 ... lies xor-ed with the number of the squares above it, so that neither the
    threads that write one column of squares nor those that read a row meet in a bank.
    """
    per_word = 32 // bits
    squares = ROWS // per_word  # along the rows
    apart = THREADS // squares  # of a thread's squares, along the columns
    with Builder(f"pack_transposed_{bits}{'_words' * words}{'_low' * low}", threads=THREADS, chip=chip) as k:
        k.header += ["gemmsmith: pack", f"copies a matrix of {bits}-bit elements into rows, which lay across"]
        k.grid = lambda p: p.packing.copies * p.packing.tiles[0] * p.packing.tiles[1]
        x = _Copy(bits)
        down = k.parameter("tiles_down", bind=lambda p: p.packing.tiles[0])
        across = k.parameter("tiles_across", bind=lambda p: p.packing.tiles[1])
        tiles = k.parameter("tiles", bind=lambda p: p.packing.copies * p.packing.tiles[0] * p.packing.tiles[1])
        shared = k.shared(ROWS * WORDS * 4, name="tile")[0].address
        hw.grid_dependency_wait()
        square, word = (k.thread % squares).named("square"), (k.thread // squares).named("word")
        chunk, line = (k.thread % 8).named("chunk"), (k.thread // 8).named("line")
        with k.range(hw.block_index(), tiles, hw.grid_size(), name="tile") as tile:
            batch = (tile // down // across).named("batch")
            first_row, first_word = (
                (tile % down * ROWS).named("first_row"),
                (tile // down % across * WORDS).named("first_word"),
            )
            row = (first_row + square * per_word).named("row")
            column = ((first_word + word) * per_word).named("column")
            start = x.element(batch, row, column).named("start")
            loaded = k.registers(U32, 16, "loaded")
            with k.unroll(0, 16, per_word, name="first") as first:
                for j in range(per_word):
                    ahead = first * apart + j
                    inside = (row < x.rows) & (column + ahead < x.columns)
                    here = start + ahead.to(I64) * x.column_stride
                    if words:
                        loaded[first + j] = x.word(here, inside)
                    else:
                        below = [x.row_stride * i for i in range(per_word)]
                        elements = [x.load(here + y, inside & (row + i < x.rows)) for i, y in enumerate(below)]
                        loaded[first + j] = _word(elements, bits)
            with k.unroll(0, 16, per_word, name="first") as first:
                lines = _transposed([loaded[first + j] for j in range(per_word)], bits)
                for i, line_of_square in enumerate(lines):
                    place = (square * per_word + i) * WORDS + ((word + first // per_word * apart) ^ square % WORDS)
                    stored = hw.low_part(line_of_square) if low else line_of_square
                    hw.store_shared_word(shared + (place * 4).to(U32), stored, "one")
            hw.sync_threads()
            with k.unroll(ROWS * 8 // THREADS, name="part") as part:
                number = (line + part * (THREADS // 8)).named("number")
                row_of_tile = (number % squares * per_word + number // squares).named("row_of_tile")
                values = k.registers(U32, 4, "values")
                for j in range(4):
                    place = row_of_tile * WORDS + ((chunk * 4 + j) ^ line)
                    values[j] = hw.load_shared_word(shared + (place * 4).to(U32), U32, "one")
                to_row = (first_row + row_of_tile).named("to_row")
                to_chunk = (first_word // 4 + chunk).named("to_chunk")
                index = (batch.to(U64) * x.rows.to(U64) + to_row.to(U64)) * x.chunks.to(U64) + to_chunk.to(U64)
                hw.store_global(values, x.packed + index * TMA_ALIGNMENT, (to_row < x.rows) & (to_chunk < x.chunks))
            hw.sync_threads()
        return k.finish()


def _word(elements: list[Value], bits: int) -> Value:
    """Elements that are u32, side by side in one."""
    word = elements[0]
    for i, x in enumerate(elements[1:], 1):
        word = word | x << (bits * i)
    return word


def _transposed(words: list[Value], bits: int) -> list[Value]:
    """The rows of a square whose columns are these words: what is above the diagonal changes places with what is below
    it, elements first, then pairs of them."""
    for step, shift in {8: ((1, 8), (2, 16)), 16: ((1, 16),), 32: ()}[bits]:
        low = {8: 0x00FF00FF, 16: 0x0000FFFF}[shift]
        for i in range(len(words)):
            if not i & step:
                x, y = words[i], words[i + step]
                words[i] = x & low | (y & low) << shift
                words[i + step] = x >> shift & low | y & (low << shift)
    return words
