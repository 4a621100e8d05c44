"""Constants of the cost model that differ between Hopper GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

NUM_SMS = 132
"""SMs of the GPUs that were measured, an H100 SXM and an H200 (datasheets)."""
SHORT_FLOPS = 1e11
"""FLOPs beyond which pingpong is faster in blocks of 8 ms between others, which share one clock, and slower in blocks
of a second and among other kernels (power-h200, power-shares-h200). Chosen."""
MAX_BANDWIDTH_ERROR = 0.06
"""Relative difference of the bandwidth that the driver reports from a datasheet's up to which a GPU is the measured one
of its name: a GH200 is named like an H200. Chosen."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, with the constants of a measured one or derived from them.

    Attributes:
        name: Part of the driver's name.
        dram_bytes_per_s: DRAM bandwidth by the datasheet, by which other GPUs are matched.
        dram_bytes_per_cycle: Bytes per cycle from DRAM to all SMs, at 1600 MHz.
        l2_bytes: Bytes of operands that the L2 holds: less than its size, since it keeps twice what SMs of both
            partitions read.
        exposed_epilogue_cycles: Further cycles of an epilogue of several consumer warpgroups during which no other tile
            is multiplied, in a single wave or a GEMM of up to `short_flops`.
        short_flops: FLOPs up to which a GEMM is not taken as power-limited.
    """

    name: str
    dram_bytes_per_s: float
    dram_bytes_per_cycle: float
    l2_bytes: int
    exposed_epilogue_cycles: int
    short_flops: float = SHORT_FLOPS
    sms: int = NUM_SMS


H100 = Gpu("H100", 3.35e12, 1895, 32_500_000, 0)
"""SXM, 80 GB, an L2 of 50 MB. Fitted to survey-nn-h100, survey-tn-h100 and survey-tt-h100. No value of
exposed_epilogue_cycles lowers their regret."""
H200 = Gpu("H200", 4.8e12, 2707, 39_000_000, 2500)
"""An L2 of 60 MB. Fitted to survey-h200. exposed_epilogue_cycles is chosen of seven values by the regret and
model-pairs-h200."""
SCHEDULERS_PER_SM = 4
"""Instructions that an SM issues per cycle."""
GPUS = (H100, H200)
"""All measured GPUs."""


def find_gpu(name: str) -> Gpu | None:
    """Return the measured GPU that a driver's device name denotes, or None."""
    return next((gpu for gpu in GPUS if gpu.name in name), None)


def nearest_gpu(dram_bytes_per_s: float) -> Gpu:
    """Return the measured GPU with the nearest DRAM bandwidth."""
    return min(GPUS, key=lambda gpu: abs(gpu.dram_bytes_per_s - dram_bytes_per_s))


@lru_cache(maxsize=64)
def gpu_at(device: int) -> Gpu:
    """Return the constants of a device; those of an H200 if there is no GPU."""
    from gemmsmith.backends.cuda import driver

    if not driver.is_available():
        return H200
    gpu = driver.device_attributes(device)
    return derived_gpu(gpu.name, gpu.bandwidth, gpu.sm_count)


def derived_gpu(name: str, dram_bytes_per_s: float, sms: int) -> Gpu:
    """Return a measured GPU, or the one with the nearest DRAM bandwidth, scaled to this bandwidth and number of SMs.

    What no driver reports is that GPU's: the power limit of an SM, the rate of the tensor cores, the clock. Without a
    bandwidth (0) its name decides. The SMs of a MIG instance are its own.
    """
    nearest = nearest_gpu(dram_bytes_per_s) if dram_bytes_per_s else find_gpu(name) or H200
    ratio = dram_bytes_per_s / nearest.dram_bytes_per_s or 1.0
    if nearest.name in name and sms == nearest.sms and abs(ratio - 1) <= MAX_BANDWIDTH_ERROR:
        return nearest
    return replace(nearest, name=name, dram_bytes_per_cycle=nearest.dram_bytes_per_cycle * ratio, sms=sms)
