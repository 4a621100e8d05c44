"""The meaning of epilogues where there is nothing to compute."""

from __future__ import annotations

import numpy as np
import pytest

import gemmsmith


@pytest.mark.parametrize(("m", "batch"), [(0, None), (5, 0), (0, 3)])
def test_gates_of_nothing(m: int, batch: int | None) -> None:
    lead = () if batch is None else (batch,)
    a, b = np.ones((*lead, m, 8), np.float16), np.ones((8, 32), np.float16)

    def gated(acc):
        gate, up = gemmsmith.deinterleave(acc)
        return gate.silu() * up

    assert gemmsmith.gemm(a, b, epilogue=gated).shape == (*lead, m, 16)


def test_extremes_of_nothing_where_none_is_asked_for() -> None:
    """No batch, so there is no column whose largest element would be missing."""
    a, b = np.ones((0, 0, 8), np.float16), np.ones((8, 40), np.float16)
    d, largest, least = gemmsmith.gemm(a, b, epilogue=lambda acc: (acc, acc.max(-2), acc.min(-2)))
    assert d.shape == (0, 0, 40)
    assert largest.shape == least.shape == (0, 40)


def _choice(acc):
    return np.where(acc > 0, acc > 2, acc < -2)


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda acc: (acc > 1e6).max(-1), 0.0),
        (lambda acc: (acc > 1e6).max(), 0.0),
        (lambda acc: np.isnan(acc).max(-2), 0.0),
        (lambda acc: (acc > 1).min(-1), 1.0),
        (lambda acc: (acc > 1).sum(-1), 16.0),
        (lambda acc: (~(acc > 1e6)).sum(-2), 4.0),
        (lambda acc: (acc > 1e6).logsumexp(-1), np.log(16)),
        (lambda acc: np.sign(acc > 0), 1.0),
        (lambda acc: (acc > 0).sigmoid(), 1 / (1 + np.exp(-1))),
        (lambda acc: (acc > 0).silu(), 1 / (1 + np.exp(-1))),
        (lambda acc: -_choice(acc), -1.0),
        (lambda acc: np.ceil(_choice(acc)), 1.0),
        (lambda acc: np.trunc(_choice(acc)), 1.0),
        (lambda acc: _choice(acc) + _choice(acc), 2.0),
        (lambda acc: _choice(acc) - _choice(acc), 0.0),
        (lambda acc: _choice(acc) + _choice(acc) * 2, 3.0),
        (lambda acc: np.maximum(acc > 0, acc > 2) + np.maximum(acc > 1, acc > 3), 2.0),
    ],
)
def test_comparisons_are_zeros_and_ones(function, want: float) -> None:
    a, b = np.ones((4, 8), np.float32), np.ones((8, 16), np.float32)  # each product is 8
    result = gemmsmith.gemm(a, b, epilogue=function)
    np.testing.assert_allclose(result, np.full(result.shape, want, np.float32), rtol=1e-6)
    offsets = np.array([1, 4], np.int32)
    by_group = gemmsmith.grouped_gemm(a, np.stack([b, b]), offsets=offsets, epilogue=function, precision="tf32")
    if result.shape in ((4,), (4, 16)):  # reductions over rows have other values
        np.testing.assert_allclose(by_group, result, rtol=1e-6)
