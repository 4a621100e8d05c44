"""Dequantization kernel: 8-bit values times their scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from gemmsmith import hw
from gemmsmith.collective.global_array import GlobalArray
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.kernels.register_tile import (
    QUANTIZATION_BLOCK,
    THREADS,
    VECTOR_ELEMENTS,
    VECTORS_PER_THREAD,
    BoundTiles,
    RegisterTile,
    grid_stride_tile_loop,
    row_pitch_bytes,
)
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, U32, U64
from gemmsmith.lang.values import RegisterArray, Value


@dataclass(frozen=True)
class DequantizeSpec:
    """Compile-time parameters of a dequantization kernel.

    Attributes:
        source_dtype: 8-bit dtype of the values.
        scale_dtype: Dtype of the scales, fp32 or ue8m0.
        per_column: Each column has its own scale; else the elements of a vector share one.
        vectorizable: The source's rows are whole aligned vectors.
    """

    source_dtype: DType
    scale_dtype: DType
    out_dtype: DType
    per_column: bool
    vectorizable: bool

    @property
    def name(self) -> str:
        variants = ["per_column"] * self.per_column + ["unaligned"] * (not self.vectorizable)
        return "_".join(map(str, ["dequantize", self.source_dtype, self.scale_dtype, self.out_dtype, *variants]))


@dataclass(frozen=True)
class BoundDequantize(BoundTiles):
    """Launch arguments of a dequantization kernel.

    `arrays`: the values "source", their "scales" (with stride 0 along a dimension all of which shares one scale) and
    the result "out". `log2_group_shape`: base-2 logarithms of the rows and of the columns that share a scale.
    """

    log2_group_shape: tuple[int, int]


@lru_cache(maxsize=64)
def dequantize(spec: DequantizeSpec) -> Kernel:
    """Build the dequantization kernel of a spec: out = value * scale, by a grid-stride loop over square tiles."""
    min_ctas_per_sm = 3 if spec.vectorizable and not spec.per_column else 1  # as many as without spills
    with Builder(spec.name, threads=THREADS, min_ctas_per_sm=min_ctas_per_sm) as k:
        k.header += [f"gemmsmith: {spec.name}", "8-bit values times their scales"]
        k.work_clusters, k.persistent = lambda p: prod(p.grid), True
        tile = RegisterTile(spec.source_dtype, QUANTIZATION_BLOCK, vectorizable=spec.vectorizable)
        scales = GlobalArray("scales", "scales", spec.scale_dtype)
        out = GlobalArray("out", "out", spec.out_dtype)
        log2_m = k.parameter("log2_group_m", compute=lambda p: p.log2_group_shape[0])
        log2_n = k.parameter("log2_group_n", compute=lambda p: p.log2_group_shape[1])
        rows, columns = tile.extents
        hw.grid_dependency_wait()
        with grid_stride_tile_loop() as (batch, tile_m, tile_n):
            tile.load(batch, tile_m * QUANTIZATION_BLOCK, tile_n * QUANTIZATION_BLOCK)
            row0 = (tile_m * QUANTIZATION_BLOCK + tile.layout.row(0)).named("row0")
            col0 = (tile_n * QUANTIZATION_BLOCK + tile.layout.column(0)).named("col0")
            address = k.var(U64, out.element_address(batch, row0, col0), "address")
            with k.unroll(VECTORS_PER_THREAD, name="vector") as vector:
                row = row0 + vector
                in_bounds = ((row < rows) & (col0 < columns)).named("in_bounds")
                vector_scales = []
                for c in range(VECTOR_ELEMENTS if spec.per_column else 1):
                    scale_in_bounds = in_bounds & (col0 + c < columns)
                    scale_address = scales.element_address(batch, row >> log2_m, col0 + c >> log2_n)
                    vector_scales.append(load_scale(scale_address, scale_in_bounds, spec.scale_dtype).named("scale"))
                for first, words in _scaled_vectors(tile, vector_scales, vector, spec.out_dtype):
                    place = address.get() + first * spec.out_dtype.bytes
                    hw.store_global(words, place, in_bounds & (col0 + first < columns))
                address.set(address.get() + row_pitch_bytes(out))
        return k.finish()


def load_scale(address: Value, in_bounds: Value, dtype: DType) -> Value:
    """Load a scale of `dtype` as fp32; 0 or 2^-127 if not `in_bounds`.

    The dtype is fp32, or ue8m0, whose byte denotes 2^(byte - 127), or NaN if it is 255. The byte becomes the exponent
    of an fp32; only 2^-127 (byte 0) is subnormal, with the bits 1 << 22.
    """
    k = current_builder()
    if dtype == FP32:
        return hw.load_global_word(address, in_bounds, F32, "scale")
    byte = hw.load_global_u8_or_u16(address, in_bounds, 8).to(U32)
    bits = k.select(byte == 0, 1 << 22, byte << 23)
    return hw.as_float(k.select(byte == 255, 0x7FFFFFFF, bits))


def _scaled_vectors(
    tile: RegisterTile, scales: list[Value], vector: Value, dtype: DType
) -> Iterator[tuple[int, RegisterArray]]:
    """Yield a thread's vector number `vector`, times its scales, in parts: (first element, 16 bytes in registers).

    `scales`: one per element, or one for all. The products are rounded to `dtype`.
    """
    k = current_builder()
    for first in range(0, VECTOR_ELEMENTS, 16 // dtype.bytes):
        x = [tile.element(vector, i) * scales[i % len(scales)] for i in range(first, first + 16 // dtype.bytes)]
        words = k.registers(F32 if dtype == FP32 else U32, 4, "words")
        for i in range(4):
            words[i] = x[i] if dtype == FP32 else hw.pack(x[2 * i], x[2 * i + 1], dtype)
        yield first, words
