"""Batch-invariant plans on a GPU: the bits of rows for M from 1 to 8192; kernels and the simulator agree in them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.epilogues import CASES, columns_of, operands  # noqa: E402
from tests.gpu.judges import same_bits  # noqa: E402
from tests.gpu.test_epilogues import on_gpu  # noqa: E402
from tests.gpu.test_gemm import CONFIGS, DTYPES, TORCH, judge  # noqa: E402

import gemmsmith  # noqa: E402
from gemmsmith import Config, ConfigError  # noqa: E402
from gemmsmith.core.dtypes import as_dtype  # noqa: E402
from gemmsmith.core.epilogue_spec import EpilogueSpec  # noqa: E402
from gemmsmith.tuning.config_table import configs_for_epilogue  # noqa: E402

pytestmark = pytest.mark.gpu

MOST = 8192
ROWS = (1, 2, 7, 15, 16, 33, 64, 65, 100, 127, 128, 200, 256, 500, 512, 777, 1000, 1024, 2048, 3001, 4096, 5555, 8191)
SHAPES = [(4096, 4096), (2112, 7168), (1024, 8192), (512, 16384), (14336, 4096), (28672, 512), (1001, 777), (24, 4096),
          (1, 300), (130, 0)]  # fmt: skip
IN_ORDER = [c for c in CONFIGS if c and c.splits == c.cluster_splits == 1 and not c.serpentine]


def wild(rows: int, columns: int, dtype: str, turned: bool = False, pad: int = 0) -> Any:
    """Numbers of very different sizes, of both signs; a tenth of them, and all of every 13th row, zeros of either sign;
    every 17th column negative."""
    x = torch.randn(rows, columns, device="cuda")
    x *= torch.exp2(torch.randint(-8, 5, (rows, columns), device="cuda").float())
    x = torch.where(torch.rand_like(x) < 0.1, x * 0.0, x)
    x[::13] *= 0.0
    x[:, ::17] = -x[:, ::17].abs()
    return laid(x.to(TORCH[dtype]), turned, pad)


def laid(x: Any, turned: bool, pad: int = 0) -> Any:
    """A copy, column-major where `turned`, its rows (or columns) `pad` elements longer in memory."""
    x = x.T if turned else x
    store = torch.full((x.shape[0], x.shape[1] + pad), float("nan"), device="cuda", dtype=x.dtype)
    store[:, : x.shape[1]] = x
    result = store[:, : x.shape[1]]
    return result.T if turned else result


def run(a: Any, b: Any, out: Any = None, operands: Any = None, **options: Any) -> Any:
    return gemmsmith.plan(a, b, out=out, operands=operands, **options).run(a, b, out, operands=operands)


@pytest.mark.parametrize(("n", "k", "layout"), [
    (n, k, layout) for i, (n, k) in enumerate(SHAPES) for layout in ("ntn", ("nnn", "tnn", "ttt")[i % 3])
])  # fmt: skip
def test_rows_of_products(n: int, k: int, layout: str) -> None:
    """Of any M, in any place, beside rows that are NaN; D row- or column-major."""
    rng = random.Random(f"{n}x{k} {layout}")
    a_turned, b_turned, d_turned = (x == "t" for x in layout)
    pad = rng.choice([0, 8, 3])
    a, b = wild(MOST, k, "bf16", a_turned, pad), wild(k, n, "bf16", b_turned)

    def product(rows: Any) -> Any:
        out = torch.full((n, len(rows)) if d_turned else (len(rows), n), float("nan"), device="cuda").bfloat16()
        return run(rows, b, out.T if d_turned else out, batch_invariant=True)

    whole = product(a)
    judge(whole[:300].contiguous(), a[:300].contiguous(), b, "fp32")
    for m in ROWS:
        first = rng.randint(0, MOST - m)
        expected = whole[first : first + m].contiguous()
        assert same_bits(product(laid(a[first : first + m], a_turned, pad)).contiguous(), expected), m
        behind = rng.randint(0, 300)
        among = torch.full((behind + m + 5, k), float("nan"), device="cuda", dtype=a.dtype)
        among[behind : behind + m] = a[first : first + m]
        actual = product(laid(among, a_turned, pad))[behind : behind + m].contiguous()
        assert same_bits(actual, expected), (m, behind)


@pytest.mark.parametrize(("dtype", "accumulate", "output"), [
    ("fp16", "fp32", "fp32"), ("fp16", "fp16", "fp16"), ("bf16", "fp32", "fp32"),
])  # fmt: skip
def test_rows_of_other_dtypes(dtype: str, accumulate: str, output: str) -> None:
    a, b = wild(MOST, 3000, dtype), wild(3000, 1536, dtype)
    if accumulate == "fp16":
        a, b = a / 64, b / 64
    options = {"accumulate": accumulate, "out_dtype": output, "batch_invariant": True}
    whole = run(a, b, **options)
    for m in ROWS:
        assert same_bits(run(a[MOST - m :].clone(), b, **options), whole[MOST - m :]), m


def test_rows_of_batches() -> None:
    """Folded into M or not; the same rows wherever they are."""
    a, b = wild(6 * 300, 1024, "bf16").view(6, 300, 1024), wild(1024, 1280, "bf16")
    expected = run(a.view(1800, 1024), b, batch_invariant=True).view(6, 300, 1280)
    strided = torch.stack([laid(x, turned=False, pad=8) for x in a])[:, ::2]
    assert same_bits(run(a, b, batch_invariant=True), expected)
    assert same_bits(run(strided, b, batch_invariant=True), expected[:, ::2].contiguous())
    assert same_bits(run(a, b.expand(6, 1024, 1280).contiguous(), batch_invariant=True), expected)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_epilogues(name: str) -> None:
    """Matrices, and reductions along a row."""
    case, rows, k = CASES[name], 2500, 1000
    n = {0: columns_of(case, 1000), -1: 200}.get(case.whole_rows, case.whole_rows * 4)
    rng = np.random.default_rng()
    a, b = wild(rows, k, "bf16"), wild(k, n, "bf16")
    given = {key: on_gpu(x, "bf16") for key, x in operands(case, rng, rows, n, as_dtype("bf16"), None).items()}
    options = {"epilogue": case.function, "batch_invariant": True}
    whole = by_name(run(a, b, operands=given, **options))
    of_rows = [key for key, x in whole.items() if x.shape[:1] == (rows,)]
    for m in (1, 2, 33, 64, 65, 128, 300, 1000, 1999):
        first = int(rng.integers(0, rows - m))
        part = {key: x[first : first + m].clone() if getattr(x, "shape", ())[:1] == (rows,) else x
                for key, x in given.items()}  # fmt: skip
        actual = by_name(run(a[first : first + m].clone(), b, operands=part, **options))
        for key in of_rows:
            assert same_bits(actual[key], whole[key][first : first + m]), (key, m)


def test_sums_of_rows_that_tma_cannot_reach() -> None:
    """One row alone is aligned, whatever its stride."""
    a, b, c = wild(700, 520, "bf16"), wild(520, 3001, "bf16"), wild(700, 3001, "bf16", pad=2)

    def f(acc, c):
        x = acc * c + acc
        return x, (x * c).sum(-1), x.logsumexp(-1)

    whole = run(a, b, operands={"c": c}, epilogue=f, batch_invariant=True)
    for m in (1, 2, 64, 129, 500):
        actual = run(a[:m], b, operands={"c": laid(c[:m], turned=False, pad=2)}, epilogue=f, batch_invariant=True)
        assert all(same_bits(x, y[:m].contiguous()) for x, y in zip(actual, whole, strict=True)), m


def by_name(x: Any) -> dict[Any, Any]:
    return x if isinstance(x, dict) else dict(enumerate(x if isinstance(x, tuple) else (x,)))


# -- which kernels agree -----------------------------------------------------------------------------------------------


def compared(configs: list[Config], k: int, dtype: str, accumulate: str, **options: Any) -> list[Config]:
    """The configs whose bits are not those of the first."""
    torch.manual_seed(k)
    a, b = wild(700, k, dtype), wild(k, 1032, dtype, turned=True)
    if accumulate == "fp16":
        a, b = a / 64, b / 64
    wants, different = None, []
    for config in configs:
        try:
            actual = run(a, b, config=config, accumulate=accumulate, **options)
        except ConfigError:
            continue
        wants = actual if wants is None else wants
        if not same_bits(actual, wants):
            different.append(config)
    assert wants is not None
    return different


@pytest.mark.parametrize(("dtype", "accumulate"), [("bf16", "fp32"), ("fp16", "fp32"), ("fp16", "fp16")])
@pytest.mark.parametrize("k", [16, 72, 200, 4096, 4104, 16384])
def test_tiles_and_designs_agree(k: int, dtype: str, accumulate: str) -> None:
    """Also beside the tail of K, which is filled with zeros up to a whole k-tile."""
    unswapped = [c for c in IN_ORDER if not c.swap_ab]
    assert not compared(unswapped, k, dtype, accumulate, out_dtype="fp32" if accumulate == "fp32" else "fp16")


@pytest.mark.parametrize(("dtype", "accumulate"), [("bf16", "fp32"), ("fp16", "fp32"), ("fp16", "fp16")])
@pytest.mark.parametrize("k", [16, 72, 200, 4096, 4104, 16384])
def test_swapped_products_agree(k: int, dtype: str, accumulate: str) -> None:
    swapped = [c for c in IN_ORDER if c.swap_ab] + [
        Config(tile=(64, n, depth), cluster=(1, 1), consumers=1, stages=3, swap_ab=True)
        for n, depth in ((8, 256), (24, 128), (64, 64), (256, 64))
    ]
    output = "fp32" if accumulate == "fp32" else "fp16"
    assert not compared([Config(), *swapped], k, dtype, accumulate, out_dtype=output)


@pytest.mark.parametrize("seed", range(8))
def test_configs_of_the_space_agree(seed: int) -> None:
    rng = random.Random(seed)
    all_configs = configs_for_epilogue(
        EpilogueSpec.identity(gemmsmith.plan(*[torch.empty(64, 64).half()] * 2, out_dtype="fp32").problem.d)
    )
    configs = rng.sample([*all_configs.select(np.flatnonzero(all_configs.fixed_k_order)).configs], 24)
    assert not compared([Config(), *configs], rng.choice([1000, 4096]), "bf16", "fp32", out_dtype="fp32")


@pytest.mark.parametrize(("dtype", "accumulate", "output"), DTYPES)
@pytest.mark.parametrize("config", [
    Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1), Config("pingpong", (64, 96, 64), (1, 1)),
    Config(tile=(64, 24, 64), cluster=(1, 1), consumers=1, swap_ab=True),
], ids=str)  # fmt: skip
def test_the_simulator_agrees(config: Config, dtype: str, accumulate: str, output: str | None) -> None:
    a, b = wild(150, 328, dtype), wild(328, 136, dtype, turned=True)
    options = {"config": config, "accumulate": accumulate, "out_dtype": output}
    expected = gemmsmith.gemm(a.cpu(), b.cpu(), backend="sim", **options)
    assert same_bits(run(a, b, **options).cpu(), expected)


@pytest.mark.parametrize("name", ["row", "matrix", "two_matrices", "bias_gelu", "swiglu", "geglu"])
def test_epilogues_of_tiles_agree(name: str) -> None:
    """Those that compute each element by itself, from the same product."""
    case = CASES[name]
    more = operands(case, np.random.default_rng(0), 700, 1032 - 1032 % 16, as_dtype("bf16"), None)
    given = {key: on_gpu(x, "bf16") for key, x in more.items()}
    a, b = wild(700, 520, "bf16"), wild(520, 1032 - 1032 % 16, "bf16", turned=True)
    result = []
    for config in IN_ORDER:
        try:
            done = run(a, b, operands=given, epilogue=case.function, config=config, out_dtype="fp32")
        except ConfigError:
            continue
        result.append((config, done))
    assert len(result) > 8
    assert [config for config, done in result if not same_bits(done, result[0][1])] == []
