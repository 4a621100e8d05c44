"""quantize and dequantize: the kernels in the simulator against numpy, bit for bit, and both against the definition."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.quantities import DTYPES, LAYOUTS, RECIPES, laid_out, numbers, options, poisoned, same, shapes, with_special

import gemmsmith
from gemmsmith import ArgumentError
from gemmsmith.arrays import as_numpy
from gemmsmith.host import output_kernels

LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
BLOCKS = {"rows": (1, 0), "columns": (0, 1), "1x128": (1, 128), "128x1": (128, 1), "128x128": (128, 128)}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_kernels, "empty_like_kind", poisoned)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    options=options(), shape=shapes(), dtype=some.sampled_from(sorted(DTYPES)), layout=some.sampled_from(LAYOUTS),
    seed=some.integers(0, 1 << 32), special=some.sampled_from([None, None, np.nan, np.inf, -np.inf]),
)  # fmt: skip
def test_kernels_give_the_bits_of_the_reference(
    options: dict[str, Any], shape: tuple[int, ...], dtype: str, layout: str, seed: int, special: float | None
) -> None:
    x = with_special(shape, dtype, layout, seed, special)
    result = gemmsmith.quantize(x, **options, backend="sim")
    expected_results = gemmsmith.quantize(x, **options)
    for actual, expected in zip(result, expected_results, strict=True):
        assert same(actual, expected)
        assert actual.strides == expected.strides
    back = gemmsmith.dequantize(*result[:2], dtype, backend="sim")
    assert same(back, gemmsmith.dequantize(*expected_results[:2], dtype))


@pytest.mark.slow
@settings(max_examples=12)
@given(
    shape=shapes(), layout=some.sampled_from(LAYOUTS), recipe=some.sampled_from(RECIPES), seed=some.integers(0, 99999),
    formats=some.tuples(some.sampled_from(sorted(LARGEST)), some.sampled_from(["fp32", "ue8m0"])),
    out=some.sampled_from(sorted(DTYPES)),
)  # fmt: skip
def test_values_of_any_strides_dequantize(
    shape: tuple[int, ...], layout: str, recipe: str, seed: int, formats: tuple[str, str], out: str
) -> None:
    x = numbers(shape, DTYPES["fp32"], np.random.default_rng(seed))
    values, scales = gemmsmith.quantize(x, recipe, formats[0], scale_dtype=formats[1])
    values = laid_out(values, layout)
    if scales.ndim > 1:
        scales = laid_out(scales, layout)
    assert same(gemmsmith.dequantize(values, scales, out, backend="sim"), gemmsmith.dequantize(values, scales, out))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("k", [300, 1100, 3000, 5000, 9000, 17000])
def test_whole_rows_of_any_length(layout: str, k: int, rng: np.random.Generator) -> None:
    recipe = str(rng.choice(["rows", "columns"]))
    x = laid_out(numbers((3 if k < 9000 else 2, k), DTYPES["bf16"], rng), layout)
    x = x if recipe == "rows" else x.T
    for actual, expected in zip(
        gemmsmith.quantize(x, recipe, backend="sim"), gemmsmith.quantize(x, recipe), strict=True
    ):
        assert same(actual, expected)


# -- the reference, against the definition ---------------------------------------------------------------------
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_are_of_what_shares_them(recipe: str, dtype: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 200, 300)).astype(np.float32)
    values, scales = gemmsmith.quantize(x, recipe, dtype)
    if recipe == "tensor":
        assert scales.shape == ()
        np.testing.assert_allclose(scales, np.abs(x).max() / LARGEST[dtype], rtol=1e-6)
    else:
        rows, columns = (own or whole for own, whole in zip(BLOCKS[recipe], x.shape[1:], strict=True))
        assert scales.shape == (2, -(-200 // rows), -(-300 // columns))
        for i in range(scales.shape[1]):
            for j in range(scales.shape[2]):
                block = x[:, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                expected = np.abs(block).max((1, 2)) / LARGEST[dtype]
                np.testing.assert_allclose(scales[:, i, j], expected, rtol=1e-6)
    back = gemmsmith.dequantize(values, scales, "fp32")
    bound = np.abs(x) * {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3, "int8": 0}[dtype]
    least = scales.max() * {"fp8_e4m3": 2.0**-10, "fp8_e5m2": 2.0**-17, "int8": 0.5001}[dtype]
    assert (np.abs(back - x) <= bound * 1.001 + least).all()
    assert np.abs(values.astype(np.float32)).max() == LARGEST[dtype]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_transposed_copy_is_the_transposed_array_quantized(recipe: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 150, 270)).astype(np.float32)
    options: dict[str, Any] = {"scale_order": "M", "scale_padding": 4}
    result = gemmsmith.quantize(x, recipe, transposed=True, **options)
    expected_results = (
        *gemmsmith.quantize(x, recipe, **options),
        *gemmsmith.quantize(x.swapaxes(-1, -2), recipe, **options),
    )
    for actual, expected in zip(result, expected_results, strict=True):
        assert same(actual, expected)
        assert actual.strides == expected.strides


def test_powers_of_two_are_rounded_up(rng: np.random.Generator) -> None:
    x = rng.standard_normal((130, 260)).astype(np.float32)
    values, scales = gemmsmith.quantize(x, scale_dtype="ue8m0")
    _, exact = gemmsmith.quantize(x)
    assert scales.dtype == ml_dtypes.float8_e8m0fnu
    assert (scales.astype(np.float32) >= exact).all()
    assert (scales.astype(np.float32) < 2 * exact).all()
    x[:, :128], x[:, 128:] = 448, 448 * 2.0**-5
    values, scales = gemmsmith.quantize(x, scale_dtype="ue8m0")
    assert (scales.astype(np.float32) == [1, 2.0**-5, 2.0**-5]).all()
    assert (values.astype(np.float32) == 448).all()


@pytest.mark.parametrize("scale_dtype", ["fp32", "ue8m0"])
def test_blocks_of_zeros_infinities_and_nan(scale_dtype: str) -> None:
    x = np.ones((1, 5 * 128), np.float32)
    x[0, :128], x[0, 200], x[0, 300], x[0, 400] = 0, np.inf, np.nan, -np.inf
    x[0, 512:] = 1e-44
    values, scales = gemmsmith.quantize(x, scale_dtype=scale_dtype)
    values, scales = values.astype(np.float32), scales.astype(np.float32)
    assert scales[0, 0] == 1
    assert (values[0, :128] == 0).all()
    special = np.inf if scale_dtype == "fp32" else np.nan
    np.testing.assert_array_equal(scales[0, 1:4], [special, np.nan, special])
    assert np.isnan(gemmsmith.dequantize(values.astype(ml_dtypes.float8_e4m3fn), scales, "fp32")[0, 128:512]).all()
    assert scales[0, 4] == 2.0**-126
    assert np.isfinite(values[0, 512:]).all()


@pytest.mark.torch
def test_layouts_that_others_take() -> None:
    """torch's 1x128 scales are contiguous along M, DeepGEMM's so with M padded to 4; torch's 128x128 have their blocks
    of K padded to 4. Rows of values are padded to 16 bytes."""
    torch = pytest.importorskip("torch")
    x = torch.randn(130, 700).bfloat16()
    values, scales = gemmsmith.quantize(x, scale_order="M")
    assert values.stride() == (704, 1)
    assert scales.stride() == (1, 130)
    assert gemmsmith.quantize(x, scale_order="M", scale_padding=4)[1].stride() == (1, 132)
    _, scales = gemmsmith.quantize(x, "128x128", scale_padding=4)
    assert scales.stride() == (8, 1)
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert gemmsmith.quantize(x, scale_dtype="ue8m0")[1].dtype == torch.float8_e8m0fnu
    values, scales = gemmsmith.quantize(x, "128x1")
    assert values.stride() == (1, 144)
    assert scales.shape == (2, 700)


@pytest.mark.torch
def test_torch_and_numpy_agree(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = rng.standard_normal((140, 150)).astype(np.float32)
    for recipe in RECIPES:
        for actual, expected in zip(
            gemmsmith.quantize(torch.from_numpy(x), recipe), gemmsmith.quantize(x, recipe), strict=True
        ):
            assert same(as_numpy(actual), expected)
    with pytest.raises(ArgumentError, match="x: got a tensor that requires grad"):
        gemmsmith.quantize(torch.ones(3, 3, requires_grad=True))
    with pytest.raises(ArgumentError, match="scales: got a tensor that requires grad"):
        gemmsmith.dequantize(torch.ones(3, 3).to(torch.float8_e5m2), torch.ones((), requires_grad=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones(3, np.float32)}, r"x: got shape \(3,\); use \(m, k\) or \(batch, m, k\)"),
        ({"x": np.ones((3, 3), np.int32)}, "x: got dtype int32; use bf16, fp16 or fp32"),
        ({"x": np.ones((3, 3), np.float32)[::-1]}, "x: got strides .* use strides >= 0"),
        ({"x": gemmsmith.Spec((3, 3), "bf16")}, "x: got a Spec, which has no data"),
        ({"x": [1.0]}, "x: got builtins.list"),
        ({"recipe": "1x32"}, "recipe: got '1x32'; use one of tensor, rows, 1x128, 128x128, columns, 128x1"),
        ({"recipe": ["rows"]}, r"recipe: got \['rows'\]"),
        ({"dtype": "bf16"}, "dtype: got 'bf16'; use one of fp8_e4m3, fp8_e5m2, int8"),
        ({"scale_dtype": "fp16"}, "scale_dtype: got 'fp16'; use one of fp32, ue8m0"),
        ({"scale_order": "N"}, "scale_order: got 'N'; use 'K' .* or 'M'"),
        ({"transposed": [1]}, r"transposed: got \[1\]; use True or False"),
        ({"transposed": "no"}, "transposed: got 'no'; use True or False"),
        ({"scale_padding": 0}, "scale_padding: got 0"),
        ({"backend": "gpu"}, "backend: got 'gpu'; use one of auto, cuda, sim, reference"),
        ({"backend": "cuda"}, "backend: got 'cuda' with x on cpu; use an array on a GPU"),
    ],
)
def test_what_quantize_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        gemmsmith.quantize(**{"x": np.ones((3, 3), np.float32), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.ones((200, 300), np.float32)}, "values: got dtype fp32; use one of fp8_e4m3"),
        ({"values": np.ones(200, ml_dtypes.float8_e5m2)}, r"values: got shape \(200,\)"),
        ({"scales": np.ones((200, 3), np.float16)}, "scales: got dtype fp16; use fp32 or ue8m0"),
        ({"scales": np.ones((200, 4), np.float32)}, r"scales: got shape \(200, 4\) for values \(200, 300\); use"),
        ({"scales": np.ones((2, 200, 3), np.float32)}, r"scales: got shape \(2, 200, 3\)"),
        ({"scales": np.ones(300, np.float32)}, r"scales: got shape \(300,\)"),
        ({"dtype": "fp8_e4m3"}, "dtype: got 'fp8_e4m3'; use bf16, fp16 or fp32"),
    ],
)
def test_what_dequantize_refuses(change: dict[str, Any], message: str) -> None:
    given = {"values": np.ones((200, 300), ml_dtypes.float8_e4m3fn), "scales": np.ones((200, 3), np.float32)}
    with pytest.raises(ArgumentError, match=message):
        gemmsmith.dequantize(**{**given, **change})


def test_an_epilogue_takes_another_number_of_columns(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((32, 32)).astype(ml_dtypes.bfloat16) for _ in range(2))
    values, scales = gemmsmith.gemm(a, b, epilogue=lambda acc: gemmsmith.quantize(acc, "1x16", "fp8_e5m2"))
    assert values.dtype == ml_dtypes.float8_e5m2
    assert scales.shape == (32, 2)
    with pytest.raises(ArgumentError, match="quantize: recipe: got 'rows'; in an epilogue use '1x128'"):
        gemmsmith.gemm(a, b, epilogue=lambda acc: gemmsmith.quantize(acc, "rows"))


@pytest.mark.parametrize("given", [
    {"transposed": True}, {"scale_dtype": "ue8m0"}, {"scale_order": "K"}, {"scale_padding": 4}, {"backend": "sim"},
])  # fmt: skip
def test_options_of_arrays_are_refused_in_an_epilogue(given: dict[str, Any]) -> None:
    a, name = np.ones((16, 16), np.float16), next(iter(given))
    with pytest.raises(ArgumentError, match=f"epilogue: quantize: {name}: got .*; leave it out, it is for arrays"):
        gemmsmith.gemm(a, a, epilogue=lambda acc: gemmsmith.quantize(acc, "1x16", **given))
