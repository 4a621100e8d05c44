"""Products that are measured at their first call are right, whatever their kind, and whoever else computes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

import gemmsmith
from gemmsmith import deinterleave

torch = pytest.importorskip("torch")

import gemmsmith.torch as gt  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact.double()).norm() / exact.double().norm())


def check(compute: Any, exact: torch.Tensor, bound: float = 4e-3) -> None:
    """The call that measures and the next one."""
    with gemmsmith.autotune(max_configs=6) as block:
        for _ in range(2):
            assert error(compute(), exact) < bound
    assert len(block.tuned) == 1
    assert error(compute(), exact) < bound


def test_kinds() -> None:
    a, b, bias = random(200, 1024), random(1536, 1024).t(), random(1536, dtype=torch.float32)
    exact = a.double() @ b.double()
    check(lambda: gemmsmith.gemm(a, b), exact)
    check(lambda: gemmsmith.gemm(a, b, batch_invariant=True), exact)
    check(lambda: gemmsmith.gemm(a, b, epilogue=lambda acc, c: (acc + c).relu(), c=bias), (exact + bias).relu())
    check(lambda: gemmsmith.gemm(a, b, epilogue=lambda acc: acc.sum(0)), exact.sum(0))
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    check(lambda: gemmsmith.gemm(a8, b8), a8.double() @ b8.double())
    x, y = random(300, 1000, dtype=torch.float32), random(1000, 700, dtype=torch.float32)
    check(lambda: gemmsmith.gemm(x, y, precision="tf32"), x.double() @ y.double())
    check(lambda: gemmsmith.gemm(x, y), x.double() @ y.double())
    p, q = random(4, 100, 256), random(4, 256, 512)
    check(lambda: gemmsmith.gemm(p, q), p.double() @ q.double())


def test_pairs_and_groups() -> None:
    a, gate, up = random(200, 1024), random(768, 1024).t(), random(768, 1024).t()

    def gated(acc: Any) -> Any:
        x, y = deinterleave(acc)
        return x.silu() * y

    exact = torch.nn.functional.silu(a.double() @ gate.double()) * (a.double() @ up.double())
    check(lambda: gemmsmith.gemm(a, (gate, up), epilogue=gated), exact)
    x, w = random(512, 256), random(8, 384, 256).transpose(1, 2)
    ends = [64, 100, 200, 200, 300, 400, 500, 512]
    offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
    parts = [x[i:j].double() @ w[g].double() for g, (i, j) in enumerate(zip([0, *ends], ends, strict=False))]
    check(lambda: gemmsmith.grouped_gemm(x, w, offsets=offsets), torch.cat(parts))


def test_effects_happen_once() -> None:
    """In place, and by atomics."""
    a, b, c = random(200, 1024), random(1536, 1024).t(), random(200, 1536)
    exact = c.double() + a.double() @ b.double()
    x, w = random(512, 256), random(4, 384, 256).transpose(1, 2)
    offsets = torch.tensor([128, 256, 384, 512], device="cuda", dtype=torch.int32)
    index, out = torch.randint(0, 100, (512,), device="cuda", dtype=torch.int32), torch.zeros(100, 384, device="cuda")
    product = torch.cat([x[128 * g : 128 * g + 128].double() @ w[g].double() for g in range(4)])
    with gemmsmith.autotune(max_configs=6) as block:
        gemmsmith.gemm(a, b, epilogue=lambda acc, c: acc + c, c=c, out=c)
        gemmsmith.grouped_gemm(x, w, offsets=offsets, scatter=index, out=out, deterministic=False, out_dtype="fp32")
    assert len(block.tuned) == 2
    assert error(c, exact) < 4e-3
    assert (
        error(out, torch.zeros(100, 384, device="cuda", dtype=torch.float64).index_add_(0, index.long(), product))
        < 1e-5
    )


def test_bits_are_kept() -> None:
    for m, n, k in ((64, 1024, 8192), (178, 1536, 4096)):
        a, b = random(m, k), random(n, k).t()
        results = []
        for seed in range(3):
            torch.manual_seed(seed)
            with gemmsmith.autotune(max_configs=3 + 4 * seed, keep_bits=True):
                results.append(gemmsmith.gemm(a, b))
        assert all(torch.equal(x, results[0]) for x in results)


def test_gradients_are_measured_in_autograds_threads() -> None:
    a, b = random(200, 1024).requires_grad_(), random(512, 1024).t().detach().requires_grad_()
    with gemmsmith.autotune(max_configs=6) as block:
        gt.gemm(a, b).sum().backward()
    assert len(block.tuned) == 3
    ones = torch.ones(200, 512, device="cuda", dtype=torch.float64)
    assert error(a.grad, ones @ b.double().t()) < 4e-3  # type: ignore[arg-type]
    assert error(b.grad, a.double().t() @ ones) < 4e-3  # type: ignore[arg-type]


def test_a_compiled_graph_measures_its_first_calls() -> None:
    a, b = random(200, 1024), random(512, 1024).t()
    compiled = torch.compile(lambda a, b: (a @ b).relu() * 2, options=gt.options(autotune=True))
    for _ in range(2):
        assert error(compiled(a, b), (a.double() @ b.double()).relu() * 2) < 8e-3
    from gemmsmith.tuning import measured_configs

    assert measured_configs.entries()


def test_captures_beside_measurements() -> None:
    """A call whose stream is captured is not measured, and a measurement disturbs no capture of another thread."""
    a, b, c = random(200, 1024), random(512, 1024).t(), random(700, 1024)
    gemmsmith.gemm(a, b), gemmsmith.gemm(c, b)
    failures: list[str] = []

    def measure() -> None:
        try:
            for m in (10, 30, 300, 400, 600):
                x = torch.ones(m, 1024, dtype=torch.bfloat16).cuda()
                if error(gemmsmith.gemm(x, b), x.double() @ b.double()) > 4e-3:
                    failures.append(f"{m} rows")
        except Exception as failed:
            failures.append(repr(failed))

    with gemmsmith.autotune(max_configs=4):
        thread = threading.Thread(target=measure)
        gemmsmith.gemm(a, b)
        thread.start()
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                d = gemmsmith.gemm(a, b)
            d.fill_(float("nan"))
            graph.replay()
            assert error(d, a.double() @ b.double()) < 4e-3
        thread.join()
    assert failures == []


PROBLEMS = int(os.environ.get("GEMMSMITH_AUTOTUNE_PROBLEMS", "160"))
THREADS = 8
CAPTURES = threading.Lock()
"""torch captures one graph at a time."""


def biased(acc: Any, c: Any) -> Any:
    return (acc + c).relu()


def test_random_problems_of_threads_streams_and_graphs() -> None:
    """Each thread has its stream, and random problems, some of which it captures while others are measured."""
    weights = random(512, 1024).t(), random(448, 2112), random(640, 4096).t()
    bias, pool = random(2112, dtype=torch.float32), random(1 << 24)  # no generator may be used beside a capture
    torch.cuda.synchronize()
    failures: list[str] = []

    def call(a: Any, b: Any, c: Any, d: Any) -> None:
        gemmsmith.gemm(a, b, out=d) if c is None else gemmsmith.gemm(a, b, epilogue=biased, c=c, out=d)

    def replay(*arrays: Any) -> None:
        call(*arrays)  # loads the kernel
        with CAPTURES:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                call(*arrays)
        graph.replay()
        torch.cuda.current_stream().synchronize()  # before the graph is freed

    def work(seed: int) -> None:
        dice = Random(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(PROBLEMS // THREADS):
                b, m, run = dice.choice(weights), int(2 ** dice.uniform(0, 10.5)), dice.choice((call,) * 6 + (replay,))
                (k, n), c = b.shape, dice.choice((None, bias))
                c = c if c is None else c[:n]
                first = 8 * dice.randrange(1 << 19)
                a = pool[first : first + m * k]
                a = a.view(k, m).t() if dice.random() < 0.2 and m % 8 == 0 else a.view(m, k)
                d = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
                exact = a.double() @ b.double()
                try:
                    run(a, b, c, d)
                    assert error(d, exact if c is None else biased(exact, c)) < 6e-3
                except Exception as failed:
                    failures.append(f"{m}x{n}x{k} {run.__name__}: {failed!r}")

    with gemmsmith.autotune(max_configs=3) as block:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len({x.entry.key for x in block.tuned}) == len(block.tuned) > 10


def test_other_threads_synchronize_with_the_device_meanwhile() -> None:
    """And allocate, and prepare plans, which no capture forbids them."""
    a, b = random(200, 1024), random(1536, 1024).t()
    exact, done, failures = a.double() @ b.double(), threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            while not done.is_set():
                torch.cuda.synchronize()
                assert error(gemmsmith.plan(a, b, config=gemmsmith.Config(splits=2)).prepare(a, b)(), exact) < 4e-3
        except BaseException as failed:
            failures.append(failed)

    thread = threading.Thread(target=work)
    thread.start()
    with gemmsmith.autotune() as block:
        for m in range(8, 200, 16):
            assert error(gemmsmith.gemm(a[:m], b), exact[:m]) < 4e-3
    done.set()
    thread.join()
    assert failures == []
    assert len(block.tuned) > 4


def test_threads_and_two_processes(tmp_path: Path) -> None:
    """All measure in one folder."""
    program = (
        "import threading, torch, gemmsmith\n"
        "def work(i):\n"
        "    with torch.cuda.stream(torch.cuda.Stream()):\n"
        "        for m in (5, 20, 100, 150, 200, 260):\n"
        "            x, b = torch.randn(m, 256, device='cuda').half(), torch.randn(256, 512, device='cuda').half()\n"
        "            d = gemmsmith.gemm(x, b)\n"
        "            assert (d.double() - x.double() @ b.double()).norm() < 2e-3 * d.double().norm(), m\n"
        "with gemmsmith.autotune(max_configs=4):\n"
        "    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]\n"
        "    [x.start() for x in threads], [x.join() for x in threads]\n"
    )
    environment = {**os.environ, "GEMMSMITH_CACHE_DIR": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-W", "error::UserWarning", "-c", program], env=environment,
                                stderr=subprocess.PIPE, text=True) for _ in range(2)]  # fmt: skip
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert "Error" not in said
