"""Checks a computed D: every element, and the Frobenius norm, within a stated bound of the float64 product.

The bound of one element, with ref = A @ B in float64, P = |A| @ |B| and u the output's unit roundoff:

    E     = c * P + tiny                                what the accumulation may have lost
    bound = E + u * (|ref| + E) + half a subnormal      then one rounding to the output

c follows from what a Hopper tensor core does with 16-bit operands, 16 of K at a time: it aligns the 16 exact
products and the accumulator to the largest exponent, truncates each 25 bits below it, adds exactly, and rounds
once, toward zero to fp32 or to nearest to fp16. Every such step thus errs by at most, relative to P,

    fp32: 16 * 2^-25 + 2^-23 = 5 * 2^-23        fp16: 16 * 2^-25 + 2^-11

(the largest term loses nothing, the other 16 less than 2^-25 of it each; each partial sum is at most P), and
s = ceil(K / 16) steps by c = (1 + step)^s - 1, about s * step, in any order. (Adding the parts of a split K costs
2^-24 each, a tenth of a step.) The products of subnormal operands are aligned as if those were the smallest normal,
so P takes them as that. `tiny` is s times what a step may lose below the accumulator's smallest normal.
A float32 chain of fused multiply-adds stays far within the bound, since its errors have both signs; a tensor core's may
all have the same.

Source: Xie et al., "MMA-Sim", arXiv 2511.10909, and Khattak and Mikaitis, arXiv 2512.07004 (both measured on an
H100); Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1, for the product of steps.

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
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from gemmsmith.backends.reference.product import Array, exact
from gemmsmith.core.dtypes import FP16, FP32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError

K_STEP = 16
"""Elements of K that a tensor core adds at once, for 16-bit operands."""
STEP = {FP32: K_STEP * 2.0**-25 + 2.0**-23, FP16: K_STEP * 2.0**-25 + 2.0**-11}
"""The relative error of one step, for each accumulator."""
TINY = {FP32: 2.0**-146, FP16: 2.0**-24}
"""The absolute error of one step near zero: truncation at exponent -126 - 25, and the last subnormal bit."""
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


def check(out: Array, a: Array, b: Array, accumulate: DType, output: DType, *, zero_mean: bool = False) -> Report:
    """Compares out with a @ b; the module says with which bounds.

    out (m, n) or (batch, m, n) of `output`; a (m, k) or (batch, m, k) and b (k, n) or (batch, k, n) of bf16, fp16
    or fp32, a batch of 1 broadcast. `accumulate` is fp32 or fp16. `zero_mean` promises independent elements of mean
    zero in a or in b, for the tighter norm. Uses about 400 MB beside float64 copies of one batch's operands.
    Raises ArgumentError on a shape or dtype that does not match.
    """
    if accumulate not in STEP:
        raise ArgumentError(f"accumulate: got {accumulate}; use fp32 or fp16")
    if out.dtype != output.numpy:
        raise ArgumentError(f"out: got dtype {out.dtype}; use {output}")
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if out.shape != shape:
        raise ArgumentError(f"out: got shape {out.shape}; use {shape}")
    judge = _Judge(accumulate, output, a.shape[-1], zero_mean)
    rows = max(1, PANEL // max(1, *b.shape[-2:]))
    for batch in np.ndindex(*shape[:-2]):
        right = b[_at(batch, b)].astype(np.float64)
        for row in range(0, shape[-2], rows):
            left, panel = a[_at(batch, a)][row : row + rows], out[batch][row : row + rows]
            judge.judge(panel, left.astype(np.float64), right, _smallest_normal(a), _smallest_normal(b), (*batch, row))
    return judge.report()


class _Judge:
    """Checks D panel by panel and keeps the sums for the norms."""

    def __init__(self, accumulate: DType, output: DType, k: int, zero_mean: bool) -> None:
        steps = -(-k // K_STEP)
        self.c = math.expm1(steps * math.log1p(STEP[accumulate]))
        self.tiny = steps * TINY[accumulate] * (1 + self.c)
        self.u = output.roundoff
        self.half_subnormal = float(_finfo(output.numpy).smallest_subnormal) / 2
        self.range, self.output_range = _overflow(accumulate), _overflow(output)
        self.zero_mean = zero_mean
        self.squares = np.zeros(3)  # of the errors, of the reference, of P or Q
        self.elements = self.wrong = 0
        self.max_error, self.ratio, self.worst = 0.0, 0.0, "none"

    def judge(self, out: Array, a: Array, b: Array, a_normal: float, b_normal: float, origin: tuple[int, ...]) -> None:
        if not out.size:
            return
        reference = exact(a, b)
        p = exact(_raised(a, a_normal), _raised(b, b_normal))
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
        q_squared = exact(np.square(a), np.square(b)) if self.zero_mean else np.square(p)
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
    return math.ldexp(1 - dtype.roundoff / 2, int(_finfo(dtype.numpy).maxexp))


def _smallest_normal(x: Array) -> float:
    return float(_finfo(as_dtype(x.dtype, "a, b").numpy).smallest_normal)


def _raised(x: Array, smallest_normal: float) -> Array:
    """|x|, subnormals as the smallest normal: that is the exponent they are aligned with."""
    magnitude = np.abs(x)
    return np.where(magnitude > 0, np.maximum(magnitude, smallest_normal), magnitude)


def _at(batch: tuple[int, ...], x: Array) -> tuple[Any, ...]:
    """The batch index into an operand whose batch may be missing or 1."""
    return tuple(0 if n == 1 else i for i, n in zip(batch[len(batch) - (x.ndim - 2) :], x.shape[:-2], strict=True))
