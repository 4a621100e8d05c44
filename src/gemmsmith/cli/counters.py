"""The simulator's counts of a kernel, and its occupancy, as text and for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmsmith.backends.sim.execute.counters import Count
from gemmsmith.cli.table import format_table
from gemmsmith.core.occupancy import Occupancy, occupancy
from gemmsmith.lang.kernel import Kernel

ACCESS_COUNTS = ("instructions", "wavefronts", "ideal_wavefronts", "sectors", "ideal_sectors")
TMA_BOX_COUNTS = ("lines", "ideal_lines")
TITLES = ("line", "access", "instructions", "wavefronts", "ideal", "sectors", "ideal", "lines", "ideal")


@dataclass(frozen=True)
class KernelCounts:
    """A kernel's counts by line, its registers per thread as compiled by NVRTC, and its occupancy."""

    kernel: Kernel
    lines: list[Count]
    registers: int
    occupancy: Occupancy

    @classmethod
    def from_kernel(cls, kernel: Kernel, lines: list[Count]) -> KernelCounts:
        """Compile the kernel, and return its counts with its registers and occupancy."""
        from gemmsmith.backends.cuda.compiler import compile_source

        r = compile_source(kernel.source, kernel.name, kernel.chip.target).resources
        limits = occupancy(kernel.chip, kernel.threads, r.registers, r.shared_bytes + kernel.shared_bytes)
        return cls(kernel, lines, r.registers, limits)

    def to_json(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        o = self.occupancy
        lines = [vars(x) | {"location": f"{x.location}"} for x in self.lines]
        return {"kernel": self.kernel.name, "threads": self.kernel.threads, "registers": self.registers,
                "shared_bytes": self.kernel.shared_bytes,
                "occupancy": {"ctas": o.ctas_per_sm, "warps": o.warps_per_sm, "limit": o.limit, "limits": o.limits},
                "lines": lines}  # fmt: skip

    def to_text(self) -> str:
        """Return a table below the kernel's name and occupancy; counts of zero are empty."""
        rows: list[tuple[str, ...]] = [TITLES]
        for x in self.lines:
            counts = [getattr(x, name) for name in (*ACCESS_COUNTS, *TMA_BOX_COUNTS)]
            rows.append((f"{x.location}", x.access, *(f"{count or ''}" for count in counts)))
        return f"{self.kernel.name}: {self.registers} registers, {self.occupancy}\n{format_table(rows)}"
