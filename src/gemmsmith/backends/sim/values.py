"""What a unit's values and variables hold: a Python number where uniform, else an array over its threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmsmith.backends.sim.memory import RANK_SHIFT, SHARED_BASE
from gemmsmith.backends.sim.unit import Unit
from gemmsmith.lang.types import F32, PRED
from gemmsmith.lang.values import Builtin, Constant, LateConstant, Parameter, Value, Variable


class Bound(dict[Value, Any]):
    """What values hold: statements enter what they compute; the others are looked up when they are first used."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit
        first, count = int(unit.threads[0]), len(unit.threads)
        self.builtins: dict[str | None, Any] = {
            "thread": unit.threads,
            "lane": unit.threads % 32,
            "warp": first // 32 if count == 32 else unit.threads // 32,
            "warpgroup": first // 128,
            "smem": SHARED_BASE + (unit.cta.rank << RANK_SHIFT),
            "smem_chunk": SHARED_BASE // 16,
        }

    def __missing__(self, x: Value) -> Any:
        if isinstance(x, (Constant, LateConstant)):
            held = x.number
        elif isinstance(x, Builtin):
            held = self.builtins[x.name]
        else:
            assert isinstance(x, Parameter)
            held = self.unit.state.arguments[x.name or ""]
        self[x] = held
        return held


class Values:
    """See the module. `value` gives what one holds."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.bound = unit, Bound(unit)
        self.value: Callable[[Value], Any] = self.bound.__getitem__
        self.variables: dict[Variable, Any] = {}
        self._declared: dict[Variable, np.ndarray] = {}  # by which threads

    def column(self, x: Value) -> np.ndarray:
        kind = np.float32 if x.type == F32 else bool if x.type == PRED else np.int64
        return self.unit.each(self.value(x), kind)

    def uniform(self, x: Value) -> Any:
        held = self.value(x)
        if not isinstance(held, np.ndarray):
            return held
        chosen = held[self.unit.active]
        if (chosen != chosen[0]).any():
            self.unit.hazard("uniformity", "an operand that all threads must agree on differs between them")
        return chosen[0].item()

    def declare(self, variable: Variable, initial: Value) -> None:
        self.variables[variable] = self.value(initial)
        self._declared[variable] = self.unit.active

    def assign(self, variable: Variable, value: Value) -> None:
        """By the active threads; the others that have the variable keep what it holds."""
        new, active, declared = self.value(value), self.unit.active, self._declared[variable]
        if declared is not active and (declared & ~active).any():
            new = np.where(active, new, self.variables[variable])
        self.variables[variable] = new
