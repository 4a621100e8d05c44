"""What the model's estimates miss: a quadratic form of nine numbers of a config, fitted to measured times.

The estimate of a config is multiplied by exp(x^T C x + c^T x). benchmarks/fit.py fits the coefficients by ridge
regression and writes them to correction.json: to products of survey-h200.json in benchmarks/results that the power
limit does not hold, and to those of the third, fourth, fifth, seventh and eighth sweep that it holds.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gemmsmith.core.problem import Problem
from gemmsmith.tuning.model import Estimate
from gemmsmith.tuning.space import Column, Space

FILE = Path(__file__).parent / "correction.json"
MOST = 0.2
"""The logarithm of a correction is at most that, either way: shapes may be unlike all that were measured."""
NAMES = (
    "rows of a warpgroup", "columns", "own tiles", "swapped, with tiles along M", "CTAs that share B",
    "CTAs that share A", "tiles along M", "copies of a k-tile", "power",
)  # fmt: skip
"""What the nine numbers are. A, B and M are the problem's, also with swap_ab; all but the third are logarithms."""
PAIRS = np.triu_indices(len(NAMES))


def numbers(problem: Problem, s: Space, e: Estimate) -> Column:
    """The nine numbers of each config, and the products of any two: (configs, 54)."""
    warpgroups = np.where(s.own_tiles, 1, s.consumers)
    along_m = np.log2(np.maximum(1, np.ceil(problem.m / np.where(s.swap_ab, s.n, s.m))))
    x = np.stack([
        np.log2(s.m / warpgroups / 64), np.log2(s.n / 128), s.own_tiles, s.swap_ab * along_m,
        np.log2(np.where(s.swap_ab, s.columns, s.rows)), np.log2(np.where(s.swap_ab, s.rows, s.columns)),
        along_m, np.log(e.copies / e.step), np.log(e.power / e.cycles),
    ], axis=1)  # fmt: skip
    i, j = PAIRS
    return np.concatenate([x, x[:, i] * x[:, j]], axis=1)


def corrected(problem: Problem, s: Space, e: Estimate) -> Column:
    """Cycles of each config: the estimates, corrected for operands of 16 bits, but for promoted sums: nothing else was
    fitted to."""
    if problem.a.dtype.bits != 16 or problem.promoted or 0 in (problem.batch, problem.m, problem.n, problem.k):
        return e.cycles
    return np.asarray(e.cycles * np.exp(np.clip(numbers(problem, s, e) @ coefficients(), -MOST, MOST)))


@cache
def coefficients() -> np.ndarray[Any, Any]:
    """One coefficient for each of the `numbers`."""
    return np.array(json.loads(FILE.read_text()))
