"""A built kernel: what a backend prints and compiles, or executes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.statements import Block
from gemmsmith.lang.types import TENSOR_MAP, U64
from gemmsmith.lang.values import LateConstant, Parameter


def register_cap(threads: int) -> int:
    """Registers a thread at launch: the share of 64 K that `__launch_bounds__(threads, 1)` leaves, at most 255."""
    return min(65536 // threads // 8 * 8, 255)


@dataclass(eq=False)
class Kernel:
    """One kernel's description. `header` lines open the printed file, which `printer` makes."""

    name: str
    threads: int
    cluster: tuple[int, int, int]
    parameters: list[Parameter]
    buffers: list[SharedBuffer]
    late: list[LateConstant]
    body: Block
    header: list[str]
    printer: Callable[[Kernel], str]

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a CTA, in bytes."""
        return max((b.offset + b.bytes for b in self.buffers), default=0)

    @property
    def register_cap(self) -> int:
        """Registers a thread that ptxas may use: the launch bound's share of 64 K, at most 255."""
        return register_cap(self.threads)

    @property
    def parameter_kinds(self) -> tuple[str, ...]:
        """For the launcher: "tensor_map", "pointer" (u64) or the type's name."""
        names = {TENSOR_MAP: "tensor_map", U64: "pointer"}
        return tuple(names.get(p.type, p.type.name) for p in self.parameters)

    @cached_property
    def source(self) -> str:
        """The kernel as one self-contained CUDA C++ file."""
        return self.printer(self)
