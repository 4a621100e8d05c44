"""Fences between proxies and scopes, and programmatic dependent launch. PTX ISA, "membar / fence"."""

from __future__ import annotations

from typing import Literal

from gemmsmith.lang.instruction import Instruction
from gemmsmith.machine import Machine, Scope


class FenceProxyAsync(Instruction):
    """fence.proxy.async: orders the thread's prior generic accesses to `space` before those of TMA and WGMMA.

    A barrier must follow before another thread issues them.
    """

    required_arch = "sm_90"
    space: Literal["shared::cta", "global"] = "shared::cta"
    ptx = "fence.proxy.async.{space};"

    def simulate(self, m: Machine) -> None:
        m.fence("proxy.async.global" if self.space == "global" else "proxy.async.shared::cta")


class FenceAcqRel(Instruction):
    """fence.acq_rel at `scope`: turns the thread's relaxed accesses into release and acquire patterns."""

    scope: Scope = "gpu"
    ptx = "fence.acq_rel.{scope};"

    def simulate(self, m: Machine) -> None:
        m.fence("acq_rel", self.scope)


class GridDependencyWait(Instruction):
    """griddepcontrol.wait: waits until the prerequisite grids have completed and their writes are visible."""

    required_arch = "sm_90"
    ptx = "griddepcontrol.wait;"

    def simulate(self, m: Machine) -> None:
        m.grid_dependency_wait()


class LaunchDependentGrids(Instruction):
    """griddepcontrol.launch_dependents: lets dependent grids start."""

    required_arch = "sm_90"
    ptx = "griddepcontrol.launch_dependents;"

    def simulate(self, m: Machine) -> None:
        return None
