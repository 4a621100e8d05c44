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
