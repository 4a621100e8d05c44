"""Fused epilogues on a GPU against float64: every kind of node, random sizes, layouts, dtypes and configs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from tests.epilogue.graphs import data, graphs
from tests.epilogues import (
    CASES,
    Case,
    check_function,
    columns_of,
    function_graph,
    fusion,
    judge,
    judge_random,
    operands,
)
from tests.simulated.test_epilogues import fit_case

import gemmsmith
from gemmsmith import Config, ConfigError
from gemmsmith.arrays import as_numpy
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.matmul import matmul_float64
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.frontend.fusions import NAMED_FUSIONS
from gemmsmith.graph.functions import FUNCTIONS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CONFIGS = [
    None,
    None,
    Config(tile=(128, 256, 64), cluster=(2, 1), stages=3),
    Config(tile=(256, 128, 64), cluster=(1, 2), stages=3),
    Config(tile=(128, 64, 64), cluster=(1, 1), stages=4),
    Config(tile=(256, 192, 64), cluster=(1, 2), stages=2, raster="n"),
    Config(tile=(256, 152, 64), cluster=(1, 2), stages=2, raster="n", sync_clusters=True),
    Config(tile=(128, 128, 64), cluster=(2, 1), stages=6, alias_epilogue=True),
    Config(tile=(192, 96, 64), cluster=(1, 1), stages=3, consumers=3),
    Config(tile=(192, 192, 64), cluster=(1, 1), stages=2, consumers=3),
    Config(tile=(64, 48, 64), cluster=(1, 1), consumers=1),
    Config("tma", (128, 128, 64), (2, 1), 3),
    Config("pingpong", (64, 128, 64), (2, 1)),
    Config("pingpong", (128, 176, 64), (2, 1), 3),
    Config(tile=(128, 64, 64), cluster=(1, 1), splits=0),
    Config(tile=(128, 32, 64), cluster=(1, 1), swap_ab=True),
    Config(tile=(256, 144, 64), cluster=(1, 1), stages=3, swap_ab=True),
    Config(tile=(192, 104, 64), cluster=(1, 2), consumers=3, stages=3, swap_ab=True),
    Config(tile=(128, 248, 64), cluster=(1, 1), stages=3, swap_ab=True),
    Config("pingpong", (128, 104, 64), cluster=(2, 1), stages=5, swap_ab=True),
    Config(tile=(64, 96, 64), cluster=(2, 2), consumers=1, stages=6, swap_ab=True),
    Config(tile=(128, 64, 64), cluster=(4, 1), consumers=1, stages=6, swap_ab=True),
    Config(tile=(64, 160, 64), cluster=(1, 1), consumers=1, stages=6, cluster_splits=2, swap_ab=True),
    Config(tile=(128, 80, 64), cluster=(1, 1), consumers=1, stages=6, splits=0, swap_ab=True),
]
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


def named(names, done):
    """What a call gave, by the results' names."""
    return (
        done if isinstance(done, dict) else dict(zip(names, done if isinstance(done, tuple) else (done,), strict=True))
    )


def on_gpu(x, dtype: str):
    """An operand's copy on the GPU; numbers stay."""
    if isinstance(x, float):
        return x
    if np.asarray(x).dtype.kind in "ib":
        return torch.from_numpy(np.asarray(x)).to("cuda")
    return torch.from_numpy(np.asarray(x, np.float32)).to("cuda", TORCH[dtype])


def _bits(x):
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(16))
def test_random_problem(name: str, seed: int) -> None:
    rng, case = random.Random(1000 * seed + len(name)), CASES[name]
    data = np.random.default_rng(seed)
    dtype = rng.choice(["bf16", "bf16", "fp16"])
    m, n, k = (rng.choice([rng.randint(1, 700), 8 * rng.randint(1, 90)]) for _ in range(3))
    batch = rng.choice([None, None, None, 2])
    n = columns_of(case, n)
    config = rng.choice(CONFIGS)
    if config is not None:
        config, n = fit_case(case, config, n)
    elif case.whole_rows == -1:
        n = min(n, 128)
    lead = () if batch is None else (batch,)
    a = torch.randn(*lead, m, k, device="cuda").to(TORCH[dtype])
    b = torch.randn(*lead, n, k, device="cuda").to(TORCH[dtype]).transpose(-1, -2)
    more = operands(case, data, m, n, as_dtype(dtype), batch)
    there = {key: on_gpu(x, dtype) for key, x in more.items()}
    try:
        plan = gemmsmith.plan(a, b, epilogue=case.function, operands=there, config=config)
        first, second = (plan.run(a, b, operands=there) for _ in range(2))
    except ConfigError:
        return  # the tile does not suit it, and says so
    product = matmul_float64(a.cpu().double().numpy(), b.cpu().double().numpy())
    expected = execute(
        plan._planned.binding.source_graph, product, {key: np.asarray(x, np.float64) for key, x in more.items()}
    )
    names = [r.name for r in plan._planned.binding.graph.results]
    results = [x if isinstance(x, dict) else dict(zip(names, x if isinstance(x, tuple) else (x,), strict=True))
               for x in (first, second)]  # fmt: skip
    for key in names:
        assert torch.equal(_bits(results[0][key]), _bits(results[1][key])), f"{key} differs"
    judge(
        plan._planned.binding.graph, {key: x.float().cpu().numpy() for key, x in results[0].items()}, expected, product
    )


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("design", ["cooperative", "pingpong"])
@pytest.mark.parametrize("n", [1024, 1000, 1001])  # masks by TMA, by threads; nothing by TMA
def test_masks_and_integers(n: int, design: str, swap_ab: bool) -> None:
    """A byte that is not zero is True."""
    m, k = 700, 96
    a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((m, k), (k, n)))
    mask = torch.tensor([0, 0, 1, 2, 127, 128, 255], device="cuda", dtype=torch.uint8)
    mask = mask[torch.randint(len(mask), (m, n), device="cuda")].view(torch.bool)
    whole = torch.randint(-(2**20), 2**20, (m, n), device="cuda", dtype=torch.int32)
    config = Config(design, (128, 128, 64), (2, 1), 3, consumers=2, swap_ab=swap_ab)

    def masked(acc, mask, whole):
        return acc * mask, whole * mask

    options = {"operands": {"mask": mask, "whole": whole}, "config": config, "out_dtype": "fp32"}
    plan = gemmsmith.plan(a, b, epilogue=masked, **options)
    assert plan._planned.spec.tma_names >= ({"mask", "whole"} if n == 1024 else {"whole"} if n == 1000 else set())
    product, selected = gemmsmith.gemm(a, b, epilogue=masked, **options)
    is_nonzero = mask.view(torch.uint8) != 0
    assert torch.equal(selected, torch.where(is_nonzero, whole, 0).float())
    torch.testing.assert_close(product, torch.where(is_nonzero, a.float() @ b.float(), 0), rtol=1e-3, atol=1e-3)


def test_closures_and_defaults_are_seen() -> None:
    a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((64, 64), (64, 64)))
    factor = 2.0

    def scaled(acc, more=1.0):
        return acc * factor + more

    once = gemmsmith.gemm(a, b, epilogue=scaled, out_dtype="fp32")
    factor = 3.0
    again = gemmsmith.gemm(a, b, epilogue=scaled, out_dtype="fp32")
    torch.testing.assert_close((again - 1) / 3, (once - 1) / 2)


def test_reductions_of_constants_and_of_nothing() -> None:
    def rows(acc):
        constant = torch.where(acc > 0, 3.0, 3.0)
        return acc, acc.sum(-1), constant.sum(-1), constant.mean(), acc.logsumexp(-1), acc.sum()

    for m, n in ((70, 96), (24, 0), (0, 40)):
        a, b = torch.randn(m, 16, device="cuda").bfloat16(), torch.randn(16, n, device="cuda").bfloat16()
        _, sums, threes, three, soft, everything = gemmsmith.gemm(a, b, epilogue=rows)
        product = (a.double() @ b.double()).float()
        torch.testing.assert_close(sums, product.sum(-1), atol=1e-3, rtol=1e-3)
        assert (threes == 3 * n).all()
        assert three == 3 if m * n else three.isnan()
        torch.testing.assert_close(soft, product.logsumexp(-1), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(everything, product.sum(), atol=1e-2, rtol=1e-3)


def everything_reduced(acc):
    return acc.sum(0).bfloat16(), acc.sum(1), acc.mean(), acc.amax(0), acc.amin(1).half(), acc.logsumexp((0, 1))


@pytest.mark.parametrize(("m", "n"), [(4096, 16384), (8200, 1000), (40, 70000)])
def test_second_steps_of_many_partials(m: int, n: int) -> None:
    """Several CTAs combine them: the same bits in every call, in graphs, and on two streams at once."""
    a, b = torch.randn(m, 64, device="cuda").bfloat16(), torch.randn(64, n, device="cuda").bfloat16()
    plan = gemmsmith.plan(a, b, epilogue=everything_reduced)
    assert plan._planned.launches.flag_bytes
    product = a.double() @ b.double()
    found = plan.run(a, b)
    for got, want, dim in zip(found[:2], (product.sum(0), product.sum(1)), (0, 1), strict=True):
        error = product.abs().sum(dim) * 1e-5 + want.abs() * torch.finfo(got.dtype).eps
        assert ((got.double() - want).abs() <= error).all()
    torch.testing.assert_close(found[2].double(), product.mean(), atol=1e-5 * float(product.abs().mean()), rtol=0)
    torch.testing.assert_close(found[3].double(), product.amax(0), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found[4].double(), product.amin(1), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found[5].double(), product.flatten().logsumexp(0), atol=1e-3, rtol=1e-5)
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.graph(graph):
        captured = plan.run(a, b)
    others = []
    torch.cuda.synchronize()
    for _ in range(20):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                others.append(plan.run(a, b))
    torch.cuda.synchronize()
    for other in [captured, *others]:
        assert all(map(torch.equal, other, found))


def test_graph_capture() -> None:
    a, b, bias = (torch.randn(s, device="cuda").bfloat16() for s in ((256, 128), (128, 192), (192,)))
    plan = gemmsmith.plan(a, b, epilogue=CASES["aux"].function, bias=bias)
    out = {key: torch.empty(256, 192, device="cuda", dtype=torch.bfloat16) for key in ("out", "out1")}
    plan.run(a, b, out, bias=bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(a, b, out, bias=bias)
    a.normal_()
    graph.replay()
    torch.cuda.synchronize()
    expected = a.double() @ b.double() + bias.double()
    assert (out["out1"].double() - expected).abs().max() < 2**-7 * expected.abs().max()


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_function(name: str) -> None:
    for fast_math, output in ((True, "bf16"), (True, "fp32"), (False, "fp32")):
        graph, domain = function_graph(name)
        a = torch.randn(300, 16, device="cuda").bfloat16()
        b = torch.randn(16, 200, device="cuda").bfloat16()
        actual = gemmsmith.gemm(a, b, epilogue=graph, out_dtype=output, fast_math=fast_math)
        product = matmul_float64(a.cpu().double().numpy(), b.cpu().double().numpy())
        check_function(name, actual.float().cpu().numpy(), product, output, fast_math, domain)


@pytest.mark.parametrize("name", sorted(NAMED_FUSIONS))
@pytest.mark.parametrize("shape", [(1000, 1040, 264), (130, 208, 70)])
def test_every_ready_made_fusion(name: str, shape: tuple[int, int, int]) -> None:
    epilogue, kinds = fusion(name)
    m, n, k = shape
    n = 128 if "TopK" in name else n
    case = Case(epilogue, kinds, gated="glu" in name)
    more = operands(case, np.random.default_rng(), m, n, as_dtype("bf16"), None)
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16().T
    there = {key: on_gpu(x, "bf16") for key, x in more.items()}
    plan = gemmsmith.plan(a, b, epilogue=epilogue, operands=there)
    done = plan.run(a, b, operands=there)
    product = matmul_float64(a.cpu().double().numpy(), b.cpu().double().numpy())
    expected = execute(
        plan._planned.binding.source_graph, product, {key: np.asarray(x, np.float64) for key, x in more.items()}
    )
    names = [r.name for r in plan._planned.binding.graph.results]
    results = named(names, done)
    judge(plan._planned.binding.graph, {key: x.float().cpu().numpy() for key, x in results.items()}, expected, product)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(), seed=some.integers(0, 1000), m=some.integers(1, 400), n=some.integers(1, 400))
def test_random_graphs(graph: EpilogueGraph, seed: int, m: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    a = torch.randn(m, 40, device="cuda").bfloat16()
    b = torch.randn(40, n, device="cuda").bfloat16()
    more = data(rng, graph, (m, n))
    there = {}
    for key, x in more.items():
        kind = torch.float32 if getattr(x, "dtype", None) == np.float32 else torch.bfloat16
        there[key] = x if isinstance(x, float) else torch.from_numpy(np.asarray(x, np.float32)).to("cuda", kind)
    done = gemmsmith.gemm(a, b, epilogue=graph, operands=there)
    product = matmul_float64(a.cpu().double().numpy(), b.cpu().double().numpy())
    expected = execute(graph, product, more)
    names = [r.name for r in graph.results]
    results = named(names, done)
    actual = {key: as_numpy(x.cpu(), key) for key, x in results.items()}
    judge_random(graph, actual, expected, product, more)
