"""wgmma as kernels print it: shapes, dtypes, majors; tests/conformance says what it computes."""

from __future__ import annotations

import re

import pytest

import gemmsmith
from gemmsmith import Config, Spec

CONFIG = Config(tile=(64, 64, 64), cluster=(1, 1), stages=2, consumers=1)


def source(config: Config = CONFIG, dtype: str = "bf16", a_mn: bool = False, b_mn: bool = False, **more) -> str:
    a = Spec((256, 256), dtype, (1, 256) if a_mn else (256, 1))
    b = Spec((256, 256), dtype, (256, 1) if b_mn else (1, 256))
    return gemmsmith.plan(a, b, config=config, **more).source


def issued(text: str) -> set[tuple[str, str]]:
    """The shape and dtypes of each wgmma that a kernel has a wrapper for, and which operands it transposes."""
    found = re.findall(r'wgmma\.mma_async\.sync\.aligned\.(\S+?)\\n".*?p, 1, 1, ([01], [01]);', text, re.DOTALL)
    assert len(found) == text.count("wgmma.mma_async")
    return set(found)


@pytest.mark.parametrize("a_mn", [False, True])
@pytest.mark.parametrize("b_mn", [False, True])
def test_an_operand_along_m_or_n_is_transposed(a_mn: bool, b_mn: bool) -> None:
    assert issued(source(a_mn=a_mn, b_mn=b_mn)) == {("m64n64k16.f32.bf16.bf16", f"{a_mn:d}, {b_mn:d}")}


@pytest.mark.parametrize("n", [8, 24, 176, 256])
def test_n_is_the_tiles_width(n: int) -> None:
    config = CONFIG.replace(tile=(64, n, 64))
    assert issued(source(config)) == {(f"m64n{n}k16.f32.bf16.bf16", "0, 0")}


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_fp16_accumulates_in_either(accumulate: str) -> None:
    found = issued(source(dtype="fp16", accumulate=accumulate))
    assert found == {(f"m64n64k16.{'f32' if accumulate == 'fp32' else 'f16'}.f16.f16", "0, 0")}


@pytest.mark.parametrize(("depth", "swizzle", "layout"), [(64, 128, 1), (32, 64, 2), (16, 32, 3)])
def test_descriptors_name_the_swizzle(depth: int, swizzle: int, layout: int) -> None:
    """PTX ISA, matrix descriptors: bits 32-45 the stride of 8 rows in 16 bytes, bits 62-63 the swizzle."""
    high = layout << 62 | (8 * swizzle >> 4) << 32
    assert f"{high:#x}" in source(CONFIG.replace(tile=(64, 64, depth)))
