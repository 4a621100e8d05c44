"""Memory wavefronts and sectors, and multiply-adds, counted by source line, next to the ideal counts.

The rules, as Nsight Compute counts on an H200 (benchmarks/ladder/counters.py):

- A wavefront reads or writes one word of each of the 32 banks for any number of lanes; an access takes as many as the
  most words that it accesses in one bank (CUDA C++ Programming Guide, "Shared Memory").
- It serves half a warp for accesses of 8 bytes per lane, a quarter for 16 bytes; twice as many lanes if in a load all
  have the address of their neighbor at distance 1, or all that of their neighbor at distance 2.
- ldmatrix and stmatrix take 8 rows of 16 bytes per wavefront, also if rows are equal.
- Lanes that copy (LDGSTS) from one line of 128 bytes of global memory share a wavefront; lanes that write zeros count
  as in a store.
- TMA and wgmma are counted without conflicts, since swizzled tiles have none.
- Global memory is moved in sectors of 32 bytes: an access of a warp, or a TMA copy, takes those that it touches. A
  warp's copy of 16 bytes per lane takes the sectors of shared memory that it fills, counted per source line.

The L2 lines of 128 bytes that TMA requests, those that each row of a box touches, are inferred from measured times
(tuning/model.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup
from gemmsmith.core.scalars import ceil_div, round_up
from gemmsmith.core.tile import LINE_BYTES, SECTOR_BYTES
from gemmsmith.lang.instruction import Instruction
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.location import SourceLocation
from gemmsmith.machine import Access, AsyncOperation, Space

BANKS = 32
"""Banks of shared memory. CUDA C++ Programming Guide, "Shared Memory"."""
BANK_BYTES = 4
"""Bytes of a bank. CUDA C++ Programming Guide, "Shared Memory"."""
WAVEFRONT_BYTES = BANKS * BANK_BYTES
WARP_LANES = 32
L1_BYPASS_COPY_BYTES = 16
"""Bytes per thread of a cp.async that bypasses the L1 (cp.async.cg). PTX ISA, "cp.async"."""
LANES_PER_WAVEFRONT = {8: 16, 16: 8}
"""Lanes per wavefront, by access width in bytes (32 for other widths)."""


@dataclass
class Count:
    """Counts for one instruction at one source line.

    Attributes:
        location: The source line.
        instruction: The name of the instruction's wrapper.
        memory: Names of the buffers accessed, separated by commas.
        instructions: Warp instructions.
        macs: Multiply-adds.
        wavefronts: Of shared memory.
        sectors: Of 32 bytes of global memory.
        lines: Of 128 bytes, touched by the rows of TMA boxes.
        ideal_wavefronts, ideal_sectors, ideal_lines: The same without bank conflicts and overfetch: as if the distinct
            bytes were contiguous.
    """

    location: SourceLocation
    instruction: str
    memory: str = ""
    instructions: int = 0
    macs: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    lines: int = 0
    ideal_lines: int = 0

    @property
    def access(self) -> str:
        """The instruction and the buffers, as shown in tables."""
        return f"{self.instruction} {self.memory}".rstrip()

    def add(self, name: str, actual: int, ideal: int) -> None:
        """Add to wavefronts, sectors or lines, and to the ideal count of the same."""
        for field, count in ((name, actual), (f"ideal_{name}", ideal)):
            setattr(self, field, getattr(self, field) + count)

    def __add__(self, other: Count) -> Count:
        counts = [name for name, x in vars(self).items() if isinstance(x, int)]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in counts})


class Counters:
    """Counts of simulated kernels: pass one to a simulation and read it afterwards."""

    def __init__(self) -> None:
        self._counts: dict[Kernel, dict[Instruction, Count]] = {}

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels that were executed, in order."""
        return list(self._counts)

    def lines(self, kernel: Kernel) -> list[Count]:
        """Return the counts of a kernel's instructions that access memory or multiply.

        One Count per source line, instruction and buffer, in the order of the lines.
        """
        merged: dict[tuple[SourceLocation, str, str], Count] = {}
        for count in self._counts[kernel].values():
            if count.macs or count.wavefronts or count.sectors:
                key = count.location, count.instruction, count.memory
                merged[key] = merged[key] + count if key in merged else count
        return sorted(merged.values(), key=lambda count: count.location)

    def of(self, group: LockstepGroup) -> AccessCounter:
        """Return the counter of a group, which adds to these counts."""
        return AccessCounter(group, self._counts.setdefault(group.state.kernel, {}))


class AccessCounter:
    """Counts a lockstep group's instructions and their memory accesses.

    Accesses are counted for the instruction that began last. A record is told of each count.
    """

    def __init__(self, group: LockstepGroup, counts: dict[Instruction, Count]) -> None:
        self._group, self._counts = group, counts
        self._count = Count(group.location, "")

    def begin(self, instruction: Instruction) -> None:
        """Count an instruction of the active threads; the accesses that follow are its own."""
        group, count = self._group, self._counts.get(instruction)
        if count is None:
            count = self._counts[instruction] = Count(group.location, instruction.wrapper_name)
        self._count = count
        count.instructions += len(group.active_lanes)
        if instruction.macs_per_thread:
            macs = instruction.macs_per_thread * int(group.active.sum())
            count.macs += macs
            self._record(multiplies=len(group.active_lanes), macs=macs)

    def count(self, space: Space, address: Any, width: int, mask: Any = None) -> None:
        """Count an ordinary access of `width` bytes by each active thread, or by those of `mask`, a bool per thread."""
        group = self._group
        threads = np.flatnonzero(group.active if mask is None else mask)
        access = Access(space, group.broadcast(address)[threads], width, threads=threads)
        self._access(access, neighbors_share=self._count.instruction == "load_shared")

    def count_operation(self, operation: AsyncOperation) -> None:
        """Count the accesses of an asynchronous operation."""
        for access in operation.reads:
            self._access(access, copy_destinations=operation.writes)
        for access in operation.writes:
            self._access(access, copy_sources=operation.reads)

    def _access(
        self, access: Access, *, neighbors_share: bool = False, copy_sources: Sequence[Access] = (),
        copy_destinations: Sequence[Access] = (),
    ) -> None:  # fmt: skip
        if not len(access.addresses) or not access.width:
            return
        count, state = self._count, self._group.state
        name = state.name_of(access).partition("[")[0]
        if access.space == "shared":
            actual, ideal = wavefronts(access, neighbors_share=neighbors_share, copy_sources=copy_sources)
            count.add("wavefronts", actual, ideal)
            self._record(wavefronts=actual, ideal_wavefronts=ideal)
        else:
            actual, ideal = sectors(access, copy_destinations)
            count.add("sectors", actual, ideal)
            self._record(sectors=actual, ideal_sectors=ideal)
            if access.threads is None:
                count.add("lines", *lines(access))
        if name not in count.memory.split(", "):
            count.memory = f"{count.memory}, {name}" if count.memory else name

    def _record(self, **counts: int) -> None:
        if (observer := self._group.state.observer) is not None:
            observer.count(self._group.cta.index, **counts)


def wavefronts(
    access: Access, *, neighbors_share: bool = False, copy_sources: Sequence[Access] = ()
) -> tuple[int, int]:
    """Return (actual, ideal) wavefronts of a shared-memory access, by the rules of the module's docstring.

    `neighbors_share`: neighboring lanes with the same address share a wavefront (loads). `copy_sources`: for cp.async,
    the global reads; threads without one write zeros.
    """
    ideal = _ideal(access, WAVEFRONT_BYTES)
    if access.threads is None:
        return ideal, ideal
    lane = access.threads % WARP_LANES
    lanes_per_wavefront = np.full(len(access.threads), LANES_PER_WAVEFRONT.get(access.width, WARP_LANES))
    if neighbors_share and access.width in LANES_PER_WAVEFRONT:
        lanes_per_wavefront[_shares_with_neighbor(access)] *= 2
    # Lanes of one group may share a wavefront; then it takes as many as the most distinct words in one bank.
    group = access.threads // WARP_LANES * WARP_LANES + lane // lanes_per_wavefront
    words = access.addresses[:, None] // BANK_BYTES + np.arange(max(1, access.width // BANK_BYTES))
    if copy_sources:
        group, counted = _split_by_source_line(access, copy_sources, group)
        group, words = group[counted], words[counted]
    distinct = np.unique(group[:, None] << 32 | words)
    words_per_bank = np.bincount((distinct >> 32) * BANKS + distinct % BANKS)
    words_per_bank.resize(round_up(len(words_per_bank), BANKS))
    return int(words_per_bank.reshape(-1, BANKS).max(1).sum()), ideal


def sectors(access: Access, copy_destinations: Sequence[Access] = ()) -> tuple[int, int]:
    """Return (actual, ideal) sectors of a global-memory access.

    `copy_destinations`: for cp.async, the shared-memory destinations. A copy of 16 bytes per thread, which bypasses the
    L1, counts the sectors of shared memory that it fills.
    """
    if access.threads is not None and access.width == L1_BYPASS_COPY_BYTES and copy_destinations:
        return _sectors_of_l1_bypass_copy(access, copy_destinations), _ideal(access, SECTOR_BYTES)
    max_sectors = (access.width + SECTOR_BYTES - 2) // SECTOR_BYTES + 1
    candidates = access.addresses[:, None] // SECTOR_BYTES + np.arange(max_sectors)
    is_touched = candidates <= (access.addresses[:, None] + access.width - 1) // SECTOR_BYTES
    return len(np.unique((_warps(access)[:, None] << 48 | candidates)[is_touched])), _ideal(access, SECTOR_BYTES)


def lines(access: Access) -> tuple[int, int]:
    """Return (actual, ideal) lines of 128 bytes that the rows of a TMA box touch."""
    first, last = access.addresses // LINE_BYTES, (access.addresses + access.width - 1) // LINE_BYTES
    return int((last - first + 1).sum()), len(access.addresses) * ceil_div(access.width, LINE_BYTES)


def _sectors_of_l1_bypass_copy(access: Access, copy_destinations: Sequence[Access]) -> int:
    """Return the sectors of shared memory that threads fill by copying from `access`, counted once per source line.

    A copy to an address to which another thread of the warp copies, too, does not count.
    """
    target, warps = _addresses_of_threads(access, copy_destinations), _warps(access)
    _, counted = np.unique(warps << 48 | target, return_index=True)
    filled = np.stack([warps, access.addresses // LINE_BYTES, target // SECTOR_BYTES], axis=1)[counted]
    return len(np.unique(filled, axis=0))


def _addresses_of_threads(access: Access, others: Sequence[Access]) -> np.ndarray:
    """Return the address that each thread of `access` has in the accesses `others`; -1 if it has none."""
    assert access.threads is not None
    threads = [access.threads, *(x.threads for x in others if x.threads is not None)]
    addresses = np.full(int(max(x.max(initial=-1) for x in threads)) + 1, -1)
    for x in others:
        addresses[x.threads] = x.addresses
    return np.asarray(addresses[access.threads])


def _ideal(access: Access, granularity: int) -> int:
    """Return how many blocks of `granularity` bytes the accessed bytes would fill if they were contiguous.

    Each address counts once per warp; all addresses of an asynchronous engine count together.
    """
    distinct = np.unique(_warps(access) << 48 | access.addresses)
    return int((-(-np.bincount(distinct >> 48) * access.width // granularity)).sum())


def _warps(access: Access) -> np.ndarray:
    return np.zeros(len(access.addresses), np.int64) if access.threads is None else access.threads // WARP_LANES


def _shares_with_neighbor(access: Access) -> np.ndarray:
    """Return, per thread, whether its warp's lanes can share wavefronts with their neighbors.

    They can if all have the address of their neighbor at distance 1, or all that at distance 2; inactive lanes do not
    count.
    """
    assert access.threads is not None
    addresses = np.full((int(access.threads[-1]) // WARP_LANES + 1, WARP_LANES), -1)
    addresses.reshape(-1)[access.threads] = access.addresses
    shares = np.zeros(len(addresses), bool)
    for distance in (1, 2):
        neighbor = addresses[:, np.arange(WARP_LANES) ^ distance]
        shares |= ((addresses == neighbor) | (addresses < 0) | (neighbor < 0)).all(1)
    return np.asarray(shares[access.threads // WARP_LANES])


def _split_by_source_line(
    access: Access, copy_sources: Sequence[Access], group: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (wavefront group of each thread, indices of the threads that count), for a copy by cp.async.

    Threads of a warp that copy from one line of global memory share a group; those that write zeros keep theirs,
    `group`. Of the threads that write one address, only one counts.
    """
    source, warps = _addresses_of_threads(access, copy_sources), _warps(access)
    _, line = np.unique(warps << 48 | source // LINE_BYTES, return_inverse=True)
    _, counted = np.unique(warps << 48 | access.addresses, return_index=True)
    return np.where(source >= 0, group.max() + 1 + line, group), counted
