"""The float64 evaluation: any layout of operands and results, rounded once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemmsmith.backends.reference.matmul import matmul_float64, rounded
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.host.planned_gemm import run_reference


@pytest.mark.parametrize("column_major", [False, True])
def test_results_are_written_where_they_lie(rng: np.random.Generator, column_major: bool) -> None:
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((7, 20), (20, 9)))
    bias = rng.standard_normal(18).astype(np.float32)[::2]
    out = np.full((9, 7), np.nan, ml_dtypes.bfloat16).T if column_major else np.full((7, 9), np.nan, ml_dtypes.bfloat16)
    sums = np.full(7, np.nan, np.float32)

    def f(acc: Any, bias: Any, scale: Any) -> Any:
        return acc * scale + bias, acc.sum(-1)

    there = bind(Request(a, b, (out, sums), {"bias": bias, "scale": 0.5}, epilogue=f))
    assert there.swapped == column_major
    run_reference(there)
    product = matmul_float64(a, b)
    assert np.array_equal(out, rounded(product * 0.5 + bias, BF16))
    assert np.array_equal(sums, rounded(product.sum(-1), FP32))


def test_nothing_is_written_for_no_elements() -> None:
    a, b, out = np.zeros((0, 4), np.float16), np.zeros((4, 9), np.float16), np.zeros((0, 9), np.float16)
    there = bind(Request(a, b, out))
    run_reference(there)
    assert out.shape == (0, 9)
