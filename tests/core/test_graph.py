"""Equality of graphs."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from gemmsmith.core.graph import Node


def test_constants_are_equal_if_their_bits_are() -> None:
    zero, negative, nan = (Node("constant", (), x) for x in (0.0, -0.0, math.nan))
    assert zero != negative
    assert len({zero, negative, nan, Node("constant", (), -math.nan), Node("constant", (), 0)}) == 3


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_kernels_that_differ_by_the_sign_of_a_zero(rng: np.random.Generator, backend: gemmsmith.Backend) -> None:
    a = rng.integers(-3, 4, (16, 16)).astype(ml_dtypes.bfloat16)
    b = np.eye(16, dtype=ml_dtypes.bfloat16)
    for zero in (0.0, -0.0):
        d = gemmsmith.gemm(a, b, epilogue=lambda acc, z=zero: np.where(acc > 0, acc, z), backend=backend)
        assert (np.signbit(d.astype(np.float32)) == ((a.astype(np.float32) <= 0) & (np.copysign(1, zero) < 0))).all()
