"""A built kernel: what a backend prints and compiles, or executes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.statements import Block, Function
from gemmsmith.lang.types import TENSOR_MAP, U64
from gemmsmith.lang.values import Bind, LateConstant, Parameter

SCRATCH_ALIGNMENT = 256
"""Of every piece of scratch memory, in bytes."""


def aligned(nbytes: int) -> int:
    """Rounded up to what scratch memory is aligned to."""
    return -(-nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def register_cap(threads: int) -> int:
    """Registers a thread at launch: the share of 64 K that `__launch_bounds__(threads, 1)` leaves, at most 255."""
    return min(65536 // threads // 8 * 8, 255)


@dataclass(frozen=True)
class Scratch:
    """Global memory of a launch's own: its address is an argument. See `Builder.scratch`."""

    parameter: Parameter
    nbytes: Bind
    zeroed: bool


@dataclass(eq=False)
class Kernel:
    """One kernel's description. `header` lines open the printed file, which `printer` makes; `grid` computes how many
    clusters have work; `resident` CTAs of an SM have registers; `chip` is what it is made for;
    fewer clusters than have work may do all of it if it is `persistent`."""

    name: str
    threads: int
    cluster: tuple[int, int, int]
    parameters: list[Parameter]
    buffers: list[SharedBuffer]
    late: list[LateConstant]
    body: Block
    header: list[str]
    printer: Callable[[Kernel, bool], str]
    memory: list[Scratch] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    grid: Bind = lambda _: 1
    resident: int = 1
    chip: Chip = HOPPER
    persistent: bool = True

    def arguments(self, bound: Any, workspace: Any = 0, zeroed: Any = 0) -> dict[str, Any]:
        """The arguments by name, for the problem `bound`, which is what the parameters' `bind` take; scratch memory
        lies at `workspace`, and what must be zero at `zeroed`."""
        found = {p.name: p.bind(bound) for p in self.parameters if p.name and p.bind}
        return found | self._scratch(bound, workspace, zeroed=False) | self._scratch(bound, zeroed, zeroed=True)

    def scratch_bytes(self, bound: Any, *, zeroed: bool = False) -> int:
        """How much scratch memory a launch needs, of either kind."""
        return sum(aligned(s.nbytes(bound)) for s in self.memory if s.zeroed == zeroed)

    def _scratch(self, bound: Any, address: Any, *, zeroed: bool) -> dict[str, Any]:
        found = {}
        for s in self.memory:
            if s.zeroed == zeroed:
                found[s.parameter.name or ""] = address
                address = address + aligned(s.nbytes(bound))
        return found

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a CTA, in bytes."""
        return max((b.offset + b.bytes for b in self.buffers), default=0)

    @property
    def register_cap(self) -> int:
        """Registers a thread that ptxas may use: the launch bound's share of 64 K, at most 255."""
        return register_cap(self.threads * self.resident)

    @cached_property
    def parameter_kinds(self) -> tuple[str, ...]:
        """For the launcher: "tensor_map", "pointer" (u64) or the type's name."""
        names = {TENSOR_MAP: "tensor_map", U64: "pointer"}
        return tuple(names.get(p.type, p.type.name) for p in self.parameters)

    @cached_property
    def source(self) -> str:
        """The kernel as one self-contained CUDA C++ file."""
        return self.printer(self, False)

    @property
    def located_source(self) -> str:
        """The same, with the Python file's line in a `#line` directive before each of the body's."""
        return self.printer(self, True)
