"""Error bounds of a computed D against the float64 GEMM, per element and for the Frobenius norm.

With ref = A @ B in float64, P = |A| @ |B| (times the scales) and u the unit roundoff of the output, the bound of an
element is

    E     = c * P + tiny                                error of the accumulation
    bound = E + u * (|ref| + E) + half a subnormal      then one rounding to the output

- An instruction adds k products at a time (a step), as hw/mma.py describes. Relative to P, the error of a step is at
  most

      bf16, fp16: 16 * 2^-25 + 2^-23, to fp16 + 2^-11     TF32: 8 * 2^-25 + 2^-23     FP8: 32 * 2^-13 + 2^-13

  (the largest term loses nothing, the other k less than 2^-fraction of it each; each partial sum is at most P).
- s = ceil(K / k) steps give c = (1 + step)^s - 1, about s * step, in any order of the sum.
- Products of subnormal operands are aligned as if the operands were the smallest normal, so P takes them as that.
- `tiny` is s times the error of a step below the accumulator's smallest normal.

Further roundings in fp32, by source:

- Split K: 2^-24 for each partial sum, a tenth of a step, which the bound neglects.
- Promoted sums: these steps in each block of 128 of K; adding a block's sum is one rounding, multiplying it by the
  product of its scales three.
- 3xTF32: three sums for each 32 of K (mma.sync: one for each 16, whose first products are the small ones: four of its
  steps count, the others are of 2^-10 of P); less than 2^-19 of each product is omitted.
- Other scaled sums: three roundings.
- int8: sums are exact, modulo 2^32 as int32; else three roundings as for scaled sums.

A float32 chain of fused multiply-adds stays far within the bound, since its errors have both signs; a tensor core's may
all have the same.

Source: hw/mma.py; for the product of steps Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1.

Overflow. An Inf is accepted if some order of the sum can reach it: the positive (or negative) products by themselves
exceed the accumulator's range, or the result the output's. A NaN is accepted if both do. Elsewhere, NaN and Inf must be
exactly those of IEEE arithmetic on A and B.

Frobenius. ||D - ref|| is at most the same bound with norms in place of elements: c * ||P|| and so on. For operands
whose elements are independent with mean zero, P is far larger than the partial sums; then Q = sqrt(A^2 @ B^2), their
standard deviation at the end, is used instead (`zero_mean`), which is about sqrt(K) smaller and detects a loss of
precision that no single element shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmsmith.backends.reference.matmul import Array, blockwise_scaled_matmul, matmul_float64, truncate_to_tf32
from gemmsmith.core.dtypes import FP16, FP32, INT32, TF32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import FMA, TF32X3_MMAS, Mma, select_mma
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.scalars import ceil_div

STEP_UNDERFLOW_ERROR = {FP32: 2.0**-146, FP16: 2.0**-24, INT32: 0.0}
"""Absolute error of one step near zero, by accumulator dtype: truncation at exponent -126 - 25 (fp32), the last
subnormal bit (fp16). Follows from the model in the module docstring."""
TF32X3_DROPPED = 2.0**-19
"""Relative error of 3xTF32's omitted terms: small x small (each less than 2^-10), and the bits of the residuals beyond
11. Follows from the format of TF32."""
PANEL_ELEMENTS = 2**22
"""Elements of D checked per step, which limits the memory used. Chosen; not measured."""
_finfo: Any = ml_dtypes.finfo  # has no types


@dataclass(frozen=True)
class Report:
    """Errors of D against the float64 GEMM.

    Attributes:
        ratio: Largest error in units of its element's bound; Inf for an unexpected NaN or Inf.
        num_out_of_bound: Number of elements with a ratio above 1.
        frobenius: Frobenius norm of the error of finite elements, relative to the reference's.
        frobenius_bound: What `frobenius` may be at most.
        worst: Index and values of the element with the largest ratio.
    """

    max_error: float
    ratio: float
    num_out_of_bound: int
    frobenius: float
    frobenius_bound: float
    worst: str

    @property
    def is_ok(self) -> bool:
        """True if every element and the norm are within their bounds."""
        return self.num_out_of_bound == 0 and self.frobenius <= self.frobenius_bound

    def require(self) -> None:
        """Raise AssertionError with this report unless it is ok."""
        if not self.is_ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        beyond = self.num_out_of_bound
        elements = f"{beyond} elements out of bound" if beyond else "every element within its bound"
        text = f"{elements} (worst {self.worst}, {self.ratio:.3g} of its bound)"
        if not self.frobenius_bound:  # no element is finite, or results are exact
            return text
        return f"{text}; Frobenius {self.frobenius:.3g} of at most {self.frobenius_bound:.3g}"


def reference_mma(a: DType, b: DType, accumulator_dtype: DType, on_cuda_cores: bool = False) -> Mma:
    """Return the instruction whose errors the bounds model, for these dtypes.

    fp32 operands are multiplied as TF32 or, with `on_cuda_cores`, in fp32.
    """
    if on_cuda_cores:
        return select_mma(a, b, accumulator_dtype, FMA)
    a, b = (TF32 if x == FP32 else x for x in (a, b))
    return select_mma(a, b, accumulator_dtype)


def step_error(mma: Mma) -> float:
    """Return a bound of the error of one accumulation step, relative to the sum of the addends' magnitudes.

    Alignment truncates each of the k products by less than 2^-fraction, and the sum is rounded once; integers are
    exact.
    """
    if mma.d == INT32:
        return 0.0
    rounding = mma.d.roundoff if mma.d == FP16 else 2.0 ** -min(mma.aligned_fraction_bits, mma.d.mantissa)
    return mma.k * 2.0**-mma.aligned_fraction_bits + rounding


def check(
    out: Array, a: Array, b: Array, accumulator_dtype: DType, out_dtype: DType, *, zero_mean: bool = False,
    promoted: bool = False, scale_a: Array | None = None, scale_b: Array | None = None, on_cuda_cores: bool = False,
) -> Report:  # fmt: skip
    """Compare `out` with a @ b, with the bounds described in the module's docstring.

    Needs about 400 MB in addition to float64 copies of one batch's operands. Shapes and scales are those of `gemm`; a
    batch of 1 is broadcast. fp32 operands are multiplied as TF32, unless `on_cuda_cores`. `zero_mean`: whether the
    elements of a or of b are independent with mean zero; the norm's bound is then tighter. `promoted`: whether sums are
    promoted; for fp32 operands, whether they are those of 3xTF32. Raises ArgumentError.
    """
    if accumulator_dtype not in STEP_UNDERFLOW_ERROR:
        raise ArgumentError(f"accumulate: got {accumulator_dtype}; use fp32, fp16 or int32")
    if out.dtype != out_dtype.numpy:
        raise ArgumentError(f"out: got dtype {out.dtype}; use {out_dtype}")
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if out.shape != shape:
        raise ArgumentError(f"out: got shape {out.shape}; use {shape}")
    dtype_a, dtype_b = (as_dtype(x.dtype, name, allow_integers=True) for x, name in ((a, "a"), (b, "b")))
    mma, k = reference_mma(dtype_a, dtype_b, accumulator_dtype, on_cuda_cores), a.shape[-1]
    scaled = scale_a is not None or scale_b is not None
    steps, sums = ceil_div(k, mma.k), 3 * (scaled or (mma.d == INT32 and out_dtype != INT32))
    if promoted:  # sums of a block of 128 bytes of K, each of which is rounded into the total
        block = SCALE_BLOCK // a.dtype.itemsize
        steps, sums = ceil_div(min(k, block), mma.k), ceil_div(k, block) + 3
    is_3xtf32 = promoted and mma.a == TF32
    errors = _ErrorAccumulator(
        steps, step_error(mma), accumulator_dtype, out_dtype, zero_mean, TF32X3_MMAS * sums if is_3xtf32 else sums
    )
    errors.c += TF32X3_DROPPED * is_3xtf32
    blocks_a = _expand_scales(scale_a, a.shape[-2], k)
    blocks_b = _expand_scales(
        scale_b if scale_b is None or scale_b.ndim < 2 else scale_b.swapaxes(-1, -2), b.shape[-1], k
    )
    a, b = (truncate_to_tf32(x) if mma.a == TF32 and not is_3xtf32 else x for x in (a, b))
    normals = _smallest_normal(a), _smallest_normal(b)
    a, b, blocks_a, blocks_b = (np.broadcast_to(x, (*shape[:-2], *x.shape[-2:])) for x in (a, b, blocks_a, blocks_b))
    rows = max(1, PANEL_ELEMENTS // max(1, *b.shape[-2:]))
    for batch in np.ndindex(*shape[:-2]):
        right = b[batch].astype(np.float64)
        for row in range(0, shape[-2], rows):
            left, panel, scales = (x[batch][row : row + rows] for x in (a, out, blocks_a))
            factors = Factors(left.astype(np.float64), right, (scales, blocks_b[batch].T) if scaled else None)
            errors.update(panel, factors, normals, (*batch, row))
    return errors.report()


class Factors(NamedTuple):
    """Operands A (m, k) and B (k, n) in float64, and their scales, or None.

    `scales`: of A (m, blocks of k), of B (blocks of k, n); a block has 128 elements of k.
    """

    a: Array
    b: Array
    scales: tuple[Array, Array] | None

    @property
    def matmul(self) -> Array:
        """A @ B, scaled, in float64."""
        return blockwise_scaled_matmul(self.a, self.b, *self.scales) if self.scales else matmul_float64(self.a, self.b)

    def map(self, f: Callable[[Array], Array]) -> Factors:
        """Return the factors with `f` applied to each array."""
        return Factors(f(self.a), f(self.b), self.scales and (f(self.scales[0]), f(self.scales[1])))

    def magnitudes(self, a_normal: float, b_normal: float) -> Factors:
        """Return the factors of P: absolute values, with subnormals raised to the smallest normal.

        The hardware aligns products of subnormals as if they had the smallest normal's exponent, so their errors are as
        large.
        """
        return self.map(np.abs)._replace(a=_raise_subnormals(self.a, a_normal), b=_raise_subnormals(self.b, b_normal))


class _ErrorAccumulator:
    """Errors of D, accumulated panel by panel, and the sums for the norms.

    The names are those of the module's docstring.

    Args:
        steps: Accumulation steps of a sum.
        step: Relative error of one step (`step_error`).
        accumulator_dtype: fp32, fp16 or int32.
        zero_mean: Whether the norm's bound uses Q instead of P.
        sums: Further roundings in fp32.
    """

    def __init__(
        self, steps: int, step: float, accumulator_dtype: DType, out_dtype: DType, zero_mean: bool, sums: int
    ) -> None:
        self.c = math.expm1(steps * math.log1p(step) + sums * math.log1p(FP32.roundoff))
        self.tiny = steps * STEP_UNDERFLOW_ERROR[accumulator_dtype] * (1 + self.c)
        self.wraps = out_dtype == INT32
        self.u = 0.0 if self.wraps else out_dtype.roundoff
        self.half_subnormal = 0.5 if self.wraps else float(_finfo(out_dtype.numpy).smallest_subnormal) / 2
        self.range, self.output_range = _overflow(accumulator_dtype), _overflow(out_dtype)
        self.zero_mean = zero_mean
        self.squares = np.zeros(3)  # of the errors, of the reference, of P or Q
        self.elements = self.num_out_of_bound = 0
        self.max_error, self.ratio, self.worst = 0.0, 0.0, "none"

    def update(self, out: Array, factors: Factors, normal: tuple[float, float], origin: tuple[int, ...]) -> None:
        """Add the errors of a panel of D.

        `normal`: the smallest normals of a's and b's dtypes. `origin`: the index in D of the panel's first element.
        """
        if not out.size:
            return
        reference, p = factors.matmul, factors.magnitudes(*normal).matmul
        if self.wraps:
            reference = (reference + 2.0**31) % 2.0**32 - 2.0**31
        with np.errstate(invalid="ignore", over="ignore"):
            value = out.astype(np.float64)
            lost = self.c * p + self.tiny
            bound = lost + self.u * (np.abs(reference) + lost) + self.half_subnormal
            error = np.abs(value - reference)
            # (p + s * reference) / 2 is the sum of the positive (or the magnitude of the negative) products.
            positive, negative = ((p + s * reference) / 2 + lost >= self.range for s in (1, -1))
            can_overflow = (value == np.inf) & (positive | (reference + lost >= self.output_range))
            can_overflow |= (value == -np.inf) & (negative | (-reference + lost >= self.output_range))
            can_overflow |= np.isnan(value) & positive & negative
        finite = np.isfinite(reference)
        is_equal = (value == reference) | (np.isnan(value) & np.isnan(reference))
        is_correct = np.where(finite, can_overflow, is_equal)  # for elements that are not finite
        measured = finite & np.isfinite(value)
        error = np.where(measured, error, np.where(is_correct, 0.0, np.inf))
        ratio: Array = np.where(measured, error / np.where(measured, bound, 1.0), error)
        self.num_out_of_bound += int(np.count_nonzero(ratio > 1))
        self.elements += int(np.count_nonzero(measured))
        q_squared = factors.map(np.square).matmul if self.zero_mean else np.square(p)
        self.squares += [float(x[measured].sum()) for x in (np.square(error), np.square(reference), q_squared)]
        self.max_error = max(self.max_error, float(error.max()))
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        if self.worst == "none" or ratio[at] > self.ratio:
            self.ratio = float(ratio[at])
            index = (*origin[:-1], origin[-1] + int(at[0]), int(at[1]))
            self.worst = f"{index}: got {value[at]:.6g}, want {reference[at]:.6g} +- {bound[at]:.3g}"

    def report(self) -> Report:
        """Return the report of all panels."""
        error, reference, q = (math.sqrt(s) for s in self.squares)
        lost = self.c * q + math.sqrt(self.elements) * self.tiny
        allowed = lost + self.u * (reference + lost) + math.sqrt(self.elements) * self.half_subnormal
        unit = reference or 1.0
        return Report(self.max_error, self.ratio, self.num_out_of_bound, error / unit, allowed / unit, self.worst)


def _overflow(dtype: DType) -> float:
    """Return the smallest magnitude that rounds to Inf.

    It is midway between the largest finite value and the next power of two, 2^maxexp.
    """
    if dtype == INT32:
        return math.inf
    return math.ldexp(1 - dtype.roundoff / 2, int(_finfo(dtype.numpy).maxexp))


def _smallest_normal(x: Array) -> float:
    return 0.0 if x.dtype == np.int8 else float(_finfo(as_dtype(x.dtype, "a, b").numpy).smallest_normal)


def _raise_subnormals(x: Array, smallest_normal: float) -> Array:
    magnitude = np.abs(x)
    return np.where(magnitude > 0, np.maximum(magnitude, smallest_normal), magnitude)


def _expand_scales(scale: Array | None, rows: int, k: int) -> Array:
    """Return a scale of any shape that `gemm` accepts as (..., rows, blocks of 128 of k); ones for None."""
    x = np.ones((1, 1)) if scale is None else np.asarray(scale, np.float64)
    x = x.reshape(1, 1) if x.ndim < 2 else x
    if x.shape[-2] not in (1, rows):  # one per 128 rows
        x = np.repeat(x, SCALE_BLOCK, axis=-2)[..., :rows, :]
    return np.broadcast_to(x, (*x.shape[:-2], rows, ceil_div(k, SCALE_BLOCK)))
