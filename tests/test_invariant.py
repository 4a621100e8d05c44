"""Batch-invariant plans: one config for every M, rows with the same bits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.epilogues import CASES, columns_of
from tests.epilogues import operands as made

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Spec
from gemmsmith.backends.reference.matmul import matmul_float64
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.tuning.choose import rank_configs

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
ROWS = (1, 2, 7, 64, 65, 128, 500, 4096, 8192)
BYTES = np.dtype(np.uint8)


def row_sums(acc: Any, c: Any) -> Any:
    return acc + c, (acc * c).sum(-1), acc.logsumexp(-1)


ROW_CASES = [
    "row", "matrix", "stats", "cross_entropy", "everything", "gated_everything", "quantized", "top_k_softmax",
]  # fmt: skip
EPILOGUES: list[Callable[..., Any] | None] = [None, lambda acc, c: acc * c, row_sums]


def strided(shape: tuple[int, int], dtype: str, column_major: bool, pad: int) -> Spec:
    """Rows (or columns) that are `pad` elements longer in memory."""
    outer = (shape[0] if column_major else shape[1]) + pad
    return Spec(shape, dtype, (1, outer) if column_major else (outer, 1))


@settings(max_examples=40)
@given(
    n=some.sampled_from([1, 8, 100, 1001, 2112, 4096]), k=some.sampled_from([0, 1, 64, 777, 4096]),
    majors=some.tuples(some.booleans(), some.booleans(), some.booleans()),
    pads=some.tuples(*[some.sampled_from([0, 1, 8])] * 3), epilogue=some.sampled_from(EPILOGUES), flat=some.booleans(),
)  # fmt: skip
def test_every_m_gets_a_config_in_order(n: int, k: int, majors: Any, pads: Any, epilogue: Any, flat: bool) -> None:
    """Of whatever layout and alignment, and whatever TMA can reach; one where rows are reduced, but for stages and
    buffers."""
    result = set()
    for m in ROWS:
        shapes = ((m, k), (k, n), (m, n))
        a, b, d = (strided(s, "bf16", *x) for s, *x in zip(shapes, majors, pads, strict=True))
        more = {"c": Spec((n,) if flat else (m, n), "bf16")} if epilogue else {}
        plan = gemmsmith.plan(a, b, out={"out": d}, epilogue=epilogue or identity, operands=more, batch_invariant=True)
        result.add(plan.config.replace(stages=2, alias_epilogue=False, sync_clusters=False))
    assert {(c.splits, c.cluster_splits, c.serpentine) for c in result} == {(1, 1, False)}
    if epilogue is row_sums:
        assert len(result) == 1
        assert not result.pop().swap_ab


def identity(acc: Any) -> Any:
    return acc


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_k_is_never_split(epilogue: Any) -> None:
    """Nor summed backwards; where the columns of a tile are added up all M have one tile."""
    tiles = set()
    for n, k in ((4096, 4096), (512, 16384), (57344, 8192), (24, 4096)):
        of_n = set()
        for m in ROWS:
            more = {"c": Spec((m, n), "bf16")} if epilogue else {}
            specs = Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k))
            config = gemmsmith.plan(*specs, epilogue=epilogue, operands=more, batch_invariant=True).config
            assert config.splits == config.cluster_splits == 1
            assert not config.serpentine
            of_n.add((config.tile, config.swap_ab))
        assert len(of_n) == 1 or epilogue is not row_sums
        tiles |= of_n
    assert len(tiles) > 1


def test_the_free_choice_is_another() -> None:
    problem = gemmsmith.plan(Spec((128, 16384), "bf16"), Spec((16384, 512), "bf16")).problem
    assert any(c.splits != 1 or c.cluster_splits != 1 for c in rank_configs(problem))
    assert all(c.splits == c.cluster_splits == 1 for c in rank_configs(problem, fixed_k_order=True))
    large = gemmsmith.plan(Spec((8192, 8192), "bf16"), Spec((8192, 8192), "bf16")).problem
    assert any(c.serpentine for c in rank_configs(large))
    assert not any(c.serpentine for c in rank_configs(large, fixed_k_order=True))


@pytest.mark.parametrize(("given", "refused", "says"), [
    ({"config": Config(splits=2)}, ConfigError, "splits: got 2 with batch_invariant"),
    ({"config": Config(splits=0)}, ConfigError, "splits: got 0 with batch_invariant"),
    ({"config": Config(serpentine=True)}, ConfigError, "serpentine: got True with batch_invariant"),
    ({"epilogue": lambda acc: acc.sum(-1), "deterministic": False}, ArgumentError, "deterministic: got False with"),
])  # fmt: skip
def test_what_depends_on_m_is_refused(given: dict[str, Any], refused: type[Exception], says: str) -> None:
    with pytest.raises(refused, match=says):
        gemmsmith.plan(Spec((64, 64), "bf16"), Spec((64, 64), "bf16"), batch_invariant=True, **given)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
def test_nothing(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    done = gemmsmith.gemm(np.ones((m, k), np.float16), np.ones((k, n), np.float16), batch_invariant=True, backend="sim")
    assert done.shape == (m, n)
    assert (done == 0).all()


def test_gemm_keeps_the_plans_apart() -> None:
    a, b = np.ones((64, 64), np.float16), np.ones((64, 64), np.float16)
    assert (gemmsmith.gemm(a, b, deterministic=False, epilogue=total) == 64**3).all()
    with pytest.raises(ArgumentError, match="batch_invariant"):
        gemmsmith.gemm(a, b, deterministic=False, epilogue=total, batch_invariant=True)


def total(acc: Any) -> Any:
    return acc.sum()


# -- bits --------------------------------------------------------------------------------------------------------------


def bits(x: Any) -> Any:
    return np.ascontiguousarray(x).view(BYTES)


def drawn(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, column_major: bool = False, pad: int = 0
) -> Any:
    """Random normal numbers of very different sizes, some of them zeros of either sign."""
    *batch, rows, columns = shape
    stored = (*batch, columns, rows + pad) if column_major else (*batch, rows, columns + pad)
    x = rng.standard_normal(stored, np.float32) * np.exp2(rng.integers(-6, 6, stored))
    x = np.where(rng.random(stored) < 0.1, np.copysign(0, x), x).astype(DTYPES[dtype])
    return x[..., :rows].swapaxes(-1, -2) if column_major else x[..., :columns]


def run(a: Any, b: Any, out: Any, **options: Any) -> Any:
    return gemmsmith.plan(a, b, out=out, **options).run(a, b, out)


def named(x: Any) -> dict[str, Any]:
    return x if isinstance(x, dict) else dict(enumerate(x if isinstance(x, tuple) else (x,)))


@settings(max_examples=12)
@given(
    m=some.sampled_from([1, 2, 33, 64, 70]), n=some.sampled_from([1, 24, 72, 136]), k=some.sampled_from([8, 63, 200]),
    majors=some.tuples(some.booleans(), some.booleans(), some.booleans()), pad=some.sampled_from([0, 1]),
    dtype=some.sampled_from(["bf16", "fp16"]), accumulate=some.sampled_from(["fp32", "fp16"]),
    output=some.sampled_from(["fp32", "fp16"]), seed=some.integers(0, 99),
)  # fmt: skip
def test_rows_of_simulated_products(
    m: int, n: int, k: int, majors: Any, pad: int, dtype: str, accumulate: str, output: str, seed: int
) -> None:
    """Alone, and among others, that are NaN."""
    rng = np.random.default_rng(seed)
    rows, first = 131, int(rng.integers(0, 131 - m))
    options = {"batch_invariant": True, "out_dtype": output, "backend": "sim",
               "accumulate": accumulate if dtype == "fp16" else "fp32"}  # fmt: skip
    a, b = drawn(rng, (rows, k), dtype, majors[0], pad), drawn(rng, (k, n), dtype, majors[1], pad)
    out = [np.full((n, r) if majors[2] else (r, n), np.nan, as_dtype(output).numpy) for r in (rows, m, m + 1)]
    out = [x.T if majors[2] else x for x in out]
    whole = run(a, b, out[0], **options)
    isolated = run(np.asarray(a[first : first + m], order="K"), b, out[1], **options)
    among = np.full((m + 1, k), np.nan, a.dtype)
    among[1:] = a[first : first + m]
    behind = run(among, b, out[2], **options)
    expected = bits(whole[first : first + m])
    np.testing.assert_array_equal(bits(isolated), expected)
    np.testing.assert_array_equal(bits(behind[1:]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROW_CASES)
@pytest.mark.parametrize("backend", ["sim", "reference"])
def test_rows_of_epilogues(name: str, backend: Any) -> None:
    """Also in bits of the reductions along a row."""
    case, rng = CASES[name], np.random.default_rng()
    rows, n, k = 80, columns_of(case, 72), 72
    if name == "quantized":
        n = 200
    a, b = drawn(rng, (rows, k), "bf16"), drawn(rng, (k, n), "bf16")
    more = made(case, rng, rows, n, as_dtype("bf16"), None)
    options = {"epilogue": case.function, "batch_invariant": True, "backend": backend, "out_dtype": "fp32"}
    whole = named(gemmsmith.gemm(a, b, operands=more, **options))
    for first, m in ((0, 1), (3, 65), (79, 1)):
        part = {key: x[first : first + m] if getattr(x, "shape", ())[:1] == (rows,) else x for key, x in more.items()}
        actual = named(gemmsmith.gemm(a[first : first + m].copy(), b, operands=part, **options))
        by_row = {key: x for key, x in actual.items() if x.shape[:1] == (m,) and whole[key].shape[:1] == (rows,)}
        assert by_row
        for key, x in by_row.items():
            np.testing.assert_array_equal(bits(x), bits(whole[key][first : first + m]), str(key))


@pytest.mark.parametrize("config", [
    Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, stages=2, cluster_splits=2),
    Config(tile=(64, 16, 64), cluster=(2, 1), consumers=1, stages=2, swap_ab=True),
    Config("pingpong", (64, 32, 64), (1, 2), 2),
    Config("tma", (128, 24, 32), (1, 1), 2),
], ids=str)  # fmt: skip
def test_rows_with_a_given_config(config: Config) -> None:
    rng = np.random.default_rng()
    a, b = drawn(rng, (150, 300), "fp16"), drawn(rng, (300, 80), "fp16")
    options = {"config": config, "batch_invariant": True, "backend": "sim", "out_dtype": "fp32"}
    whole = gemmsmith.gemm(a, b, **options)
    for first, m in ((0, 1), (70, 66)):
        actual = gemmsmith.gemm(a[first : first + m].copy(), b, **options)
        np.testing.assert_array_equal(bits(actual), bits(whole[first : first + m]))


def test_the_order_of_k_shows_in_the_simulator() -> None:
    """Else the tests above would show nothing."""
    rng = np.random.default_rng()
    a, b = drawn(rng, (64, 512), "fp16"), drawn(rng, (512, 64), "fp16")
    small = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, stages=2)
    result = [gemmsmith.gemm(a, b, config=c, backend="sim", out_dtype="fp32") for c in (small, small.replace(splits=2))]
    assert (bits(result[0]) != bits(result[1])).any()


@pytest.mark.parametrize("batch", [(), (2,)])
@settings(max_examples=20)
@given(rows=some.integers(1, 200), n=some.integers(1, 70), k=some.integers(0, 70), data=some.data())
def test_rows_of_the_reference(batch: tuple[int, ...], rows: int, n: int, k: int, data: some.DataObject) -> None:
    """Of float64 numbers, whose sums are rounded."""
    rng = np.random.default_rng(rows)
    a, b = rng.standard_normal((*batch, rows, k)), rng.standard_normal((n, k)).T
    m = data.draw(some.integers(1, rows))
    np.testing.assert_array_equal(bits(matmul_float64(a[..., :m, :].copy(), b)), bits(matmul_float64(a, b)[..., :m, :]))
