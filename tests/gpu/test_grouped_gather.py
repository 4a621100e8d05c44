"""Grouped GEMMs with gathered and scattered rows on a GPU, group by group against float64, in marked outputs."""

from __future__ import annotations

import random
from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config

torch = pytest.importorskip("torch")
from tests.gpu.group_data import DTYPES, GROUPED_CONFIGS, check, drawn, normal, random_rows, table  # noqa: E402

pytestmark = pytest.mark.gpu

CONFIGS = [
    *GROUPED_CONFIGS,
    Config("cooperative", (256, 160, 64), (1, 1), 3),
    Config("cooperative", (128, 256, 64), (2, 1)),
    Config("cooperative", (128, 64, 128), (1, 1)),
]
MARK = 77.0


def unique_rows(count: int, extent: int) -> Any:
    """Return the indices of different rows, of which some are negative and some too large."""
    rows = torch.randperm(extent, device="cuda")[:count].int()
    rows[torch.rand(count, device="cuda") < 0.1] = -1
    rows[torch.rand(count, device="cuda") < 0.05] = extent
    return rows


def gathered(x: Any, rows: Any) -> Any:
    is_row = (rows >= 0) & (rows < len(x))
    zeros = torch.zeros((len(rows), *x.shape[1:]), device="cuda", dtype=x.dtype)
    zeros[is_row] = x[rows[is_row].long()]
    return zeros


def check_scattered(out: Any, rows: Any, sizes: list[int], a: Any, b: Any, dtype: str = "bf16") -> None:
    """Compare the rows of `out` that indices name, and require the mark in the others."""
    is_named, begin = torch.zeros(len(out), device="cuda", dtype=torch.bool), 0
    for group, size in enumerate(sizes):
        of_group = rows[begin : begin + size]
        is_row = (of_group >= 0) & (of_group < len(out))
        named = of_group[is_row].long()
        check(out[named], a[begin : begin + size][is_row], b[group], dtype)
        is_named[named] = True
        begin += size
    assert bool((out[~is_named] == MARK).all())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_rows_by_index(config: Config | None, seed: int) -> None:
    """NaN in rows of a that no index names does not get in."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    gathers, scatters = ((True, False), (False, True), (True, True))[seed % 3]
    groups, n, k = rng.choice([1, 3, 8, 40, 130]), 8 * rng.randint(1, 150), 8 * rng.randint(1, 150)
    dtype, sizes, t = rng.choice(["bf16", "fp16"]), drawn(rng, groups), rng.randint(1, 2000)
    total = sum(sizes)
    m = total + rng.choice([0, 100])
    a, b = normal(t if gathers else m, k, dtype=dtype), normal(groups, n, k, dtype=dtype).mT
    arrays: dict[str, Any] = {"gather": random_rows(m, t)} if gathers else {}
    rows_of_a = gathered(a, arrays["gather"]) if gathers else a
    if gathers:
        named = arrays["gather"][:total]
        unnamed = torch.ones(t, device="cuda", dtype=torch.bool)
        unnamed[named[(named >= 0) & (named < t)].long()] = False
        a[unnamed] = float("nan")
    out = torch.full((m + 500 if scatters else m, n), MARK, device="cuda", dtype=DTYPES[dtype])
    if scatters:
        arrays["scatter"] = unique_rows(m, len(out))
    gemmsmith.grouped_gemm(a, b, sizes=table(sizes), config=config, out=out, **arrays)
    if scatters:
        check_scattered(out, arrays["scatter"], sizes, rows_of_a, b, dtype)
        return
    begin = 0
    for group, size in enumerate(sizes):
        check(out[begin : begin + size], rows_of_a[begin : begin + size], b[group], dtype)
        begin += size
    assert bool((out[begin:] == 0).all())


@pytest.mark.parametrize("scales", ["rows", "blocks"])
@pytest.mark.parametrize("config", [
    None, Config("cooperative", (128, 128, 128), (2, 1)), Config("cooperative", (256, 128, 128), (1, 1), 3),
    Config("cooperative", (128, 64, 128), (1, 1), swap_ab=True), Config("pingpong", (64, 128, 128), (1, 1)),
], ids=str)  # fmt: skip
def test_scales_are_gathered(scales: str, config: Config | None) -> None:
    sizes, n, k, t = [65, 0, 130, 7, 512], 384, 640, 300
    m = sum(sizes)
    a, b, rows = normal(t, k, dtype="fp8"), normal(5, n, k, dtype="fp8").mT, random_rows(m, t)
    is_block = scales == "blocks"
    scale_a = torch.rand(t, k // 128 if is_block else 1, device="cuda") + 0.5
    scale_b = torch.rand(5, k // 128 if is_block else 1, n // 128 if is_block else n, device="cuda") + 0.5
    full_a = scale_a.double().repeat_interleave(128, 1) if is_block else scale_a.double()
    full_b = scale_b.double()
    if is_block:
        full_b = full_b.repeat_interleave(128, 1).repeat_interleave(128, 2)
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    gemmsmith.grouped_gemm(
        a, b, sizes=table(sizes), gather=rows, scale_a=scale_a, scale_b=scale_b, config=config, out=out
    )  # fmt: skip
    exact_a, exact_b, begin = gathered(a.double() * full_a, rows), b.double() * full_b, 0
    for group, size in enumerate(sizes):
        part = slice(begin, begin + size)
        product = exact_a[part] @ exact_b[group]
        size_of_terms = exact_a[part].abs() @ exact_b[group].abs()
        assert bool(((out[part].double() - product).abs() <= 2.0**-8 * product.abs() + 2.0**-12 * size_of_terms).all())
        begin += size


def test_a_layer_of_experts() -> None:
    """Tokens are gathered for their experts, and the results are stored slot by slot of each token."""
    torch.manual_seed(0)
    tokens, experts, top_k, width, hidden = 500, 24, 4, 256, 512
    x, up = normal(tokens, width), normal(experts, hidden, width).mT
    down = normal(experts, width, hidden).mT
    chosen = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    order = chosen.flatten().argsort(stable=True).int()
    offsets = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).int()
    h = gemmsmith.grouped_gemm(
        x, up, offsets=offsets, gather=order // top_k, epilogue=lambda acc: acc.relu(), out_dtype=torch.bfloat16
    )
    y = torch.full((tokens * top_k, width), float("nan"), device="cuda")
    gemmsmith.grouped_gemm(h, down, offsets=offsets, scatter=order, out=y, out_dtype=torch.float32)
    up_of, down_of = up.double()[chosen.flatten()], down.double()[chosen.flatten()]
    hidden_rows = (x.double().repeat_interleave(top_k, 0)[:, None] @ up_of).relu().bfloat16().double()
    want = (hidden_rows @ down_of)[:, 0]
    assert bool(((y.double() - want).abs() <= 0.01 * want.abs().max()).all())


@pytest.mark.parametrize("config", [None, GROUPED_CONFIGS[1], GROUPED_CONFIGS[4], GROUPED_CONFIGS[-1]], ids=str)
def test_a_graph_reads_the_indices_at_each_replay(config: Config | None) -> None:
    rng, groups, total, n, k, t = random.Random(7), 24, 3000, 264, 200, 700
    a, b = normal(t, k), normal(groups, n, k).mT
    sizes, rows, slots = table([0] * groups), random_rows(total, t), unique_rows(total, 4000)
    out = torch.empty(4000, n, device="cuda", dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"sizes": sizes, "gather": rows, "scatter": slots, "out": out, "config": config}
    gemmsmith.grouped_gemm(a, b, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemmsmith.grouped_gemm(a, b, **arguments)
    for _ in range(50):
        host = drawn(rng, groups)
        while sum(host) > total:
            host[host.index(max(host))] = 0
        sizes.copy_(table(host))
        rows.copy_(random_rows(total, t))
        slots.copy_(unique_rows(total, 4000))
        out.fill_(MARK)
        graph.replay()
        check_scattered(out, slots, host, gathered(a, rows), b)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_indices_of_no_row_stay_inside_the_arrays(config: Config | None) -> None:
    """Around both arrays there is memory that no index reaches."""
    memory_of_a = torch.full((900, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    memory = torch.full((1200, 64), MARK, device="cuda", dtype=torch.bfloat16)
    a, out, b = memory_of_a[300:600], memory[400:800], normal(3, 64, 64).mT
    a.copy_(normal(300, 64))
    rows = table([-1, -2, -300, 300, 301, 599, 2**31 - 1, -(2**31)] * 50)
    slots = table([-1, -2, -400, 400, 401, 799, 2**31 - 1, -(2**31)] * 50)
    y = gemmsmith.grouped_gemm(a, b, sizes=table([100, 0, 300]), gather=rows, config=config)
    assert not bool(y.any())
    gemmsmith.grouped_gemm(
        a, b, sizes=table([100, 0, 300]), gather=table(range(400)) % 300, scatter=slots, out=out, config=config
    )
    assert bool((memory == MARK).all())
