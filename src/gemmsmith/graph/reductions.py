"""The kinds of reductions, each a record, how their partial results combine, and a thread's states in registers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmsmith import hw
from gemmsmith.core.dicts import Records
from gemmsmith.graph.approximations import LN_2, fast_exp, log2
from gemmsmith.graph.function_costs import Cost
from gemmsmith.graph.functions import Array, Refused, check_gradient
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import RegisterArray, Value, ValueLike

FLT_LOWEST_FINITE = -float(np.finfo(np.float32).max)
"""Most negative finite fp32 value: replaces -Inf (its negative replaces Inf), since Inf - Inf would be NaN."""
State = tuple[Value, ...]
"""A partial result: the fp32 values (components) that represent it, e.g. the maximum and the sum of exponentials."""


def _merge_logsumexp(a: State, b: State) -> State:
    """Merge two states (m, s), each of which stands for m + log(s): the maximum, and the sum of exp(x - m).

    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    m = hw.maximum_nan(a[0], b[0]).with_name_hint("new_max")
    return m, hw.fma(a[1], fast_exp(a[0] - m), b[1] * fast_exp(b[0] - m))


def _add_to_logsumexp(state: State, elements: Sequence[Value]) -> State:
    """Add elements to a state (m, s), with one exponential for each element and one for the state.

    The maximum is kept finite: Inf - Inf would be NaN, while exp(Inf - m) with a finite m is Inf, the right sum.
    """
    largest = hw.minimum_nan(_balanced(hw.maximum_nan, elements), -FLT_LOWEST_FINITE)
    m = hw.maximum_nan(state[0], largest).with_name_hint("new_max")
    total = _balanced(lambda x, y: x + y, [fast_exp(x - m) for x in elements])
    return m, hw.fma(state[1], fast_exp(state[0] - m), total)


def _balanced(combine: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    """Combine values pairwise, in a tree, so that the chain of dependent instructions is short."""
    rest = list(values)
    while len(rest) > 1:
        pairs = [combine(x, y) for x, y in zip(rest[::2], rest[1::2], strict=False)]
        rest = pairs + rest[len(pairs) * 2 :]
    return rest[0]


@dataclass(frozen=True)
class Monoid:
    """How partial results, each a `State`, combine.

    `masked_value` replaces an element outside the matrix, `identity` is the state of no elements, `state_of_element`
    makes the state of one element, `merge` combines two states and `finish` computes the result of a state.
    `add` adds several elements to a state at once, if that takes fewer instructions than to merge their states.
    `component_names` names the values of a state in the kernel's text; a state of one value needs no name.
    """

    masked_value: float
    identity: tuple[float, ...]
    state_of_element: Callable[[Value], State]
    merge: Callable[[State, State], State]
    finish: Callable[[State], Value]
    component_names: tuple[str, ...] = ("",)
    add: Callable[[State, Sequence[Value]], State] | None = None

    def names_of(self, prefix: str, fallback: str, suffix: str = "") -> list[str]:
        """Return what the kernel's text calls the components of a state: "prefix_name_suffix", without empty parts.

        `fallback`: the name of a component without a name.
        """
        return ["_".join(filter(None, (prefix, name or fallback, suffix))) for name in self.component_names]


def _scalar_state_monoid(identity: float, merge: Callable[[Value, Value], Value]) -> Monoid:
    return Monoid(identity, (identity,), lambda x: (x,), lambda a, b: (merge(a[0], b[0]),), lambda s: s[0])


def _finite(x: Value) -> Value:
    """Clamp x to the finite fp32 numbers."""
    return hw.minimum_nan(hw.maximum_nan(x, FLT_LOWEST_FINITE), -FLT_LOWEST_FINITE).with_name_hint("finite_x")


@dataclass(frozen=True)
class ReductionKind:
    """A kind of reduction.

    Args:
        name: Its name in graphs, and in trees.
        monoid: How partial results combine.
        reference: A function of a float64 array and the axes to reduce.
        torch: A function (x, dims, keepdim) of tensors, or the name of one in torch.
        gradient: A function (g, y, x) that returns the gradient of x, of traced values, or `Refused` with the reason.
        cost: The instructions of an element.
        reads_value: Whether the gradient reads y, the value as it is stored.
        selects: Whether the gradient goes to the elements that are equal to the value.
        divides: Whether the sum is divided by the number of elements.
        of_constant: The reduction of `count` elements that are all equal.
        partial: The name of DTensor's reduction of partial results, if there is one.

    Raises:
        ArgumentError: There is no gradient.
    """

    name: str
    monoid: Monoid
    reference: Callable[[Array, tuple[int, ...]], Any]
    torch: str | Callable[..., Any]
    gradient: Callable[[Any, Any, Any], Any] | Refused
    cost: Cost
    reads_value: bool = False
    selects: bool = False
    divides: bool = False
    of_constant: Callable[[float, int], float] = lambda constant, count: constant
    partial: str = ""

    def __post_init__(self) -> None:
        check_gradient(self.name, self.gradient)


def _logsumexp(x: Array, axes: tuple[int, ...]) -> Array:
    """Return log(sum(exp(x))) over the axes. The maximum is subtracted first, so that exp does not overflow.

    An infinite maximum is not, since Inf - Inf is NaN.
    """
    largest = x.max(axis=axes, keepdims=True, initial=-np.inf)
    offset = np.where(np.isfinite(largest), largest, 0)
    return np.asarray(np.log(np.exp(x - offset).sum(axis=axes)) + offset.squeeze(axis=axes))


def _d_logsumexp(g: Any, y: Any, x: Any) -> Any:
    # y is -Inf if all x are; x - y would then be NaN
    offset = y.tracer("where", y == -math.inf, 0.0, y)
    return g * (x - offset).exp()


_SUM = _scalar_state_monoid(0.0, lambda a, b: a + b)
_LOGSUMEXP = Monoid(
    -math.inf, (FLT_LOWEST_FINITE, 0.0), lambda x: (_finite(x), fast_exp(x - _finite(x))), _merge_logsumexp,
    lambda s: hw.fma(log2(s[1]), LN_2, s[0]), ("max", "sum_exp"), _add_to_logsumexp,
)  # fmt: skip
REDUCTIONS: Records[ReductionKind] = Records("a reduction", ReductionKind)
"""All kinds by name."""


def register_reduction(kind: ReductionKind) -> ReductionKind:
    """Make a kind of reduction known to graphs, by its name.

    It replaces a kind of this name that the calling module has registered before. Raises EpilogueError if another
    module has registered the name.
    """
    REDUCTIONS.register(kind, sys._getframe(1).f_globals["__name__"])
    return kind


# The initial values of the references are for empty arrays. A logsumexp takes max, sub, mul, exp2 and add, and a new
# maximum for every four elements.
for _kind in (
    ReductionKind("sum", _SUM, lambda x, axes: x.sum(axis=axes), "sum", lambda g, y, x: g, Cost(1),
                  of_constant=lambda constant, count: constant * count, partial="sum"),
    ReductionKind("mean", _SUM, lambda x, axes: x.mean(axis=axes), "mean", lambda g, y, x: g, Cost(1),
                  divides=True),
    ReductionKind("max", _scalar_state_monoid(-math.inf, hw.maximum_nan),
                  lambda x, axes: x.max(axis=axes, initial=-np.inf), "amax", lambda g, y, x: g, Cost(1),
                  selects=True, partial="max"),
    ReductionKind("min", _scalar_state_monoid(math.inf, hw.minimum_nan),
                  lambda x, axes: x.min(axis=axes, initial=np.inf), "amin", lambda g, y, x: g, Cost(1),
                  selects=True, partial="min"),
    ReductionKind("logsumexp", _LOGSUMEXP, _logsumexp, "logsumexp", _d_logsumexp, Cost(6, 1.25), reads_value=True,
                  of_constant=lambda constant, count: constant + math.log(count)),
):  # fmt: skip
    register_reduction(_kind)


class ReductionState:
    """`count` states of a reduction in a thread's registers; the kernel's text calls the reduction `name`."""

    def __init__(self, monoid: Monoid, count: int, name: str) -> None:
        """Declare the registers, an array for each component, and set all states to the identity."""
        self.monoid = monoid
        self.arrays: list[RegisterArray] = [
            current_builder().registers(F32, count, x) for x in monoid.names_of("", "acc", name)
        ]
        with current_builder().unroll(count) as i:
            for array, identity in zip(self.arrays, monoid.identity, strict=True):
                array[i] = identity

    def load(self, i: ValueLike) -> State:
        return tuple(array[i] for array in self.arrays)

    def store(self, i: ValueLike, state: State) -> None:
        for array, x in zip(self.arrays, state, strict=True):
            array[i] = x

    def accumulate(self, i: ValueLike, elements: Sequence[Value]) -> None:
        """Add elements to state `i`, in their order."""
        state = self.load(i)
        if self.monoid.add:
            state = self.monoid.add(state, elements)
        else:
            for x in elements:
                state = self.monoid.merge(state, self.monoid.state_of_element(x))
        self.store(i, state)

    def fence(self) -> None:
        """Keep ptxas from moving the additions so far past this point: it would postpone hundreds, and spill."""
        for array in self.arrays:
            hw.fence_operand(array)

    def warp_reduce(self, i: ValueLike, masks: tuple[int, ...]) -> None:
        """Reduce state `i` over the lanes whose indices differ only in the bits `masks`; each gets the result.

        A step per mask merges the states of lanes whose indices differ in that bit (butterfly shuffle).
        """
        state = self.load(i)
        for mask in masks:
            for x, name in zip(state, self.monoid.names_of("lane", "value"), strict=True):
                x.with_name_hint(name)
            peer_state = tuple(hw.shuffle_xor_fp32(x, mask) for x in state)
            for x, name in zip(peer_state, self.monoid.names_of("peer", "value"), strict=True):
                x.with_name_hint(name)
            state = self.monoid.merge(state, peer_state)
        self.store(i, state)
