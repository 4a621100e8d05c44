"""Execution barriers of a CTA and of a warp. PTX ISA, "barrier"."""

from __future__ import annotations

from gemmsmith.lang.instruction import Instruction, i32
from gemmsmith.machine import Blocking, Machine


class SyncThreads(Instruction):
    """__syncthreads: waits until all threads of the CTA have arrived."""

    threads: int
    cuda = "__syncthreads()"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.barriers.sync(0, self.threads)


class BarrierSync(Instruction):
    """barrier.cta.sync: waits until `threads` threads have arrived at named barrier `identifier` (1..15)."""

    waits_for_threads = True
    identifier: i32
    threads: int
    ptx = "barrier.cta.sync.aligned {identifier}, {threads};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.barriers.sync(m.uniform(self.identifier), self.threads)


class BarrierArrive(Instruction):
    """barrier.cta.arrive: arrives at a named barrier without waiting."""

    identifier: i32
    threads: int
    ptx = "barrier.cta.arrive.aligned {identifier}, {threads};"

    def simulate(self, m: Machine) -> None:
        m.barriers.arrive(m.uniform(self.identifier), self.threads)


class SyncWarp(Instruction):
    """__syncwarp: orders the ordinary accesses of the lanes of each warp."""

    cuda = "__syncwarp()"

    def simulate(self, m: Machine) -> None:
        m.barriers.warp_sync()
