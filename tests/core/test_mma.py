"""Instructions as data, one from outside, and the fragment: each element of D has one holder."""

from __future__ import annotations

import numpy as np
import pytest

from gemmsmith import Config, ConfigError
from gemmsmith.core import design
from gemmsmith.core.design import Design
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8, INT32, TF32
from gemmsmith.core.make_spec import make_spec
from gemmsmith.core.mma import D_FRAGMENT, WGMMA, Mma, MmaOp, select_mma
from gemmsmith.core.problem import Matrix, Problem


def test_depth_and_registers() -> None:
    """An instruction reads 32 bytes of each row; PTX ISA, "wgmma.mma_async", tables of shapes."""
    depths = {BF16: 16, FP16: 16, TF32: 8, E4M3: 32, E5M2: 32, INT8: 32}
    for mma in WGMMA.instructions:
        assert mma.k == depths[mma.a]
        assert mma.accumulator_registers(256) == (64 if mma.d == FP16 else 128)
        assert ("MN" in mma.majors) == (mma.a in (BF16, FP16))


def test_dtypes_that_no_instruction_has() -> None:
    assert select_mma(E4M3, E5M2, FP32) in WGMMA.instructions
    for a, b, d in ((BF16, BF16, FP16), (BF16, FP16, FP32), (INT8, INT8, FP32), (FP32, FP32, FP32)):
        with pytest.raises(ConfigError, match=f"wgmma: got {a} x {b} accumulated in {d}; it supports f32.bf16.bf16"):
            select_mma(a, b, d)
    assert str(select_mma(INT8, INT8, INT32)) == "s32.s8.s8"


def test_the_fragment() -> None:
    """Of 64 x 24: every element once, and where PTX ISA's figure of wgmma's D shows some of them."""
    thread, element = np.meshgrid(np.arange(128), np.arange(12), indexing="ij")
    row, column = D_FRAGMENT.element(thread, element)
    assert len(set(zip(row.flat, column.flat, strict=True))) == 64 * 24
    for place, holder in (((0, 0), (0, 0)), ((0, 1), (0, 1)), ((0, 2), (1, 0)), ((8, 0), (0, 2)), ((1, 8), (4, 4)),
                          ((16, 0), (32, 0)), ((63, 23), (127, 11))):  # fmt: skip
        assert D_FRAGMENT.element(*holder) == place


def test_an_instruction_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A design names its family, whose facts the spec's checks and sizes follow."""
    op = MmaOp("own", "own.mma", (Mma(BF16, BF16, FP32, n=range(32, 65, 32)),), tile_k_bytes=128, k_padding_bytes=8)
    monkeypatch.setitem(design._DESIGNS, "own", Design("own", print, {1: 200}, mma_op=op))
    config = Config("own", (64, 64, 64), (1, 1), consumers=1)
    a, b = Matrix(BF16, 64, 64, 64, 1), Matrix(BF16, 64, 64, 1, 64)
    problem = Problem(a, b, a, FP32)
    spec = make_spec(problem, config)
    assert spec.mma in op.instructions
    assert spec.stage_bytes == 64 * (2 * 2 * 64 + 8 + 8)
    for tile, message in (((64, 48, 64), "a multiple of 32 from 32 to 64"), ((64, 64, 32), "needs a multiple of 64")):
        with pytest.raises(ConfigError, match=message):
            make_spec(problem, config.replace(tile=tile))
