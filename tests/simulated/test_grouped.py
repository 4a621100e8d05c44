"""Grouped GEMMs in the simulator and by the reference, group by group against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.groups import NUMPY, Kind, blocks, check_refused, fp32, random, scaled

import gemmsmith
from gemmsmith import ArgumentError, Config, Grouping, Spec
from gemmsmith.backends.reference import bounds
from gemmsmith.core.dtypes import BF16, FP16, FP32, INT32, DType

COOPERATIVE, PINGPONG = Config("cooperative", (128, 64, 64), (1, 1)), Config("pingpong", (64, 64, 64), (1, 1))
SM80 = Config("mma_multistage", (64, 64, 64), (1, 1), 3, 2, chip="sm_80")
CONFIGS = [
    None, COOPERATIVE, COOPERATIVE.replace(cluster=(2, 1)), COOPERATIVE.replace(cluster=(1, 2), raster="n"),
    COOPERATIVE.replace(swap_ab=True), COOPERATIVE.replace(cluster=(2, 2), swap_ab=True, raster_group=1),
    COOPERATIVE.replace(alias_epilogue=True), PINGPONG, PINGPONG.replace(cluster=(2, 1)),
    PINGPONG.replace(cluster=(2, 1), swap_ab=True), SM80,
]  # fmt: skip


def random_sizes(rng: np.random.Generator, groups: int, total: int) -> Any:
    """Sizes of which some are 0, 1 or about a tile, and whose sum is at most `total`."""
    sizes = rng.choice([0, 0, 1, 3, 63, 64, 65, 127, 128, 129], groups)
    while sizes.sum() > total:
        sizes[sizes.argmax()] = 0
    return sizes.astype(np.int32)


def poisoned(dtype: str, *shape: int) -> Any:
    return np.full(shape, np.nan if dtype != "int32" else 77, np.int32 if dtype == "int32" else NUMPY[dtype])


def check_group(out: Any, a: Any, b: Any, out_dtype: DType, accumulator: DType = FP32, **options: Any) -> None:
    if out.size:
        bounds.check(out, a, b, accumulator, out_dtype, **options).require()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_groups(config: Config | None, seed: int) -> None:
    """Rows behind the last group, whose elements are NaN, become zero; groups end anywhere."""
    rng = np.random.default_rng(seed)
    groups, n, k = int(rng.integers(1, 8)), 8 * int(rng.integers(1, 24)), 8 * int(rng.integers(1, 40))
    sizes = random_sizes(rng, groups, 400)
    ends, m = sizes.cumsum().astype(np.int32), int(sizes.sum() + rng.integers(0, 80))
    a, b = random(rng, "bf16", m, k), random(rng, "bf16", groups, k, n, column_major=bool(seed))
    a[ends[-1] :] = np.nan
    table = {"offsets": ends} if seed else {"sizes": sizes}
    out = poisoned("bf16", m, n)
    done = gemmsmith.simulate(
        a, b, **table, grouping=Grouping(next(iter(table))), out=out, config=config, seed=seed  # type: ignore[arg-type]
    )  # fmt: skip
    assert done.hazards == []
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        check_group(out[end - size : end], a[end - size : end], b[group], BF16)
    assert (out[ends[-1] :].astype(float) == 0).all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_that_are_valid(config: Config | None) -> None:
    """Others, whose elements are NaN, are not written."""
    rng = np.random.default_rng(1)
    groups, m, n, k = 5, 150, 72, 136
    counts = np.array([0, m, 65, 1, 128], np.int32)
    a, b, out = random(rng, "bf16", groups, m, k), random(rng, "bf16", groups, k, n), poisoned("bf16", groups, m, n)
    for group, count in enumerate(counts):
        a[group, count:] = np.nan
    done = gemmsmith.simulate(a, b, counts=counts, grouping=Grouping("counts"), out=out, config=config, seed=1)
    assert done.hazards == []
    for group, count in enumerate(counts):
        check_group(out[group, :count], a[group, :count], b[group], BF16)
        assert np.isnan(out[group, count:].astype(float)).all()


ALONG_K = [x for x in CONFIGS if x is None or (x.design != "pingpong" and not x.alias_epilogue)]


@pytest.mark.parametrize("config", ALONG_K, ids=str)
@pytest.mark.parametrize("alike", [True, False])
def test_slices_of_k(config: Config | None, alike: bool, rng: np.random.Generator) -> None:
    """NaN of the next group, and behind the last one, do not get in; an empty group yields zeros."""
    first = bool(rng.integers(2))
    column_major = first, first == alike
    groups, m, n = 6, 136, 72
    sizes = np.array([10, 0, 130, 1, 64, 0], np.int32)
    ends, k = sizes.cumsum(), int(sizes.sum()) + 40
    a = random(rng, "bf16", m, k, column_major=column_major[0])
    b = random(rng, "bf16", k, n, column_major=column_major[1])
    a[:, ends[-1] :] = np.nan
    b[ends[-1] :] = np.nan
    a[:, 10:140] *= np.inf  # a neighbor that is not finite
    out = poisoned("bf16", groups, m, n)
    done = gemmsmith.simulate(a, b, sizes=sizes, grouping=Grouping("sizes", "k"), out=out, config=config, seed=2)
    assert done.hazards == []
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        if group == 2:
            assert not np.isfinite(out[group].astype(float)).all()
        else:
            check_group(out[group], a[:, end - size : end], b[end - size : end], BF16)


@pytest.mark.parametrize("groups", [1, 31, 33, 256, 1000, 1024])
def test_many_groups(groups: int) -> None:
    rng = np.random.default_rng(groups)
    sizes = rng.integers(0, 3, groups).astype(np.int32)
    ends, m = sizes.cumsum(), int(sizes.sum())
    a, b, out = random(rng, "bf16", m, 16), random(rng, "bf16", groups, 16, 8), poisoned("fp32", m, 8)
    done = gemmsmith.simulate(
        a, b, sizes=sizes, grouping=Grouping("sizes"), out=out, out_dtype="fp32",
        config=Config("cooperative", (64, 8, 64), (1, 1), consumers=1),
    )  # fmt: skip
    assert done.hazards == []
    of_row = np.repeat(np.arange(groups), sizes)
    np.testing.assert_allclose(
        out, np.einsum("mk,mkn->mn", a.astype(float), b.astype(float)[of_row]), rtol=1e-5, atol=1e-5
    )
    assert ends[-1] == m


KINDS = {
    "fp16": Kind("fp16", "fp16", "fp16"),
    "fp16 sums": Kind("fp16", "fp16", "fp16", {"accumulate": "fp16"}),
    "bf16 to fp32": Kind("bf16", "bf16", "fp32", {"out_dtype": "fp32"}),
    "int8": Kind("int8", "int8", "int32"),
    "tf32": Kind("fp32", "fp32", "fp32", {"precision": "tf32"}),
    "3xtf32": Kind("fp32", "fp32", "fp32", {"precision": "3xtf32"}),
    "fp8": Kind("e4m3", "e4m3", "bf16"),
    "fp8 fast": Kind("e5m2", "e4m3", "bf16", {"accumulate": "fast"}),
    "fp8 scaled": Kind(
        "e4m3", "e4m3", "bf16", {}, lambda rng, g, m, n, k: {"scale_a": fp32(rng, m, 1), "scale_b": fp32(rng, g, 1, n)}
    ),
    "fp8 scaled by group": Kind(
        "e4m3", "e4m3", "bf16", {}, lambda rng, g, m, n, k: {"scale_a": 0.5, "scale_b": fp32(rng, g, 1, 1)}
    ),
    "fp8 blocks": Kind("e4m3", "e4m3", "bf16", {}, lambda rng, g, m, n, k: {
        "scale_a": fp32(rng, m, blocks(k)), "scale_b": fp32(rng, g, blocks(k), blocks(n)),
    }),
    "fp8 rows M-major": Kind("e4m3", "e4m3", "bf16", {}, lambda rng, g, m, n, k: {
        "scale_a": fp32(rng, blocks(k), m).T, "scale_b": fp32(rng, g, blocks(k), blocks(n)),
    }),
    "fp8 columns": Kind("e4m3", "e4m3", "bf16", {}, lambda rng, g, m, n, k: {
        "scale_a": fp32(rng, m, blocks(k)), "scale_b": fp32(rng, g, blocks(k), n),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("swap", [False, True])
def test_kinds_of_operands(name: str, swap: bool) -> None:
    kind, rng = KINDS[name], np.random.default_rng(5)
    groups, n, k = 4, 144, 272
    sizes = np.array([65, 0, 130, 7], np.int32)
    ends, m = sizes.cumsum(), int(sizes.sum()) + 5
    a, b = random(rng, kind.a, m, k), random(rng, kind.b, groups, k, n, column_major=True)
    scales = kind.scales(rng, groups, m, n, k) if kind.scales else {}
    tile_k = 128 // a.itemsize
    config = Config("cooperative", (64, 48, tile_k), (1, 2) if swap else (2, 1), consumers=1, swap_ab=swap)
    out = poisoned(kind.out, m, n)
    arguments = {"sizes": sizes, "out": out, **kind.options, **scales}
    assert gemmsmith.simulate(a, b, grouping=Grouping("sizes"), config=config, **arguments).hazards == []
    want = np.full((m, n), 0.0)
    for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        rows, scale_a, scale_b = slice(end - size, end), scales.get("scale_a"), scales.get("scale_b")
        of_rows = scale_a[rows] if np.ndim(scale_a) and len(scale_a) == m else scale_a
        of_group = scale_b[g] if np.ndim(scale_b) == 3 else scale_b
        want[rows] = scaled(a[rows], of_rows) @ scaled(b[g], of_group, transposed=True)
    tolerance = {"int32": 0, "fp32": 2.0**-9 if name == "tf32" else 2.0**-17, "fp16": 2.0**-8, "bf16": 2.0**-6}[
        kind.out
    ]
    magnitude = np.abs(want).max()
    np.testing.assert_allclose(out.astype(float), want, rtol=0, atol=tolerance * magnitude)
    by_reference = gemmsmith.grouped_gemm(a, b, sizes=sizes, backend="reference", **kind.options, **scales)
    np.testing.assert_allclose(by_reference.astype(float), want, rtol=0, atol=tolerance * magnitude)


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_slices_of_k_of_8_bits(kind: str) -> None:
    rng, sizes = np.random.default_rng(3), np.array([128, 0, 384, 256], np.int32)
    ends, m, n = sizes.cumsum(), 80, 72
    a, b = random(rng, kind, m, 900), random(rng, kind, 900, n, column_major=True)
    config = Config("cooperative", (64, 24 if kind == "int8" else 72, 128), (1, 1), consumers=1)
    out = poisoned("int32" if kind == "int8" else "fp32", len(sizes), m, n)
    options = {} if kind == "int8" else {
        "out_dtype": "fp32", "scale_a": fp32(rng, m, 8), "scale_b": fp32(rng, 8, 1),
    }  # fmt: skip
    done = gemmsmith.simulate(a, b, sizes=sizes, grouping=Grouping("sizes", "k"), out=out, config=config, **options)
    assert done.hazards == []
    for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        part = slice(end - size, end)
        x, y = a[:, part].astype(float), b[part].astype(float)
        if kind != "int8":
            x = scaled(a[:, part], options["scale_a"][:, part.start // 128 : part.stop // 128])
            y = scaled(b[part], options["scale_b"][part.start // 128 : part.stop // 128], transposed=True)
        tolerance = 0 if kind == "int8" else 2.0**-11 * (np.abs(x) @ np.abs(y)).max(initial=0)  # 13-bit sums
        np.testing.assert_allclose(out[g], x @ y, rtol=0, atol=tolerance)


def bias_and_weights(acc: Any, bias: Any, scale: Any, weight: Any, residual: Any, shift: float) -> Any:
    return (acc * scale + bias).tanh() * weight + residual - shift


def by_group(acc: Any, group: Any) -> Any:
    return (acc * (group + 1)).relu() + (group == 3)


@pytest.mark.parametrize("config", [None, COOPERATIVE, COOPERATIVE.replace(swap_ab=True), PINGPONG, SM80], ids=str)
@pytest.mark.parametrize("form", ["rows", "masked", "k"])
def test_epilogues_that_read_the_index_of_the_group(config: Config | None, form: str) -> None:
    if form == "k" and config is PINGPONG:
        return
    rng, sizes, n, k = np.random.default_rng(14), np.array([65, 0, 130, 7, 0, 1], np.int32), 72, 64
    groups, total, b = len(sizes), int(sizes.sum()), random(rng, "bf16", 6, k, n)
    a = random(rng, "bf16", *([groups, 140] if form == "masked" else [total + 9]), k)
    if form == "k":
        a, b = a.T, random(rng, "bf16", total + 9, n)
    out = poisoned("fp32", *((groups,) if form != "rows" else ()), *((k,) if form == "k" else a.shape[-2:-1]), n)
    name = "counts" if form == "masked" else "sizes"
    options: dict[str, Any] = {name: sizes, "epilogue": by_group, "out_dtype": "fp32"}
    grouping = Grouping(name, "k" if form == "k" else "m")  # type: ignore[arg-type]
    by_reference = out.copy()
    assert gemmsmith.simulate(a, b, **options, grouping=grouping, out=out, config=config).hazards == []
    gemmsmith.grouped_gemm(a, b, **options, along=grouping.along, out=by_reference, backend="reference")
    for g, (end, size) in enumerate(zip(sizes.cumsum(), sizes, strict=True)):
        part = slice(end - size, end) if form != "masked" else slice(size)
        x, y = {"rows": (a[part], b[g]), "masked": (a[g, part], b[g]), "k": (a[:, part], b[part])}[form]
        want = np.maximum(x.astype(float) @ y.astype(float) * (g + 1), 0) + (g == 3)
        for found in (out, by_reference):
            of_group = {"rows": found[part], "masked": found[g, part], "k": found[g]}[form]
            np.testing.assert_allclose(of_group, want, rtol=1e-4, atol=1e-3)


def test_a_group_that_is_an_operand_or_has_a_default_is_no_index() -> None:
    a, b, sizes = np.ones((60, 64), NUMPY["bf16"]), np.ones((2, 64, 64), NUMPY["bf16"]), np.array([30, 30], np.int32)

    def with_default(acc: Any, group: float = 5.0) -> Any:
        return acc * group

    for given, factor in (({"group": 3.0}, [3, 3]), ({}, [5, 5])):
        d = gemmsmith.grouped_gemm(a, b, sizes=sizes, epilogue=with_default, **given)
        assert (d[::30, 0].astype(float) == 64 * np.array(factor)).all()
    with pytest.raises(gemmsmith.EpilogueError, match="group: no operand has this name"):
        gemmsmith.gemm(a, b[0], epilogue=by_group)
    batch = np.stack([a, a])
    gemmsmith.grouped_gemm(batch, b, counts=sizes, epilogue=by_group)
    with pytest.raises(gemmsmith.EpilogueError, match="group: no operand has this name"):
        gemmsmith.gemm(batch, b, epilogue=by_group)


@pytest.mark.parametrize(
    "config", [None, COOPERATIVE.replace(cluster=(2, 1)), COOPERATIVE.replace(swap_ab=True), PINGPONG, SM80], ids=str
)
@pytest.mark.parametrize("long", [False, True])
def test_epilogues_with_operands_of_groups(config: Config | None, long: bool) -> None:
    """A row and a value for each group, a value for each row of all groups, a matrix, and a number."""
    rng, groups, n, k = np.random.default_rng(6), 3, 64, 72
    sizes = np.array([70, 0, 133], np.int32)
    m = int(sizes.sum()) + 9
    a, b = random(rng, "bf16", m, k), random(rng, "bf16", groups, k, n)
    bias, scale = fp32(rng, groups, *([1] * long), n), fp32(rng, groups, *([1, 1] * long))
    weight, residual, out = fp32(rng, m, 1), random(rng, "bf16", m, n), poisoned("fp32", m, n)
    arguments: dict[str, Any] = {
        "sizes": sizes, "epilogue": bias_and_weights, "bias": bias, "scale": scale, "weight": weight,
        "residual": residual, "shift": 0.25, "out_dtype": "fp32",
    }  # fmt: skip
    done = gemmsmith.simulate(a, b, grouping=Grouping("sizes"), out=out, config=config, **arguments)
    assert done.hazards == []
    group = np.repeat(np.arange(groups), sizes)
    rows = slice(0, len(group))
    acc = np.einsum("mk,mkn->mn", a[rows].astype(float), b.astype(float)[group])
    want = np.tanh(acc * scale.reshape(groups, 1)[group] + bias.reshape(groups, n)[group]) * weight[rows]
    want = want + residual[rows].astype(float) - 0.25
    np.testing.assert_allclose(out[rows], want, rtol=1e-3, atol=2e-3)
    assert (out[len(group) :] == 0).all()
    by_reference = gemmsmith.grouped_gemm(a, b, backend="reference", **arguments)
    np.testing.assert_allclose(by_reference[rows], want, rtol=1e-5, atol=1e-5)
    assert (by_reference[len(group) :] == 0).all()


def test_gradients_of_weights_are_added_to_a_matrix() -> None:
    rng, groups, m, n = np.random.default_rng(7), 3, 72, 64
    offsets = np.array([30, 30, 95], np.int32)
    a, b, c = random(rng, "bf16", m, 100, column_major=True), random(rng, "bf16", 100, n), fp32(rng, groups, m, n)
    out = c.copy()
    gemmsmith.grouped_gemm(
        a, b, offsets=offsets, along="k", epilogue=lambda acc, c: acc + c, c=out, out=out, out_dtype="fp32",
        backend="sim",
    )  # fmt: skip
    for g, part in enumerate((slice(0, 30), slice(30, 30), slice(30, 95))):
        np.testing.assert_allclose(
            out[g], a[:, part].astype(float) @ b[part].astype(float) + c[g], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("config", [COOPERATIVE, COOPERATIVE.replace(swap_ab=True), SM80], ids=str)
@pytest.mark.parametrize("strides", ["rows", "columns", "apart", "odd"])
def test_layouts_of_the_result(config: Config, strides: str) -> None:
    """Rows that TMA cannot store, columns, and an array in which the result has gaps, which survive."""
    rng, n = np.random.default_rng(8), 71 if strides == "odd" else 72
    sizes, m = np.array([33, 70], np.int32), 120
    a, b = random(rng, "bf16", m, 64), random(rng, "bf16", 2, 64, n)
    if strides == "columns":
        out = poisoned("bf16", n, m).T
    elif strides == "apart":
        memory = poisoned("bf16", m, 2 * n)
        out = memory[:, n // 2 : n // 2 + n]
    else:
        out = poisoned("bf16", m, n)
    done = gemmsmith.simulate(a, b, sizes=sizes, grouping=Grouping("sizes"), out=out, config=config)
    assert done.hazards == []
    check_group(out[:33], a[:33], b[0], BF16)
    check_group(out[33:103], a[33:103], b[1], BF16)
    assert (out[103:].astype(float) == 0).all()
    if strides == "apart":
        assert np.isnan(memory[:, : n // 2].astype(float)).all()
        assert np.isnan(memory[:, n // 2 + n :].astype(float)).all()


@pytest.mark.parametrize("config", [COOPERATIVE, COOPERATIVE.replace(swap_ab=True), PINGPONG, SM80], ids=str)
def test_rows_behind_the_last_group_are_left_on_request(config: Config) -> None:
    rng, out = np.random.default_rng(9), poisoned("bf16", 100, 64)
    a, b = random(rng, "bf16", 100, 64), random(rng, "bf16", 2, 64, 64)
    gemmsmith.grouped_gemm(
        a, b, sizes=np.array([30, 31], np.int32), zero_fill=False, out=out, config=config, backend="sim"
    )
    check_group(out[:30], a[:30], b[0], BF16)
    check_group(out[30:61], a[30:61], b[1], BF16)
    assert np.isnan(out[61:].astype(float)).all()


INVALID = {
    "offsets": [[10, 5, 60], [-1, 5, 9], [10, 50, 65], [2**31 - 1, -(2**31), 9], [0, 0, 2**31 - 1]],
    "sizes": [[10, -1, 9], [30, 30, 5], [2**31 - 1, 2**31 - 1, 2], [-(2**31), 0, 0]],
    "counts": [[10, -1, 9], [64, 65, 0], [2**31 - 1, 1, 1]],
}
"""Tables of 3 groups of 64 rows that decrease or end too late."""


@pytest.mark.parametrize(("name", "table"), [(name, x) for name, tables in INVALID.items() for x in tables])
@pytest.mark.parametrize("along", ["m", "k"])
@pytest.mark.parametrize("out_dtype", ["fp16", "fp32", "int32"])
def test_an_invalid_table_yields_nan(name: str, table: list[int], along: str, out_dtype: str) -> None:
    rng, is_int = np.random.default_rng(10), out_dtype == "int32"
    if along == "k":
        if name == "counts":
            return
        a, b = np.ones((64, 64), NUMPY["fp16"]), np.ones((64, 64), NUMPY["fp16"])
    else:
        a, b = random(rng, "fp16", *([3] * (name == "counts")), 64, 64), random(rng, "fp16", 3, 64, 64)
    if is_int:
        a, b = a.astype(np.int8), np.swapaxes(np.swapaxes(b, -1, -2).astype(np.int8), -1, -2)
    shape = (64, 64) if along == "m" and name != "counts" else (3, 64, 64)
    out = np.zeros(shape, np.int32 if is_int else NUMPY[out_dtype])
    grouping = Grouping(name, along)  # type: ignore[arg-type]
    options = {} if is_int else {"out_dtype": out_dtype}
    done = gemmsmith.simulate(a, b, **{name: np.array(table, np.int32)}, grouping=grouping, out=out, **options)
    assert done.hazards == []
    assert (out == -(2**31)).all() if is_int else np.isnan(out.astype(float)).all()


def test_ends_of_8_bit_slices_of_k_are_multiples_of_128() -> None:
    a, b = np.ones((64, 512), NUMPY["e4m3"]), np.ones((512, 64), NUMPY["e4m3"])
    for sizes, is_valid in (([128, 256], True), ([128, 100], False), ([1, 127], False)):
        d = gemmsmith.grouped_gemm(a, b, sizes=np.array(sizes, np.int32), along="k", backend="sim")
        assert np.isnan(d.astype(float)).all() != is_valid
        e = gemmsmith.grouped_gemm(a, b, sizes=np.array(sizes, np.int32), along="k", backend="reference")
        np.testing.assert_array_equal(np.isnan(d.astype(float)), np.isnan(e.astype(float)))


def test_a_row_does_not_depend_on_other_groups() -> None:
    """Nor on where its group begins: the same bits."""
    rng = np.random.default_rng(11)
    rows, b = random(rng, "bf16", 40, 200), random(rng, "bf16", 3, 200, 64)
    found = []
    for before, after in ((0, 0), (7, 30), (129, 1)):
        a = random(rng, "bf16", before + 40 + after, 200)
        a[before : before + 40] = rows
        sizes = np.array([before, 40, after], np.int32)
        d = gemmsmith.grouped_gemm(a, b, sizes=sizes, config=COOPERATIVE, backend="sim")
        found.append(d[before : before + 40].view(np.uint16))
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def test_a_plan_takes_other_tables_and_shapes() -> None:
    plan = gemmsmith.plan(
        Spec((128, 64), "bf16"), Spec((3, 64, 64), "bf16"), sizes=Spec((3,), "int32"), grouping=Grouping("sizes"),
        backend="sim",
    )  # fmt: skip
    rng = np.random.default_rng(12)
    for m, groups in ((128, 3), (128, 3), (300, 7)):
        sizes = random_sizes(rng, groups, m)
        a, b = random(rng, "bf16", m, 64), random(rng, "bf16", groups, 64, 64)
        d, ends = plan.run(a, b, sizes=sizes), sizes.cumsum()
        for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            check_group(d[end - size : end], a[end - size : end], b[g], BF16)
    with pytest.raises(ArgumentError, match="groups"):
        plan.run(a, random(rng, "bf16", 40, 64, 64), sizes=np.zeros(40, np.int32))


GIVEN: dict[str, Any] = {"a": Spec((256, 128), "bf16"), "b": Spec((4, 128, 64), "bf16"), "sizes": Spec((4,), "int32")}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sizes": None}, "offsets, sizes, counts: got none; use exactly one"),
        ({"offsets": Spec((4,), "int32")}, "offsets, sizes, counts: got offsets, sizes"),
        ({"sizes": Spec((4,), "int64")}, "sizes: got int64"),
        ({"sizes": Spec((5,), "int32")}, r"sizes: got shape \(5,\); grouped_gemm needs \(g = 4\)"),
        ({"sizes": Spec((4, 1), "int32")}, "sizes: got shape"),
        ({"sizes": Spec((8,), "int32", (2,))}, "strides"),
        ({"b": Spec((128, 64), "bf16")}, "b: got shape"),
        ({"b": Spec((0, 128, 64), "bf16"), "sizes": Spec((0,), "int32")}, "sizes: got 0 groups; use 1 to 1024"),
        ({"b": Spec((1025, 128, 64), "bf16"), "sizes": Spec((1025,), "int32")}, "1025 groups"),
        ({"b": Spec((4, 120, 64), "bf16")}, "k = 128"),
        ({"a": Spec((4, 256, 128), "bf16")}, "a: got shape"),
        ({"along": "n"}, "along: got 'n'"),
        ({"along": "k", "sizes": None, "counts": Spec((4,), "int32")}, "along: got 'k' with counts"),
        ({"zero_fill": "no"}, "zero_fill"),
        ({"operands": {"sizes": 1.0}, "epilogue": lambda acc, sizes: acc * sizes}, "operands: got the name sizes"),
        ({"scale": Spec((4,), "fp32"), "b": Spec((4, 128, 4), "bf16"), "epilogue": lambda acc, scale: acc * scale},
         r"scale: got shape \(4,\), whose 4 may be groups or columns; use \(4, 1, 1\)"),
        ({"bias": Spec((4, 64), "fp32"), "a": Spec((4, 128), "bf16"), "epilogue": lambda acc, bias: acc + bias},
         r"bias: got shape \(4, 64\), whose 4 may be groups or rows; use \(4, 1, 64\)"),
        ({"a": Spec((256, 128), "fp32"), "b": Spec((4, 128, 64), "fp32")}, "precision: got None for fp32"),
        ({"config": Config(splits=2)}, "splits: got 2 with groups along m by sizes; use 1"),
        ({"config": Config(serpentine=True)}, "serpentine"),
        ({"config": Config("tma", (128, 128, 64), (1, 1))}, "design: got tma with groups along m by sizes; use coop"),
        ({"epilogue": lambda acc: acc.mean(0)}, "out: got a mean over rows that are divided into groups; use a sum"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    check_refused(GIVEN, wrong, message)


def test_wrong_groupings_are_refused() -> None:
    for table_ in ("ends", np.array([3, 5])):
        with pytest.raises(ArgumentError, match="grouping: got the table .*; use one of offsets, sizes, counts"):
            Grouping(table_)  # type: ignore[arg-type]
    for name, wrong in (("role", "c"), ("capacity", 3), ("capacity", 0), ("capacity", 2048), ("capacity", None),
                        ("zero_fill", "no"), ("gathers", 1), ("scatters", None)):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"{name}: got {wrong!r}; use "):
            Grouping("offsets", **{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="role: got 'b'; use 'a', since the config says whether D.T is computed"):
        gemmsmith.plan(
            Spec((64, 64), "bf16"), Spec((2, 64, 64), "bf16"), offsets=Spec((2,), "int32"),
            grouping=Grouping("offsets", role="b"),
        )  # fmt: skip
    for table, along in (("offsets", "n"), ("counts", "k")):
        with pytest.raises(ArgumentError, match=f"along: got '{along}' with {table}"):
            Grouping(table, along)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"grouping: got str; use gemmsmith.Grouping\('offsets'\)"):
        gemmsmith.plan(
            Spec((64, 64), "bf16"), Spec((2, 64, 64), "bf16"), offsets=Spec((2,), "int32"),
            grouping="offsets",  # type: ignore[arg-type]
        )  # fmt: skip


def test_what_overlaps_is_refused() -> None:
    a, b = np.zeros((64, 64), NUMPY["bf16"]), np.zeros((2, 64, 64), NUMPY["bf16"])
    with pytest.raises(ArgumentError, match="out: overlaps c"):
        gemmsmith.grouped_gemm(
            a, b, sizes=np.zeros(2, np.int32), epilogue=lambda acc, c: acc + c, c=(c := a.copy()), out=c
        )


def test_empty_extents() -> None:
    for m, n, k in ((0, 64, 64), (30, 0, 64), (30, 64, 0), (0, 0, 0)):
        a, b = np.zeros((m, k), NUMPY["bf16"]), np.zeros((3, k, n), NUMPY["bf16"])
        sizes, out = np.array([0, m // 2, 0], np.int32), poisoned("bf16", m, n)
        assert not gemmsmith.grouped_gemm(a, b, sizes=sizes, out=out, backend="sim").astype(float).any()
        weights, along_k = poisoned("bf16", 3, k, n), np.zeros((m, n), NUMPY["bf16"])
        gemmsmith.grouped_gemm(a.T, along_k, sizes=sizes, along="k", out=weights, backend="sim")
        assert not weights.astype(float).any()


@pytest.mark.parametrize("columns", [24, 40, 88, 136])
def test_fp32_columns_of_tiles_of_any_width(columns: int) -> None:
    """Boxes that threads do not copy in whole steps."""
    rng, out = np.random.default_rng(13), poisoned("fp32", 100, 64)
    a, b, config = random(rng, "bf16", 100, 64), random(rng, "bf16", 2, 64, 64), COOPERATIVE.replace(swap_ab=True)
    done = gemmsmith.simulate(
        a, b, sizes=np.array([30, 70], np.int32), grouping=Grouping("sizes"), out=out, out_dtype="fp32",
        config=config.replace(tile=(128, columns, 64)),
    )  # fmt: skip
    assert done.hazards == []
    check_group(out[:30], a[:30], b[0], FP32)
    check_group(out[30:], a[30:], b[1], FP32)


def test_the_names_of_dtypes() -> None:
    assert (BF16.name, FP16.name, INT32.name) == ("bf16", "fp16", "int32")
