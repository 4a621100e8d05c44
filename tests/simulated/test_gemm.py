"""The product in the simulator against float64: any shape, layout, dtype, tile, cluster, stages and schedule."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as some

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError
from gemmsmith.backends.reference import bounds
from gemmsmith.core.dtypes import FP16, FP32, as_dtype
from gemmsmith.tuning.tuned_table import builtin_rows

OPERANDS = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}


@some.composite
def configs(draw: some.DrawFn) -> Config:
    design = draw(some.sampled_from(["cooperative", "tma", "pingpong"]))
    consumers = draw(some.sampled_from([1, 1, 2, 3] if design != "pingpong" else [2, 3]))
    tile_m = 64 * consumers * draw(some.sampled_from([1, 1, 2])) if consumers < 3 else 192
    if design == "pingpong":
        tile_m = draw(some.sampled_from([64, 128]))
    tile_n = 8 * draw(some.integers(1, 32))
    shares = (1, 1)
    if design != "pingpong":
        shares = draw(some.sampled_from([(1, 1), (1, 1), (0, 1), (2, 1), (3, 1), (1, 2), (1, 4)]))
    return Config(
        design,
        (tile_m, tile_n, draw(some.sampled_from([16, 32, 64, 128, 256]))),
        draw(some.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4)])),
        draw(some.integers(2, 4)),
        consumers,
        draw(some.sampled_from(["m", "n"])),
        draw(some.integers(1, 3)),
        *shares,
        draw(some.booleans()),
        tuple(draw(some.sampled_from(["first", "normal", "last"])) for _ in "ab"),
        draw(some.booleans()),
        draw(some.booleans()) and design == "cooperative",
        draw(some.booleans()),
        draw(some.booleans()) and design == "cooperative" and shares == (1, 1),
    )  # type: ignore[arg-type]


def matrix(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, column_major: bool, pad: int, offset: int
):
    """Random normal data with rows `pad` longer than needed, from `offset` elements into its memory."""
    *batch, rows, columns = shape
    outer, inner = (columns, rows) if column_major else (rows, columns)
    store = rng.standard_normal(int(np.prod(batch)) * outer * (inner + pad) + offset, np.float32).astype(dtype)
    x = store[offset:].reshape(*batch, outer, inner + pad)[..., :inner]
    return x.swapaxes(-1, -2) if column_major else x


@pytest.mark.slow
@settings(max_examples=30)
@given(
    config=configs(), m=some.integers(1, 300), n=some.integers(1, 300), k=some.integers(0, 300),
    batch=some.sampled_from([None, None, None, 1, 2]), shared=some.booleans(),
    dtype=some.sampled_from(["bf16", "fp16"]),
    output=some.sampled_from(["bf16", "fp16", "fp32"]), half=some.booleans(),
    turned=some.tuples(*[some.booleans()] * 3),
    pad=some.sampled_from([0, 0, 8, 3]), offset=some.sampled_from([0, 0, 8, 1]), seed=some.integers(0, 10_000),
)  # fmt: skip
def test_any_product(config, m, n, k, batch, shared, dtype, output, half, turned, pad, offset, seed) -> None:
    rng = np.random.default_rng(seed)
    a = matrix(rng, (m, k) if batch is None else (batch, m, k), OPERANDS[dtype], turned[0], pad, offset)
    b = matrix(rng, (k, n) if batch is None or shared else (batch, k, n), OPERANDS[dtype], turned[1], pad, 0)
    accumulate = "fp16" if half and dtype == "fp16" else "fp32"
    lead = () if batch is None else (batch,)
    out = np.full((*lead, n, m) if turned[2] else (*lead, m, n), np.nan, as_dtype(output).numpy)
    out = out.swapaxes(-1, -2) if turned[2] else out
    try:
        done = gemmsmith.simulate(a, b, out=out, accumulate=accumulate, config=config, seed=seed)
    except ConfigError:
        reject()  # it does not fit, and says so; another is drawn in its place
    assert done.hazards == []
    assert done.result is out
    bounds.check(out, a, b, as_dtype(accumulate), as_dtype(output)).require()


@pytest.mark.parametrize("accumulate", [FP32, FP16])
def test_normal_data_is_within_the_tighter_bound(rng: np.random.Generator, accumulate) -> None:
    a, b = (rng.standard_normal((192, 192), np.float32).astype(np.float16) for _ in range(2))
    done = gemmsmith.simulate(a, b, accumulate=accumulate, config=Config(tile=(128, 64, 64), stages=3))
    bounds.check(done.result, a, b, accumulate, FP16, zero_mean=True).require()


def test_one_element(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((1, 1), np.float32).astype(np.float16) for _ in range(2))
    done = gemmsmith.simulate(a, b)
    assert done.result[0, 0] == np.float16(np.float64(a[0, 0]) * np.float64(b[0, 0]))


def test_nan_and_inf_propagate(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((70, 70), np.float32).astype(np.float16) for _ in range(2))
    a[3, 5], a[60, 1], b[9, 9] = np.nan, np.inf, -np.inf
    out = gemmsmith.gemm(a, b, backend="sim", config=Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1))
    bounds.check(out, a, b, FP32, FP16).require()


@pytest.mark.slow
@pytest.mark.parametrize("design", ["cooperative", "tma"])
@pytest.mark.parametrize("splits", [2, 3, 4])
def test_shared_tiles_of_a_cluster(rng: np.random.Generator, design, splits: int) -> None:
    a, b = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((130, 300), (300, 200)))
    config = Config(design, (64, 64, 32), (1, 1), 3, 1, cluster_splits=splits)
    results = []
    for seed in range(2):
        done = gemmsmith.simulate(a, b, out_dtype="fp32", config=config, seed=seed)
        assert done.hazards == []
        bounds.check(done.result, a, b, FP32, FP32).require()
        results.append(done.result)
    assert all((x == results[0]).all() for x in results)


@pytest.mark.slow
@pytest.mark.parametrize("design", ["cooperative", "tma"])
@pytest.mark.parametrize(
    ("m", "n", "k", "splits"),
    [(64, 64, 512, 4), (64, 64, 300, 3), (130, 130, 200, 0), (64, 320, 200, 0), (320, 192, 100, 0), (64, 64, 64, 0)],
)
def test_shared_tiles(rng: np.random.Generator, design, m: int, n: int, k: int, splits: int) -> None:
    """Tiles of one to four clusters, before and beside whole ones; the same bits in every order of events."""
    a, b = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((m, k), (k, n)))
    config = Config(design, (64, 64, 32), (1, 1), 3, 1, splits=splits)
    plan = gemmsmith.plan(a, b, out_dtype="fp32", config=config)
    assert "partials" in plan.source
    results = []
    for seed in range(2):
        done = plan.simulate(a, b, seed=seed)
        assert done.hazards == []
        bounds.check(done.result, a, b, FP32, FP32).require()
        results.append(done.result)
    assert all((x == results[0]).all() for x in results)


@pytest.mark.parametrize("turn", range(4))
def test_tuned_configs(rng: np.random.Generator, turn: int) -> None:
    """Of the table's some, by chance, with ragged sizes."""
    rows = [row for row in builtin_rows() if row["operands"] == "16 bits"]
    config = Config.parse(rng.choice(rows)["config"])  # type: ignore[arg-type]
    m, n, k = (int(rng.integers(least, 300)) for least in (1, 1, 2))  # K of 1 is MN-major: other stages fit
    a, b = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((m, k), (n, k)))
    out = np.full((m, n), np.nan, np.float16)
    done = gemmsmith.simulate(a, b.T, out=out, config=config)
    assert done.hazards == []
    bounds.check(out, a, b.T, FP32, FP16).require()


def test_one_kernel_serves_all_sizes(rng: np.random.Generator) -> None:
    config = Config(tile=(64, 64, 32), cluster=(1, 1), consumers=1, stages=3)
    kernels = set()
    for m, n, k in ((64, 64, 32), (1000, 8, 16), (200, 136, 264)):
        a, b = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((m, k), (k, n)))
        plan = gemmsmith.plan(a, b, config=config)
        kernels.add(plan._planned.kernel)
        assert plan.simulate(a, b).hazards == []
    assert len(kernels) == 1


def test_a_record_of_no_kernel(tmp_path) -> None:
    a, b = np.zeros((0, 64), np.float16), np.zeros((64, 64), np.float16)
    done = gemmsmith.simulate(a, b, record=True)
    with pytest.raises(ArgumentError, match="to_html: no kernel was recorded; .* and no empty GEMM"):
        done.to_html(tmp_path / "a.html")
    with pytest.raises(ArgumentError, match="timeline: no kernel was recorded"):
        _ = done.timeline


def test_the_timeline_shows_loads_under_the_math(rng: np.random.Generator, tmp_path) -> None:
    a, b = (rng.standard_normal((256, 512), np.float32).astype(np.float16) for _ in range(2))
    done = gemmsmith.simulate(a, b.T, config=Config(tile=(128, 128, 64), cluster=(1, 1)), record=True)
    spans = [s for s in done.timeline.spans if s.cta == 0]
    math = [(s.start, s.end) for s in spans if s.kind == "mma"]
    loads = [(s.start, s.end) for s in spans if s.kind == "load"]
    under = sum(any(a < end and start < b for a, b in math) for start, end in loads)
    assert len(loads) >= 16  # A and B of eight k-tiles
    assert under >= len(loads) // 2
    assert done.timeline.cycles <= done.cycles + 2000
    for name in ("t.png", "t.svg"):
        done.timeline.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    done.timeline.write_trace(tmp_path / "t.json")
    assert '"traceEvents"' in (tmp_path / "t.json").read_text()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("m", "n", "pad"), [(40, 61, 3), (1, 65, 7), (33, 60, 4), (24, 64, 8), (1, 64, 8)])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_nothing_is_written_beside_the_result(
    m: int, n: int, pad: int, turned: bool, out_dtype: str, rng: np.random.Generator
) -> None:
    """What lies behind a row of a wider array belongs to others. TMA writes whole chunks of 16 bytes."""
    a, b = (matrix(rng, shape, OPERANDS["bf16"], column, 0, 0) for shape, column in (((m, 96), False), ((96, n), True)))
    whole = np.full((n + 1, -(-m // 8) * 8) if turned else (m + 1, n + pad), 7, as_dtype(out_dtype).numpy)
    out = (whole.T if turned else whole)[:m, :n]
    out[...] = np.nan
    assert gemmsmith.simulate(a, b, out=out).hazards == []
    bounds.check(out, a, b, FP32, as_dtype(out_dtype)).require()
    out[...] = 7
    assert (whole == 7).all()
