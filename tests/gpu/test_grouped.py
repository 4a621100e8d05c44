"""Grouped GEMMs on a GPU, group by group against float64, in poisoned outputs."""

from __future__ import annotations

import random
from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, ConfigError

torch = pytest.importorskip("torch")
from tests.gpu.group_data import DTYPES, check, drawn, normal, table  # noqa: E402

pytestmark = pytest.mark.gpu

CONFIGS = [
    None,
    Config("cooperative", (256, 176, 64), (2, 1), 3),
    Config("cooperative", (128, 256, 64), (2, 1)),
    Config("cooperative", (128, 256, 64), (1, 2), raster="n", alias_epilogue=True),
    Config("cooperative", (256, 128, 64), (1, 1)),
    Config("cooperative", (128, 16, 64), (1, 1), swap_ab=True, stages=6),
    Config("cooperative", (64, 8, 256), (1, 1), consumers=1, swap_ab=True, stages=5),
    Config("pingpong", (64, 256, 64), (2, 1)),
    Config("pingpong", (128, 128, 64), (1, 1)),
    Config("pingpong", (64, 64, 64), (1, 2), swap_ab=True),
    Config("mma_multistage", (128, 128, 32), (1, 1), 3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_groups(config: Config | None, seed: int) -> None:
    """Rows behind the last group, NaN in a, become zero, or keep what they hold."""
    rng = random.Random(seed)
    groups, n, k = rng.choice([1, 3, 8, 40, 130]), 8 * rng.randint(1, 150), 8 * rng.randint(1, 150)
    dtype, zero_fill, sizes = rng.choice(["bf16", "fp16"]), seed % 2 == 0, drawn(rng, groups)
    m, row_major = sum(sizes) + rng.choice([0, 100]), rng.random() < 0.3
    a = normal(m, k, dtype=dtype)
    b = normal(groups, k, n, dtype=dtype) if row_major else normal(groups, n, k, dtype=dtype).mT
    a[sum(sizes) :] = float("nan")
    out = torch.full((m, n), float("nan"), device="cuda", dtype=DTYPES[dtype])
    gemmsmith.grouped_gemm(a, b, sizes=table(sizes), zero_fill=zero_fill, config=config, out=out)
    begin = 0
    for group, size in enumerate(sizes):
        check(out[begin : begin + size], a[begin : begin + size], b[group], dtype)
        begin += size
    behind = out[begin:]
    assert bool((behind == 0).all() if zero_fill else behind.isnan().all())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_that_are_valid(config: Config | None) -> None:
    rng = random.Random(1)
    groups, m, n, k = 40, 300, 520, 264
    counts = drawn(rng, groups)
    a, b = normal(groups, m, k), normal(groups, n, k).mT
    out = torch.full((groups, m, n), 77.0, device="cuda", dtype=torch.bfloat16)
    for group, count in enumerate(counts):
        a[group, count:] = float("nan")
    gemmsmith.grouped_gemm(a, b, counts=table(counts), config=config, out=out)
    for group, count in enumerate(counts):
        check(out[group, :count], a[group, :count], b[group])
        assert bool((out[group, count:] == 77).all())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("majors", ["nn", "nt", "tn", "tt"])
def test_slices_of_k(config: Config | None, majors: str) -> None:
    """An element of a neighbor that is not finite does not get in."""
    sizes, m, n = [300, 0, 8, 1, 65, 0, 1000, 127], 520, 264
    k = sum(sizes) + 50
    a = normal(m, k) if majors[0] == "n" else normal(k, m).mT
    b = normal(k, n) if majors[1] == "n" else normal(n, k).mT
    a[:, 300:308], a[:, sum(sizes) :], b[sum(sizes) :] = float("inf"), float("nan"), float("nan")
    out = torch.full((len(sizes), m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    try:
        gemmsmith.grouped_gemm(a, b, sizes=table(sizes), along="k", config=config, out=out)
    except ConfigError:
        assert config
        assert config.design == "pingpong" or config.alias_epilogue
        return
    begin = 0
    for group, size in enumerate(sizes):
        if group != 2:
            check(out[group], a[:, begin : begin + size], b[begin : begin + size])
        begin += size


def test_blocks_of_scales() -> None:
    sizes, n, k = [65, 0, 130, 7, 512], 384, 640
    a, b = normal(sum(sizes), k, dtype="fp8"), normal(5, n, k, dtype="fp8").mT
    scale_a = torch.rand(sum(sizes), k // 128, device="cuda") + 0.5
    scale_b = torch.rand(5, k // 128, n // 128, device="cuda") + 0.5
    out = torch.full((sum(sizes), n), float("nan"), device="cuda", dtype=torch.bfloat16)
    gemmsmith.grouped_gemm(a, b, sizes=table(sizes), scale_a=scale_a, scale_b=scale_b, out=out)
    begin = 0
    for group, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        exact_a = a[rows].double() * scale_a[rows].double().repeat_interleave(128, 1)
        exact_b = b[group].double() * scale_b[group].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        product = exact_a @ exact_b
        size_of_terms = exact_a.abs() @ exact_b.abs()
        assert bool(((out[rows].double() - product).abs() <= 2.0**-8 * product.abs() + 2.0**-12 * size_of_terms).all())
        begin += size


@pytest.mark.parametrize("along", ["m", "k"])
@pytest.mark.parametrize("config", [None, CONFIGS[2], CONFIGS[5]], ids=str)
def test_a_graph_reads_the_table_at_each_replay(along: Any, config: Config | None) -> None:
    rng, groups, total, n, k = random.Random(7), 24, 3000, 264, 200
    a = normal(total, k) if along == "m" else normal(total, k).mT
    b = normal(groups, n, k).mT if along == "m" else normal(total, n)
    shape = (total, n) if along == "m" else (groups, k, n)
    out, sizes = torch.empty(shape, device="cuda", dtype=torch.bfloat16), table([0] * groups)
    gemmsmith.grouped_gemm(a, b, sizes=sizes, along=along, out=out, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemmsmith.grouped_gemm(a, b, sizes=sizes, along=along, out=out, config=config)
    for _ in range(200):
        host = drawn(rng, groups)
        while sum(host) > total:
            host[host.index(max(host))] = 0
        sizes.copy_(table(host))
        out.fill_(float("nan"))
        graph.replay()
        begin = 0
        for group, size in enumerate(host):
            rows = slice(begin, begin + size)
            if along == "m":
                check(out[rows], a[rows], b[group])
            else:
                check(out[group], a[:, rows], b[rows])
            begin += size
        assert along == "k" or not bool(out[begin:].any())


def test_a_rows_result_does_not_depend_on_other_groups() -> None:
    a, b = normal(400, 512), normal(3, 256, 512).mT
    for config in CONFIGS:
        first = gemmsmith.grouped_gemm(a, b, sizes=table([100, 30, 200]), config=config)
        second = gemmsmith.grouped_gemm(a[70:], b, sizes=table([30, 30, 77]), config=config)
        assert torch.equal(first[70:207], second[:137])


@pytest.mark.parametrize("sizes", [[-1, 20, 30], [100, 200, 200], [2**31 - 1] * 3, [-(2**31)] * 3])
@pytest.mark.parametrize("config", [None, CONFIGS[7], CONFIGS[-1]], ids=str)
def test_a_broken_table_stays_inside_the_arrays(sizes: list[int], config: Config | None) -> None:
    a, b = normal(400, 64), normal(3, 64, 64).mT
    memory = torch.full((1200, 64), 5.0, device="cuda", dtype=torch.bfloat16)
    gemmsmith.grouped_gemm(a, b, sizes=table(sizes), config=config, out=memory[400:800])
    assert bool(memory[400:800].isnan().all())
    assert bool((memory[:400] == 5).all())
    assert bool((memory[800:] == 5).all())
