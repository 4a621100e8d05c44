"""Functions of epilogues from outside the package: of an element, of a whole row, and a reduction.

python examples/own_functions.py

D = atan(A @ B), D = softmax(A @ B) over each row, and the length of each row of A @ B. One record each says all that
the library has to know.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import gemmsmith
from gemmsmith import hw
from gemmsmith.graph import (
    Cost,
    Function,
    Monoid,
    ReductionKind,
    Refused,
    RowFragment,
    RowFunction,
    call_row_function,
    epilogue_function,
    fast_exp,
    register_operation,
    register_reduction,
)
from gemmsmith.lang import F32, Value

# An elementwise function --------------------------------------------------------------------------------------------


class ArcTangent(hw.Instruction):
    """CUDA's atanf."""

    x: hw.f32
    result = F32
    pure = True
    cuda = "atanf({x})"

    def simulate(self, m: hw.Machine) -> np.ndarray[Any, Any]:
        return np.arctan(m.per_thread(self.x).astype(np.float64)).astype(np.float32)


ATAN = Function(
    "atan", 1, np.arctan, hw.emitter(ArcTangent), cost={"default": Cost(22, 1)},
    gradient=lambda g, y, x: g / (x * x + 1), names="atan arctan",
)  # fmt: skip
register_operation(ATAN)


# A function of a whole row ------------------------------------------------------------------------------------------


class SoftmaxRows:
    """The softmax of a subtile's rows."""

    masked_value = -math.inf

    def __init__(self, node: object, fragment: RowFragment) -> None:
        self.fragment, self.maxima, self.reciprocals = fragment, list[Value](), list[Value]()
        for row_half in range(2):
            row_max = fragment.row_reduce(row_half, -math.inf, hw.maximum_nan, "max").named("row_max")
            total = fragment.row_reduce(
                row_half, 0.0, lambda sum_exp, x, row_max=row_max: sum_exp + fast_exp(x - row_max), "sum_exp",
                merge=lambda x, y: x + y,
            )  # fmt: skip
            self.maxima.append(row_max)
            self.reciprocals.append((1 / total).named("reciprocal"))

    def pair(self, n8: Any, row_half: int) -> tuple[Value, Value]:
        low, high = self.fragment.load_pair(n8, row_half)
        row_max, factor = self.maxima[row_half], self.reciprocals[row_half]
        return fast_exp(low - row_max) * factor, fast_exp(high - row_max) * factor


def softmax_reference(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


SOFTMAX = RowFunction(
    "row_softmax", softmax_reference, SoftmaxRows, torch=lambda x: x.softmax(-1), cost=Cost(6, 2),
    gradient=Refused("it has no gradient; call it under torch.no_grad(), or return x and x.logsumexp(-1)"),
)  # fmt: skip
register_operation(SOFTMAX)


@epilogue_function()
def row_softmax(x: Any) -> Any:
    """Return the softmax of each row of a matrix x, all of which must fit one tile."""
    return call_row_function(SOFTMAX, x)


# A reduction --------------------------------------------------------------------------------------------------------

LENGTH = ReductionKind(
    "length",
    Monoid(masked_value=0.0, identity=(0.0,), state_of_element=lambda x: (x * x,), merge=lambda a, b: (a[0] + b[0],),
           finish=lambda state: hw.math_library_call("sqrtf", state[0])),
    reference=lambda x, axes: np.sqrt(np.square(x).sum(axis=axes)),
    torch=lambda x, dims, keepdim: x.square().sum(dims, keepdim).sqrt(),
    gradient=lambda g, y, x: g * (x / y), reads_value=True, cost=Cost(1),
    of_constant=lambda constant, count: abs(constant) * math.sqrt(count),
)  # fmt: skip
register_reduction(LENGTH)


def length_of_rows(x: Any) -> Any:
    """Return the length of each row."""
    return x.length(-1)


def main() -> None:
    """Compute them in the simulator."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 32), np.float32), rng.standard_normal((32, 64), np.float32)
    for epilogue, expected in (
        (np.arctan, np.arctan(a @ b)), (row_softmax, softmax_reference(a @ b)),
        (length_of_rows, np.linalg.norm(a @ b, axis=-1)),
    ):  # fmt: skip
        out = np.empty_like(expected)
        gemmsmith.simulate(a, b, out=out, epilogue=epilogue)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
        print(epilogue.__name__, "is right")


if __name__ == "__main__":
    main()
