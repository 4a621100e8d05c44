"""Base class of instructions that compute a result from each thread's own operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from gemmsmith.lang.instruction import Instruction
from gemmsmith.lang.types import F32
from gemmsmith.machine import Machine

Array = np.ndarray[Any, Any]


class Elementwise(Instruction):
    """An instruction whose result is a pure function of its operands in the same thread.

    `compute` evaluates it. Its arguments are arrays with one element per thread: int64, float32 or bool. The result is
    fp32, unless a class has another `result`.
    """

    result = F32
    pure = True
    compute: ClassVar[Callable[..., Array]]

    def simulate(self, m: Machine) -> Array:
        return self.compute(*(m.per_thread(getattr(self, name)) for name in self.operand_types))
