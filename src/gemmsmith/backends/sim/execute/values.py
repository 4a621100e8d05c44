"""Simulated values and variables: a Python number if uniform, else an array over the lockstep group's threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.backends.sim.memory.memory import SHARED_BASE
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup
from gemmsmith.lang.types import F32, PRED
from gemmsmith.lang.values import Builtin, Constant, Parameter, Value, Variable
from gemmsmith.machine import CLUSTER_RANK_SHIFT


class Values(dict[Value, Any]):
    """A lockstep group's simulated values, by the kernel's values, and its `variables`.

    Statements store results; constants, built-ins and parameters are looked up on first use. Each is a number if it is
    uniform, else an array over the threads, of the type that it has in the kernel: fp32 is np.float32, a predicate is a
    bool, an integer is a Python int or np.int64.
    """

    def __init__(self, group: LockstepGroup) -> None:
        super().__init__()
        self.group = group
        first, count = int(group.threads[0]), len(group.threads)
        self.builtins: dict[str | None, Any] = {
            "thread": group.threads,
            "lane": group.threads % 32,
            "warp": first // 32 if count == 32 else group.threads // 32,
            "warpgroup": first // 128,
            "smem": SHARED_BASE + (group.cta.rank << CLUSTER_RANK_SHIFT),
            "smem_descriptor_base": SHARED_BASE // 16,
        }
        self.variables: dict[Variable, Any] = {}
        self._declared: dict[Variable, np.ndarray] = {}  # variable -> the threads that declared it

    def __missing__(self, x: Value) -> Any:
        """Return a constant, a built-in value or a parameter, and store it."""
        if isinstance(x, Constant):
            value = x.value
        elif isinstance(x, Builtin):
            value = self.builtins[x.name]
        else:
            assert isinstance(x, Parameter)
            value = self.group.state.arguments[x.name or ""]
        self[x] = value = np.float32(value) if x.type == F32 else bool(value) if x.type == PRED else value
        return value

    def per_thread(self, x: Value) -> np.ndarray:
        """Return a value as an array over the threads; do not write to it."""
        kind = np.float32 if x.type == F32 else bool if x.type == PRED else np.int64
        return self.group.broadcast(self[x], kind)

    def uniform(self, x: Value) -> Any:
        """Return the number that all active threads have; report a hazard if they differ."""
        contents = self[x]
        if not isinstance(contents, np.ndarray):
            return contents
        active = contents[self.group.active]
        if (active != active[0]).any():
            self.group.report("uniformity", "operand must be uniform, but differs between threads")
        return active.item(0)

    def declare(self, variable: Variable, initial: Value) -> None:
        self.variables[variable] = self[initial]
        self._declared[variable] = self.group.active

    def assign(self, variable: Variable, value: Value) -> None:
        """Assign a variable in the active threads; the other threads that have declared it keep its value."""
        new, active, declared = self[value], self.group.active, self._declared[variable]
        if declared is not active and (declared & ~active).any():
            new = np.where(active, new, self.variables[variable])
        self.variables[variable] = new
