"""State shared by the lockstep groups of a grid while a kernel executes."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from gemmsmith.backends.sim.memory.clocks import AGENTS_PER_WARP
from gemmsmith.backends.sim.memory.memory import OFFSET_MASK, SHARED_BASE, GlobalMemory
from gemmsmith.backends.sim.memory.sync_variables import SyncVariable
from gemmsmith.backends.sim.report.hazards import Hazards
from gemmsmith.backends.sim.report.record import Record
from gemmsmith.backends.sim.report.verdict import TimeDependence, tests_only_skip_waits
from gemmsmith.backends.sim.state.operations import Operations
from gemmsmith.core.chip import occupancy
from gemmsmith.core.frozen import cached_property
from gemmsmith.lang.kernel import Kernel
from gemmsmith.machine import Access

# Latencies (cycles) and bandwidths (bytes per cycle) of one SM. The cycles of a wgmma are given by each operation
# (N / 2 for m64nNk16: 4096 dense 16-bit FLOPs per cycle, NVIDIA's 989 TFLOP/s at 1.83 GHz). TMA latency and L2
# bandwidth are from micro-benchmarks of H100 (Luo et al., 2024).
TENSOR_CORES = 4
INSTRUCTION_CYCLES = 4
MEMORY_INSTRUCTION_CYCLES = 20
BARRIER_CYCLES = 20
TMA_LATENCY = 700
TMA_BYTES_PER_CYCLE = 64
STORE_LATENCY = 500


@dataclass(eq=False)
class GridState:
    """The launch, global memory, and everything recorded while the grid executes.

    `grid`: number of CTAs. `observer`: the record that is told of all that happens, if there is one. `num_agents`:
    number of agents (sets of lanes with a clock), the length of vector clocks. `sync_variables`: words of strong
    accesses, by address. `time_dependences`: an ordered set.
    """

    kernel: Kernel
    memory: GlobalMemory
    seed: int
    hazards: Hazards
    arguments: dict[str, object]
    grid: int
    operations: Operations
    observer: Record | None = field(default=None, init=False)
    sync_variables: defaultdict[int, SyncVariable] = field(default_factory=lambda: defaultdict(SyncVariable))
    time_dependences: dict[TimeDependence, None] = field(default_factory=dict)
    _descriptions: dict[int, tuple[str, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.num_agents = AGENTS_PER_WARP * self.grid * (self.kernel.threads // 32)

    @cached_property
    def tests_only_skip_waits(self) -> bool:
        """Whether results of test_wait decide nothing but whether a wait is executed."""
        return tests_only_skip_waits(self.kernel.body)

    @cached_property
    def resident_ctas(self) -> int:
        """CTAs of the grid that certainly are resident at once on the chip, whatever registers ptxas allocates.

        It allocates at most those that the launch bounds allow.
        """
        kernel, size = self.kernel, self.kernel.cluster[0]
        per_sm = occupancy(
            kernel.chip, kernel.threads, kernel.max_registers_per_thread, kernel.shared_bytes
        ).ctas_per_sm
        return min(self.grid, max(1, kernel.chip.sm_count * per_sm // size) * size)

    def observe(self) -> Record:
        """Record all that happens from now on."""
        record = Record(self.kernel, self.grid, self.seed, self.name_of, self.hazards.reported)
        self.observer = self.operations.observer = self.hazards.observer = record
        return record

    def name_of(self, access: Access) -> str:
        """Return the name of the buffer that is accessed; that of shared memory has its slot, as in "a[2]"."""
        if access.space == "shared":
            return self.describe_address(access.first)[0]
        buffer = self.memory.buffer_at(access.first)
        return buffer.name if buffer else "?"

    def describe_address(self, address: int) -> tuple[str, int | None]:
        """Return (name, slot) of the buffer at an address in shared memory; slot None if it has one only."""
        offset = (address & OFFSET_MASK) - SHARED_BASE
        if offset not in self._descriptions:
            self._descriptions[offset] = _describe_address(self.kernel, offset)
        return self._descriptions[offset]


def _describe_address(kernel: Kernel, offset: int) -> tuple[str, int | None]:
    """Return (name, slot) of the buffer at an offset of shared memory; the slot is None if the buffer has only one."""
    for buffer in kernel.buffers:
        if buffer.offset <= offset < buffer.offset + buffer.bytes:
            slot = (offset - buffer.offset) // buffer.slot_bytes
            return (f"{buffer.name}[{slot}]", slot) if buffer.count > 1 else (buffer.name, None)
    return f"shared memory {offset:#x}", None
