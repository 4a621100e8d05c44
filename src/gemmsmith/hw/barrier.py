"""Execution barriers of a CTA and of a warp, fences, and programmatic dependent launch.

PTX ISA, "barrier", "membar / fence" and "griddepcontrol".
"""

from __future__ import annotations

from typing import Literal

from gemmsmith.lang.instruction import Instruction, Sm90Instruction, i32
from gemmsmith.machine import Blocking, Machine, Scope


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
    """barrier.cta.arrive: arrives at named barrier `identifier` without waiting.

    `threads`: how many threads must arrive, those that wait included.
    """

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


class FenceProxyAsync(Sm90Instruction):
    """fence.proxy.async: orders the thread's earlier ordinary accesses to `space` before those of TMA and WGMMA.

    If another thread issues these, a barrier must come between the fence and them.
    """

    space: Literal["shared::cta", "global"] = "shared::cta"
    ptx = "fence.proxy.async.{space};"

    def simulate(self, m: Machine) -> None:
        m.fence("proxy.async.global" if self.space == "global" else "proxy.async.shared::cta")


class FenceAcqRel(Instruction):
    """fence.acq_rel at `scope`.

    It makes the thread's later relaxed writes releases, and its earlier relaxed reads acquires.
    """

    scope: Scope = "gpu"
    ptx = "fence.acq_rel.{scope};"

    def simulate(self, m: Machine) -> None:
        m.fence("acq_rel", self.scope)


class GridDependencyWait(Sm90Instruction):
    """griddepcontrol.wait: waits until the prerequisite grids have completed and their writes are visible."""

    ptx = "griddepcontrol.wait;"

    def simulate(self, m: Machine) -> None:
        m.grid_dependency_wait()


class LaunchDependentGrids(Sm90Instruction):
    """griddepcontrol.launch_dependents: lets dependent grids start (programmatic dependent launch)."""

    ptx = "griddepcontrol.launch_dependents;"

    def simulate(self, m: Machine) -> None:
        return None
