"""Grouped GEMMs whose rows are gathered and scattered, in the simulator and by the reference, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.groups import NUMPY, Kind, blocks, check_refused, fp32, random, scaled

import gemmsmith
from gemmsmith import Config, Grouping, Spec

COOPERATIVE, PINGPONG = Config("cooperative", (128, 64, 64), (1, 1)), Config("pingpong", (64, 64, 64), (1, 1))
SM80 = Config("mma_multistage", (64, 64, 64), (1, 1), 3, 2, chip="sm_80")
CONFIGS = [
    None, COOPERATIVE, COOPERATIVE.replace(cluster=(2, 1)), COOPERATIVE.replace(swap_ab=True),
    COOPERATIVE.replace(cluster=(1, 2), swap_ab=True, raster_group=1), COOPERATIVE.replace(alias_epilogue=True),
    Config("cooperative", (192, 64, 64), (1, 1), consumers=3),
    Config("cooperative", (64, 24, 128), (1, 1), consumers=1), PINGPONG,
    PINGPONG.replace(cluster=(1, 2), swap_ab=True), SM80,
]  # fmt: skip
SIZES = [0, 65, 0, 130, 7, 1, 0]
MARK = 77


def random_rows(rng: np.random.Generator, count: int, extent: int) -> Any:
    """Return indices of `extent` rows, with repeats, of which some are negative and some too large."""
    rows = rng.integers(0, extent, count).astype(np.int32)
    rows[rng.permutation(count)[: count // 4]] = rng.choice([-1, -(2**31), extent, extent + 1, 2**31 - 1], count // 4)
    return rows


def unique_rows(rng: np.random.Generator, count: int, extent: int) -> Any:
    """Return the indices of different rows out of `extent`, of which some are negative and some too large."""
    rows = rng.permutation(extent)[:count].astype(np.int32)
    rows[rng.permutation(count)[: count // 8]] = rng.choice([-1, -(2**31), extent, 2**31 - 1], count // 8)
    return rows


def gathered(x: Any, rows: Any) -> Any:
    is_row = (rows >= 0) & (rows < len(x))
    return np.where(is_row[:, None], np.asarray(x, float)[np.where(is_row, rows, 0)], 0)


def scattered(out: Any, want: Any, rows: Any) -> Any:
    """Return `out` with the rows of D stored where `rows` says."""
    result = np.array(out, float)
    for row, values in zip(rows[: len(want)], want, strict=True):
        if 0 <= row < len(out):
            result[row] = values
    return result


def products(a: Any, b: Any, sizes: Any) -> Any:
    ends = np.cumsum(sizes)
    return np.concatenate([a[end - size : end] @ b[g] for g, (end, size) in enumerate(zip(ends, sizes, strict=True))])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
def test_rows_by_index(config: Config | None, gathers: bool, scatters: bool) -> None:
    """NaN in rows that no index names does not get in; rows of `out` that no index names keep their elements."""
    if not gathers and not scatters:
        return
    rng = np.random.default_rng(gathers + 2 * scatters)
    sizes, n, k, t, s = np.array(SIZES, np.int32), 72, 200, 90, 400
    total = int(sizes.sum())
    m = total + 30
    b, arrays = random(rng, "bf16", len(sizes), k, n, column_major=gathers), {"sizes": sizes}
    a = random(rng, "bf16", t if gathers else m, k)
    rows_of_a = a.astype(float)
    if gathers:
        arrays["gather"] = random_rows(rng, m, t)
        rows_of_a = gathered(a, arrays["gather"])
        a[np.setdiff1d(np.arange(t), arrays["gather"][:total])] = np.nan
    want = products(rows_of_a, b.astype(float), sizes)
    out = np.full((s if scatters else m, n), MARK, NUMPY["bf16"])
    if scatters:
        arrays["scatter"] = unique_rows(rng, m, s)
        want = scattered(out, want, arrays["scatter"])
    else:
        want = np.concatenate([want, np.zeros((m - total, n))])
    grouping, by_reference = Grouping("sizes", gathers=gathers, scatters=scatters), out.copy()
    done = gemmsmith.simulate(a, b, **arrays, grouping=grouping, out=out, config=config, seed=1)
    assert done.hazards == []
    gemmsmith.grouped_gemm(a, b, **arrays, out=by_reference, backend="reference")
    for found in (out, by_reference):
        np.testing.assert_allclose(found.astype(float), want, rtol=2.0**-8, atol=2.0**-12)


KINDS = {
    "fp16": Kind("fp16", "fp16", "fp16"),
    "fp16 sums": Kind("fp16", "fp16", "fp16", {"accumulate": "fp16"}),
    "bf16 to fp32": Kind("bf16", "bf16", "fp32", {"out_dtype": "fp32"}),
    "int8": Kind("int8", "int8", "int32"),
    "int8 scaled": Kind("int8", "int8", "bf16", {}, lambda rng, g, t, n, k: {
        "scale_a": fp32(rng, t, 1), "scale_b": fp32(rng, g, 1, n),
    }),
    "tf32": Kind("fp32", "fp32", "fp32", {"precision": "tf32"}),
    "fp8": Kind("e4m3", "e4m3", "bf16"),
    "fp8 fast": Kind("e5m2", "e4m3", "bf16", {"accumulate": "fast"}),
    "fp8 scaled": Kind("e4m3", "e4m3", "bf16", {}, lambda rng, g, t, n, k: {
        "scale_a": fp32(rng, t, 1), "scale_b": fp32(rng, g, 1, n),
    }),
    "fp8 scaled by group": Kind("e4m3", "e4m3", "bf16", {}, lambda rng, g, t, n, k: {
        "scale_a": 0.5, "scale_b": fp32(rng, g, 1, 1),
    }),
    "fp8 blocks": Kind("e4m3", "e4m3", "bf16", {}, lambda rng, g, t, n, k: {
        "scale_a": fp32(rng, t, blocks(k)), "scale_b": fp32(rng, g, blocks(k), blocks(n)),
    }),
    "fp8 rows M-major": Kind("e4m3", "e4m3", "bf16", {}, lambda rng, g, t, n, k: {
        "scale_a": fp32(rng, blocks(k), t).T, "scale_b": fp32(rng, g, blocks(k), blocks(n)),
    }),
    "fp8 columns": Kind("e4m3", "e4m3", "bf16", {}, lambda rng, g, t, n, k: {
        "scale_a": fp32(rng, t, blocks(k)), "scale_b": fp32(rng, g, blocks(k), n),
    }),
    "fp8 ue8m0": Kind("e4m3", "e4m3", "bf16", {}, lambda rng, g, t, n, k: {
        "scale_a": rng.integers(125, 129, (t, blocks(k))).astype(np.uint8),
        "scale_b": rng.integers(125, 129, (g, blocks(k), blocks(n))).astype(np.uint8),
    }),
}  # fmt: skip


KIND_CONFIGS = {
    "cooperative": Config("cooperative", (128, 48, 0), (1, 1)),
    "swap_ab": Config("cooperative", (64, 48, 0), (1, 1), consumers=1, swap_ab=True),
    "pingpong": Config("pingpong", (64, 48, 0), (1, 1)),
    "sm_80": Config("mma_multistage", (64, 64, 0), (1, 1), 3, 2, chip="sm_80"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("turn", range(2))
def test_kinds_of_operands(name: str, turn: int, rng: np.random.Generator) -> None:
    """In two of the designs each."""
    design = str(rng.choice(sorted(KIND_CONFIGS)[turn::2]))
    if design == "sm_80" and name.startswith("fp8"):
        design = "swap_ab"
    kind = KINDS[name]
    sizes, n, k, t, s = np.array([65, 0, 130, 7], np.int32), 144, 272, 100, 300
    m = int(sizes.sum()) + 5
    a, b = random(rng, kind.a, t, k), random(rng, kind.b, len(sizes), k, n, column_major=True)
    scales = kind.scales(rng, len(sizes), t, n, k) if kind.scales else {}
    arrays = {"sizes": sizes, "gather": random_rows(rng, m, t), "scatter": unique_rows(rng, m, s)}
    config = KIND_CONFIGS[design]
    config = config.replace(tile=(*config.tile[:2], 128 // a.itemsize))
    out = np.full((s, n), MARK, NUMPY[kind.out])
    by_reference = out.copy()
    grouping = Grouping("sizes", gathers=True, scatters=True)
    done = gemmsmith.simulate(
        a, b, **arrays, **kind.options, **scales, grouping=grouping, out=out, config=config, seed=2
    )  # fmt: skip
    assert done.hazards == []
    scale_a, scale_b = scales.get("scale_a"), scales.get("scale_b")
    of_groups = [scale_b[g] if np.ndim(scale_b) == 3 else scale_b for g in range(len(sizes))]
    exact_b = [scaled(b[g], of_groups[g], transposed=True) for g in range(len(sizes))]
    want = products(gathered(scaled(a, scale_a), arrays["gather"]), exact_b, sizes)
    tolerance = {"int32": 0, "fp32": 2.0**-9 if name == "tf32" else 2.0**-17, "fp16": 2.0**-8, "bf16": 2.0**-6}
    allowed = tolerance[kind.out] * np.abs(want).max()
    want = scattered(np.full((s, n), MARK), want, arrays["scatter"])
    gemmsmith.grouped_gemm(a, b, **arrays, **kind.options, **scales, out=by_reference, backend="reference")
    for found in (out, by_reference):
        np.testing.assert_allclose(found.astype(float), want, rtol=0, atol=allowed)


def test_3xtf32_on_sm80() -> None:
    rng, sizes = np.random.default_rng(6), np.array([30, 60], np.int32)
    a, b, rows = random(rng, "fp32", 50, 72), random(rng, "fp32", 2, 72, 64), random_rows(rng, 90, 50)
    config = Config("mma_multistage", (64, 64, 16), (1, 1), 3, 1, chip="sm_80")
    d = gemmsmith.grouped_gemm(a, b, sizes=sizes, gather=rows, precision="3xtf32", config=config, backend="sim")
    np.testing.assert_allclose(d, products(gathered(a, rows), b.astype(float), sizes), rtol=1e-4, atol=1e-4)


def gated(acc: Any, bias: Any, weight: Any, residual: Any) -> Any:
    gate, linear = gemmsmith.deinterleave(acc + bias)
    return gate.sigmoid() * linear * weight + residual


@pytest.mark.parametrize("config", [None, COOPERATIVE, COOPERATIVE.replace(swap_ab=True), PINGPONG, SM80], ids=str)
def test_epilogues_read_the_rows_of_the_product(config: Config | None) -> None:
    """A row for each group, a weight and a row of a matrix for each row of D, and half the columns in the result."""
    rng, groups, n, k, t, s = np.random.default_rng(7), 3, 128, 72, 60, 300
    sizes = np.array([70, 0, 133], np.int32)
    total = int(sizes.sum())
    m, of_row = total + 9, np.repeat(np.arange(3), sizes)
    a, b, bias = random(rng, "bf16", t, k), random(rng, "bf16", groups, k, n), fp32(rng, groups, n)
    weight, residual, out = fp32(rng, m, 1), random(rng, "bf16", m, n // 2), np.full((s, n // 2), MARK, np.float32)
    arrays: dict[str, Any] = {
        "sizes": sizes, "gather": random_rows(rng, m, t), "scatter": unique_rows(rng, m, s), "epilogue": gated,
        "bias": bias, "weight": weight, "residual": residual, "out_dtype": "fp32",
    }  # fmt: skip
    grouping = Grouping("sizes", gathers=True, scatters=True)
    assert gemmsmith.simulate(a, b, **arrays, grouping=grouping, out=out, config=config).hazards == []
    z = products(gathered(a, arrays["gather"]), b.astype(float), sizes) + bias[of_row]
    gate, linear = (z.reshape(total, n // 16, 2, 8)[:, :, i].reshape(total, n // 2) for i in range(2))
    want = linear / (1 + np.exp(-gate)) * weight[:total] + residual[:total].astype(float)
    np.testing.assert_allclose(out, scattered(np.full(out.shape, MARK), want, arrays["scatter"]), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("config", [None, Config("cooperative", (64, 128, 64), (1, 1), consumers=1)], ids=str)
def test_scattered_scales_of_a_quantized_result(config: Config | None) -> None:
    rng, sizes = np.random.default_rng(8), np.array([70, 33], np.int32)
    a, b = random(rng, "bf16", 103, 64), random(rng, "bf16", 2, 64, 128)
    rows, q, scale = unique_rows(rng, 103, 150), np.zeros((150, 128), NUMPY["e4m3"]), np.full((150, 1), 5, np.float32)
    gemmsmith.grouped_gemm(
        a, b, sizes=sizes, scatter=rows, epilogue=gemmsmith.quantize, out=(q, scale),
        config=config, backend="sim",
    )  # fmt: skip
    want = scattered(np.zeros((150, 128)), products(a.astype(float), b.astype(float), sizes), rows)
    np.testing.assert_allclose(q.astype(float) * scale, want, rtol=2.0**-4, atol=0.1)
    assert (scale[np.setdiff1d(np.arange(150), rows)] == 5).all()


@pytest.mark.parametrize("config", [COOPERATIVE, COOPERATIVE.replace(swap_ab=True), SM80], ids=str)
@pytest.mark.parametrize("layout", ["odd", "columns", "apart"])
def test_layouts(config: Config, layout: str) -> None:
    """Rows that are no multiples of 16 bytes, columns, and arrays with gaps, which survive."""
    rng, sizes = np.random.default_rng(9), np.array([33, 70], np.int32)
    n, k = (71, 61) if layout == "odd" else (72, 64)
    a, b = random(rng, "bf16", 80, k, column_major=layout == "columns"), random(rng, "bf16", 2, k, n)
    memory = np.full((200, 2 * n), MARK, NUMPY["bf16"])
    out = memory[:, n // 2 : n // 2 + n] if layout == "apart" else memory[:, :n].copy()
    out = np.asfortranarray(out) if layout == "columns" else out
    a = np.concatenate([a, a], 1)[:, :k] if layout == "apart" else a
    rows, slots = random_rows(rng, 110, 80), unique_rows(rng, 110, 200)
    want = scattered(np.full((200, n), MARK), products(gathered(a, rows), b.astype(float), sizes), slots)
    gemmsmith.grouped_gemm(a, b, sizes=sizes, gather=rows, scatter=slots, out=out, config=config, backend="sim")
    np.testing.assert_allclose(out.astype(float), want, rtol=2.0**-8, atol=2.0**-10)
    assert (memory[:, : n // 2] == MARK).all()
    assert (memory[:, n // 2 + n :] == MARK).all()


@pytest.mark.parametrize("name", ["offsets", "sizes"])
@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("backend", ["sim", "reference"])
def test_an_invalid_table_yields_nan(name: str, scatters: bool, backend: Any) -> None:
    a, b, rows = np.ones((90, 64), NUMPY["fp16"]), np.ones((2, 64, 64), NUMPY["fp16"]), np.arange(64, dtype=np.int32)
    out, table = np.zeros((80 if scatters else 64, 64), np.float16), {name: np.array([70, 66], np.int32)}
    scatter = {"scatter": rows} if scatters else {}
    gemmsmith.grouped_gemm(a, b, **table, gather=rows, **scatter, out=out, backend=backend)
    assert np.isnan(out).all()


def test_a_layer_of_experts() -> None:
    """Tokens are gathered for their experts, and the results are stored slot by slot of each token."""
    rng, tokens, experts, top_k, hidden = np.random.default_rng(10), 40, 6, 2, 64
    x = random(rng, "bf16", tokens, 64)
    up, down = random(rng, "bf16", experts, 64, hidden), random(rng, "bf16", experts, hidden, 48)
    chosen = np.argsort(rng.random((tokens, experts)), 1)[:, :top_k]
    order = np.argsort(chosen.ravel(), kind="stable").astype(np.int32)
    offsets = np.cumsum(np.bincount(chosen.ravel(), minlength=experts)).astype(np.int32)
    h = gemmsmith.grouped_gemm(
        x, up, offsets=offsets, gather=order // top_k, epilogue=lambda acc: acc.relu(), out_dtype="bf16", backend="sim"
    )
    y = np.full((tokens * top_k, 48), np.nan, np.float32)
    gemmsmith.grouped_gemm(h, down, offsets=offsets, scatter=order, out=y, out_dtype="fp32", backend="sim")
    hs = np.maximum(np.einsum("tk,tskh->tsh", x.astype(float), up.astype(float)[chosen]), 0)
    want = np.einsum("tsh,tshn->tn", hs, down.astype(float)[chosen])
    np.testing.assert_allclose(y.reshape(tokens, top_k, 48).sum(1), want, rtol=0.02, atol=0.02 * np.abs(want).max())


def test_empty_extents() -> None:
    for m, t, s, n, k in ((0, 9, 9, 64, 64), (30, 0, 40, 64, 64), (30, 9, 0, 64, 64), (30, 9, 40, 64, 0)):
        a, b = np.ones((t, k), NUMPY["bf16"]), np.ones((3, k, n), NUMPY["bf16"])
        sizes, out = np.array([0, m // 2, 0], np.int32), np.full((s, n), MARK, NUMPY["bf16"])
        rows = np.arange(m, dtype=np.int32)
        for backend in ("sim", "reference"):
            gemmsmith.grouped_gemm(a, b, sizes=sizes, gather=rows, scatter=rows, out=out, backend=backend)  # type: ignore[arg-type]
            assert (out[: min(m // 2, s)].astype(float) == (k if t > m else 0)).all()
            assert (out[m // 2 :] == MARK).all()


@pytest.mark.parametrize("swap", [False, True])
def test_a_missing_fence_is_reported(swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """cp.async writes in the generic proxy, wgmma reads in the async proxy."""
    from gemmsmith.collective import tma_mainloop
    from gemmsmith.kernels import build

    class WithoutFence:
        def __getattr__(self, name: str) -> Any:
            return (lambda: None) if name == "fence_proxy_async" else getattr(gemmsmith.hw, name)

    rng, sizes = np.random.default_rng(11), np.array([60, 60], np.int32)
    a, b, rows = random(rng, "bf16", 50, 128), random(rng, "bf16", 2, 128, 64), random_rows(rng, 120, 50)
    config = COOPERATIVE.replace(swap_ab=swap, stages=3)
    arguments: dict[str, Any] = {"sizes": sizes, "gather": rows, "grouping": Grouping("sizes", gathers=True)}
    assert gemmsmith.simulate(a, b, **arguments, config=config).hazards == []
    monkeypatch.setattr(tma_mainloop, "hw", WithoutFence())
    build.build.cache_clear()
    try:
        hazards = gemmsmith.simulate(a, b, **arguments, config=config).hazards
    finally:
        build.build.cache_clear()
    assert any("proxy" in str(x) for x in hazards)


GIVEN: dict[str, Any] = {
    "a": Spec((90, 128), "bf16"), "b": Spec((4, 128, 64), "bf16"), "sizes": Spec((4,), "int32"),
    "gather": Spec((256,), "int32"), "scatter": Spec((256,), "int32"), "out": Spec((300, 64), "bf16"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gather": Spec((256,), "int64")}, "gather: got int64"),
        ({"gather": Spec((256, 1), "int32")}, r"gather: got shape \(256, 1\); grouped_gemm needs \(m\)"),
        ({"gather": Spec((512,), "int32", (2,))}, "gather: got int32 with strides"),
        ({"scatter": Spec((255,), "int32")}, r"scatter: got shape \(255,\); grouped_gemm needs \(m = 256\)"),
        ({"scatter": Spec((256,), "int64")}, "scatter: got int64"),
        ({"out": None}, "out: got none with scatter; use an array"),
        ({"out": Spec((300, 60), "bf16")}, r"out: got shape \(300, 60\); use \(300, 64\)"),
        ({"out": Spec((2, 300, 64), "bf16")}, "out: got shape"),
        ({"sizes": None, "counts": Spec((4,), "int32")}, "gather: got it with counts; use offsets or sizes"),
        ({"along": "k"}, "gather: got it with along='k'; use offsets or sizes, with along='m'"),
        ({"along": "k", "gather": None}, "scatter: got it with along='k'"),
        ({"operands": {"gather": 1.0}, "epilogue": lambda acc, gather: acc * gather}, "operands: got the name gather"),
        ({"scale_a": Spec((256, 1), "fp32")}, r"scale_a: got shape \(256, 1\); for a of shape \(90, 128\)"),
        ({"config": COOPERATIVE.replace(cluster=(2, 2))}, r"cluster: got \(2, 2\) with a gather.*use \(2, 1\)"),
        ({"config": COOPERATIVE.replace(cluster=(2, 1), swap_ab=True)}, r"cluster: got \(2, 1\) with a .*use \(1, 1\)"),
        ({"a": Spec((90, 128), "fp32"), "b": Spec((4, 128, 64), "fp32"), "out": Spec((300, 64), "fp32"),
          "precision": "3xtf32", "config": Config("cooperative", (64, 64, 16), (1, 1), consumers=1)},
         'precision: got "3xtf32" with a gather and cooperative; use "tf32"'),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    check_refused(GIVEN, wrong, message)


def test_a_chosen_config_does_not_multicast_gathered_rows() -> None:
    for t, m, n, k in ((4096, 32768, 6144, 7168), (512, 1024, 2816, 2048), (16, 128, 4096, 4096)):
        plan = gemmsmith.plan(
            Spec((t, k), "bf16"), Spec((32, k, n), "bf16"), offsets=Spec((32,), "int32"), gather=Spec((m,), "int32"),
            grouping=Grouping("offsets", gathers=True),
        )  # fmt: skip
        assert plan.config.cluster["ba".index("b" if plan.config.swap_ab else "a")] == 1
        assert plan.resources.spill_store_bytes == 0


def test_a_plan_takes_other_shapes() -> None:
    def spec(*shape: int, dtype: str = "bf16") -> Spec:
        return Spec(shape, dtype)

    plan = gemmsmith.plan(
        spec(80, 64), spec(3, 64, 64), out=spec(200, 64), sizes=spec(3, dtype="int32"), gather=spec(128, dtype="int32"),
        scatter=spec(128, dtype="int32"), grouping=Grouping("sizes", gathers=True, scatters=True), backend="sim",
    )  # fmt: skip
    rng = np.random.default_rng(12)
    for t, m, s in ((80, 128, 200), (1, 128, 200), (300, 90, 95)):
        sizes = np.array([m // 2, 0, m // 3], np.int32)
        a, b, out = random(rng, "bf16", t, 64), random(rng, "bf16", 3, 64, 64), np.full((s, 64), MARK, NUMPY["bf16"])
        rows, slots = random_rows(rng, m, t), unique_rows(rng, m, s)
        plan.run(a, b, out, sizes=sizes, gather=rows, scatter=slots)
        want = scattered(np.full((s, 64), MARK), products(gathered(a, rows), b.astype(float), sizes), slots)
        np.testing.assert_allclose(out.astype(float), want, rtol=2.0**-8, atol=2.0**-10)
