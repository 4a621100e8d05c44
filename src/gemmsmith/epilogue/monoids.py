"""How partial results of reductions combine, and a thread's states of them in registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gemmsmith import hw
from gemmsmith.graph.approximations import LN_2, fast_exp
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import RegisterArray, Value, ValueLike

FLT_LOWEST_FINITE = -float(np.finfo(np.float32).max)
"""Most negative finite fp32 value: replaces -Inf (its negative replaces Inf), since Inf - Inf would be NaN."""
State = tuple[Value, ...]
"""A partial result: the fp32 values (components) that represent it, e.g. the maximum and the sum of exponentials."""


def _merge_logsumexp(a: State, b: State) -> State:
    """Merge two states (m, s) that represent m + log(s).

    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    m = hw.maximum_nan(a[0], b[0]).with_name_hint("new_max")
    return m, hw.fma(a[1], fast_exp(a[0] - m), b[1] * fast_exp(b[0] - m))


def _add_to_logsumexp(state: State, elements: Sequence[Value]) -> State:
    """Return the state with these elements too: one exponential for each, and one for all others before them.

    A maximum of Inf counts as the largest finite number, of which the exponential of Inf is Inf; no NaN arises.
    """
    largest = hw.minimum_nan(_balanced(hw.maximum_nan, elements), -FLT_LOWEST_FINITE)
    m = hw.maximum_nan(state[0], largest).with_name_hint("new_max")
    total = _balanced(lambda x, y: x + y, [fast_exp(x - m) for x in elements])
    return m, hw.fma(state[1], fast_exp(state[0] - m), total)


def _balanced(combine: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    """Combine values in a tree, so that few depend on one another."""
    rest = list(values)
    while len(rest) > 1:
        pairs = [combine(x, y) for x, y in zip(rest[::2], rest[1::2], strict=False)]
        rest = pairs + rest[len(pairs) * 2 :]
    return rest[0]


@dataclass(frozen=True)
class Monoid:
    """How partial results combine.

    `masked_value` replaces an element outside the matrix, `identity` is the state of no elements, `state_of_element`
    makes the state of one element, `merge` combines two states and `finish` computes the result of a state.
    `add`: adds elements to a state, if that takes less than to merge their states one by one.
    `component_names` names the values of a state in the kernel; a state of one value needs none.
    """

    masked_value: float
    identity: tuple[float, ...]
    state_of_element: Callable[[Value], State]
    merge: Callable[[State, State], State]
    finish: Callable[[State], Value]
    component_names: tuple[str, ...] = ("",)
    add: Callable[[State, Sequence[Value]], State] | None = None

    def names_of(self, prefix: str, fallback: str, suffix: str = "") -> list[str]:
        """Return what the kernel calls the components of a state: `fallback` replaces the name of the only one."""
        return ["_".join(filter(None, (prefix, name or fallback, suffix))) for name in self.component_names]


def _scalar_state_monoid(identity: float, merge: Callable[[Value, Value], Value]) -> Monoid:
    return Monoid(identity, (identity,), lambda x: (x,), lambda a, b: (merge(a[0], b[0]),), lambda s: s[0])


_SUM = _scalar_state_monoid(0.0, lambda a, b: a + b)
MONOIDS: dict[str, Monoid] = {
    "sum": _SUM,
    "mean": _SUM,
    "max": _scalar_state_monoid(-math.inf, hw.maximum_nan),
    "min": _scalar_state_monoid(math.inf, hw.minimum_nan),
    "logsumexp": Monoid(
        -math.inf, (FLT_LOWEST_FINITE, 0.0), lambda x: (_finite(x), fast_exp(x - _finite(x))), _merge_logsumexp,
        lambda s: hw.fma(hw.sfu_approximation("lg2.approx.ftz", s[1]), LN_2, s[0]), ("max", "sum_exp"),
        _add_to_logsumexp,
    ),
}  # fmt: skip


def _finite(x: Value) -> Value:
    """Clamp x to the finite fp32 numbers."""
    return hw.minimum_nan(hw.maximum_nan(x, FLT_LOWEST_FINITE), -FLT_LOWEST_FINITE).with_name_hint("finite_x")


class ReductionState:
    """`count` states of the result `name` in a thread's registers."""

    def __init__(self, monoid: Monoid, count: int, name: str) -> None:
        self.monoid = monoid
        self.arrays: list[RegisterArray] = [
            current_builder().registers(F32, count, x) for x in monoid.names_of("", "acc", name)
        ]
        with current_builder().unroll(count) as i:
            for array, identity in zip(self.arrays, monoid.identity, strict=True):
                array[i] = identity

    def load(self, i: ValueLike) -> State:
        """Return state `i`."""
        return tuple(array[i] for array in self.arrays)

    def store(self, i: ValueLike, state: State) -> None:
        """Set state `i`."""
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
        """Force the additions so far to be done here: ptxas would postpone hundreds of them, and spill."""
        for array in self.arrays:
            hw.fence_operand(array)

    def warp_reduce(self, i: ValueLike, masks: tuple[int, ...]) -> None:
        """Reduce state `i` over the lanes whose indices differ in the bits of `masks`; all of them get the result."""
        state = self.load(i)
        for mask in masks:
            for x, name in zip(state, self.monoid.names_of("lane", "value"), strict=True):
                x.with_name_hint(name)
            peer_state = tuple(hw.shuffle_xor_fp32(x, mask) for x in state)
            for x, name in zip(peer_state, self.monoid.names_of("peer", "value"), strict=True):
                x.with_name_hint(name)
            state = self.monoid.merge(state, peer_state)
        self.store(i, state)
