"""What is shared while a kernel executes: CTAs, memories, barriers, asynchronous operations, reports."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gemmsmith.backends.sim.barriers import Mbarrier, ThreadBarrier
from gemmsmith.backends.sim.chip import Chip
from gemmsmith.backends.sim.clocks import Clock, Warp
from gemmsmith.backends.sim.hazards import Hazards, Stop
from gemmsmith.backends.sim.memory import OFFSET_MASK, SHARED_BASE, Buffer, GlobalMemory
from gemmsmith.backends.sim.shadow import Event, Events, Shadow
from gemmsmith.backends.sim.timeline import Timeline
from gemmsmith.backends.sim.words import Word
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.machine import AsyncOperation
from gemmsmith.lang.statements import Where

if TYPE_CHECKING:
    from gemmsmith.backends.sim.operations import Issuing


@dataclass(eq=False)
class Cta:
    """One CTA: its shared memory, barriers, register pool, and the engines whose time it shares."""

    index: int
    rank: int
    cluster: list[Cta]
    shared: np.ndarray
    shadow: Shadow
    warps: list[Warp]
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    named: dict[int, ThreadBarrier] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    free_registers: int = 0
    remote: list[Event] = field(default_factory=list)
    units: list[Issuing] = field(default_factory=list)


@dataclass(eq=False)
class Running:
    """An asynchronous operation under way. `bits`: (sources read, results there).

    `writes` are the events of a cp.async, by the warp that must still wait for its own.
    """

    operation: AsyncOperation
    unit: Issuing
    clock: Clock
    bits: tuple[int, int]
    end: int
    where: Where
    after: Running | None = None
    finished: bool = False
    writes: dict[Warp, int] = field(default_factory=dict)


@dataclass(eq=False)
class State:
    """Everything units share."""

    kernel: Kernel
    memory: GlobalMemory
    chip: Chip
    seed: int
    hazards: Hazards
    arguments: dict[str, object]
    grid: int
    agents: int
    worked: Callable[[float], None] = lambda cycles: None  # told of every wgmma that is done
    events: Events = field(default_factory=Events)
    timeline: Timeline = field(default_factory=Timeline)
    ctas: list[Cta] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    started: int = 1
    cluster_barriers: dict[int, ThreadBarrier] = field(default_factory=dict)
    words: dict[int, Word] = field(default_factory=dict)
    released_at: dict[int, int] = field(default_factory=dict)
    all_operations: list[Running] = field(default_factory=list)
    _global_shadows: dict[Buffer, Shadow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def stop(self, kind: str, message: str, where: Where) -> Stop:
        """Reports what makes going on pointless; raise the result."""
        self.hazards.report(kind, message, where)
        return Stop(message)

    def global_shadow(self, buffer: Buffer) -> Shadow:
        if buffer not in self._global_shadows:
            self._global_shadows[buffer] = Shadow(
                len(buffer.data), self.events, self.hazards, written=not buffer.unwritten, granule=buffer.granule
            )
        return self._global_shadows[buffer]

    def place(self, address: int) -> tuple[str, int | None]:
        """The name of a shared address's buffer and slot, and the slot where there are several."""
        offset = (address & OFFSET_MASK) - SHARED_BASE
        for buffer in self.kernel.buffers:
            if buffer.offset <= offset < buffer.offset + buffer.bytes:
                slot = (offset - buffer.offset) // buffer.slot_bytes
                return (f"{buffer.name}[{slot}]", slot) if buffer.count > 1 else (buffer.name, None)
        return f"shared memory {offset:#x}", None
