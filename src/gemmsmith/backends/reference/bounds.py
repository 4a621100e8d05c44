"""Checks a computed D: every element, and the Frobenius norm, within a stated bound of the float64 product.

The bound of one element, with ref = A @ B in float64, P = |A| @ |B| and u the output's unit roundoff:

    E     = c * P + tiny                                what the accumulation may have lost
    bound = E + u * (|ref| + E) + half a subnormal      then one rounding to the output

c follows from what a Hopper tensor core does, an instruction's k elements of K at a time (a step): it aligns their
exact products and the accumulator to the largest exponent, truncates each `fraction` bits below it, adds exactly, and
rounds once, toward zero to fp32 (of which FP8 keeps `fraction` bits) or to nearest to fp16. Every step thus errs by,
relative to P, at most

    bf16, fp16: 16 * 2^-25 + 2^-23, to fp16 + 2^-11     TF32: 8 * 2^-25 + 2^-23     FP8: 32 * 2^-13 + 2^-13

(the largest term loses nothing, the other k less than 2^-fraction of it each; each partial sum is at most P), and
s = ceil(K / k) steps by c = (1 + step)^s - 1, about s * step, in any order. (Adding the parts of a split K costs
2^-24 each, a tenth of a step.) The products of subnormal operands are aligned as if those were the smallest normal,
so P takes them as that. `tiny` is s times what a step may lose below the accumulator's smallest normal.
Promoted sums take these steps in each block of 128 of K, and each block's sum, times the product of its scales, is
added in fp32: three roundings more for the scales, one for each sum. 3xTF32 adds three sums for each 32 of K (mma.sync
one for each 16, whose first products are the low ones: four of its steps count, the others are of 2^-10 of P), and
leaves out less than 2^-19 of each product. P is the sum of |A| |B| times their scales. Other sums have three
roundings where they are scaled. Those of int8 are exact: as int32 the product modulo 2^32, else as if they were scaled.
A float32 chain of fused multiply-adds stays far within the bound, since its errors have both signs; a tensor core's may
all have the same.

Source: measured on an H200, bit for bit (docs/notebook.md, "What tensor cores compute"), as published for an H100
(Xie et al., "MMA-Sim", arXiv 2511.10909; Khattak and Mikaitis, arXiv 2512.07004); Higham, "Accuracy and Stability of
Numerical Algorithms", section 3.1, for the product of steps.

Overflow. An Inf is right where some order of the sum can reach it: the positive (or negative) products alone
exceed the accumulator's range, or the result the output's. A NaN is right where both do. Elsewhere, NaN and Inf
must be exactly those of IEEE arithmetic on A and B.

Frobenius. ||D - ref|| is at most the same bound with norms in place of elements: c * ||P|| and so on. For operands
whose elements are independent with mean zero, P stands for far more than the partial sums reach; there
Q = sqrt(A^2 @ B^2), their standard deviation at the end, takes its place (`zero_mean`), which is about sqrt(K)
smaller and catches a loss of precision that no element shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmsmith.backends.reference.product import Array, as_tf32, exact, in_blocks
from gemmsmith.core.dtypes import FP16, FP32, INT32, TF32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import PRODUCTS, Mma, find_mma
from gemmsmith.core.problem import SCALE_BLOCK

TINY = {FP32: 2.0**-146, FP16: 2.0**-24, INT32: 0.0}
"""The absolute error of one step near zero: truncation at exponent -126 - 25, and the last subnormal bit."""
LEFT_OUT = 2.0**-19
"""Of a product, what 3xTF32 leaves out: low parts, less than 2^-10 each, are not multiplied by one another, and of each
11 bits are read."""
PANEL = 2**22
"""Elements judged at once, which bounds the memory used."""
_finfo: Any = ml_dtypes.finfo  # has no types


@dataclass(frozen=True)
class Report:
    """How far D is from the float64 product. Errors are absolute, norms relative to the reference's.

    `ratio` is the largest error in units of its element's bound (Inf where NaN or Inf is out of place);
    `wrong` counts the elements with a ratio over 1; `worst` says which element has the largest, and its values.
    """

    max_error: float
    ratio: float
    wrong: int
    frobenius: float
    frobenius_bound: float
    worst: str

    @property
    def ok(self) -> bool:
        """Whether every element and the norm are within their bounds."""
        return self.wrong == 0 and self.frobenius <= self.frobenius_bound

    def require(self) -> None:
        """Raises AssertionError with this report when it is not ok."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        elements = f"{self.wrong} elements beyond their bound" if self.wrong else "every element within its bound"
        return (
            f"{elements} (worst {self.worst}, {self.ratio:.3g} of its bound); "
            f"Frobenius {self.frobenius:.3g} of at most {self.frobenius_bound:.3g}"
        )


def instruction(a: DType, b: DType, accumulate: DType, in_fp32: bool = False) -> Mma:
    """The one that multiplies arrays of these dtypes: fp32 is read as TF32, unless it is multiplied `in_fp32`."""
    if in_fp32:
        return find_mma(a, b, accumulate, "fma")
    a, b = (TF32 if x == FP32 else x for x in (a, b))
    return find_mma(a, b, accumulate)


def step_error(mma: Mma) -> float:
    """Of an instruction, relative to P."""
    if mma.d == INT32:
        return 0.0
    of_sum = mma.d.roundoff if mma.d == FP16 else 2.0 ** -min(mma.fraction, mma.d.mantissa)
    return mma.k * 2.0**-mma.fraction + of_sum


def check(
    out: Array, a: Array, b: Array, accumulate: DType, output: DType, *, zero_mean: bool = False,
    promoted: bool = False, scale_a: Array | None = None, scale_b: Array | None = None, in_fp32: bool = False,
) -> Report:  # fmt: skip
    """Compares out with a @ b; the module says with which bounds.

    out (m, n) or (batch, m, n) of `output`; a (m, k) or (batch, m, k) and b (k, n) or (batch, k, n) of bf16, fp16,
    fp8, int8, or fp32, which is read as TF32, a batch of 1 broadcast. `accumulate` is fp32, fp16 or int32.
    `zero_mean` promises independent elements of mean zero in a or in b, for the tighter norm. Uses about 400 MB beside
    float64 copies of one batch's operands. `promoted`, scale_a and scale_b as in `gemm`; promoted sums of fp32 are
    those of 3xTF32. `in_fp32`: fp32 operands are multiplied as they are, on CUDA cores.
    Raises ArgumentError on a shape or dtype that does not match.
    """
    if accumulate not in TINY:
        raise ArgumentError(f"accumulate: got {accumulate}; use fp32, fp16 or int32")
    if out.dtype != output.numpy:
        raise ArgumentError(f"out: got dtype {out.dtype}; use {output}")
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if out.shape != shape:
        raise ArgumentError(f"out: got shape {out.shape}; use {shape}")
    dtype_a, dtype_b = (as_dtype(x.dtype, name, integers=True) for x, name in ((a, "a"), (b, "b")))
    mma, k = instruction(dtype_a, dtype_b, accumulate, in_fp32), a.shape[-1]
    scaled = scale_a is not None or scale_b is not None
    steps, sums = -(-k // mma.k), 3 * (scaled or (mma.d == INT32 and output != INT32))
    if promoted:
        block = SCALE_BLOCK // a.dtype.itemsize
        steps, sums = -(-min(k, block) // mma.k), -(-k // block) + 3
    whole = promoted and mma.a == TF32  # 3xTF32
    judge = _Judge(steps, step_error(mma), accumulate, output, zero_mean, PRODUCTS * sums if whole else sums)
    judge.c += LEFT_OUT * whole
    of_a = _of_blocks(scale_a, a.shape[-2], k)
    of_b = _of_blocks(scale_b if scale_b is None or scale_b.ndim < 2 else scale_b.swapaxes(-1, -2), b.shape[-1], k)
    a, b = (as_tf32(x) if mma.a == TF32 and not whole else x for x in (a, b))
    rows = max(1, PANEL // max(1, *b.shape[-2:]))
    for batch in np.ndindex(*shape[:-2]):
        right = b[_at(batch, b)].astype(np.float64)
        for row in range(0, shape[-2], rows):
            left, panel = a[_at(batch, a)][row : row + rows], out[batch][row : row + rows]
            scales = of_a[_at(batch, of_a)][row : row + rows], of_b[_at(batch, of_b)].T
            factors = Factors(left.astype(np.float64), right, scales if scaled else None)
            judge.judge(panel, factors, (_smallest_normal(a), _smallest_normal(b)), (*batch, row))
    return judge.report()


class Factors(NamedTuple):
    """Operands in float64, and their scales, if any, one for each row (or column) and block of 128 of k."""

    a: Array
    b: Array
    scales: tuple[Array, Array] | None

    @property
    def product(self) -> Array:
        return in_blocks(self.a, self.b, *self.scales) if self.scales else exact(self.a, self.b)

    def each(self, f: Callable[[Array], Array]) -> Factors:
        """What a function makes of each."""
        return Factors(f(self.a), f(self.b), self.scales and (f(self.scales[0]), f(self.scales[1])))

    def raised(self, a_normal: float, b_normal: float) -> Factors:
        """Magnitudes, subnormals as the smallest normal: that is the exponent they are aligned with."""
        return self.each(np.abs)._replace(a=_raised(self.a, a_normal), b=_raised(self.b, b_normal))


class _Judge:
    """Checks D panel by panel and keeps the sums for the norms."""

    def __init__(self, steps: int, step: float, accumulate: DType, output: DType, zero_mean: bool, sums: int) -> None:
        self.c = math.expm1(steps * math.log1p(step) + sums * math.log1p(FP32.roundoff))
        self.tiny = steps * TINY[accumulate] * (1 + self.c)
        self.wraps = output == INT32
        self.u = 0.0 if self.wraps else output.roundoff
        self.half_subnormal = 0.5 if self.wraps else float(_finfo(output.numpy).smallest_subnormal) / 2
        self.range, self.output_range = _overflow(accumulate), _overflow(output)
        self.zero_mean = zero_mean
        self.squares = np.zeros(3)  # of the errors, of the reference, of P or Q
        self.elements = self.wrong = 0
        self.max_error, self.ratio, self.worst = 0.0, 0.0, "none"

    def judge(self, out: Array, factors: Factors, normal: tuple[float, float], origin: tuple[int, ...]) -> None:
        if not out.size:
            return
        reference, p = factors.product, factors.raised(*normal).product
        if self.wraps:
            reference = (reference + 2.0**31) % 2.0**32 - 2.0**31
        with np.errstate(invalid="ignore", over="ignore"):
            value = out.astype(np.float64)
            lost = self.c * p + self.tiny
            bound = lost + self.u * (np.abs(reference) + lost) + self.half_subnormal
            error = np.abs(value - reference)
            positive, negative = ((p + s * reference) / 2 + lost >= self.range for s in (1, -1))
            may_be = (value == np.inf) & (positive | (reference + lost >= self.output_range))
            may_be |= (value == -np.inf) & (negative | (-reference + lost >= self.output_range))
            may_be |= np.isnan(value) & positive & negative
        finite = np.isfinite(reference)
        same = (value == reference) | (np.isnan(value) & np.isnan(reference))
        right = np.where(finite, may_be, same)  # for those that have no distance
        judged = finite & np.isfinite(value)
        error = np.where(judged, error, np.where(right, 0.0, np.inf))
        ratio: Array = np.where(judged, error / np.where(judged, bound, 1.0), error)
        self.wrong += int(np.count_nonzero(ratio > 1))
        self.elements += int(np.count_nonzero(judged))
        q_squared = factors.each(np.square).product if self.zero_mean else np.square(p)
        self.squares += [float(x[judged].sum()) for x in (np.square(error), np.square(reference), q_squared)]
        self.max_error = max(self.max_error, float(error.max()))
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        if self.worst == "none" or ratio[at] > self.ratio:
            self.ratio = float(ratio[at])
            index = (*origin[:-1], origin[-1] + int(at[0]), int(at[1]))
            self.worst = f"{index}: got {value[at]:.6g}, want {reference[at]:.6g} +- {bound[at]:.3g}"

    def report(self) -> Report:
        error, reference, q = (math.sqrt(s) for s in self.squares)
        lost = self.c * q + math.sqrt(self.elements) * self.tiny
        allowed = lost + self.u * (reference + lost) + math.sqrt(self.elements) * self.half_subnormal
        unit = reference or 1.0
        return Report(self.max_error, self.ratio, self.wrong, error / unit, allowed / unit, self.worst)


def _overflow(dtype: DType) -> float:
    """The smallest magnitude that rounds to Inf."""
    if dtype == INT32:
        return math.inf
    return math.ldexp(1 - dtype.roundoff / 2, int(_finfo(dtype.numpy).maxexp))


def _smallest_normal(x: Array) -> float:
    return 0.0 if x.dtype == np.int8 else float(_finfo(as_dtype(x.dtype, "a, b").numpy).smallest_normal)


def _raised(x: Array, smallest_normal: float) -> Array:
    magnitude = np.abs(x)
    return np.where(magnitude > 0, np.maximum(magnitude, smallest_normal), magnitude)


def _of_blocks(scale: Array | None, rows: int, k: int) -> Array:
    """A scale of any shape that `gemm` takes, for each row and block of 128 of k; without one ones."""
    x = np.ones((1, 1)) if scale is None else np.asarray(scale, np.float64)
    x = x.reshape(1, 1) if x.ndim < 2 else x
    if x.shape[-2] not in (1, rows):  # 1 of 128
        x = np.repeat(x, SCALE_BLOCK, axis=-2)[..., :rows, :]
    return np.broadcast_to(x, (*x.shape[:-2], rows, -(-k // SCALE_BLOCK)))


def _at(batch: tuple[int, ...], x: Array) -> tuple[Any, ...]:
    """The batch index into an operand whose batch may be missing or 1."""
    return tuple(0 if n == 1 else i for i, n in zip(batch[len(batch) - (x.ndim - 2) :], x.shape[:-2], strict=True))
