"""What a kernel's counts bound its time by, on an H200 at the clock that it has under load: no model, only floors.

Each resource is as fast as it can be, and all SMs share the work evenly. L1 is what moves the wavefronts of shared
memory and the sectors of loads by threads, which may hit there, so they do not count in the L2. What TMA writes to
shared memory counts with what it reads from the L2. Copies by threads count with the fewest wavefronts that can hold
their bytes: no counter of the hardware tells how many they take. Power and latency do not count at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gemmsmith.backends.sim.counters import WAVEFRONT, Count
from gemmsmith.core.tile import SECTOR_BYTES
from gemmsmith.tuning.copies import MHZ
from gemmsmith.tuning.gpus import H200
from gemmsmith.tuning.model import FLOPS_PER_CYCLE
from gemmsmith.tuning.space import SMS

SM_BYTES_PER_CYCLE, FILL_BYTES_PER_CYCLE = 100, 110
"""Bytes a cycle at most: from the L2 to an SM; into an SM, with what is multicast (survey-h200.json)."""
SCHEDULERS, SECTORS_PER_CYCLE = 4, 4
"""Of an SM: instructions that it issues a cycle, and sectors that its L1 looks up, 128 bytes as a wavefront is."""
TFLOPS = {
    "fused": 53.7,
    "dot": 8 * 64 * SMS * MHZ / 1e6,
    "mma": 647.0,
    "wmma": 647.0,
    "wgmma": FLOPS_PER_CYCLE * SMS * MHZ / 1e6,
}
"""By the first word of an instruction's name, for operands of 16 bits: FFMA and mma.sync as loops in registers reached
on an H200, sustained; dp4a as often as a multiplication of 32-bit integers, 64 a cycle (CUDA C++ Programming Guide,
"Arithmetic Instructions"); wgmma as the model has it."""
FASTER = {"tf32": 0.5, "s8": 2.0, "u8": 2.0, "e4m3": 2.0, "e5m2": 2.0, "fp16": 2.0}
"""By a word of the name of an instruction for other operands; fp16 is fma's."""
RESOURCES = ("DRAM", "L2", "L1", "issue", "math")


@dataclass(frozen=True)
class Limits:
    """Microseconds that each resource takes at least, and the line that takes most of the one that limits."""

    us: dict[str, float]
    line: Count

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.us, key=self.us.__getitem__)

    @property
    def bound(self) -> float:
        """Microseconds."""
        return self.us[self.limit]

    @property
    def floor(self) -> float:
        """Microseconds that a product of as many bytes takes with the same instruction, however it is written."""
        return max(self.us["DRAM"], self.us["math"])


def limits(lines: Iterable[Count], nbytes: int) -> Limits:
    """Of a kernel's counts; `nbytes`: of its operands and results, each once."""
    each = [(line, _of(line)) for line in lines]
    us = {name: math.fsum(cost[name] for _, cost in each) for name in RESOURCES}
    us["DRAM"] = nbytes / (H200.dram_bytes_per_cycle * MHZ)
    limit = max(us, key=us.__getitem__)
    return Limits(us, max(each, key=lambda x: x[1][limit])[0])


def _of(x: Count) -> dict[str, float]:
    """Microseconds of a line, by resource."""
    cycle = 1 / (SMS * MHZ)
    by_tma = x.instruction.startswith("tma")
    past = by_tma or x.instruction.startswith(("cp_async_16", "store_global"))
    moved = x.ideal_wavefronts if x.instruction.startswith("cp_async") else x.wavefronts
    lookups = 0.0 if past or not x.sectors else max(x.instructions, x.sectors / SECTORS_PER_CYCLE)
    filled = by_tma * x.wavefronts * WAVEFRONT / FILL_BYTES_PER_CYCLE
    return {
        "DRAM": 0.0,
        "L2": max(past * x.sectors * SECTOR_BYTES / SM_BYTES_PER_CYCLE, filled) * cycle,
        "L1": (not by_tma) * (moved + lookups) * cycle,
        "issue": x.instructions / SCHEDULERS * cycle,
        "math": 2 * x.products / (_tflops(x.instruction) * 1e6) if x.products else 0.0,
    }


def _tflops(instruction: str) -> float:
    family, *words = instruction.split("_")
    return TFLOPS[family] * next((FASTER[word] for word in words if word in FASTER), 1.0)
