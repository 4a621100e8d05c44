"""WMMA: a warp multiplies 16 x 16 tiles whose fragments are opaque. PTX ISA, "wmma".

The mapping of elements to lanes and registers is unspecified: the simulator permutes it with the seed, so that code
which relies on one mapping fails. Only operations applied identically to every register of a fragment are portable.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from gemmsmith.core.dtypes import FP16, TF32, DType
from gemmsmith.core.errors import KernelError
from gemmsmith.core.mma import MMA_SYNC, Mma
from gemmsmith.hw.memory import numpy_dtype
from gemmsmith.hw.mma import MMA_SYNC_CYCLES, decode_elements, multiply
from gemmsmith.lang.instruction import (
    Instruction,
    InstructionFamily,
    registers_in,
    registers_inout,
    registers_out,
    u32,
    u64,
)
from gemmsmith.lang.values import RegisterArray
from gemmsmith.machine import Machine, Space

TILE_MN = 16
"""Rows of A and columns of B."""
LDMATRIX_ROW_BYTES = 16
"""Bytes per row of an 8x8 matrix of ldmatrix (PTX ISA, "ldmatrix")."""
Operand = Literal["a", "b", "d"]
WmmaLayout = Literal["row", "col"]


def wmma_k(mma: Mma) -> int:
    """Return K of one wmma instruction."""
    return 8 if mma.a == TF32 else 16


def k_per_hmma(mma: Mma) -> int:
    """Return K of one hardware instruction: ptxas lowers a TF32 wmma to two HMMA.1684 (seen on an H200)."""
    return 4 if mma.a == TF32 else wmma_k(mma)


def fragment_registers(mma: Mma, operand: Operand) -> int:
    """Return the registers per thread of the fragment of `operand`.

    Each element of an fp16 operand a or b is stored twice.
    """
    if operand == "d":
        return TILE_MN * TILE_MN * mma.d.bits // (32 * 32)
    return TILE_MN * wmma_k(mma) * mma.a.bits // (32 * 32) * (2 if mma.a == FP16 else 1)


def _shape(mma: Mma, operand: Operand) -> tuple[int, int]:
    """Return the rows and columns of a tile (of B: K and N)."""
    return {"a": (TILE_MN, wmma_k(mma)), "b": (wmma_k(mma), TILE_MN), "d": (TILE_MN, TILE_MN)}[operand]


def _dtype(mma: Mma, operand: Operand) -> DType:
    return mma.d if operand == "d" else mma.a


@lru_cache(maxsize=64)
def _fragment_permutation(seed: int, mma: Mma, operand: Operand) -> np.ndarray:
    """Return the element (row-major index) stored at each position of a fragment (lane by lane).

    PTX leaves the layout unspecified, so a random one is drawn from the simulation's `seed`.
    """
    rows, columns = _shape(mma, operand)
    elements = np.arange(rows * columns)
    positions = fragment_registers(mma, operand) * 32 * 32 // _dtype(mma, operand).bits
    rng = np.random.default_rng(zlib.crc32(f"{seed} {mma} {operand}".encode()))
    permutation: np.ndarray = rng.permutation(np.tile(elements, positions // len(elements)))
    return permutation


def _read_fragment(m: Machine, registers: RegisterArray, mma: Mma, operand: Operand) -> np.ndarray:
    """Return the elements (warps, rows, columns) of the fragment that `registers` hold. `operand`: "a", "b" or "d"."""
    dtype, shape, words = _dtype(mma, operand), _shape(mma, operand), np.asarray(m.registers.view(registers))
    words = words.astype(np.float32 if words.dtype == np.float32 else np.uint32)
    fragments = np.ascontiguousarray(words).view(dtype.numpy).reshape(len(m.threads) // 32, -1)
    elements = np.zeros((len(fragments), shape[0] * shape[1]), dtype.numpy)
    elements[:, _fragment_permutation(m.seed, mma, operand)] = fragments
    tiles: np.ndarray = elements.reshape(-1, *shape)
    return tiles


def _write_fragment(m: Machine, registers: RegisterArray, elements: np.ndarray, mma: Mma, operand: Operand) -> None:
    """Set the fragment in `registers`, in the active threads, to elements (warps, rows, columns).

    `operand`: "a", "b" or "d".
    """
    fragments = elements.reshape(len(elements), -1)[:, _fragment_permutation(m.seed, mma, operand)]
    words = np.ascontiguousarray(fragments).view(numpy_dtype(registers)).reshape(len(m.threads), -1)
    m.registers.view(registers, write=True)[m.active] = words[m.active]


class _WmmaTransfer(InstructionFamily):
    """Common base of loads and stores of a tile.

    Fields: `values`, the fragment's registers; `address`, of the tile; `stride`, elements between rows (columns, if
    `layout` is "col"); `operand`, "a", "b" or "d"; `layout`, "row" or "col"; `mma`, the dtypes.
    """

    space: ClassVar[Space] = "shared"

    def check(self) -> None:
        if self.mma not in MMA_SYNC.instructions:
            raise KernelError(f"wmma: got {self.mma}; use one of {', '.join(map(str, MMA_SYNC.instructions))}")
        expected = fragment_registers(self.mma, self.operand)
        if self.values.count != expected:
            raise KernelError(f"wmma: got {self.values.count} registers of {self.operand}; use {expected}")

    def _text(self, direction: Literal["load", "store"], operands: str) -> str:
        """Return the PTX of a load or a store; `operands`: the text of its first operands, in order."""
        shape, name = f"m16n16k{wmma_k(self.mma)}", self.operand
        if name == "d" and direction == "load":
            name = "c"  # PTX's name of an accumulator that is loaded
        dtype = _dtype(self.mma, self.operand).ptx
        return (
            f"wmma.{direction}.{name}.sync.aligned.{self.layout}.{shape}.{self.space}.{dtype} {operands}, {{stride}};"
        )

    def _warp_accesses(
        self, m: Machine, mnemonic: str
    ) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]]:
        """Yield the accesses of each warp to which ptxas lowers a tile transfer (seen on an H200).

        They are those of ldmatrix, on columns of 16 bytes, or else of 8 rows x 4 vectors, in the order of mma.sync.
        Each is (addresses, active mask, (lanes, rows, vectors)): which lane accesses which vector of which row of the
        tile. Rows are columns if `layout` is "col". `mnemonic`: in reports of misaligned addresses.
        """
        m.require_converged(mnemonic)
        dtype, (rows, vectors_per_row, vector_bytes) = _dtype(self.mma, self.operand), self._row_vectors()
        address, stride = (m.per_thread(x).reshape(-1, 32) for x in (self.address, self.stride))
        if (address != address[:, :1]).any() or (stride != stride[:, :1]).any():
            m.report("uniformity", f"{mnemonic}: the address and the stride must be uniform in each warp")
        if (address[:, 0] % 32).any() or (stride[:, 0] * dtype.bytes % 16).any():
            m.report(
                "alignment",
                f"{mnemonic}: needs a tile address aligned to 32 bytes, and a stride of a multiple of 16 bytes",
            )
        block_rows, block_vectors = (rows, 1) if vector_bytes == LDMATRIX_ROW_BYTES else (8, 4)
        for start in range(0, rows * vectors_per_row, 32):
            block, offset = np.divmod(np.arange(start, start + 32), block_rows * block_vectors)
            row = block % (rows // block_rows) * block_rows + offset // block_vectors
            vector = block // (rows // block_rows) * block_vectors + offset % block_vectors
            in_tile = vector < vectors_per_row
            active = m.active & np.tile(in_tile, len(address))
            addresses = address + row * stride * dtype.bytes + vector * vector_bytes
            yield addresses.reshape(-1), active, (in_tile, row[in_tile], vector[in_tile])

    def _row_vectors(self) -> tuple[int, int, int]:
        """Return (rows of a tile, vectors per row, bytes of a vector). Rows are columns if `layout` is "col".

        A vector is what one lane accesses at once.
        """
        dtype, is_ldmatrix = _dtype(self.mma, self.operand), isinstance(self, WmmaLoad) and self.space == "shared"
        rows, columns = _shape(self.mma, self.operand)
        if self.layout == "col":
            rows, columns = columns, rows
        vector_bytes = 2 * dtype.bytes if self.operand == "d" else LDMATRIX_ROW_BYTES if is_ldmatrix else 4
        return rows, columns * dtype.bytes // vector_bytes, vector_bytes


class WmmaLoad(_WmmaTransfer):
    """Loads a tile from shared memory into the fragment `values`.

    `operand`: "a", a 16 x k tile of A; "b", k x 16 of B; "d", 16 x 16 of the accumulator. `stride`: elements between
    rows (columns, if `layout` is "col").
    """

    values: registers_out
    address: u32
    stride: u32
    operand: Operand
    layout: WmmaLayout
    mma: Mma
    wrapper = "wmma_load_{operand}_{layout}_{mma.a.ptx}_{mma.d.ptx}_{space}"

    def text(self) -> str:
        return self._text("load", "{values}, [{address}]")

    def simulate(self, m: Machine) -> None:
        """Load the tile's vectors, one access of each warp after the other, and write them to the fragment."""
        rows, vectors_per_row, vector_bytes = self._row_vectors()
        vectors = np.zeros((len(m.threads) // 32, rows, vectors_per_row, vector_bytes), np.uint8)
        for address, active, (in_tile, row, vector) in self._warp_accesses(m, "wmma.load"):
            data = m.memory.load(self.space, address, vector_bytes, mask=active).reshape(-1, 32, vector_bytes)
            vectors[:, row, vector] = data[:, in_tile]
        tile = vectors.reshape(len(vectors), rows, -1).view(_dtype(self.mma, self.operand).numpy)
        tile = tile if self.layout == "row" else tile.swapaxes(1, 2)
        _write_fragment(m, self.values, np.ascontiguousarray(tile), self.mma, self.operand)


class WmmaLoadGlobal(WmmaLoad):
    """Loads a tile of A, B or the accumulator from global memory."""

    address: u64
    space = "global"


class WmmaStore(_WmmaTransfer):
    """Stores a 16 x 16 tile of the accumulator, the fragment `values`, to shared memory; `stride`: as in `WmmaLoad`."""

    values: registers_in
    address: u32
    stride: u32
    layout: WmmaLayout
    mma: Mma
    operand = "d"
    wrapper = "wmma_store_{layout}_{mma.d.ptx}_{space}"

    def text(self) -> str:
        return self._text("store", "[{address}], {values}")

    def simulate(self, m: Machine) -> None:
        """Store the fragment's tile in vectors, one access of each warp after the other."""
        tile = _read_fragment(m, self.values, self.mma, "d")
        tile = tile if self.layout == "row" else tile.swapaxes(1, 2)
        rows, vectors_per_row, vector_bytes = self._row_vectors()
        vectors = np.ascontiguousarray(tile).view(np.uint8).reshape(-1, rows, vectors_per_row, vector_bytes)
        for address, active, (in_tile, row, vector) in self._warp_accesses(m, "wmma.store"):
            data = np.zeros((len(vectors), 32, vector_bytes), np.uint8)
            data[:, in_tile] = vectors[:, row, vector]
            m.memory.store(self.space, address, data.reshape(-1, vector_bytes), mask=active)


class WmmaStoreGlobal(WmmaStore):
    """Stores a 16 x 16 tile of the accumulator to global memory."""

    address: u64
    space = "global"


class WmmaMma(Instruction):
    """wmma.mma: a warp computes D (16 x 16) = A (16 x k) B (k x 16) + D, all in fragments.

    `a_layout`, `b_layout`: the layouts with which A and B were loaded. `mma`: the dtypes.
    """

    d: registers_inout
    a: registers_in
    b: registers_in
    a_layout: WmmaLayout
    b_layout: WmmaLayout
    mma: Mma
    wrapper = "wmma_{a_layout}_{b_layout}_{mma.d.ptx}_{mma.a.ptx}"
    pure = True

    def check(self) -> None:
        expected = tuple(fragment_registers(self.mma, x) for x in ("d", "a", "b"))
        counts = self.d.count, self.a.count, self.b.count
        if counts != expected:
            raise KernelError(f"wmma.mma: got {counts} registers of d, a and b; use {expected}")

    @property
    def macs_per_thread(self) -> int:
        return TILE_MN * TILE_MN * wmma_k(self.mma) // 32

    def text(self) -> str:
        """Return the PTX. For fp16 operands it names only the dtypes of D and C, else all four."""
        mma, d = self.mma, self.mma.d.ptx
        types = f"{d}.{d}" if mma.a == FP16 else f"{mma}.{d}"
        shape = f"m16n16k{wmma_k(mma)}"
        return f"wmma.mma.sync.aligned.{self.a_layout}.{self.b_layout}.{shape}.{types} {{d}}, {{a}}, {{b}}, {{d}};"

    def simulate(self, m: Machine) -> None:
        """Multiply as the hardware does, which executes one instruction for each `k_per_hmma` of K."""
        m.require_converged("wmma.mma")
        m.multiply("wmma.mma", 2 * MMA_SYNC_CYCLES)  # twice the columns
        a, b = _read_fragment(m, self.a, self.mma, "a"), _read_fragment(m, self.b, self.mma, "b")
        a, b = (decode_elements(np.ascontiguousarray(x).view(f"u{x.itemsize}"), self.mma.a) for x in (a, b))
        result, step = _read_fragment(m, self.d, self.mma, "d"), k_per_hmma(self.mma)
        for k in range(0, wmma_k(self.mma), step):
            result = multiply(a[..., k : k + step], b[:, k : k + step].swapaxes(1, 2), result, self.mma)
        _write_fragment(m, self.d, np.ascontiguousarray(result), self.mma, "d")
