"""quantize and dequantize on a GPU: the bits of the numpy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.quantities import DTYPES, LAYOUTS, RECIPES, options, same, shapes, with_special

import gemmsmith
from gemmsmith.arrays import as_numpy, empty_like_kind
from gemmsmith.core.dtypes import DType
from gemmsmith.host import output_kernels

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
extents = some.one_of(some.sampled_from([0, 1, 128, 1024, 4096]), some.integers(1, 3000))
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(x: Any, shape: tuple[int, ...], dtype: DType) -> Any:
        made = empty_like_kind(x, shape, dtype)
        made.reshape(-1).view(torch.uint8).fill_(0xFF)
        return made

    monkeypatch.setattr(output_kernels, "empty_like_kind", poisoned)


def on_gpu(x: np.ndarray) -> Any:
    """The array's memory, with what lies around it, and its strides, on the GPU."""
    base = x if x.base is None else x.base
    while base.base is not None:
        base = base.base
    dtype = {2: torch.int16, 4: torch.int32}[x.itemsize]
    memory = torch.from_numpy(base.reshape(-1).view(f"i{x.itemsize}")).to(dtype).cuda()
    kind = next(TORCH[name] for name, numpy in DTYPES.items() if numpy == x.dtype)
    offset = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    strides = [s // x.itemsize for s in x.strides]
    return memory.view(kind).as_strided(x.shape, strides, offset)


@settings(max_examples=150)
@given(
    options=options(), shape=shapes(extents), dtype=some.sampled_from(sorted(DTYPES)),
    layout=some.sampled_from(LAYOUTS), seed=some.integers(0, 1 << 32),
    special=some.sampled_from([None, None, np.nan, np.inf, -np.inf]),
)  # fmt: skip
def test_the_bits_of_the_reference(
    options: dict[str, Any], shape: tuple[int, ...], dtype: str, layout: str, seed: int, special: float | None
) -> None:
    x = with_special(shape, dtype, layout, seed, special)
    result = gemmsmith.quantize(on_gpu(x), **options)
    expected_results = gemmsmith.quantize(x, **options)
    for actual, expected in zip(result, expected_results, strict=True):
        assert same(as_numpy(actual.cpu()), expected)
    back = gemmsmith.dequantize(*result[:2], dtype)
    assert same(as_numpy(back.cpu()), gemmsmith.dequantize(*expected_results[:2], dtype))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(8192, 8192), (1, 28672), (16, 4096), (4096, 20000), (20000, 4096)])
def test_large_arrays(recipe: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda").bfloat16()
    for array in (x, x.T):
        result = gemmsmith.quantize(array, recipe, transposed=True)
        for actual, expected in zip(result, gemmsmith.quantize(array.cpu(), recipe, transposed=True), strict=True):
            assert same(as_numpy(actual.cpu()), as_numpy(expected))


@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_are_captured_into_graphs(recipe: str) -> None:
    x = torch.randn((512, 1024), device="cuda").bfloat16()
    gemmsmith.quantize(x, recipe)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gemmsmith.quantize(x, recipe)
    x.copy_(torch.randn((512, 1024), device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    for actual, expected in zip(result, gemmsmith.quantize(x, recipe), strict=True):
        assert torch.equal(actual.float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4096, 1000), (777, 5001), (3, 130, 257), (1, 9), (9, 1)])
def test_packed_weights_have_the_same_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    numbers = torch.randint(-9, 9, shape, device="cuda")
    b, wide = numbers.to(dtype), torch.cat((numbers, numbers), -1).to(dtype)
    for x in (b, b.transpose(-1, -2), wide[..., ::2]):
        packed = gemmsmith.pack(x)
        assert packed.dtype == dtype
        assert torch.equal(packed.float(), x.float())
        assert gemmsmith.pack(packed) is packed
