"""Fit the polynomials of graph/approximations.py: minimax by Remez's exchange algorithm, in float64.

python -m benchmarks.fit.polynomials
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
POINTS = 20001
MAX_ROUNDS = 30
MARGIN = 1e-5
"""Of symmetric intervals, by which 0 is no point of them: there functions are divided by zero."""


@dataclass(frozen=True)
class Fit:
    """f(x) is approximated by a polynomial of `argument(x)` of a degree, from `low` to `high`: with the least maximum
    of weight(x) times its error."""

    f: Callable[[Array], Array]
    weight: Callable[[Array], Array]
    degree: int
    low: float
    high: float
    argument: Callable[[Array], Array] = lambda x: x

    def coefficients(self) -> tuple[Array, float]:
        """Return the coefficients, from the constant on, and the maximum weighted error."""
        x = (self.low + self.high) / 2 - (self.high - self.low) / 2 * np.cos(np.linspace(0, np.pi, POINTS))
        f, weight, argument, count = self.f(x), self.weight(x), self.argument(x), self.degree + 2
        at = np.linspace(0, POINTS - 1, count).round().astype(int)
        for _ in range(MAX_ROUNDS):
            columns = [argument[at] ** i for i in range(self.degree + 1)]
            columns.append((-1.0) ** np.arange(count) / weight[at])
            *solved, level = np.linalg.solve(np.column_stack(columns), f[at])
            error = weight * (f - np.polyval(solved[::-1], argument))
            ends = np.flatnonzero(np.diff(np.sign(error))) + 1
            extrema = [part[np.abs(error[part]).argmax()] for part in np.split(np.arange(POINTS), ends)]
            while len(extrema) > count:
                extrema.pop(0 if abs(error[extrema[0]]) < abs(error[extrema[-1]]) else -1)
            if len(extrema) < count or np.abs(error).max() <= abs(level) * 1.0001:
                break
            at = np.array(extrema)
        return np.array(solved), float(np.abs(error).max())


erf, erfc = np.vectorize(math.erf), np.vectorize(math.erfc)


def _tail(x: Array) -> Array:
    return np.asarray(0.5 * erfc(x / math.sqrt(2)))


def _log1p_unit(degree: int) -> Fit:
    return Fit(lambda x: np.log1p(x) / x, lambda x: x / np.log1p(x), degree, 1e-6, 1)


def _log1p_half(degree: int) -> Fit:
    return Fit(lambda x: -np.log1p(-x) / x, lambda x: -x / np.log1p(-x), degree, 1e-6, 0.5)


def _ndtr(degree: int) -> Fit:
    """Weights have a floor, so that the exchange is well conditioned where the error does not matter."""
    return Fit(
        lambda x: np.log2(_tail(x)), lambda x: np.maximum(_tail(x) * np.maximum(x, 1) * math.log(2), 1e-12),
        degree, 0, 5.5,
    )  # fmt: skip


FITS = {
    "log1p_small": Fit(
        lambda x: (np.log1p(x) - x) / x**2, lambda x: np.abs(x**2 / np.log1p(x)), 3, -1 / 8, 1 / 8 + MARGIN
    ),
    "expm1_small": Fit(
        lambda x: (np.expm1(x) - x) / x**2, lambda x: np.abs(x**2 / np.expm1(x)), 2, -1 / 8, 1 / 8 + MARGIN
    ),
    "tanh_small": Fit(lambda x: (np.tanh(x) - x) / x**3, lambda x: x**3 / np.tanh(x), 1, 0.01, 1 / 4, np.square),
    "erf_small": Fit(lambda x: erf(x) / x, lambda x: x / erf(x), 2, 0.005, 0.35, np.square),
    "erfc": Fit(
        lambda x: np.log2(erfc(x)) / x, lambda x: np.maximum(x * erfc(x) * math.log(2) / erf(x), 1e-13), 4, 0.35, 5
    ),
    "log1p_unit": _log1p_unit(6), "log1p_unit_approx": _log1p_unit(3),
    "log1p_half": _log1p_half(6), "log1p_half_approx": _log1p_half(3),
    "ndtr": _ndtr(5), "ndtr_approx": _ndtr(3),
}  # fmt: skip


def main() -> None:
    for name, fit in FITS.items():
        coefficients, error = fit.coefficients()
        print(f'"{name}": ({", ".join(f"{x:.9g}" for x in coefficients)}),  # 2^{math.log2(error):.2f}')


if __name__ == "__main__":
    main()
