"""pack: the same numbers, laid out so that no plan packs them again."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.quantities import LAYOUTS, laid_out, shapes

import gemmsmith
from gemmsmith import ArgumentError, Spec

DTYPES = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, ml_dtypes.bfloat16, np.float16, np.float32]


@settings(max_examples=30)
@given(
    shape=shapes(), layout=some.sampled_from(LAYOUTS), dtype=some.sampled_from(DTYPES), seed=some.integers(0, 99999),
    backend=some.sampled_from(["sim", "reference"]),
)  # fmt: skip
def test_the_numbers_stay(shape: tuple[int, ...], layout: str, dtype: Any, seed: int, backend: str) -> None:
    rng = np.random.default_rng(seed)
    bytes_ = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize)).astype(np.uint8)
    b = laid_out(bytes_.view(dtype)[..., 0], layout)
    packed = gemmsmith.pack(b, backend=backend)
    assert packed.shape == b.shape
    assert packed.dtype == b.dtype
    assert np.ascontiguousarray(packed).tobytes() == np.ascontiguousarray(b).tobytes()
    k, n = shape[-2:]
    if k > 1 and n > 1 and packed.size:
        assert packed.strides[-2] == packed.itemsize
        assert packed.strides[-1] % 16 == 0
    assert not packed.size or gemmsmith.pack(packed) is packed


@pytest.mark.torch
def test_gradients_are_not_lost() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match="b: got a tensor that requires grad"):
        gemmsmith.pack(torch.ones(3, 3, requires_grad=True))


def test_products_of_packed_weights_pack_nothing() -> None:
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((64, 96), (96, 130)))
    packed = gemmsmith.pack(b)
    assert len(gemmsmith.plan(a, b, backend="sim")._planned.launches.all) == 2
    assert len(gemmsmith.plan(a, packed, backend="sim")._planned.launches.all) == 1
    assert (gemmsmith.gemm(a, b) == gemmsmith.gemm(a, packed)).all()


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (np.ones(5, np.float32), r"b: got shape \(5,\); use \(k, n\)"),
        (np.ones((5, 5), np.int32), "b: got dtype int32; use one of bf16, fp16, fp32"),
        (np.broadcast_to(np.ones((5, 5), np.float32), (3, 5, 5)), "b: got one matrix broadcast over a batch"),
        (Spec((5, 5), "bf16"), "b: got a Spec"),
    ],
)
def test_what_is_refused(b: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        gemmsmith.pack(b)
