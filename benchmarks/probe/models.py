"""Models of how an instruction adds; mma.py searches them for those that reproduce every measured bit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from gemmsmith.core.dtypes import FP16, FP32, DType
from gemmsmith.core.mma import Mma
from gemmsmith.hw.mma import exponents

Rounding = Literal["truncated", "nearest", "truncated to fp32, then nearest"]
_BY_FP32: Rounding = "truncated to fp32, then nearest"
_LEAST = -500
"""Exponent of a power of two that float64 has, below that of every product."""


@dataclass(frozen=True)
class Model:
    """D = C + A B^T in `parts` sums of neighbors along k, one after the other.

    The addends of each are rounded to multiples of 2^(e - fraction), where e is the largest exponent among them, and
    added exactly. C, then the sum of the parts before, is one of them, or is added to the sum of products, which is
    truncated to fp32. Each part is `stored` as D, or as fp32 until the last one.
    """

    fraction: int
    stored: Rounding
    parts: int = 1
    backwards: bool = False
    nearest: bool = False
    c_after: bool = False

    def text(self, mma: Mma) -> str:
        places = f"{self.parts} x {mma.k // self.parts} of k{' backwards' * self.backwards}"
        c = "added after" if self.c_after else "aligned with them"
        how = "nearest" if self.nearest else "truncated"
        return f"{places}, C {c}, {self.fraction} bits kept, {how}; D {self.stored}"

    @np.errstate(invalid="ignore", over="ignore")
    def sums(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
        """Return D (n,) in its dtype, for float64 a and b (k, n) and c (n,) as the instruction reads them."""
        products, of_products = a * b, exponents(a, mma.a) + exponents(b, mma.b)
        sum_dtype, how = (FP32, "truncated") if self.stored == _BY_FP32 else (mma.d, self.stored)
        parts = np.split(np.arange(mma.k), self.parts)
        for part in parts[::-1] if self.backwards else parts:
            addends, largest = products[part], of_products[part].max(0)
            if not self.c_after:
                addends, largest = np.vstack([addends, c]), np.maximum(largest, exponents(c, sum_dtype))
            unit = np.ldexp(1.0, np.maximum(largest, _LEAST) - self.fraction)
            total = (np.rint if self.nearest else np.trunc)(addends / unit).sum(0) * unit
            if self.c_after:
                total = c + rounded(total, FP32, 23, "truncated")
            c = rounded(total, sum_dtype, min(self.fraction, sum_dtype.mantissa), how)
        if sum_dtype != mma.d:
            c = rounded(c, mma.d, mma.d.mantissa, "nearest")
        return (c if mma.signed_zero else c + 0.0).astype(mma.d.numpy)


def rounded(x: np.ndarray, dtype: DType, bits: int, how: str) -> np.ndarray:
    """Round to numbers of `dtype` with `fraction` bits below the first one."""
    least = -14 if dtype == FP16 else -126
    unit = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - bits)
    result = (np.trunc if how == "truncated" else np.rint)(x / unit) * unit
    return np.where(np.isfinite(x), result, x).astype(dtype.numpy).astype(float)


def assumed(mma: Mma) -> Model:
    """Return the simulator's model (hw/mma.py)."""
    return Model(mma.aligned_fraction_bits, "nearest" if mma.d == FP16 else "truncated")


def models(mma: Mma) -> list[Model]:
    """Return the simulator's model and similar ones.

    Earlier chips follow one of these: on Ampere two halves of k, 24 bits.
    """
    stored: list[Rounding] = ["truncated", "nearest"]
    if mma.d == FP16:
        stored.append(_BY_FP32)
    result = [
        Model(fraction, how, parts, backwards, nearest, after)
        for (parts, backwards), after, nearest, fraction, how in product(
            ((1, False), (2, False), (2, True), (4, False)), (False, True), (False, True),
            range(mma.aligned_fraction_bits - 2, mma.aligned_fraction_bits + 3), stored,
        )
    ]  # fmt: skip
    return sorted(result, key=lambda model: model != assumed(mma))


def ranked(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, mma: Mma) -> list[tuple[int, Model]]:
    """Return for how many of D's elements each model has other bits, the best first; all NaN are equal."""
    result = [(int(np.count_nonzero(unequal(model.sums(a, b, c, mma), d))), model) for model in models(mma)]
    return sorted(result, key=lambda x: x[0])


def unequal(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return where two arrays of a dtype have different bits, except for NaN."""
    bits = f"u{x.itemsize}"
    return np.asarray((x.view(bits) != y.view(bits)) & ~(np.isnan(x) & np.isnan(y)))
