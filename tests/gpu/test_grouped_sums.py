"""Grouped GEMMs that add rows by atomics, and that reduce, and the index of the group, on a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config

torch = pytest.importorskip("torch")
from tests.gpu.group_data import DTYPES, GROUPED_CONFIGS, drawn, normal, random_rows, table  # noqa: E402

pytestmark = pytest.mark.gpu

OUTPUTS = ("fp32", "bf16", "fp16")
SUM_UNIT = 2.0**-20
"""Error of the tensor core's sums, relative to the sum of the terms' magnitudes."""
UNIT = {"fp32": 2.0**-20, "bf16": 2.0**-8, "fp16": 2.0**-11}


def products(a: Any, b: Any, sizes: list[int]) -> Any:
    """Return the rows of all groups in float64."""
    return torch.cat([x.double() @ y.double() for x, y in zip(a[: sum(sizes)].split(sizes), b, strict=True)])


@pytest.mark.parametrize("config", GROUPED_CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_with_one_destination_are_added(config: Config | None, dtype: str, seed: int) -> None:
    """Each addition rounds; rows behind the last group are NaN, and rows that no index names stay as they were."""
    rng, kind = random.Random(seed), "fp16" if dtype == "fp16" else "bf16"
    torch.manual_seed(seed)
    groups, n, k = rng.choice([1, 3, 8, 40]), (8 * rng.randint(1, 100), 8 * rng.randint(1, 100), 71)[seed], 136
    sizes, s = drawn(rng, groups), rng.choice([50, 500, 3000])
    total = sum(sizes)
    a, b, rows = normal(total + 100, k, dtype=kind), normal(groups, k, n, dtype=kind), random_rows(total + 100, s)
    a[total:] = float("nan")
    before = normal(s, n, dtype=dtype)
    out = before.clone()
    gemmsmith.grouped_gemm(
        a, b, sizes=table(sizes), scatter=rows, out=out, out_dtype=DTYPES[dtype], deterministic=False, config=config
    )
    is_row = (rows[:total] >= 0) & (rows[:total] < s)
    index, y = rows[:total][is_row].long(), products(a, b, sizes)[is_row]
    want = before.double().index_add(0, index, y)
    magnitude = before.double().abs().index_add(0, index, y.abs())
    additions = torch.bincount(index, minlength=s).double()[:, None] + 1
    terms = torch.zeros_like(want).index_add(0, index, products(a.abs(), b.abs(), sizes)[is_row])
    allowed = UNIT[dtype] * additions * magnitude + SUM_UNIT * terms
    assert bool(((out.double() - want).abs() <= allowed).all())
    unnamed = torch.ones(s, device="cuda", dtype=torch.bool)
    unnamed[index] = False
    assert torch.equal(out[unnamed], before[unnamed])


@pytest.mark.parametrize("config", GROUPED_CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", OUTPUTS)
def test_rows_are_added_inside_of_the_array(config: Config | None, dtype: str) -> None:
    """Around it is memory that no index reaches; and an invalid table stores NaN."""
    memory = torch.full((1200, 72), 77.0, device="cuda", dtype=DTYPES[dtype])
    out, b = memory[400:800], normal(3, 64, 72, dtype="fp16" if dtype == "fp16" else "bf16")
    a = torch.ones((400, 64), device="cuda", dtype=b.dtype)
    slots = table([-1, -2, -400, 400, 401, 799, 2**31 - 1, -(2**31)] * 50)
    options: dict[str, Any] = {"out_dtype": DTYPES[dtype], "deterministic": False, "config": config}
    gemmsmith.grouped_gemm(a, b, sizes=table([100, 0, 300]), scatter=slots, out=out, **options)
    assert bool((memory == 77).all())
    gemmsmith.grouped_gemm(a, b, sizes=table([100, 0, 301]), scatter=slots, out=out, **options)
    assert bool(out.isnan().all())
    assert bool((memory[:400] == 77).all() & (memory[800:] == 77).all())


def by_group(acc: Any, group: Any) -> Any:
    y = (acc + group) * (1 + (group == 2))
    return {"d": y, "columns": y.sum(-2), "rows": y.square().sum(-1), "both": y.sum((-2, -1))}


def check_sums(found: dict[str, Any], y: list[Any], rows: Any, epsilon: float) -> None:
    """Compare with the groups' matrices `y` in float64; `rows`: the index of the rows of each group."""
    for name, of, dims in (("columns", lambda z: z, 0), ("both", lambda z: z, (0, 1))):
        want = torch.stack([of(z).sum(dims) for z in y])
        scale = torch.stack([z.abs().sum(dims) for z in y])
        assert bool(((found[name].double() - want).abs() <= 2.0**-14 * scale + 1e-3).all()), name
    is_row = torch.zeros_like(found["rows"], dtype=torch.bool)
    for z, part in zip(y, rows, strict=True):
        is_row[part] = True
        want = z.square().sum(1)
        assert bool(((found["rows"][part].double() - want).abs() <= 2.0**-12 * want + 1e-3).all())
        assert bool(((found["d"][part].double() - z).abs() <= epsilon * z.abs() + 1e-2).all())
    assert bool((found["rows"][~is_row] == 0).all())


@pytest.mark.parametrize("config", GROUPED_CONFIGS, ids=str)
@pytest.mark.parametrize("form", ["sizes", "counts"])
@pytest.mark.parametrize("out_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_reductions_of_groups(config: Config | None, form: str, out_dtype: str, deterministic: bool) -> None:
    if deterministic and config and config.swap_ab:
        return
    rng = random.Random(len(form) + len(out_dtype))
    groups, n, k = rng.choice([3, 8, 40]), 8 * rng.randint(1, 100), 136
    sizes = drawn(rng, groups)
    b, parts, ends = normal(groups, k, n), [], torch.tensor(sizes).cumsum(0).tolist()
    if form == "sizes":
        a = normal(sum(sizes) + 100, k)
        a[sum(sizes) :] = float("nan")
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    else:
        a = normal(groups, 310, k)
        parts = [(g, slice(size)) for g, size in enumerate(sizes)]
        for g, size in enumerate(sizes):
            a[g, size:] = float("nan")
    shapes = {"columns": (groups, n), "rows": a.shape[:-1], "both": (groups,)}
    out = {name: torch.full(shape, float("nan"), device="cuda") for name, shape in shapes.items()}
    out["d"] = torch.full((*a.shape[:-1], n), float("nan"), device="cuda", dtype=DTYPES[out_dtype])
    options: dict[str, Any] = {"epilogue": by_group, "deterministic": deterministic, "config": config}
    options["out_dtype"] = DTYPES[out_dtype]
    gemmsmith.grouped_gemm(a, b, **{form: table(sizes)}, **options, out=out)
    y = [
        (a[part].double() @ b[g].double() + g) * (2 if g == 2 else 1)
        for g, part in enumerate(parts)
    ]  # fmt: skip
    check_sums(out, y, parts, 2.0**-8 if out_dtype == "bf16" else 2.0**-16)
    broken = table([*sizes[:-1], 10**6])
    found = gemmsmith.grouped_gemm(a, b, **{form: broken}, **options)
    assert all(bool(x.isnan().all()) for x in found.values())


@pytest.mark.parametrize("config", GROUPED_CONFIGS, ids=str)
@pytest.mark.parametrize("form", ["sizes", "counts"])
def test_rows_are_reduced_in_a_fixed_order(config: Config | None, form: str) -> None:
    """Twice the same bits."""
    rng = random.Random(5)
    groups, n, k = 24, 8 * rng.randint(40, 100), 200
    sizes = drawn(rng, groups)
    a, b = normal(*((groups, 310) if form == "counts" else (sum(sizes) + 100,)), k), normal(groups, k, n)

    def epilogue(acc: Any) -> Any:
        return acc, acc.sum(-1), acc.amax(-1), acc.mean(-1)

    runs = [
        gemmsmith.grouped_gemm(a, b, **{form: table(sizes)}, epilogue=epilogue, config=config, zero_fill=True)
        for _ in range(2)
    ]  # fmt: skip
    begin = 0
    for g, size in enumerate(sizes):
        part: Any = (g, slice(size)) if form == "counts" else slice(begin, begin + size)
        begin += size
        y = a[part].double() @ b[g].double()
        _, total, largest, mean = (x[part].double() for x in runs[0])
        assert bool(((total - y.sum(1)).abs() <= 2.0**-14 * y.abs().sum(1) + 1e-3).all())
        assert bool(((mean - y.mean(1)).abs() <= 2.0**-14 * y.abs().mean(1) + 1e-3).all())
        assert bool(((largest - y.amax(1)).abs() <= 1e-3 + 2.0**-14 * y.amax(1).abs()).all())
    assert all(torch.equal(x, y) for x, y in zip(runs[0][1:], runs[1][1:], strict=True))
    if form == "sizes":
        assert all(bool((x[begin:] == 0).all()) for x in runs[0])


@pytest.mark.parametrize("config", [None, GROUPED_CONFIGS[1], GROUPED_CONFIGS[4], GROUPED_CONFIGS[-1]], ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
def test_reductions_along_k(config: Config | None, deterministic: bool) -> None:
    sizes, m, n = [300, 0, 8, 1, 65, 0, 1000, 127], 520, 264
    a, b = normal(sum(sizes) + 50, m).T, normal(sum(sizes) + 50, n)
    found = gemmsmith.grouped_gemm(
        a, b, sizes=table(sizes), along="k", config=config, deterministic=deterministic, out_dtype=torch.float32,
        epilogue=by_group,
    )  # fmt: skip
    slices = zip(a[:, : sum(sizes)].split(sizes, 1), b[: sum(sizes)].split(sizes), strict=True)
    y = [(x.double() @ z.double() + g) * (2 if g == 2 else 1) for g, (x, z) in enumerate(slices)]
    check_sums(found, y, range(len(sizes)), 2.0**-14)


@pytest.mark.parametrize("config", [None, GROUPED_CONFIGS[1], GROUPED_CONFIGS[4], GROUPED_CONFIGS[-1]], ids=str)
def test_a_graph_adds_at_each_replay(config: Config | None) -> None:
    rng, groups, total, n, k, s = random.Random(7), 24, 3000, 264, 200, 700
    a, b, sizes, slots = normal(total, k), normal(groups, k, n), table([0] * groups), random_rows(total, s)
    out = torch.zeros(s, n, device="cuda")
    options: dict[str, Any] = {"sizes": sizes, "deterministic": False, "config": config}

    def run() -> Any:
        gemmsmith.grouped_gemm(a, b, **options, scatter=slots, out=out, out_dtype=torch.float32)
        return gemmsmith.grouped_gemm(a, b, **options, epilogue=by_group, out_dtype=torch.float32)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        host = drawn(rng, groups)
        while sum(host) > total:
            host[host.index(max(host))] = 0
        sizes.copy_(table(host))
        slots.copy_(random_rows(total, s))
        out.zero_()
        graph.replay()
        y, count = products(a, b, host), sum(host)
        is_row = (slots[:count] >= 0) & (slots[:count] < s)
        index, zeros = slots[:count][is_row].long(), torch.zeros_like(out, dtype=torch.float64)
        want, magnitude = zeros.index_add(0, index, y[is_row]), zeros.index_add(0, index, y[is_row].abs())
        assert bool(((out.double() - want).abs() <= 2.0**-16 * magnitude + 1e-3).all())
        ends = torch.tensor(host).cumsum(0).tolist()
        parts = [slice(end - size, end) for end, size in zip(ends, host, strict=True)]
        matrices = [(y[part] + g) * (2 if g == 2 else 1) for g, part in enumerate(parts)]
        check_sums(found, matrices, parts, 2.0**-14)
