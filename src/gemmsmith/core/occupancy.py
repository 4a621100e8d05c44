"""CTAs of a kernel that are resident per SM, and what limits them, as in the CUDA toolkit's cuda_occupancy.h."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.chip import Chip
from gemmsmith.core.integers import ceil_div, round_up

REGISTERS_PER_SM = 65536
SM_SUBPARTITIONS = 4
"""Sub-partitions of an SM, each with a quarter of its registers; a warp's registers are in one of them."""
THREADS_PER_WARP = 32
REGISTER_ALLOCATION_GRANULARITY = 256
"""Registers; those of a warp are rounded up to a multiple (cuda_occupancy.h)."""
SHARED_ALLOCATION_BYTES = 128
"""Shared memory of a CTA is rounded up to a multiple (cuda_occupancy.h)."""
RESERVED_SHARED_BYTES_PER_CTA = 1024
"""Shared memory that the system reserves (cuda_occupancy.h)."""


@dataclass(frozen=True)
class Occupancy:
    """CTAs per SM as limited by each resource; and warps per CTA and per SM."""

    ctas_by_threads: int
    ctas_by_registers: int
    ctas_by_shared_memory: int
    max_ctas_per_sm: int
    warps_per_cta: int
    max_warps_per_sm: int

    @property
    def limits(self) -> dict[str, int]:
        """CTAs per SM that each resource allows."""
        return {
            "threads": self.ctas_by_threads,
            "registers": self.ctas_by_registers,
            "shared memory": self.ctas_by_shared_memory,
            "CTAs": self.max_ctas_per_sm,
        }

    @property
    def ctas_per_sm(self) -> int:
        """CTAs per SM: 0 if one does not fit."""
        return min(self.limits.values())

    @property
    def limit(self) -> str:
        """The resource that allows the fewest CTAs."""
        return min(self.limits, key=self.limits.__getitem__)

    @property
    def warps_per_sm(self) -> int:
        """Resident warps per SM."""
        return self.ctas_per_sm * self.warps_per_cta

    def __str__(self) -> str:
        ctas = f"{self.ctas_per_sm} CTA{'' if self.ctas_per_sm == 1 else 's'} per SM"
        return f"{ctas}, {self.warps_per_sm} of {self.max_warps_per_sm} warps, limited by {self.limit}"


def occupancy(chip: Chip, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Return the occupancy by CTAs of `threads` threads, with `registers` per thread and `shared_bytes` per CTA."""
    warps = ceil_div(threads, THREADS_PER_WARP)
    registers_per_warp = round_up(max(registers, 1) * THREADS_PER_WARP, REGISTER_ALLOCATION_GRANULARITY)
    warps_by_registers = REGISTERS_PER_SM // SM_SUBPARTITIONS // registers_per_warp * SM_SUBPARTITIONS
    shared_bytes_per_cta = round_up(shared_bytes + RESERVED_SHARED_BYTES_PER_CTA, SHARED_ALLOCATION_BYTES)
    return Occupancy(
        ctas_by_threads=chip.max_warps_per_sm // warps,
        ctas_by_registers=warps_by_registers // warps,
        ctas_by_shared_memory=chip.shared_bytes_per_sm // shared_bytes_per_cta,
        max_ctas_per_sm=chip.max_ctas_per_sm,
        warps_per_cta=warps,
        max_warps_per_sm=chip.max_warps_per_sm,
    )
