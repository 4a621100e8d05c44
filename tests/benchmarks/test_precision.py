"""benchmarks/tools/precision.py plots what kernels compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from benchmarks.tools import precision

DEPTH = 384


@pytest.mark.parametrize("kind", precision.KINDS)
def test_its_sums_are_those_of_simulated_kernels(kind: str) -> None:
    x = precision.Operands(kind, DEPTH)

    def simulated(a: Any, b: Any, dtype: Any, **options: Any) -> Any:
        return gemmsmith.gemm(a.astype(dtype), b.astype(dtype).T, out_dtype="fp32", backend="sim", **options)

    scales = {"scale_a": x.scale_a.astype(np.float32), "scale_b": x.scale_b.T.astype(np.float32)}
    fp8, bf16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
    np.testing.assert_array_equal(simulated(x.a, x.b, fp8, **scales), precision.promoted(x)[-1])
    np.testing.assert_array_equal(simulated(*x.scaled, bf16), precision.running(*x.scaled, precision.BF16_MMA)[-1])
    fast = simulated(x.a, x.b, fp8, accumulate="fast")
    np.testing.assert_array_equal(fast, precision.running(x.a, x.b, precision.FP8_MMA)[-1])


@pytest.mark.parametrize("title", ["normal", "uniform in 0 to 1"])
def test_the_page_says_what_sums_err_by(title: str) -> None:
    errors_ = precision.errors(precision.Operands(title))
    promoted = f"{errors_['promoted'].max():.2g}"
    fast = [f"{errors_['fast'][precision.DEPTHS.index(k)]:.2g}" for k in (1024, 4096, 16384, 65536)]
    row = f"| {title} | at most {promoted} | {' | '.join(fast)} |"
    assert row in (Path(__file__).parents[2] / "docs" / "guides" / "fp8.md").read_text(), row
