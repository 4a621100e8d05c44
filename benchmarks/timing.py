"""What the benchmarks time with: operands beyond the L2, CUDA graphs, blocks, checks, and what is known of the machine.

A block is a series of replays of a graph after a warm-up. From 128 rows on it takes a second, because the chip is
power-limited there and its clock oscillates with a period of a second, by 5 to 8 %.
"""

from __future__ import annotations

import argparse
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import gemmsmith
from benchmarks.rows import write
from gemmsmith.cli import cublaslt
from gemmsmith.lang.kernel import Kernel

L2_BYTES = 60 * 2**20
FAR = 25
"""Multiple of the L2's size that all buffers fill together. With 3, kernels whose loads are evicted first from the L2
still hit it in the next round and were up to 4 % faster; with 50 they are slower
(benchmarks/results/tries-h200.json.xz)."""
WARM_UP_SECONDS = 0.3
SELECTION = ((8, 0.01), (2, 0.06), (1, 0.3))
"""Rounds that select cuBLASLt's algorithm: how many are left after one block each of this many seconds."""


def operands(m: int, n: int, k: int, dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, ...]:
    """Return A and B of random normal data, row-major (n) or column-major (t), and D full of NaN."""
    a = torch.randn((m, k) if layout[0] == "n" else (k, m), device="cuda").to(dtype)
    b = torch.randn((k, n) if layout[1] == "n" else (n, k), device="cuda").to(dtype)
    d = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    return a if layout[0] == "n" else a.T, b if layout[1] == "n" else b.T, d


def captured(call: Any, sets: list[tuple[torch.Tensor, ...]]) -> torch.cuda.CUDAGraph:
    """Return one CUDA graph that calls once on each set of buffers."""
    for s in sets:
        call(*s)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for s in sets:
            call(*s)
    return graph


@contextmanager
def edited(kernel: Kernel, source: str) -> Iterator[None]:
    """Let plans that are made and called inside run `source` in place of the kernel's own source."""
    own = kernel.source
    kernel.__dict__["source"] = source  # a cached property
    try:
        yield
    finally:
        kernel.__dict__["source"] = own


def rotated(
    m: int, n: int, k: int, dtype: torch.dtype, layout: str, least: int = 3, far: int = FAR, most: float = float("inf")
) -> list[tuple[torch.Tensor, ...]]:
    """Return `least` or more sets of operands that fill `far` times the L2 together, but at most `most`."""
    sets = [operands(m, n, k, dtype, layout)]
    size = (m * k + k * n + m * n) * torch.finfo(dtype).bits // 8
    while len(sets) < least or (len(sets) * size < far * L2_BYTES and len(sets) < most):
        sets.append(operands(m, n, k, dtype, layout))
    return sets


def replayed(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Return microseconds that `count` replays take together."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3


def block_seconds(m: int) -> float:
    """Return the seconds of a block for GEMMs with this number of rows: a period of the clock if it oscillates."""
    return 1.05 if m >= 128 else 0.5


def block(graph: torch.cuda.CUDAGraph, calls: int, seconds: float, warm_up: float = WARM_UP_SECONDS) -> float:
    """Return microseconds per call over a block of at least `seconds`, after a warm-up of its own."""
    begun, replays = time.perf_counter(), 0
    while time.perf_counter() - begun < warm_up:
        graph.replay()
        torch.cuda.synchronize()
        replays += 1
    repeats = max(1, round(replays * seconds / warm_up * 1.1))
    return replayed(graph, repeats) / repeats / calls


def shuffled(
    graphs: dict[str, torch.cuda.CUDAGraph], calls: int, seconds: float, rounds: int
) -> tuple[dict[str, list[float]], list[int]]:
    """Return microseconds per call of each graph, in random order, and the SMs' MHz after each block."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    clocks = []
    for _ in range(rounds):
        order = list(graphs)
        random.shuffle(order)
        for name in order:
            times[name].append(block(graphs[name], calls, seconds))
        clocks.append(sm_clock())
    return times, clocks


def queried(field: str) -> str:
    """Return what nvidia-smi reports for the first GPU, without a unit; "" if it does not know the field."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.partition("\n")[0].strip()


def sm_clock() -> int:
    """Return the SMs' clock in MHz as the driver reports it now; 0 if it does not."""
    mhz = queried("clocks.sm")
    return int(mhz) if mhz.isdigit() else 0


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, (m, k) by (k, n), summed in float64, as float32."""
    return (a.double() @ b.double()).float()


def is_right(call: Any, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, product: torch.Tensor) -> bool:
    """Return whether call(a, b, d) writes a @ b of random normal a and b to all of d, within d's precision.

    Partial sums may be rounded to d's dtype too, as torch.mm does by default.
    """
    call(a, b, d.fill_(float("nan")))
    epsilon, size = torch.finfo(d.dtype).eps, a.shape[1] ** 0.5  # of the sum of k products
    return bool(((d.float() - product).abs() <= epsilon * (product.abs() + size)).all())


def fastest(
    graphs: dict[Any, torch.cuda.CUDAGraph], calls: int, selection: tuple[tuple[int, float], ...] = SELECTION
) -> Any:
    """Return the key of the fastest graph, in ever longer blocks of ever fewer graphs; None without graphs."""
    names = list(graphs)
    for survivors, seconds in selection:
        random.shuffle(names)
        times = {name: block(graphs[name], calls, seconds, seconds / 2) for name in names}
        names = sorted(names, key=times.__getitem__)[:survivors]
    return names[0] if names else None


def machine() -> dict[str, Any]:
    """Return the environment in which the rows are measured."""
    from cuda.bindings import nvrtc

    main = sys.modules["__main__"].__spec__
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "nvrtc": ".".join(map(str, nvrtc.nvrtcVersion()[1:])), "gemmsmith": gemmsmith.__version__,
        "cublaslt": cublaslt.library().cublasLtGetVersion(),
        "python": platform.python_version(), "buffers_over_l2": FAR,
        "command": " ".join(["python -m", main.name, *sys.argv[1:]]).partition(" --json")[0],
        "driver": queried("driver_version"), "most_sm_mhz": queried("clocks.max.sm"),
        "most_memory_mhz": queried("clocks.max.mem"), "power_limit_w": queried("power.limit"),
    }  # fmt: skip


def options(about: str | None) -> argparse.ArgumentParser:
    """Return a benchmark's options, such as where its rows go; `about` is its docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the rows go")
    return parser


def save(path: Path | None, rows: list[dict[str, Any]], about: dict[str, Any] | None = None) -> None:
    """Write rows and their environment, `about` or what `machine` returns now, if a path is given."""
    if path:
        write(path, {"machine": about or machine(), "rows": rows})
