"""The vectors of mma.py: chosen ones, each of which shows one property, and random tiles."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gemmsmith.backends.reference.matmul import truncate_to_tf32
from gemmsmith.core.dtypes import FP16, TF32, DType
from gemmsmith.core.mma import Mma

N = 64
"""Rows of A and of B, and therefore independent sums on a tile's diagonal."""
SPREADS = ((-1, 0), (-2, 1), (-4, 2), (-6, 4), (-9, 7), (-31, 30), (-76, -60))
"""Ranges of the exponents of a random tile's factors, as far as their types have them. The last sums are subnormal."""


def numbers(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Return elements as an instruction reads them, in float64."""
    return (truncate_to_tf32(x) if dtype == TF32 else x).astype(float)


# -- chosen vectors ---------------------------------------------------------------------------------------------------


class Probe:
    """Chosen vectors for one instruction, by name."""

    def __init__(self, mma: Mma) -> None:
        self.mma = mma
        self.rows: list[tuple[np.ndarray, np.ndarray, float]] = []
        self.names: list[str] = []
        self.finfo_a, self.finfo_b = ml_dtypes.finfo(mma.a.numpy), ml_dtypes.finfo(mma.b.numpy)
        lowest = -14 if mma.d == FP16 else -126
        self.top = 12 if mma.d == FP16 else min(12, self.exponents()[1])
        self.bottom = max(self.exponents()[0], lowest - 8)
        """Exponents of the powers of two that are added."""

    def exponents(self) -> tuple[int, int]:
        """Return the exponents of the smallest and the largest product of normal powers of two."""
        return int(self.finfo_a.minexp + self.finfo_b.minexp), int(self.finfo_a.maxexp + self.finfo_b.maxexp - 2)

    def power(self, e: int, sign: float = 1.0) -> tuple[float, float]:
        """Return two factors of sign * 2^e."""
        low, high = int(self.finfo_a.minexp), int(self.finfo_a.maxexp) - 1
        a_value = min(max(e // 2, low), high)
        a_value = min(max(a_value, e - (int(self.finfo_b.maxexp) - 1)), max(e - int(self.finfo_b.minexp), low))
        return sign * 2.0**a_value, 2.0 ** (e - a_value)

    def add(self, name: str, products: dict[int, tuple[float, float]], c: float = 0.0) -> None:
        """Add a vector with these factors at these positions of K, zeros elsewhere."""
        a, b = np.zeros(self.mma.k), np.zeros(self.mma.k)
        for place, (x, y) in products.items():
            a[place], b[place] = x, y
        self.names.append(name)
        self.rows.append((a, b, c))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a and b (vectors, k), c (vectors,)."""
        exact = [np.array([row[i] for row in self.rows]) for i in range(3)]
        a, b, c = (x.astype(d.numpy) for x, d in zip(exact, (self.mma.a, self.mma.b, self.mma.d), strict=True))
        assert np.array_equal(a.astype(float), exact[0], equal_nan=True), "a factor that the type does not hold"
        assert np.array_equal(b.astype(float), exact[1], equal_nan=True), "a factor that the type does not hold"
        return a, b, c


def selected_vectors(mma: Mma) -> Probe:
    """Return all chosen vectors. X = 2^top; small terms are named by how many bits they are below X."""
    p = Probe(mma)
    top, span = p.top, p.top - p.bottom
    x, minus = p.power(top), p.power(top, -1)
    big = 2.0**top
    for j in range(1, min(span, 40) + 1):
        small, negative = p.power(top - j), p.power(top - j, -1)
        p.add(f"kept-products {j}", {0: x, 1: minus, 2: small})
        p.add(f"kept-apart {j}", {0: x, p.mma.k // 2: minus, p.mma.k - 1: small})
        p.add(f"kept-beside-c {j}", {0: minus, 1: small}, big)
        p.add(f"kept-beside-c-last {j}", {p.mma.k - 2: minus, p.mma.k - 1: small}, big)
        p.add(f"kept-of-c {j}", {0: x, 1: minus}, 2.0 ** (top - j))
        p.add(f"kept-negative {j}", {0: x, 1: minus, 2: negative})
        p.add(f"stored {j}", {0: x, 1: x, 2: small})
        p.add(f"stored-c {j}", {0: small}, big)
        p.add(f"stored-c-alone {j}", {}, big * (1 + 2.0**-j) if j <= (10 if p.mma.d == FP16 else 23) else big)
        p.add(f"stored-c-with-1 {j}", {0: p.power(top - 4)}, big * (1 + 2.0**-j) if j <= 23 else big)
        # mantissas 1.5 x 1.5 = 2.25: is the exponent the product's, or the sum of the factors'?
        p.add(f"kept-carried {j}", {0: (1.5 * x[0], 1.5 * x[1]), 1: (1.5 * minus[0], 1.5 * minus[1]), 2: small})
        for up in (3, 5, 7):  # a small product of 1.5, 2.5/2, 1.75 units ..., where j is about what is kept
            part = p.power(top - j)
            p.add(f"round-products{up} {j}", {0: x, 1: minus, 2: (up / 4 * part[0], part[1])})
            p.add(f"round-negative{up} {j}", {0: x, 1: minus, 2: (-up / 4 * part[0], part[1])})
            p.add(f"round-c{up} {j}", {0: x, 1: minus}, up / 4 * 2.0 ** (top - j))
            p.add(f"round-negative-c{up} {j}", {0: x, 1: minus}, -up / 4 * 2.0 ** (top - j))
        if p.mma.d == FP16 and j > 11:  # is a tie broken by what fp32 would not hold?
            p.add(f"tie {j}", {0: x, 1: p.power(top - 11), 2: small})
    # The final rounding: 2X and 0 to 15 steps of 2^(top-j), each way.
    for j in range(6, min(span, 26) + 1):
        for m in range(16):
            for sign, name in ((1, "final"), (-1, "final-negative")):
                bits = [p.power(top - j + i, sign) for i in range(4) if m >> i & 1 and i < j]
                two = p.power(top, sign)
                p.add(f"{name}-{j} {m}", {0: two, 1: two, **{2 + i: bit for i, bit in enumerate(bits)}})
    # Which places of K are added together: X at one, -X at another, something that X swallows at a third.
    lost = next((j for j in range(30 if p.mma.aligned_fraction_bits > 20 else 20, span + 1)), span)
    for j in range(1, p.mma.k):
        for last in range(p.mma.k):
            if last not in (0, j):
                p.add(f"group {j} {last}", {0: x, j: minus, last: p.power(top - lost)})
    for j in range(p.mma.k):
        for last in range(p.mma.k):
            if last != j:
                p.add(f"group-c {j} {last}", {j: minus, last: p.power(top - lost)}, big)
    # Carries: all products at their largest, and C too.
    most_a, most_b = float(p.finfo_a.max), float(p.finfo_b.max)
    scale = 1.0 if p.mma.a.bits == 8 and p.mma.d != FP16 else 2.0**-100 if p.finfo_a.maxexp > 20 else 2.0**-8
    scale = 2.0**-5 if p.mma.a.bits == 8 and p.mma.d == FP16 else scale
    if p.mma.a == TF32:
        most_a = most_b = float((2 - 2.0**-10) * 2.0**127)
    for sign in (1, -1):
        both = (sign * most_a * scale, most_b * scale)
        for count in range(1, p.mma.k + 1):
            p.add(f"carry {sign * count}", dict.fromkeys(range(count), both))
            p.add(f"carry-c {sign * count}", dict.fromkeys(range(count), both), sign * 2.0 ** min(12, p.top) * 1.875)
    # Subnormals, zeros.
    tiny_a, tiny_b = float(p.finfo_a.smallest_subnormal), float(p.finfo_b.smallest_subnormal)
    if p.mma.a == TF32:
        tiny_a = tiny_b = 2.0**-136  # of its 10 bits
    near = 1.0 if p.finfo_a.minexp > -100 else 2.0**120
    p.add("subnormal a", {0: (tiny_a, near)})
    p.add("subnormal b", {0: (near, tiny_b)})
    p.add("subnormal both", {0: (tiny_a, tiny_b)})
    least = -24 if p.mma.d == FP16 else -149
    for name, e in (("d", least + 9), ("d-lowest", least), ("d-half", least - 1)):
        p.add(f"subnormal {name}", {0: p.power(max(p.exponents()[0], e))})
    if p.exponents()[0] < least:
        p.add("subnormal d-1.5", {0: p.power(least), 1: p.power(least - 1)})
        p.add("subnormal d-halves", {0: p.power(least - 1), 1: p.power(least - 1)})
    c_tiny = 2.0**least
    p.add("subnormal c", {}, c_tiny)
    p.add("subnormal c-3", {}, 3 * c_tiny)
    p.add("subnormal c-large", {}, c_tiny * (2**9 + 1 if p.mma.d == FP16 else 2**22 + 1))
    for j in range(0, 30):  # a subnormal factor's exponent: of the smallest normal number, or its own?
        e = int(np.log2(tiny_a)) + int(np.log2(near))
        if e - j >= p.exponents()[0]:
            p.add(f"subnormal-exponent {j}", {0: (tiny_a, near), 1: (-tiny_a, near), 2: p.power(e - j)})
        if -j >= p.exponents()[0]:  # and that of a zero times the largest number
            largest = 2.0 ** (int(p.finfo_b.maxexp) - 1) if p.finfo_b.maxexp < 100 else 2.0**20
            p.add(f"zero-exponent {j}", {0: (0.0, largest), 1: p.power(-j)})
    p.add("zero minus", {0: (-1.0, 1.0), 1: (1.0, 1.0)})
    p.add("zero minus-c", {}, -0.0)
    p.add("zero minus-all", dict.fromkeys(range(p.mma.k), (-0.0, 1.0)), -0.0)
    # Beyond the range.
    limit = float(ml_dtypes.finfo(p.mma.d.numpy).max)
    one = p.power(0)
    p.add("limit c", {}, limit)
    p.add("limit c-and-1", {0: one}, limit)
    for e in range(0, 6) if p.mma.d == FP16 else range(100, 128):
        for sign in (1, -1):
            if e <= p.exponents()[1]:
                p.add(f"limit c-and-2^{e} {sign}", {0: p.power(e, sign)}, sign * limit)
    p.add("limit both", {0: p.power(min(127, p.exponents()[1])), 1: p.power(min(127, p.exponents()[1]))}, limit)
    p.add("limit product", {0: (most_a, most_b)})
    p.add("limit canceled", {0: (most_a, most_b), 1: (-most_a, most_b)})
    p.add("limit canceled-and-1", {0: (most_a, most_b), 1: (-most_a, most_b), 2: one})
    if p.mma.d == FP16:
        for m in range(64):
            extra = {i: p.power(i) for i in range(6) if m >> i & 1}
            p.add(f"limit rounded {m}", extra, limit)
    nan, inf = float("nan"), float("inf")
    p.add("special nan-a", {0: (nan, 1.0)})
    p.add("special nan-b", {0: (1.0, nan)})
    p.add("special nan-times-0", {0: (nan, 0.0)})
    p.add("special nan-c", {0: one}, nan)
    p.add("special inf-c", {0: one}, inf)
    p.add("special -inf-c", {0: one}, -inf)
    if not np.isnan(np.array(inf).astype(p.mma.a.numpy).astype(float)):
        p.add("special inf-a", {0: (inf, 1.0)})
        p.add("special -inf-a", {0: (-inf, 1.0)})
        p.add("special inf-times-0", {0: (inf, 0.0)})
        p.add("special inf-minus-inf", {0: (inf, 1.0), 1: (-inf, 1.0)})
        p.add("special inf-minus-c", {0: (inf, 1.0)}, -inf)
        p.add("special inf-and-nan", {0: (inf, 1.0), 1: (nan, 1.0)})
    return p


# -- random vectors ---------------------------------------------------------------------------------------------------


def random_tiles(mma: Mma, rng: np.random.Generator, tiles: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random tiles.

    Tile i has SPREADS[i]; C is of the sum's size, far above, far below, zero, or cancels most of it.
    """

    def operand(dtype: Any, spread: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
        info = ml_dtypes.finfo(dtype.numpy)
        low, high = (min(max(e, int(info.minexp) - 2), int(info.maxexp) - 2) for e in spread)
        x = rng.uniform(1, 2, shape) * 2.0 ** rng.integers(low, high + 1, shape) * rng.choice([-1, 1], shape)
        x[rng.random(shape) < 0.03] = 0
        return x.astype(dtype.numpy)

    spreads = [SPREADS[i % len(SPREADS)] for i in range(tiles)]
    a = np.stack([operand(mma.a, s, (N, mma.k)) for s in spreads])
    b = np.stack([operand(mma.b, s, (N, mma.k)) for s in spreads])
    exact = numbers(a, mma.a) @ numbers(b, mma.b).swapaxes(1, 2)
    factor = rng.choice([1.0, -1.0, 0.0, 2.0**-6, 2.0**6, 2.0**-14, 2.0**14], exact.shape)
    limit = float(ml_dtypes.finfo(mma.d.numpy).max)
    c = np.clip(exact * factor * rng.choice([1.0, 1.37, 0.99], exact.shape), -limit, limit).astype(mma.d.numpy)
    return a, b, c
