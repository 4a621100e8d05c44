"""Fused epilogues in the simulator against float64: every kind of node, over tiles, clusters, layouts and dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.epilogue.graphs import data, graphs
from tests.epilogues import (
    CASES,
    Case,
    check_function,
    columns_of,
    function_graph,
    fusion,
    judge,
    judge_random,
    operands,
)

import gemmsmith
from gemmsmith import Config, ConfigError
from gemmsmith.arrays import ArrayInfo
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.matmul import matmul_float64
from gemmsmith.core.design import get_design
from gemmsmith.core.dtypes import FP16, as_dtype
from gemmsmith.core.graph import EpilogueGraph, Result
from gemmsmith.graph.frontend.fusions import NAMED_FUSIONS
from gemmsmith.graph.functions import FUNCTIONS

CONFIGS = [
    Config(tile=(128, 64, 64), cluster=(1, 1), stages=3),
    Config(tile=(128, 128, 64), cluster=(2, 1), stages=3),
    Config(tile=(64, 48, 32), cluster=(1, 1), stages=2, consumers=1),
    Config(tile=(256, 128, 64), cluster=(1, 2), stages=2),
    Config(tile=(128, 64, 64), cluster=(1, 2), stages=3, alias_epilogue=True),
    Config(tile=(64, 64, 64), cluster=(1, 1), stages=2, consumers=1, splits=2, alias_epilogue=True),
    Config("tma", (128, 256, 64), (1, 1), 2),
    Config("tma", (64, 40, 64), (1, 1), 3, 1),
    Config(tile=(64, 64, 32), cluster=(1, 1), stages=3, consumers=1, splits=0),
    Config("pingpong", (64, 64, 64), (2, 1), 3),
    Config(tile=(128, 16, 64), cluster=(1, 1), stages=3, consumers=2, swap_ab=True),
    Config(tile=(128, 64, 32), cluster=(1, 1), stages=2, consumers=2, cluster_splits=2),
    Config(tile=(64, 96, 32), cluster=(1, 1), stages=2, consumers=1, cluster_splits=4),
    Config("pingpong", (128, 64, 64), (1, 1), 3, 3),
]
SIZES = [(200, 136, 96), (130, 259, 70), (70, 96, 33), (200, 264, 64), (190, 136, 130), (70, 136, 270),
         (150, 272, 64), (77, 83, 40), (130, 72, 200), (200, 144, 100), (14, 272, 80), (200, 144, 90),
         (90, 104, 130), (390, 200, 70)]  # fmt: skip


def fit_case(case: Case, config: Config, n: int) -> tuple[Config, int]:
    """A config with a tile wide enough for functions of whole rows."""
    if case.whole_rows and get_design(config.design).warpgroups_split_n:  # one warpgroup has them
        return config.replace(tile=(64, max(case.whole_rows, 128), 32), stages=2, consumers=1), min(n, 128)
    if case.whole_rows == -1:
        return config.replace(tile=(config.tile[0], 128, 32), stages=2), min(n, 128)
    if case.whole_rows:
        return config.replace(tile=(128, case.whole_rows, 32), stages=2, consumers=2), n
    return config, n


def check(case: Case, config: Config | None, m: int, n: int, k: int, dtype: str, batch: int | None, seed: int) -> None:
    """The kernel in the simulator against the float64 executor of the traced graph."""
    rng = np.random.default_rng(seed)
    kind = as_dtype(dtype)
    n = columns_of(case, n)
    if config is not None:
        config, n = fit_case(case, config, n)
    lead = () if batch is None else (batch,)
    a = rng.standard_normal((*lead, m, k)).astype(kind.numpy)
    b = rng.standard_normal((*lead, n, k)).astype(kind.numpy).swapaxes(-1, -2)
    more = operands(case, rng, m, n, kind, batch)
    plan = gemmsmith.plan(a, b, epilogue=case.function, operands=more, config=config, backend="sim")
    done = plan.simulate(a, b, operands=more, seed=seed)
    assert done.hazards == []
    product = matmul_float64(a, b)
    numbers = {name: np.asarray(x, np.float64) for name, x in more.items()}
    expected_ = execute(plan._planned.binding.source_graph, product, numbers)
    names = [r.name for r in plan._planned.binding.graph.results]
    actual = done.result if isinstance(done.result, dict) else dict(zip(names, _many(done.result), strict=True))
    judge(plan._planned.binding.graph, actual, expected_, product)


def _many(result):
    return result if isinstance(result, tuple) else (result,)


ALIKE = [(0, 2), (1, 3), (4, 5), (6, 7), (8,), (9, 13), (10,), (11, 12)]
"""Configs of one design and kind of store, of which each run draws one."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("indices", ALIKE, ids=lambda x: "-".join(map(str, x)))
def test_case(name: str, indices: tuple[int, ...], rng: np.random.Generator) -> None:
    index = int(rng.choice(indices))
    m, n, k = SIZES[index]
    dtype = "fp16" if index % 3 == 1 else "bf16"
    try:
        check(CASES[name], CONFIGS[index], m, n, k, dtype, None, 10 * index)
    except ConfigError:  # a config that does not suit it, and says so
        if CONFIGS[index].swap_ab:
            assert name in ("cross_entropy", "quantized", "gated_quantized") or CASES[name].whole_rows
        else:
            assert CASES[name].gated or CASES[name].whole_rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["row", "column", "matrix", "bias_gelu", "reductions"])
@pytest.mark.parametrize("n", [280, 281])
def test_a_piece_as_wide_as_its_tile(name: str, n: int) -> None:
    """By TMA and not; vectors are read in ranges of columns."""
    config = Config(tile=(64, 136, 64), cluster=(1, 2), stages=2, consumers=1, sync_clusters=True)
    check(CASES[name], config, 90, n, 150, "bf16", None, n)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_with_the_config_that_is_chosen(name: str) -> None:
    check(CASES[name], None, 130, 256, 100, "bf16", None, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_batch(name: str) -> None:
    check(CASES[name], CONFIGS[0], 70, 80, 40, "bf16", 3, 5)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    m=some.integers(1, 90), groups=some.integers(1, 17), k=some.integers(1, 150), batch=some.sampled_from([None, 2]),
    tile=some.sampled_from([(64, 8, 64), (64, 24, 64), (128, 40, 32), (128, 64, 64), (256, 16, 64)]),
    dtype=some.sampled_from(["bf16", "fp16"]), options=some.sampled_from([{}, {"splits": 2}, {"cluster_splits": 2}]),
    seed=some.integers(0, 1000),
)  # fmt: skip
def test_gated_columns_are_rows_of_a_swapped_tile(
    m: int, groups: int, k: int, batch: int | None, tile: tuple[int, int, int], dtype: str, options: dict, seed: int
) -> None:
    """With a row, a matrix, and sums over rows and columns of the gated values."""
    config = Config(tile=tile, cluster=(1, 1), stages=2, consumers=1 + (tile[0] > 64), swap_ab=True, **options)
    check(CASES["gated_everything"], config, m, 16 * groups, k, dtype, batch, seed)


@pytest.mark.parametrize("name", ["row", "matrix", "reductions", "bias_gelu", "swiglu", "gated_everything"])
def test_column_major_result(name: str) -> None:
    """The kernel computes D^T; rows and columns change places in the graph."""
    rng = np.random.default_rng(3)
    m, n, k = 136, columns_of(CASES[name], 200), 64
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((m, k), (k, n)))
    more = operands(CASES[name], rng, m, n, as_dtype("bf16"), None)
    out = np.full((n // 2 if CASES[name].gated else n, m), np.nan, ml_dtypes.bfloat16).T
    plan = gemmsmith.plan(a, b, epilogue=CASES[name].function, operands=more, out=out, config=CONFIGS[0])
    assert plan._planned.binding.swapped
    done = plan.simulate(a, b, out, operands=more)
    assert done.hazards == []
    expected_ = execute(
        plan._planned.binding.source_graph,
        matmul_float64(a, b),
        {key: np.asarray(x, np.float64) for key, x in more.items()},
    )
    names = [r.name for r in plan._planned.binding.graph.results]
    actual = done.result if isinstance(done.result, dict) else dict(zip(names, _many(done.result), strict=True))
    judge(plan._planned.binding.graph, actual, expected_, matmul_float64(a, b))


@pytest.mark.parametrize("deterministic", [True, False])
def test_reductions_of_constants(deterministic: bool) -> None:
    """Known without the product: the kernel has no partials of them, the second step writes their values."""
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((70, 32), (32, 96)))

    def constants(acc):
        c = np.where(acc > 0, 3.0, 3.0)
        return acc, c.sum(-1), c.sum(-2), c.sum(), c.mean(-1), c.max(-2), c.logsumexp(-1)

    plan = gemmsmith.plan(a, b, epilogue=constants, deterministic=deterministic)
    assert plan.workspace_bytes == 0
    assert "partial" not in plan.source
    done = plan.simulate(a, b)
    assert done.hazards == []
    _, rows, columns, everything, mean, largest, soft = done.result
    wants = ((rows, (70,), 288), (columns, (96,), 210), (everything, (), 20160), (mean, (70,), 3), (largest, (96,), 3),
             (soft, (70,), 3 + np.log(96)))  # fmt: skip
    for actual, shape, expected_ in wants:
        assert actual.shape == shape
        np.testing.assert_allclose(actual, expected_, rtol=1e-6)


def test_one_hot() -> None:
    """Rows of labels; their own sum is known, and one in all needs the labels of all batches."""
    rng = np.random.default_rng(8)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((70, 32), (32, 96)))
    labels = rng.integers(96, size=(70, 1)).astype(np.float32)

    def counts(acc, labels):
        selected = labels.one_hot(96)
        return acc, selected.sum(-1), selected.sum(-2), selected.sum()

    done = gemmsmith.simulate(a, b, epilogue=counts, labels=labels)
    assert done.hazards == []
    _, rows, columns, everything = done.result
    np.testing.assert_array_equal(rows, np.ones(70))
    np.testing.assert_array_equal(columns, np.bincount(labels[:, 0].astype(int), minlength=96))
    assert everything == 70


@pytest.mark.parametrize("backend", ["sim", "reference"])
@pytest.mark.parametrize(("m", "n"), [(0, 40), (24, 0), (0, 0)])
def test_empty_products(backend: str, m: int, n: int) -> None:
    a, b = np.ones((m, 16), ml_dtypes.bfloat16), np.ones((16, n), ml_dtypes.bfloat16)
    d, rows, columns, total, mean, soft = gemmsmith.gemm(
        a, b, epilogue=lambda acc: (acc, acc.sum(-1), acc.sum(-2), acc.sum(), acc.mean(), acc.logsumexp(-1)),
        backend=backend,
    )  # fmt: skip
    assert d.shape == (m, n)
    assert (rows.shape, columns.shape) == ((m,), (n,))
    assert not rows.any()
    assert not columns.any()
    assert total == 0
    assert np.isnan(mean)
    assert (soft == -np.inf).all()
    q, scales = gemmsmith.gemm(a, b, epilogue=lambda acc: gemmsmith.quantize(acc, "1x16"), backend=backend)
    assert (q.shape, scales.shape) == ((m, n), (m, -(-n // 16)))
    with pytest.raises(gemmsmith.ArgumentError, match="has no value"):
        gemmsmith.gemm(a, b, epilogue=lambda acc: acc.max(), backend=backend)
    with pytest.raises(gemmsmith.ArgumentError, match="has no value"):
        gemmsmith.simulate(a, b, epilogue=lambda acc: acc.abs().amax())


def test_atomic_sums() -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((200, 64), (64, 136)))
    done = gemmsmith.simulate(a, b, epilogue=lambda acc: (acc.sum(-1), acc.sum(-2), acc.sum()), deterministic=False)
    product = matmul_float64(a, b)
    assert done.hazards == []
    for actual, expected_ in zip(done.result, (product.sum(-1), product.sum(-2), product.sum()), strict=True):
        np.testing.assert_allclose(actual, expected_, atol=1e-2)


def test_in_place_residual() -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((200, 64), (64, 136), (200, 136)))
    expected_ = matmul_float64(a, b) + c.astype(np.float64)
    done = gemmsmith.simulate(a, b, epilogue=lambda acc, c: acc + c, c=c, out=c, config=CONFIGS[0])
    assert done.hazards == []
    np.testing.assert_allclose(c.astype(np.float64), expected_, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("k", [0, 70])
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
def test_a_result_of_another_dtype_in_place(config: Config | None, k: int) -> None:
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((300, k), (k, 272)))
    c = rng.standard_normal((300, 272)).astype(np.float16)
    expected_ = matmul_float64(a, b) + 3 * c.astype(np.float64)
    out = c.view(ml_dtypes.bfloat16)
    done = gemmsmith.simulate(a, b, epilogue=lambda acc, c: acc + 3 * c, c=c, out=out, config=config)
    assert done.hazards == []
    np.testing.assert_allclose(out.astype(np.float64), expected_, rtol=2**-8, atol=1e-3)


def test_functions_that_are_exact() -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((64, 64), (64, 64)))
    done = gemmsmith.simulate(a, b, epilogue=lambda acc: acc.exp().tanh(), fast_math=False, out_dtype="fp32")
    np.testing.assert_allclose(done.result, np.tanh(np.exp(matmul_float64(a, b))), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_every_schedule(seed: int) -> None:
    """Other seeds, other orders of asynchronous operations: no hazard in any."""
    check(CASES["stats"], Config(tile=(128, 128, 64), cluster=(2, 1), stages=2), 300, 256, 130, "bf16", None, seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(FUNCTIONS), 8))
def test_every_function(first: int, rng: np.random.Generator) -> None:
    """Eight results of a kernel, in the three precisions, on data in each function's domain."""
    names = sorted(FUNCTIONS)[first : first + 8]
    graphs, domains = zip(*map(function_graph, names), strict=True)
    *inputs, _ = graphs[0].nodes
    results = tuple(Result(f"out{i}", len(inputs) + i) for i in range(len(names)))
    graph = EpilogueGraph((*inputs, *(x.nodes[-1] for x in graphs)), (), results)
    for fast_math, output in ((True, "bf16"), (True, "fp32"), (False, "fp32")):
        a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((70, 16), (16, 72)))
        done = gemmsmith.simulate(a, b, epilogue=graph, out_dtype=output, fast_math=fast_math, config=CONFIGS[2])
        assert done.hazards == []
        for name, domain, result in zip(names, domains, results, strict=True):
            check_function(name, done.result[result.name], matmul_float64(a, b), output, fast_math, domain)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMED_FUSIONS))
def test_every_ready_made_fusion(name: str) -> None:
    epilogue, kinds = fusion(name)
    whole_rows = -1 if "TopK" in name else 128 * (name == "block_quantized")
    case = Case(epilogue, kinds, gated="glu" in name, whole_rows=whole_rows)
    check(case, CONFIGS[0], 150, 208, 70, "bf16", None, 7)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(graph=graphs(), seed=some.integers(0, 1000), index=some.sampled_from([0, 2, 5]))
def test_random_graphs(graph: EpilogueGraph, seed: int, index: int) -> None:
    check_graph(graph, CONFIGS[index], seed, (130, 88, 40), ml_dtypes.bfloat16)


def check_graph(graph: EpilogueGraph, config: Config, seed: int, sizes: tuple[int, int, int], dtype: type) -> None:
    """As `check`, of any graph."""
    rng, (m, n, k) = np.random.default_rng(seed), sizes
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n)))
    more = data(rng, graph, (m, n))
    done = gemmsmith.simulate(a, b, epilogue=graph, operands=more, config=config, seed=seed)
    assert done.hazards == []
    expected_ = execute(graph, matmul_float64(a, b), more)
    names = [r.name for r in graph.results]
    actual = done.result if isinstance(done.result, dict) else dict(zip(names, _many(done.result), strict=True))
    judge_random(graph, actual, expected_, matmul_float64(a, b), more)


def test_names_that_meet_in_the_kernel_of_one_another(rng: np.random.Generator) -> None:
    """By TMA and element by element, strides of one beside arrays of that name."""
    m, n, k = 70, 88, 40

    def named(acc, bias, bias_row, bias_column, out_x):
        x = acc + bias * bias_row + bias_column * out_x
        return {"x": x, "x_row": x * 2, "row": x * 3, "stride_x": x.sum(-1), "y": x.sum(-2), "y_2": x.logsumexp(-1)}

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    a, b = array(m, k).astype(np.float16), array(k, n).astype(np.float16)
    given = {"bias": array(m, 1), "bias_row": array(n), "bias_column": array(m, 2 * n)[:, ::2], "out_x": array(m, n)}
    out = {"x": np.full((m, 2 * n), np.nan, np.float32)[:, ::2], "row": np.full((n, m), np.nan, np.float32).T}
    done = gemmsmith.simulate(a, b, epilogue=named, operands=given, out=out, out_dtype="fp32", config=CONFIGS[2])
    assert done.hazards == []
    wide = {key: x.astype(np.float64) for key, x in given.items()}
    x = matmul_float64(a, b) + wide["bias"] * wide["bias_row"] + wide["bias_column"] * wide["out_x"]
    wants = {"x": x, "x_row": 2 * x, "row": 3 * x, "stride_x": x.sum(-1), "y": x.sum(-2),
             "y_2": np.log(np.exp(x).sum(-1))}  # fmt: skip
    for key, expected_ in wants.items():
        np.testing.assert_allclose(done.result[key], expected_, rtol=1e-4, atol=1e-3, err_msg=key)
    with pytest.raises(gemmsmith.ArgumentError, match="operands: got the name 'a b'"):
        gemmsmith.gemm(a, b, epilogue=lambda acc, **more: acc * more["a b"], operands={"a b": 2.0})


@pytest.mark.parametrize("backend", ["sim", "reference"])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_reductions_and_scales_are_stored_as_they_are_cast(
    rng: np.random.Generator, dtype: str, deterministic: bool, backend: str
) -> None:
    """Nothing is written behind their ends."""
    kind, (m, n, k) = as_dtype(dtype), (70, 96, 32)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((m, k), (k, n)))

    def reduced(acc):
        constant = np.where(acc > 0, 3.0, 3.0)
        q, s = gemmsmith.quantize(acc, "1x32")
        return {
            "q": q, "s": s.to(dtype), "rows": acc.sum(-1).to(dtype), "columns": acc.max(-2).to(dtype),
            "all": acc.mean(dtype=dtype), "soft": acc.logsumexp(-1).to(dtype), "known": constant.sum(-1).to(dtype),
        }  # fmt: skip

    shapes = {"s": (m, 3), "rows": (m,), "columns": (n,), "all": (), "soft": (m,), "known": (m,)}
    buffers_ = {name: np.full(2 * int(np.prod(shape)), np.nan, kind.numpy) for name, shape in shapes.items()}
    out = {name: buffers_[name][: int(np.prod(shape))].reshape(shape) for name, shape in shapes.items()}
    done = gemmsmith.gemm(a, b, epilogue=reduced, out=out, deterministic=deterministic, backend=backend)
    made = gemmsmith.gemm(a, b, epilogue=reduced, deterministic=deterministic, backend=backend)
    x = matmul_float64(a, b)
    blocks = np.abs(x).reshape(m, 3, 32).max(-1)
    wants = {"s": blocks / 448, "rows": x.sum(-1), "columns": x.max(-2), "all": x.mean(),
             "soft": np.log(np.exp(x).sum(-1)), "known": np.full(m, 3.0 * n)}  # fmt: skip
    for name, expected_ in wants.items():
        tolerance = 1.01 * kind.roundoff + 2.0**-15
        np.testing.assert_allclose(done[name].astype(float), expected_, rtol=tolerance, atol=1e-4, err_msg=name)
        assert made[name].dtype == kind.numpy
        assert made[name].tobytes() == done[name].tobytes()
        assert np.isnan(buffers_[name][done[name].size :].astype(float)).all()


def test_dtypes_that_reductions_do_not_have() -> None:
    a, b = np.ones((8, 16), np.float16), np.ones((16, 32), np.float16)
    for epilogue, message in (
        (lambda acc: (acc, acc.sum(-1).to("fp8_e4m3")), "out1: got dtype fp8_e4m3 for a reduction's result; use fp32"),
        (lambda acc: gemmsmith.quantize(acc, "1x16")[1].to("fp8_e5m2"), "got dtype fp8_e5m2 for scales; use fp32"),
        (lambda acc: acc.sum(-1).half().float(), "got a second cast of a value in fp16"),
        (lambda acc: acc.sum(dtype="int64"), "got 'int64'; use one of bf16, fp16, fp32"),
    ):
        with pytest.raises(gemmsmith.EpilogueError, match=message):
            gemmsmith.gemm(a, b, epilogue=epilogue)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("block", [16, 48])
@pytest.mark.parametrize("n", [96, 100])
def test_every_column_of_a_block_is_written(rng: np.random.Generator, n: int, block: int, gated: bool) -> None:
    """By TMA and not; the last block is not whole."""
    n = 96 if gated else n
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((70, 32), (32, n)))
    shape = (70, n // 2 if gated else n)
    buffers_ = np.full((70, shape[1] + n % 16 + 1), np.nan, ml_dtypes.float8_e4m3fn)
    q = buffers_[:, : shape[1]]  # TMA can store neither
    epilogue = lambda acc: gemmsmith.quantize(gemmsmith.deinterleave(acc)[1] if gated else acc, f"1x{block}")  # noqa: E731
    for out in ({"out": q}, None):
        plan = gemmsmith.plan(a, b, epilogue=epilogue, out=out)
        done = plan.simulate(a, b, out)
        assert done.hazards == []
        expected_ = execute(plan._planned.binding.source_graph, matmul_float64(a, b), {})
        judge(
            plan._planned.binding.graph, dict(zip(expected_, done.result, strict=True)), expected_, matmul_float64(a, b)
        )


def test_a_block_wider_than_the_product(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((70, 32), (32, 96)))
    plan = gemmsmith.plan(a, b, epilogue=lambda acc: gemmsmith.quantize(acc, "1x192"))
    done = plan.simulate(a, b)
    assert done.hazards == []
    expected_ = execute(plan._planned.binding.source_graph, matmul_float64(a, b), {})
    judge(plan._planned.binding.graph, dict(zip(expected_, done.result, strict=True)), expected_, matmul_float64(a, b))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("index", [None, 0, 2, 10, 11])
def test_a_chunk_that_no_result_needs(rng: np.random.Generator, index: int | None, half: bool) -> None:
    """What pairs columns, or rows of D^T, are the values, whose halves are left."""
    m, n = 130, 96
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((m, 32), (32, n)))
    x = rng.standard_normal((m, n // 2 if half else n)).astype(np.float32)
    row = rng.standard_normal(x.shape[1]).astype(np.float32)

    def dead(acc, x, row):
        _ = gemmsmith.deinterleave(acc)
        y = x * 2 + row
        return y, y.sum(-1), y.sum(-2), y.sum()

    more = {"x": x, "row": row}
    given = {"out": np.full(x.shape, np.nan, np.float32)}
    config = None if index is None else CONFIGS[index]
    done = gemmsmith.simulate(a, b, epilogue=dead, operands=more, out=given, out_dtype="fp32", config=config)
    assert done.hazards == []
    expected_ = 2 * x.astype(np.float64) + row
    for actual, expected in zip(
        done.result, (expected_, expected_.sum(-1), expected_.sum(-2), expected_.sum()), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["sim", "reference"])
def test_numbers_that_fp32_does_not_have(rng: np.random.Generator, backend: str) -> None:
    """They are infinite, or zero, as in torch."""
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((40, 16), (16, 24)))

    def extreme(acc):
        all_configs = np.where(acc > 0, 1e38, 1e38)
        return {
            "x": acc.clamp(max=1e300), "y": acc.clamp(min=-(10**400)), "inf": acc.abs() * 1e39, "zero": acc * 1e-300,
            "nan": acc + math.nan, "some": acc.where(acc > math.nan, -math.inf), "all": all_configs.sum(),
            "small": (acc - acc) / 2.0**-140, "max": all_configs.amax(),
        }  # fmt: skip

    actual = gemmsmith.gemm(a, b, epilogue=extreme, out_dtype="fp32", backend=backend)
    product = matmul_float64(a, b)
    for name in ("x", "y"):
        np.testing.assert_allclose(actual[name], product, rtol=1e-5, atol=1e-5)
    assert np.isnan(actual["nan"]).all()
    assert (actual["inf"] == np.inf).all()
    assert not actual["zero"].any()
    assert not actual["small"].any()
    assert (actual["some"] == -np.inf).all()
    assert actual["all"] == np.inf
    assert actual["max"] == np.float32(1e38)


@pytest.mark.parametrize("backend", ["sim", "reference"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_whole_numbers_are_exact(rng: np.random.Generator, dtype: type, backend: str) -> None:
    """Up to 2^24, of either sign; what lies beyond is near, and 2^32 + 3 is not 3."""
    a, b = np.zeros((64, 16), np.float16), np.zeros((16, 40), np.float16)
    whole = rng.integers(-(2**24), 2**24, (64, 40), endpoint=True).astype(dtype)
    whole[:2] = [[2**24] * 40, [-(2**24)] * 40]
    column = rng.integers(-100, 100, (64, 1)).astype(dtype)
    if dtype == np.int64:
        column[:3, 0] = 2**32 + 3, -(2**40) - 1, 2**63 - 1
    more = {"x": whole[:, ::-1], "y": column, "z": np.array(-7, dtype), "mask": column < 0}

    def read(acc, x, y, z, mask):
        return acc + x, acc + y, acc + z, y.one_hot(40), acc.where(mask, 1.0)

    actual = gemmsmith.gemm(a, b, epilogue=read, operands=more, out_dtype="fp32", backend=backend)
    all_rows = np.broadcast_to(column, (64, 40))
    wants = (whole[:, ::-1], all_rows, -7, np.arange(40) == column, all_rows >= 0)
    for x, expected_ in zip(actual, wants, strict=True):
        np.testing.assert_array_equal(x, np.asarray(expected_).astype(np.float32))


@pytest.mark.torch
@pytest.mark.parametrize("ignored", [False, True])
def test_cross_entropy_with_torchs_labels(rng: np.random.Generator, ignored: bool) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    m, n = 70, 96
    a, b = (torch.from_numpy(rng.standard_normal(s)).bfloat16() for s in ((m, 32), (32, n)))
    labels = torch.from_numpy(rng.integers(n, size=m))
    if ignored:
        labels[::3] = -100

    def cross_entropy(acc, labels):
        selected = functional.one_hot(labels, n)
        return (acc * selected).sum(-1), acc.logsumexp(-1), selected.sum(-1)

    done = gemmsmith.simulate(a, b, epilogue=cross_entropy, labels=labels[:, None])
    assert done.hazards == []
    of_label, soft, counts = done.result
    product = a.double() @ b.double()
    expected_ = functional.cross_entropy(product, labels, reduction="none")
    loss = torch.where(labels == -100, 0.0, soft - of_label)
    torch.testing.assert_close(loss.double(), expected_, rtol=1e-4, atol=1e-4)
    assert torch.equal(counts, (labels >= 0).float())


def test_operands_that_kernels_cannot_read() -> None:
    a, b = np.ones((8, 16), np.float16), np.ones((16, 32), np.float16)
    bytes_ = np.zeros(8 * 32 * 8 + 1, np.uint8)
    for c, message in (
        (np.zeros((8, 32), ml_dtypes.float8_e4m3fn), "c: got dtype fp8_e4m3; operands are fp32, .* or bool"),
        (bytes_[1:].view(np.int64).reshape(8, 32), "c: got address .*; use a multiple of an element's 8"),
        (np.zeros((8, 32), np.int16), "c: got dtype int16"),
    ):
        with pytest.raises(gemmsmith.ArgumentError, match=message):
            gemmsmith.gemm(a, b, epilogue=lambda acc, c: acc + c, c=c)
    there = [ArrayInfo(FP16, x.shape, (x.shape[1], 1), 256, "cuda", 0, True) for x in (a, b)]
    with pytest.raises(gemmsmith.ArgumentError, match="c: got an array on cpu with a on cuda:0; use arrays of one"):
        gemmsmith.plan(*there, epilogue=lambda acc, c: acc + c, c=np.zeros(32, np.float16))
    for name, array in (("a", a.astype(np.int64)), ("out", np.zeros((8, 32), np.int64))):
        with pytest.raises(gemmsmith.ArgumentError, match=f"{name}: got dtype int64"):
            gemmsmith.gemm(**{"a": a, "b": b, name: array})
    with pytest.raises(gemmsmith.ArgumentError, match="out: got dtype int64; the epilogue returns fp16"):
        gemmsmith.gemm(a, b, epilogue=lambda acc: acc * 2, out=np.zeros((8, 32), np.int64))


@pytest.mark.parametrize("number", [1e300, -1e39, 10**400])
@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_numbers_that_fp32_cannot_hold_are_refused(number: float, backend: str, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((8, 16), (16, 8)))

    def scaled(acc, alpha):
        return acc * alpha

    with pytest.raises(gemmsmith.ArgumentError, match="alpha: got .*; use a number that fp32 can hold"):
        gemmsmith.gemm(a, b, epilogue=scaled, alpha=number, backend=backend)
    gemmsmith.gemm(a, b, epilogue=scaled, alpha=-np.inf, backend="reference")


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "fp16", "bf16"])
@pytest.mark.parametrize("factor", [0.013, 3000.0])
def test_a_cast_in_the_middle_rounds(dtype: str, factor: float, rng: np.random.Generator) -> None:
    """Of a product that is exact, bit for bit; factors reach subnormals, and beyond the range."""
    a, b = (rng.integers(-4, 5, shape).astype(ml_dtypes.bfloat16) for shape in ((70, 16), (16, 40)))
    row = rng.choice([factor, 1e8, np.inf, np.nan], 40, p=[0.85, 0.05, 0.05, 0.05]).astype(np.float32)

    def fake_quantized(acc, row):
        x = (acc * row).to(dtype).float()
        return x, x * 2, x.abs().max(-2)

    done = gemmsmith.simulate(a, b, epilogue=fake_quantized, row=row, out_dtype="fp32")
    assert done.hazards == []
    with np.errstate(all="ignore"):
        x = (a.astype(np.float32) @ b.astype(np.float32)) * row
        if dtype in ("fp8_e4m3", "fp8_e5m2"):
            limit = float(ml_dtypes.finfo(as_dtype(dtype).numpy).max)
            x = np.clip(x, -limit, limit)
        x = x.astype(as_dtype(dtype).numpy).astype(np.float32)
        wants = x, x * 2, np.abs(x).max(-2)
    reference = gemmsmith.gemm(a, b, epilogue=fake_quantized, row=row, out_dtype="fp32", backend="reference")
    for expected_, actual, other in zip(wants, done.result, reference, strict=True):
        np.testing.assert_array_equal(actual, expected_)
        np.testing.assert_array_equal(other, expected_)


@pytest.mark.parametrize("backend", ["reference", "sim"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_results_saturate(dtype: str, backend: str) -> None:
    a = np.array([[1e30], [-1e30], [np.inf], [np.nan], [1]]).astype(ml_dtypes.bfloat16)
    d = gemmsmith.gemm(a, np.ones((1, 16), a.dtype), epilogue=lambda acc: acc.to(dtype), backend=backend)
    limit = float(ml_dtypes.finfo(as_dtype(dtype).numpy).max)
    np.testing.assert_array_equal(d[:, 0].astype(float), [limit, -limit, limit, np.nan, 1])
