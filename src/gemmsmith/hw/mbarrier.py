"""mbarriers: arrivals and bytes are counted in shared memory, phase after phase. PTX ISA, "mbarrier"."""

from __future__ import annotations

from typing import Any

from gemmsmith.lang.instruction import Instruction, u32
from gemmsmith.lang.machine import Blocking, Machine, Scope
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

    architecture = "sm_90"
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

    `scope` says what the other CTA may overwrite then. With "cta", which releases nothing to it: what wgmma or TMA has
    read, and was waited for. With "cluster", at the price of a membar.gpu: what ld or st have accessed too.
    """

    architecture = "sm_90"
    barrier: u32
    rank: u32
    scope: Scope

    def text(self) -> str:
        release = "" if self.scope == "cta" else f".release.{self.scope}"
        return f"""{{
    .reg .b32 remote;
    mapa.shared::cluster.u32 remote, {{barrier}}, {{rank}};
    mbarrier.arrive{release}.shared::cluster.b64 _, [remote];
    }}"""

    def simulate(self, m: Machine) -> None:
        m.mbarrier_arrive(m.value(self.barrier), rank=m.value(self.rank), scope=self.scope)


class MbarrierArriveExpectTx(Instruction):
    """One arrival, and `tx_bytes` more to come before the phase completes."""

    architecture = "sm_90"
    barrier: u32
    tx_bytes: u32
    ptx = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {tx_bytes};"

    def simulate(self, m: Machine) -> None:
        m.mbarrier_arrive(m.value(self.barrier), expect_tx=m.value(self.tx_bytes))


class MbarrierExpectTx(Instruction):
    """`tx_bytes` more to come before the phase completes, without an arrival."""

    architecture = "sm_90"
    barrier: u32
    tx_bytes: u32
    ptx = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{barrier}], {tx_bytes};"

    def simulate(self, m: Machine) -> None:
        m.mbarrier_expect_tx(m.uniform(self.barrier), m.uniform(self.tx_bytes))


class MbarrierTestWait(Instruction):
    """Whether the phase of that parity has completed, at once: try_wait might suspend the thread for a while first.
    `scope` as in MbarrierWait."""

    architecture = "sm_90"
    barrier: u32
    parity: u32
    scope: Scope = "cta"
    result = PRED

    def text(self) -> str:
        return f"""{{
        .reg .pred complete;
        mbarrier.test_wait.parity{_acquire(self.scope)}.shared::cta.b64 complete, [{{barrier}}], {{parity}};
        selp.b32 {{result}}, 1, 0, complete;
        }}"""

    def simulate(self, m: Machine) -> Any:
        return m.mbarrier_test(m.uniform(self.barrier), m.uniform(self.parity), self.scope)


def _acquire(scope: Scope) -> str:
    return "" if scope == "cta" else f".acquire.{scope}"


class MbarrierWait(Instruction):
    """Returns once the phase of that parity has completed: on a fresh barrier, at once for parity 1. With the scope
    "cluster" it sees what other CTAs of the cluster stored."""

    architecture = "sm_90"
    barrier: u32
    parity: u32
    scope: Scope = "cta"

    def text(self) -> str:
        return f"""{{
        .reg .pred complete;
        WAIT:
        mbarrier.try_wait.parity{_acquire(self.scope)}.shared::cta.b64 complete, [{{barrier}}], {{parity}};
        @complete bra DONE;
        bra WAIT;
        DONE:
        }}"""

    def simulate(self, m: Machine) -> Blocking:
        yield from m.mbarrier_wait(m.uniform(self.barrier), m.uniform(self.parity), self.scope)
