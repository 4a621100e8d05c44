"""What the simulator's counters found of a kernel, and its occupancy, as text and for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmsmith.backends.sim.counters import Count
from gemmsmith.cli.table import table
from gemmsmith.core.occupancy import Occupancy, occupancy
from gemmsmith.lang.kernel import Kernel

NUMBERS = ("instructions", "wavefronts", "ideal_wavefronts", "sectors", "ideal_sectors")
OF_BOXES = ("lines", "ideal_lines")
TITLES = ("line", "access", "instructions", "wavefronts", "ideal", "sectors", "ideal", "lines", "ideal")


@dataclass(frozen=True)
class Counted:
    """A kernel's counts by line; its registers a thread, as NVRTC compiles it; and the CTAs that an SM holds."""

    kernel: Kernel
    lines: list[Count]
    registers: int
    occupancy: Occupancy

    @staticmethod
    def of(kernel: Kernel, lines: list[Count]) -> Counted:
        from gemmsmith.backends.cuda.compiler import compile_source

        r = compile_source(kernel.source, kernel.name, kernel.chip.target).resources
        found = occupancy(kernel.chip, kernel.threads, r.registers, r.shared + kernel.shared_bytes)
        return Counted(kernel, lines, r.registers, found)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        o = self.occupancy
        lines = [vars(x) | {"where": f"{x.where}"} for x in self.lines]
        return {"kernel": self.kernel.name, "threads": self.kernel.threads, "registers": self.registers,
                "shared_bytes": self.kernel.shared_bytes,
                "occupancy": {"ctas": o.ctas, "warps": o.warps, "limit": o.limit, "limits": o.limits},
                "lines": lines}  # fmt: skip

    def text(self) -> str:
        """A table, headed by the kernel's name and occupancy; a count that is zero is left out."""
        rows: list[tuple[str, ...]] = [TITLES]
        for x in self.lines:
            numbers = (f"{number or ''}" for number in (getattr(x, name) for name in (*NUMBERS, *OF_BOXES)))
            rows.append((f"{x.where}", x.access, *numbers))
        return f"{self.kernel.name}: {self.registers} registers, {self.occupancy}\n{table(rows)}"
