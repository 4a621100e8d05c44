"""The product on a GPU, against float64: random problems of every kind, all judged element by element."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config
from gemmsmith.arrays import as_numpy
from gemmsmith.backends.reference import bounds
from gemmsmith.core.dtypes import as_dtype

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CONFIGS = [
    None,
    Config(),
    Config(cluster=(1, 1)),
    Config(tile=(256, 128, 64), cluster=(1, 2), raster="n", raster_group=2, serpentine=True),
    Config(tile=(128, 128, 64), cluster=(2, 1), stages=5, raster_group=1),
    Config(tile=(256, 192, 64), cluster=(1, 2), stages=2, raster="n"),
    Config(tile=(256, 184, 64), cluster=(1, 2), stages=2, raster="n", serpentine=True),
    Config(tile=(192, 96, 64), cluster=(1, 1), consumers=3),
    Config(tile=(192, 176, 64), cluster=(2, 1), stages=3, consumers=3),
    Config(tile=(64, 256, 64), cluster=(2, 1), consumers=1, stages=3),
    Config(tile=(128, 64, 128), cluster=(1, 1), stages=3),
    Config(tile=(64, 40, 32), cluster=(1, 1), consumers=1),
    Config(tile=(128, 128, 64), cluster=(2, 2), stages=4),
    Config("tma", (128, 256, 64), (2, 1), 3),
    Config("tma", (128, 128, 64), (1, 2), 4),
    Config("tma", (64, 64, 64), (1, 1), 4, 1),
    Config("pingpong", (64, 256, 64), (2, 1)),
    Config("pingpong", (128, 96, 64), (1, 2), serpentine=True),
    Config("pingpong", (64, 64, 64), (1, 1)),
    Config("pingpong", (128, 176, 64), (1, 2), 4),
    Config("pingpong", (64, 192, 64), (2, 1), 4, 3),
    Config("pingpong", (128, 96, 64), (1, 2), 4, 3, swap_ab=True),
    Config(tile=(256, 176, 64), cluster=(1, 2), stages=2, raster="n", serpentine=True, sync_clusters=True),
    Config(tile=(128, 64, 64), cluster=(2, 1), consumers=1, sync_clusters=True),
    Config(splits=0, serpentine=True),
    Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, splits=4),
    Config(tile=(128, 64, 64), cluster=(1, 2), splits=2, raster="n"),
    Config("tma", (128, 64, 64), (1, 1), 4, splits=0),
    Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, cluster_splits=4),
    Config(tile=(128, 64, 64), cluster=(1, 2), cluster_splits=2, raster="n"),
    Config("tma", (64, 128, 64), (1, 1), 4, 1, cluster_splits=2),
    Config(tile=(128, 24, 64), cluster=(1, 1), cluster_splits=2),
    Config(tile=(128, 16, 64), cluster=(1, 1), stages=8, swap_ab=True),
    Config(tile=(64, 8, 128), cluster=(1, 1), consumers=1, stages=8, splits=2, swap_ab=True),
    Config(tile=(64, 16, 256), cluster=(1, 1), consumers=1, stages=4, cluster_splits=2, swap_ab=True),
    Config(tile=(192, 104, 64), cluster=(1, 2), consumers=3, stages=3, swap_ab=True),
    Config(tile=(128, 128, 64), cluster=(4, 1), consumers=1, stages=5, swap_ab=True),
    Config("pingpong", (128, 96, 64), cluster=(2, 2), stages=5),
    Config(tile=(128, 128, 64), cluster=(1, 2), consumers=1, evict=("last", "first")),
    Config("pingpong", (128, 64, 64), (2, 1), evict=("first", "last")),
    Config(tile=(256, 192, 64), cluster=(1, 2), alias_epilogue=True),
    Config(tile=(64, 96, 64), cluster=(2, 1), consumers=1, cluster_splits=2, alias_epilogue=True),
    Config(tile=(128, 64, 64), cluster=(1, 1), splits=0, alias_epilogue=True),
]
DTYPES = [("bf16", "fp32", None), ("fp16", "fp32", None), ("fp16", "fp16", None), ("bf16", "fp32", "fp32"),
          ("fp16", "fp32", "fp32"), ("bf16", "fp32", "fp16"), ("fp16", "fp16", "fp32")]  # fmt: skip
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def matrix(rng: random.Random, rows: int, columns: int, dtype: str, batch: int = 0):
    """Random normal data in a random layout: either order, padded rows, an offset base, every second element."""
    turned = rng.random() < 0.5
    outer, inner = (columns, rows) if turned else (rows, columns)
    pad, offset = rng.choice([0, 0, 0, 8, 3]), rng.choice([0, 0, 0, 8, 1])
    step = 2 if rng.random() < 0.05 else 1
    shape = (max(batch, 1), outer, (inner + pad) * step)
    store = torch.randn(shape[0] * shape[1] * shape[2] + offset, device="cuda").to(TORCH[dtype])
    x = store[offset:].view(shape)[:, :, : inner * step : step]
    x = x.transpose(1, 2) if turned else x
    return x if batch else x[0]


def judge(out, a, b, accumulate: str) -> None:
    bounds.check(
        as_numpy(out.cpu()), as_numpy(a.cpu()), as_numpy(b.cpu()), as_dtype(accumulate),
        as_dtype(out.dtype),
    ).require()  # fmt: skip


@pytest.mark.parametrize("seed", range(300))
def test_random_problem(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, accumulate, out_dtype = rng.choice(DTYPES)
    config = rng.choice(CONFIGS)
    m, n, k = (rng.choice([rng.randint(1, 40), rng.randint(1, 700), 8 * rng.randint(1, 90)]) for _ in range(3))
    batch = rng.choice([0, 0, 0, 1, 3])
    a, b = matrix(rng, m, k, dtype, batch), matrix(rng, k, n, dtype, batch if rng.random() < 0.6 else 0)
    shape = (batch, m, n) if batch else (m, n)
    out = torch.full(shape, float("nan"), device="cuda", dtype=TORCH[out_dtype or dtype])
    if rng.random() < 0.3:
        out = torch.full((*shape[:-2], n, m + rng.choice([0, 8, 5])), float("nan"), device="cuda", dtype=out.dtype)
        out = out[..., :m].transpose(-1, -2)
    given = gemmsmith.gemm(a, b, out=out, accumulate=accumulate, config=config)
    assert given is out
    judge(out, a, b, accumulate)


@pytest.mark.parametrize("residue", range(8))
def test_every_residue_of_k_and_n(residue: int) -> None:
    for other in range(8):
        a = torch.randn(130, 64 + residue, device="cuda").bfloat16()
        b = torch.randn(64 + residue, 264 + other, device="cuda").bfloat16()
        out = torch.full((130, 264 + other), float("nan"), device="cuda", dtype=torch.bfloat16)
        judge(gemmsmith.gemm(a, b, out=out), a, b, "fp32")


@pytest.mark.parametrize("design", ["cooperative", "tma"])
def test_zero_k_gives_zeros(design: str) -> None:
    a, b = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((130, 0), (0, 50)))
    out = torch.full((130, 50), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert (gemmsmith.gemm(a, b, out=out, config=Config(design)) == 0).all()


def test_empty_results() -> None:
    a, b = torch.empty(0, 8, device="cuda").half(), torch.empty(8, 5, device="cuda").half()
    assert gemmsmith.gemm(a, b).shape == (0, 5)


def test_nan_and_inf_propagate() -> None:
    a, b = torch.randn(200, 128, device="cuda").bfloat16(), torch.randn(128, 100, device="cuda").bfloat16()
    a[3, 7], a[5, 1], b[2, 9] = float("nan"), float("inf"), float("-inf")
    judge(gemmsmith.gemm(a, b), a, b, "fp32")


def test_operand_of_more_than_2_31_elements() -> None:
    rows, k, n = 2**21 + 77, 1032, 24
    a = torch.empty(rows, k, device="cuda", dtype=torch.bfloat16).normal_()
    b = torch.randn(k, n, device="cuda").bfloat16()
    out = gemmsmith.gemm(a, b, out=torch.full((rows, n), float("nan"), device="cuda", dtype=torch.bfloat16))
    assert a.numel() > 2**31
    for first in (0, rows // 2, rows - 300):
        judge(out[first : first + 300].contiguous(), a[first : first + 300].contiguous(), b, "fp32")
    assert not out.isnan().any()


def test_graph_capture_after_a_first_call() -> None:
    a, b = (torch.randn(256, 256, device="cuda").half() for _ in range(2))
    out = torch.full((256, 256), float("nan"), device="cuda").half()
    gemmsmith.gemm(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemmsmith.gemm(a, b, out=out)
    a.normal_(), out.fill_(float("nan"))
    graph.replay()
    judge(out, a, b, "fp32")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_runs_at_once_are_bit_identical(config) -> None:
    """On two streams, and in two graphs."""
    a, b = torch.randn(700, 1100, device="cuda").bfloat16(), torch.randn(900, 1100, device="cuda").bfloat16().T
    want = gemmsmith.gemm(a, b, config=config)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [torch.full((700, 900), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(20)]
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        with torch.cuda.stream(streams[i % 2]):
            gemmsmith.gemm(a, b, out=out, config=config)
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)
    graphs = []
    for i in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[i]):
            for out in outs[i::2]:
                gemmsmith.gemm(a, b, out=out, config=config)
    for out in outs:
        out.fill_(float("nan"))
    torch.cuda.synchronize()
    for _ in range(3):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


def test_later_calls_put_addresses_in() -> None:
    """Other arrays of the same signature, other sizes, arrays that meet."""
    plan = gemmsmith.plan(torch.empty(64, 96, device="cuda").half(), torch.empty(96, 128, device="cuda").half())
    for i in range(6):
        m = 64 + 64 * (i // 3)
        a, b = torch.randn(m, 96, device="cuda").half(), torch.randn(96, 128, device="cuda").half()
        out = torch.full((m, 128), float("nan"), device="cuda").half()
        plan.run(a, b, out)
        judge(out, a, b, "fp32")
        judge(plan.run(a, b), a, b, "fp32")
    store = torch.randn(2, 128, 128, device="cuda").half()
    square = gemmsmith.plan(store[0], store[1])
    square.run(store[0], store[1], torch.empty_like(store[0]))
    with pytest.raises(gemmsmith.ArgumentError, match="overlaps"):
        square.run(store[0], store[1], store[0])


@pytest.mark.parametrize(("n", "k"), [(512, 1000), (1000, 384), (4096, 64)])
def test_rows_of_one_plan(n: int, k: int) -> None:
    """M from 1 to 40, in any order and by several threads: most of them take the plan of another M."""
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
    column = torch.randn(n, device="cuda")

    def check(m: int) -> None:
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        row = torch.randn(m, 1, device="cuda")
        d = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        fused = torch.full((m, n), float("nan"), device="cuda")
        gemmsmith.gemm(a, b, out=d)
        gemmsmith.gemm(
            a, b, epilogue=lambda acc, row, column, x: acc * row + column * x, row=row, column=column, x=m / 8,
            out=fused, out_dtype="fp32",
        )  # fmt: skip
        product = a.double() @ b.double()
        torch.testing.assert_close(d.double(), product, rtol=2**-7, atol=1e-3 * k**0.5)
        torch.testing.assert_close(fused.double(), product * row + column * (m / 8), rtol=1e-4, atol=1e-4 * k**0.5)

    sizes = [*range(1, 41), *range(1, 41)]
    random.shuffle(sizes)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check, sizes))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_prepared_run(config) -> None:
    """Reads what its arrays hold when it is called: on the current stream, on another, in a graph."""
    a, b = torch.randn(700, 1100, device="cuda").bfloat16(), torch.randn(900, 1100, device="cuda").bfloat16().T
    out = torch.full((700, 900), float("nan"), device="cuda").bfloat16()
    run = gemmsmith.plan(a, b, config=config).prepare(a, b, out)
    assert out.isnan().all()
    for _ in range(3):
        a.normal_(), out.fill_(float("nan"))
        assert run() is out
        judge(out, a, b, "fp32")
    want, stream = out.clone(), torch.cuda.Stream()
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
    run()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, want)
    del run
    taken = torch.full((1 << 24,), float("nan"), device="cuda")  # what it has left
    graph.replay()
    assert torch.equal(out, want)
    assert taken.isnan().all()


def test_a_prepared_run_in_another_thread() -> None:
    """Where no context is current yet."""
    a, b = (torch.randn(256, 256, device="cuda").half() for _ in range(2))
    out = torch.full((256, 256), float("nan"), device="cuda").half()
    run = gemmsmith.plan(a, b).prepare(a, b, out)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        assert all(x.result() is out for x in [pool.submit(run) for _ in range(20)])
    torch.cuda.synchronize()
    judge(out, a, b, "fp32")


def test_a_prepared_run_with_a_second_step() -> None:
    """Its own results, where none are given; numbers keep their values."""
    a, b = torch.randn(300, 520, device="cuda").half(), torch.randn(520, 1000, device="cuda").half()

    def f(acc, scale):
        y = (acc * scale).relu()
        return y, y.sum(-1)

    run = gemmsmith.plan(a, b, epilogue=f, scale=1.0).prepare(a, b, scale=0.5)
    y, sums = run()
    for _ in range(2):
        a.normal_(), y.fill_(float("nan")), sums.fill_(float("nan"))
        run()
        right = (a.double() @ b.double() * 0.5).relu()
        assert (y.double() - right).norm() < 1e-3 * right.norm()
        assert (sums.double() - right.sum(-1)).norm() < 1e-3 * right.sum(-1).norm()


def test_preparing_during_a_capture_is_refused() -> None:
    a, b = (torch.randn(256, 256, device="cuda").half() for _ in range(2))
    out = torch.empty(256, 256, device="cuda").half()
    plan = gemmsmith.plan(a, b, out=out)
    plan.run(a, b, out)
    with pytest.raises(gemmsmith.DeviceError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        plan.prepare(a, b, out)


def test_compiling_during_a_capture_is_refused() -> None:
    a, b = (torch.randn(256, 256, device="cuda").half() for _ in range(2))
    out = torch.empty(256, 256, device="cuda").half()
    config = Config(tile=(64, 72, 64), cluster=(1, 1), consumers=1, stages=7)  # nobody else's
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(gemmsmith.DeviceError, match="captured"), torch.cuda.graph(graph):
        gemmsmith.gemm(a, b, out=out, config=config)


def test_runs_on_the_current_stream() -> None:
    a, b = (torch.randn(4096, 4096, device="cuda").bfloat16() for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        a.mul_(2)
        first = gemmsmith.gemm(a, b)
    stream.synchronize()
    assert torch.equal(first, gemmsmith.gemm(a, b))


def test_streams_do_not_share_a_workspace() -> None:
    problems = [(torch.randn(511, 333, device="cuda").half(), torch.randn(333, 129, device="cuda").half())
                for _ in range(8)]  # fmt: skip
    expected = [gemmsmith.gemm(a, b) for a, b in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    results = []
    for stream, (a, b) in zip(streams, problems, strict=True):
        with torch.cuda.stream(stream):
            results.append(gemmsmith.gemm(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_one_plan_serves_other_sizes_without_compiling() -> None:
    from gemmsmith.backends.cuda import kernel_loader

    a, b = torch.randn(512, 256, device="cuda").half(), torch.randn(256, 512, device="cuda").half()
    plan = gemmsmith.plan(a, b, config=Config())
    plan.run(a, b)
    loaded = len(kernel_loader._LOADED)
    for m, n, k in ((1, 8, 8), (1000, 136, 264), (129, 1024, 512)):
        a, b = torch.randn(m, k, device="cuda").half(), torch.randn(k, n, device="cuda").half()
        judge(plan.run(a, b), a, b, "fp32")
    assert len(kernel_loader._LOADED) == loaded


def test_memory_that_is_freed() -> None:
    """A captured graph keeps its flags; streams get new ones."""
    config = Config("cooperative", (128, 128, 64), (1, 1), splits=4)
    a, b = torch.randn(256, 4096, device="cuda").bfloat16(), torch.randn(4096, 256, device="cuda").bfloat16()

    def call() -> Any:
        return gemmsmith.gemm(a, b, config=config)

    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        torch.cuda.synchronize()
        assert gemmsmith.free_memory() >= 1 << 20
        assert torch.equal(call(), expected)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert torch.equal(call(), expected)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
    del graph
    assert gemmsmith.free_memory(graphs=True) >= 2 << 20
    assert torch.equal(call(), expected)


def test_workspace_of_the_caller() -> None:
    a, b = torch.randn(100, 77, device="cuda").half(), torch.randn(77, 90, device="cuda").half()
    plan = gemmsmith.plan(a, b)
    assert plan.workspace_bytes
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    judge(plan.run(a, b, workspace=workspace), a, b, "fp32")
    with pytest.raises(gemmsmith.ArgumentError, match="workspace"):
        plan.run(a, b, workspace=workspace[:100])
    for wrong in (workspace.cpu(), workspace.repeat(2)[::2]):
        with pytest.raises(gemmsmith.ArgumentError, match="workspace: got a tensor on .*; use a contiguous one"):
            plan.run(a, b, workspace=wrong)


def test_numpy_is_run_by_the_reference_and_the_gpu_agrees() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (96, 96)).astype(np.float16) for _ in range(2))
    ours = gemmsmith.gemm(torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda())
    assert np.array_equal(ours.cpu().numpy(), gemmsmith.gemm(a, b))


def test_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    a, b = (cupy.random.standard_normal((130, 140)).astype(cupy.float16) for _ in range(2))
    out = gemmsmith.gemm(a, b.T)
    bounds.check(cupy.asnumpy(out), cupy.asnumpy(a), cupy.asnumpy(b.T), as_dtype("fp32"), as_dtype("fp16")).require()


@pytest.mark.parametrize("design", ["cooperative", "tma"])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1)])
def test_repeated_runs_are_bit_identical(design: str, cluster: tuple[int, int]) -> None:
    a, b = (torch.randn(2048, 2048, device="cuda").bfloat16() for _ in range(2))
    plan = gemmsmith.plan(a, b, config=Config(design, cluster=cluster))
    first = plan.run(a, b)
    assert all(torch.equal(first, plan.run(a, b)) for _ in range(20))
