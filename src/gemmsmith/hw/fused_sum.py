"""How Hopper's tensor cores add: the products of an instruction's whole K and the accumulator in one fused sum.

Every addend, products exact, is truncated to a multiple of 2^(e - fraction), e being the largest exponent among the
addends that are not zero. A product's exponent is the sum of its factors' (it may be one more when normalized), a
subnormal's that of the smallest normal number. Their sum is exact; it is truncated to fp32, or to as many bits of it as
were kept, or rounded to nearest even to fp16. A sum of zero is +0, and every NaN has the same bits; what rounds to zero
keeps its sign with wgmma, and not with mma.sync. An H200 computed the same bits in all that benchmarks/probe_mma.py
tried; published models say the same of an H100 (Xie et al., "MMA-Sim", arXiv 2511.10909; Khattak and Mikaitis, arXiv
2512.07004).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, TF32, DType
from gemmsmith.core.mma import Mma

_OF_ZERO, _LEAST = -2000, -500
"""The exponent of zero, and one that a power of two has in float64: both below that of every product."""
_COLUMNS, _PRODUCTS = 128, 1 << 15
"""Of D, and of them all, that are worked on at a time: many enough for numpy, few enough for the caches."""
_NAN = {16: 0x7FFF, 32: 0x7FFFFFFF}
"""The bits of the only one that comes out."""
_MINEXP = {d: int(ml_dtypes.finfo(d.numpy).minexp) for d in (BF16, FP16, FP32, TF32, E4M3, E5M2)}  # type: ignore[no-untyped-call]
"""The exponent of a type's smallest normal number."""


def exponents(x: np.ndarray, dtype: DType) -> np.ndarray:
    """The exponents of float64 elements that are numbers of `dtype`."""
    found = np.maximum(np.frexp(x)[1] - 1, _MINEXP[dtype])
    return np.where(x == 0, _OF_ZERO, found).astype(np.int16)


def fused_product(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
    """A B^T + C as an instruction's D, in its dtype: a (..., m, k), b (..., n, k) and c (..., m, n), all float64."""
    if _is_exact(a, b, c, mma):
        return np.asarray(a @ b.swapaxes(-1, -2) + c + 0.0, mma.d.numpy)  # + 0.0: zero has no sign
    a, parts = _by_depth(a)[..., None].copy(), range(0, b.shape[-2], _COLUMNS)
    columns = [slice(first, first + _COLUMNS) for first in parts]
    sums = [fused_sum(a, _by_depth(b[..., p, :])[..., None, :].copy(), c[..., p], mma) for p in columns]
    return np.concatenate(sums, axis=-1)


def _by_depth(x: np.ndarray) -> np.ndarray:
    """(..., rows, k) as (k, ..., rows)."""
    return np.moveaxis(x, -1, 0)


def _is_exact(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> bool:
    """Whether all addends are integers, and so few and small that no bit of their sum is lost."""
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(abs(a).max() * abs(b).max() * a.shape[-1] + abs(c).max())
    small = largest < 1 << min(mma.fraction, mma.d.mantissa)
    return small and all(bool((x == np.rint(x)).all()) for x in (a, b, c))


@np.errstate(invalid="ignore", over="ignore")
def fused_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
    """Elements of D, in its dtype: c and the sum of a * b along their first axis, k, all float64. a and b broadcast to
    (k, *c.shape)."""
    of_a, of_b = exponents(a, mma.a), exponents(b, mma.b)
    largest = exponents(c, mma.d)
    depth = min(len(a), 1 << (_PRODUCTS // c.size).bit_length())
    steps = [slice(first, first + depth) for first in range(0, len(a), depth)]
    for step in steps:
        np.maximum(largest, (of_a[step] + of_b[step]).max(0), out=largest)
    per_unit = np.ldexp(1.0, mma.fraction - np.maximum(largest, _LEAST))
    total, addends = np.trunc(c * per_unit), np.empty((depth, *c.shape))
    for step in steps:
        np.multiply(a[step], b[step], out=addends)
        np.multiply(addends, per_unit, out=addends)
        total += np.trunc(addends, out=addends).sum(0)
    return stored(total / per_unit, mma)


def stored(total: np.ndarray, mma: Mma) -> np.ndarray:
    """Exact sums as the registers hold them."""
    if mma.d == FP16:
        rounded = total.astype(np.float16)
    else:
        bits = min(mma.fraction, 23)
        unit = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, -126) - bits)
        rounded = np.where(np.isfinite(total), np.trunc(total / unit) * unit, total).astype(np.float32)
    if mma.by != "wgmma":
        rounded += 0  # -0 becomes 0
    rounded.view(f"u{mma.d.bytes}")[np.isnan(total)] = _NAN[mma.d.bits]
    return rounded
