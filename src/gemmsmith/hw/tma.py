"""TMA: the copy engine moves boxes of a rank-3 tensor. PTX ISA, "cp.async.bulk.tensor"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gemmsmith.core.arguments import INTERLEAVED_ROWS, TensorMap
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.scalars import round_up
from gemmsmith.core.tile import swizzled
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.instruction import Instruction, Sm90Instruction, i32, tensor_map, u16, u32, u64
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U64
from gemmsmith.lang.values import Constant, Operation, Value, ValueLike
from gemmsmith.machine import Access, AsyncOperation, Blocking, Machine, MbarrierTx

EVICT_FIRST = Constant(U64, 0x12F0000000000000, "EVICT_FIRST")
EVICT_NORMAL = Constant(U64, 0x1000000000000000, "EVICT_NORMAL")
EVICT_LAST = Constant(U64, 0x14F0000000000000, "EVICT_LAST")
"""L2 cache policies, as encoded by `createpolicy.fractional` (CUTLASS: TMA::CacheHintSm90)."""
SWIZZLE_UNIT_BYTES = 16
"""Bytes of the unit that a swizzle permutes (CUDA driver API, "cuTensorMapEncodeTiled")."""


@dataclass(frozen=True)
class Box:
    """The box of a tensor map at coordinates (x, y, z), and the accesses to its bytes in global and in shared memory.

    x counts elements of a row, y rows, z matrices. Parts of the box may be outside the tensor.
    """

    map: TensorMap
    x: int
    y: int
    z: int

    @cached_property
    def in_bounds(self) -> tuple[np.ndarray, slice]:
        """Which of the box is inside the tensor: a mask of its rows, and the slice of the bytes of a row."""
        (columns, *extents), element = self.map.extents, self.map.dtype.bytes
        y, z = self._rows
        rows = (y >= 0) & (y < extents[0]) & (z >= 0) & (z < extents[1])
        first, stop = max(-self.x, 0), min(columns - self.x, self.map.box[0])
        return rows.reshape(-1), slice(first * element, max(first, stop) * element)

    @cached_property
    def stored(self) -> tuple[np.ndarray, slice]:
        """What a TMA store writes: a mask of the box's rows, and the slice of the bytes of a row.

        It writes whole units of 16 bytes, so up to 15 bytes beyond the end of the tensor's row.
        """
        rows, part = self.in_bounds
        stop = round_up(part.stop, SWIZZLE_UNIT_BYTES) if part.start < part.stop else part.stop
        return rows, slice(part.start, stop)

    @cached_property
    def source(self) -> Access:
        """The access to the bytes in global memory that a load reads."""
        return self._global_access(*self.in_bounds)

    @cached_property
    def target(self) -> Access:
        """The access to the bytes in global memory that a store writes."""
        return self._global_access(*self.stored)

    @property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The coordinates (y, z) of the box's rows, as arrays (1, ys) and (zs, 1) that broadcast."""
        _, ys, zs = self.map.box
        return self.y + np.arange(ys, dtype=np.int64)[None, :], self.z + np.arange(zs, dtype=np.int64)[:, None]

    def _global_access(self, rows: np.ndarray, part: slice) -> Access:
        """Return the access to a part of the bytes of some rows.

        `rows`: a mask of the box's rows; `part`: a slice of bytes.
        """
        y, z = self._rows
        first = self.map.address + self.x * self.map.dtype.bytes + part.start
        start = first + self.map.row_offset(y) + z * self.map.strides[1]
        return Access("global", start.reshape(-1)[rows], part.stop - part.start)

    def shared_access(self, address: int, rank: int | None) -> Access:
        """Return the access to the box in shared memory: its units of 16 bytes, swizzled, row by row.

        `address`: of the box. `rank`: of the CTA in the cluster; None for the issuing one.
        """
        return _shared_access(address, self.map.box_bytes, self.map.swizzle, rank)

    def load(self, m: Machine, targets: list[Access]) -> None:
        """Copy the box from global memory to each of `targets` in shared memory.

        Elements outside the tensor are zero.
        """
        rows, part = self.in_bounds
        data = np.zeros((len(rows), self.map.box_bytes // len(rows)), np.uint8)
        data[rows, part] = m.memory.peek(self.source)
        for target in targets:
            m.memory.poke(target, data.reshape(-1, SWIZZLE_UNIT_BYTES))

    def store(self, m: Machine, source: Access) -> None:
        """Copy the box from the access `source` to shared memory to global memory."""
        rows, part = self.stored
        m.memory.poke(self.target, m.memory.peek(source).reshape(len(rows), -1)[rows, part])


_box = lru_cache(maxsize=1024)(Box)
"""A Box, whose accesses are computed once."""


@lru_cache(maxsize=256)
def _shared_access(address: int, nbytes: int, swizzle: int, rank: int | None) -> Access:
    units = address + np.arange(0, nbytes, SWIZZLE_UNIT_BYTES, dtype=np.int64)
    return Access("shared", swizzled(units, swizzle), SWIZZLE_UNIT_BYTES, rank)


def _name(map: Value) -> str:
    """Return the name of a tensor map; of several, of which conditions select one, the shortest."""
    names = [_name(x) for x in map.operands[1:]] if isinstance(map, Operation) else [str(map.name)]
    return min(names, key=len)


def _start_load(m: Machine, load: Any, ranks: list[int | None]) -> None:
    """Start a load into the CTAs of `ranks` in the cluster (None: the issuing one), and report misaligned ones.

    `load`: a TmaLoad or a TmaLoadMulticast. Each CTA's mbarrier receives the bytes of a whole box, also if some are
    outside the tensor.
    """
    map = m.uniform(load.map)
    y = m.uniform(load.y) * (INTERLEAVED_ROWS if map.interleave_stride else 1)
    box = _box(map, m.uniform(load.x), y, m.uniform(load.z))
    destination, barrier = m.uniform(load.destination), m.uniform(load.barrier)
    # An x that is not a multiple of 16 bytes is an illegal instruction on an H200.
    if destination % 128 or (box.x * box.map.dtype.bytes) % SWIZZLE_UNIT_BYTES:
        m.report("alignment", f"TMA load to {destination:#x} of x = {box.x}: needs 128- and 16-byte alignment")
    targets = [box.shared_access(destination, rank) for rank in ranks]
    nbytes = box.map.box_bytes  # also if some are out of bounds
    m.async_operations.start(
        AsyncOperation(f"TMA load of {_name(load.map)}", "tma", lambda: box.load(m, targets), [box.source], targets,
                       complete_tx=[MbarrierTx(rank, barrier, nbytes) for rank in ranks], nbytes=nbytes,
                       coordinates=(box.x, box.y, box.z))
    )  # fmt: skip


def _load_text(self: Any) -> str:
    """Return the PTX of a load.

    A tensor map of interleaved rows has two more dimensions, the rows of a group of 8 and the two tensors (see
    TensorMap). A box has all of both, so these coordinates are 0.
    """
    ptx = Instruction.text(self)
    return ptx.replace(".3d", ".5d").replace("{x}, {y}", "{x}, 0, 0, {y}") if self.interleaved else ptx


class TmaLoad(Sm90Instruction):
    """Copies the box at (x, y, z) of a tensor map to this CTA's shared memory, and completes its bytes on the mbarrier.

    Elements outside the tensor are zero. `destination`, `barrier`: shared-memory addresses. `cache_hint`: an L2 policy.
    `interleaved`: the rows of the map alternate between two tensors; `y` then counts groups of 16 rows. `space`: of the
    destination in the PTX, "cta" or "cluster".
    """

    map: tensor_map
    x: i32
    y: i32
    z: i32
    destination: u32
    barrier: u32
    cache_hint: u64
    interleaved: bool = False
    space: str = "cluster"
    ptx = (
        "cp.async.bulk.tensor.3d.shared::{space}.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{destination}], [{map}, {{x}, {y}, {z}}], [{barrier}], {cache_hint};"
    )
    text = _load_text

    def simulate(self, m: Machine) -> None:
        _start_load(m, self, [None])


def load(
    map: Value, x: ValueLike, y: ValueLike, z: ValueLike, destination: ValueLike | SharedView,
    barrier: ValueLike | SharedView, cache_hint: ValueLike = EVICT_NORMAL, *, interleaved: bool = False,
) -> None:  # fmt: skip
    """Copy the box at (x, y, z) of a tensor map to shared memory, and complete its bytes on the mbarrier (`TmaLoad`).

    From sm_100 on it uses `.shared::cta`; with `.shared::cluster` ptxas emits a function call on sm_120.
    """
    space = "cta" if current_builder().chip.supports("sm_100") else "cluster"
    TmaLoad(map, x, y, z, destination, barrier, cache_hint, interleaved, space).issue()


class TmaLoadMulticast(Sm90Instruction):
    """Copies the box at (x, y, z) of a tensor map to every CTA of `mask`, at the same shared-memory address.

    The bytes complete on the mbarrier at the same address in each CTA. `mask`: a bit per rank in the cluster. The other
    fields are those of TmaLoad.
    """

    map: tensor_map
    x: i32
    y: i32
    z: i32
    destination: u32
    barrier: u32
    mask: u16
    cache_hint: u64
    interleaved: bool = False
    ptx = (
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint "
        "[{destination}], [{map}, {{x}, {y}, {z}}], [{barrier}], {mask}, {cache_hint};"
    )
    text = _load_text

    def simulate(self, m: Machine) -> None:
        mask = int(m.uniform(self.mask))
        _start_load(m, self, [rank for rank in range(m.cluster_size) if mask >> rank & 1])


class TmaStore(Sm90Instruction):
    """Copies shared memory at `source` to the box at (x, y, z) of a tensor map, as part of the current bulk group.

    What is outside the tensor is dropped in units of 16 bytes: a row that ends within a unit is written to the unit's
    end.
    """

    map: tensor_map
    x: i32
    y: i32
    z: i32
    source: u32
    ptx = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [{map}, {{x}, {y}, {z}}], [{source}];"

    def simulate(self, m: Machine) -> None:
        """Start the store of the box; report an address or coordinate that is misaligned, and negative coordinates."""
        box = _box(m.uniform(self.map), m.uniform(self.x), m.uniform(self.y), m.uniform(self.z))
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
                           [box.target], group="bulk", nbytes=box.map.box_bytes, coordinates=(box.x, box.y, box.z))
        )  # fmt: skip


class TmaStoreHint(TmaStore):
    """TmaStore with an L2 cache policy for the written data."""

    cache_hint: u64
    ptx = (
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint "
        "[{map}, {{x}, {y}, {z}}], [{source}], {cache_hint};"
    )


class BulkCommit(Sm90Instruction):
    """cp.async.bulk.commit_group: commits the thread's earlier bulk stores as one group."""

    ptx = "cp.async.bulk.commit_group;"

    def simulate(self, m: Machine) -> None:
        m.async_operations.commit("bulk")


class BulkWaitRead(Sm90Instruction):
    """cp.async.bulk.wait_group.read: waits until all but the `pending` latest of the thread's bulk groups are read.

    The shared memory from which these groups store may then be overwritten.
    """

    pending: int
    ptx = "cp.async.bulk.wait_group.read {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.async_operations.wait("bulk", self.pending, read=True)


class PrefetchTensorMap(Sm90Instruction):
    """Prefetches a tensor map into the descriptor cache."""

    map: tensor_map
    ptx = "prefetch.tensormap [{map}];"

    def simulate(self, m: Machine) -> None:
        return None
