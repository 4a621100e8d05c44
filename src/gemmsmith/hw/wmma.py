"""WMMA: a warp multiplies 16 x 16 tiles whose fragments are opaque. PTX ISA, "wmma".

Which lane and register hold which element is unspecified: the simulator chooses anew for every seed, so that code which
relies on one arrangement fails. Only what is done to all registers alike is sound.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from gemmsmith.core.dtypes import FP16, TF32, DType
from gemmsmith.core.errors import KernelError
from gemmsmith.core.mma import MMA_SYNC, Mma
from gemmsmith.hw.memory import number_type
from gemmsmith.hw.mma import multiplied, numbers
from gemmsmith.lang.instruction import Instruction, registers_in, registers_inout, registers_out, u32, u64
from gemmsmith.lang.machine import Machine, Space
from gemmsmith.lang.values import Registers

SIDE, CHUNK = 16, 16
"""Rows of A, and columns of B; bytes that a lane loads by ldmatrix."""
Operand = Literal["a", "b", "d"]
Layout = Literal["row", "col"]


def depth(mma: Mma) -> int:
    """The k of one instruction."""
    return 8 if mma.a == TF32 else 16


def summed_depth(mma: Mma) -> int:
    """The k that is summed at once: ptxas makes two HMMA.1684 of a product of TF32, as seen on an H200."""
    return 4 if mma.a == TF32 else depth(mma)


def fragment_registers(mma: Mma, operand: Operand) -> int:
    """Registers a thread; of fp16 operands each element is held twice."""
    if operand == "d":
        return SIDE * SIDE * mma.d.bits // (32 * 32)
    return SIDE * depth(mma) * mma.a.bits // (32 * 32) * (2 if mma.a == FP16 else 1)


def _shape(mma: Mma, operand: Operand) -> tuple[int, int]:
    """Rows and columns; of B k and n."""
    return {"a": (SIDE, depth(mma)), "b": (depth(mma), SIDE), "d": (SIDE, SIDE)}[operand]


def _dtype(mma: Mma, operand: Operand) -> DType:
    return mma.d if operand == "d" else mma.a


@lru_cache(maxsize=64)
def _arrangement(seed: int, mma: Mma, operand: Operand) -> np.ndarray:
    """Which element of a fragment, counted row by row, lies in which place, counted lane by lane."""
    elements = np.arange(SIDE * _shape(mma, operand)[operand == "a"])
    places = fragment_registers(mma, operand) * 32 * 32 // _dtype(mma, operand).bits
    rng = np.random.default_rng(zlib.crc32(f"{seed} {mma} {operand}".encode()))
    arrangement: np.ndarray = rng.permutation(np.tile(elements, places // len(elements)))
    return arrangement


def _elements(registers: np.ndarray, m: Machine, mma: Mma, operand: Operand) -> np.ndarray:
    """(warps, rows, columns) elements of a fragment's registers (threads, count), as they lie in memory."""
    dtype, shape = _dtype(mma, operand), _shape(mma, operand)
    words = registers.astype(np.float32 if registers.dtype == np.float32 else np.uint32)
    held = np.ascontiguousarray(words).view(dtype.numpy).reshape(len(m.threads) // 32, -1)
    found = np.zeros((len(held), shape[0] * shape[1]), dtype.numpy)
    found[:, _arrangement(m.seed, mma, operand)] = held
    elements: np.ndarray = found.reshape(-1, *shape)
    return elements


def _places(elements: np.ndarray, m: Machine, mma: Mma, operand: Operand, registers: Registers) -> np.ndarray:
    """The reverse: (threads, count) registers."""
    held = elements.reshape(len(elements), -1)[:, _arrangement(m.seed, mma, operand)]
    words: np.ndarray = np.ascontiguousarray(held).view(number_type(registers)).reshape(len(m.threads), -1)
    return words


class _Memory(Instruction):
    """What loads and stores share: a tile whose rows (columns, if `layout` is "col") are `stride` elements apart."""

    space: ClassVar[Space] = "shared"
    if TYPE_CHECKING:  # each lists them among its own, in its wrapper's order
        values: Registers
        address: Any
        stride: Any
        layout: Layout
        mma: Mma

    def check(self) -> None:
        if self.mma not in MMA_SYNC:
            raise KernelError(f"wmma: got {self.mma}; use one of {', '.join(map(str, MMA_SYNC))}")
        need = fragment_registers(self.mma, self._operand)
        if self.values.count != need:
            raise KernelError(f"wmma: got {self.values.count} registers of {self._operand}; it takes {need}")

    @property
    def _operand(self) -> Operand:
        operand: Operand = getattr(self, "operand", "d")
        return operand

    def _text(self, what: str, order: str) -> str:
        shape, name = (
            f"m16n16k{depth(self.mma)}",
            {"d": "c" if what == "load" else "d"}.get(self._operand, self._operand),
        )
        dtype = _dtype(self.mma, self._operand).ptx
        return f"wmma.{what}.{name}.sync.aligned.{self.layout}.{shape}.{self.space}.{dtype} {order}, {{stride}};"

    def _rounds(self, m: Machine, mnemonic: str) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]]:
        """The accesses by which ptxas moves a tile, as seen on an H200: ldmatrix, of columns of 16-byte pieces; else 8
        lines of 4 pieces at a time, as the fragments of mma.sync have them. Of each the addresses, which lanes take
        part, and the line and piece that each of these has."""
        m.converged(mnemonic)
        dtype, (lines, per_line, width) = _dtype(self.mma, self._operand), self._pieces()
        address, stride = (m.column(x).reshape(-1, 32) for x in (self.address, self.stride))
        if (address != address[:, :1]).any() or (stride != stride[:, :1]).any():
            m.report("uniformity", f"{mnemonic}: the address and the stride must be the same in all lanes of a warp")
        if (address[:, 0] % 32).any() or (stride[:, 0] * dtype.bytes % 16).any():
            m.report("alignment", f"{mnemonic}: a tile begins at a multiple of 32 bytes, its rows are multiples of 16")
        down, across = (lines, 1) if width == CHUNK else (8, 4)
        for first in range(0, lines * per_line, 32):
            block, place = np.divmod(np.arange(first, first + 32), down * across)
            line = block % (lines // down) * down + place // across
            piece = block // (lines // down) * across + place % across
            inside = piece < per_line
            taking_part = m.active & np.tile(inside, len(address))
            addresses = address + line * stride * dtype.bytes + piece * width
            yield addresses.reshape(-1), taking_part, (inside, line[inside], piece[inside])

    def _pieces(self) -> tuple[int, int, int]:
        """Rows (columns, if `layout` is "col") of a tile, the pieces of one that lanes move, and their bytes."""
        dtype, matrices = _dtype(self.mma, self._operand), isinstance(self, WmmaLoad) and self.space == "shared"
        lines, along = _shape(self.mma, self._operand)[:: 1 if self.layout == "row" else -1]
        width = 2 * dtype.bytes if self._operand == "d" else CHUNK if matrices else 4
        return lines, along * dtype.bytes // width, width


class WmmaLoad(_Memory):
    """A 16 x k tile of A, a k x 16 tile of B or a 16 x 16 tile of the accumulator `d` from shared memory."""

    values: registers_out
    address: u32
    stride: u32
    operand: Operand
    layout: Layout
    mma: Mma

    def text(self) -> str:
        return self._text("load", "{values}, [{address}]")

    @property
    def wrapper_name(self) -> str:
        return f"wmma_load_{self.operand}_{self.layout}_{self.mma.a.ptx}_{self.mma.d.ptx}_{self.space}"

    def simulate(self, m: Machine) -> None:
        lines, per_line, width = self._pieces()
        pieces = np.zeros((len(m.threads) // 32, lines, per_line, width), np.uint8)
        for address, taking_part, (inside, line, piece) in self._rounds(m, "wmma.load"):
            data = m.load(self.space, address, width, mask=taking_part).reshape(-1, 32, width)
            pieces[:, line, piece] = data[:, inside]
        tile = pieces.reshape(len(pieces), lines, -1).view(_dtype(self.mma, self.operand).numpy)
        tile = tile if self.layout == "row" else tile.swapaxes(1, 2)
        found = _places(np.ascontiguousarray(tile), m, self.mma, self.operand, self.values)
        m.registers(self.values, write=True)[m.active] = found[m.active]


class WmmaLoadGlobal(WmmaLoad):
    """The same from global memory."""

    address: u64
    space = "global"


class WmmaStore(_Memory):
    """A 16 x 16 tile of the accumulator to shared memory."""

    values: registers_in
    address: u32
    stride: u32
    layout: Layout
    mma: Mma

    def text(self) -> str:
        return self._text("store", "[{address}], {values}")

    @property
    def wrapper_name(self) -> str:
        return f"wmma_store_{self.layout}_{self.mma.d.ptx}_{self.space}"

    def simulate(self, m: Machine) -> None:
        tile = _elements(np.asarray(m.registers(self.values)), m, self.mma, "d")
        tile = tile if self.layout == "row" else tile.swapaxes(1, 2)
        lines, per_line, width = self._pieces()
        pieces = np.ascontiguousarray(tile).view(np.uint8).reshape(-1, lines, per_line, width)
        for address, taking_part, (inside, line, piece) in self._rounds(m, "wmma.store"):
            data = np.zeros((len(pieces), 32, width), np.uint8)
            data[:, inside] = pieces[:, line, piece]
            m.store(self.space, address, data.reshape(-1, width), mask=taking_part)


class WmmaStoreGlobal(WmmaStore):
    """The same to global memory."""

    address: u64
    space = "global"


class WmmaMma(Instruction):
    """D (16 x 16) = A (16 x k) B (k x 16) + D; `a_layout` and `b_layout` are those that A and B were loaded with."""

    d: registers_inout
    a: registers_in
    b: registers_in
    a_layout: Layout
    b_layout: Layout
    mma: Mma
    pure = True

    def check(self) -> None:
        need = tuple(fragment_registers(self.mma, x) for x in ("d", "a", "b"))
        given = self.d.count, self.a.count, self.b.count
        if given != need:
            raise KernelError(f"wmma.mma: got {given} registers of d, a and b; it takes {need}")

    @property
    def products(self) -> int:
        return SIDE * SIDE * depth(self.mma) // 32

    @property
    def wrapper_name(self) -> str:
        return f"wmma_{self.a_layout}_{self.b_layout}_{self.mma.d.ptx}_{self.mma.a.ptx}"

    def text(self) -> str:
        mma, d = self.mma, self.mma.d.ptx
        types = f"{d}.{d}" if mma.a == FP16 else f"{mma}.{d}"
        shape = f"m16n16k{depth(mma)}"
        return f"wmma.mma.sync.aligned.{self.a_layout}.{self.b_layout}.{shape}.{types} {{d}}, {{a}}, {{b}}, {{d}};"

    def simulate(self, m: Machine) -> None:
        m.converged("wmma.mma")
        a = _elements(np.asarray(m.registers(self.a)), m, self.mma, "a")
        b = _elements(np.asarray(m.registers(self.b)), m, self.mma, "b")
        c = _elements(np.asarray(m.registers(self.d)), m, self.mma, "d")
        of_a, of_b = (numbers(np.ascontiguousarray(x).view(f"u{x.itemsize}"), self.mma.a) for x in (a, b))
        result, step = c, summed_depth(self.mma)
        for k in range(0, depth(self.mma), step):
            result = multiplied(of_a[..., k : k + step], of_b[:, k : k + step].swapaxes(1, 2), result, self.mma)
        found = _places(np.ascontiguousarray(result), m, self.mma, "d", self.d)
        m.registers(self.d, write=True)[m.active] = found[m.active]
