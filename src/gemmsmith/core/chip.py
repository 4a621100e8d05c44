"""The GPUs that kernels are made for: what each has (CUDA C++ Programming Guide, "Compute Capabilities")."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.errors import ConfigError


@dataclass(frozen=True)
class Chip:
    """A compute capability, as PTX names it: `shared_bytes` that a CTA can have, and an SM; the `multiprocessors` of
    its largest GPU for data centers or workstations; the CTAs and warps that an SM holds. All have 64 K registers an
    SM."""

    name: str
    shared_bytes: int
    shared_of_sm: int
    multiprocessors: int
    ctas_of_sm: int
    warps_of_sm: int

    @property
    def capability(self) -> int:
        """Ten times the compute capability."""
        return int(self.name.removeprefix("sm_"))

    @property
    def target(self) -> str:
        """What ptxas is told: with the features of Hopper that no later chip has."""
        return f"{self.name}a" if self.name == "sm_90" else self.name

    def has(self, architecture: str) -> bool:
        """Whether it runs what needs `architecture`: "sm_80" or later, "sm_90a" and no other."""
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


def find_chip(name: str) -> Chip:
    """The chip of that name. ConfigError where there is none."""
    if name not in CHIPS:
        raise ConfigError(f"chip: got {name!r}; use one of {', '.join(CHIPS)}")
    return CHIPS[name]
