"""Execution barriers of a CTA and of a warp. PTX ISA, "barrier"."""

from __future__ import annotations

from gemmsmith.lang.instruction import Instruction, i32
from gemmsmith.lang.machine import Blocking, Machine


class SyncThreads(Instruction):
    """All threads of the CTA."""

    threads: int
    cuda = "__syncthreads()"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.barrier_sync(0, self.threads)


class BarrierSync(Instruction):
    """Named barrier `identifier` (1..15): waits until `threads` threads have arrived."""

    identifier: i32
    threads: int
    ptx = "barrier.cta.sync.aligned {identifier}, {threads};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.barrier_sync(m.uniform(self.identifier), self.threads)


class BarrierArrive(Instruction):
    """Arrives at a named barrier without waiting."""

    identifier: i32
    threads: int
    ptx = "barrier.cta.arrive.aligned {identifier}, {threads};"

    def simulate(self, m: Machine) -> None:
        m.barrier_arrive(m.uniform(self.identifier), self.threads)


class SyncWarp(Instruction):
    """The lanes of each warp: orders their ordinary accesses."""

    cuda = "__syncwarp()"

    def simulate(self, m: Machine) -> None:
        m.warp_sync()
