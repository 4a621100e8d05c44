"""CTAs and clusters."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gemmsmith.backends.sim.memory.clocks import Warp
from gemmsmith.backends.sim.memory.events import Event
from gemmsmith.backends.sim.memory.shadow import Shadow
from gemmsmith.backends.sim.state.barriers import Mbarrier, ThreadBarrier


@dataclass(eq=False)
class Cluster:
    """The CTAs of a cluster, by rank, and its barrier."""

    barrier: ThreadBarrier
    ctas: list[Cta] = field(default_factory=list)


@dataclass(eq=False)
class Cta:
    """A CTA: its shared memory, barriers, register pool and asynchronous engines.

    `index`: in the grid. `rank`: in the cluster. `shared`: the bytes of shared memory, and `shadow` their shadow.
    `mbarriers`: by offset in shared memory. `named_barriers`: by number. `engines`: the time in cycles until which each
    engine is busy. `free_registers`: the pool for setmaxnreg, in registers per thread times warps. `remote`: accesses
    to its shared memory, and arrivals at its mbarriers, by other CTAs of the cluster.
    """

    index: int
    rank: int
    cluster: Cluster
    shared: np.ndarray
    shadow: Shadow
    warps: list[Warp]
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    named_barriers: dict[int, ThreadBarrier] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    free_registers: int = 0
    remote: list[Event] = field(default_factory=list)

    def peer(self, rank: int | None) -> Cta:
        """Return the CTA of that rank in the cluster; None is this one."""
        return self if rank is None else self.cluster.ctas[rank]
