"""What warps ask of memory and of the multipliers, counted by source line, beside the ideal.

Shared memory has 32 banks of 4 bytes. A wavefront reads or writes one word in each bank, whoever asked for it; a warp's
access takes as many as it asks one bank for different words (CUDA C++ Programming Guide, "Shared Memory"). Of 8 bytes a
lane half a warp goes at once, of 16 bytes a quarter, for a wavefront moves 128 bytes. Where in a load all 32 lanes have
the address of their neighbor by 1, or all that of their neighbor by 2, twice as many lanes go at once. ldmatrix and
stmatrix take 8 rows of 16 bytes at once, equal ones too. Lanes that copy (LDGSTS) from one line, 128 bytes, of global
memory go at once; those that write zeros go as in a store. TMA and wgmma are counted without conflicts: swizzled tiles
have none. Memory behind the L1 is moved in sectors of 32 bytes; a warp's access takes those that it touches, a TMA copy
likewise. A warp's copy of 16 bytes a lane takes the sectors of shared memory that it fills, for each line that it comes
from. All this is what Nsight Compute says on an H200 (benchmarks/ladder_counters.py). Of each row of a box TMA asks the
L2 for the lines of 128 bytes that it touches; that is reasoned from times (tuning/model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmsmith.backends.sim.machine import UnitMachine
from gemmsmith.backends.sim.unit import Unit
from gemmsmith.core.tile import LINE_BYTES, SECTOR_BYTES
from gemmsmith.lang.instruction import Instruction
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.machine import Access, AsyncOperation
from gemmsmith.lang.statements import Where

BANKS, WORD, WAVEFRONT, WARP = 32, 4, 128, 32
"""Of shared memory, and bytes of each; bytes of a wavefront; lanes."""
BYPASSING = 16
"""Bytes of a thread's copy that leaves the L1 out."""
AT_ONCE = {8: 16, 16: 8}
"""Lanes whose bytes fill a wavefront, by the width of an access; all where it is not listed."""


@dataclass
class Count:
    """How often a grid has executed an instruction of a line: `instructions` of warps, the `products` that they summed,
    and the wavefronts and sectors of accesses to the buffers named `memory`, by threads and copy engines; `lines`: of
    the rows of copy engines' boxes. Ideal are those that an access, or a row, would take if its bytes, each counted
    once, lay side by side."""

    where: Where
    instruction: str
    memory: str = ""
    instructions: int = 0
    products: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    lines: int = 0
    ideal_lines: int = 0

    @property
    def access(self) -> str:
        """The instruction and the buffers, as tables have them."""
        return f"{self.instruction} {self.memory}".rstrip()

    def __add__(self, other: Count) -> Count:
        numbers = [name for name, x in vars(self).items() if isinstance(x, int)]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in numbers})


class Counters:
    """The counts of simulated kernels. Give one to a simulation, and read it afterwards."""

    def __init__(self) -> None:
        self._counts: dict[Kernel, dict[Instruction, Count]] = {}

    @property
    def kernels(self) -> list[Kernel]:
        """Those that were executed, in order."""
        return list(self._counts)

    def lines(self, kernel: Kernel) -> list[Count]:
        """One for each line, instruction and buffer, in the order of the lines: of all that access memory or
        multiply."""
        found: dict[tuple[Where, str, str], Count] = {}
        for count in self._counts[kernel].values():
            if count.products or count.wavefronts or count.sectors:
                key = count.where, count.instruction, count.memory
                found[key] = found[key] + count if key in found else count
        return sorted(found.values(), key=lambda count: count.where)

    def watch(self, unit: Unit, machine: UnitMachine) -> Callable[[Instruction], Any]:
        """Counts what a unit does from here on. Gives the function by which the unit executes an instruction."""
        return _Watch(unit, machine, self._counts.setdefault(unit.state.kernel, {})).execute


class _Watch:
    """One unit. Its machine's accesses are those of the instruction that it executes."""

    def __init__(self, unit: Unit, machine: UnitMachine, counts: dict[Instruction, Count]) -> None:
        self._unit, self._machine, self._counts = unit, machine, counts
        self._load, self._store, self._atomic, self._start = machine.load, machine.store, machine.atomic, machine.start
        machine.load, machine.store, machine.atomic = self.load, self.store, self.atomic
        machine.start = self.start

    def execute(self, instruction: Instruction) -> Any:
        unit, count = self._unit, self._counts.get(instruction)
        if count is None:
            count = self._counts[instruction] = Count(unit.where, instruction.wrapper_name)
        self._count = count
        count.instructions += len(unit.parts)
        count.products += instruction.products * int(unit.active.sum())
        return instruction.simulate(self._machine)

    def load(self, space: Any, address: Any, nbytes: int, *, mask: Any = None, **others: Any) -> np.ndarray:
        self._ordinary(space, address, nbytes, mask, paired=self._count.instruction == "load_shared")
        return self._load(space, address, nbytes, mask=mask, **others)

    def store(self, space: Any, address: Any, data: np.ndarray, *, mask: Any = None, **others: Any) -> None:
        self._ordinary(space, address, data.shape[1], mask)
        self._store(space, address, data, mask=mask, **others)

    def atomic(self, space: Any, address: Any, dtype: Any, *operation: Any, **others: Any) -> np.ndarray:
        self._ordinary(space, address, np.dtype(dtype).itemsize, None)
        return self._atomic(space, address, dtype, *operation, **others)

    def start(self, operation: AsyncOperation) -> None:
        for access in operation.reads:
            self._access(access, targets=operation.writes)
        for access in operation.writes:
            self._access(access, sources=operation.reads)
        self._start(operation)

    def _ordinary(self, space: Any, address: Any, width: int, mask: Any, *, paired: bool = False) -> None:
        unit = self._unit
        threads = np.flatnonzero(unit.active if mask is None else mask)
        self._access(Access(space, unit.each(address)[threads], width, threads=threads), paired=paired)

    def _access(
        self, access: Access, *, paired: bool = False, sources: Sequence[Access] = (), targets: Sequence[Access] = ()
    ) -> None:
        if not len(access.addresses) or not access.width:
            return
        count, state = self._count, self._unit.state
        if access.space == "shared":
            name = state.place(access.first)[0].partition("[")[0]
            taken, ideal = wavefronts(access, paired=paired, sources=sources)
            count.wavefronts += taken
            count.ideal_wavefronts += ideal
        else:
            buffer = state.memory.find(access.first)
            name = buffer.name if buffer else "?"
            taken, ideal = sectors(access, targets)
            count.sectors += taken
            count.ideal_sectors += ideal
            if access.threads is None:
                taken, ideal = lines(access)
                count.lines += taken
                count.ideal_lines += ideal
        if name not in count.memory.split(", "):
            count.memory = f"{count.memory}, {name}" if count.memory else name


def wavefronts(access: Access, *, paired: bool = False, sources: Sequence[Access] = ()) -> tuple[int, int]:
    """Those of an access to shared memory, and the ideal. `paired`: neighbors with the same address go together.
    `sources`: what threads copy there from global memory; the others write zeros."""
    ideal = _ideal(access, WAVEFRONT)
    if access.threads is None:
        return ideal, ideal
    lane, at_once = access.threads % WARP, np.full(len(access.threads), AT_ONCE.get(access.width, WARP))
    if paired and access.width in AT_ONCE:
        at_once[_paired(access)] *= 2
    group = access.threads // WARP * WARP + lane // at_once
    words = access.addresses[:, None] // WORD + np.arange(max(1, access.width // WORD))
    if sources:
        group, once = _by_line(access, sources, group)
        group, words = group[once], words[once]
    different = np.unique(group[:, None] << 32 | words)
    of_bank = np.bincount((different >> 32) * BANKS + different % BANKS)
    of_bank.resize(-(-len(of_bank) // BANKS) * BANKS)
    return int(of_bank.reshape(-1, BANKS).max(1).sum()), ideal


def sectors(access: Access, targets: Sequence[Access] = ()) -> tuple[int, int]:
    """Those of an access to global memory, and the ideal. `targets`: where in shared memory threads copy it to."""
    if access.threads is not None and access.width == BYPASSING and targets:
        return _filled(access, targets), _ideal(access, SECTOR_BYTES)
    most = (access.width + SECTOR_BYTES - 2) // SECTOR_BYTES + 1
    touched = access.addresses[:, None] // SECTOR_BYTES + np.arange(most)
    inside = touched <= (access.addresses[:, None] + access.width - 1) // SECTOR_BYTES
    return len(np.unique((_warps(access)[:, None] << 48 | touched)[inside])), _ideal(access, SECTOR_BYTES)


def lines(access: Access) -> tuple[int, int]:
    """Those that the rows of a box touch, and the ideal."""
    first, last = access.addresses // LINE_BYTES, (access.addresses + access.width - 1) // LINE_BYTES
    return int((last - first + 1).sum()), len(access.addresses) * -(-access.width // LINE_BYTES)


def _filled(access: Access, targets: Sequence[Access]) -> int:
    """How many sectors of shared memory threads fill by copying, counted for each line that they copy from, without
    what another thread of their warp overwrites."""
    place = _of_threads(access, targets)
    warps = _warps(access)
    _, once = np.unique(warps << 48 | place, return_index=True)
    filled = np.stack([warps, access.addresses // WAVEFRONT, place // SECTOR_BYTES], axis=1)[once]
    return len(np.unique(filled, axis=0))


def _of_threads(access: Access, others: Sequence[Access]) -> np.ndarray:
    """For each of an access's threads its address in the `others`; -1 where it has none."""
    assert access.threads is not None
    threads = [access.threads, *(x.threads for x in others if x.threads is not None)]
    found = np.full(int(max(x.max(initial=-1) for x in threads)) + 1, -1)
    for x in others:
        found[x.threads] = x.addresses
    return np.asarray(found[access.threads])


def _ideal(access: Access, unit: int) -> int:
    """How many units (of so many bytes) the different bytes of each warp, or of an engine's whole operation, fill."""
    different = np.unique(_warps(access) << 48 | access.addresses)
    return int((-(-np.bincount(different >> 48) * access.width // unit)).sum())


def _warps(access: Access) -> np.ndarray:
    return np.zeros(len(access.addresses), np.int64) if access.threads is None else access.threads // WARP


def _paired(access: Access) -> np.ndarray:
    """For each thread, whether in its warp all lanes have the address of their neighbor by 1, or all that of their
    neighbor by 2. Lanes that take no part do not count."""
    assert access.threads is not None
    held = np.full((int(access.threads[-1]) // WARP + 1, WARP), -1)
    held.reshape(-1)[access.threads] = access.addresses
    paired = np.zeros(len(held), bool)
    for distance in (1, 2):
        neighbor = held[:, np.arange(WARP) ^ distance]
        paired |= ((held == neighbor) | (held < 0) | (neighbor < 0)).all(1)
    return np.asarray(paired[access.threads // WARP])


def _by_line(access: Access, sources: Sequence[Access], group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The groups of threads that go at once, where those that copy from one line of `sources` do; and the threads that
    count: one of those of a warp that write the same place."""
    source, warps = _of_threads(access, sources), _warps(access)
    _, line = np.unique(warps << 48 | source // WAVEFRONT, return_inverse=True)
    _, once = np.unique(warps << 48 | access.addresses, return_index=True)
    return np.where(source >= 0, group.max() + 1 + line, group), once
