"""Instructions of each elementwise function on Hopper, by precision, as ptxas 13 compiles it.

`python -m benchmarks.fit.function_costs` writes the table: it compiles each function alone for 16 elements a thread, so
that constants are loaded once, and subtracts the same kernel without the function.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Precision = Literal["default", "approx", "exact"]


class Cost(NamedTuple):
    """Cost of an element: `instructions`, of which `special` are of the special-function unit (MUFU).

    `branches`: the BSSY among them. Behind a branch, the instructions of a path that is rarely taken are counted, too.
    """

    instructions: float = 0.0
    special: float = 0.0
    branches: float = 0.0


# generated
COSTS: dict[str, dict[Precision, Cost]] = {
    "detach": {"default": Cost(0, 0, 0)},
    "neg": {"default": Cost(1, 0, 0)},
    "abs": {"default": Cost(1, 0, 0)},
    "sign": {"default": Cost(5, 0, 0)},
    "floor": {"default": Cost(1, 0, 0)},
    "round": {"default": Cost(1, 0, 0)},
    "exp": {"default": Cost(2, 1, 0), "exact": Cost(8.1, 1, 0)},
    "exp2": {"default": Cost(1, 1, 0), "exact": Cost(4, 1, 0)},
    "expm1": {"default": Cost(8.1, 1, 0), "exact": Cost(21.2, 0, 0)},
    "log": {"default": Cost(2, 1, 0), "exact": Cost(24.2, 0, 0.1)},
    "log2": {"default": Cost(1, 1, 0), "exact": Cost(26.2, 0, 0.1)},
    "log1p": {"default": Cost(9.1, 1, 0), "exact": Cost(27.3, 0, 1.1)},
    "sqrt": {"default": Cost(1, 1, 0), "exact": Cost(14.2, 1.1, 1)},
    "rsqrt": {"default": Cost(1, 1, 0), "exact": Cost(29.3, 2.3, 2.1)},
    "reciprocal": {"default": Cost(1, 1, 0), "exact": Cost(16.1, 1.2, 1.1)},
    "sin": {"default": Cost(109.5, 0, 2.1)},
    "cos": {"default": Cost(110.5, 0, 2.1)},
    "tanh": {"default": Cost(10.1, 2, 0), "approx": Cost(1, 1, 0), "exact": Cost(15.1, 2, 0)},
    "sigmoid": {"default": Cost(4, 2, 0), "exact": Cost(26.1, 2.2, 1.1)},
    "softplus": {"default": Cost(10.1, 1, 0), "approx": Cost(7.1, 1, 0), "exact": Cost(37.4, 1, 1.1)},
    "softplus_of_sigmoid": {"default": Cost(10.1, 0, 0), "approx": Cost(7.1, 0, 0), "exact": Cost(36.7, 1, 1.1)},
    "erf": {"default": Cost(14.1, 1, 0), "exact": Cost(19.6, 1, 0.1)},
    "ndtr": {"default": Cost(8.1, 1, 0), "approx": Cost(6.1, 1, 0), "exact": Cost(21.7, 1, 0.1)},
    "relu": {"default": Cost(1, 0, 0)},
    "gelu": {"default": Cost(9.1, 1, 0), "approx": Cost(7.1, 1, 0), "exact": Cost(22.6, 1, 0.1)},
    "gelu_tanh": {"default": Cost(7.1, 2, 0), "approx": Cost(6.1, 1, 0), "exact": Cost(20.2, 2, 0)},
    "silu": {"default": Cost(5, 2, 0), "approx": Cost(3, 1, 0), "exact": Cost(26.1, 2.2, 1.1)},
    "mish": {"default": Cost(9, 2, 0), "exact": Cost(32.5, 2.1, 1.1)},
    "hardswish": {"default": Cost(5, 0, 0)},
    "not": {"default": Cost(1, 0, 0)},
    "add": {"default": Cost(1, 0, 0)},
    "sub": {"default": Cost(1, 0, 0)},
    "mul": {"default": Cost(1, 0, 0)},
    "div": {"default": Cost(8, 1, 0), "exact": Cost(19.4, 1.1, 1.1)},
    "maximum": {"default": Cost(1, 0, 0)},
    "minimum": {"default": Cost(1, 0, 0)},
    "hypot": {"default": Cost(19.8, 1, 1.1), "exact": Cost(30.9, 1.1, 2.1)},
    "logaddexp": {"default": Cost(13.1, 1, 0), "approx": Cost(10.1, 1, 0), "exact": Cost(46.8, 1, 2.1)},
    "pow": {"default": Cost(84.9, 1, 1.1)},
    "leaky_relu": {"default": Cost(2, 0, 0)},
    "elu": {"default": Cost(10.1, 1, 0), "approx": Cost(5, 1, 0), "exact": Cost(27.8, 0, 1.1)},
    "lt": {"default": Cost(1, 0, 0)},
    "le": {"default": Cost(1, 0, 0)},
    "gt": {"default": Cost(1, 0, 0)},
    "ge": {"default": Cost(1, 0, 0)},
    "eq": {"default": Cost(1, 0, 0)},
    "ne": {"default": Cost(1, 0, 0)},
    "and": {"default": Cost(2.5, 0, 0)},
    "or": {"default": Cost(2.5, 0, 0)},
    "where": {"default": Cost(2, 0, 0)},
    "hardtanh": {"default": Cost(2, 0, 0)},
    "fma": {"default": Cost(1, 0, 0)},
}
# end
