"""Groups of elements of a register tile that share a quantization scale: amax, scale and reciprocal per group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce

import numpy as np

from gemmsmith import hw
from gemmsmith.core.dtypes import FP32, INT8, MAX_FINITE, MIN_SCALE, DType
from gemmsmith.kernels.register_tile import (
    QUANTIZATION_BLOCK,
    THREADS,
    VECTOR_ELEMENTS,
    VECTORS_PER_THREAD,
    WARPS,
    RegisterTile,
)
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32, U32
from gemmsmith.lang.values import Constant, Value, ValueLike, as_value

Store = Callable[[Value, Value, Value], None]
"""Callable (group index in the tile, scale as fp32 or ue8m0 bits, predicate of the storing thread) that stores it."""


class ScaleGroup(ABC):
    """The groups of elements of a tile that share a scale; a thread has elements of `count` groups.

    `add` collects the largest magnitude (amax) of each group, and `compute_scales` derives the scales. Warps exchange
    partial maxima through the shared memory at `exchange` (None: no exchange is needed); before `compute_scales` is
    called again, all warps must have read it. `name`: prefix of the registers' names.
    """

    exchange: Value | None

    def __init__(self, count: int, name: str) -> None:
        k = current_builder()
        self.count = count
        self.amax, self.name = k.registers(F32, count, f"{name}_amax"), name

    @abstractmethod
    def group_index(self, vector: ValueLike, i: int) -> Value:
        """Return the index, among the thread's groups, of the group of element `i` of a vector."""

    @abstractmethod
    def compute_scales(self, values: DType, scales: DType, store: Store) -> None:
        """Compute the scales from the amax of all added elements, store them, and keep their reciprocals."""

    def clear(self) -> None:
        with current_builder().unroll(self.count, name="group") as i:
            self.amax[i] = 0.0

    def add(self, tile: RegisterTile) -> None:
        """Update each group's amax with a tile's elements."""
        with current_builder().unroll(VECTORS_PER_THREAD, name="vector") as vector:
            for i in range(VECTOR_ELEMENTS):
                group, magnitude = self.group_index(vector, i), hw.math_library_call("fabsf", tile.element(vector, i))
                self.amax[group] = hw.maximum_nan(self.amax[group], magnitude)

    def _declare_reciprocals(self) -> None:
        self._reciprocals = current_builder().registers(F32, self.count, f"{self.name}_reciprocal")

    def reciprocal(self, vector: ValueLike, i: int) -> Value:
        """Return the reciprocal scale, by which element `i` of a vector is multiplied. After `compute_scales`."""
        return self._reciprocals[self.group_index(vector, i)]


class RowScaleGroup(ScaleGroup):
    """Groups that are rows of the tile, or the whole tile.

    Every `threads` consecutive threads share `count` groups: each of them has elements of all `count` rows.
    """

    def __init__(self, count: int, threads: int) -> None:
        """Declare the registers, and shared memory if several warps have elements of a group."""
        super().__init__(count, "row" if count > 1 or threads < THREADS else "tile")
        self.threads, self.lanes_per_warp, self.warps_per_row = threads, min(threads, 32), threads // 32
        self.lanes_per_group = self.lanes_per_warp // count
        """Lanes, of the `lanes_per_warp` that share groups, to which `reduce_amax` returns the same group."""
        self.exchange = None
        if self.warps_per_row > 1:
            self.exchange = current_builder().shared(4 * count * WARPS, name="amax_exchange")[0].address

    def group_index(self, vector: ValueLike, i: int) -> Value:
        return as_value(vector, I32) // (VECTORS_PER_THREAD // self.count)

    def compute_scales(self, values: DType, scales: DType, store: Store) -> None:
        """Compute the scale of one group in each lane, store it, and get the other groups' reciprocals by shuffles."""
        k = current_builder()
        scale, reciprocal = scale_and_reciprocal(self.reduce_amax(), values, scales)
        is_writer = (k.thread % self.threads < self.lanes_per_warp) & (k.thread % self.lanes_per_group == 0)
        store(k.thread // self.threads * self.count + self._lane_group(), scale, is_writer)
        self._declare_reciprocals()
        if self.count == 1:
            self._reciprocals[0] = reciprocal
            return
        bits, first = hw.as_unsigned(reciprocal), (k.lane // self.lanes_per_warp * self.lanes_per_warp).to(U32)
        with k.unroll(self.count, name="group") as i:
            source = first + (i * self.lanes_per_group).to(U32)
            self._reciprocals[i] = hw.as_float(hw.shuffle_index(bits, source))

    def reduce_amax(self) -> Value:
        """Reduce amax over the threads of each group; return the amax of one group, number `_lane_group`, per lane.

        It is a butterfly reduction. While a lane has several groups, it sends the maxima of one half of them to its
        partner and keeps the other half, so that each step halves the shuffles.
        """
        k, amax, mask = current_builder(), [self.amax[i] for i in range(self.count)], self.lanes_per_warp
        while mask := mask // 2:
            sent, retained, half = amax, amax, len(amax) // 2
            if half:
                is_upper = (k.lane & mask) != 0
                sent = [k.select(is_upper, x, y) for x, y in zip(amax[:half], amax[half:], strict=True)]
                retained = [k.select(is_upper, y, x) for x, y in zip(amax[:half], amax[half:], strict=True)]
            amax = [hw.maximum_nan(x, hw.shuffle_xor_fp32(y, mask)) for x, y in zip(retained, sent, strict=True)]
        if self.exchange is None:
            return amax[0].named("amax")
        warps = self.warps_per_row
        first = k.warp_index // warps * self.count * warps + self._lane_group() * warps
        with k.when(k.lane % self.lanes_per_group == 0):
            place = first + k.warp_index % warps
            hw.store_shared_word(self.exchange + (place * 4).to(U32), amax[0], "stored")
        k.comment("all warps have written the maxima that are read now")
        hw.sync_threads()
        # Not a loop of the kernel, after which ptxas duplicates the shuffles of `compute_scales`.
        places = (self.exchange + ((first + warp) * 4).to(U32) for warp in range(warps))
        warp_amax = [hw.load_shared_word(place, F32, "loaded") for place in places]
        return reduce(hw.maximum_nan, warp_amax).named("amax")

    def _lane_group(self) -> Value:
        """Return the index, among the thread's groups, of the group whose amax `reduce_amax` returns to this lane."""
        return current_builder().thread % self.lanes_per_warp // self.lanes_per_group


class ColumnScaleGroup(ScaleGroup):
    """Groups that are the columns of a square tile: a thread has elements of VECTOR_ELEMENTS consecutive columns."""

    def __init__(self) -> None:
        """Declare the registers, and shared memory for the warps' maxima and for the reciprocals of all columns."""
        super().__init__(VECTOR_ELEMENTS, "column")
        k = current_builder()
        self.exchange = k.shared(4 * WARPS * QUANTIZATION_BLOCK, name="column_exchange")[0].address
        self.shared_reciprocals = k.shared(4 * QUANTIZATION_BLOCK, name="column_reciprocals")[0].address

    def group_index(self, vector: ValueLike, i: int) -> Value:
        return as_value(i, I32)

    def compute_scales(self, values: DType, scales: DType, store: Store) -> None:
        """Compute the scale of one column per thread, of the first threads; all get reciprocals from shared memory.

        The maxima are reduced first over the two halves of a warp, which have the same columns, then over the warps.
        """
        k, lanes = current_builder(), QUANTIZATION_BLOCK // VECTOR_ELEMENTS
        assert self.exchange is not None
        with k.unroll(VECTOR_ELEMENTS) as i:
            self.amax[i] = hw.maximum_nan(self.amax[i], hw.shuffle_xor_fp32(self.amax[i], lanes))
        with k.when(k.lane < lanes), k.unroll(0, VECTOR_ELEMENTS, 4) as i:
            column = k.warp_index * QUANTIZATION_BLOCK + k.lane * VECTOR_ELEMENTS + i
            hw.store_shared(self.amax.slice(i, 4), self.exchange + (column * 4).to(U32))
        k.comment("all warps have written the maxima that are read now")
        hw.sync_threads()
        with k.when(k.thread < QUANTIZATION_BLOCK):
            warp_amax = k.registers(F32, WARPS, "warp_amax")
            with k.unroll(WARPS, name="warp") as warp:
                index = k.thread + warp * QUANTIZATION_BLOCK
                hw.load_shared(warp_amax.slice(warp, 1), self.exchange + (index * 4).to(U32))
            amax = reduce(hw.maximum_nan, [warp_amax[i] for i in range(WARPS)]).named("amax")
            scale, reciprocal = scale_and_reciprocal(amax, values, scales)
            hw.store_shared_word(self.shared_reciprocals + (k.thread * 4).to(U32), reciprocal, "stored")
            store(k.thread, scale, k.thread < QUANTIZATION_BLOCK)
        k.comment("the reciprocals that all threads read now are written")
        hw.sync_threads()
        self._declare_reciprocals()
        with k.unroll(0, VECTOR_ELEMENTS, 4) as i:
            column = k.thread % lanes * VECTOR_ELEMENTS + i
            hw.load_shared(self._reciprocals.slice(i, 4), self.shared_reciprocals + (column * 4).to(U32))


def scale_and_reciprocal(amax: Value, values: DType, scales: DType) -> tuple[Value, Value]:
    """Return a group's scale and its reciprocal, by which elements are multiplied.

    The scale is amax / MAX_FINITE[values]. `scales` fp32: it is returned as such. `scales` ue8m0: it is rounded up to a
    power of two, and returned as its exponent byte. It is 1 if amax is 0, NaN if amax is NaN, and infinite if amax is
    infinite.
    """
    k, limit = current_builder(), MAX_FINITE[values]
    bounded = hw.maximum_nan(amax, limit * MIN_SCALE)
    scale = k.select(amax == 0.0, 1.0, bounded * float(np.float32(1 / limit)))
    if scales == FP32:
        return scale, k.select(amax == 0.0, 1.0, Constant(F32, limit) / bounded)
    bits = hw.as_unsigned(scale) & 0x7FFFFFFF
    # Adding the largest mantissa carries into the exponent unless the scale is a power of two. The reciprocal of
    # 2^(e - 127) is 2^(127 - e), whose exponent byte is 254 - e.
    exponent = k.minimum(bits + 0x7FFFFF >> 23, 255).named("exponent")
    return exponent, hw.as_float(Constant(U32, 254) - k.minimum(exponent, 254) << 23)


def pack_4x8bit(x: list[Value], dtype: DType) -> Value:
    """Convert four fp32 values to 8 bits each and pack them into a word, the first in the low byte."""
    pairs = [(x[0], x[1]), (x[2], x[3])]
    packed = [hw.pack_int8(a, b) if dtype == INT8 else hw.pack_fp8(a, b, dtype.ptx) for a, b in pairs]
    low, high = (pair.to(U32) for pair in packed)
    return low | high << 16
