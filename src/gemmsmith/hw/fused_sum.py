"""Model of Hopper's tensor cores: one fused sum of the products over an instruction's K and the accumulator.

Every addend (products are exact) is truncated to a multiple of 2^(e - fraction), where e is the largest exponent of the
nonzero addends. The exponent of a product is the sum of the exponents of its factors (it may be one more when
normalized), that of a subnormal the exponent of the smallest normal number. The sum of the truncated addends is exact.
It is truncated to fp32, or to fewer bits if `fraction` is smaller, or rounded to nearest even to fp16. A sum of zero is
+0, and every NaN has the same bits; a sum that rounds to zero keeps its sign with wgmma, but not with mma.sync. An H200
computed the same bits in all cases of benchmarks/probe/mma.py; published models say the same of an H100 (Xie et al.,
"MMA-Sim", arXiv 2511.10909; Khattak and Mikaitis, arXiv 2512.07004).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, TF32, DType
from gemmsmith.core.mma import Mma

_ZERO_EXPONENT = -2000
"""Exponent used for zero, below the exponent of any product."""
_MIN_EXPONENT = -500
"""Lower bound of exponents that ldexp can represent, below the exponent of any product."""
_COLUMNS_PER_BLOCK = 128
"""Columns of D per block: large enough to amortize numpy's overhead, small enough for the caches."""
_PRODUCTS_PER_BLOCK = 1 << 15
"""Products per block: large enough to amortize numpy's overhead, small enough for the caches."""
_NAN = {16: 0x7FFF, 32: 0x7FFFFFFF}
"""Bit pattern of the canonical NaN, by accumulator width in bits."""
_MINEXP = {d: int(ml_dtypes.finfo(d.numpy).minexp) for d in (BF16, FP16, FP32, TF32, E4M3, E5M2)}  # type: ignore[no-untyped-call]
"""Exponent of the smallest normal number, by dtype."""


def exponents(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the exponents of float64 elements that are representable in `dtype`."""
    result = np.maximum(np.frexp(x)[1] - 1, _MINEXP[dtype])
    return np.where(x == 0, _ZERO_EXPONENT, result).astype(np.int16)


def fused_mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
    """Return A B^T + C as the D of one instruction, in its dtype.

    a (..., m, k), b (..., n, k) and c (..., m, n) are float64.
    """
    if _is_exact(a, b, c, mma):
        return np.asarray(a @ b.swapaxes(-1, -2) + c + 0.0, mma.d.numpy)  # + 0.0: zero has no sign
    a, starts = _k_first(a)[..., None].copy(), range(0, b.shape[-2], _COLUMNS_PER_BLOCK)
    blocks = [slice(start, start + _COLUMNS_PER_BLOCK) for start in starts]
    sums = [fused_sum(a, _k_first(b[..., n, :])[..., None, :].copy(), c[..., n], mma) for n in blocks]
    return np.concatenate(sums, axis=-1)


def _k_first(x: np.ndarray) -> np.ndarray:
    """Return (..., rows, k) as (k, ..., rows)."""
    return np.moveaxis(x, -1, 0)


def _is_exact(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> bool:
    """Return whether all addends are integers, and so few and small that no bit of their sum is lost."""
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(abs(a).max() * abs(b).max() * a.shape[-1] + abs(c).max())
    small = largest < 1 << min(mma.aligned_fraction_bits, mma.d.mantissa)
    return small and all(bool((x == np.rint(x)).all()) for x in (a, b, c))


@np.errstate(invalid="ignore", over="ignore")
def fused_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
    """Return elements of D, in its dtype: c plus the sum of a * b along their first axis, k.

    All are float64; a and b broadcast to (k, *c.shape).
    """
    exponents_a, exponents_b = exponents(a, mma.a), exponents(b, mma.b)
    largest = exponents(c, mma.d)
    block_k = min(len(a), 1 << (_PRODUCTS_PER_BLOCK // c.size).bit_length())
    blocks = [slice(start, start + block_k) for start in range(0, len(a), block_k)]
    for block in blocks:
        np.maximum(largest, (exponents_a[block] + exponents_b[block]).max(0), out=largest)
    per_unit = np.ldexp(1.0, mma.aligned_fraction_bits - np.maximum(largest, _MIN_EXPONENT))
    total, addends = np.trunc(c * per_unit), np.empty((block_k, *c.shape))
    for block in blocks:
        np.multiply(a[block], b[block], out=addends)
        np.multiply(addends, per_unit, out=addends)
        total += np.trunc(addends, out=addends).sum(0)
    return round_to_accumulator(total / per_unit, mma)


def round_to_accumulator(total: np.ndarray, mma: Mma) -> np.ndarray:
    """Round exact sums to the accumulator format."""
    if mma.d == FP16:
        rounded = total.astype(np.float16)
    else:
        bits = min(mma.aligned_fraction_bits, 23)
        unit = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, -126) - bits)
        rounded = np.where(np.isfinite(total), np.trunc(total / unit) * unit, total).astype(np.float32)
    if not mma.signed_zero:
        rounded += 0  # -0 becomes 0
    rounded.view(f"u{mma.d.bytes}")[np.isnan(total)] = _NAN[mma.d.bits]
    return rounded
