"""Constants of GPUs that nobody measured: from what their drivers report."""

from __future__ import annotations

import pytest

from gemmsmith import Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.problem import Problem
from gemmsmith.tuning.choose import choose, estimate_us
from gemmsmith.tuning.config_table import get_max_active_clusters, is_single_wave
from gemmsmith.tuning.gpus import H100, H200, derived_gpu


def problem(m: int, n: int, k: int) -> Problem:
    return bind(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))).problem


@pytest.mark.parametrize(
    ("name", "bandwidth", "sms", "measured"),
    [
        ("NVIDIA H200", 4.92e12, 132, H200), ("NVIDIA H100 80GB HBM3", 3.35e12, 132, H100),
        ("NVIDIA H100 80GB HBM3", 0.0, 132, H100), ("NVIDIA H200", 0.0, 132, H200),
        ("NVIDIA H100 PCIe", 2.04e12, 114, None), ("NVIDIA H100 NVL", 3.94e12, 132, None),
        ("NVIDIA H20", 4.02e12, 78, None), ("NVIDIA GH200 480GB", 4.02e12, 132, None),
        ("NVIDIA H200 MIG 3g.71gb", 4.92e12, 60, None),
    ],
)  # fmt: skip
def test_only_measured_gpus_have_their_constants(name: str, bandwidth: float, sms: int, measured: object) -> None:
    gpu = derived_gpu(name, bandwidth, sms)
    if measured:
        assert gpu is measured
        return
    assert (gpu.name, gpu.sms) == (name, sms)
    nearest = H200 if bandwidth > 4.1e12 else H100
    per_byte_per_s = nearest.dram_bytes_per_cycle / nearest.dram_bytes_per_s
    assert gpu.dram_bytes_per_cycle / bandwidth == pytest.approx(per_byte_per_s)


def test_a_smaller_gpu_takes_longer_and_has_tiles_of_its_own() -> None:
    """Half of the SMs: twice the time of what the tensor cores bound; as many clusters as fit."""
    half = derived_gpu("half", H200.dram_bytes_per_s, 66)
    config = Config(tile=(128, 256, 64), cluster=(2, 1))
    p = problem(4096, 4096, 4096)
    assert estimate_us(p, config, gpu=half) / estimate_us(p, config) == pytest.approx(2, rel=0.2)
    memory_bound = problem(16, 28672, 8192)
    best = choose(memory_bound)
    assert estimate_us(memory_bound, best, gpu=half) / estimate_us(memory_bound, best) < 1.5
    assert is_single_wave(config, problem(1024, 4096, 512))
    assert not is_single_wave(config, problem(1024, 4096, 512), half.sms)
    assert [get_max_active_clusters(n, 66) for n in (1, 2, 4, 8)] == [66, 33, 15, 7]
    assert get_max_active_clusters(16, 7) == 1
    for sms in (7, 66, 78, 114):
        gpu = derived_gpu("other", 4e12, sms)
        chosen = choose(problem(512, 4096, 4096), gpu=gpu)
        assert estimate_us(problem(512, 4096, 4096), chosen, gpu=gpu) <= estimate_us(
            problem(512, 4096, 4096), choose(problem(512, 4096, 4096)), gpu=gpu
        ) * (1 + 1e-9)  # fmt: skip
