"""How many CTAs of a kernel an SM holds, and what limits them.

As the CUDA toolkit's cuda_occupancy.h computes it: a warp's registers are rounded up to 256, and lie in one quarter of
the SM's; shared memory is rounded up to 128 bytes, and the system keeps a kilobyte for each CTA.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.chip import Chip

REGISTERS, QUARTERS, WARP = 65536, 4, 32
OF_WARP, OF_SHARED, RESERVED = 256, 128, 1024


@dataclass(frozen=True)
class Occupancy:
    """CTAs an SM, by each resource; and the warps that an SM can hold, against the CTA's."""

    threads: int
    registers: int
    shared_memory: int
    ctas_at_most: int
    warps_of_cta: int
    warps_of_sm: int

    @property
    def limits(self) -> dict[str, int]:
        """CTAs an SM that each resource allows."""
        return {"threads": self.threads, "registers": self.registers, "shared memory": self.shared_memory,
                "CTAs": self.ctas_at_most}  # fmt: skip

    @property
    def ctas(self) -> int:
        """CTAs an SM: 0 where it cannot hold one."""
        return min(self.limits.values())

    @property
    def limit(self) -> str:
        """The resource that allows the fewest."""
        return min(self.limits, key=self.limits.__getitem__)

    @property
    def warps(self) -> int:
        """Warps an SM."""
        return self.ctas * self.warps_of_cta

    def __str__(self) -> str:
        ctas = f"{self.ctas} CTA{'s' * (self.ctas != 1)} an SM"
        return f"{ctas}, {self.warps} of {self.warps_of_sm} warps, limited by {self.limit}"


def occupancy(chip: Chip, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """The occupancy by CTAs of so many threads, registers a thread, and bytes of shared memory."""
    warps = -(-threads // WARP)
    of_warp = -(-max(registers, 1) * WARP // OF_WARP) * OF_WARP
    of_registers = REGISTERS // QUARTERS // of_warp * QUARTERS // warps
    shared = -(-(shared_bytes + RESERVED) // OF_SHARED) * OF_SHARED
    return Occupancy(chip.warps_of_sm // warps, of_registers, chip.shared_of_sm // shared, chip.ctas_of_sm, warps,
                     chip.warps_of_sm)  # fmt: skip
