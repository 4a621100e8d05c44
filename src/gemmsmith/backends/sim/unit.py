"""A unit: the threads of a warp or a warpgroup in lockstep, what they hold, and which of them are active.

It becomes the Machine that instructions execute on in steps: accesses, synchronisation, operations, interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmsmith.backends.sim.clocks import ALL_LANES, Agent, Clock, Warp
from gemmsmith.backends.sim.memory import RANK_SHIFT, SHARED_BASE
from gemmsmith.backends.sim.state import Cta, Running, State
from gemmsmith.lang.statements import Where
from gemmsmith.lang.types import F32, PRED, Type
from gemmsmith.lang.values import Builtin, Constant, LateConstant, Parameter, Registers, Value

POISON = 0x7FC1_7FC1
"""What uninitialised registers hold: bits of an fp32 NaN that no 16-bit NaN widens to."""
POISON_INTEGER = (1 << 40) | POISON
"""The same in integer registers, which are kept in 64 bits, so that no 32-bit value is taken for it."""


def uninitialised(type: Type, shape: tuple[int, int]) -> np.ndarray:
    """Registers nobody has written: using them gives wrong answers, reading them is reported."""
    return np.full(shape, POISON, np.uint32).view(np.float32) if type == F32 else np.full(shape, POISON_INTEGER)


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
    """See the module. `time` is in cycles of the cost model."""

    def __init__(self, state: State, cta: Cta, first: int, count: int, name: str) -> None:
        self.state, self.cta, self.name = state, cta, name
        self.threads = np.arange(first, first + count)
        self.warps = cta.warps[first // 32 : (first + count) // 32]
        self.block, self.grid, self.rank = cta.index, state.grid, cta.rank
        self.cluster_size = len(cta.cluster)
        self.elected = state.random.randrange(32) if state.seed else 0
        self.time, self.busy_since, self.where = 0, 0, Where("?", 0)
        self.environment: dict[Value, Any] = {}
        self.arrays: dict[Registers, np.ndarray] = {}
        self.owned: dict[Registers, Running] = {}
        self.dirty: set[Registers] = set()
        self.unfenced: set[Registers] = set()
        self.open: dict[object, list[Running]] = {}
        self.groups: dict[object, list[list[Running]]] = {}
        self.last_tensor: Running | None = None
        self.budget = state.kernel.register_cap
        self.cluster_arrivals: dict[Warp, tuple[int, bool]] = {}
        self.generator: Any = None
        self.builtins: dict[str | None, Any] = {
            "thread": self.threads,
            "lane": self.threads % 32,
            "warp": first // 32 if count == 32 else self.threads // 32,
            "warpgroup": first // 128,
            "smem": SHARED_BASE + (cta.rank << RANK_SHIFT),
            "smem_chunk": SHARED_BASE // 16,
        }
        self.set_active(np.ones(count, bool))

    def set_active(self, active: np.ndarray) -> None:
        """Narrows or restores the threads that execute."""
        self.active = active
        self.parts = self._parts(active)

    def _parts(self, active: np.ndarray) -> list[Part]:
        parts = []
        for i, lanes in enumerate(active.reshape(-1, 32)):
            if lanes.any():
                chosen = np.flatnonzero(lanes)
                parts.append(Part(self.warps[i], mask_of(chosen), 32 * i + chosen))
        return parts

    @property
    def title(self) -> str:
        """What messages call this unit."""
        return f"CTA {self.block} {self.name}"

    def hazard(self, kind: str, message: str, other: object = None) -> None:
        self.state.hazards.report(kind, f"{message} [{self.title}]", self.where, other)

    def report(self, kind: str, message: str) -> None:
        self.hazard(kind, message)

    def converged(self, what: str) -> None:
        for part in self.parts:
            if part.partial:
                self.hazard("divergence", f"{what} by some lanes of a warp; all must execute it together")
            else:
                part.warp.converge()

    # -- values ------------------------------------------------------------------------------------
    def value(self, x: Value) -> Any:
        if isinstance(x, (Constant, LateConstant)):
            return x.number
        if isinstance(x, Builtin):
            return self.builtins[x.name]
        if isinstance(x, Parameter):
            return self.state.arguments[x.name or ""]
        return self.environment[x]

    def column(self, x: Value) -> np.ndarray:
        kind = np.float32 if x.type == F32 else bool if x.type == PRED else np.int64
        return np.broadcast_to(np.asarray(self.value(x), kind), len(self.threads))

    def uniform(self, x: Value) -> Any:
        held = self.value(x)
        if not isinstance(held, np.ndarray):
            return held
        chosen = held[self.active]
        if (chosen != chosen[0]).any():
            self.hazard("uniformity", "an operand that all threads must agree on differs between them")
        return chosen[0].item()

    def registers(self, x: Registers, write: bool = False) -> np.ndarray:
        if x in self.owned:
            self.hazard("accumulator", f"{x.name} touched while {self.owned[x].operation.what} owns it")
        elif x in self.unfenced:
            self.hazard("accumulator", f"{x.name} touched after a wait for wgmma without compiler_fence: "
                        "the compiler may move that above the wait")  # fmt: skip
        self.dirty.add(x)
        if not write:
            self.check_initialised(x, self.arrays[x])
        return self.arrays[x]

    def check_initialised(self, x: Registers, held: np.ndarray) -> None:
        """Reports poison among the rows of the active threads in (some elements of) a register array."""
        bits, poison = (held.view(np.uint32), POISON) if held.dtype == np.float32 else (held, POISON_INTEGER)
        poisoned = bits == poison
        if poisoned.any() and poisoned[self.active].any():
            self.hazard("uninitialised read", f"register {x.name} is read, which nobody wrote")

    def fragment(self, x: Registers) -> np.ndarray:
        return self.arrays[x]
