"""Promoted sums of fp8 products and block scales in the simulator: which scale is applied where, and how exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as some
from tests.scales import E4M3, E5M2, FP32, RECIPES, UE8M0, digits, ones, operands, scales, shapes, within

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError
from gemmsmith.backends.reference import bounds
from gemmsmith.core.dtypes import BF16
from gemmsmith.core.dtypes import FP32 as SINGLE

TILE = Config(tile=(64, 64, 128), cluster=(1, 1), consumers=1, stages=3)
CONFIGS = [
    TILE,
    TILE.replace(tile=(128, 128, 128), consumers=2),
    TILE.replace(tile=(256, 96, 128), consumers=2, stages=2, serpentine=True),
    TILE.replace(tile=(192, 160, 128), consumers=3, stages=2),
    TILE.replace(tile=(128, 256, 128), consumers=2, stages=2, cluster=(1, 2)),
    TILE.replace(tile=(64, 208, 128), cluster=(2, 1)),
    TILE.replace(tile=(64, 24, 128), stages=8, swap_ab=True),
    TILE.replace(tile=(128, 40, 128), stages=5, consumers=2, splits=3),
    TILE.replace(tile=(64, 104, 128), stages=4, splits=0, serpentine=True),
    TILE.replace(tile=(64, 64, 128), stages=8, cluster_splits=2, swap_ab=True),
    TILE.replace(tile=(128, 72, 128), cluster_splits=3, alias_epilogue=True),
    TILE.replace(tile=(128, 64, 128), consumers=2, sync_clusters=True),
    TILE.replace(design="pingpong", tile=(64, 128, 128), cluster=(2, 1), consumers=2, stages=5),
    TILE.replace(design="pingpong", tile=(128, 96, 128), cluster=(1, 2), consumers=2, stages=2, serpentine=True),
    TILE.replace(design="pingpong", tile=(64, 64, 128), consumers=2, stages=8, swap_ab=True),
]


def simulated(a, b, scale_a, scale_b, **options):
    """The product, whose result is poisoned first; without hazards."""
    out = np.full((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), np.nan, np.float32)
    done = gemmsmith.simulate(a, b, scale_a=scale_a, scale_b=scale_b, out=out, **options)
    assert done.hazards == []
    return out


@pytest.mark.slow
@pytest.mark.parametrize("recipes", [RECIPES[:2], RECIPES[2:4], RECIPES[4:]], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_scale_is_applied_where_it_belongs(config: Config, recipes, rng: np.random.Generator) -> None:
    """Ones, scaled by powers of two: each sum is exact, and another scale in it would show. One recipe of each two."""
    recipe = recipes[int(rng.integers(2))]
    if recipe[1] == 1 and config.tile[1] > 128:  # there are no registers for so many columns' scales
        config = config.replace(tile=(config.tile[0], 96, 128))
    m, n, k = (int(rng.integers(1, most)) for most in (300, 400, 128 * 8))
    layout = {"turned": bool(rng.integers(2)), "pad": int(rng.choice([1, 3, 16]))}
    (scale_a, scale_b), want = digits(m, n, k, recipe, **layout)
    out = simulated(*ones(m, n, k), scale_a, scale_b, config=config, seed=int(rng.integers(1000)))
    np.testing.assert_array_equal(out, want)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    config=some.sampled_from(CONFIGS), m=some.integers(1, 300), n=some.integers(1, 300), k=some.integers(0, 600),
    recipe=some.sampled_from([*RECIPES, (0, 0)]), dtypes=some.tuples(*[some.sampled_from([E4M3, E5M2])] * 2),
    outliers=some.booleans(), dtype=some.sampled_from([FP32, UE8M0]), spread=some.sampled_from([2, 20]),
    turned=some.booleans(), pad=some.sampled_from([1, 2, 3, 4, 16]), seed=some.integers(0, 10_000),
)  # fmt: skip
def test_each_element_is_within_its_bound(
    config, m, n, k, recipe, dtypes, outliers, dtype, spread, turned, pad, seed
) -> None:
    rng = np.random.default_rng(seed)
    a, b = operands(rng, m, n, k, dtypes, outliers)
    scale_a, scale_b = scales(rng, m, n, k, recipe, spread=spread, dtype=dtype, turned=turned, pad=pad)
    try:
        out = simulated(a, b, scale_a, scale_b, config=config, seed=seed)
    except ConfigError:
        reject()
    bounds.check(out, a, b, SINGLE, SINGLE, promoted=True, scale_a=scale_a, scale_b=scale_b).require()


VIEWS = ["contiguous", "transposed", "padded", "offset", "strided", "broadcast along K", "one for all"]


def viewed(x: np.ndarray, view: str) -> np.ndarray:
    """The same numbers, or for the last two views the first ones, in such a view of memory that is NaN elsewhere."""
    *batch, rows, columns = x.shape
    if view == "transposed":
        return viewed(x.swapaxes(-1, -2), "padded").swapaxes(-1, -2)
    if view in ("broadcast along K", "one for all"):
        return np.broadcast_to(x[..., :1] if view == "broadcast along K" else x[..., :1, :1], x.shape)
    pitch, first, step = {
        "contiguous": (columns, 0, 1), "padded": (-(-columns // 4) * 4, 4, 1), "offset": (columns + 3, 1, 1),
        "strided": (2 * columns, 1, 2),
    }[view]  # fmt: skip
    store = np.full((*batch, rows * pitch + 8), np.nan, x.dtype)
    stop = first + rows * pitch
    inner = store[..., first:stop].reshape(*batch, rows, pitch)[..., : step * columns : step]
    inner[...] = x
    assert np.shares_memory(inner, store)
    return inner


def halved_and_summed(acc):
    return acc * 0.5, acc.sum(-1)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    config=some.sampled_from(CONFIGS), m=some.integers(1, 200), n=some.integers(1, 200), k=some.integers(1, 900),
    recipe=some.sampled_from(RECIPES), batch=some.sampled_from([None, None, 2, 3]),
    own=some.tuples(*[some.booleans()] * 3), views=some.tuples(*[some.sampled_from(VIEWS)] * 2),
    dtypes=some.tuples(*[some.sampled_from([E4M3, E5M2])] * 2), fused=some.booleans(),
    scale_dtypes=some.tuples(*[some.sampled_from([FP32, FP32, UE8M0])] * 2),
    seed=some.integers(0, 10_000),
)  # fmt: skip
def test_scales_of_any_layout(
    config, m, n, k, recipe, batch, own, views, dtypes, scale_dtypes, fused, seed
) -> None:  # fmt: skip
    """Of each product of a batch, or shared; `own`: whether b, the scales of a and those of b are each product's."""
    rng = np.random.default_rng(seed)
    b_scale, *of_scales = ((batch,) if batch and x else () for x in own)
    a = rng.standard_normal((*((batch,) if batch else ()), m, k), np.float32).astype(dtypes[0])
    b = rng.standard_normal((*b_scale, n, k), np.float32).astype(dtypes[1]).swapaxes(-1, -2)
    given: list[np.ndarray | None] = []
    for shape, front, view, dtype in zip(shapes(m, n, k, recipe), of_scales, views, scale_dtypes, strict=True):
        x = 2.0 ** rng.uniform(-3, 3, (*front, *shape)) if shape else None
        given.append(None if x is None else viewed(x.astype(dtype), view))
    scales = dict(zip(("scale_a", "scale_b"), given, strict=True))
    epilogue = halved_and_summed if fused else None
    try:
        done = gemmsmith.simulate(a, b, **scales, epilogue=epilogue, out_dtype="fp32", config=config, seed=seed)
    except ConfigError:
        reject()
    assert done.hazards == []
    out, sums = done.result if fused else (done.result, None)
    out = 2 * out if fused else out
    bounds.check(out, a, b, SINGLE, SINGLE, promoted=True, **scales).require()
    if fused:
        np.testing.assert_allclose(
            sums, out.sum(-1, dtype=np.float64), rtol=1e-4, atol=1e-5 * np.abs(out).sum(-1).max()
        )


@pytest.mark.slow
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("spread", [0, 20])
def test_deep_products(outliers: bool, spread: int, rng: np.random.Generator) -> None:
    m, n, k = 5, 7, 65536
    a, b = operands(rng, m, n, k, outliers=outliers)
    scale_a, scale_b = scales(rng, m, n, k, (1, 128), spread=spread)
    config = CONFIGS[6].replace(tile=(64, 8, 128))
    out = simulated(a, b, scale_a, scale_b, config=config)
    bounds.check(out, a, b, SINGLE, SINGLE, promoted=True, scale_a=scale_a, scale_b=scale_b).require()


@pytest.mark.parametrize("k", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("n", range(1, 8))
def test_the_smallest(n: int, k: int, rng: np.random.Generator) -> None:
    for i, recipe in enumerate(RECIPES):
        config = TILE.replace(tile=(64, 8, 128), swap_ab=(n + k + i) % 2 == 0)
        (scale_a, scale_b), want = digits(3, n, k, recipe)
        np.testing.assert_array_equal(simulated(*ones(3, n, k), scale_a, scale_b, config=config), want)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), "rows"])
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_scales_of_tensors_rows_and_columns(shape, accumulate: str, rng: np.random.Generator) -> None:
    m, n, k = 70, 50, 300
    a, b = operands(rng, m, n, k)
    a_scale, b_scale = ((m, 1), (1, n)) if shape == "rows" else (shape, shape)
    scale_a, scale_b = (np.asarray(rng.uniform(0.5, 2, x), np.float32) for x in (a_scale, b_scale))
    out = simulated(a, b, scale_a, scale_b, accumulate=accumulate, config=TILE)
    want = (a.astype(np.float64) @ b.astype(np.float64)) * scale_a * scale_b
    np.testing.assert_allclose(out, want, rtol=1e-2, atol=1e-2 * np.abs(want).mean())
    promoted = accumulate == "promoted"
    bounds.check(out, a, b, SINGLE, SINGLE, promoted=promoted, scale_a=scale_a, scale_b=scale_b).require()


@pytest.mark.parametrize("dtype", [FP32, UE8M0])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 144), (70, 1), (3, 5)])
def test_scales_of_one_row_or_column(m: int, n: int, dtype, rng: np.random.Generator) -> None:
    """(m, 1) has the product's shape where n is 1, and is a column all the same; one plan serves every m."""
    scale_a, scale_b = (within((2.0 ** rng.integers(-4, 5, x)).astype(dtype)) for x in ((m, 1), (1, n)))
    plan = None
    for rows in (m, 1, 70):
        scale_a = np.resize(scale_a, (rows, 1))
        options = {"scale_a": scale_a, "scale_b": scale_b}
        plan = plan or gemmsmith.plan(*ones(rows, n, 300), **options, out_dtype="fp32", config=TILE)
        done = plan.simulate(*ones(rows, n, 300), **options)
        assert done.hazards == []
        np.testing.assert_array_equal(done.result, 300 * scale_a.astype(np.float64) * scale_b.astype(np.float64))


def test_one_side_in_blocks_the_other_as_a_whole(rng: np.random.Generator) -> None:
    a, b = operands(rng, 70, 50, 300)
    scale_a, _ = scales(rng, 70, 50, 300, (1, 0))
    out = simulated(a, b, scale_a, 0.5, config=TILE)
    bounds.check(out, a, b, SINGLE, SINGLE, promoted=True, scale_a=scale_a, scale_b=np.float32(0.5)).require()


@pytest.mark.parametrize("own", [True, False])
def test_batches(own: bool, rng: np.random.Generator) -> None:
    """Scales of each product of the batch, or the same for all."""
    a = within(rng.standard_normal((3, 70, 200), np.float32).astype(E4M3))
    b = within(rng.standard_normal((50, 200), np.float32).astype(E4M3)).T
    scale_a = rng.uniform(0.5, 2, (3, 70, 2) if own else (70, 2)).astype(np.float32)
    scale_b = rng.uniform(0.5, 2, (3, 2, 1) if own else (2, 1)).astype(np.float32)
    out = simulated(a, b, scale_a, scale_b, config=TILE)
    bounds.check(out, a, b, SINGLE, SINGLE, promoted=True, scale_a=scale_a, scale_b=scale_b).require()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [(1, 128), (128, 128), (1, 1)])
@pytest.mark.parametrize(
    ("layout", "own", "shared"),
    [("M", True, True), ("K", True, True), ("padded", True, True), ("K", False, True), ("K", True, False)],
)
def test_a_batch_whose_scales_continue_is_folded(
    layout: str, own: bool, shared: bool, recipe, rng: np.random.Generator
) -> None:
    """Into M, where b and its scales are the same for all; scales of 128 rows only if none is cut."""
    m = int(rng.choice([70, 128]))
    batch, n, k = 3, 50, 500
    a = within(rng.standard_normal((batch * m, k), np.float32).astype(E4M3)).reshape(batch, m, -1, copy=True)
    b = within(rng.standard_normal((n, k), np.float32).astype(E4M3)).T
    rows, blocks = -(-m // recipe[0]), -(-k // 128)
    scale_a = np.full((blocks, batch, rows) if layout == "M" else (batch, rows, blocks + 3), np.nan, np.float32)
    scale_a = {"M": scale_a.transpose(1, 2, 0), "K": scale_a[..., :blocks], "padded": scale_a[..., :blocks]}[layout]
    if layout == "padded":
        scale_a = np.full((batch, rows + 1, blocks), np.nan, np.float32)[:, :rows]
    scale_a[...] = rng.uniform(0.5, 2, scale_a.shape)
    scale_b = rng.uniform(0.5, 2, (blocks, -(-n // recipe[1]))).astype(np.float32)
    scale_a, scale_b = scale_a if own else scale_a[0], scale_b if shared else np.stack([scale_b] * batch)
    folds = own and shared and (layout != "padded" or rows == 1) and m % recipe[0] == 0
    plan = gemmsmith.plan(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype="fp32", config=TILE)
    assert plan.problem.batch == (1 if folds else batch)
    out = simulated(a, b, scale_a, scale_b, config=TILE)
    bounds.check(out, a, b, SINGLE, SINGLE, promoted=True, scale_a=scale_a, scale_b=scale_b).require()


def test_scales_that_are_zero_infinite_or_nan(rng: np.random.Generator) -> None:
    """As IEEE has it of a block's sum times its scale; what they do not scale stays."""
    a, b = ones(70, 50, 300)
    (scale_a, scale_b), want = digits(70, 50, 300, (1, 128))
    assert scale_a is not None
    first = 128 * scale_a[3, 0] * scale_b[0, 0]
    scale_a[3, 0], scale_a[5, 1], scale_a[69, 2] = 0, np.inf, np.nan
    out = simulated(a, b, scale_a, scale_b, config=TILE)
    want[3], want[5], want[69] = want[3] - first, np.inf, np.nan
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("recipe", [(1, 1), (128, 128)])
@pytest.mark.parametrize("swap_ab", [False, True])
def test_scales_of_b_that_are_zero_infinite_or_nan(recipe, swap_ab: bool) -> None:
    (scale_a, scale_b), want = digits(70, 300, 300, recipe)
    assert scale_a is not None
    assert scale_b is not None
    wide = recipe[1]
    for column, block, x in ((0, 0, 0), (1, 1, np.inf), (2, 2, np.nan)):
        scale_b[block, column] = x
        own = slice(column * wide, (column + 1) * wide)
        if x == 0:
            zeroed = np.array(scale_b)
            zeroed[:, column] = [0, *scale_b[1:, column]]
            widths = np.minimum(128, 300 - 128 * np.arange(3))
            rows = np.repeat(scale_a, recipe[0], 0)[:70].astype(np.float64)
            want[:, own] = ((rows * widths) @ zeroed[:, column].astype(np.float64))[:, None]
        else:
            want[:, own] = x
    config = TILE.replace(tile=(64, 104, 128), swap_ab=swap_ab)
    np.testing.assert_array_equal(simulated(*ones(70, 300, 300), scale_a, scale_b, config=config), want)


def test_scales_of_rows_that_are_zero_infinite_or_nan() -> None:
    scale_a = np.full((70, 1), 2, np.float32)
    scale_a[[3, 5, 69], 0] = 0, np.inf, np.nan
    out = simulated(*ones(70, 50, 300), scale_a, None, config=TILE)
    np.testing.assert_array_equal(out, np.broadcast_to(300 * scale_a, (70, 50)))


def test_bytes_are_powers_of_two(rng: np.random.Generator) -> None:
    """The smallest, the largest and NaN."""
    a, b = ones(64, 16, 128)
    exponents = np.full((64, 1), 127, np.uint8)
    exponents[:4, 0] = 0, 1, 246, 255
    out = simulated(a, b, exponents, None, config=TILE)
    np.testing.assert_array_equal(out[:4, 0], np.float32([2.0**-120, 2.0**-119, 2.0**126, np.nan]))
    np.testing.assert_array_equal(out[4:], 128)


def relu_and_bias(acc, bias):
    return (acc + bias).relu()


@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[6], CONFIGS[7]], ids=str)
def test_an_epilogue_gets_the_scaled_product(config: Config, rng: np.random.Generator) -> None:
    m, n, k = 100, 120, 500
    a, b = operands(rng, m, n, k)
    bias = rng.standard_normal(n).astype(np.float32)
    for recipe in ((1, 128), (1, 0)):
        scale_a, scale_b = scales(rng, m, n, k, recipe)
        scale_b = np.float32(0.25) if scale_b is None else scale_b
        out, want = (np.full((m, n), np.nan, BF16.numpy) for _ in range(2))
        options = {"scale_a": scale_a, "scale_b": scale_b, "epilogue": relu_and_bias, "bias": bias}
        assert gemmsmith.simulate(a, b, out=out, config=config, **options).hazards == []
        gemmsmith.gemm(a, b, out=want, backend="reference", **options)
        size = np.abs(want.astype(np.float64)).max()
        np.testing.assert_allclose(out.astype(np.float64), want.astype(np.float64), rtol=0.01, atol=0.01 * size)


def add(acc, c):
    return acc + c


@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[6], CONFIGS[10]], ids=str)
def test_a_matrix_is_added_in_place(config: Config) -> None:
    (scale_a, scale_b), want = digits(100, 120, 500, (1, 128))
    c = np.arange(100 * 120, dtype=np.float32).reshape(100, 120) % 8
    want += c
    options = {"scale_a": scale_a, "scale_b": scale_b, "epilogue": add, "operands": {"c": c}, "out_dtype": "fp32"}
    assert gemmsmith.simulate(*ones(100, 120, 500), out=c, config=config, **options).hazards == []
    np.testing.assert_array_equal(c, want)


def row_sums(acc):
    return acc, acc.sum(-1)


def test_reductions_of_scaled_products(rng: np.random.Generator) -> None:
    a, b = ones(100, 120, 300)
    (scale_a, scale_b), want = digits(100, 120, 300, (1, 128))
    done = gemmsmith.simulate(a, b, scale_a=scale_a, scale_b=scale_b, epilogue=row_sums, out_dtype="fp32", config=TILE)
    assert done.hazards == []
    np.testing.assert_array_equal(done.result[0], want)
    np.testing.assert_allclose(done.result[1], want.sum(-1), rtol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "dtype"), [(((150, 3), (3, 1)), FP32), (((150, 1), (1, 72)), UE8M0), (((150, 3), (1, 72)), UE8M0)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("epilogue", [None, row_sums])
def test_batch_invariant_rows_have_the_same_bits(epilogue, shapes, dtype, rng: np.random.Generator) -> None:
    a, b = operands(rng, 150, 72, 300)
    scale_a, scale_b = ((2.0 ** rng.uniform(-4, 4, shape)).astype(dtype) for shape in shapes)
    options = {"epilogue": epilogue, "scale_b": scale_b, "batch_invariant": True, "backend": "sim", "out_dtype": "fp32"}
    whole, *parts = (gemmsmith.gemm(a[:m], b, scale_a=scale_a[:m], **options) for m in (150, 9, 1))
    for part in parts:
        for x, y in zip(*(x if epilogue else [x] for x in (whole, part)), strict=True):
            assert x[: len(y)].tobytes() == y.tobytes()


def halved_in_fp8(acc):
    return gemmsmith.quantize(acc * 0.5, "1x128")


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("backend", ["sim", "reference"])
def test_a_chain_of_products_copies_nothing(backend: str, batch: tuple[int, ...], rng: np.random.Generator) -> None:
    """The scales that an epilogue makes lie as TMA reads them, of any number of rows; those of `out` as they are."""
    options = {"backend": backend, "config": CONFIGS[1] if backend == "sim" else None}
    weights = (rng.standard_normal(shape, np.float32) for shape in ((256, 200), (72, 256)))
    first, second = (gemmsmith.quantize(w, "128x128") for w in weights)
    plan = None
    for m in (70, 1, 5, 128):
        x, scale_x = gemmsmith.quantize(rng.standard_normal((*batch, m, 200), np.float32))
        given = {"scale_a": scale_x, "scale_b": first[1].T, "epilogue": halved_in_fp8, **options}
        q, s = gemmsmith.gemm(x, first[0].T, **given)
        assert [stride // 4 for stride in s.strides[-2:]] == [1, -(-m // 4) * 4]
        out = np.full_like(q, np.nan), np.full(s.shape, np.nan, np.float32)
        gemmsmith.gemm(x, first[0].T, out=out, **given)
        for results, want in zip(out, (q, s), strict=True):
            np.testing.assert_array_equal(results.astype(np.float32), want.astype(np.float32))
        scales = {"scale_a": s, "scale_b": second[1].T}
        plan = plan or gemmsmith.plan(q, second[0].T, **scales, out_dtype="fp32", **options)
        assert len(plan._planned.launches.all) == 1
        assert plan._planned.spec.scales[plan.config.swap_ab].by_tma
        y = plan.run(q, second[0].T, **scales)
        bounds.check(y, q, second[0].T, SINGLE, SINGLE, promoted=True, **scales).require()


def test_one_plan_serves_all_sizes(rng: np.random.Generator) -> None:
    a, b = ones(70, 50, 300)
    (scale_a, scale_b), _ = digits(70, 50, 300, (1, 128))
    plan = gemmsmith.plan(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype="fp32", config=TILE)
    for m, n, k in ((1, 130, 1000), (200, 70, 128)):
        (scale_a, scale_b), want = digits(m, n, k, (1, 128))
        done = plan.simulate(*ones(m, n, k), scale_a=scale_a, scale_b=scale_b)
        assert done.hazards == []
        np.testing.assert_array_equal(done.result, want)


def test_promotion_keeps_what_the_tensor_core_loses(rng: np.random.Generator) -> None:
    """A large k-block, then small ones, which 13 bits below the largest would not show."""
    a, b = ones(64, 64, 128 * 20)
    a[:, :128] = 256
    b[:128] = 256
    out = simulated(a, b, None, None, config=TILE)
    np.testing.assert_array_equal(out, 128 * 2.0**16 + 128 * 19)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scale_a": np.ones((70, 4), np.float32)},
            r"scale_a: got shape \(70, 4\); for a of shape \(70, 300\) use one",
        ),
        ({"scale_a": np.ones(70, np.float32)}, r"scale_a: got shape \(70,\)"),
        ({"scale_b": np.ones((50, 3), np.float32)}, r"scale_b: got shape \(50, 3\); .* \(3, 50\), \(3, 1\)"),
        ({"scale_b": np.ones((2, 3, 50), np.float32)}, "scale_b: got shape"),
        ({"scale_a": np.ones((70, 3), np.float16)}, "scale_a: got dtype fp16; use fp32, or ue8m0"),
        ({"scale_a": "x"}, "scale_a: got builtins.str"),
        (
            {"scale_a": np.ones((70, 3), np.float32), "accumulate": "fast"},
            "scale_a: got block scales, .* they need fp8",
        ),
        ({"accumulate": "fp32"}, "accumulate: got 'fp32' for operands of fp8_e4m3; use promoted or fast"),
        ({"config": TILE.replace(tile=(64, 64, 64))}, 'tile K: got 64 with accumulate="promoted"; use 128'),
        (
            {"config": TILE.replace(design="tma")},
            'accumulate: got "promoted" with tma; use the design cooperative or pingpong, or',
        ),
        ({"config": TILE.replace(tile=(128, 256, 128))}, "registers: the accumulators of 128x256 need 320 per thread"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    a, b = ones(70, 50, 300)
    with pytest.raises((ArgumentError, ConfigError), match=message):
        gemmsmith.plan(a, b, **options)


@pytest.mark.parametrize(
    ("dtype", "precision"), [(BF16.numpy, None), (np.int8, None), (np.float32, "tf32"), (np.float32, "3xtf32")]
)
def test_other_operands_have_no_block_scales(dtype, precision: str | None) -> None:
    """Not those either whose sums are promoted, every 32 of k."""
    a = np.ones((64, 256), dtype)
    with pytest.raises(ArgumentError, match="scale_a: got block scales, .* they need fp8 operands"):
        gemmsmith.plan(a, a.T, scale_a=np.ones((64, 2), np.float32), precision=precision)
    out = gemmsmith.gemm(a, a.T, scale_a=2.0, scale_b=np.full((1, 64), 0.5, np.float32), precision=precision)
    np.testing.assert_array_equal(out.astype(np.float32), 256)


NUMBER, WHOLE, ROWS = 2.0, np.ones((), np.float32), np.ones((70, 1), np.float32)
FINE, COARSE = np.ones((70, 3), np.float32), np.ones((1, 3), np.float32)


@pytest.mark.parametrize("planned", [None, NUMBER, WHOLE, ROWS, FINE, COARSE], ids=lambda x: str(np.shape(x)))
def test_a_plan_takes_the_scales_it_is_for(planned) -> None:
    """Others, or none, are refused: its kernel would not apply them."""
    a, b = ones(70, 50, 300)
    plan = gemmsmith.plan(a, b, scale_a=planned, config=TILE, backend="sim")
    for x in (None, NUMBER, WHOLE, ROWS, FINE, COARSE):
        if x is planned:
            np.testing.assert_array_equal(plan.run(a, b, scale_a=x), 300 * (x if x is NUMBER else 1))
        else:
            for call in (plan.run, plan.prepare, plan.simulate):
                with pytest.raises(ArgumentError, match="scale_a: got .*, this plan has .*; make a plan from arrays"):
                    call(a, b, scale_a=x)


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("side", ["scale_a", "scale_b"])
def test_scales_in_another_layout_than_planned_are_refused(side: str, swap_ab: bool) -> None:
    """Of 76 rows or columns, contiguous along them and 16-byte aligned, or at an address that is not, or of bytes."""
    a, b = ones(76, 76, 300)
    memory = np.ones(3 * 76 + 4, np.float32)
    shift = memory.ctypes.data % 16 // 4
    aligned, shifted = (memory[i : i + 3 * 76].reshape(3, 76) for i in (-shift % 4, -shift % 4 + 1))
    bytes_of = aligned.astype(UE8M0)
    turn = np.transpose if side == "scale_a" else np.asarray
    plan = gemmsmith.plan(a, b, **{side: turn(aligned)}, config=TILE.replace(swap_ab=swap_ab), out_dtype="fp32")
    np.testing.assert_array_equal(plan.simulate(a, b, **{side: turn(aligned)}).result, 300)
    for x in (shifted, bytes_of):
        with pytest.raises(
            ArgumentError, match=f"{side}: got scales of .* this plan has a kernel for fp32 read by TMA"
        ):
            plan.simulate(a, b, **{side: turn(x)})


def test_a_result_over_its_scales_is_refused() -> None:
    a, b = ones(70, 50, 300)
    out = np.zeros((70, 50), np.float32)
    with pytest.raises(ArgumentError, match="out: overlaps scale_a"):
        gemmsmith.gemm(a, b, out=out, scale_a=out[:, :3])


@pytest.mark.torch
def test_a_scale_whose_gradient_would_be_lost_is_refused() -> None:
    torch = pytest.importorskip("torch")
    a, b = (torch.ones(8, 128), torch.ones(128, 8))
    with pytest.raises(ArgumentError, match="scale_a: got a tensor that requires grad"):
        gemmsmith.gemm(a, b, precision="tf32", scale_a=torch.ones(8, 1, requires_grad=True))
