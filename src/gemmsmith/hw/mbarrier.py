"""mbarriers: arrivals and bytes are counted in shared memory, phase after phase. PTX ISA, "mbarrier"."""

from __future__ import annotations

from typing import Any

from gemmsmith.lang.instruction import Instruction, u32
from gemmsmith.lang.machine import Blocking, Machine
from gemmsmith.lang.types import PRED


class MbarrierInit(Instruction):
    """A barrier whose phases each need `count` arrivals; phase 0 begins."""

    barrier: u32
    count: u32
    ptx = "mbarrier.init.shared::cta.b64 [{barrier}], {count};"

    def simulate(self, m: Machine) -> None:
        m.mbarrier_init(m.uniform(self.barrier), m.uniform(self.count))


class FenceMbarrierInit(Instruction):
    """Makes this thread's inits visible to the cluster and the async proxy (a cluster or CTA barrier follows)."""

    ptx = "fence.mbarrier_init.release.cluster;"

    def simulate(self, m: Machine) -> None:
        m.fence("mbarrier_init")


class MbarrierArrive(Instruction):
    """One arrival of each executing thread."""

    barrier: u32
    ptx = "mbarrier.arrive.shared::cta.b64 _, [{barrier}];"

    def simulate(self, m: Machine) -> None:
        m.mbarrier_arrive(m.value(self.barrier))


class MbarrierArriveCluster(Instruction):
    """One arrival on the barrier at the same address in CTA `rank` of the cluster (its own included).

    The default scope, as in CUTLASS: `.release.cluster` costs a membar.gpu, 15 % of a GEMM's time, and what a consumer
    hands back was read by wgmma it has waited for.
    """

    barrier: u32
    rank: u32
    ptx = """{
    .reg .b32 remote;
    mapa.shared::cluster.u32 remote, {barrier}, {rank};
    mbarrier.arrive.shared::cluster.b64 _, [remote];
    }"""

    def simulate(self, m: Machine) -> None:
        m.mbarrier_arrive(m.value(self.barrier), rank=m.value(self.rank))


class MbarrierArriveExpectTx(Instruction):
    """One arrival, and `tx_bytes` more to come before the phase completes."""

    barrier: u32
    tx_bytes: u32
    ptx = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {tx_bytes};"

    def simulate(self, m: Machine) -> None:
        m.mbarrier_arrive(m.value(self.barrier), expect_tx=m.value(self.tx_bytes))


class MbarrierExpectTx(Instruction):
    """`tx_bytes` more to come before the phase completes, without an arrival."""

    barrier: u32
    tx_bytes: u32
    ptx = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{barrier}], {tx_bytes};"

    def simulate(self, m: Machine) -> None:
        m.mbarrier_expect_tx(m.uniform(self.barrier), m.uniform(self.tx_bytes))


class MbarrierTryWait(Instruction):
    """Whether the phase of that parity has completed; may suspend the thread for a while first."""

    barrier: u32
    parity: u32
    result = PRED
    ptx = """{
    .reg .pred complete;
    mbarrier.try_wait.parity.shared::cta.b64 complete, [{barrier}], {parity};
    selp.b32 {result}, 1, 0, complete;
    }"""

    def simulate(self, m: Machine) -> Any:
        return m.mbarrier_test(m.uniform(self.barrier), m.uniform(self.parity))


class MbarrierWait(Instruction):
    """Returns once the phase of that parity has completed: on a fresh barrier, at once for parity 1. With `cluster`,
    it sees what other CTAs of the cluster stored."""

    barrier: u32
    parity: u32
    cluster: bool = False

    def text(self) -> str:
        scope = ".acquire.cluster" if self.cluster else ""
        return f"""{{
        .reg .pred complete;
        WAIT:
        mbarrier.try_wait.parity{scope}.shared::cta.b64 complete, [{{barrier}}], {{parity}};
        @complete bra DONE;
        bra WAIT;
        DONE:
        }}"""

    def simulate(self, m: Machine) -> Blocking:
        yield from m.mbarrier_wait(m.uniform(self.barrier), m.uniform(self.parity))
