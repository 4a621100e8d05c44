"""The sum of each token's rows of a matrix, added in fp32 in the order of the token's slots; a thread has 8 columns.

A slot is one of the `rows` experts of a token; a row of the matrix is an expert's output for a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gemmsmith import hw
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dtypes import DType
from gemmsmith.core.scalars import ceil_div
from gemmsmith.kernels.register_tile import VECTOR_ELEMENTS
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, U32, U64

THREADS = 128
"""Threads per CTA; chosen, not measured."""
MAX_ROWS = 16
"""Rows of a token at most: a thread has a vector of each in its registers."""


@dataclass(frozen=True)
class SlotSumSpec:
    """Compile-time parameters of the kernel.

    Attributes:
        dtype: bf16 or fp16, of all arrays.
        rows: Rows of a token, at most MAX_ROWS.
        has_addend: There is a matrix with a row per token that is added to the sums.
        gathers: An array of indices says which rows of the matrix are a token's; otherwise they are consecutive.
    """

    dtype: DType
    rows: int
    has_addend: bool
    gathers: bool = False


@dataclass(frozen=True)
class BoundSlotSum:
    """Launch arguments: the numbers of tokens, and of vectors of a row. Arrays are at the Pointers of their names."""

    tokens: int
    vectors: int


@lru_cache(maxsize=64)
def slot_sum(spec: SlotSumSpec) -> Kernel:
    """Build the kernel of a spec.

    Reads slots (tokens * rows, n); with `has_addend`, addend (tokens, n); with `gathers`, row_of_slot (tokens * rows),
    int32: the row of `slots` that belongs to each slot. Writes sums (tokens, n). n is a multiple of 8.
    """
    suffixes = "_and_addend" * spec.has_addend + "_gathered" * spec.gathers
    with Builder(f"slot_sum_{spec.dtype}_{spec.rows}{suffixes}", threads=THREADS) as k:
        k.header += [f"gemmsmith: {k.name}", f"sums of {'rows by index' if spec.gathers else 'consecutive rows'}"]
        k.work_clusters = lambda p: ceil_div(p.tokens * p.vectors, THREADS)
        slots = k.pointer("slots", lambda _: Pointer("slots"))
        sums = k.pointer("sums", lambda _: Pointer("sums"))
        addend = k.pointer("addend", lambda _: Pointer("addend")) if spec.has_addend else None
        row_of_slot = k.pointer("row_of_slot", lambda _: Pointer("row_of_slot")) if spec.gathers else None
        vectors = k.parameter("vectors", compute=lambda p: p.vectors)
        all_vectors = k.parameter("all_vectors", compute=lambda p: p.tokens * p.vectors)
        index = (hw.block_index() * THREADS + k.thread).named("index")
        exists, token = (index < all_vectors).named("exists"), (index // vectors).named("token")
        rows = k.registers_2d(U32, spec.rows + spec.has_addend, 4, "row")
        total = k.registers(F32, VECTOR_ELEMENTS, "sum")
        row_bytes = (vectors.to(U64) * 16).named("row_bytes")
        hw.grid_dependency_wait()
        if row_of_slot is None:
            first = ((token * ((spec.rows - 1) * vectors) + index).to(U64) * 16).named("first")
            offsets = [first + row_bytes * i for i in range(spec.rows)]
        else:
            slot, vector = (token * spec.rows).to(U64), (index % vectors).to(U64) * 16
            places = [row_of_slot + (slot + i) * 4 for i in range(spec.rows)]
            indices = [hw.load_global_word(place, exists, U32, "row") for place in places]
            offsets = [x.to(U64) * row_bytes + vector for x in indices]
        for i, offset in enumerate(offsets):
            hw.load_global(rows.rows[i], slots + offset, exists)
        vector_offset = index.to(U64) * 16
        if addend is not None:
            hw.load_global(rows.rows[-1], addend + vector_offset, exists)
        for i, row in enumerate(rows):
            for j in range(VECTOR_ELEMENTS):
                x = hw.unpack(row[j // 2], j % 2, spec.dtype)
                total[j] = total[j] + x if i else x
        result = k.registers(U32, 4, "result")
        for j in range(4):
            result[j] = hw.pack(total[2 * j], total[2 * j + 1], spec.dtype)
        hw.store_global(result, sums + vector_offset, exists)
        return k.finish()
