"""Clusters: ranks, barriers, and distributed shared memory. PTX ISA, "barrier.cluster", "mapa", "st.async"."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from gemmsmith.hw.memory import VectorInstruction, register_bytes
from gemmsmith.lang.instruction import Instruction, Sm90Instruction, i32, registers_in, u32
from gemmsmith.lang.types import I32, U32, ScalarType
from gemmsmith.machine import CLUSTER_RANK_SHIFT, Access, AsyncOperation, Blocking, Machine, MbarrierTx

MAX_CLUSTERS = 288
"""Maximum clusters of a persistent GEMM's grid: twice the 144 SMs of a full GH100 (NVIDIA H100 whitepaper)."""
CLUSTER_PERMUTATION = ScalarType(
    "cluster_permutation", "ClusterPermutation", 16 * MAX_CLUSTERS, "l",
    struct=f"struct ClusterPermutation {{ uint16_t cluster_idx[{MAX_CLUSTERS}]; }};"
    "  // raster position of each launched cluster\n",
)  # fmt: skip
"""Table passed by value as a kernel parameter: entry c is the raster position of the first tile of cluster c."""


class ClusterRank(Sm90Instruction):
    """Rank of the CTA in its cluster."""

    result = I32
    pure = True
    ptx = "mov.u32 {result}, %%cluster_ctarank;"

    def simulate(self, m: Machine) -> int:
        return m.rank


class BlockIndex(Instruction):
    """blockIdx.x. CTAs of a cluster are consecutive."""

    result = I32
    pure = True
    cuda = "(int)blockIdx.x"

    def simulate(self, m: Machine) -> int:
        return m.block_index


class GridSize(Instruction):
    """gridDim.x."""

    result = I32
    pure = True
    cuda = "(int)gridDim.x"

    def simulate(self, m: Machine) -> int:
        return m.grid_size


class LoadClusterPermutation(Instruction):
    """Loads entry `index` of the kernel parameter `table`: the raster position of the first tile of cluster `index`."""

    table: Annotated[Any, CLUSTER_PERMUTATION]
    index: i32
    result = I32
    pure = True
    cuda = "(int){table}.cluster_idx[{index}]"

    def simulate(self, m: Machine) -> Any:
        return int(m.value(self.table)[m.uniform(self.index)])


class ClusterArriveRelaxed(Sm90Instruction):
    """barrier.cluster.arrive.relaxed: orders no writes except mbarrier inits covered by fence.mbarrier_init.

    As in CUTLASS 3.x, used at kernel start because the release form becomes a MEMBAR.GPU that waits for all memory
    operations in flight, TMA copies included.
    """

    ptx = "barrier.cluster.arrive.relaxed.aligned;"

    def simulate(self, m: Machine) -> None:
        m.barriers.cluster_arrive(relaxed=True)


class ClusterWait(Sm90Instruction):
    """barrier.cluster.wait.acquire: waits until every thread of the cluster has arrived."""

    ptx = "barrier.cluster.wait.acquire.aligned;"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.barriers.cluster_wait()


class Mapa(Sm90Instruction):
    """mapa: maps an address of this CTA's shared memory to its shared::cluster address in CTA `rank`."""

    address: u32
    rank: u32
    result = U32
    result_name = "cluster_address"
    pure = True
    ptx = "mapa.shared::cluster.u32 {result}, {address}, {rank};"

    def simulate(self, m: Machine) -> Any:
        return (m.value(self.address) & ((1 << CLUSTER_RANK_SHIFT) - 1)) + (m.value(self.rank) << CLUSTER_RANK_SHIFT)


def split_rank(address: Any) -> tuple[Any, Any]:
    """Return (address in shared memory, cluster rank) of a shared::cluster address, as `Mapa` returns it."""
    return address & ((1 << CLUSTER_RANK_SHIFT) - 1), address >> CLUSTER_RANK_SHIFT


class StoreAsync(VectorInstruction):
    """st.async: each thread stores 1, 2 or 4 registers to shared memory of a CTA of the cluster.

    The bytes complete on `barrier`, an mbarrier in the same CTA; a wait with scope "cluster" makes the data visible.
    `address`, `barrier`: shared::cluster addresses, as `Mapa` returns them.
    """

    required_arch = "sm_90"
    values: registers_in
    address: u32
    barrier: u32
    ptx = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [{address}], {values}, [{barrier}];"

    def simulate(self, m: Machine) -> None:
        """Start an asynchronous copy of the active threads' registers. Data and mbarrier must be in one CTA."""
        addresses, ranks = split_rank(m.per_thread(self.address))
        barrier, rank = split_rank(m.uniform(self.barrier))
        if (ranks[m.active] != rank).any():
            m.report(
                "out of bounds", f"st.async: data go to CTA {set(ranks[m.active])}, but the mbarrier is in CTA {rank}"
            )
        data = register_bytes(m, self.values)[m.active]
        target = Access("shared", addresses[m.active], data.shape[1], int(rank), np.flatnonzero(m.active))
        m.async_operations.start(
            AsyncOperation("st.async", "copy", lambda: m.memory.poke(target, data), writes=[target],
                           complete_tx=[MbarrierTx(int(rank), int(barrier), data.size)], proxy="generic",
                           nbytes=data.size)
        )  # fmt: skip
