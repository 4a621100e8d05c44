"""Names that are almost an argument's: errors say which."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import ArgumentError, Config
from gemmsmith.core.errors import ARGUMENTS, did_you_mean
from gemmsmith.graph.frontend.visitors import EVT, AccFetch, Compute

A, B, C = (np.ones(shape, np.float16) for shape in ((4, 8), (8, 4), (4, 4)))


def test_the_arguments_are_those_of_gemm() -> None:
    named = inspect.signature(gemmsmith.gemm).parameters.values()
    assert set(ARGUMENTS) == {p.name for p in named if p.kind == p.KEYWORD_ONLY}


@pytest.mark.parametrize("epilogue", [None, lambda acc: acc, EVT(Compute("relu"), AccFetch())])
@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("epilog", lambda acc: acc, "epilogue"), ("out_dtyp", "fp32", "out_dtype"), ("dtype", "fp32", "out_dtype"),
        ("fastmath", True, "fast_math"), ("confg", Config(), "config"), ("outs", C, "out"),
        ("backened", "sim", "backend"),
    ],
)  # fmt: skip
def test_an_argument_that_is_spelt_almost_right(epilogue: Any, name: str, value: Any, right: str) -> None:
    for call in (gemmsmith.gemm, gemmsmith.plan, gemmsmith.simulate):
        with pytest.raises(ArgumentError, match=f"{name}: .*; did you mean {right}\\?"):
            call(A, B, epilogue=epilogue, **{name: value})


def test_names_that_are_not() -> None:
    assert [did_you_mean(name) for name in ("bias", "labels", "shift", "c", "residual", "out")] == [""] * 6
    with pytest.raises(ArgumentError, match="operands need an `epilogue` that reads them$"):
        gemmsmith.gemm(A, B, bias=A)
