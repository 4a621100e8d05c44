"""Equality of graphs, and which indices their values have."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Result, axis_of_dims, reduced_dims


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


@pytest.mark.parametrize("axis", ["b", "m", "n", "bm", "bn", "mn", "all"])
def test_a_reduction_has_the_indices_that_are_left(axis: str) -> None:
    reduced = reduced_dims(axis)
    left = BroadcastDims(True, 1, 1).reduced(axis)
    assert (left.batch, left.varies_along_m, left.varies_along_n) == tuple(x not in reduced for x in "bmn")
    assert BroadcastDims(False, 2, 2).reduced(axis) == left._replace(
        batch=False, rows_per_value=2 * left.rows_per_value, columns_per_value=2 * left.columns_per_value
    )
    assert axis_of_dims(reduced) == axis_of_dims(reduced[::-1]) == axis
    assert left.is_matrix == (axis == "b")
    assert BroadcastDims() == (False, 0, 0)


def test_a_reduced_constant() -> None:
    """Its result is known before the kernel runs; a constant matrix is stored by it."""
    nodes = (
        Node("accumulator"),
        Node("constant", (), 2.0),
        Node("reduce", (1,), ("sum", "n")),
        Node("reduce", (0,), ("sum", "n")),
    )
    graph = EpilogueGraph(nodes, (), tuple(Result(f"out{i}", i, FP32) for i in range(4)))
    assert [graph.constant_operand_of(r) for r in graph.results] == [None, None, 2.0, None]
    assert graph.matrix_result_names == ["out0"]
