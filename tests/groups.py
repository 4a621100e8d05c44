"""Operands of grouped GEMMs, and what scales make of them in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from gemmsmith import ArgumentError, ConfigError, Spec
from gemmsmith.core.dtypes import as_dtype

NUMPY = {
    "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8, "fp32": np.float32, "int32": np.int32,
}  # fmt: skip


def random(rng: np.random.Generator, dtype: str, *shape: int, column_major: bool = False) -> Any:
    stored = (*shape[:-2], shape[-1], shape[-2]) if column_major else shape
    x: Any = rng.integers(-128, 128, stored) if dtype == "int8" else rng.standard_normal(stored)
    return np.swapaxes(x.astype(NUMPY[dtype]), -1, -2) if column_major else x.astype(NUMPY[dtype])


@dataclass
class Kind:
    """Operands of a dtype, and how they are multiplied. `scales`: of groups, rows of a, n and k."""

    a: str
    b: str
    out: str
    options: dict[str, Any] = field(default_factory=dict)
    scales: Callable[[np.random.Generator, int, int, int, int], dict[str, Any]] | None = None


def fp32(rng: np.random.Generator, *shape: int) -> Any:
    return rng.uniform(0.5, 2, shape).astype(np.float32)


def blocks(x: int) -> int:
    return -(-x // 128)


def scaled(x: Any, scale: Any, transposed: bool = False) -> Any:
    """Return an operand times its scale, in float64."""
    if scale is None or np.ndim(scale) == 0:
        return x.astype(float) * (1 if scale is None else scale)
    if transposed:
        return scaled(x.T, scale.T).T
    scale = 2.0 ** (scale.astype(float) - 127) if scale.dtype == np.uint8 else scale
    rows = np.repeat(scale, 128, 0)[: len(x)] if len(scale) not in (1, len(x)) else scale
    full = np.repeat(rows, 128, 1)[:, : x.shape[1]] if rows.shape[1] != 1 else rows
    return x.astype(float) * full


def check_refused(given: dict[str, Any], wrong: dict[str, Any], message: str) -> None:
    """Check that grouped_gemm refuses `given`, as zeros, with the arguments of `wrong`, of which None is left out."""
    arguments = {name: x for name, x in {**given, **wrong}.items() if x is not None}
    arrays = {name: _zeros(x) if isinstance(x, Spec) else x for name, x in arguments.items()}
    with pytest.raises((ArgumentError, ConfigError), match=message):
        gemmsmith.grouped_gemm(**arrays, backend="sim")


def _zeros(spec: Spec) -> Any:
    x = np.zeros(spec.shape, as_dtype(spec.dtype, allow_integers=True).numpy)
    return x[:: spec.strides[0]] if spec.strides and x.ndim == 1 else x
