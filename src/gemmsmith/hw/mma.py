"""mma.sync: a warp multiplies fragments in registers. PTX ISA, "Matrix fragments for mma.m16n8k16" and its siblings.

In units of 32-bit words the fragment layout is the same for all types (8 words per row), so ldmatrix loads A and B of
any type.

`fused_sum` is the model of Hopper's tensor cores: one sum of the products over an instruction's K and the accumulator.
Every addend (products are exact) is truncated to a multiple of 2^(e - fraction), where e is the largest exponent of the
nonzero addends. The exponent of a product is the sum of the exponents of its factors (it may be one more when
normalized), that of a subnormal the exponent of the smallest normal number. The sum of the truncated addends is exact.
It is truncated to fp32, or to fewer bits if `fraction` is smaller, or rounded to nearest even to fp16. A sum of zero is
+0, and every NaN has the same bits; a sum that rounds to zero keeps its sign with wgmma, but not with mma.sync. An H200
computed the same bits in all cases of wgmma-h200 and mma-h200; published models say the same of an H100 (Xie et al.,
"MMA-Sim", arXiv 2511.10909; Khattak and Mikaitis, arXiv 2512.07004).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, TF32, TF32_BITS, DType
from gemmsmith.core.errors import KernelError
from gemmsmith.core.mma import A_FRAGMENT, B_FRAGMENT, D_FRAGMENT, MMA_SYNC, Mma
from gemmsmith.lang.instruction import Instruction, registers_in, registers_inout
from gemmsmith.machine import Machine

_ZERO_EXPONENT = -2000
"""Exponent used for zero, below the exponent of any product."""
_MAX_EXPONENT = 500
"""Bound of the exponents that units of float64 are made of, beyond those of all products but zeros and infinities."""
_FP32_EXPONENTS = range(-50, 62)
"""Exponents of factors whose products are normal numbers of fp32, and so are exact in it."""
_COLUMNS_PER_BLOCK = 256
"""Columns of D per block: large enough to amortize numpy's overhead, small enough for the caches."""
_PRODUCTS_PER_BLOCK = 1 << 15
"""Products per block: large enough to amortize numpy's overhead, small enough for the caches."""
_NAN = {16: 0x7FFF, 32: 0x7FFFFFFF}
"""Bit pattern of the canonical NaN, by accumulator width in bits."""
_FLOAT64_BIAS, _FLOAT64_FRACTION_BITS = np.int16(1023), 52
_MINEXP = {d: np.int16(ml_dtypes.finfo(d.numpy).minexp) for d in (BF16, FP16, FP32, TF32, E4M3, E5M2)}  # type: ignore[no-untyped-call]
"""Exponent of the smallest normal number, by dtype."""


def exponents(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the exponents of float64 elements that are representable in `dtype`.

    That of a subnormal of `dtype` is the smallest normal's, as the hardware aligns it. Zero has _ZERO_EXPONENT,
    infinity and NaN 1024.
    """
    biased = (x.view(np.int64) >> _FLOAT64_FRACTION_BITS).astype(np.int16) & 0x7FF
    return np.where(biased == 0, np.int16(_ZERO_EXPONENT), np.maximum(biased - _FLOAT64_BIAS, _MINEXP[dtype]))


def _power_of_two(exponent: np.ndarray) -> np.ndarray:
    """Return 2^exponent in float64, whose bits are the biased exponent and a fraction of 0. Only for normal numbers."""
    return ((exponent.astype(np.int64) + _FLOAT64_BIAS) << _FLOAT64_FRACTION_BITS).view(np.float64)


def fused_mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
    """Return A B^T + C in the dtype of D, computed as one instruction does (see the module's docstring).

    a (..., m, k), b (..., n, k) and c (..., m, n) are float64.
    """
    if _is_exact(a, b, c, mma):
        total = a @ b.swapaxes(-1, -2)
        total += c
        total += 0.0  # zero has no sign
        return np.asarray(total, mma.d.numpy)
    # Blocks of columns stay in the caches.
    a, starts = _k_first(a)[..., None].copy(), range(0, b.shape[-2], _COLUMNS_PER_BLOCK)
    blocks = [slice(start, start + _COLUMNS_PER_BLOCK) for start in starts]
    sums = [fused_sum(a, _k_first(b[..., n, :])[..., None, :].copy(), c[..., n], mma) for n in blocks]
    return np.concatenate(sums, axis=-1)


def _k_first(x: np.ndarray) -> np.ndarray:
    """Return (..., rows, k) as (k, ..., rows)."""
    return np.moveaxis(x, -1, 0)


def _is_exact(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> bool:
    """Return whether no bit is lost in A B^T + C: all addends are integers, and small enough.

    A product of float64 matrices then gives the same, faster.
    """
    largest_a, largest_b, largest_c = (np.maximum.reduce(abs(x), None) for x in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(largest_a * largest_b * a.shape[-1] + largest_c)
    small = largest < 1 << min(mma.aligned_fraction_bits, mma.d.mantissa)
    return small and not any(np.count_nonzero(x != np.rint(x)) for x in (a, b, c))


@np.errstate(invalid="ignore", over="ignore")
def fused_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
    """Return c plus the sum of a * b along their first axis, k, as the tensor core computes it, in the dtype of D.

    All are float64; a and b broadcast to (k, *c.shape). See the module's docstring for the rounding.
    """
    exponents_a, exponents_b = exponents(a, mma.a), exponents(b, mma.b)
    largest = exponents(c, mma.d)
    block_k = min(len(a), 1 << (_PRODUCTS_PER_BLOCK // c.size).bit_length())
    blocks = [slice(start, start + block_k) for start in range(0, len(a), block_k)]
    for block in blocks:
        np.maximum(largest, (exponents_a[block] + exponents_b[block]).max(0), out=largest)
    # In units of 2^(largest - fraction), truncated addends are integers, of which sums are exact.
    bounded = np.minimum(np.maximum(largest, -_MAX_EXPONENT), _MAX_EXPONENT)
    per_unit = _power_of_two(mma.aligned_fraction_bits - bounded)
    total = np.trunc(c * per_unit)
    # Where products are exact in fp32, and each, truncated, is less than 2^(fraction + 2), half the bytes will do.
    is_narrow = len(a) << mma.aligned_fraction_bits + 2 <= 1 << 31 and _multiply_in_fp32(exponents_a, exponents_b, mma)
    kind, largest_unit = (np.float32, 2.0**126) if is_narrow else (np.float64, np.inf)  # a larger unit: of zeros
    a, b, units = (x.astype(kind) for x in (a, b, np.minimum(per_unit, largest_unit)))
    products = np.empty((block_k, *c.shape), kind)
    for block in blocks:
        np.multiply(a[block], b[block], out=products)
        np.multiply(products, units, out=products)
        addends = products.astype(np.int32) if is_narrow else np.trunc(products, out=products)
        total += np.add.reduce(addends, 0, addends.dtype)
    return round_to_accumulator(total / per_unit, mma)


def _multiply_in_fp32(exponents_a: np.ndarray, exponents_b: np.ndarray, mma: Mma) -> bool:
    """Return whether all products of factors with these exponents are exact in fp32.

    Their fractions must fit into fp32's, and their exponents must be those of its normal numbers, or of zero.
    """
    if mma.a.mantissa + mma.b.mantissa + 2 > FP32.mantissa + 1:
        return False
    low, high = _FP32_EXPONENTS.start, _FP32_EXPONENTS.stop
    return all(bool(((x < high) & ((x >= low) | (x == _ZERO_EXPONENT))).all()) for x in (exponents_a, exponents_b))


def round_to_accumulator(total: np.ndarray, mma: Mma) -> np.ndarray:
    """Round exact sums to the accumulator's dtype: to nearest for fp16, else truncated.

    fp32 keeps 23 fraction bits, or the fewer that alignment keeps. Sums below the smallest normal are truncated in the
    unit of that. Every NaN becomes the canonical one.
    """
    if mma.d == FP16:
        rounded = total.astype(np.float16)
    else:
        bits = min(mma.aligned_fraction_bits, 23)
        dropped = -1 << _FLOAT64_FRACTION_BITS - bits
        truncated = (total.view(np.int64) & dropped).view(np.float64)
        per_unit = 2.0 ** (bits - _MINEXP[FP32])
        tiny = abs(total) < 2.0 ** _MINEXP[FP32]
        truncated[tiny] = np.trunc(total[tiny] * per_unit) / per_unit
        rounded = truncated.astype(np.float32)
    if not mma.signed_zero:
        rounded += 0  # -0 becomes 0
    rounded.view(f"u{mma.d.bytes}")[np.isnan(total)] = _NAN[mma.d.bits]
    return rounded


M = 16
"""Rows of A and of D."""
N = 8
"""Columns of B and of D."""
WORDS = 8
"""32-bit words along K, per row of A and per column of B."""
_LANE = np.arange(32)[:, None]
_A, _B, _D = (
    fragment.element(_LANE, np.arange(count))
    for fragment, count in ((A_FRAGMENT, A_FRAGMENT.registers), (B_FRAGMENT, B_FRAGMENT.registers), (D_FRAGMENT, 4))
)


def decode_elements(words: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the elements that 32-bit words hold, as they are multiplied: float64, or int64 for integers.

    Products are exact in float64. TF32 elements are truncated.
    """
    if dtype == TF32:
        words = words & TF32_BITS
    return np.ascontiguousarray(words).view(dtype.numpy).astype(np.int64 if dtype.is_integer else np.float64)


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma) -> np.ndarray:
    """Return A B^T + C per warp, in the dtype of D: a (warps, m, k), b (warps, n, k), c (warps, m, n)."""
    if mma.d.is_integer:  # fp32 is exact: products are at most 2^14, and there are 32; sums with c wrap
        product = a.astype(np.float32) @ b.swapaxes(-1, -2).astype(np.float32)
        return np.asarray(product.astype(np.int64) + c).astype(np.int32)
    return fused_mma(a, b, c.astype(np.float64), mma)


def unpack_accumulator(registers: np.ndarray, dtype: DType) -> np.ndarray:
    """Return registers (..., count) as accumulator elements. A register of fp16 elements holds a pair."""
    words = np.ascontiguousarray(registers)
    return words.astype(np.uint32).view(np.float16) if dtype == FP16 else words


def pack_accumulator(elements: np.ndarray, dtype: DType) -> np.ndarray:
    """Return accumulator elements as registers, the inverse of `unpack_accumulator`."""
    return np.ascontiguousarray(elements).view(np.uint32) if dtype == FP16 else elements


MMA_SYNC_CYCLES = 4
"""Of an mma.sync of any dtype at the full rate of a tensor core, of which an SM has four."""


class MmaSync(Instruction):
    """mma.sync: a warp computes D (16 x 8) = A (16 x k) B (k x 8) + D, all in registers.

    `d`, `a`, `b`: each thread's registers of the matrices, its fragments. `mma`: the dtypes.
    """

    d: registers_inout
    a: registers_in
    b: registers_in
    mma: Mma
    pure = True
    ptx = "mma.sync.aligned.m16n8k{mma.k}.row.col.{mma}.{mma.d.ptx} {d}, {a}, {b}, {d};"

    def check(self) -> None:
        if self.mma not in MMA_SYNC.instructions:
            raise KernelError(f"mma.sync: got {self.mma}; use one of {', '.join(map(str, MMA_SYNC.instructions))}")
        expected = self.mma.accumulator_registers(N), A_FRAGMENT.registers, B_FRAGMENT.registers
        counts = self.d.count, self.a.count, self.b.count
        if counts != expected:
            raise KernelError(f"mma.sync: got {counts} registers of d, a and b; use {expected}")

    @property
    def required_arch(self) -> str:  # type: ignore[override]
        """That of its dtypes."""
        return self.mma.required_arch

    @property
    def macs_per_thread(self) -> int:
        return M * N * self.mma.k // 32

    @property
    def wrapper_name(self) -> str:
        types = dict.fromkeys((self.mma.d.ptx, self.mma.a.ptx))
        return f"mma_m16n8k{self.mma.k}_{'_'.join(types)}"

    def simulate(self, m: Machine) -> None:
        """Gather the matrices of each warp from the fragments of its lanes, multiply, and distribute D."""
        m.require_converged("mma.sync")
        m.multiply("mma.sync", MMA_SYNC_CYCLES)
        warps, mma = len(m.threads) // 32, self.mma
        a, b = np.zeros((warps, M, WORDS), np.uint32), np.zeros((warps, N, WORDS), np.uint32)
        for matrix, words, registers in ((a, _A, self.a), (b, _B, self.b)):
            matrix[:, words[0], words[1]] = m.registers.view(registers).reshape(warps, 32, -1).astype(np.uint32)
        c = np.zeros((warps, M, N), np.int64 if mma.d.is_integer else np.float64)
        d = m.registers.view(self.d)
        c[:, _D[0], _D[1]] = unpack_accumulator(d.reshape(warps, 32, -1), mma.d)
        result = multiply(decode_elements(a, mma.a), decode_elements(b, mma.b), c, mma)[:, _D[0], _D[1]]
        d[m.active] = pack_accumulator(result, mma.d).reshape(d.shape)[m.active]
