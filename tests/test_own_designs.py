"""Designs from outside the package: a grouped GEMM and gathered rows, right, refused where they cannot be, and with
planted errors that the simulator reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from examples.own_gather import GATHER, gather
from examples.own_grouped import GROUPED, GroupedTileScheduler

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Spec
from gemmsmith.backends.reference import bounds
from gemmsmith.collective.pipeline import PipelineTmaAsync
from gemmsmith.collective.tma_mainloop import TmaMainloop
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.spec import KernelSpec
from gemmsmith.kernels.cooperative import cooperative
from gemmsmith.lang.builder import Builder

EXAMPLES = Path(__file__).parents[1] / "examples"


def bf16(rng: np.random.Generator, *shape: int, transposed: bool = False) -> Any:
    x = rng.standard_normal((*shape[:-2], shape[-1], shape[-2]) if transposed else shape).astype(ml_dtypes.bfloat16)
    return np.swapaxes(x, -1, -2) if transposed else x


def ends_of(rng: np.random.Generator, m: int, groups: int) -> Any:
    """Ends of groups at any rows; some groups are empty."""
    return np.sort(np.append(rng.integers(0, m + 1, groups - 1), m)).astype(np.int32)


@pytest.mark.parametrize(("name", "limit"), [("own_grouped", 100), ("own_gather", 120)])
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


@pytest.mark.parametrize("seed", range(3))
def test_gathered_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, m, n, k = (int(x) for x in rng.integers(1, 300, 4))
    a, b = bf16(rng, tokens, k), bf16(rng, k, n, transposed=seed == 1)
    rows, out = rng.integers(0, tokens, m, dtype=np.int32), np.full((m, n), np.nan, ml_dtypes.bfloat16)
    done = gemmsmith.simulate(a, b, rows=rows, out=out, config=Config("gather", (128, 64, 64), (1, 2)), seed=seed)
    assert done.hazards == []
    bounds.check(out, a[rows], b, FP32, BF16).require()


def variant(design: gemmsmith.Design, name: str, record: Callable[[Builder, KernelSpec], None]) -> Config:
    gemmsmith.register_design(replace(design, name=name, record=record))
    return Config(name, (128, 64, 64), (1, 1))


def test_rows_of_two_groups_in_one_tile_are_a_race() -> None:
    class Unclipped(GroupedTileScheduler):
        def __init__(self, spec: KernelSpec) -> None:
            super().__init__(spec, clip_rows=False)

    config, rng = variant(GROUPED, "grouped_unclipped", lambda k, spec: cooperative(k, spec, Unclipped)), np.random
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


def test_what_the_designs_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="swap_ab"):
        gemmsmith.plan(**{**GIVEN, "config": Config("grouped", swap_ab=True)})
    with pytest.raises(ConfigError, match="a: got column-major with grouped"):
        gemmsmith.plan(**{**GIVEN, "a": Spec((256, 128), "bf16", (1, 256))})
    with pytest.raises(ConfigError, match="reductions"):
        gemmsmith.plan(**GIVEN, epilogue=lambda acc: {"sums": acc.sum(1)})
    with pytest.raises(ConfigError, match="contiguous"):
        _ = gemmsmith.plan(**{**GATHERED, "a": Spec((64, 4096), "bf16", (1, 64))}).kernel
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


@pytest.mark.parametrize("given", [GIVEN, GATHERED], ids=["grouped", "gather"])
def test_they_compile_without_spills(given: dict[str, Any]) -> None:
    resources = gemmsmith.plan(**given).resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
