"""fp8, int8 and TF32 products on a GPU, against float64: random problems of every kind, judged element by element."""

from __future__ import annotations

import random

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config
from gemmsmith.arrays import as_numpy
from gemmsmith.backends.reference import bounds
from gemmsmith.core.dtypes import FP32, as_dtype
from gemmsmith.tuning.dtype_equivalence import config_for_dtype

torch = pytest.importorskip("torch")
from tests.gpu.judges import same_bits  # noqa: E402 they need torch
from tests.gpu.test_gemm import CONFIGS  # noqa: E402

pytestmark = pytest.mark.gpu

E4M3, E5M2, INT8, FLOAT = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float32
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (INT8, INT8), (FLOAT, FLOAT)]
OPTIONS = {E4M3: {"accumulate": "fast"}, E5M2: {"accumulate": "fast"}, INT8: {}, FLOAT: {"precision": "tf32"}}
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def matrix(rng: random.Random, rows: int, columns: int, dtype: torch.dtype, batch: int = 0) -> torch.Tensor:
    """Random data in a random layout: either order, padded rows, an offset base, every second element; NaN, or the
    largest integer, lies wherever the matrix has no element."""
    turned = rng.random() < 0.5
    outer, inner = (columns, rows) if turned else (rows, columns)
    pad, offset = rng.choice([0, 0, 0, 16, 3]), rng.choice([0, 0, 0, 16, 1])
    step = 2 if rng.random() < 0.05 else 1
    shape = (max(batch, 1), outer, (inner + pad) * step)
    beyond = 127 if dtype == INT8 else float("nan")
    store = torch.full((shape[0] * shape[1] * shape[2] + offset,), beyond, device="cuda").to(dtype)
    x = store[offset:].view(shape)[:, :, : inner * step : step]
    x.copy_(torch.randint(-128, 128, x.shape, device="cuda") if dtype == INT8 else torch.randn(x.shape, device="cuda"))
    x = x.transpose(1, 2) if turned else x
    return x if batch else x[0]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An array to be written to, in which no element is right."""
    return torch.full(shape, -(2**30) - 12345 if dtype == torch.int32 else float("nan"), device="cuda", dtype=dtype)


def judge(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, promoted: bool = False) -> None:
    if out.dtype == torch.int32:
        want = (a.double() @ b.double()).long()  # exact: 2^14 * K is less than 2^53
        assert torch.equal(out.long(), (want + 2**31) % 2**32 - 2**31)
    else:
        a, b = (as_numpy(x.cpu()) for x in (a, b))
        bounds.check(as_numpy(out.cpu()), a, b, FP32, as_dtype(out.dtype), promoted=promoted).require()


def config_for(config: Config | None, dtype: torch.dtype) -> Config | None:
    """A config of 16-bit operands with as many bytes of K; integers have columns in steps of 16."""
    if config is None:
        return None
    m, n, k = config.tile
    n = -(-n // 16) * 16 if dtype == INT8 and n > 24 else n
    return config_for_dtype(config.replace(tile=(m, n, k)), as_dtype(dtype, allow_integers=True))


def has_registers(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: Config) -> bool:
    """Whether a config has registers for an MN-major A of TF32."""
    try:
        gemmsmith.plan(a, b, out=out, config=config, **OPTIONS[FLOAT])
    except gemmsmith.ConfigError:
        return False
    return True


@pytest.mark.parametrize("seed", range(300))
def test_random_problem(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtypes = rng.choice(PAIRS)
    m, n, k = (rng.choice([rng.randint(1, 40), rng.randint(1, 700), 16 * rng.randint(1, 90)]) for _ in range(3))
    batch = rng.choice([0, 0, 0, 1, 3])
    a, b = matrix(rng, m, k, dtypes[0], batch), matrix(rng, k, n, dtypes[1], batch if rng.random() < 0.6 else 0)
    output = torch.int32 if dtypes[0] == INT8 else rng.choice(FLOATS)
    out = poisoned((batch, m, n) if batch else (m, n), output)
    if rng.random() < 0.3:
        out = poisoned((*out.shape[:-2], n, m + rng.choice([0, 16, 5])), output)[..., :m].transpose(-1, -2)
    config = config_for(rng.choice(CONFIGS), dtypes[0])
    if dtypes[0] == FLOAT and not has_registers(a, b, out, config):
        config = None
    assert gemmsmith.gemm(a, b, out=out, config=config, **OPTIONS[dtypes[0]]) is out
    judge(out, a, b)


@pytest.mark.parametrize("dtype", [E4M3, INT8, FLOAT])
def test_every_config(dtype: torch.dtype) -> None:
    """All designs, clusters, shares of K and options, with ragged edges."""
    rng = random.Random(0)
    for config in CONFIGS:
        a, b = matrix(rng, 333, 640, dtype), matrix(rng, 640, 277, dtype)
        out = poisoned((333, 277), torch.int32 if dtype == INT8 else torch.float32)
        fitted = config_for(config, dtype)
        if dtype == FLOAT and not has_registers(a, b, out, fitted):
            a = a.contiguous()
        gemmsmith.gemm(a, b, out=out, config=fitted, **OPTIONS[dtype])
        judge(out, a, b)


@pytest.mark.parametrize(("dtypes", "options"), [
    *((pair, OPTIONS[pair[0]]) for pair in PAIRS), *((pair, {"accumulate": "promoted"}) for pair in PAIRS[:4]),
])  # fmt: skip
def test_the_simulator_has_the_same_bits(dtypes: tuple[torch.dtype, torch.dtype], options: dict[str, str]) -> None:
    """No bound tells much about fast sums of fp8, which keep 13 bits; this does."""
    rng = random.Random(4)
    for config in (Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1),
                   Config(tile=(64, 24, 64), cluster=(1, 1), consumers=1, swap_ab=True)):  # fmt: skip
        a, b = matrix(rng, 150, 700, dtypes[0]), matrix(rng, 700, 136, dtypes[1])
        options = {"config": config_for(config, dtypes[0]), **options}
        if dtypes[0] != INT8:
            options["out_dtype"] = "fp32"
        want = gemmsmith.gemm(a.cpu(), b.cpu(), backend="sim", **options)
        assert same_bits(gemmsmith.gemm(a, b, **options).cpu(), want)


@pytest.mark.parametrize("dtype", [E4M3, INT8, FLOAT])
@pytest.mark.parametrize("m", [1, 7, 64, 1024])
def test_large_operands_that_are_packed(dtype: torch.dtype, m: int) -> None:
    """The same product of an MN-major, a padded and a K-major copy of B has the same bits."""
    rng = random.Random(1)
    a, b = matrix(rng, m, 7168, dtype), matrix(rng, 7168, 2112, dtype).contiguous()
    padded = torch.empty(7168, 2112 + 3, device="cuda", dtype=dtype)[:, :2112]
    strided = torch.empty(2112, 7168 * 2, device="cuda", dtype=dtype)[:, ::2].t()
    outs = []
    for layout in (b, b.t().contiguous().t(), padded.copy_(b), strided.copy_(b)):
        out = poisoned((m, 2112), torch.int32 if dtype == INT8 else torch.float32)
        outs.append(gemmsmith.gemm(a, layout, out=out, **OPTIONS[dtype]))
    judge(outs[0], a, b)
    for out in outs[1:]:
        judge(out, a, b)


@pytest.mark.parametrize("seed", range(60))
def test_3xtf32(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    m, n, k = (rng.choice([rng.randint(1, 40), rng.randint(1, 700), 32 * rng.randint(1, 90)]) for _ in range(3))
    batch = rng.choice([0, 0, 0, 3])
    a, b = matrix(rng, m, k, FLOAT, batch), matrix(rng, k, n, FLOAT, batch if rng.random() < 0.6 else 0)
    out = poisoned((batch, m, n) if batch else (m, n), rng.choice(FLOATS))
    config = rng.choice([c for c in CONFIGS if c is None or (c.design == "cooperative" and c.tile[1] <= 128)])
    if config is not None:
        config = config.replace(tile=(min(config.tile[0], 64 * config.consumers), config.tile[1], 32))
    gemmsmith.gemm(a, b, out=out, precision="3xtf32", config=config)
    judge(out, a, b, promoted=True)


@pytest.mark.parametrize("k", [64, 1000, 16384])
def test_3xtf32_is_about_as_exact_as_fp32(k: int) -> None:
    a, b = torch.randn(500, k, device="cuda"), torch.randn(k, 700, device="cuda")
    want = a.double() @ b.double()
    other = (a @ b - want).norm()
    out = gemmsmith.gemm(a, b, precision="3xtf32", out=poisoned((500, 700), FLOAT))
    assert (out - want).norm() < 4 * other


def test_integers_wrap() -> None:
    k = (1 << 17) + 512
    a, b = (torch.full(shape, -128, device="cuda", dtype=INT8) for shape in ((3, k), (8, k)))
    for config in (None, Config(tile=(64, 8, 128), cluster=(1, 1), consumers=1, splits=4),
                   Config(tile=(64, 8, 128), cluster=(1, 1), consumers=1, cluster_splits=4)):  # fmt: skip
        out = gemmsmith.gemm(a, b.t(), out=poisoned((3, 8), torch.int32), config=config)
        assert (out == -(1 << 31) + 512 * 128 * 128).all()


def test_an_epilogue_dequantizes() -> None:
    rng = random.Random(2)
    a, b = matrix(rng, 300, 1024, INT8), matrix(rng, 1024, 520, INT8)
    rows, columns = torch.rand(300, 1, device="cuda"), torch.rand(520, device="cuda")
    out = gemmsmith.gemm(
        a, b, epilogue=lambda acc, rows, columns: acc * rows * columns, rows=rows, columns=columns,
        out=poisoned((300, 520), torch.float32), out_dtype="fp32",
    )  # fmt: skip
    assert torch.equal(out, (a.double() @ b.double()).float() * rows * columns)


@pytest.mark.parametrize("dtype", [E4M3, INT8, FLOAT])
def test_k_of_nothing_and_of_one(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    for m, n, k in ((5, 3, 0), (1, 1, 1), (130, 7, 1), (3, 130, 127), (64, 64, 129)):
        a, b = matrix(rng, m, max(k, 1), dtype)[:, :k], matrix(rng, max(k, 1), n, dtype)[:k]
        out = poisoned((m, n), torch.int32 if dtype == INT8 else torch.bfloat16)
        gemmsmith.gemm(a, b, out=out, **OPTIONS[dtype])
        judge(out, a, b)


def test_tf32_reads_the_upper_19_bits() -> None:
    """What lies below them is not read, not rounded, either."""
    ones = torch.from_numpy(np.full((64, 64), 0x3F801FFF, np.int32).view(np.float32)).cuda()
    assert (gemmsmith.gemm(ones, ones, precision="tf32") == 64).all()


@pytest.mark.parametrize("dtype", [E4M3, INT8, FLOAT])
def test_batch_invariant_rows(dtype: torch.dtype) -> None:
    rng = random.Random(4)
    a, b = matrix(rng, 2048, 4096, dtype), matrix(rng, 4096, 1024, dtype)
    whole = gemmsmith.gemm(a, b, batch_invariant=True, **OPTIONS[dtype])
    for rows in (1, 16, 100, 700):
        part = gemmsmith.gemm(a[:rows], b, batch_invariant=True, **OPTIONS[dtype])
        assert torch.equal(part.view(torch.uint8), whole[:rows].view(torch.uint8))
