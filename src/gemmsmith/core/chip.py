"""The GPU architectures that kernels are compiled for (CUDA C++ Programming Guide, "Compute Capabilities")."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.errors import ConfigError


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
        """Return whether a GPU runs the chip's kernels: a later one does (PTX JIT), unless they need sm_90a."""
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
