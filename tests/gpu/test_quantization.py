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
        if isinstance(made, torch.Tensor):  # the expected results are computed from numpy arrays, not poisoned here
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


@pytest.mark.parametrize("groups", [1, 8, 256, 1024])
@pytest.mark.parametrize("shape", [(5000, 512), (3000, 1111), (16, 128)])
@pytest.mark.parametrize("name", ["offsets", "sizes"])
def test_groups(name: str, shape: tuple[int, int], groups: int) -> None:
    """Also when replayed from a graph with another table, and with an invalid one."""
    x, table = torch.randn(shape, device="cuda").bfloat16(), torch.empty(groups, device="cuda", dtype=torch.int32)

    def draw() -> list[int]:
        cuts = torch.randint(0, shape[0] + 1, (groups,)).sort().values
        table.copy_(cuts if name == "offsets" else cuts.diff(prepend=cuts.new_zeros(1)))
        return [-(-size // 128) * 128 for size in cuts.diff(prepend=cuts.new_zeros(1)).tolist()]

    draw()
    gemmsmith.quantize(x, "128x1", **{name: table})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scales, ends = gemmsmith.quantize(x, "128x1", **{name: table})
    for _ in range(3):
        sizes = draw()
        graph.replay()
        expected = gemmsmith.quantize(x.cpu(), "128x1", **{name: table.cpu()})
        assert ends.tolist() == np.cumsum(sizes).tolist() == expected[2].tolist()
        end = int(ends[-1])
        assert same(as_numpy(values.cpu()[:end]), as_numpy(expected[0][:end]))
        assert same(as_numpy(scales.cpu()[: end // 128]), as_numpy(expected[1][: end // 128]))
    table[-1] = shape[0] + 1
    graph.replay()
    assert (ends == -1).all()


@pytest.mark.parametrize("sizes", [[0], [1, 0, 63, 300], [128, 129, 127, 64, 65], [700, 0, 0, 1300]])
def test_products_along_k_of_quantized_groups(sizes: list[int]) -> None:
    offsets = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    x, y = (torch.randn(sum(sizes) + 9, n, device="cuda").bfloat16() for n in (520, 264))
    a, scale_a, ends = gemmsmith.quantize(x, "128x1", offsets=offsets)
    b, scale_b, _ = gemmsmith.quantize(y, "128x1", offsets=offsets)
    d = gemmsmith.grouped_gemm(
        a.T, b, scale_a=scale_a.T, scale_b=scale_b, offsets=ends, along="k", out_dtype="fp32"
    )  # fmt: skip
    wide, begin = [q.double() * s.double().repeat_interleave(128, 0) for q, s in ((a, scale_a), (b, scale_b))], 0
    for g, end in enumerate(ends.tolist()):
        p, q = (z[begin:end] for z in wide)
        want, tolerance = p.T @ q, 2.0**-11 * (p.T.abs() @ q.abs()).max() if end > begin else 0
        assert bool(((d[g].double() - want).abs() <= tolerance).all())
        begin = end


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
