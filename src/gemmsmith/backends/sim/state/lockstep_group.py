"""The threads of a warp or a warpgroup, executed in lockstep, and which of them are active."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from gemmsmith.backends.sim.memory.clocks import ALL_LANES, Agent, VectorClock, Warp
from gemmsmith.backends.sim.report.hazards import Loops, Place, SimulationAborted
from gemmsmith.backends.sim.report.verdict import TimeDependence
from gemmsmith.backends.sim.state.cta import Cta
from gemmsmith.backends.sim.state.grid_state import GridState
from gemmsmith.lang.location import SourceLocation
from gemmsmith.machine import AsyncOperation


def mask_of(lanes: np.ndarray) -> int:
    """Return lanes of a warp as a bit mask."""
    return ALL_LANES if len(lanes) == 32 else sum(1 << int(lane) for lane in lanes)


@dataclass
class Wait:
    """Why a group is blocked: until `ready()` is true; `describe()` returns the reason for messages.

    `name`: what it waits for: a barrier, or groups of operations, such as "wgmma group". `phase`: that of the barrier.
    `pending`: how many groups may still be pending when it continues. What a wait does not have is -1.
    """

    ready: Callable[[], bool]
    describe: Callable[[], str]
    name: str
    phase: int = -1
    pending: int = -1


@dataclass(frozen=True, slots=True)
class ActiveLanes:
    """The active lanes of one warp.

    `mask`: as bits. `thread_indices`: their indices among the group's threads.
    """

    warp: Warp
    mask: int
    thread_indices: np.ndarray

    @property
    def is_partial(self) -> bool:
        """True if some lanes of the warp are inactive."""
        return self.mask != ALL_LANES

    def agent(self) -> Agent:
        return self.warp.agent(self.mask)

    def release(self) -> VectorClock:
        return self.warp.release(self.mask)

    def acquire(self, clock: VectorClock) -> None:
        self.warp.acquire(self.mask, clock)


class ActiveWarps(list[ActiveLanes]):
    """The active lanes by warp.

    `thread_indices`: those of all active lanes. `slices`: each warp's lanes, and the part of `thread_indices` that is
    its.
    """

    def __init__(self, by_warp: Iterable[ActiveLanes]) -> None:
        super().__init__(by_warp)
        parts = [lanes.thread_indices for lanes in self]
        self.thread_indices = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        ends = [*accumulate(map(len, parts))]
        self.slices = [
            (lanes, slice(end - len(lanes.thread_indices), end)) for lanes, end in zip(self, ends, strict=True)
        ]


class LockstepGroup:
    """The threads of a warp or a warpgroup of one CTA, executed in lockstep.

    Attributes:
        title: Its name in messages.
        row: (CTA, name).
        threads: The threads' indices in the CTA.
        time: Cycles of the cost model.
        line: The source line being executed.
        loops: Name and index of each loop that is being executed, outermost first.
        active_lanes: The active threads by warp.
        selection: An index that selects the active threads.
        registers_per_thread: The register budget (setmaxnreg).
    """

    def __init__(self, state: GridState, cta: Cta, first: int, count: int, name: str) -> None:
        self.state, self.cta, self.name = state, cta, name
        self.title, self.row = f"CTA {cta.index} {name}", (cta.index, name)
        self.threads = np.arange(first, first + count)
        self.warps = cta.warps[first // 32 : (first + count) // 32]
        self.time, self.line = 0, SourceLocation("?", 0)
        self.loops: Loops = ()
        self._places: dict[Warp | None, Place] = {}
        self.registers_per_thread = state.kernel.max_registers_per_thread
        self._active_lanes: dict[bytes, ActiveWarps] = {}
        self.set_active(np.ones(count, bool))

    def set_active(self, active: np.ndarray) -> None:
        """Set which threads execute, as a bool per thread."""
        self.active, self.active_lanes = active, self.active_lanes_of(active)
        self.selection = slice(None) if active.all() else active

    def active_lanes_of(self, active: np.ndarray) -> ActiveWarps:
        """Return the active lanes by warp. `active`: a bool per thread."""
        active_lanes = self._active_lanes.get(active.tobytes())
        if active_lanes is None:
            by_warp = [(i, np.flatnonzero(lanes)) for i, lanes in enumerate(active.reshape(-1, 32))]
            active_lanes = self._active_lanes[active.tobytes()] = ActiveWarps(
                ActiveLanes(self.warps[i], mask_of(lanes), 32 * i + lanes) for i, lanes in by_warp if len(lanes)
            )
        return active_lanes

    def broadcast(self, x: Any, dtype: Any = np.int64) -> np.ndarray:
        """Return a number as an array over the threads, and an array over them as it is; do not write to it."""
        if isinstance(x, np.ndarray):
            return x.astype(dtype, copy=False)
        return np.full(len(self.threads), x, dtype)

    def peer(self, rank: int | None) -> Cta:
        """Return the CTA of that rank in the cluster; None is the group's own."""
        if rank is not None and not 0 <= rank < len(self.cta.cluster.ctas):
            raise self.fatal("out of bounds", f"CTA {rank} of a cluster of {len(self.cta.cluster.ctas)}")
        return self.cta.peer(rank)

    @property
    def location(self) -> Place:
        return self.location_of(None)

    def location_of(self, warp: Warp | None) -> Place:
        """Return the source line being executed, with the iteration of its loops and the threads that execute it."""
        place = self._places.get(warp)
        if place is None or place.number != self.line.number or place.loops is not self.loops:
            name = f" warp {self.warps.index(warp)}" if warp is not None and len(self.warps) > 1 else ""
            place = self._places[warp] = Place(self.line, self.cta.index, self.title + name, self.loops)
        return place

    def report(self, kind: str, message: str, *others: Place) -> None:
        """Report a hazard at the current source line; `others`: the other access of a race."""
        self.state.hazards.report(kind, f"{message} [{self.title}]", self.location, others=others)

    def fatal(self, kind: str, message: str) -> SimulationAborted:
        """Report a fatal hazard and return the exception to raise."""
        self.state.hazards.report(kind, message, self.location)
        return SimulationAborted(message)

    def depends_on_time(self, reason: str) -> None:
        """Record that the current source line depends on when instructions execute."""
        self.state.time_dependences[TimeDependence(reason, self.location)] = None

    def require_converged(self, label: str) -> None:
        """Report a hazard for each warp of which some lanes are inactive."""
        for lanes in self.active_lanes:
            if lanes.is_partial:
                self.report("divergence", f"{label} by some lanes of a warp; all must execute it together")
            else:
                lanes.warp.converge()

    def record_wait(
        self, start: int, name: str, phase: int = -1, pending: int = -1, operations: Iterable[AsyncOperation] = ()
    ) -> None:
        """Tell the observer, if there is one, that the group's wait, which is described as in `Wait`, has ended now.

        `operations`: those that are now known to have completed.
        """
        if self.state.observer is not None:
            self.state.observer.resume(self, start, name, phase, pending, operations)
