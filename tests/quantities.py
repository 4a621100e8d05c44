"""Arrays to quantize, of any layout, and what must hold of the results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as some

from gemmsmith.arrays import as_numpy, empty_like_kind
from gemmsmith.core.dtypes import DType

RECIPES = ["tensor", "rows", "columns", "1x128", "128x1", "128x128"]
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
LAYOUTS = ["rows", "columns", "neither", "unaligned"]
extents = some.one_of(some.sampled_from([0, 1, 8, 127, 128, 129]), some.integers(1, 280))


def poisoned(x: Any, shape: tuple[int, ...], dtype: DType) -> Any:
    """Return an array as `empty_like_kind` does, each of its bytes 0xFF."""
    made = empty_like_kind(x, shape, dtype)
    as_numpy(made).reshape(-1).view(np.uint8)[...] = 0xFF
    return made


@some.composite
def options(draw: some.DrawFn) -> dict[str, Any]:
    """Of `quantize`."""
    return {
        "recipe": draw(some.sampled_from(RECIPES)), "dtype": draw(some.sampled_from(["fp8_e4m3", "fp8_e5m2", "int8"])),
        "transposed": draw(some.booleans()), "scale_dtype": draw(some.sampled_from(["fp32", "ue8m0"])),
        "scale_order": draw(some.sampled_from(["K", "M", None])),
        "scale_padding": draw(some.sampled_from([1, 1, 4, None])),
    }  # fmt: skip


@some.composite
def shapes(draw: some.DrawFn, extents: some.SearchStrategy[int] = extents) -> tuple[int, ...]:
    """(m, k), or with a batch."""
    batch = draw(some.sampled_from([(), (), (1,), (3,)]))
    return *batch, draw(extents), draw(extents)


def laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    """The same in another layout, NaN all around it, or 99 where there is none."""
    if layout == "columns":
        return laid_out(x.swapaxes(-1, -2), "rows").swapaxes(-1, -2)
    step, before = (2, 0) if layout == "neither" else (1, 3 if layout == "unaligned" else 0)
    pitch = -(-(x.shape[-1] * step + before) // 16) * 16
    space = np.full((*x.shape[:-1], pitch), 99 if x.dtype.kind == "i" else np.nan, x.dtype)
    view = space[..., before : before + x.shape[-1] * step : step]
    view[...] = x
    return view


def numbers(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Normal data over twelve powers of ten, zeros, and a few numbers that are the smallest there are."""
    with np.errstate(over="ignore", under="ignore"):
        x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, shape)).astype(dtype)
    x[rng.random(shape) < 0.05] = 0
    tiny = ml_dtypes.finfo(dtype).smallest_subnormal
    x[rng.random(shape) < 0.02] = tiny
    if len(shape) == 2 and shape[0] > 2:
        x[1], x[2] = 0, tiny
    return x


def with_special(shape: tuple[int, ...], dtype: str, layout: str, seed: int, special: float | None) -> np.ndarray:
    """Such numbers in a layout; somewhere among them the `special` one."""
    rng = np.random.default_rng(seed)
    x = numbers(shape, DTYPES[dtype], rng)
    if special is not None and x.size:
        x.flat[rng.integers(x.size)] = special
    return laid_out(x, layout)


def same(a: Any, b: Any) -> bool:
    """Whether two arrays have the same bytes; one NaN is as good as another."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    nan = np.isnan(a.astype(np.float32))
    if (nan != np.isnan(b.astype(np.float32))).any():
        return False
    x, y = (np.ascontiguousarray(z).reshape(-1)[~nan.reshape(-1)] for z in (a, b))
    return x.tobytes() == y.tobytes()
