"""What the units of a grid share while a kernel executes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gemmsmith.backends.sim.chip import Chip
from gemmsmith.backends.sim.clocks import AGENTS
from gemmsmith.backends.sim.hazards import Hazards
from gemmsmith.backends.sim.memory import OFFSET_MASK, SHARED_BASE, Buffer, GlobalMemory
from gemmsmith.backends.sim.operations import Operations
from gemmsmith.backends.sim.shadow import Shadow
from gemmsmith.backends.sim.timeline import Timeline
from gemmsmith.backends.sim.words import Word
from gemmsmith.lang.instruction import Instruction
from gemmsmith.lang.kernel import Kernel


@dataclass(eq=False)
class State:
    """The launch, global memory, and what is recorded. `agents` is the length of vector clocks; `watch`, if given,
    is Counters.watch: called with a unit and its machine, it gives the function that executes instructions."""

    kernel: Kernel
    memory: GlobalMemory
    chip: Chip
    seed: int
    hazards: Hazards
    arguments: dict[str, object]
    grid: int
    operations: Operations
    watch: Callable[..., Callable[[Instruction], Any]] | None = None
    timeline: Timeline = field(default_factory=Timeline)
    words: defaultdict[int, Word] = field(default_factory=lambda: defaultdict(Word))
    _global_shadows: dict[Buffer, Shadow] = field(default_factory=dict)
    _places: dict[int, tuple[str, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.agents = AGENTS * self.grid * (self.kernel.threads // 32)

    def global_shadow(self, buffer: Buffer) -> Shadow:
        if buffer not in self._global_shadows:
            written = not buffer.unwritten
            self._global_shadows[buffer] = Shadow(len(buffer.data), self.hazards, written)
        return self._global_shadows[buffer]

    def place(self, address: int) -> tuple[str, int | None]:
        """The name of a shared address's buffer and slot, and the slot where there are several."""
        offset = (address & OFFSET_MASK) - SHARED_BASE
        if offset not in self._places:
            self._places[offset] = _place(self.kernel, offset)
        return self._places[offset]


def _place(kernel: Kernel, offset: int) -> tuple[str, int | None]:
    for buffer in kernel.buffers:
        if buffer.offset <= offset < buffer.offset + buffer.bytes:
            slot = (offset - buffer.offset) // buffer.slot_bytes
            return (f"{buffer.name}[{slot}]", slot) if buffer.count > 1 else (buffer.name, None)
    return f"shared memory {offset:#x}", None
