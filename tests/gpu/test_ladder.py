"""mma_multistage and the rungs on a GPU, against float64; what is compiled for sm_80 gives the results of sm_90's.
Occupancy against the driver's, loops of one instruction against the simulator."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

import gemmsmith
from benchmarks.ladder.peak_throughput import THREADS, LoopLaunch, microbenchmark
from gemmsmith import Config
from gemmsmith.arrays import ArrayInfo, as_numpy, describe
from gemmsmith.backends.cuda import kernel_loader
from gemmsmith.backends.cuda.driver import device_attributes
from gemmsmith.backends.cuda.run import BoundLaunches, pointer_values
from gemmsmith.backends.reference import bounds
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.cli.tables import KernelCounts
from gemmsmith.core.chip import CHIPS, HOPPER
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.problem import Matrix
from gemmsmith.ladder.launches import LADDER_KERNELS, ladder_launches
from gemmsmith.ladder.rungs import RUNG_CASES, RungCase, simulate_rung
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launch, Launches

torch = pytest.importorskip("torch")
from tests.gpu.test_dtypes import judge, matrix, poisoned  # noqa: E402 they need torch

pytestmark = pytest.mark.gpu

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8, "int32": torch.int32}
DEPTH = {"bf16": 32, "fp16": 32, "fp32": 16, "int8": 64}
TILES = [(256, 192, 2), (256, 128, 2), (128, 256, 2), (128, 128, 2), (128, 64, 1), (64, 64, 2), (64, 32, 1),
         (64, 128, 4)]  # fmt: skip


@pytest.mark.parametrize("seed", range(200))
def test_multistage(seed: int) -> None:
    """Random products; compiled for sm_90 and, by the driver, for sm_80: the same bits if sums are divided alike."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name = rng.choice(list(DEPTH))
    m, n, k = (rng.choice([rng.randint(1, 40), rng.randint(1, 700), 16 * rng.randint(1, 90)]) for _ in range(3))
    batch = rng.choice([0, 0, 0, 3])
    a, b = matrix(rng, m, k, TORCH[name], batch), matrix(rng, k, n, TORCH[name], batch)
    output = {"int8": torch.int32, "fp32": torch.float32}.get(name, TORCH[name])
    split = name == "fp32" and rng.random() < 0.5
    options: dict[str, Any] = {"precision": "3xtf32" if split else "tf32"} if name == "fp32" else {}
    tile_m, tile_n, consumers = rng.choice([x for x in TILES if not split or x[0] * x[1] <= 8192 * x[2]])
    tile = tile_m, tile_n, DEPTH[name]
    splits, swap = rng.choice([1, 1, 0, 2, 3]), rng.random() < 0.5
    result = []
    for chip in ("sm_90", "sm_80"):
        out = poisoned((batch, m, n) if batch else (m, n), output)
        config = Config("mma_multistage", tile, (1, 1), 3, consumers, splits=splits, swap_ab=swap, chip=chip)
        plan = gemmsmith.plan(a, b, out=out, config=config, **options)
        plan.run(a, b, out)
        judge(out, a, b, promoted=split)
        result.append((out, plan))
    assert_same_bits(result, splits)


def assert_same_bits(result: list[tuple[torch.Tensor, gemmsmith.Plan]], splits: int) -> None:
    """Of results and their plans; but of those that share K among another number of CTAs, if the sums are rounded."""
    results, plans = zip(*result, strict=True)
    if splits == 1 or results[0].dtype == torch.int32 or ctas(plans[0]) == ctas(plans[1]):
        assert torch.equal(*results)


def ctas(plan: gemmsmith.Plan) -> list[int]:
    """Of the product's launch: no more than run at once, which registers decide."""
    return [
        min(x.work_clusters, at_once(x.kernel))
        for x in plan._planned.launches.all
        if x.kernel.name == plan._planned.kernel.name
    ]


def at_once(kernel: Kernel) -> int:
    """The CTAs that the driver runs at once."""
    with kernel_loader.device_guard(0):
        return kernel_loader.load_kernel(kernel, 0, 0).max_active_clusters()


@pytest.mark.parametrize("k", [4096, 65536])
def test_3xtf32_errs_less_than_fp32(k: int) -> None:
    """Summed in registers, against sgemm."""
    a, b = torch.randn(256, k, device="cuda"), torch.randn(k, 256, device="cuda")
    want = a.double() @ b.double()
    split = Config("mma_multistage", (128, 128, 16), (1, 1), 3, 2)
    errors = [
        (gemmsmith.gemm(a, b, out=poisoned((256, 256), torch.float32), **options) - want).norm()
        for options in ({"precision": "3xtf32", "config": split}, {})
    ]
    assert errors[0] <= 1.5 * errors[1]


def test_int8_sums_that_wrap() -> None:
    k = 1 << 17
    a, b = (torch.full(shape, -128, device="cuda", dtype=torch.int8) for shape in ((3, k), (8, k)))
    for splits in (1, 4):
        config = Config("mma_multistage", (64, 32, 64), (1, 1), 4, 1, splits=splits)
        out = gemmsmith.gemm(a, b.t(), out=poisoned((3, 8), torch.int32), config=config)
        assert (out == -(1 << 31)).all()


@pytest.mark.parametrize("seed", range(60))
def test_sgemm(seed: int) -> None:
    """fp32 in fp32, from any strides; the same bits by the driver's compiler."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    m, n, k = (rng.choice([rng.randint(1, 40), rng.randint(1, 700)]) for _ in range(3))
    a, b = matrix(rng, m, k, torch.float32), matrix(rng, k, n, torch.float32)
    tile, consumers = rng.choice([((256, 128, 8), 2), ((128, 128, 16), 2), ((64, 64, 8), 2), ((64, 32, 8), 1)])
    result = []
    for chip in ("sm_90", "sm_80"):
        out = poisoned((m, n), torch.float32)
        config = Config("sgemm", tile, (1, 1), 3, consumers, splits=seed % 3, chip=chip)
        plan = gemmsmith.plan(a, b, out=out, config=config)
        plan.run(a, b, out)
        whole = (as_numpy(x.cpu()) for x in (out, a, b))
        bounds.check(*whole, FP32, FP32, on_cuda_cores=True).require()
        result.append((out, plan))
    assert_same_bits(result, seed % 3)


def fused(acc: Any, bias: Any, c: Any) -> Any:
    x = (acc + bias).relu() + c
    return x, x.sum(-1)


@pytest.mark.parametrize("chip", ["sm_90", "sm_80"])
@pytest.mark.parametrize("n", [512, 509])
def test_a_fused_epilogue(chip: str, n: int) -> None:
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((333, 640), (640, n)))
    bias, c = torch.randn(n, device="cuda"), torch.randn(333, n, device="cuda", dtype=torch.bfloat16)
    config = Config("mma_multistage", (128, 128, 32), (1, 1), 3, 2, chip=chip)
    x, sums = gemmsmith.gemm(a, b, epilogue=fused, bias=bias, c=c, config=config)
    want = (a.double() @ b.double() + bias).relu() + c
    torch.testing.assert_close(x.double(), want, rtol=0.01, atol=0.05)
    torch.testing.assert_close(sums.double(), want.sum(-1), rtol=1e-3, atol=0.1)


def run(name: str, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, chip: str) -> None:
    arrays = {"a": describe(a), "b": describe(b), "d": describe(d)._replace(writable=True)}
    call = BoundLaunches(ladder_launches(name, *map(seen, arrays.values()), CHIPS[chip]), arrays, a, {})
    call.launch(pointer_values(arrays), a, None)


def seen(x: ArrayInfo) -> Matrix:
    return Matrix(x.dtype, *x.shape, *x.strides, alignment=x.alignment).canonical()


@pytest.mark.parametrize("chip", ["sm_90", "sm_80"])
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, rung in LADDER_KERNELS.items() for dtype in rung.dtypes]
)
def test_rungs(name: str, dtype: DType, chip: str) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        if name == "wmma_naive":
            a, b = (torch.randn((x, 96), device="cuda").to(TORCH[dtype.name]) for x in (160, 208))
            b = b.T
        else:
            m, n, k = (rng.choice([rng.randint(1, 40), rng.randint(1, 500)]) for _ in range(3))
            a, b = matrix(rng, m, k, TORCH[dtype.name]), matrix(rng, k, n, TORCH[dtype.name])
        d = poisoned((a.shape[0], b.shape[1]), TORCH[LADDER_KERNELS[name].output(dtype).name])
        run(name, a, b, d, chip)
        exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        error = size * (a.shape[1] + 2) * FP32.roundoff * 2 + exact.abs() * LADDER_KERNELS[name].output(dtype).roundoff
        assert bool(((d.double() - exact).abs() <= error).all())


@pytest.mark.parametrize("step", RUNG_CASES, ids=lambda x: f"{x.name}-{x.dtype}")
def test_the_occupancy_is_the_drivers(step: RungCase) -> None:
    kernel, lines = simulate_rung(step, (512, 512, 512))
    if math.prod(kernel.cluster) > 1:
        pytest.skip("the driver counts clusters, of which some SMs hold no part")
    assert KernelCounts.from_kernel(kernel, lines).occupancy.ctas_per_sm * device_attributes(0).sm_count == at_once(
        kernel
    )


@pytest.mark.parametrize("name", ["fma", "dp4a", "mma_int8"])
def test_loops_give_the_bits_of_the_simulator(name: str) -> None:
    launch = Launch.from_kernel(microbenchmark(name, HOPPER), LoopLaunch(3, 2))
    out, simulated = torch.zeros(2 * THREADS, dtype=torch.int32, device="cuda"), np.full(2 * THREADS, -1, np.int32)
    BoundLaunches(Launches(None, False, (launch,)), {}, out, {}).launch({"out": out.data_ptr()}, out, None)
    memory = GlobalMemory()
    arguments = launch.resolve({"out": memory.add_buffer(simulated, "out")})
    assert simulate(launch.kernel, launch.work_clusters, arguments, memory).hazards == []
    assert (out.cpu().numpy() == simulated).all()
