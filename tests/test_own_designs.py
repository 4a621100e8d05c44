"""Designs from outside the package: a grouped GEMM and gathered rows, right, refused where they cannot be, and with
planted errors that the simulator reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from examples import own_attention
from examples.own_gather import GATHER, gather
from examples.own_grouped import GROUPED, GroupedTileScheduler
from examples.own_int4 import GROUP

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Spec
from gemmsmith.backends.cuda import kernel_loader
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.backends.reference import bounds
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import PipelineTmaAsync
from gemmsmith.collective.tma_mainloop import TmaMainloop
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.kernels import KernelSpec, OperandCoord, WorkTile, record_cooperative
from gemmsmith.lang import Builder, Value
from gemmsmith.lang.launch import Launch

EXAMPLES = Path(__file__).parents[1] / "examples"


def int4_weights(rng: np.random.Generator, k: int, n: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Weights in pairs, (k / 2, n); their scales; and what they are in float64, rounded to `dtype`."""
    codes, scales = rng.integers(-8, 8, (n, k)), rng.uniform(0.5, 2, (-(-k // GROUP), n)).astype(np.float32)
    pairs = ((codes[:, ::2] & 15) | (codes[:, 1::2] & 15) << 4).astype(np.uint8).T
    weights = codes.T.astype(np.float32) * np.repeat(scales, GROUP, 0)[:k]
    return pairs, scales, weights.astype(dtype)


def bf16(rng: np.random.Generator, *shape: int, transposed: bool = False) -> Any:
    x = rng.standard_normal((*shape[:-2], shape[-1], shape[-2]) if transposed else shape).astype(ml_dtypes.bfloat16)
    return np.swapaxes(x, -1, -2) if transposed else x


def ends_of(rng: np.random.Generator, m: int, groups: int) -> Any:
    """Ends of groups at any rows; some groups are empty."""
    return np.sort(np.append(rng.integers(0, m + 1, groups - 1), m)).astype(np.int32)


@pytest.mark.parametrize(
    ("name", "limit"), [("own_grouped", 100), ("own_gather", 120), ("own_attention", 120), ("own_int4", 130)]
)
def test_they_are_short(name: str, limit: int) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < limit


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_grouped_products(cluster: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, n, k, groups = int(rng.integers(1, 500)), 8 * int(rng.integers(1, 30)), int(rng.integers(1, 200)), 5
    a, b = bf16(rng, m, k), bf16(rng, groups, k, n, transposed=seed < 2)
    ends, bias, out = ends_of(rng, m, groups), rng.standard_normal(n), np.full((m, n), np.nan, np.float32)
    config, added = Config("grouped", (128, 64, 64), cluster), {"bias": bias.astype(np.float32)}
    done = gemmsmith.simulate(
        a, b, ends=ends, epilogue=lambda acc, bias: acc - bias, **added, out=out, out_dtype="fp32", config=config,
        seed=seed,
    )  # fmt: skip
    assert done.hazards == []
    for group, rows in enumerate(np.split(np.arange(m), ends[:-1])):
        want = a[rows].astype(float) @ b[group].astype(float) - added["bias"]
        np.testing.assert_allclose(out[rows], want, rtol=1e-4, atol=1e-3)


def test_a_plan_takes_other_ends_and_shapes() -> None:
    """Those of each run; a run that repeats another's layouts finds its launches."""
    rng, config = np.random.default_rng(5), Config("grouped", (128, 64, 64), (1, 1))
    plan = gemmsmith.plan(
        Spec((128, 64), "bf16"), Spec((2, 64, 64), "bf16"), ends=Spec((2,), "int32"), config=config, backend="sim"
    )
    for m, groups in ((128, 2), (128, 2), (200, 3)):
        a, b, ends = bf16(rng, m, 64), bf16(rng, groups, 64, 64), ends_of(rng, m, groups)
        found = plan.run(a, b, ends=ends).astype(float)
        want = np.concatenate(
            [x @ y for x, y in zip(np.split(a.astype(float), ends[:-1]), b.astype(float), strict=True)]
        )
        np.testing.assert_allclose(found, want, rtol=2.0**-8, atol=1e-2)


@pytest.mark.parametrize("seed", range(3))
def test_gathered_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, m, n, k = (int(x) for x in rng.integers(1, 300, 4))
    a, b = bf16(rng, tokens, k), bf16(rng, k, n, transposed=seed == 1)
    rows, out = rng.integers(0, tokens, m, dtype=np.int32), np.full((m, n), np.nan, ml_dtypes.bfloat16)
    done = gemmsmith.simulate(a, b, rows=rows, out=out, config=Config("gather", (128, 64, 64), (1, 2)), seed=seed)
    assert done.hazards == []
    bounds.check(out, a[rows], b, FP32, BF16).require()


@pytest.mark.parametrize("name", ["grouped", "gather"])
def test_a_layout_that_a_design_does_not_read_is_copied(name: str) -> None:
    rng, config = np.random.default_rng(0), Config(name, (128, 64, 64), (1, 1))
    a, b, out = bf16(rng, 150, 72, transposed=True), bf16(rng, 72, 64), np.full((150, 64), np.nan, ml_dtypes.bfloat16)
    rows, ends = rng.permutation(150).astype(np.int32), np.array([150], np.int32)
    given = {"rows": rows, "b": b} if name == "gather" else {"ends": ends, "b": b[None]}
    assert gemmsmith.simulate(a, **given, out=out, config=config).hazards == []
    bounds.check(out, a[rows] if name == "gather" else a, b, FP32, BF16).require()


INT4_CONFIG = Config("int4_weights", (64, 64, 64), (1, 1), 3, 1)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_int4_weights(dtype: Any, signed: bool, rng: np.random.Generator) -> None:
    m, n, k = (int(x) for x in rng.integers(1, (150, 150, 6)))
    n, k = 8 * -(-n // 8), 64 * k - 32
    a, (b, scales, weights) = rng.standard_normal((m, k)).astype(dtype), int4_weights(rng, k, n, dtype)
    out = np.full((m, n), np.nan, np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    done = gemmsmith.simulate(
        a, b.view(np.int8) if signed else b, scales=scales, epilogue=lambda acc, bias: acc + bias, bias=bias, out=out,
        out_dtype="fp32", config=INT4_CONFIG,
    )  # fmt: skip
    assert done.hazards == []
    want = a.astype(float) @ weights.astype(float) + bias
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5 * k)


def test_int4_weights_in_batches_and_columns(rng: np.random.Generator) -> None:
    """D's columns may be contiguous; rows of a that are not are copied first; the default dtype is a's."""
    a, (b, scales, weights) = bf16(rng, 70, 192, transposed=True), int4_weights(rng, 192, 72, ml_dtypes.bfloat16)
    out = np.full((72, 70), np.nan, ml_dtypes.bfloat16).T
    assert gemmsmith.simulate(a, b, scales=scales, out=out, config=INT4_CONFIG).hazards == []
    bounds.check(out, a, weights, FP32, BF16).require()
    plan = gemmsmith.plan(a, b, scales=scales, config=INT4_CONFIG, backend="sim")
    again, other = int4_weights(rng, 192, 72, ml_dtypes.bfloat16), bf16(rng, 33, 192, transposed=True)
    found = plan.run(other, again[0], scales=again[1])
    assert found.dtype == ml_dtypes.bfloat16
    bounds.check(found, other, again[2], FP32, BF16).require()


W4: dict[str, Any] = {
    "a": Spec((64, 128), "bf16"), "b": Spec((64, 72), "int8", (1, 64)), "scales": Spec((2, 72), "fp32"),
    "config": INT4_CONFIG,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": None, "scales": None}, "b: got dtype int8 with a of bf16; .*, or the design int4_weights"),
        ({"config": Config(), "scales": None}, "b: got dtype int8 with a of bf16; .*, or the design int4_weights"),
        ({"b": Spec((128, 72), "bf16")}, "design: got int4_weights for operands of bf16 accumulated in fp32; use the"),
        ({"b": Spec((60, 72), "int8", (1, 60))}, "b: got shape .* needs .k = 128, n"),
        ({"b": Spec((64, 72), "int8")}, "b: got strides .*; use 1 along k, where int4 share a byte"),
        ({"b": Spec((64, 72), "int8", (1, 72))}, "b: got int4 elements that cannot be read in place"),
        ({"scales": Spec((3, 72), "fp32")}, "scales: got 3 rows for k = 128; use 2"),
        ({"scales": None}, "scales: got none"),
        ({"config": INT4_CONFIG.replace(swap_ab=True)}, "swap_ab: got True for the design int4_weights"),
        ({"config": INT4_CONFIG.replace(splits=2)}, "splits: got 2; int4_weights does not support split-K"),
        ({"config": INT4_CONFIG.replace(tile=(64, 64, 192))}, "tile K: got 192 with operands of int4; use 64, 128"),
        ({"precision": "tf32"}, "precision: got 'tf32' for operands of bf16"),
        ({"accumulate": "fp16"}, "accumulate: got 'fp16' for operands of bf16"),
    ],
)  # fmt: skip
def test_what_int4_weights_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {name: x for name, x in {**W4, **changes}.items() if x is not None}
    with pytest.raises((ArgumentError, ConfigError), match=message):
        _ = gemmsmith.plan(**given)._planned.launches


def variant(design: gemmsmith.Design, name: str, record: Callable[[Builder, KernelSpec], None]) -> Config:
    gemmsmith.register_design(replace(design, name=name, record=record))
    return Config(name, (128, 64, 64), (1, 1))


def test_rows_of_two_groups_in_one_tile_are_a_race() -> None:
    class Unclipped(GroupedTileScheduler):
        def work_tile(self, tile: Value) -> WorkTile:
            work = super().work_tile(tile)
            return replace(work, a=OperandCoord(work.a.mn, work.a.batch))

    def record(k: Builder, spec: KernelSpec) -> None:
        record_cooperative(k, spec, lambda spec: Unclipped(k, spec))

    config, rng = variant(GROUPED, "grouped_unclipped", record), np.random
    a, b, ends = bf16(rng.default_rng(0), 200, 64), bf16(rng.default_rng(1), 2, 64, 64), np.array([70, 200], np.int32)
    hazards = gemmsmith.simulate(a, b, ends=ends, config=config).hazards
    assert any("write after write of out" in x.message for x in hazards)


def without_proxy_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TmaMainloop, "consumer_wait", lambda self, read, token=None: self.pipeline.consumer_wait(read))


def without_acquire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineTmaAsync, "non_tma_producer_acquire", lambda self, write: None)


@pytest.mark.parametrize("plant", [without_proxy_fence, without_acquire])
def test_a_planted_race_of_gathered_rows_is_reported(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    config, rng = variant(GATHER, plant.__name__, gather), np.random.default_rng(0)
    a, b, rows = bf16(rng, 100, 640), bf16(rng, 640, 64), rng.integers(0, 100, 130, dtype=np.int32)
    assert gemmsmith.simulate(a, b, rows=rows, config=config).hazards


def attention_inputs(rng: np.random.Generator, heads: int, queries: int, keys: int) -> dict[str, Any]:
    rows = {"q": queries, "k": keys, "v": keys}
    return {
        name: rng.standard_normal((heads, n, own_attention.DIM)).astype(ml_dtypes.bfloat16) for name, n in rows.items()
    }


def softmax_of_scores_times_values(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.astype(float) for x in (q, k, v))
    scores = q @ np.swapaxes(k, 1, 2) / np.sqrt(q.shape[2])
    weights = np.exp(scores - scores.max(2, keepdims=True))
    return weights @ v / weights.sum(2, keepdims=True)


def attention_launch(heads: int, queries: int, keys: int) -> Launch:
    kernel, task = own_attention.attention(), own_attention.task(heads, queries, keys)
    launch = Launch.from_kernel(kernel, task)
    return replace(launch, arguments={**launch.arguments, "out": Pointer("out")})


def simulated_attention(inputs: dict[str, Any], seed: int = 0) -> tuple[Any, list[Any]]:
    memory, out = GlobalMemory(), np.full(inputs["q"].shape, np.nan, ml_dtypes.bfloat16)
    addresses = {name: memory.add_buffer(x, name, writable=False) for name, x in inputs.items()}
    addresses["out"] = memory.add_buffer(out, "out")
    launch = attention_launch(*inputs["q"].shape[:2], inputs["k"].shape[1])
    done = simulate(launch.kernel, launch.work_clusters, launch.resolve(addresses), memory, seed=seed)
    return out, done.hazards


@pytest.mark.parametrize(("heads", "queries", "keys"), [(1, 1, 1), (2, 130, 200), (1, 128, 64), (3, 65, 321)])
def test_attention(heads: int, queries: int, keys: int) -> None:
    inputs = attention_inputs(np.random.default_rng(queries), heads, queries, keys)
    out, hazards = simulated_attention(inputs, seed=heads)
    assert hazards == []
    np.testing.assert_allclose(out.astype(float), softmax_of_scores_times_values(**inputs), rtol=1e-2, atol=1e-2)


def test_launch_takes_the_arrays_of_tensor_maps() -> None:
    inputs, out = attention_inputs(np.random.default_rng(3), 2, 70, 100), np.empty((2, 70, 64), ml_dtypes.bfloat16)
    kernel, task = own_attention.attention(), own_attention.task(2, 70, 100)
    gemmsmith.launch(kernel, task, **inputs, out=out)
    np.testing.assert_allclose(out.astype(float), softmax_of_scores_times_values(**inputs), rtol=1e-2, atol=1e-2)
    with pytest.raises(ArgumentError, match="got q, out; attention takes k, out, q, v"):
        gemmsmith.launch(kernel, task, q=inputs["q"], out=out)


def test_a_stage_released_while_its_values_are_multiplied_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, calls = Accumulator.wait, count()
    monkeypatch.setattr(Accumulator, "wait", lambda self, pending: None if next(calls) else wait(self, pending))
    _, hazards = simulated_attention(attention_inputs(np.random.default_rng(0), 1, 64, 700))
    assert any("write after read" in x.message for x in hazards)


def test_attention_compiles_without_spills() -> None:
    kernel = own_attention.attention()
    resources = compile_source(kernel.source, kernel.name).resources
    assert (resources.spill_store_bytes, resources.stack_bytes, resources.advisories) == (0, 0, ())


GIVEN: dict[str, Any] = {
    "a": Spec((256, 128), "bf16"), "b": Spec((4, 128, 64), "bf16"), "ends": Spec((4,), "int32"),
    "config": Config("grouped"),
}  # fmt: skip
GATHERED: dict[str, Any] = {
    "a": Spec((999, 4096), "bf16"), "b": Spec((4096, 4096), "bf16", (1, 4096)), "rows": Spec((5000,), "int32"),
    "config": Config("gather", (128, 256, 64)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ends": None}, "ends: got none"),
        ({"ends": Spec((4,), "int64")}, "ends: got int64"),
        ({"ends": Spec((4,), "int32", (2,))}, "strides"),
        ({"ends": Spec((3,), "int32")}, r"ends: got shape \(3,\); the design grouped needs \(g = 4\)"),
        ({"b": Spec((128, 64), "bf16")}, "b: got shape"),
        ({"b": Spec((4, 120, 64), "bf16")}, "k = 128"),
    ],
)
def test_wrong_arrays_are_refused(wrong: dict[str, Any], message: str) -> None:
    given = {name: x for name, x in {**GIVEN, **wrong}.items() if x is not None}
    with pytest.raises(ArgumentError, match=message):
        gemmsmith.plan(**given)


@pytest.mark.parametrize("columns", [24, 40, 72, 136])
def test_tiles_whose_rows_are_no_power_of_two(columns: int) -> None:
    rng = np.random.default_rng(columns)
    a, b, ends = bf16(rng, 150, 64), bf16(rng, 2, 64, columns), np.array([70, 150], np.int32)
    config, out = Config("grouped", (128, columns, 64), (1, 1)), np.full((150, columns), np.nan, ml_dtypes.bfloat16)
    assert gemmsmith.simulate(a, b, ends=ends, out=out, config=config).hazards == []
    for group, rows in enumerate(np.split(np.arange(150), ends[:-1])):
        bounds.check(out[rows], a[rows], b[group], FP32, BF16).require()


def test_no_rows_and_scales() -> None:
    rng, zeros = np.random.default_rng(0), np.zeros((0, 64), ml_dtypes.bfloat16)
    config = Config("grouped", (128, 64, 64), (1, 1))
    b, ends = bf16(rng, 2, 64, 72), np.zeros(2, np.int32)
    assert gemmsmith.gemm(zeros, b, ends=ends, config=config, backend="sim").shape == (0, 72)
    a, rows = bf16(rng, 40, 64), rng.integers(0, 40, 30, dtype=np.int32)
    given: dict[str, Any] = {"rows": rows, "config": Config("gather", (128, 64, 64), (1, 1)), "backend": "sim"}
    with pytest.raises(ArgumentError, match=r"scale_a: got shape \(40, 1\); a's are not the product's"):
        gemmsmith.gemm(a, b[0], scale_a=np.ones((40, 1), np.float32), **given)
    found = gemmsmith.gemm(a, b[0], scale_b=np.full((1, 72), 2, np.float32), **given)
    bounds.check(found, (2 * a[rows]).astype(ml_dtypes.bfloat16), b[0], FP32, BF16).require()


@pytest.mark.parametrize("shapes", ["", "mk,kn->mn", "mk,gkn,g->mngk", "mk,gkn,g->mx", "mk,gkn,g"])
def test_shapes_of_a_design_are_checked(shapes: str) -> None:
    with pytest.raises(ConfigError, match="shapes: got"):
        replace(GROUPED, shapes=shapes)
    with pytest.raises(ConfigError, match="arrays: got 'int32' for ends"):
        replace(GROUPED, arrays={"ends": "int32"})


def test_what_the_designs_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="swap_ab"):
        gemmsmith.plan(**{**GIVEN, "config": Config("grouped", swap_ab=True)})
    with pytest.raises(ConfigError, match="got a reduction"):
        gemmsmith.plan(**GIVEN, epilogue=lambda acc: {"sums": acc.sum(1)})
    zeros = np.zeros((8, 8), ml_dtypes.bfloat16)
    with pytest.raises(ArgumentError, match="reference"):
        gemmsmith.gemm(zeros, zeros, rows=np.zeros(4, np.int32), config=Config("gather", (128, 64, 64)))


@pytest.mark.parametrize("a", [(1, 0), (0, 1)])
def test_a_column_major_result_is_stored_row_by_row(a: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x, b, ends = bf16(rng, 150, 64), bf16(rng, 3, 64, 72), np.array([41, 90, 150], np.int32)
    out = (
        np.full((72, 150), np.nan, ml_dtypes.bfloat16).T
        if a == (1, 0)
        else np.full((150, 72), np.nan, ml_dtypes.bfloat16)
    )
    done = gemmsmith.simulate(x, b, ends=ends, out=out, config=Config("grouped", (128, 64, 64), (1, 1)))
    assert done.hazards == []
    for group, rows in enumerate(np.split(np.arange(150), ends[:-1])):
        bounds.check(out[rows], x[rows], b[group], FP32, BF16).require()


@pytest.mark.parametrize("given", [GIVEN, GATHERED, W4], ids=["grouped", "gather", "int4"])
def test_they_compile_without_spills(given: dict[str, Any]) -> None:
    resources = gemmsmith.plan(**given).resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        Config("grouped"),
        Config("grouped", (128, 128, 64), (1, 1), 6),
        Config("grouped", (64, 256, 64), (1, 2), consumers=1),
    ],
    ids=str,
)
def test_grouped_products_on_a_gpu(config: Config) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for m, n, k, groups in ((1000, 520, 328, 7), (4096, 1024, 512, 64), (65, 8, 8, 3)):
        a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((m, k), (groups, n, k)))
        ends = ends_of(rng, m, groups)
        out = torch.full((m, n), float("nan"), device="cuda").bfloat16()
        gemmsmith.gemm(a, b.mT, ends=torch.from_numpy(ends).cuda(), out=out, config=config)
        for group, rows in enumerate(np.split(np.arange(m), ends[:-1])):
            want = a[rows].double() @ b[group].double().mT
            assert ((out[rows].double() - want).abs() <= 2.0**-8 * want.abs() + 1e-2).all()


@pytest.mark.torch
@pytest.mark.gpu
def test_gathered_rows_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    for tokens, m, n, k in ((1000, 3000, 520, 328), (8192, 4096, 2048, 4096), (5, 300, 8, 8)):
        a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((tokens, k), (n, k)))
        rows = torch.randint(0, tokens, (m,), device="cuda", dtype=torch.int32)
        out = torch.full((m, n), float("nan"), device="cuda").bfloat16()
        for _ in range(20):  # a race would show as an error that moves
            gemmsmith.gemm(a, b.mT, rows=rows, out=out.fill_(float("nan")), config=Config("gather", (128, 256, 64)))
            want = a[rows].float() @ b.float().mT
            assert ((out.float() - want).abs() <= 2.0**-8 * want.abs() + 3e-2).all()


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_int4_weights_on_a_gpu(dtype: str, rng: np.random.Generator) -> None:
    torch, config = pytest.importorskip("torch"), Config("int4_weights", (64, 128, 64), (1, 1))
    for m, n, k in ((1000, 520, 320), (16, 4096, 4096), (300, 72, 32)):
        a = torch.randn(m, k, device="cuda", dtype=getattr(torch, dtype))
        b, scales, weights = int4_weights(rng, k, n, ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
        b, scales = torch.from_numpy(np.ascontiguousarray(b.T)).cuda().T, torch.from_numpy(scales).cuda()
        out = torch.full((m, n), float("nan"), device="cuda")
        gemmsmith.gemm(a, b, scales=scales, out=out, config=config)
        want = a.double().cpu().numpy() @ weights.astype(float)
        np.testing.assert_allclose(out.cpu().numpy(), want, rtol=1e-5, atol=1e-5 * k)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "queries", "keys"), [(1, 1, 1), (3, 500, 700), (40, 2048, 1024)])
def test_attention_on_a_gpu(heads: int, queries: int, keys: int) -> None:
    inputs = attention_inputs(np.random.default_rng(queries), heads, queries, keys)
    with kernel_loader.device_guard(0):
        arrays = {name: DeviceArray.from_numpy(x) for name, x in inputs.items()}
        arrays["out"] = DeviceArray.from_numpy(np.full(inputs["q"].shape, np.nan, ml_dtypes.bfloat16))
        gemmsmith.launch(own_attention.attention(), own_attention.task(heads, queries, keys), **arrays)
        out = arrays["out"].numpy()
    np.testing.assert_allclose(out.astype(float), softmax_of_scores_times_values(**inputs), rtol=2e-2, atol=1e-2)
