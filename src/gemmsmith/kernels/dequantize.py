"""Dequantizing: 8-bit values times their scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from gemmsmith import hw
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.problem import Matrix
from gemmsmith.epilogue.device.addressed import Addressed
from gemmsmith.kernels.held import BLOCK, CHUNK, CHUNKS, THREADS, HeldTile, each_tile, held_tile, pitch_of
from gemmsmith.lang.builder import Builder, current
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, U32, U64
from gemmsmith.lang.values import Bind, Registers, Value


@dataclass(frozen=True)
class DequantizeSpec:
    """What is constant in a kernel. `per_column`: each column has a scale of its own, else 8 neighbors share one.
    `chunked`: the source's rows are whole chunks."""

    source: DType
    scales: DType
    out: DType
    per_column: bool
    chunked: bool

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        ways = ["per_column"] * self.per_column + ["unaligned"] * (not self.chunked)
        return "_".join(map(str, ["dequantize", self.source, self.scales, self.out, *ways]))


@dataclass(frozen=True)
class BoundDequantize:
    """`arrays`: the values, "source", their "scales", with stride 0 where all share one, and the result, "out", at the
    Pointers of these names. `shifts`: 2^shift rows, and columns, share a scale."""

    arrays: Mapping[str, Matrix]
    shifts: tuple[int, int]

    @property
    def source(self) -> Matrix:
        return self.arrays["source"]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Batches, tiles below one another, and tiles abreast."""
        return self.source.batch, -(-self.source.rows // BLOCK), -(-self.source.cols // BLOCK)


_SHIFTS: dict[str, Bind] = {"row": lambda p: p.shifts[0], "column": lambda p: p.shifts[1]}


@lru_cache(maxsize=64)
def dequantize(spec: DequantizeSpec) -> Kernel:
    """The kernel of a spec."""
    with Builder(spec.name, threads=THREADS, resident=3 if spec.chunked and not spec.per_column else 1) as k:
        k.header += [f"gemmsmith: {spec.name}", "8-bit values times their scales"]
        k.grid = lambda p: prod(p.grid)
        held = held_tile(spec.source, BLOCK, chunked=spec.chunked)
        scales = Addressed("scales", "scales", spec.scales, m=True, n=True)
        out = Addressed("out", "out", spec.out, m=True, n=True)
        shifts = [k.parameter(f"{along}_shift", bind=bind) for along, bind in _SHIFTS.items()]
        rows, columns = held.extents
        hw.grid_dependency_wait()
        with each_tile() as (batch, i, j):
            held.load(batch, i * BLOCK, j * BLOCK)
            top, left = (
                (i * BLOCK + held.threads.row(0)).named("top"),
                (j * BLOCK + held.threads.column(0)).named("left"),
            )
            where = k.var(U64, out.at(batch, top, left), "where")
            with k.unroll(CHUNKS, name="chunk") as chunk:
                row = top + chunk
                inside = ((row < rows) & (left < columns)).named("inside")
                factors = []
                for c in range(CHUNK if spec.per_column else 1):
                    there = inside & (left + c < columns)
                    at = scales.at(batch, row >> shifts[0], left + c >> shifts[1])
                    factors.append(load_scale(at, there, spec.scales).named("scale"))
                for first, words in _products(held, factors, chunk, spec.out):
                    hw.store_global(words, where.get() + first * spec.out.bytes, inside & (left + first < columns))
                where.set(where.get() + pitch_of(out))
        return k.finish()


def load_scale(where: Value, inside: Value, dtype: DType) -> Value:
    """An fp32 scale, or a power of two by its byte: 2^(byte - 127), NaN for 255."""
    k = current()
    if dtype == FP32:
        return hw.load_global_word(where, inside, F32, "one")
    byte = hw.load_global_narrow(where, inside, 8).to(U32)
    bits = k.select(byte == 0, 1 << 22, byte << 23)
    return hw.as_float(k.select(byte == 255, 0x7FFFFFFF, bits))


def _products(held: HeldTile, factors: list[Value], chunk: Value, dtype: DType) -> Iterator[tuple[int, Registers]]:
    """16 bytes at a time of a chunk, and which element is their first; a row's last ones may lie in its padding."""
    k = current()
    for first in range(0, CHUNK, 16 // dtype.bytes):
        x = [held.element(chunk, i) * factors[i % len(factors)] for i in range(first, first + 16 // dtype.bytes)]
        words = k.registers(F32 if dtype == FP32 else U32, 4, "words")
        for i in range(4):
            words[i] = x[i] if dtype == FP32 else hw.pack(x[2 * i], x[2 * i + 1], dtype)
        yield first, words
