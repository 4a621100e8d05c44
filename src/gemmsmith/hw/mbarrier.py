"""mbarriers: barriers in shared memory that count arrivals and bytes per phase. PTX ISA, "mbarrier"."""

from __future__ import annotations

from typing import Any

from gemmsmith.lang.instruction import Instruction, Sm90Instruction, u32
from gemmsmith.lang.types import PRED
from gemmsmith.machine import Blocking, Machine, Scope


class MbarrierInit(Instruction):
    """mbarrier.init: initializes a barrier whose phases each expect `count` arrivals, and begins phase 0."""

    barrier: u32
    count: u32
    ptx = "mbarrier.init.shared::cta.b64 [{barrier}], {count};"

    def simulate(self, m: Machine) -> None:
        m.mbarriers.init(m.uniform(self.barrier), m.uniform(self.count))


class FenceMbarrierInit(Sm90Instruction):
    """fence.mbarrier_init: makes the thread's mbarrier inits visible to the cluster and to the async proxy.

    A barrier of the cluster or of the CTA must follow.
    """

    ptx = "fence.mbarrier_init.release.cluster;"

    def simulate(self, m: Machine) -> None:
        m.fence("mbarrier_init")


class MbarrierArrive(Instruction):
    """mbarrier.arrive: each executing thread arrives once."""

    barrier: u32
    ptx = "mbarrier.arrive.shared::cta.b64 _, [{barrier}];"

    def simulate(self, m: Machine) -> None:
        m.mbarriers.arrive(m.value(self.barrier))


class MbarrierArriveRemote(Sm90Instruction):
    """Arrives at the mbarrier at the address `barrier` in CTA `rank` of the cluster (which may be this CTA).

    `scope`: what the arrival orders. "cta": only completed wgmmas and TMA copies, so the peer may overwrite what they
    have read. "cluster" (a release, which costs a MEMBAR.GPU): also accesses by ld and st.
    """

    barrier: u32
    rank: u32
    scope: Scope = "cta"
    wrapper = "{mnemonic}{release}"
    ptx = """{
    .reg .b32 remote;
    mapa.shared::cluster.u32 remote, {barrier}, {rank};
    mbarrier.arrive{release}.shared::cluster.b64 _, [remote];
    }"""

    @property
    def release(self) -> str:
        """PTX's qualifier of the scope; none for the CTA."""
        return "" if self.scope == "cta" else f".release.{self.scope}"

    def simulate(self, m: Machine) -> None:
        m.mbarriers.arrive(m.value(self.barrier), rank=m.value(self.rank), scope=self.scope)


class MbarrierArriveExpectTx(Sm90Instruction):
    """mbarrier.arrive.expect_tx: adds `tx_bytes` to the pending bytes of the phase, then arrives."""

    barrier: u32
    tx_bytes: u32
    ptx = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {tx_bytes};"

    def simulate(self, m: Machine) -> None:
        m.mbarriers.arrive(m.value(self.barrier), expect_tx=m.value(self.tx_bytes))


class MbarrierExpectTx(Sm90Instruction):
    """mbarrier.expect_tx: adds `tx_bytes` to the pending bytes of the phase, without an arrival."""

    barrier: u32
    tx_bytes: u32
    ptx = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{barrier}], {tx_bytes};"

    def simulate(self, m: Machine) -> None:
        m.mbarriers.expect_tx(m.uniform(self.barrier), m.uniform(self.tx_bytes))


class MbarrierWait(Sm90Instruction):
    """Waits until the phase of that parity has completed: the phase in progress then has the other parity.

    Phases alternate between parity 0 and 1; on a new barrier parity 1 returns immediately. With scope "cluster", stores
    of other CTAs of the cluster become visible.
    """

    waits_for_threads = True
    barrier: u32
    parity: u32
    scope: Scope = "cta"
    wrapper = "{mnemonic}{acquire}"
    ptx = """{
    .reg .pred complete;
    WAIT:
    mbarrier.try_wait.parity{acquire}.shared::cta.b64 complete, [{barrier}], {parity};
    @complete bra DONE;
    bra WAIT;
    DONE:
    }"""

    @property
    def acquire(self) -> str:
        """PTX's qualifier of the scope; none for the CTA."""
        return "" if self.scope == "cta" else f".acquire.{self.scope}"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.mbarriers.wait(m.uniform(self.barrier), m.uniform(self.parity), self.scope)


class MbarrierTestWait(MbarrierWait):
    """mbarrier.test_wait: returns at once whether the phase of that parity has completed.

    It does not block, unlike try_wait, which may suspend the thread.
    """

    waits_for_threads, tests_wait = False, True
    result = PRED
    result_name = "is_complete"
    ptx = """{
    .reg .pred complete;
    mbarrier.test_wait.parity{acquire}.shared::cta.b64 complete, [{barrier}], {parity};
    selp.b32 {result}, 1, 0, complete;
    }"""

    def simulate(self, m: Machine) -> Any:
        return m.mbarriers.test(m.uniform(self.barrier), m.uniform(self.parity), self.scope)
