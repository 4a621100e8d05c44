"""TMA: the copy engine moves boxes of a rank-3 tensor. PTX ISA, "cp.async.bulk.tensor"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gemmsmith.core.cached_property import cached_property
from gemmsmith.core.integers import round_up
from gemmsmith.core.tensor_map import INTERLEAVED_ROWS, TensorMap
from gemmsmith.core.tile import swizzled
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.instruction import Instruction, i32, tensor_map, u16, u32, u64
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U64
from gemmsmith.lang.values import Constant, Value, ValueLike
from gemmsmith.machine import Access, AsyncOperation, Blocking, Machine, MbarrierTx

EVICT_FIRST = Constant(U64, 0x12F0000000000000, "EVICT_FIRST")
EVICT_NORMAL = Constant(U64, 0x1000000000000000, "EVICT_NORMAL")
EVICT_LAST = Constant(U64, 0x14F0000000000000, "EVICT_LAST")
"""L2 cache policies, as encoded by `createpolicy.fractional` (CUTLASS: TMA::CacheHintSm90)."""
SWIZZLE_UNIT_BYTES = 16
"""Bytes of the unit that a swizzle permutes (CUDA driver API, "cuTensorMapEncodeTiled")."""


@dataclass(frozen=True)
class Box:
    """A box of a tensor map at coordinates (x, y, z): its bytes in global and in shared memory."""

    map: TensorMap
    x: int
    y: int
    z: int

    @property
    def row_bytes(self) -> int:
        return self.map.box[0] * self.map.dtype.bytes

    @property
    def bytes(self) -> int:
        """Bytes that complete on the mbarrier: always those of the full box."""
        return self.map.box_bytes

    @cached_property
    def in_bounds_region(self) -> tuple[np.ndarray, slice]:
        """The mask of the in-bounds rows, and the slice of the in-bounds bytes of a row."""
        y = self.y + np.arange(self.map.box[1])[None, :]
        z = self.z + np.arange(self.map.box[2])[:, None]
        rows = (y >= 0) & (y < self.map.extents[1]) & (z >= 0) & (z < self.map.extents[2])
        first, stop = max(-self.x, 0), min(self.map.extents[0] - self.x, self.map.box[0])
        return rows.reshape(-1), slice(first * self.map.dtype.bytes, max(first, stop) * self.map.dtype.bytes)

    @cached_property
    def source(self) -> Access:
        """The access to the bytes in global memory that a load reads."""
        return self._global_access(*self.in_bounds_region)

    @cached_property
    def target(self) -> Access:
        """The access to the bytes in global memory that a store writes."""
        return self._global_access(*self._stored_region())

    def _global_access(self, rows: np.ndarray, byte_range: slice) -> Access:
        width = byte_range.stop - byte_range.start
        y = self.y + np.arange(self.map.box[1], dtype=np.int64)[None, :]
        z = self.z + np.arange(self.map.box[2], dtype=np.int64)[:, None]
        first = self.map.address + self.x * self.map.dtype.bytes + byte_range.start
        start = first + self.map.row_offset(y) + z * self.map.strides[1]
        return Access("global", start.reshape(-1)[rows] if width else np.zeros(0, np.int64), width)

    def shared_access(self, address: int, rank: int | None) -> Access:
        """Return the access to the 16-byte units of the box in shared memory, row by row."""
        return _shared_access(address, self.bytes, self.map.swizzle, rank)

    def load(self, m: Machine, targets: list[Access]) -> None:
        rows, byte_range = self.in_bounds_region
        data = np.zeros((len(rows), self.row_bytes), np.uint8)
        if byte_range.start < byte_range.stop:
            data[rows, byte_range] = m.memory.peek(self.source)
        for target in targets:
            m.memory.poke(target, data.reshape(-1, SWIZZLE_UNIT_BYTES))

    def _stored_region(self) -> tuple[np.ndarray, slice]:
        """Return the in-bounds rows, with their bytes rounded up to 16.

        A TMA store writes whole 16-byte units, beyond the end of the row if need be.
        """
        rows, byte_range = self.in_bounds_region
        stop = round_up(byte_range.stop, SWIZZLE_UNIT_BYTES) if byte_range.start < byte_range.stop else byte_range.stop
        return rows, slice(byte_range.start, stop)

    def store(self, m: Machine, source: Access) -> None:
        rows, byte_range = self._stored_region()
        data = m.memory.peek(source).reshape(len(rows), self.row_bytes)
        if byte_range.start < byte_range.stop:
            m.memory.poke(self.target, data[rows, byte_range])


_box = lru_cache(maxsize=1024)(Box)
"""A Box, whose accesses are computed once."""


@lru_cache(maxsize=256)
def _shared_access(address: int, nbytes: int, swizzle: int, rank: int | None) -> Access:
    units = address + np.arange(0, nbytes, SWIZZLE_UNIT_BYTES, dtype=np.int64)
    return Access("shared", swizzled(units, swizzle), SWIZZLE_UNIT_BYTES, rank)


def _start_load(m: Machine, load: Any, ranks: list[int | None]) -> None:
    map = m.value(load.map)
    y = m.uniform(load.y) * (INTERLEAVED_ROWS if map.interleave_stride else 1)
    box = _box(map, m.uniform(load.x), y, m.uniform(load.z))
    destination, barrier = m.uniform(load.destination), m.uniform(load.barrier)
    # An x that is not a multiple of 16 bytes is an illegal instruction on an H200.
    if destination % 128 or (box.x * box.map.dtype.bytes) % SWIZZLE_UNIT_BYTES:
        m.report("alignment", f"TMA load to {destination:#x} of x = {box.x}: needs 128- and 16-byte alignment")
    targets = [box.shared_access(destination, rank) for rank in ranks]
    m.async_operations.start(
        AsyncOperation(f"TMA load of {load.map.name}", "tma", lambda: box.load(m, targets), [box.source], targets,
                       complete_tx=[MbarrierTx(rank, barrier, box.bytes) for rank in ranks], nbytes=box.bytes,
                       coordinates=(box.x, box.y, box.z))
    )  # fmt: skip


class TmaLoad(Instruction):
    """Copies the box at (x, y, z) to shared memory; its bytes complete on `barrier`.

    Elements outside the tensor are zero.
    """

    required_arch = "sm_90"
    map: tensor_map
    x: i32
    y: i32
    z: i32
    destination: u32
    barrier: u32
    cache_hint: u64
    space: str = "cluster"
    ptx = (
        "cp.async.bulk.tensor.3d.shared::{space}.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{destination}], [{map}, {{x}, {y}, {z}}], [{barrier}], {cache_hint};"
    )

    def simulate(self, m: Machine) -> None:
        _start_load(m, self, [None])


class TmaLoadInterleaved(TmaLoad):
    """TmaLoad of a map whose rows alternate between two tensors; `y` counts groups of 16 rows."""

    ptx = (
        "cp.async.bulk.tensor.5d.shared::{space}.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{destination}], [{map}, {{x}, 0, 0, {y}, {z}}], [{barrier}], {cache_hint};"
    )


def load(
    map: Value, x: ValueLike, y: ValueLike, z: ValueLike, destination: ValueLike | SharedView,
    barrier: ValueLike | SharedView, cache_hint: ValueLike, *, interleaved: bool = False,
) -> None:  # fmt: skip
    """Emit a TMA load into this CTA's shared memory.

    From sm_100 on it uses `.shared::cta`; with `.shared::cluster` ptxas emits a function call on sm_120.
    `interleaved`: of a map whose rows alternate between two tensors; y counts groups of 16 rows.
    """
    space = "cta" if current_builder().chip.supports("sm_100") else "cluster"
    kind = TmaLoadInterleaved if interleaved else TmaLoad
    kind(map, x, y, z, destination, barrier, cache_hint, space).issue()


class TmaLoadMulticast(Instruction):
    """Copies the box at (x, y, z) to every CTA of `mask`, at the same shared-memory address.

    The bytes complete on the barrier at the same address in each CTA.
    """

    required_arch = "sm_90"
    map: tensor_map
    x: i32
    y: i32
    z: i32
    destination: u32
    barrier: u32
    mask: u16
    cache_hint: u64
    ptx = (
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint "
        "[{destination}], [{map}, {{x}, {y}, {z}}], [{barrier}], {mask}, {cache_hint};"
    )

    def simulate(self, m: Machine) -> None:
        mask = int(m.uniform(self.mask))
        _start_load(m, self, [rank for rank in range(m.cluster_size) if mask >> rank & 1])


class TmaLoadMulticastInterleaved(TmaLoadMulticast):
    """TmaLoadMulticast of a map whose rows alternate between two tensors; `y` counts groups of 16 rows."""

    ptx = (
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint "
        "[{destination}], [{map}, {{x}, 0, 0, {y}, {z}}], [{barrier}], {mask}, {cache_hint};"
    )


def load_multicast(
    map: Value, x: ValueLike, y: ValueLike, z: ValueLike, destination: ValueLike | SharedView,
    barrier: ValueLike | SharedView, mask: ValueLike, cache_hint: ValueLike, *, interleaved: bool = False,
) -> None:  # fmt: skip
    """Emit a TMA load into the shared memory of each CTA of `mask`; `interleaved` as in `load`."""
    kind = TmaLoadMulticastInterleaved if interleaved else TmaLoadMulticast
    kind(map, x, y, z, destination, barrier, mask, cache_hint).issue()


class TmaStore(Instruction):
    """Copies the box to (x, y, z), as part of the current bulk group.

    Out-of-bounds data are dropped in units of 16 bytes: a row that ends within a unit is written to the unit's end.
    """

    required_arch = "sm_90"
    map: tensor_map
    x: i32
    y: i32
    z: i32
    source: u32
    ptx = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [{map}, {{x}, {y}, {z}}], [{source}];"

    def simulate(self, m: Machine) -> None:
        box = _box(m.value(self.map), m.uniform(self.x), m.uniform(self.y), m.uniform(self.z))
        source = m.uniform(self.source)
        if min(box.x, box.y, box.z) < 0 or source % 128 or (box.x * box.map.dtype.bytes) % SWIZZLE_UNIT_BYTES:
            # On an H200 negative coordinates are supported in loads; in stores they are an illegal instruction.
            coordinates = (box.x, box.y, box.z)
            m.report(
                "alignment",
                f"TMA store from {source:#x} to {coordinates}: needs 128- and 16-byte alignment, and "
                "no negative coordinate",
            )
        read = box.shared_access(source, None)
        m.async_operations.start(
            AsyncOperation(f"TMA store of {self.map.name}", "tma", lambda: box.store(m, read), [read],
                           [box.target], group="bulk", nbytes=box.bytes, coordinates=(box.x, box.y, box.z))
        )  # fmt: skip


class TmaStoreHint(TmaStore):
    """TmaStore with an L2 cache policy for the written data."""

    cache_hint: u64
    ptx = (
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint "
        "[{map}, {{x}, {y}, {z}}], [{source}], {cache_hint};"
    )


class BulkCommit(Instruction):
    """Commits the thread's prior bulk stores as one group."""

    required_arch = "sm_90"
    ptx = "cp.async.bulk.commit_group;"

    def simulate(self, m: Machine) -> None:
        m.async_operations.commit("bulk")


class BulkWaitRead(Instruction):
    """Waits until at most `pending` of the thread's bulk groups have not yet read their shared memory.

    The shared memory of the other groups may be overwritten.
    """

    required_arch = "sm_90"
    pending: int
    ptx = "cp.async.bulk.wait_group.read {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.async_operations.wait("bulk", self.pending, read=True)


class PrefetchTensorMap(Instruction):
    """Prefetches a tensor map into the descriptor cache."""

    required_arch = "sm_90"
    map: tensor_map
    ptx = "prefetch.tensormap [{map}];"

    def simulate(self, m: Machine) -> None:
        return None
