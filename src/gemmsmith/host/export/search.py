"""What a plan launches, as a function of sizes, strides and addresses, found by running Python on Symbols.

`explore` computes the launches of many random problems, each of which notes the comparisons that it makes. Problems
with the same outcomes have the same launches but for their values, whose expressions are known. What no problem
reached is refused by the header. Sources: concolic testing (Godefroid, Klarlund, Sen, "DART", 2005), and fuzzing guided
by coverage.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gemmsmith.core.problem import MAX_EXTENT
from gemmsmith.core.scalars import round_up
from gemmsmith.host.export.signature import SIZES, Signature, Values, served_rows
from gemmsmith.host.export.symbol import Expression, Outcomes, Symbol, function_of, traced, variables_of
from gemmsmith.lang.launch import Launches

MAX_PATHS, RUNS_WITHOUT_NEWS, MAX_TRIES = 4_000, 500, 5
"""Paths that are found at most, how many random problems without a new one end the search, and from how many paths it
seeks the other outcome of a comparison. Chosen."""
POWERS = tuple(1 << i for i in range(11))


class Path(NamedTuple):
    """Outcomes of comparisons, and what is launched if they are so: launches of Symbols, or why nothing can be."""

    outcomes: Outcomes
    launches: Launches | str


def explore_choice(signatures: Sequence[Signature]) -> list[Path]:
    """Return the paths of all plans, each behind the comparisons of m that choose its plan."""
    paths, before = list[Path](), Outcomes()
    for signature, rows in zip(signatures, served_rows(signatures), strict=True):
        chosen = Expression("<=", (Expression("m"), rows[-1]))
        choice = before | ({chosen: True} if rows[-1] < MAX_EXTENT else {})
        paths += [path._replace(outcomes=choice | path.outcomes) for path in explore(signature)
                  if all(path.outcomes.get(x, y) == y for x, y in choice.items())]  # fmt: skip
        before = before | {chosen: False}
    return paths


def explore(signature: Signature, seed: int = 0) -> list[Path]:
    """Return all paths that a search finds, each once.

    It begins with the plan's own values. Wherever a path's comparison has had one outcome only, values for the
    other are sought next to the path's; then among random ones.
    """
    dice, rest = random.Random(seed), RUNS_WITHOUT_NEWS
    paths: list[Path] = []
    nodes: dict[tuple[int, Expression, bool], int] = {}
    tries = Counter[tuple[int, Expression, bool]]()
    queue, values = deque[tuple[Values, Outcomes, int]](), signature.own_values()
    while rest and len(paths) < MAX_PATHS:
        path = _trace(signature, values)
        node, is_new, before = 0, not paths, {}
        for comparison, outcome in path.outcomes.items():
            key = node, comparison, outcome
            if key not in nodes:
                nodes[key], is_new = len(nodes) + 1, True
            before[comparison] = outcome
            other = node, comparison, not outcome
            if other not in nodes and tries[other] < MAX_TRIES:
                tries[other] += 1
                queue.append((values, dict(before), node))
            node = nodes[key]
        if is_new:
            paths.append(path)
        following = None
        while queue and not following:
            near, outcomes, node = queue.popleft()
            *_, (comparison, outcome) = outcomes.items()
            if (node, comparison, not outcome) not in nodes:
                following = _other(signature, near, outcomes, dice)
        if not following:
            rest = RUNS_WITHOUT_NEWS if is_new else rest - 1
        values = following or signature.draw(dice)
    return paths


def _other(signature: Signature, values: Values, outcomes: Outcomes, dice: random.Random) -> Values | None:
    """Return values with these outcomes but for the last one; None if there are none next to `values`."""
    *before, (last, outcome) = ((function_of(x), y) for x, y in outcomes.items())
    for near in _next_to(signature, values, variables_of(next(reversed(outcomes))), dice):
        if last(near) != outcome and all(f(near) == y for f, y in before):
            return near
    return None


def _next_to(signature: Signature, values: Values, names: Iterable[str], dice: random.Random) -> Iterator[Values]:
    """Yield values to try: those of a path with one of these variables changed, then with two random ones."""
    changing = [x for x in signature.variables if x.name in names]
    for x in changing:
        value, is_size = values[x.name], x.name in signature.sizes
        candidates = [value + y for i in range(5) for y in (-1 << i, 1 << i)] + [round_up(value, y) for y in POWERS]
        candidates += [*POWERS, *SIZES] if is_size else [value << i for i in range(1, 16)]
        candidates += [0, x.most, *(x.draw(dice, values) for _ in range(50 if is_size else 5))]
        yield from (values | {x.name: y} for y in candidates if x.least <= y <= x.most and not y % x.multiple)
    sizes = [x for x in signature.variables if x.name in signature.sizes]
    for _ in range(50):
        yield values | {x.name: x.draw(dice, values) for x in (dice.choice(changing), dice.choice(sizes))}


def _trace(signature: Signature, values: Values) -> Path:
    with traced({x.name: (x.least, x.most) for x in signature.variables}) as outcomes:
        symbols = {name: Symbol(x, Expression(name)) for name, x in values.items()}
        return Path(outcomes, signature.launches(symbols))
