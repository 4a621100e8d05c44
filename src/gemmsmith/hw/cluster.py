"""Clusters: ranks, barriers, and other CTAs' shared memory. PTX ISA, "barrier.cluster", "mapa"."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.hw.memory import bytes_of, number_type
from gemmsmith.lang.instruction import Instruction, i32, order, registers_in, registers_out, u32
from gemmsmith.lang.machine import Access, AsyncOperation, Blocking, Machine
from gemmsmith.lang.types import I32, U32

_RANK_SHIFT = 24
"""A shared::cluster address carries its CTA's rank from this bit on."""


class ClusterRank(Instruction):
    """This CTA's rank in its cluster."""

    architecture = "sm_90"
    result = I32
    pure = True
    ptx = "mov.u32 {result}, %%cluster_ctarank;"

    def simulate(self, m: Machine) -> int:
        return m.rank


class BlockIndex(Instruction):
    """blockIdx.x; CTAs of a cluster are consecutive."""

    result = I32
    pure = True
    cuda = "(int)blockIdx.x"

    def simulate(self, m: Machine) -> int:
        return m.block


class GridSize(Instruction):
    """gridDim.x."""

    result = I32
    pure = True
    cuda = "(int)gridDim.x"

    def simulate(self, m: Machine) -> int:
        return m.grid


class OrderEntry(Instruction):
    """Entry `index` of a table: where in a walk over tiles a cluster begins."""

    table: order
    index: i32
    result = I32
    pure = True
    cuda = "(int){table}.of[{index}]"

    def simulate(self, m: Machine) -> Any:
        return int(m.value(self.table)[m.uniform(self.index)])


class ClusterArrive(Instruction):
    """Arrives at the cluster's barrier, releasing earlier writes."""

    architecture = "sm_90"
    ptx = "barrier.cluster.arrive.release.aligned;"

    def simulate(self, m: Machine) -> None:
        m.cluster_arrive()


class ClusterArriveRelaxed(Instruction):
    """Arrives at the cluster's barrier, releasing nothing: others see no write, but mbarrier inits that are fenced.

    The release of `cluster_arrive` is a MEMBAR.GPU, which waits for all that is in flight, TMA copies too. As CUTLASS
    3.x starts its kernels.
    """

    architecture = "sm_90"
    ptx = "barrier.cluster.arrive.relaxed.aligned;"

    def simulate(self, m: Machine) -> None:
        m.cluster_arrive(relaxed=True)


class ClusterWait(Instruction):
    """Until every thread of the cluster has arrived."""

    architecture = "sm_90"
    ptx = "barrier.cluster.wait.acquire.aligned;"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.cluster_wait()


class Mapa(Instruction):
    """The shared::cluster address of this CTA's `address` in CTA `rank`."""

    architecture = "sm_90"
    address: u32
    rank: u32
    result = U32
    pure = True
    ptx = "mapa.shared::cluster.u32 {result}, {address}, {rank};"

    def simulate(self, m: Machine) -> Any:
        return (m.value(self.address) & ((1 << _RANK_SHIFT) - 1)) + (m.value(self.rank) << _RANK_SHIFT)


def _split(address: Any) -> tuple[Any, Any]:
    return address & ((1 << _RANK_SHIFT) - 1), address >> _RANK_SHIFT


class LoadCluster(Instruction):
    """Loads 4, 8 or 16 bytes of distributed shared memory at a `mapa` address."""

    architecture = "sm_90"
    values: registers_out
    address: u32

    def text(self) -> str:
        vector = "" if self.values.count == 1 else f".v{self.values.count}"
        target = "{values}"
        return f"ld.shared::cluster{vector}.b32 {target}, [{{address}}];"

    def simulate(self, m: Machine) -> None:
        address, rank = _split(m.column(self.address))
        data = np.ascontiguousarray(m.load("shared", address, 4 * self.values.count, rank=rank))
        m.registers(self.values, write=True)[m.active] = data.view(number_type(self.values))[m.active]


class StoreCluster(Instruction):
    """Stores 4, 8 or 16 bytes to distributed shared memory at a `mapa` address."""

    architecture = "sm_90"
    values: registers_in
    address: u32

    def text(self) -> str:
        vector = "" if self.values.count == 1 else f".v{self.values.count}"
        return f"st.shared::cluster{vector}.b32 [{{address}}], {{values}};"

    def simulate(self, m: Machine) -> None:
        address, rank = _split(m.column(self.address))
        m.store("shared", address, bytes_of(m, self.values), rank=rank)


class StoreAsync(Instruction):
    """Stores 4, 8 or 16 bytes of each thread to the shared memory of one CTA, at a `mapa` address; they complete on
    `barrier`, a `mapa` address in that CTA too. Who waits for it with `cluster` sees them."""

    architecture = "sm_90"
    values: registers_in
    address: u32
    barrier: u32

    def text(self) -> str:
        vector = "" if self.values.count == 1 else f".v{self.values.count}"
        return (
            f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 "
            "[{address}], {values}, [{barrier}];"
        )

    def simulate(self, m: Machine) -> None:
        (addresses, ranks), (barrier, rank) = _split(m.column(self.address)), _split(m.uniform(self.barrier))
        if (ranks[m.active] != rank).any():
            m.report("out of bounds", f"a store to CTA {set(ranks[m.active])} that completes in CTA {rank}")
        data = bytes_of(m, self.values)[m.active]
        there = Access("shared", addresses[m.active], data.shape[1], int(rank), np.flatnonzero(m.active))
        m.start(
            AsyncOperation("st.async", "copy", lambda: m.poke(there, data), writes=[there],
                           completes=[(int(rank), int(barrier), data.size)], proxy="generic", work=data.size)
        )  # fmt: skip
