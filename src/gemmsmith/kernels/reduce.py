"""The second step of a reduction: combines partial results in a fixed order, and rounds their total as it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gemmsmith import hw
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.core.pointer import Pointer
from gemmsmith.epilogue.device.outputs import store_rounded
from gemmsmith.epilogue.device.reductions import MONOIDS, Monoid, Partials, State
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I64, U32, U64
from gemmsmith.lang.values import Registers, Value

BATCH = 8
"""Loads a thread has in flight."""


def shape(partials: Partials) -> tuple[int, int]:
    """(elements, threads an element) of a CTA: what is reduced over everything takes a whole CTA, others share one, all
    parts in flight and no more threads than that takes, for they meet in pairs. The sum of a row is thus in the same
    order whether or not it is the only one."""
    if partials.tiles:
        return 1, 1024
    threads = min(1 << (max(-(-partials.parts // BATCH), 1) - 1).bit_length(), 32)
    return (32, threads) if threads <= 8 else (8, threads)


@dataclass(frozen=True)
class BoundReduction:
    """scale * total + offset of each element, one after the other at `out`; its partials, `combined`, lie at
    `source`."""

    partials: Partials
    source: Pointer | int
    out: Pointer
    scale: float = 1.0
    offset: float = 0.0

    @property
    def total(self) -> int:
        """Elements of the result."""
        return self.partials.batch * self.partials.elements


@lru_cache(maxsize=64)
def reduce(kind: str, dtype: DType, columns: int, threads: int, chip: Chip = HOPPER) -> Kernel:
    """`threads` threads share an element's partials and add up their sums in shared memory; `columns` elements a CTA,
    stored as `dtype`: fp32, fp16 or bf16."""
    monoid = MONOIDS[kind]
    with Builder(f"reduce_{kind}_{dtype}_{columns}x{threads}", threads=columns * threads, chip=chip) as k:
        k.header += [f"gemmsmith: reduce ({kind})", "combines partial results, (batch, parts, elements), in order"]
        k.grid = lambda r: -(-r.total // columns)
        source, out = k.pointer("partials", lambda r: r.source), k.pointer("out", lambda r: r.out)
        parts = k.parameter("parts", bind=lambda r: r.partials.parts)
        elements = k.parameter("elements", bind=lambda r: r.partials.elements)
        total = k.parameter("total", bind=lambda r: r.total)
        state_stride = k.parameter("state", I64, lambda r: r.partials.state)
        scale, shift = k.parameter("scale", F32, lambda r: r.scale), k.parameter("offset", F32, lambda r: r.offset)
        hw.grid_dependency_wait()
        rank = (k.thread // columns).named("rank")
        slots = k.shared(4 * columns * threads, stages=len(monoid.identity), name="totals")
        groups, grid = (total + columns - 1) // columns, hw.grid_size()
        with k.range((groups - hw.block_index() + grid - 1) // grid, name="group") as group:
            index = ((hw.block_index() + group * grid) * columns + k.thread % columns).named("index")
            batch, element = index // elements, (index % elements).named("element")
            cells = [k.registers(F32, 1, "total_of_thread") for _ in monoid.identity]
            for cell, identity in zip(cells, monoid.identity, strict=True):
                cell[0] = identity
            with k.range((parts + threads * BATCH - 1) // (threads * BATCH), name="round") as round:
                loaded = []
                for i in range(BATCH):
                    part = round * (threads * BATCH) + i * threads + rank
                    inside = ((part < parts) & (index < total)).named("inside")
                    offset = (batch * parts + part).to(I64) * elements.to(I64) + element.to(I64)
                    loaded.append(
                        (inside, [_load(source, offset + state_stride * s, inside) for s in range(len(cells))])
                    )
                for inside, values in loaded:
                    other = (k.select(inside, x, i) for x, i in zip(values, monoid.identity, strict=True))
                    _merge(monoid, cells, tuple(other))
            half = threads // 2
            while half:  # a tree over the threads of an element, always the same
                addresses = [slots[s].address for s in range(len(cells))]
                for address, cell in zip(addresses, cells, strict=True):
                    hw.store_shared(cell, address + (k.thread * 4).to(U32))
                hw.sync_threads()
                with k.when(rank < half):
                    others = [k.registers(F32, 1, "other") for _ in cells]
                    for address, other_cell in zip(addresses, others, strict=True):
                        hw.load_shared(other_cell, address + ((k.thread + half * columns) * 4).to(U32))
                    _merge(monoid, cells, tuple(other_cell[0] for other_cell in others))
                hw.sync_threads()
                half //= 2
            result = hw.fma(monoid.finish(tuple(cell[0] for cell in cells)), scale, shift)
            where = out + (index.to(I64) * dtype.bytes).to(U64)
            store_rounded(result, where, (rank == 0) & (index < total), dtype)
        return k.finish()


def _merge(monoid: Monoid, cells: list[Registers], other: State) -> None:
    merged = monoid.merge(tuple(cell[0] for cell in cells), other)
    for cell, x in zip(cells, merged, strict=True):
        cell[0] = x


def _load(source: Value, offset: Value, inside: Value) -> Value:
    return hw.load_global_word(source + (offset * 4).to(U64), inside, F32, "partial")
