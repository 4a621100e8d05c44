"""Tuning on a GPU: what it finds and keeps; without one it says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner

import gemmsmith
from gemmsmith import Config, Plan, Spec
from gemmsmith.backends.cuda import cuda_graph, driver, kernel_loader, memory
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.cli import main
from gemmsmith.core.chip import CHIPS, HOPPER
from gemmsmith.core.dtypes import BF16
from gemmsmith.core.scalars import ceil_div
from gemmsmith.host import planned_gemm
from gemmsmith.tuning import measured_configs, search
from gemmsmith.tuning.choice import candidates, choose_config
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.gpus import H100, H200, Gpu


def test_tuning_needs_a_gpu() -> None:
    if driver.is_available():
        pytest.skip("there is one")
    with pytest.raises(gemmsmith.DeviceError, match="tune: this machine has no GPU to measure on; use"):
        gemmsmith.tune(Spec((64, 64), "bf16"), Spec((64, 64), "bf16"))
    done = CliRunner().invoke(main, ["tune", "64x64x64"])
    assert done.exit_code == 2
    assert "Error: tune: this machine has no GPU" in done.output
    assert "backend=" not in done.output
    assert CliRunner().invoke(main, ["tune", "64x64"]).exit_code == 2


@pytest.mark.gpu
def test_tuning_finds_and_keeps(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    a, b = Spec((64, 1024), "bf16"), Spec((1024, 2048), "bf16", (1, 1024))
    steps: list[str] = []
    found = gemmsmith.tune(a, b, max_configs=8, on_progress=steps.append)
    assert len(found) >= 4
    assert found[0].us > 1
    assert {"compile", "measure"} == set(steps)
    assert gemmsmith.plan(a, b).config == found[0].config


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("fp8_e4m3", {}), ("fp8_e5m2", {"accumulate": "fast"}), ("int8", {}), ("fp32", {"precision": "3xtf32"})],
)
def test_tuning_of_other_operands(dtype: str, options: dict[str, str], tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    a, b = Spec((64, 1024), dtype), Spec((1024, 2048), dtype, (1, 1024))
    found = gemmsmith.tune(a, b, max_configs=4, **options)
    assert gemmsmith.plan(a, b, **options).config == found[0].config


def test_what_cannot_be_multiplied_is_refused_first() -> None:
    with pytest.raises(gemmsmith.ArgumentError, match="b: got dtype fp16 with a of bf16"):
        gemmsmith.tune(Spec((64, 64), "bf16"), Spec((64, 64), "fp16"))


class Timed:
    """Stands for the GPU: a config takes as long as its tile is wide."""

    stream = SimpleNamespace(synchronize=lambda: None)

    def __init__(self, make_sets: object, plans: dict[Config, Plan], flops: float) -> None:
        assert len(plans) > 4

    def measure(self, config: Config, microseconds: float) -> float:
        return config.tile[1] + config.tile[0] / 1000 + config.splits / 100


class Memory:
    """Stands for an array on the GPU."""

    patterns: ClassVar[list[np.ndarray]] = []

    def __init__(self, nbytes: int, *layout: Any) -> None:
        self.nbytes = nbytes

    def fill(self, pattern: np.ndarray) -> None:
        self.patterns.append(pattern)

    @classmethod
    def allocate(cls, nbytes: int) -> Memory:
        return cls(nbytes)


class Replayed:
    """Stands for a graph of calls, each of which takes 5 microseconds."""

    def __init__(self, calls: Callable[[], None], stream: object) -> None:
        calls()

    def time_replays(self, count: int) -> float:
        REPLAYS.append(count)
        return 5.0 * count * CALLS


REPLAYS: list[int] = []
CALLS = 20


@pytest.mark.parametrize(("shape", "sets"), [((1024, 1024, 2048), 12), ((16384, 16384, 1024), 2), ((0, 64, 64), 15360)])
def test_operands_exceed_the_l2(shape: tuple[int, int, int], sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, so that no call finds its own there; a call's time is its share of a replay's, of warm ones if it is
    long."""
    monkeypatch.setattr(memory, "DeviceArray", Memory)
    monkeypatch.setattr(cuda_graph, "CudaGraph", Replayed)
    monkeypatch.setattr(cuda_graph, "Stream", lambda: SimpleNamespace(handle=0))
    monkeypatch.setattr(Memory, "patterns", [])
    m, n, k = shape
    runs: list[dict[str, Any]] = []
    plan = SimpleNamespace(
        run=lambda workspace, **arrays: runs.append(arrays), launches=SimpleNamespace(workspace_bytes=64)
    )
    make_sets = partial(search.random_sets, Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)), BF16)
    bench = search._Bench(make_sets, {Config(): plan}, 2 * m * n * k)
    assert len(bench.sets) == sets
    nbytes = sum(x.nbytes for arrays in bench.sets for x in arrays.values())
    assert {name: x.nbytes for name, x in bench.sets[0].items()} == {"a": 2 * m * k, "b": 2 * k * n, "out": 2 * m * n}
    assert nbytes >= 2 * 60 * 2**20
    assert {len(x) for x in Memory.patterns} == {4 * 2**20}  # 8 MB on the host, whatever the size
    REPLAYS.clear()
    assert bench.measure(Config(), 1000.0) == pytest.approx(5.0 * CALLS / sets)
    assert runs == [*bench.sets, *bench.sets]
    assert ([1, 10, 10] if 2 * m * n * k > 5e9 else [1, 10]) == REPLAYS


@pytest.mark.parametrize("gpu", [H100, H200], ids=lambda gpu: gpu.name)
def test_the_configs_to_measure_are_the_models_first(gpu: Gpu) -> None:
    """The untuned choice, and then, in any order of the sums, what the model ranks first for the GPU."""
    binding = bind(Request(Spec((4096, 1024), "bf16"), Spec((1024, 4096), "bf16", (1, 1024))))
    found = candidates(binding, HOPPER, gpu, Config(), 7, any_order=True)
    assert found == [Config(), *rank_configs(binding.problem, limit=6, gpu=gpu)]
    others = candidates(binding, CHIPS["sm_80"], gpu, Config("mma_multistage", chip="sm_80"), 7, any_order=True)
    assert len(others) == 7
    assert {c.chip for c in others} == {"sm_80"}


@pytest.mark.parametrize(
    ("shape", "epilogue"),
    [
        ((178, 6144, 16384), None), ((64, 4096, 4096), None), ((128, 1280, 3416), None), ((8192, 8192, 8192), None),
        ((512, 2048, 4096), lambda acc: {"y": acc, "s": acc.sum(0)}), ((1024, 1024, 2048), lambda acc: acc.sum(1)),
    ],
)  # fmt: skip
def test_configs_that_keep_the_bits_add_in_one_order(shape: tuple[int, int, int], epilogue: Any) -> None:
    """Whatever is measured: no part of K depends on tiles or waves, and reductions have the untuned choice's tiles."""
    m, n, k = shape
    binding = bind(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)), epilogue=epilogue))
    untuned = choose_config(binding, HOPPER, H200).config
    found = candidates(binding, HOPPER, H200, untuned, 16, any_order=False)
    assert len(found) > 1
    assert {(c.splits, c.serpentine) for c in found} == {(1, False)}
    parts = {
        ceil_div(ceil_div(k, c.tile[2]), c.cluster_splits) * c.tile[2] if c.cluster_splits > 1 else 0 for c in found
    }
    assert len(parts) == 1
    if epilogue:
        assert {c.tile for c in found} == {untuned.tile}
    if untuned.splits == 1:
        assert found[0] == untuned.replace(serpentine=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "design", "narrowest"),
    [("bf16", "mma_multistage", (64, 32)), ("int8", "mma_multistage", (64, 32)), ("fp32", "sgemm", (256, 16))],
)
def test_tuning_on_another_chip(
    dtype: str, design: str, narrowest: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it keeps is taken on such chips alone, for fused products where it does not spill."""

    def on(chip: str) -> None:
        capability = divmod(CHIPS[chip].capability, 10)
        found = driver.DeviceAttributes("NVIDIA", capability, 84, CHIPS[chip].max_shared_bytes_per_cta)
        monkeypatch.setattr(driver, "device_attributes", lambda device: found)
        monkeypatch.setattr(planned_gemm, "chip_of", lambda a: CHIPS[chip])

    a, b = Spec((512, 1024), dtype), Spec((1024, 2048), dtype, (1, 1024))
    before = gemmsmith.plan(a, b).config
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "is_available", lambda: True)
    monkeypatch.setattr(kernel_loader, "device_guard", lambda device: nullcontext())
    monkeypatch.setattr(search, "_Bench", Timed)
    targets: set[str] = set()
    monkeypatch.setattr(search, "compile_all", lambda kernels, step: targets.update(target for *_, target in kernels))
    monkeypatch.setattr(measured_configs, "_generation", lambda device: "here")
    monkeypatch.setattr(measured_configs, "_about", lambda device: {})
    on("sm_86")
    chosen, found = gemmsmith.plan(a, b).config, gemmsmith.tune(a, b)
    assert targets == {"sm_86"}
    assert (found[0].config.design, found[0].config.tile[:2], found[0].config.chip) == (design, narrowest, "sm_86")
    plan = gemmsmith.plan(a, b)
    assert plan.config == found[0].config != chosen
    assert plan.origin == "tuned for sm_86"
    assert gemmsmith.plan(a, b, epilogue=lambda acc: acc.relu()).config.tile == plan.config.tile
    assert gemmsmith.plan(Spec((5000, 1024), dtype), b).why.split("\n")[0].endswith("chosen for sm_86")
    on("sm_80")
    assert gemmsmith.plan(a, b).why.split("\n")[0].endswith("chosen for sm_80")
    on("sm_90")
    assert gemmsmith.plan(a, b).config == before
