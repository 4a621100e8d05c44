"""Loads under math: the next k-tile comes while one is multiplied. And blocks in an order in which a wave of them reads
few different tiles, which then lie in the L2."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.kernels.ladder.product import Product, SharedMatrix, zeros
from gemmsmith.kernels.ladder.vectorized import DEPTH, OWN, SIDE, THREADS, load_chunks, multiply, own_chunk, store
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I32

GROUP = 8
"""Columns of tiles that a band of blocks is wide."""


def double_buffer(dtype: DType, chip: Chip) -> Kernel:
    """As `vectorized`, with two stages: one is multiplied, while the next k-tile is on its way to registers, and from
    there into the other stage. So one barrier a k-tile is enough. Blocks run down bands of 8 tiles."""
    resident = 2 if chip.has("sm_90") else 1  # for earlier chips ptxas spills with 128 registers
    with Builder(f"double_buffer_{GROUP}", threads=THREADS, chip=chip, resident=resident) as k:
        x = Product(dtype, dtype, SIDE, SIDE)
        x.in_bands(GROUP)
        a, b = (SharedMatrix(name, DEPTH, SIDE, stages=2) for name in "AB")
        deep, along = own_chunk()
        stage, results = k.var(I32, 0, "stage"), zeros(OWN, OWN)
        of_a, of_b = load_chunks(x, deep, along)
        a.store(deep, along, of_a)
        b.store(deep, along, of_b)
        hw.sync_threads()
        with k.range(0, x.k, DEPTH, name="first") as first:
            of_a, of_b = load_chunks(x, first + DEPTH + deep, along)
            a.stage = b.stage = stage.get()
            multiply(results, a, b)
            stage.set(1 - stage.get())
            a.stage = b.stage = stage.get()
            a.store(deep, along, of_a)
            b.store(deep, along, of_b)
            hw.sync_threads()
        store(x, results)
        return k.finish()
