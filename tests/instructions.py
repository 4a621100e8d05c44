"""Instructions that no kernel of the library has, for tests of the simulator's memory model."""

from __future__ import annotations

from typing import Literal

import numpy as np

from gemmsmith.hw.cluster import split_rank
from gemmsmith.hw.memory import VectorInstruction, numpy_dtype, register_bytes
from gemmsmith.lang.instruction import Instruction, emitter, registers_in, registers_out, u32, u64
from gemmsmith.lang.types import U32
from gemmsmith.machine import Blocking, Machine, Scope


class BulkWait(Instruction):
    """Waits until at most `pending` of the thread's bulk groups are pending; the writes of the others are visible."""

    required_arch = "sm_90"
    pending: int
    ptx = "cp.async.bulk.wait_group {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.async_operations.wait("bulk", self.pending)


class ClusterArrive(Instruction):
    """barrier.cluster.arrive.release: arrives at the cluster barrier and releases prior writes."""

    required_arch = "sm_90"
    ptx = "barrier.cluster.arrive.release.aligned;"

    def simulate(self, m: Machine) -> None:
        m.barriers.cluster_arrive()


class LoadCluster(VectorInstruction):
    """Loads 4, 8 or 16 bytes of distributed shared memory at a `mapa` address."""

    required_arch = "sm_90"
    values: registers_out
    address: u32
    ptx = "ld.shared::cluster{vector}.b32 {values}, [{address}];"

    def simulate(self, m: Machine) -> None:
        address, rank = split_rank(m.per_thread(self.address))
        data = np.ascontiguousarray(m.memory.load("shared", address, 4 * self.values.count, rank=rank))
        m.registers.view(self.values, write=True)[m.active] = data.view(numpy_dtype(self.values))[m.active]


class StoreCluster(VectorInstruction):
    """Stores 4, 8 or 16 bytes to distributed shared memory at a `mapa` address."""

    required_arch = "sm_90"
    values: registers_in
    address: u32
    ptx = "st.shared::cluster{vector}.b32 [{address}], {values};"

    def simulate(self, m: Machine) -> None:
        address, rank = split_rank(m.per_thread(self.address))
        m.memory.store("shared", address, register_bytes(m, self.values), rank=rank)


class LoadStrong(Instruction):
    """Strong load (ld.relaxed or ld.acquire at `scope`) of a word that other threads write concurrently."""

    address: u64
    order: Literal["relaxed", "acquire"]
    scope: Scope
    result = U32
    result_name = "loaded"
    ptx = "ld.{order}.{scope}.global.b32 {result}, [{address}];"

    def simulate(self, m: Machine) -> np.ndarray:
        data = m.memory.load("global", m.per_thread(self.address), 4, order=self.order, scope=self.scope)
        return np.ascontiguousarray(data).view(np.uint32)[:, 0].astype(np.int64)


bulk_wait = emitter(BulkWait)
cluster_arrive = emitter(ClusterArrive)
load_cluster = emitter(LoadCluster)
store_cluster = emitter(StoreCluster)
load_strong = emitter(LoadStrong)
