"""The accumulator: rows beyond one wgmma, every width, both accumulations and outputs, against float64; promotion."""

from __future__ import annotations

import numpy as np
import pytest
from tests.collective.exact_gemm import check

import gemmsmith
from gemmsmith import Config, hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import BF16, E4M3, FP16, FP32, INT8, INT32
from gemmsmith.core.mma import D_FRAGMENT, Mma, select_mma
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, U64
from gemmsmith.lang.values import Constant


@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("n", [8, 24, 64])
def test_blocks_of_64_rows(rows: int, n: int, rng: np.random.Generator) -> None:
    config = Config(tile=(rows, n, 64), cluster=(1, 1), consumers=1, stages=2)
    check(config, rows + 3, n + 1, 80, rng)


@pytest.mark.parametrize("depth", [16, 32, 64, 128])
def test_every_step_of_a_tiles_depth_counts(depth: int, rng: np.random.Generator) -> None:
    check(Config(tile=(64, 16, depth), cluster=(1, 1), consumers=1, stages=2), 64, 16, depth + 8, rng)


@pytest.mark.parametrize("out_dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("accumulate", ["fp16", "fp32"])
def test_sums_are_rounded_where_they_are_kept(accumulate: str, out_dtype: str) -> None:
    """2048 + 1 is 2048 in fp16; in fp32 it stays until it is stored."""
    a, b = np.ones((64, 80), np.float16), np.ones((80, 8), np.float16)
    a[:, 0] = 2048
    a[:, 1:64], a[:, 65:] = 0, 0  # 2048 in the first k-tile, 1 in the second
    config = Config(tile=(64, 8, 64), cluster=(1, 1), consumers=1, stages=2)
    done = gemmsmith.simulate(a, b, config=config, accumulate=accumulate, out_dtype=out_dtype)
    want = 2049 if (accumulate, out_dtype) == ("fp32", "fp32") else 2048
    assert done.hazards == []
    np.testing.assert_array_equal(done.result.astype(np.float32), np.full((64, 8), want))


@pytest.mark.parametrize(
    "mma", [select_mma(E4M3, E4M3, FP32), select_mma(FP16, FP16, FP16), select_mma(INT8, INT8, INT32)]
)
def test_promotion_adds_in_fp32(mma: Mma, rng: np.random.Generator) -> None:
    n, pairs = 16, mma.d == FP16
    given = rng.integers(-100, 100, (64, n)).astype(mma.d.numpy)
    thread, element = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    held = np.ascontiguousarray(given[D_FRAGMENT.element(thread, element)])
    with Builder("promotion", threads=128) as k:
        source, out = k.pointer("source"), k.pointer("out")
        sums, total = Accumulator(mma, 64, n), Accumulator(select_mma(BF16, BF16, FP32), 64, n)
        hw.load_global(sums.fragments[0], source + (k.thread * (n if pairs else 2 * n)).to(U64), True)
        total.clear()
        for factor in (None, Constant(F32, 2.0)):
            sums.promote_into(total.fragments[0], 0, [(0, n // 8, lambda chunk, half, i, factor=factor: factor)])
        hw.store_global(total.fragments[0], out + (k.thread * 2 * n).to(U64), True)
        kernel = k.finish()
    memory, found = GlobalMemory(), np.full((128, n // 2), np.nan, np.float32)
    arguments = {"source": memory.add_buffer(held, "source", writable=False), "out": memory.add_buffer(found, "out")}
    assert simulate(kernel, 1, arguments, memory, seed=0).hazards == []
    assert np.array_equal(found, 3 * held.astype(np.float64))
