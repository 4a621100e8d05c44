"""What a block of autotune measures, and when; the GPU is played by a function that knows all times."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, DeviceError
from gemmsmith.backends.cuda import driver, kernel_loader
from gemmsmith.binding.request import Request
from gemmsmith.host import autotune as module
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.search import Measured

Times = Callable[[int, Config], float]


class Gpu:
    """Stands for the GPU: `us(i, config)` is the time of the i-th config that is measured for a request."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.configs: list[list[Config]] = []
        self.us: Times = lambda i, config: 100.0 - i
        self.capturing = False

    def measure(self, request: Request, configs: Iterable[Config], *others: Any, kept: Config) -> list[Measured]:
        configs = list(configs)
        assert configs[0] == kept
        self.requests.append(request)
        self.configs.append(configs)
        return sorted((Measured(c, self.us(i, c)) for i, c in enumerate(configs)), key=lambda x: x.us)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu()
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measured_configs, "folder", lambda device=0: tmp_path / "tuned")
    monkeypatch.setattr(measured_configs, "_about", lambda device: {})
    monkeypatch.setattr(measured_configs, "_SAVED", {})
    monkeypatch.setattr(module, "_UNTUNABLE", set())
    monkeypatch.setattr(module, "measure", found.measure)
    monkeypatch.setattr(module, "resolve_backend", lambda backend, x, name: "cuda")
    monkeypatch.setattr(kernel_loader, "device_guard", lambda device: nullcontext())
    monkeypatch.setattr(kernel_loader, "relaxed_capture_mode", nullcontext)
    monkeypatch.setattr(kernel_loader, "is_capturing", lambda stream: found.capturing)
    attributes = driver.DeviceAttributes("NVIDIA H200", (9, 0), 132, 232448)
    monkeypatch.setattr(driver, "device_attributes", lambda device: attributes)
    module._forget_all()
    yield found
    module._forget_all()


def operands(rng: np.random.Generator, m: int = 64, n: int = 128, k: int = 128) -> tuple[Any, Any]:
    return tuple(rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((m, k), (k, n)))  # type: ignore[return-value]


def config_of(a: Any, b: Any, **options: Any) -> Config:
    return gemmsmith.plan(a, b, **options).config


def test_the_first_call_measures_and_all_take_the_fastest(gpu: Gpu, rng: np.random.Generator) -> None:
    a, b = operands(rng)
    before = config_of(a, b)
    gemmsmith.gemm(a, b)  # planned before the block
    with gemmsmith.autotune() as block:
        for _ in range(3):
            d = gemmsmith.gemm(a, b)
    assert len(gpu.requests) == len(block.tuned) == 1
    fastest = gpu.configs[0][-1]
    assert gpu.configs[0][0] == before
    assert len(gpu.configs[0]) == 16
    assert config_of(a, b) == fastest == block.tuned[0].entry.config != before
    assert gemmsmith.plan(a, b).origin == "tuned"
    exact = a.astype(float) @ b.astype(float)
    assert np.allclose(d.astype(float), exact, rtol=2**-7, atol=0.1)
    assert repr(block).startswith("1 GEMMs tuned in ")
    assert "85.0 us, 1.18 of the untuned speed" in repr(block)
    with gemmsmith.autotune():
        gemmsmith.gemm(a, b)
    gemmsmith.gemm(*operands(rng, 96))
    assert len(gpu.requests) == 1


def test_a_bucket_is_measured_once(gpu: Gpu, rng: np.random.Generator) -> None:
    with gemmsmith.autotune() as block:
        for m in (33, 40, 64, 65, 100, 128, 129, 192, 193):
            gemmsmith.gemm(*operands(rng, m))
    assert [x.entry.key.m for x in block.tuned] == [64, 128, 192, 256]


def test_the_untuned_config_stays_without_a_gain(gpu: Gpu, rng: np.random.Generator) -> None:
    a, b = operands(rng)
    before = config_of(a, b)
    gpu.us = lambda i, config: 100.0 - 0.05 * i
    with gemmsmith.autotune() as block:
        gemmsmith.gemm(a, b)
    assert config_of(a, b) == before
    assert block.tuned[0].entry.us == block.tuned[0].untuned_us == 100.0


def test_kinds_and_epilogues_are_measured_separately(gpu: Gpu, rng: np.random.Generator) -> None:
    a, b = operands(rng)
    bias = np.zeros(128, np.float32)
    with gemmsmith.autotune() as block:
        for _ in range(2):
            gemmsmith.gemm(a, b)
            gemmsmith.gemm(a, b, epilogue=lambda acc, bias: acc + bias, bias=bias)
            gemmsmith.gemm(a, b, epilogue=lambda acc: acc.relu())
            gemmsmith.gemm(a, np.ascontiguousarray(b.T).T)
            gemmsmith.gemm(a, b, out_dtype="fp32")
            gemmsmith.gemm(a, b, batch_invariant=True)
    assert len(block.tuned) == len({x.entry.key for x in block.tuned}) == 6
    for configs, x in zip(gpu.configs, block.tuned, strict=True):
        if x.entry.key.batch_invariant:
            assert {(c.splits, c.cluster_splits, c.serpentine) for c in configs} == {(1, 1, False)}


def test_bits_are_kept_on_demand(gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument, and in torch's deterministic mode."""
    a, b = operands(rng, 64, 512, 4096)
    torch = type("torch", (), {"are_deterministic_algorithms_enabled": staticmethod(lambda: True)})
    for options, modules in (({"keep_bits": True}, {}), ({}, {"torch": torch})):
        with monkeypatch.context() as patch, gemmsmith.autotune(**options):
            for name, x in modules.items():
                patch.setitem(module.sys.modules, name, x)
            module.tune_first_call(Request(a, b), force=True)
        assert len({(c.splits, c.serpentine, c.cluster_splits) for c in gpu.configs[-1]}) == 1
    with gemmsmith.autotune():
        module.tune_first_call(Request(a, b), force=True)
    assert len({(c.splits, c.serpentine, c.cluster_splits) for c in gpu.configs[-1]}) > 1


def test_what_is_not_measured(gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call with a config, no empty one, none on the CPU, none outside of a block."""
    a, b = operands(rng)
    gemmsmith.gemm(a, b)
    with gemmsmith.autotune() as block:
        gemmsmith.gemm(a, b, config=Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1), backend="sim")
        gemmsmith.gemm(a[:0], b)
        gemmsmith.gemm(a[:, :0], b[:0])
        monkeypatch.setattr(module, "resolve_backend", lambda backend, x, name: "reference")
        gemmsmith.gemm(a, b)
    assert block.tuned == []


def test_a_call_that_is_captured_is_measured_later(gpu: Gpu, rng: np.random.Generator) -> None:
    a, b = operands(rng)
    with gemmsmith.autotune() as block:
        gpu.capturing = True
        gemmsmith.gemm(a, b)
        gemmsmith.gemm(a, b)
        assert block.tuned == []
        gpu.capturing = False
        gemmsmith.gemm(a, b)
    assert len(block.tuned) == 1


@pytest.mark.parametrize("error", [MemoryError("no room"), DeviceError("cuMemAlloc"), RuntimeError("out of memory")])
def test_a_measurement_that_fails_is_said_once(gpu: Gpu, rng: np.random.Generator, error: Exception) -> None:
    """And the call is computed all the same."""
    a, b = operands(rng)

    def us(i: int, config: Config) -> float:
        raise error

    gpu.us = us
    with gemmsmith.autotune() as block, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for m in (64, 64, 60):
            d = gemmsmith.gemm(a[:m], b)
    assert [str(x.message) for x in said] == [f"gemmsmith: 64x128x128 bf16 -> bf16 is not tuned: {error}"]
    assert block.tuned == []
    assert np.allclose(d.astype(float), a[:60].astype(float) @ b.astype(float), rtol=2**-7, atol=0.1)


def test_the_block_entered_last_counts(gpu: Gpu, rng: np.random.Generator) -> None:
    """However alike blocks are."""
    with gemmsmith.autotune() as outer:
        with gemmsmith.autotune() as inner:
            gemmsmith.gemm(*operands(rng, 64))
        assert module._block() is outer
        gemmsmith.gemm(*operands(rng, 128))
        with module.active(module.Autotune(max_configs=0)):
            gemmsmith.gemm(*operands(rng, 256))
    assert [x.entry.key.m for x in inner.tuned] == [64]
    assert [x.entry.key.m for x in outer.tuned] == [128]
    assert module._block() is None


def test_threads_measure_one_problem_once(gpu: Gpu, rng: np.random.Generator) -> None:
    a, b = operands(rng)
    with gemmsmith.autotune() as block:
        threads = [threading.Thread(target=gemmsmith.gemm, args=(a, b)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(block.tuned) == 1


def test_the_environment_is_a_block_around_the_process(
    gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is tuned is logged."""
    monkeypatch.setattr(module, "_ACTIVE", [])
    monkeypatch.setenv("GEMMSMITH_AUTOTUNE", "0")
    gemmsmith.gemm(*operands(rng))
    assert gpu.requests == []
    monkeypatch.setenv("GEMMSMITH_AUTOTUNE", "1")
    module._forget_all()
    with caplog.at_level(logging.INFO, "gemmsmith"):
        gemmsmith.gemm(*operands(rng))
    assert len(gpu.requests) == 1
    assert any(x.message.startswith("tuned 64x128x128 bf16 -> bf16: ") for x in caplog.records)


@pytest.mark.parametrize("arguments", [{"max_configs": 0}, {"max_configs": "16"}, {"keep_bits": 1}])
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(gemmsmith.ArgumentError, match=name), gemmsmith.autotune(**arguments):
        pass


def test_times_of_earlier_rounds_do_not_count() -> None:
    """The chip is throttled only later, so they are too short; and the fastest must be faster by 1 %."""
    untuned, other, dropped = (Config(tile=(128, n, 64)) for n in (64, 128, 256))
    measured = [Measured(other, 10.0), Measured(untuned, 10.05), Measured(dropped, 9.0)]

    def winner(untuned: Config, energy: dict[Config, float]) -> Any:
        return module.winner(measured, untuned, lambda config, us: us * energy.get(config, 1.0))

    assert winner(untuned, {}) == (Measured(untuned, 10.05), 10.05)
    measured[1] = Measured(untuned, 10.2)
    assert winner(untuned, {}) == (Measured(other, 10.0), 10.2)
    assert winner(untuned, {other: 1.02}) == (Measured(untuned, 10.2), 10.2)
    assert winner(Config(tile=(64, 64, 64)), {}) == (Measured(other, 10.0), 10.0)
