"""Fences between proxies and scopes, and programmatic dependent launch. PTX ISA, "membar / fence"."""

from __future__ import annotations

from gemmsmith.lang.instruction import Instruction
from gemmsmith.lang.machine import Machine, Scope


class FenceProxyAsync(Instruction):
    """This thread's ordinary writes to shared memory become visible to TMA and WGMMA (a barrier follows)."""

    architecture = "sm_90"
    ptx = "fence.proxy.async.shared::cta;"

    def simulate(self, m: Machine) -> None:
        m.fence("proxy.async")


class FenceAcqRel(Instruction):
    """Orders this thread's relaxed accesses, and what they publish and learn, as far as a scope."""

    scope: Scope = "gpu"
    ptx = "fence.acq_rel.{scope};"

    def simulate(self, m: Machine) -> None:
        m.fence("acq_rel", self.scope)


class GridDependencyWait(Instruction):
    """Programmatic dependent launch: until the kernels this one depends on have finished and flushed."""

    architecture = "sm_90"
    ptx = "griddepcontrol.wait;"

    def simulate(self, m: Machine) -> None:
        m.grid_dependency_wait()


class GridDependencyLaunch(Instruction):
    """Lets the kernels that depend on this one start their prologue."""

    architecture = "sm_90"
    ptx = "griddepcontrol.launch_dependents;"

    def simulate(self, m: Machine) -> None:
        return None
