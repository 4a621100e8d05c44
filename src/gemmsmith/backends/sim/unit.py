"""A unit: the threads of a warp or a warpgroup in lockstep, and which of them are active."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmsmith.backends.sim.clocks import ALL_LANES, Agent, Clock, Warp
from gemmsmith.backends.sim.cta import Cta
from gemmsmith.backends.sim.hazards import Stop
from gemmsmith.backends.sim.state import State
from gemmsmith.backends.sim.timeline import Span
from gemmsmith.lang.statements import Where


def mask_of(lanes: np.ndarray) -> int:
    """Lanes of a warp as bits."""
    return ALL_LANES if len(lanes) == 32 else sum(1 << int(lane) for lane in lanes)


@dataclass
class Wait:
    """Why a unit is blocked: until `ready()`; `describe()` says for what."""

    ready: Callable[[], bool]
    describe: Callable[[], str]


@dataclass(frozen=True)
class Part:
    """The active lanes of one warp, as a mask; `rows` are their positions in the unit."""

    warp: Warp
    lanes: int
    rows: np.ndarray

    @property
    def partial(self) -> bool:
        return self.lanes != ALL_LANES

    def enter(self) -> Agent:
        return self.warp.enter(self.lanes)

    def release(self) -> Clock:
        return self.warp.release(self.lanes)

    def acquire(self, clock: Clock) -> None:
        self.warp.acquire(self.lanes, clock)


class Unit:
    """See the module. `title` is what messages call it, `time` in cycles of the cost model, `where` the line that it
    executes, `parts` the active threads by warp, `budget` the registers of each thread."""

    def __init__(self, state: State, cta: Cta, first: int, count: int, name: str) -> None:
        self.state, self.cta, self.name = state, cta, name
        self.title = f"CTA {cta.index} {name}"
        self.threads = np.arange(first, first + count)
        self.warps = cta.warps[first // 32 : (first + count) // 32]
        self.time, self.busy_since, self.where = 0, 0, Where("?", 0)
        self.budget = state.kernel.register_cap
        self._parts: dict[bytes, list[Part]] = {}
        self.set_active(np.ones(count, bool))

    def set_active(self, active: np.ndarray) -> None:
        """Narrows or restores the threads that execute."""
        self.active = active
        self.parts = self.parts_of(active)

    def parts_of(self, active: np.ndarray) -> list[Part]:
        parts = self._parts.get(active.tobytes())
        if parts is None:
            chosen = [(i, np.flatnonzero(lanes)) for i, lanes in enumerate(active.reshape(-1, 32))]
            parts = [Part(self.warps[i], mask_of(lanes), 32 * i + lanes) for i, lanes in chosen if len(lanes)]
            self._parts[active.tobytes()] = parts
        return parts

    def each(self, x: Any, dtype: Any = np.int64) -> np.ndarray:
        """A number, or an array over the threads, as such an array, which is not to be written to."""
        if isinstance(x, np.ndarray):
            return x.astype(dtype, copy=False)
        return np.full(len(self.threads), x, dtype)

    def peer(self, rank: int | None) -> Cta:
        """The CTA of that rank in the cluster; None is the unit's own."""
        if rank is not None and not 0 <= rank < len(self.cta.cluster.ctas):
            raise self.stop("out of bounds", f"CTA {rank} of a cluster of {len(self.cta.cluster.ctas)}")
        return self.cta.peer(rank)

    def hazard(self, kind: str, message: str, other: object = None) -> None:
        self.state.hazards.report(kind, f"{message} [{self.title}]", self.where, other)

    def stop(self, kind: str, message: str) -> Stop:
        """Reports what makes going on pointless; raise the result."""
        self.state.hazards.report(kind, message, self.where)
        return Stop(message)

    def converged(self, what: str) -> None:
        for part in self.parts:
            if part.partial:
                self.hazard("divergence", f"{what} by some lanes of a warp; all must execute it together")
            else:
                part.warp.converge()

    def waited(self, began: int, what: str) -> None:
        """The unit stood still from `began` until now; before that it was busy."""
        add = self.state.timeline.add
        add(Span(self.cta.index, self.name, "busy", self.busy_since, began, "instructions"))
        add(Span(self.cta.index, self.name, "wait", began, self.time, f"wait for {what}"))
        self.busy_since = self.time
