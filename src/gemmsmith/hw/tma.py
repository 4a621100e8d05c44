"""TMA: the copy engine moves boxes of a rank-3 tensor. PTX ISA, "cp.async.bulk.tensor"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.core.tile import swizzled
from gemmsmith.lang.builder import current
from gemmsmith.lang.instruction import Instruction, i32, tensor_map, u16, u32, u64
from gemmsmith.lang.machine import Access, AsyncOperation, Blocking, Machine
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U64
from gemmsmith.lang.values import Constant, Value, ValueLike

EVICT_FIRST = Constant(U64, 0x12F0000000000000, "EVICT_FIRST")
EVICT_NORMAL = Constant(U64, 0x1000000000000000, "EVICT_NORMAL")
EVICT_LAST = Constant(U64, 0x14F0000000000000, "EVICT_LAST")
"""L2 cache policies, as `createpolicy.fractional` encodes them (CUTLASS, TMA::CacheHintSm90)."""
CHUNK = 16
"""Bytes that a swizzle moves as one."""


@dataclass(frozen=True)
class Box:
    """A box of a tensor map at some coordinates: which bytes exist in memory, and where they lie in shared memory."""

    map: TensorMap
    x: int
    y: int
    z: int

    @property
    def row_bytes(self) -> int:
        return self.map.box[0] * self.map.dtype.bytes

    @property
    def bytes(self) -> int:
        """Bytes counted on the barrier: always the whole box."""
        return self.map.box_bytes

    @cached_property
    def inside(self) -> tuple[np.ndarray, slice]:
        """Which rows are inside the tensor, and which bytes of each."""
        y = self.y + np.arange(self.map.box[1])[None, :]
        z = self.z + np.arange(self.map.box[2])[:, None]
        rows = (y >= 0) & (y < self.map.extents[1]) & (z >= 0) & (z < self.map.extents[2])
        first, stop = max(-self.x, 0), min(self.map.extents[0] - self.x, self.map.box[0])
        return rows.reshape(-1), slice(first * self.map.dtype.bytes, max(first, stop) * self.map.dtype.bytes)

    def in_memory(self, *, stored: bool = False) -> Access:
        rows, columns = self._written() if stored else self.inside
        width = columns.stop - columns.start
        y = self.y + np.arange(self.map.box[1], dtype=np.int64)[None, :]
        z = self.z + np.arange(self.map.box[2], dtype=np.int64)[:, None]
        first = self.map.address + self.x * self.map.dtype.bytes + columns.start
        start = first + y * self.map.strides[0] + z * self.map.strides[1]
        return Access("global", start.reshape(-1)[rows] if width else np.zeros(0, np.int64), width)

    def in_shared(self, address: int, rank: int | None) -> Access:
        """All the box's 16-byte chunks, row by row."""
        return _in_shared(address, self.bytes, self.map.swizzle, rank)

    def load(self, m: Machine, source: Access, targets: list[Access]) -> None:
        rows, columns = self.inside
        data = np.zeros((len(rows), self.row_bytes), np.uint8)
        if columns.start < columns.stop:
            data[rows, columns] = m.peek(source)
        for target in targets:
            m.poke(target, data.reshape(-1, CHUNK))

    def _written(self) -> tuple[np.ndarray, slice]:
        """What is written of the box's part inside, whole chunks: also what lies behind a row that ends within one."""
        rows, columns = self.inside
        whole = -(-columns.stop // CHUNK) * CHUNK
        return rows, slice(columns.start, whole if columns.start < columns.stop else columns.stop)

    def store(self, m: Machine, source: Access, target: Access) -> None:
        rows, columns = self._written()
        data = m.peek(source).reshape(len(rows), self.row_bytes)
        if columns.start < columns.stop:
            m.poke(target, data[rows, columns])


@lru_cache(maxsize=256)
def _in_shared(address: int, nbytes: int, swizzle: int, rank: int | None) -> Access:
    chunks = address + np.arange(0, nbytes, CHUNK, dtype=np.int64)
    return Access("shared", swizzled(chunks, swizzle), CHUNK, rank)


def _start_load(m: Machine, load: Any, ranks: list[int | None]) -> None:
    box = Box(m.value(load.map), m.uniform(load.x), m.uniform(load.y), m.uniform(load.z))
    destination, barrier = m.uniform(load.destination), m.uniform(load.barrier)
    # An x that is no multiple of 16 bytes is an illegal instruction on an H200.
    if destination % 128 or (box.x * box.map.dtype.bytes) % CHUNK:
        m.report("alignment", f"TMA load to {destination:#x} of x = {box.x}: 128 and 16 bytes are needed")
    source, targets = box.in_memory(), [box.in_shared(destination, rank) for rank in ranks]
    m.start(
        AsyncOperation(
            f"TMA load of {load.map.name}",
            "tma",
            perform=lambda: box.load(m, source, targets),
            reads=[source],
            writes=targets,
            completes=[(rank, barrier, box.bytes) for rank in ranks],
            work=box.bytes,
        )
    )


class TmaLoad(Instruction):
    """Copies the box at (x, y, z) into shared memory; its bytes complete on `barrier`. Outside the tensor is zero."""

    architecture = "sm_90"
    map: tensor_map
    x: i32
    y: i32
    z: i32
    destination: u32
    barrier: u32
    cache: u64
    space: str = "cluster"
    ptx = (
        "cp.async.bulk.tensor.3d.shared::{space}.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{destination}], [{map}, {{x}, {y}, {z}}], [{barrier}], {cache};"
    )

    def simulate(self, m: Machine) -> None:
        _start_load(m, self, [None])


def load(
    map: Value, x: ValueLike, y: ValueLike, z: ValueLike, destination: ValueLike | SharedView,
    barrier: ValueLike | SharedView, cache: ValueLike,
) -> None:  # fmt: skip
    """A TmaLoad into the CTA's own shared memory, as later chips than Hopper are told: on sm_120 ptxas calls a function
    for what may lie in a peer's."""
    space = "cta" if current().chip.has("sm_100") else "cluster"
    TmaLoad.emit(map, x, y, z, destination, barrier, cache, space)


class TmaLoadMulticast(Instruction):
    """The same into every CTA of `mask`, at the same address, completing on each one's own barrier."""

    architecture = "sm_90"
    map: tensor_map
    x: i32
    y: i32
    z: i32
    destination: u32
    barrier: u32
    mask: u16
    cache: u64
    ptx = (
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint "
        "[{destination}], [{map}, {{x}, {y}, {z}}], [{barrier}], {mask}, {cache};"
    )

    def simulate(self, m: Machine) -> None:
        mask = int(m.uniform(self.mask))
        _start_load(m, self, [rank for rank in range(m.cluster_size) if mask >> rank & 1])


class TmaStore(Instruction):
    """Copies the box in shared memory to (x, y, z); what lies outside the tensor is dropped, in whole chunks of 16
    bytes: a row that ends within one is written to the chunk's end. Joins the bulk group."""

    architecture = "sm_90"
    map: tensor_map
    x: i32
    y: i32
    z: i32
    source: u32
    ptx = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [{map}, {{x}, {y}, {z}}], [{source}];"

    def simulate(self, m: Machine) -> None:
        box = Box(m.value(self.map), m.uniform(self.x), m.uniform(self.y), m.uniform(self.z))
        source = m.uniform(self.source)
        if min(box.x, box.y, box.z) < 0 or source % 128 or (box.x * box.map.dtype.bytes) % CHUNK:
            # An H200 takes negative coordinates in loads, not in stores: an illegal instruction.
            where = (box.x, box.y, box.z)
            m.report(
                "alignment", f"TMA store from {source:#x} to {where}: 128 and 16 bytes, and no negative coordinate"
            )
        read, written = box.in_shared(source, None), box.in_memory(stored=True)
        m.start(
            AsyncOperation(
                f"TMA store of {self.map.name}",
                "tma",
                perform=lambda: box.store(m, read, written),
                reads=[read],
                writes=[written],
                group="bulk",
                work=box.bytes,
            )
        )


class TmaStoreHint(TmaStore):
    """The same with a cache policy of the L2 for what it writes."""

    cache: u64
    ptx = (
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint "
        "[{map}, {{x}, {y}, {z}}], [{source}], {cache};"
    )


class BulkCommit(Instruction):
    """Closes this thread's group of bulk stores."""

    architecture = "sm_90"
    ptx = "cp.async.bulk.commit_group;"

    def simulate(self, m: Machine) -> None:
        m.commit_group("bulk")


class BulkWait(Instruction):
    """Until at most `pending` of this thread's groups are open: their results are visible."""

    architecture = "sm_90"
    pending: int
    ptx = "cp.async.bulk.wait_group {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.wait_group("bulk", self.pending)


class BulkWaitRead(Instruction):
    """Until at most `pending` groups have not read their shared memory, which is then free to reuse."""

    architecture = "sm_90"
    pending: int
    ptx = "cp.async.bulk.wait_group.read {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.wait_group("bulk", self.pending, read=True)


class PrefetchTensorMap(Instruction):
    """Brings a tensor map into the descriptor cache."""

    architecture = "sm_90"
    map: tensor_map
    ptx = "prefetch.tensormap [{map}];"

    def simulate(self, m: Machine) -> None:
        return None
