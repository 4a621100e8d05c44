"""Symbols compute what integers do, and their conditions are all that decides the way of a computation."""

from __future__ import annotations

import math
import operator
import random
from typing import Any

import pytest

from gemmsmith.host.export.symbol import OPERATIONS, Expression, Inverse, Symbol, function_of, traced, variables_of

BOUNDS = {"m": (1, 12), "n": (0, 6), "k": (-5, 5), "free": (-math.inf, math.inf)}


def drawn() -> dict[str, int]:
    return {name: random.randint(max(least, -12), min(most, 12)) for name, (least, most) in BOUNDS.items()}  # type: ignore[type-var, arg-type]


def computation(seed: int, values: dict[str, int]) -> tuple[list[int], list[bool]]:
    """Random operations on the values and their results, and all outcomes of comparisons, on which the way depends."""
    dice, known, outcomes = random.Random(seed), list(values.values()), list[bool]()
    for _ in range(30):
        x, y, constant = dice.choice(known[-6:]), dice.choice(known), dice.randint(-6, 14)
        other = dice.choice((y, constant, constant, constant))
        compare = dice.choice((operator.lt, operator.le, operator.eq, operator.gt, operator.ge, operator.ne))
        outcomes.append(compare(x, other))
        x = dice.choice((x, dice.choice(known)))
        made = [x + other, x - other, other - x, -x, x // (abs(constant) % 4 + 1), x % (abs(constant) + 1)]
        made += [x * constant, x | 16, x & 31, abs(x).bit_length()]
        pick = dice.randrange(len(made))
        if abs(int.__int__(made[pick])) < 1 << 40:
            known.append(made[pick])
    return known[4:], outcomes


def value(x: Any, variables: dict[str, int]) -> int:
    if isinstance(x, int):
        return x
    return OPERATIONS[x.op](*(value(y, variables) for y in x.operands)) if x.operands else variables[x.op]


def test_conditions_decide_the_way() -> None:
    """Of values with the same outcomes of the comparisons that were noted all outcomes are the same, and all results
    those of the expressions."""
    for seed in random.sample(range(1 << 30), 200):
        values = drawn()
        with traced(BOUNDS) as noted:
            results, outcomes = computation(seed, {name: Symbol(x, Expression(name)) for name, x in values.items()})
        assert (list(map(int.__int__, results)), outcomes) == computation(seed, values)
        for _ in range(100):
            others = drawn()
            if random.random() < 0.7:
                others = values | {name: others[name] for name in random.sample(list(others), 1)}
            if all(value(comparison, others) == outcome for comparison, outcome in noted.items()):
                expected = [value(x.expression if isinstance(x, Symbol) else x, others) for x in results]
                assert (expected, outcomes) == computation(seed, others), (seed, values, others)


def test_what_is_implied_is_not_noted() -> None:
    with traced({"m": (1, 100)}) as noted:
        m = Symbol(40, Expression("m"))
        assert m > 0
        assert -(-m // 8) * 8 <= 104
        assert m < 64
        assert -(-m // 8) * 8 <= 64
        assert m == 40
        assert m * 3 == 120
    assert [x.op for x in noted] == ["<", "=="]


@pytest.mark.parametrize("wrong", [lambda x: x / 2, lambda x: divmod(x, 2), lambda x: 2**x, float, lambda x: x ^ 1,
                                   round, math.floor, lambda x: 3 / x, int])  # fmt: skip
def test_what_a_symbol_cannot_remember_is_an_error(wrong: Any) -> None:
    with pytest.raises(NotImplementedError, match="does not remember"):
        wrong(Symbol(3, Expression("m")))


def test_the_inverse_of_a_symbol_remembers_it() -> None:
    with traced({}):
        inverse: Any = 1 / Symbol(3, Expression("m"))
    assert isinstance(inverse, Inverse)
    assert inverse == 1 / 3
    assert inverse.of.expression == Expression("m")


def test_functions_compute_expressions() -> None:
    """On random values, as Python does."""
    dice = random.Random()
    for _ in range(100):
        values = {"m": dice.randrange(1, 1000), "n": dice.randrange(1, 1000)}
        with traced({}):
            m, n = (Symbol(x, Expression(name)) for name, x in values.items())
            computed: Any = -(-(m * 3 + n) // 7) % (n | 16) - (m & -m).bit_length()
        assert function_of(computed.expression)(values) == int.__int__(computed)
        assert variables_of(computed.expression) == {"m", "n"}
