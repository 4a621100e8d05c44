"""Constants of the cost model that differ between Hopper GPUs with 132 SMs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Gpu:
    """A measured GPU.

    Attributes:
        name: Part of the driver's name.
        dram_bytes_per_s: DRAM bandwidth by the datasheet, by which other GPUs are matched.
        dram_bytes_per_cycle: Bytes per cycle from DRAM to all SMs, at 1600 MHz.
        l2_bytes: Bytes of operands that the L2 holds: less than its size, since it keeps twice what SMs of both
            partitions read.
    """

    name: str
    dram_bytes_per_s: float
    dram_bytes_per_cycle: float
    l2_bytes: int


H100 = Gpu("H100", 3.35e12, 1895, 32_500_000)
"""SXM, 80 GB, an L2 of 50 MB. Fitted to survey-nn-h100, survey-tn-h100 and survey-tt-h100."""
H200 = Gpu("H200", 4.8e12, 2707, 39_000_000)
"""An L2 of 60 MB. Fitted to survey-h200."""
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
    """Return the measured GPU nearest to a device; H200 if there is no GPU."""
    from gemmsmith.backends.cuda import driver

    return nearest_gpu(driver.device_attributes(device).bandwidth) if driver.is_available() else H200
