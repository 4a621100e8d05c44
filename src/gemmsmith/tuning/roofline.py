"""Roofline of a kernel from its counts: lower bounds on its time on an H200 at its clock under load.

Each resource works at its peak rate, and all SMs have the same work. L1 covers the wavefronts of shared memory and the
sectors of loads by threads, which may hit in L1 and so do not count for the L2. TMA's writes to shared memory count
with its reads from the L2. Copies by threads count with the minimum number of wavefronts that hold their bytes, since
no hardware counter tells the actual number. Power and latency are not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gemmsmith.backends.sim.execute.counters import WAVEFRONT_BYTES, Count
from gemmsmith.core.tile import SECTOR_BYTES
from gemmsmith.tuning.costs import SM_CLOCK_MHZ
from gemmsmith.tuning.gpus import H200, NUM_SMS, SCHEDULERS_PER_SM
from gemmsmith.tuning.model import FLOPS_PER_CYCLE

L2_TO_SM_BYTES_PER_CYCLE = 100
"""Maximum bytes per cycle from the L2 to one SM (survey-h200)."""
SMEM_FILL_BYTES_PER_CYCLE = 110
"""Maximum bytes per cycle into one SM's shared memory, including multicast (survey-h200)."""
L1_SECTORS_PER_CYCLE = 4
"""Sectors that an SM's L1 looks up per cycle: 128 bytes, as a wavefront."""
TFLOPS = {
    "fused": 53.7,
    "dp4a": 8 * 64 * NUM_SMS * SM_CLOCK_MHZ / 1e6,
    "mma": 647.0,
    "wmma": 647.0,
    "wgmma": FLOPS_PER_CYCLE * NUM_SMS * SM_CLOCK_MHZ / 1e6,
}
"""TFLOP/s by the first word of an instruction's name, for 16-bit operands. FFMA and mma.sync: what loops in registers
(benchmarks/ladder/peak_throughput.py) sustained on an H200; dp4a: 64 per cycle and SM, as a 32-bit integer
multiplication (CUDA C++ Programming Guide, "Arithmetic Instructions"); wgmma: as in the model."""
RATE_FACTOR = {"tf32": 0.5, "s8": 2.0, "u8": 2.0, "e4m3": 2.0, "e5m2": 2.0, "fp16": 2.0}
"""Rate relative to 16-bit operands, by a word of the instruction's name; fp16 is fma's."""
RESOURCES = ("DRAM", "L2", "L1", "issue", "math")
"""Names of the resources."""


@dataclass(frozen=True)
class Roofline:
    """Minimum microseconds of each resource, and the source line that takes most of the limiting resource."""

    us: dict[str, float]
    limiting_line: Count

    @property
    def limiting_resource(self) -> str:
        """Resource that takes longest."""
        return max(self.us, key=self.us.__getitem__)

    @property
    def lower_bound_us(self) -> float:
        """Minimum microseconds of the kernel."""
        return self.us[self.limiting_resource]

    @property
    def speed_of_light_us(self) -> float:
        """Minimum microseconds of any kernel for these bytes with the same multiply instruction."""
        return max(self.us["DRAM"], self.us["math"])


def compute_roofline(lines: Iterable[Count], nbytes: int) -> Roofline:
    """Return the roofline of a kernel."""
    costs = [(line, _us_by_resource(line)) for line in lines]
    us = {name: math.fsum(cost[name] for _, cost in costs) for name in RESOURCES}
    us["DRAM"] = nbytes / (H200.dram_bytes_per_cycle * SM_CLOCK_MHZ)
    limit = max(us, key=us.__getitem__)
    return Roofline(us, max(costs, key=lambda x: x[1][limit])[0])


def _us_by_resource(x: Count) -> dict[str, float]:
    """Return how many microseconds each resource takes for a source line's counts, at its peak rate.

    DRAM is 0: its time is that of the whole kernel's bytes.
    """
    cycle = 1 / (NUM_SMS * SM_CLOCK_MHZ)
    by_tma = x.instruction.startswith("tma")
    bypasses_l1 = by_tma or x.instruction.startswith(("cp_async_16", "store_global"))
    moved = x.ideal_wavefronts if x.instruction.startswith("cp_async") else x.wavefronts
    lookups = 0.0 if bypasses_l1 or not x.sectors else max(x.instructions, x.sectors / L1_SECTORS_PER_CYCLE)
    filled = by_tma * x.wavefronts * WAVEFRONT_BYTES / SMEM_FILL_BYTES_PER_CYCLE
    return {
        "DRAM": 0.0,
        "L2": max(bypasses_l1 * x.sectors * SECTOR_BYTES / L2_TO_SM_BYTES_PER_CYCLE, filled) * cycle,
        "L1": (not by_tma) * (moved + lookups) * cycle,
        "issue": x.instructions / SCHEDULERS_PER_SM * cycle,
        "math": 2 * x.macs / (_tflops(x.instruction) * 1e6) if x.macs else 0.0,
    }


def _tflops(instruction: str) -> float:
    """Return the peak rate of a multiply instruction, by the words of its name, such as mma_m16n8k8_f32_tf32."""
    family, *words = instruction.split("_")
    return TFLOPS[family] * next((RATE_FACTOR[word] for word in words if word in RATE_FACTOR), 1.0)
