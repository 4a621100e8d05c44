"""Fused epilogues on a GPU against float64: every kind of node, random sizes, layouts, dtypes and configs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.epilogues import CASES, columns_of, judge, operands
from tests.test_simulated_epilogues import suited

import gemmsmith
from gemmsmith import Config, ConfigError
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.product import exact
from gemmsmith.core.dtypes import as_dtype

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CONFIGS = [
    None,
    None,
    Config(tile=(128, 256, 64), cluster=(2, 1), stages=3),
    Config(tile=(256, 128, 64), cluster=(1, 2), stages=3),
    Config(tile=(128, 64, 64), cluster=(1, 1), stages=4),
    Config(tile=(192, 96, 64), cluster=(1, 1), stages=3, consumers=3),
    Config(tile=(64, 48, 64), cluster=(1, 1), consumers=1),
    Config("multistage", (128, 128, 64), (2, 1), 3),
]
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


def on_gpu(x, dtype: str):
    """An operand's copy on the GPU; numbers stay."""
    if isinstance(x, float):
        return x
    return torch.from_numpy(np.asarray(x, np.float32)).to("cuda", TORCH[dtype])


def _bits(x):
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(12))
def test_random_problem(name: str, seed: int) -> None:
    rng, case = random.Random(1000 * seed + len(name)), CASES[name]
    data = np.random.default_rng(seed)
    dtype = rng.choice(["bf16", "bf16", "fp16"])
    m, n, k = (rng.choice([rng.randint(1, 700), 8 * rng.randint(1, 90)]) for _ in range(3))
    batch = rng.choice([None, None, None, 2])
    n = columns_of(case, n)
    config = rng.choice(CONFIGS)
    if config is not None:
        config, n = suited(case, config, n)
    elif case.whole_rows == -1:
        n = min(n, 128)
    lead = () if batch is None else (batch,)
    a = torch.randn(*lead, m, k, device="cuda").to(TORCH[dtype])
    b = torch.randn(*lead, n, k, device="cuda").to(TORCH[dtype]).transpose(-1, -2)
    given = operands(case, data, m, n, as_dtype(dtype), batch)
    there = {key: on_gpu(x, dtype) for key, x in given.items()}
    try:
        plan = gemmsmith.plan(a, b, epilogue=case.function, operands=there, config=config)
        first, second = (plan.run(a, b, operands=there) for _ in range(2))
    except ConfigError:
        return  # the tile does not suit it, and says so
    assert plan.bound
    product = exact(a.cpu().double().numpy(), b.cpu().double().numpy())
    want = execute(plan.bound.written, product, {key: np.asarray(x, np.float64) for key, x in given.items()})
    names = [r.name for r in plan.bound.graph.results]
    results = [x if isinstance(x, dict) else dict(zip(names, x if isinstance(x, tuple) else (x,), strict=True))
               for x in (first, second)]  # fmt: skip
    for key in names:
        assert torch.equal(_bits(results[0][key]), _bits(results[1][key])), f"{key} differs"
    judge(plan.bound.graph, {key: x.float().cpu().numpy() for key, x in results[0].items()}, want, product)


def test_closures_and_defaults_are_seen() -> None:
    a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((64, 64), (64, 64)))
    factor = 2.0

    def scaled(acc, more=1.0):
        return acc * factor + more

    once = gemmsmith.gemm(a, b, epilogue=scaled, out_dtype="fp32")
    factor = 3.0
    again = gemmsmith.gemm(a, b, epilogue=scaled, out_dtype="fp32")
    torch.testing.assert_close((again - 1) / 3, (once - 1) / 2)


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
    want = a.double() @ b.double() + bias.double()
    assert (out["out1"].double() - want).abs().max() < 2**-7 * want.abs().max()
