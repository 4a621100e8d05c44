"""Clusters: ranks, barriers, and distributed shared memory. PTX ISA, "barrier.cluster", "mapa", "st.async"."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from gemmsmith.hw.memory import numpy_dtype, register_bytes
from gemmsmith.lang.instruction import Instruction, i32, registers_in, registers_out, u32
from gemmsmith.lang.types import I32, U32, ScalarType
from gemmsmith.machine import CLUSTER_RANK_SHIFT, Access, AsyncOperation, Blocking, Machine, MbarrierTx

MAX_CLUSTERS = 288
"""Maximum clusters of a persistent kernel's grid, and entries of a cluster permutation: twice the 144 SMs of a full
GH100 (NVIDIA H100 whitepaper)."""
CLUSTER_PERMUTATION = ScalarType(
    "cluster_permutation", "ClusterPermutation", 16 * MAX_CLUSTERS, "l",
    struct=f"struct ClusterPermutation {{ uint16_t cluster_idx[{MAX_CLUSTERS}]; }};"
    "  // logical index of each launched cluster\n",
)  # fmt: skip
"""Table passed by value as a kernel parameter: entry c is the raster position of the first tile of cluster c."""


class ClusterRank(Instruction):
    """Rank of the CTA in its cluster."""

    required_arch = "sm_90"
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
    """Loads entry `index` of the cluster permutation."""

    table: Annotated[Any, CLUSTER_PERMUTATION]
    index: i32
    result = I32
    pure = True
    cuda = "(int){table}.cluster_idx[{index}]"

    def simulate(self, m: Machine) -> Any:
        return int(m.value(self.table)[m.uniform(self.index)])


class ClusterArrive(Instruction):
    """barrier.cluster.arrive.release: arrives at the cluster barrier and releases prior writes."""

    required_arch = "sm_90"
    ptx = "barrier.cluster.arrive.release.aligned;"

    def simulate(self, m: Machine) -> None:
        m.barriers.cluster_arrive()


class ClusterArriveRelaxed(Instruction):
    """barrier.cluster.arrive.relaxed: orders no writes except mbarrier inits covered by fence.mbarrier_init.

    As in CUTLASS 3.x, used at kernel start because the release form becomes a MEMBAR.GPU that waits for all memory
    operations in flight, TMA copies included.
    """

    required_arch = "sm_90"
    ptx = "barrier.cluster.arrive.relaxed.aligned;"

    def simulate(self, m: Machine) -> None:
        m.barriers.cluster_arrive(relaxed=True)


class ClusterWait(Instruction):
    """barrier.cluster.wait.acquire: waits until every thread of the cluster has arrived."""

    required_arch = "sm_90"
    ptx = "barrier.cluster.wait.acquire.aligned;"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.barriers.cluster_wait()


class Mapa(Instruction):
    """mapa: maps an address of this CTA's shared memory to its shared::cluster address in CTA `rank`."""

    required_arch = "sm_90"
    address: u32
    rank: u32
    result = U32
    result_name = "cluster_address"
    pure = True
    ptx = "mapa.shared::cluster.u32 {result}, {address}, {rank};"

    def simulate(self, m: Machine) -> Any:
        return (m.value(self.address) & ((1 << CLUSTER_RANK_SHIFT) - 1)) + (m.value(self.rank) << CLUSTER_RANK_SHIFT)


def _split_rank(address: Any) -> tuple[Any, Any]:
    return address & ((1 << CLUSTER_RANK_SHIFT) - 1), address >> CLUSTER_RANK_SHIFT


class LoadCluster(Instruction):
    """Loads 4, 8 or 16 bytes of distributed shared memory at a `mapa` address."""

    required_arch = "sm_90"
    values: registers_out
    address: u32

    def text(self) -> str:
        vector = "" if self.values.count == 1 else f".v{self.values.count}"
        return f"ld.shared::cluster{vector}.b32 {{values}}, [{{address}}];"

    def simulate(self, m: Machine) -> None:
        address, rank = _split_rank(m.per_thread(self.address))
        data = np.ascontiguousarray(m.memory.load("shared", address, 4 * self.values.count, rank=rank))
        m.registers.view(self.values, write=True)[m.active] = data.view(numpy_dtype(self.values))[m.active]


class StoreCluster(Instruction):
    """Stores 4, 8 or 16 bytes to distributed shared memory at a `mapa` address."""

    required_arch = "sm_90"
    values: registers_in
    address: u32

    def text(self) -> str:
        vector = "" if self.values.count == 1 else f".v{self.values.count}"
        return f"st.shared::cluster{vector}.b32 [{{address}}], {{values}};"

    def simulate(self, m: Machine) -> None:
        address, rank = _split_rank(m.per_thread(self.address))
        m.memory.store("shared", address, register_bytes(m, self.values), rank=rank)


class StoreAsync(Instruction):
    """st.async: each thread stores 4, 8 or 16 bytes to a CTA of the cluster (`mapa` address).

    Completion is signaled on `barrier` (a `mapa` address) in the same CTA; a wait with scope "cluster" makes the data
    visible.
    """

    required_arch = "sm_90"
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
        (addresses, ranks), (barrier, rank) = (
            _split_rank(m.per_thread(self.address)),
            _split_rank(m.uniform(self.barrier)),
        )
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
