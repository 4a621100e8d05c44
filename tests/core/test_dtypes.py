"""Names, numpy's, ml_dtypes' and torch's dtypes all mean the same three."""

from __future__ import annotations

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest

from gemmsmith.core.dtypes import (
    BF16,
    BOOL,
    E4M3,
    E5M2,
    FP16,
    FP32,
    INT8,
    INT32,
    INT64,
    MAX_FINITE,
    MIN_SCALE,
    TF32,
    UE8M0,
    DType,
    as_dtype,
    overflow_as_fp32,
)
from gemmsmith.core.errors import ArgumentError


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("bf16", BF16),
        ("bfloat16", BF16),
        (ml_dtypes.bfloat16, BF16),
        (np.dtype(ml_dtypes.bfloat16), BF16),
        ("fp16", FP16),
        ("float16", FP16),
        (np.float16, FP16),
        (np.dtype("f2"), FP16),
        ("fp32", FP32),
        ("float32", FP32),
        (np.float32, FP32),
        (FP32, FP32),
    ],
)
def test_every_spelling(value: object, dtype: DType) -> None:
    assert as_dtype(value) is dtype


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("int8", INT8),
        ("int32", INT32),
        ("int64", INT64),
        ("bool", BOOL),
        (np.int64, INT64),
        (bool, BOOL),
        (np.dtype("i4"), INT32),
        (INT32, INT32),
    ],
)
def test_integers_where_they_are_asked_for(value: object, dtype: DType) -> None:
    assert as_dtype(value, allow_integers=True) is dtype
    assert as_dtype("bf16", allow_integers=True) is BF16
    with pytest.raises(ArgumentError, match="got 'int16'; use one of bf16, .*int8, int32, int64, bool"):
        as_dtype("int16", allow_integers=True)
    if value is not INT32:
        with pytest.raises(ArgumentError, match="out_dtype: got .*fp8_e5m2$"):
            as_dtype(value, "out_dtype")


@pytest.mark.torch
def test_torch() -> None:
    torch = pytest.importorskip("torch")
    integers = [torch.int8, torch.int32, torch.int64, torch.bool]
    assert [as_dtype(d, allow_integers=True) for d in integers] == [INT8, INT32, INT64, BOOL]
    assert [as_dtype(d) for d in (torch.bfloat16, torch.float16, torch.half, torch.float32)] == [BF16, FP16, FP16, FP32]


@pytest.mark.parametrize("value", ["fp64", "", np.float64, np.int16, None, 16, "f8", object()])
def test_others_are_refused_by_name(value: object) -> None:
    with pytest.raises(ArgumentError, match="out_dtype: got .*bf16, fp16, fp32"):
        as_dtype(value, "out_dtype")


@pytest.mark.parametrize("dtype", [INT8, INT32, INT64, BOOL])
def test_integers_have_as_many_bits_as_they_count_with(dtype: DType) -> None:
    largest = 1 if dtype is BOOL else np.iinfo(dtype.numpy).max
    assert dtype.mantissa == int(largest).bit_length()
    assert dtype.bits == 8 * dtype.numpy.itemsize
    assert dtype.is_integer


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, E4M3, E5M2])
def test_the_numbers_are_those_of_the_format(dtype: DType) -> None:
    info = ml_dtypes.finfo(dtype.numpy)
    assert dtype.bytes == dtype.numpy.itemsize
    assert not dtype.is_integer
    assert dtype.mantissa == info.nmant
    assert dtype.roundoff == float(info.eps) / 2


def test_numbers_that_fp32_does_not_have() -> None:
    assert [overflow_as_fp32(x) for x in (1e300, -1e39, 10**400, -(10**400), math.inf, 3.41e38)] == [
        math.inf, -math.inf, math.inf, -math.inf, math.inf, math.inf,
    ]  # fmt: skip
    assert [overflow_as_fp32(x) for x in (1e-300, 0, -1e-50, 0.1, 3.4e38, 1e-40, 7)] == [
        0,
        0,
        0,
        0.1,
        3.4e38,
        1e-40,
        7,
    ]
    assert math.isnan(overflow_as_fp32(np.float32("nan")))


@pytest.mark.parametrize("dtype", [BF16, TF32, UE8M0, BOOL])
def test_a_copy_is_the_dtype_itself(dtype: DType) -> None:
    assert copy.deepcopy(dtype) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype


def test_bits_and_precision_are_numpys() -> None:
    """TF32 keeps 10 bits of fp32's mantissa (PTX ISA)."""
    for dtype in (BF16, FP16, FP32, TF32, E4M3, E5M2, UE8M0, INT8, INT32, INT64, BOOL):
        assert dtype.bytes == dtype.numpy.itemsize
        assert dtype.bits == 8 * dtype.bytes
    for dtype in (BF16, FP16, FP32, E4M3, E5M2):
        assert dtype.roundoff == ml_dtypes.finfo(dtype.numpy).eps / 2
    assert TF32.roundoff == 2.0**-11
    for dtype, largest in MAX_FINITE.items():
        limits = ml_dtypes.iinfo(dtype.numpy) if dtype.is_integer else ml_dtypes.finfo(dtype.numpy)
        assert largest == float(limits.max)
    assert 1 / np.float32(MIN_SCALE) < np.inf
    assert np.finfo(np.float32).smallest_normal == MIN_SCALE
