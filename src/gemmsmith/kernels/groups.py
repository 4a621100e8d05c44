"""Groups of elements of a held tile that share a scale: their largest magnitudes, their scales, and what elements are
multiplied by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce

import numpy as np

from gemmsmith import hw
from gemmsmith.core.dtypes import FP32, INT8, LARGEST, LEAST_SCALE, DType
from gemmsmith.kernels.held import BLOCK, CHUNK, CHUNKS, THREADS, WARPS, HeldTile
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32, I32, U32
from gemmsmith.lang.values import Constant, Registers, Value, ValueLike, as_value

Store = Callable[[Value, Value, Value], None]
"""Stores the scale of a group: its index in the tile, the scale's bits or number, and in which thread."""


class Group(ABC):
    """Elements of a tile that share a scale; a thread has elements of `count` groups. Warps meet in `exchange`, in
    shared memory, which must have been read before `settle` is called again."""

    inverses: Registers
    exchange: Value | None

    def __init__(self, count: int, name: str) -> None:
        k = current()
        self.count = count
        self.amax, self.name = k.registers(F32, count, f"{name}_amax"), name

    @abstractmethod
    def cell(self, chunk: ValueLike, i: int) -> Value:
        """Which of the thread's groups element `i` of a chunk belongs to."""

    @abstractmethod
    def settle(self, values: DType, scales: DType, store: Store) -> None:
        """Finds the scales, now that all elements are known, and stores them."""

    def clear(self) -> None:
        with current().unroll(self.count, name="group") as i:
            self.amax[i] = 0.0

    def add(self, tile: HeldTile) -> None:
        """Takes the elements of a held tile into account."""
        with current().unroll(CHUNKS, name="chunk") as chunk:
            for i in range(CHUNK):
                cell = self.cell(chunk, i)
                self.amax[cell] = hw.maximum_nan(self.amax[cell], hw.library("fabsf", tile.element(chunk, i)))

    def inverse(self, chunk: ValueLike, i: int) -> Value:
        """What element `i` of a chunk is multiplied by."""
        return self.inverses[self.cell(chunk, i)]


class RowGroup(Group):
    """`count` groups of neighboring rows in every `lanes` threads: one row each, or all of a tile."""

    def __init__(self, count: int, lanes: int) -> None:
        super().__init__(count, "row" if count > 1 or lanes < THREADS else "tile")
        self.lanes, self.near, self.warps = lanes, min(lanes, 32), lanes // 32
        self.share = self.near // count
        """Lanes that end with the same group, of the `near` lanes of a warp that have elements of the same groups."""
        self.exchange = current().shared(4 * count * WARPS, name="exchange")[0].address if self.warps > 1 else None

    def cell(self, chunk: ValueLike, i: int) -> Value:
        return as_value(chunk, I32) // (CHUNKS // self.count)

    def settle(self, values: DType, scales: DType, store: Store) -> None:
        """A lane finds the scale of one group, and has the others' inverses from their lanes."""
        k = current()
        scale, inverse = scaled(self.combined(), values, scales)
        chosen = (k.thread % self.lanes < self.near) & (k.thread % self.share == 0)
        store(k.thread // self.lanes * self.count + self._own(), scale, chosen)
        self.inverses = k.registers(F32, self.count, f"{self.name}_inverse")
        if self.count == 1:
            self.inverses[0] = inverse
            return
        bits, first = hw.as_unsigned(inverse), (k.lane // self.near * self.near).to(U32)
        with k.unroll(self.count, name="group") as i:
            self.inverses[i] = hw.as_float(hw.shuffle_index(bits, first + (i * self.share).to(U32)))

    def combined(self) -> Value:
        """The largest magnitude of a lane's own group over all its threads. At each step lanes hand over half of their
        groups for as many of the others', so that fewer are left."""
        k, found, mask = current(), [self.amax[i] for i in range(self.count)], self.near
        while mask := mask // 2:
            given, kept, half = found, found, len(found) // 2
            if half:
                upper = (k.lane & mask) != 0
                given = [k.select(upper, x, y) for x, y in zip(found[:half], found[half:], strict=True)]
                kept = [k.select(upper, y, x) for x, y in zip(found[:half], found[half:], strict=True)]
            found = [hw.maximum_nan(x, hw.shuffle_xor_fp32(y, mask)) for x, y in zip(kept, given, strict=True)]
        if self.exchange is None:
            return found[0].named("amax")
        first = k.warp_index // self.warps * self.count * self.warps + self._own() * self.warps
        with k.when(k.lane % self.share == 0):
            put(self.exchange, first + k.warp_index % self.warps, found[0])
        hw.sync_threads()
        of_warps = [got(self.exchange, first + warp)[0] for warp in range(self.warps)]
        return reduce(hw.maximum_nan, of_warps).named("amax")

    def _own(self) -> Value:
        """The group of its thread's that a lane ends with."""
        return current().thread % self.near // self.share


class ColumnGroup(Group):
    """The columns of a square tile."""

    def __init__(self) -> None:
        super().__init__(CHUNK, "column")
        k = current()
        self.exchange = k.shared(4 * WARPS * BLOCK, name="column_exchange")[0].address
        self.shared_inverses = k.shared(4 * BLOCK, name="column_inverses")[0].address

    def cell(self, chunk: ValueLike, i: int) -> Value:
        return as_value(i, I32)

    def settle(self, values: DType, scales: DType, store: Store) -> None:
        """One thread finds the scale of a column."""
        k, lanes = current(), BLOCK // CHUNK
        assert self.exchange is not None
        found = [hw.maximum_nan(self.amax[i], hw.shuffle_xor_fp32(self.amax[i], lanes)) for i in range(CHUNK)]
        with k.when(k.lane < lanes):
            for i in range(0, CHUNK, 4):
                put(self.exchange, k.warp_index * BLOCK + k.lane * CHUNK + i, *found[i : i + 4])
        hw.sync_threads()
        with k.when(k.thread < BLOCK):
            of_warps = [got(self.exchange, k.thread + warp * BLOCK)[0] for warp in range(WARPS)]
            scale, inverse = scaled(reduce(hw.maximum_nan, of_warps), values, scales)
            put(self.shared_inverses, k.thread, inverse)
            store(k.thread, scale, k.thread < BLOCK)
        hw.sync_threads()
        self.inverses = k.registers(F32, self.count, f"{self.name}_inverse")
        for i in range(0, CHUNK, 4):
            four = got(self.shared_inverses, k.thread % lanes * CHUNK + i, 4)
            for j in range(4):
                self.inverses[i + j] = four[j]


def scaled(amax: Value, values: DType, scales: DType) -> tuple[Value, Value]:
    """The scale of a group, fp32 or the byte of a power of two that is no smaller, and what elements are multiplied by.

    The scale is amax over the dtype's largest value, but 1 if that is 0; NaN if amax is, and infinite if amax is.
    """
    k, limit = current(), LARGEST[values]
    bounded = hw.maximum_nan(amax, limit * LEAST_SCALE)
    scale = k.select(amax == 0.0, 1.0, bounded * float(np.float32(1 / limit)))
    if scales == FP32:
        return scale, k.select(amax == 0.0, 1.0, Constant(F32, limit) / bounded)
    bits = hw.as_unsigned(scale) & 0x7FFFFFFF
    exponent = k.minimum(bits + 0x7FFFFF >> 23, 255).named("exponent")
    return exponent, hw.as_float(Constant(U32, 254) - k.minimum(exponent, 254) << 23)


def packed(x: list[Value], dtype: DType) -> Value:
    """Four values in 8 bits each, the first in the low byte."""
    pairs = [hw.pack_int8(*x[i : i + 2]) if dtype == INT8 else hw.pack_fp8(*x[i : i + 2], dtype.ptx) for i in (0, 2)]
    low, high = (pair.to(U32) for pair in pairs)
    return low | high << 16


def put(base: Value, index: Value, *x: Value) -> None:
    """1, 2 or 4 numbers to an array of fp32 in shared memory."""
    registers = current().registers(F32, len(x), "given")
    for i, value in enumerate(x):
        registers[i] = value
    hw.store_shared(registers, base + (index * 4).to(U32))


def got(base: Value, index: Value, count: int = 1) -> Registers:
    """1, 2 or 4 numbers of an array of fp32 in shared memory."""
    registers = current().registers(F32, count, "taken")
    hw.load_shared(registers, base + (index * 4).to(U32))
    return registers
