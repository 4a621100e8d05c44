"""Hopper's GPUs as the model sees them: what differs among those with 132 SMs, as rows of data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Gpu:
    """A GPU that was measured. `bandwidth`: of its memory, bytes/s by the datasheet, by which others are compared with
    it; `dram_bytes_per_cycle`: from memory to all SMs, a cycle of 1600 MHz; `l2_bytes`: of operands that its L2 holds,
    fewer than it has, since what SMs of both halves read is kept twice."""

    name: str
    bandwidth: float
    dram_bytes_per_cycle: float
    l2_bytes: int


H100 = Gpu("H100", 3.35e12, 1895, 32_500_000)
"""SXM, 80 GB, an L2 of 50 MB. Fitted to survey-nn-h100.json, survey-tn-h100.json and survey-tt-h100.json."""
H200 = Gpu("H200", 4.8e12, 2707, 39_000_000)
"""An L2 of 60 MB. Fitted to survey-h200.json."""
GPUS = (H100, H200)


def named(name: str) -> Gpu | None:
    """The row for the driver's name of a GPU; None where it has none of its own."""
    return next((gpu for gpu in GPUS if gpu.name in name), None)


def nearest(bandwidth: float) -> Gpu:
    """The row whose memory is most like that of a GPU with that `bandwidth`, in bytes/s."""
    return min(GPUS, key=lambda gpu: abs(gpu.bandwidth - bandwidth))


@lru_cache(maxsize=64)
def gpu_at(device: int) -> Gpu:
    """The row for device `device`; the H200's where there is no GPU."""
    from gemmsmith.backends.cuda import driver

    return nearest(driver.attributes(device).bandwidth) if driver.available() else H200
