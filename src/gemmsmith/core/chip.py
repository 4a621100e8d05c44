"""The GPU architectures that kernels are compiled for (CUDA C++ Programming Guide, "Compute Capabilities").

Also the CTAs of a kernel that are resident per SM, and what limits them, as in the CUDA toolkit's cuda_occupancy.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemmsmith.core.errors import ConfigError
from gemmsmith.core.scalars import ceil_div, round_up


@dataclass(frozen=True)
class Chip:
    """A GPU architecture, by PTX's name, and its limits. All have 64 K registers per SM.

    `sm_count`: SMs of its largest data-center or workstation GPU.
    """

    name: str
    max_shared_bytes_per_cta: int
    shared_bytes_per_sm: int
    sm_count: int
    max_ctas_per_sm: int
    max_warps_per_sm: int

    @property
    def capability(self) -> int:
        """Ten times the compute capability: 90 for sm_90."""
        return int(self.name.removeprefix("sm_"))

    @property
    def target(self) -> str:
        """The target for ptxas: sm_90a on Hopper, for its architecture-specific features."""
        return f"{self.name}a" if self.name == "sm_90" else self.name

    @property
    def has_wgmma(self) -> bool:
        """True if there is wgmma (PTX ISA)."""
        return self.supports("sm_90a")

    def runs_on(self, capability: int) -> bool:
        """Return whether a GPU runs kernels compiled for this chip. `capability`: the GPU's, times ten.

        A later GPU does, since the driver compiles their PTX for it; but the target sm_90a is that of Hopper only.
        """
        return self.capability <= capability and (self.target == self.name or capability < 100)

    def supports(self, architecture: str) -> bool:
        """Return whether the chip supports `architecture`: "sm_80" means that or later, "sm_90a" exactly that."""
        if architecture.endswith("a"):
            return self.target == architecture
        return self.capability >= int(architecture.removeprefix("sm_"))

    def __str__(self) -> str:
        return self.name


_KIB = 1024
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", 163 * _KIB, 164 * _KIB, 108, 32, 64),
        Chip("sm_86", 99 * _KIB, 100 * _KIB, 84, 16, 48),
        Chip("sm_89", 99 * _KIB, 100 * _KIB, 142, 24, 48),
        Chip("sm_90", 227 * _KIB, 228 * _KIB, 132, 32, 64),
        Chip("sm_100", 227 * _KIB, 228 * _KIB, 148, 32, 64),
        Chip("sm_120", 99 * _KIB, 100 * _KIB, 188, 24, 48),
    )
}
HOPPER = CHIPS["sm_90"]


def get_chip(name: str) -> Chip:
    """Return the chip of that name. Raises ConfigError if there is none."""
    if name not in CHIPS:
        raise ConfigError(f"chip: got {name!r}; use one of {', '.join(CHIPS)}")
    return CHIPS[name]


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
    """How many CTAs are resident per SM. `limits`: by resource, the CTAs per SM that it allows."""

    limits: Mapping[str, int]
    warps_per_cta: int
    max_warps_per_sm: int

    @property
    def ctas_per_sm(self) -> int:
        """CTAs per SM: 0 if one does not fit."""
        return min(self.limits.values())

    @property
    def limit(self) -> str:
        """The resource that allows the fewest CTAs."""
        return min(self.limits, key=lambda resource: self.limits[resource])

    @property
    def warps_per_sm(self) -> int:
        return self.ctas_per_sm * self.warps_per_cta

    def __str__(self) -> str:
        ctas = f"{self.ctas_per_sm} CTA{'' if self.ctas_per_sm == 1 else 's'} per SM"
        return f"{ctas}, {self.warps_per_sm} of {self.max_warps_per_sm} warps, limited by {self.limit}"


def occupancy(chip: Chip, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Return the occupancy by CTAs of `threads` threads, with `registers` per thread and `shared_bytes` per CTA.

    A warp has its registers in one sub-partition of the SM, so each sub-partition holds a whole number of warps.
    """
    warps = ceil_div(threads, THREADS_PER_WARP)
    registers_per_warp = round_up(max(registers, 1) * THREADS_PER_WARP, REGISTER_ALLOCATION_GRANULARITY)
    warps_by_registers = REGISTERS_PER_SM // SM_SUBPARTITIONS // registers_per_warp * SM_SUBPARTITIONS
    shared_bytes_per_cta = round_up(shared_bytes + RESERVED_SHARED_BYTES_PER_CTA, SHARED_ALLOCATION_BYTES)
    return Occupancy(
        {
            "threads": chip.max_warps_per_sm // warps,
            "registers": warps_by_registers // warps,
            "shared memory": chip.shared_bytes_per_sm // shared_bytes_per_cta,
            "CTAs": chip.max_ctas_per_sm,
        },
        warps,
        chip.max_warps_per_sm,
    )
