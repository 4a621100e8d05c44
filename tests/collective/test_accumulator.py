"""An accumulator's sums, and their promotion into another."""

from __future__ import annotations

import numpy as np
import pytest

from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import BF16, E4M3, FP16, FP32, INT8, INT32
from gemmsmith.core.mma import Mma, find_mma, fragment_element
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U64


@pytest.mark.parametrize("mma", [find_mma(E4M3, E4M3, FP32), find_mma(FP16, FP16, FP16), find_mma(INT8, INT8, INT32)])
def test_promotion_adds_in_fp32(mma: Mma, rng: np.random.Generator) -> None:
    n, pairs = 16, mma.d == FP16
    given = rng.integers(-100, 100, (64, n)).astype(mma.d.numpy)
    thread, element = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    held = np.ascontiguousarray(given[fragment_element(thread, element)])
    with Builder("promotion", threads=128) as k:
        source, out = k.pointer("source"), k.pointer("out")
        sums, total = Accumulator(mma, 64, n), Accumulator(find_mma(BF16, BF16, FP32), 64, n)
        hw.load_global(sums.blocks[0], source + (k.thread * (n if pairs else 2 * n)).to(U64), True)
        total.clear()
        sums.promote(total)
        sums.promote(total)
        hw.store_global(total.blocks[0], out + (k.thread * 2 * n).to(U64), True)
        kernel = k.finish()
    memory, found = GlobalMemory(), np.full((128, n // 2), np.nan, np.float32)
    arguments = {"source": memory.place(held, "source", writable=False), "out": memory.place(found, "out")}
    assert simulate(kernel, 1, arguments, memory, seed=0).hazards == []
    assert np.array_equal(found, 2 * held.astype(np.float64))
