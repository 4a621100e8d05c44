"""Gate and up interleaved by 8 columns, for numpy and torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.core.errors import ArgumentError
from gemmsmith.graph.frontend.interleave import deinterleave, interleave


def test_columns_alternate_by_eight() -> None:
    packed = interleave(np.arange(16), 100 + np.arange(16))
    assert packed.tolist() == [*range(8), *range(100, 108), *range(8, 16), *range(108, 116)]


@given(st.lists(st.integers(0, 3), max_size=3), st.integers(0, 4), st.sampled_from(["f4", "f2", ml_dtypes.bfloat16]))
def test_round_trip(leading: list[int], groups: int, dtype: Any) -> None:
    gate, up = np.random.default_rng(0).standard_normal((2, *leading, 8 * groups)).astype(dtype)
    packed = interleave(gate, up)
    assert packed.shape == (*leading, 16 * groups)
    assert packed.dtype == gate.dtype
    for x, y in zip(deinterleave(packed), (gate, up), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_product_of_packed_weights_has_both_products() -> None:
    rng = np.random.default_rng()
    x, gate, up = rng.standard_normal((5, 12)), rng.standard_normal((2, 12, 24)), rng.standard_normal((2, 12, 24))
    for product, weight in zip(deinterleave(x @ interleave(gate, up)), (gate, up), strict=True):
        np.testing.assert_allclose(product, x @ weight, rtol=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    gate, up = torch.randn(2, 3, 16).to(getattr(torch, dtype))
    packed = interleave(torch.nn.Parameter(gate, requires_grad=False), up)
    assert packed.dtype == gate.dtype
    np.testing.assert_array_equal(packed.float().numpy(), interleave(gate.float().numpy(), up.float().numpy()))
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(deinterleave(packed), (gate, up), strict=True))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"up: got shape \(8,\) with a gate of \(16,\); use the same"):
        interleave(np.ones(16), np.ones(8))
    with pytest.raises(ArgumentError, match=r"gate: got shape \(3, 12\); use a last dimension that is a multiple of 8"):
        interleave(np.ones((3, 12)), np.ones((3, 12)))
    for shape in ((8,), (2, 24), ()):
        with pytest.raises(ArgumentError, match="packed: got shape .* multiple of 16"):
            deinterleave(np.ones(shape))


def test_what_is_no_array_is_refused() -> None:
    x = np.ones(16)
    for gate, up, message in (
        ([1], [2], "gate: got list; use a dense array of numpy, torch or CuPy"),
        (1.0, 2.0, "gate: got float; use a dense array"),
        (x, [2], "up: got list; use a dense array"),
        (x, x.astype(np.float32), "up: got ndarray of float32 with a gate of float64; use the same"),
    ):
        with pytest.raises(ArgumentError, match=message):
            interleave(gate, up)
    with pytest.raises(ArgumentError, match="packed: got list; use a dense array"):
        deinterleave([1])
