"""mma_multistage in the simulator against float64: any shape, layout, dtype, tile, schedule and chip; epilogues too."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as some
from tests.epilogue.graphs import graphs
from tests.epilogues import CASES
from tests.simulated.test_dtypes import matrix, poisoned
from tests.simulated.test_epilogues import check, check_graph

import gemmsmith
from gemmsmith import Config, ConfigError
from gemmsmith.backends.reference import bounds
from gemmsmith.backends.reference.matmul import truncate_to_tf32
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.core.chip import CHIPS
from gemmsmith.core.dtypes import BF16, FP16, FP32, TF32, as_dtype
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.mma import MMA_SYNC, select_mma
from gemmsmith.host import planned_gemm
from gemmsmith.hw.mma import fused_mma

OPERANDS = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32, "int8": np.int8}
OUTPUTS = {"bf16": ["bf16", "fp32"], "fp16": ["fp16"], "fp32": ["fp32", "bf16"], "int8": ["int32"]}


def config(**changes: Any) -> Config:
    return Config("mma_multistage", (64, 64, 32), (1, 1), 3, 2, chip="sm_80").replace(**changes)


@some.composite
def products(draw: some.DrawFn) -> dict[str, Any]:
    dtype, consumers = draw(some.sampled_from(list(OPERANDS))), draw(some.sampled_from([1, 2]))
    depth = 64 // np.dtype(OPERANDS[dtype]).itemsize
    tile = 64 * draw(some.sampled_from([1, 1, 2])), 16 * consumers * draw(some.integers(1, 4))
    precision = draw(some.sampled_from(["tf32", "3xtf32"])) if dtype == "fp32" else None
    depth *= 1 if precision == "3xtf32" else draw(some.sampled_from([1, 2]))
    chip = draw(some.sampled_from(["sm_80", "sm_86", "sm_90"]))
    line = 128 // np.dtype(OPERANDS[dtype]).itemsize  # an MN-major operand's tile is padded to whole lines
    stage_bytes = sum(-(-x // line) * 128 for x in tile) * depth
    most = min(4, (CHIPS[chip].max_shared_bytes_per_cta - 2**14) // stage_bytes)  # beside the results' buffers
    return {
        "dtype": dtype, "precision": precision, "batch": draw(some.sampled_from([None, None, 2])),
        "output": draw(some.sampled_from(OUTPUTS[dtype])), "half": draw(some.booleans()),
        "sizes": (draw(some.integers(1, 150)), draw(some.integers(1, 150)), draw(some.integers(0, 200))),
        "config": config(
            tile=(*tile, depth), stages=draw(some.integers(2, most)),
            consumers=consumers, splits=draw(some.sampled_from([1, 1, 1, 0, 2, 3])),
            raster=draw(some.sampled_from(["m", "n"])),
            chip=chip, swap_ab=draw(some.booleans()),
        ),
        "turned": draw(some.tuples(*[some.booleans()] * 3)), "pad": draw(some.sampled_from([0, 0, 16, 3])),
        "seed": draw(some.integers(0, 10_000)),
    }  # fmt: skip


@pytest.mark.slow
@settings(max_examples=15)
@given(products())
def test_any_product(product: dict[str, Any]) -> None:
    rng, (m, n, k) = np.random.default_rng(product["seed"]), product["sizes"]
    name, lead = product["dtype"], () if product["batch"] is None else (product["batch"],)
    turn_a, turn_b, turn_d = product["turned"]
    dtype, pad = np.dtype(OPERANDS[name]), product["pad"]
    a, b = matrix(rng, (*lead, m, k), dtype, turn_a, pad, 0), matrix(rng, (*lead, k, n), dtype, turn_b, pad, 0)
    options: dict[str, Any] = {"precision": product["precision"]}
    options |= {"accumulate": "fp16"} if name == "fp16" and product["half"] else {}
    out = poisoned((*lead, m, n), product["output"], turn_d)
    done = gemmsmith.simulate(a, b, out=out, config=product["config"], seed=product["seed"], **options)
    assert done.hazards == []
    if name == "int8":
        np.testing.assert_array_equal(out, np.matmul(a.astype(np.int64), b.astype(np.int64)))
    else:
        accumulate = FP16 if "accumulate" in options else FP32
        promoted = product["precision"] == "3xtf32"
        bounds.check(out, a, b, accumulate, as_dtype(product["output"]), promoted=promoted).require()


SPLIT = config(tile=(64, 32, 16), consumers=1)


def test_3xtf32_adds_all_three_products() -> None:
    """Of elements whose low parts are powers of two, each product has bits of its own."""
    x, y = np.float32(1 + 2.0**-11), np.float32(1 + 2.0**-13)
    results = gemmsmith.simulate(np.full((70, 40), x), np.full((40, 72), y), precision="3xtf32", config=SPLIT)
    assert (results.result == np.float32(40 * (1 + 2.0**-11 + 2.0**-13))).all()


def test_3xtf32_of_what_is_not_finite(rng: np.random.Generator) -> None:
    """As of wgmma: Inf leaves NaN."""
    a, b = rng.standard_normal((9, 40), np.float32), rng.standard_normal((40, 16), np.float32)
    a[3, 5], b[7, 2], a[5, 1] = np.inf, np.nan, np.finfo(np.float32).max
    wrong = np.isnan(gemmsmith.simulate(a, b, precision="3xtf32", config=SPLIT).result)
    assert wrong[3].all()
    assert wrong[:, 2].all()
    assert wrong.sum() == 9 + 16 - 1


def in_registers(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """3xTF32 as mma_multistage computes A B^T, instruction by instruction."""
    mma, total = select_mma(TF32, TF32, FP32, MMA_SYNC), np.zeros((len(a), len(b)), np.float32)
    high = [truncate_to_tf32(x) for x in (a, b)]
    low = [truncate_to_tf32(x - y) for x, y in zip((a, b), high, strict=True)]
    for first in range(0, a.shape[1], 16):
        sums = np.zeros_like(total)
        for step in range(first, min(first + 16, a.shape[1]), mma.k):
            for x, y in ((low[0], high[1]), (high[0], low[1]), (high[0], high[1])):
                parts = (z[:, step : step + mma.k].astype(np.float64) for z in (x, y))
                sums = fused_mma(*parts, sums.astype(np.float64), mma)
        total += sums
    return total


@pytest.mark.slow
@pytest.mark.parametrize("k", [4096, 65536])
def test_3xtf32_errs_less_than_fp32(k: int, rng: np.random.Generator) -> None:
    """The kernel's sums for the first elements of K, bit for bit; of all of them the model's, against FFMA's."""
    a, b = rng.standard_normal((16, k), np.float32), rng.standard_normal((16, k), np.float32)
    some_of_a, some_of_b = a[:, :120], b[:, :120]
    results = gemmsmith.simulate(some_of_a, some_of_b.T, precision="3xtf32", config=SPLIT).result
    np.testing.assert_array_equal(results, in_registers(some_of_a, some_of_b))
    chain = np.zeros((16, 16), np.float32)
    for x, y in zip(a.T.astype(np.float64), b.T.astype(np.float64), strict=True):
        chain = (np.outer(x, y) + chain).astype(np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    error, of_fp32 = (np.linalg.norm(x - want) for x in (in_registers(a, b), chain))
    assert error < 0.8 * of_fp32


@settings(max_examples=5)
@given(some.sampled_from([((64, 64, 8), 2), ((64, 32, 16), 1), ((128, 64, 8), 2)]), some.integers(1, 100),
       some.integers(1, 60), some.integers(0, 30), some.tuples(*[some.booleans()] * 3), some.sampled_from([0, 3]),
       some.sampled_from([1, 0, 2]), some.integers(0, 10_000))  # fmt: skip
def test_fp32(tile, m: int, n: int, k: int, turned, pad: int, splits: int, seed: int) -> None:
    """On CUDA cores, from any strides."""
    rng, dtype = np.random.default_rng(seed), np.dtype(np.float32)
    a, b = matrix(rng, (m, k), dtype, turned[0], pad, pad), matrix(rng, (k, n), dtype, turned[1], pad, 0, 1 + pad % 2)
    out = poisoned((m, n), "fp32", turned[2])
    selected = Config("sgemm", tile[0], (1, 1), 3, tile[1], splits=splits, chip=("sm_80", "sm_90")[seed % 2])
    assert gemmsmith.simulate(a, b, out=out, config=selected, seed=seed).hazards == []
    bounds.check(out, a, b, FP32, FP32, on_cuda_cores=True).require()


@pytest.mark.parametrize(("depth", "lines"), [(8, 4), (16, 2)])
def test_rows_of_k_in_fp32(depth: int, lines: int, rng: np.random.Generator) -> None:
    """A warp's copy takes as many wavefronts as it touches lines: what it copies of each lies in different banks."""
    a, b = (rng.standard_normal((64, 64), np.float32) for _ in range(2))
    counters = Counters()
    plan = gemmsmith.plan(a, b.T, config=Config("sgemm", (64, 64, depth), (1, 1), 3, 2))
    assert plan.simulate(a, b.T, counters=counters).hazards == []
    (kernel,) = counters.kernels
    copies = [x for x in counters.lines(kernel) if x.access == "cp_async_4 B" and x.sectors]
    assert copies
    for x in copies:
        of_zeros = x.instructions - x.sectors // 4
        assert x.wavefronts == x.sectors // 4 * lines + of_zeros


@pytest.mark.parametrize("name", ["stats", "column"])
def test_fp32_with_an_epilogue(name: str) -> None:
    selected = Config("sgemm", (64, 64, 8), (1, 1), 3, 2, chip="sm_86")
    check(CASES[name], selected, 40, 72, 20, "fp32", None, 3)


def test_fp32_by_default(rng: np.random.Generator) -> None:
    """The design is chosen; the reference multiplies what the kernel does."""
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((20, 9), (9, 30)))
    done, want = gemmsmith.simulate(a, b), gemmsmith.gemm(a, b)
    assert done.hazards == []
    assert done.result.dtype == np.float32
    np.testing.assert_allclose(done.result, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="design: got cooperative for operands of fp32 .*; use the design sgemm, or"):
        gemmsmith.simulate(a, b, config=Config())
    for tile in ((256, 96, 8), (64, 64, 96)):
        refused = rf"tile: got {re.escape(str(tile))} for 256 threads; sgemm needs tile M, N and K that divide"
        with pytest.raises(ConfigError, match=refused):
            gemmsmith.simulate(a, b, config=Config("sgemm", tile, (1, 1), 2, 2))


SGEMM = Config("sgemm", (64, 32, 8), (1, 1), 3, 1, chip="sm_86")


@pytest.mark.slow
@settings(max_examples=20)
@given(
    name=some.sampled_from(list(CASES)), m=some.integers(1, 140), n=some.integers(1, 140), k=some.integers(0, 90),
    batch=some.sampled_from([None, None, 2]), tile=some.sampled_from([((64, 64), 2), ((64, 128), 2), ((128, 48), 1)]),
    splits=some.sampled_from([1, 1, 0, 2]), swap_ab=some.booleans(), chip=some.sampled_from(["sm_86", "sm_90"]),
    dtype=some.sampled_from(["bf16", "fp16", "fp32"]), seed=some.integers(0, 10_000),
)  # fmt: skip
def test_any_epilogue(
    name: str, m: int, n: int, k: int, batch: int | None, tile: Any, splits: int, swap_ab: bool, chip: str, dtype: str,
    seed: int,
) -> None:  # fmt: skip
    """Also of fp32, by sgemm."""
    changes: dict[str, Any] = {"splits": splits, "swap_ab": swap_ab, "chip": chip}
    selected = config(tile=(*tile[0], 32), stages=2, consumers=tile[1], **changes)
    selected = SGEMM.replace(**changes) if dtype == "fp32" else selected
    try:
        check(CASES[name], selected, m, n, k, dtype, batch, seed)
    except ConfigError:  # it does not suit the case, and says so
        reject()


@pytest.mark.slow
@settings(max_examples=10)
@given(graph=graphs(), seed=some.integers(0, 1000), selected=some.sampled_from([config(chip="sm_86"), SGEMM]))
def test_random_graphs(graph: EpilogueGraph, seed: int, selected: Config) -> None:
    check_graph(graph, selected, seed, (130, 88, 40), np.float32 if selected == SGEMM else ml_dtypes.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything", "reductions", "gated_everything", "matrix"])
def test_what_is_chosen_for_an_epilogue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_gemm, "chip_of", lambda a: CHIPS["sm_86"])
    for dtype in ("bf16", "fp32"):
        check(CASES[name], None, 70, 136, 40, dtype, None, 3)


EPILOGUES = [
    (config(), (70, 136, 40)),
    (config(tile=(128, 128, 32), chip="sm_90"), (130, 259, 40)),
    (config(tile=(64, 48, 64), consumers=1, splits=2), (77, 83, 130)),
    (config(tile=(64, 96, 32), swap_ab=True, splits=0), (40, 144, 100)),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_epilogues(name: str) -> None:
    """Each case with one config, so that all cases together have all."""
    index = list(CASES).index(name)
    for selected, (m, n, k) in (EPILOGUES[(index + i) % len(EPILOGUES)] for i in range(len(EPILOGUES))):
        try:
            check(CASES[name], selected, m, n, k, "bf16", None, index)
        except ConfigError:  # it does not suit the case, and says so
            continue
        return
    pytest.fail("no config suits it")


@pytest.mark.parametrize("columns", [48, 80, 96, 112])
def test_a_padded_tile_reads_nothing_behind_b(columns: int) -> None:
    """A row-major b's tile is padded to whole lines, which the last tile must not read."""
    rng = np.random.default_rng(columns)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((128, 64), (64, 2 * columns)))
    padded = config(tile=(128, columns, 32), consumers=1, stages=4)
    done = gemmsmith.simulate(a, b, config=padded)
    assert done.hazards == []
    bounds.check(done.result, a, b, FP32, BF16).require()
