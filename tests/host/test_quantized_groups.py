"""quantize with groups: the kernel in the simulator against numpy, and the products along K that its results give."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.groups import random, scaled
from tests.quantities import DTYPES, LAYOUTS, poisoned, same, with_special

import gemmsmith
from gemmsmith import ArgumentError, Config, Grouping
from gemmsmith.arrays import as_numpy
from gemmsmith.host import output_kernels

SIZES = [0, 1, 63, 64, 65, 127, 128, 129]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_kernels, "empty_like_kind", poisoned)


def table(sizes: list[int], name: str) -> dict[str, Any]:
    return {name: np.array(sizes if name == "sizes" else np.cumsum(sizes), np.int32)}


def filled(x: Any, sizes: list[int]) -> Any:
    """The rows of the groups, each filled with zeros to a multiple of 128."""
    parts = np.split(x, np.cumsum(sizes))[: len(sizes)]
    return np.concatenate([np.pad(part, [(0, -len(part) % 128), (0, 0)]) for part in parts])


def ends_of(sizes: list[int]) -> Any:
    return np.cumsum([-(-size // 128) * 128 for size in sizes])


@pytest.mark.slow
@settings(max_examples=20)
@given(
    sizes=some.lists(some.sampled_from(SIZES), min_size=1, max_size=9), behind=some.sampled_from([0, 1, 130]),
    columns=some.sampled_from([1, 8, 128, 129, 200]), name=some.sampled_from(["offsets", "sizes"]),
    source=some.sampled_from(sorted(DTYPES)), layout=some.sampled_from(LAYOUTS), seed=some.integers(0, 1 << 32),
    special=some.sampled_from([None, None, np.nan, np.inf]),
    options=some.fixed_dictionaries({
        "dtype": some.sampled_from(["fp8_e4m3", "fp8_e5m2", "int8"]),
        "scale_dtype": some.sampled_from(["fp32", "ue8m0"]),
        "scale_order": some.sampled_from(["K", "M", None]), "scale_padding": some.sampled_from([1, 4, None]),
    }),
)  # fmt: skip
def test_the_kernel_gives_the_bits_of_the_filled_groups(
    sizes: list[int], behind: int, columns: int, name: str, source: str, layout: str, seed: int,
    special: float | None, options: dict[str, Any],
) -> None:  # fmt: skip
    x = with_special((sum(sizes) + behind, columns), source, layout, seed, special)
    expected = gemmsmith.quantize(filled(x, sizes), "128x1", **options)
    end = len(expected[0])
    for backend in ("sim", "reference"):
        values, scales, ends = gemmsmith.quantize(x, "128x1", **table(sizes, name), **options, backend=backend)
        np.testing.assert_array_equal(ends, ends_of(sizes))
        assert ends.dtype == np.int32
        assert same(values[:end], expected[0])
        assert same(scales[: end // 128], expected[1])
        for array in (values[end:], scales[end // 128 :]):
            assert (np.ascontiguousarray(array).view(np.uint8) == 0xFF).all()  # not written


@pytest.mark.parametrize("groups", [1, 2, 33, 1024])
def test_many_groups(groups: int) -> None:
    """The room for filled groups suffices, also if each has one row."""
    rng = np.random.default_rng(groups)
    for sizes in ([1] * min(groups, 33) + [0] * (groups - 33), rng.choice([*[0] * (groups // 20), 1, 129], groups)):
        sizes = list(map(int, sizes))
        x = random(rng, "bf16", sum(sizes), 16)
        values, scales, ends = gemmsmith.quantize(x, "128x1", **table(sizes, "sizes"), backend="sim")
        np.testing.assert_array_equal(ends, ends_of(sizes))
        expected = gemmsmith.quantize(filled(x, sizes), "128x1")
        assert same(values[: ends[-1]], expected[0])
        assert same(scales[: ends[-1] // 128], expected[1])


@pytest.mark.parametrize("name", ["offsets", "sizes"])
@pytest.mark.parametrize("entries", [[100, 90, 200], [100, 200, 301], [-1, 100, 200], [2**31 - 1, 2**31 - 1, 2]])
def test_an_invalid_table_stays_invalid(entries: list[int], name: str) -> None:
    if name == "sizes" and entries == [100, 90, 200]:
        entries = [100, -10, 200]
    x, y = random(np.random.default_rng(0), "bf16", 300, 24), random(np.random.default_rng(1), "bf16", 300, 40)
    for backend in ("sim", "reference"):
        options: dict[str, Any] = {name: np.array(entries, np.int32), "backend": backend}
        a, scale_a, ends = gemmsmith.quantize(x, "128x1", **options)
        b, scale_b, _ = gemmsmith.quantize(y, "128x1", **options)
        assert (ends == -1).all()
        for array in (a, scale_a):
            assert (np.ascontiguousarray(array).view(np.uint8) == 0xFF).all()
        d = gemmsmith.grouped_gemm(
            a.T, b, scale_a=scale_a.T, scale_b=scale_b, offsets=ends, along="k", backend=backend
        )  # fmt: skip
        assert np.isnan(d.astype(float)).all()


@pytest.mark.parametrize(
    "sizes", [[0], [128], [130], [63, 0, 129, 65], [127, 128, 1], [0, 0], [1, 0, 200, 64, 300, 0, 128, 1]]
)
def test_products_along_k(sizes: list[int], rng: np.random.Generator) -> None:
    """Of the gradients of experts' weights; what is behind the last group is NaN, and is not read."""
    config, m, n = rng.choice([None, Config("cooperative", (64, 72, 128), (1, 1), consumers=1)]), 80, 136
    rows = sum(sizes) + 7
    x, y = random(rng, "bf16", rows, m), random(rng, "bf16", rows, n)
    x[sum(sizes) :] = y[sum(sizes) :] = np.nan
    offsets = table(sizes, "offsets")["offsets"]
    a, scale_a, ends = gemmsmith.quantize(x, "128x1", offsets=offsets, backend="sim")
    b, scale_b, _ = gemmsmith.quantize(y, "128x1", offsets=offsets, backend="sim")
    out = np.full((len(sizes), m, n), np.nan, np.float32)
    done = gemmsmith.simulate(
        a.T, b, scale_a=scale_a.T, scale_b=scale_b, offsets=ends, grouping=Grouping("offsets", "k"), out=out,
        out_dtype="fp32", config=config,
    )  # fmt: skip
    assert done.hazards == []
    by_reference = gemmsmith.grouped_gemm(
        a.T, b, scale_a=scale_a.T, scale_b=scale_b, offsets=ends, along="k", out_dtype="fp32"
    )
    filled_begin = begin = 0
    for g, (end, filled_end) in enumerate(zip(offsets, ends, strict=True)):
        part, blocks = slice(filled_begin, filled_end), slice(filled_begin // 128, filled_end // 128)
        exact_a, exact_b = scaled(a.T[:, part], scale_a.T[:, blocks]), scaled(b[part], scale_b[blocks], transposed=True)
        want, of_magnitudes = exact_a @ exact_b, np.abs(exact_a) @ np.abs(exact_b)
        tolerance = 2.0**-11 * of_magnitudes.max(initial=0)  # 13-bit sums
        np.testing.assert_allclose(out[g], want, rtol=0, atol=tolerance)
        np.testing.assert_allclose(by_reference[g], want, rtol=1e-6, atol=1e-6)
        wide_x, wide_y = x[begin:end].astype(float), y[begin:end].astype(float)
        # e4m3 rounds by at most 2^-4 of a value, or 2^-10 of its scale, which is at most the block's amax / 448
        errors = [np.abs(w) * 2.0**-4 + np.abs(w).max(0, initial=0) * 2.0**-10 / 448 for w in (wide_x, wide_y)]
        bound = errors[0].T @ np.abs(wide_y) + np.abs(wide_x).T @ errors[1] + errors[0].T @ errors[1] + tolerance
        assert (np.abs(out[g] - wide_x.T @ wide_y) <= bound * 1.001).all()
        begin, filled_begin = end, filled_end


def add(acc: Any, total: Any) -> Any:
    return acc + total


@pytest.mark.parametrize("groups", range(1, 9))
def test_gradients_of_weights_are_accumulated(groups: int) -> None:
    """In fp32, in place, over several steps; a group without rows adds nothing."""
    rng, m, n = np.random.default_rng(groups), 72, 48
    total = rng.standard_normal((groups, m, n)).astype(np.float32)
    want, magnitudes = total.astype(float), np.abs(total).astype(float)
    for _ in range(2):
        sizes = rng.choice(SIZES, groups).tolist()
        x, y = random(rng, "bf16", sum(sizes) + 5, m), random(rng, "bf16", sum(sizes) + 5, n)
        offsets = table(sizes, "offsets")["offsets"]
        a, scale_a, ends = gemmsmith.quantize(x, "128x1", offsets=offsets, backend="sim")
        b, scale_b, _ = gemmsmith.quantize(y, "128x1", offsets=offsets, backend="sim")
        gemmsmith.grouped_gemm(
            a.T, b, scale_a=scale_a.T, scale_b=scale_b, offsets=ends, along="k", out_dtype="fp32", epilogue=add,
            total=total, out=total, backend="sim",
        )  # fmt: skip
        for g, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            blocks = slice(begin // 128, end // 128)
            exact_a = scaled(a[begin:end], scale_a[blocks], transposed=True)
            exact_b = scaled(b[begin:end], scale_b[blocks], transposed=True)
            want[g] += exact_a.T @ exact_b
            magnitudes[g] += np.abs(exact_a).T @ np.abs(exact_b)
    np.testing.assert_allclose(total, want, rtol=0, atol=2.0**-11 * magnitudes.max())  # 13-bit sums


@pytest.mark.torch
def test_torch() -> None:
    torch = pytest.importorskip("torch")
    x, offsets = torch.randn(300, 40).bfloat16(), torch.tensor([100, 100, 300], dtype=torch.int32)
    values, scales, ends = gemmsmith.quantize(x, "128x1", offsets=offsets)
    expected = gemmsmith.quantize(as_numpy(x), "128x1", offsets=offsets.numpy())
    assert ends.tolist() == [128, 128, 384]
    assert (values.dtype, values.stride(), ends.dtype) == (torch.float8_e4m3fn, (1, 640), torch.int32)
    assert same(as_numpy(values)[:384], expected[0][:384])
    assert same(as_numpy(scales)[:3], expected[1][:3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "1x128"}, r"offsets: got it with shape \(30, 16\), '1x128'; use \(m, k\) and '128x1'"),
        ({"transposed": True}, "offsets: got it with .*, transposed; use .*, not transposed"),
        ({"x": np.ones((2, 30, 16), np.float32)}, r"offsets: got it with shape \(2, 30, 16\)"),
        ({"sizes": np.ones(2, np.int32)}, "offsets, sizes, counts: got offsets, sizes; use exactly one of them"),
        ({"offsets": np.ones(2, np.int64)}, r"offsets: got int64 of shape \(2,\); use a contiguous int32 array"),
        ({"offsets": np.ones((2, 1), np.int32)}, r"offsets: got int32 of shape \(2, 1\)"),
        ({"offsets": np.ones(4, np.int32)[::2]}, "use a contiguous int32 array"),
        ({"offsets": np.ones(0, np.int32)}, "offsets: got 0 groups; use 1 to 1024"),
        ({"offsets": np.ones(1025, np.int32)}, "offsets: got 1025 groups"),
        ({"offsets": [30]}, "offsets: got builtins.list"),
        ({"recipe": ["rows"]}, r"recipe: got \['rows'\]"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"x": np.ones((30, 16), np.float32), "recipe": "128x1", "offsets": np.array([10, 30], np.int32)}
    with pytest.raises(ArgumentError, match=message):
        gemmsmith.quantize(**{**given, **change})


def test_groups_are_refused_in_an_epilogue() -> None:
    a = np.ones((16, 16), ml_dtypes.bfloat16)
    for name in ("offsets", "sizes"):
        with pytest.raises(ArgumentError, match=f"epilogue: quantize: {name}: got 3; leave it out"):
            gemmsmith.gemm(a, a, epilogue=lambda acc, name=name: gemmsmith.quantize(acc, **{name: 3}))
