"""`gemmsmith bench`: a GEMM's time beside torch's and cuBLASLt's, measured side by side."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from gemmsmith.arrays import Spec
from gemmsmith.backends.cuda.cuda_graph import time_calls
from gemmsmith.binding.request import Request
from gemmsmith.cli import options
from gemmsmith.cli.options import PartialSizes, ProgressCallback, complete_sizes, progress_bar
from gemmsmith.cli.problem import make_plan, make_request
from gemmsmith.cli.tables import format_table, print_outcome, wrapped
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import DeviceError
from gemmsmith.host.planned_gemm import PlannedGemm

Call = Callable[[Request], Any]
"""Returns the results of a request, whose arrays are tensors."""
MIN_SETS = 3
"""Sets of operands, at least. Chosen; not measured."""
FAR = 4
"""Multiple of the L2's size that all sets fill together. Chosen; not measured."""
ROUNDS = 6
"""Blocks of each contender. Chosen; not measured."""
LARGEST_DIFFERENCE = 0.05
"""Frobenius norm of a contender's difference from gemmsmith's result, relative to it, beyond which it is left out."""


@click.command(cls=options.ProblemCommand)
@options.problem
@click.option("--seconds", type=click.FloatRange(min=0.001), default=0.1, show_default=True,
              help="Length of a block of calls; each contender has 6 blocks, in random order.")  # fmt: skip
@options.as_json
def bench(sizes: PartialSizes, seconds: float, as_json: bool, **choices: Any) -> None:
    """Time a GEMM beside torch and cuBLASLt.

    Needs a GPU and torch. Each contender is captured in a CUDA graph that calls it on several sets of random operands,
    which fill four times the L2 together. The contenders run in blocks in random order, under load; the speedup is the
    median, over the rounds of blocks, of a contender's time divided by gemmsmith's. cuBLASLt is the fastest algorithm
    of those that its heuristic suggests. With --epilogue the others are torch eager and torch.compile. Contenders that
    do not take a problem are not listed. The default sizes are 8192.

    \b
    Example: gemmsmith bench 4096x4096x4096
    """
    torch = _torch_with_gpu()
    problem_sizes = complete_sizes(sizes, (8192, 8192, 8192), choices["groups"])
    request = make_request(choices, problem_sizes)
    plan = make_plan(request, choices)
    with progress_bar() as progress:
        progress("generating operands")
        sets = _random_sets(request, choices["groups"])
        rows, clock = _measure(plan, sets, seconds, progress)
    about = {
        "problem": f"{plan.caller_problem}", "config": f"{plan.config}",
        "gpu": torch.cuda.get_device_name(), "sm_mhz": clock, "torch": torch.__version__, "cuda": torch.version.cuda,
        "sets": len(sets), "rounds": ROUNDS, "seconds": seconds,
    }  # fmt: skip
    table = [("", "us", "TFLOP/s", "speedup of gemmsmith")]
    table += [(x["name"], f"{x['us']:.1f}", f"{x['tflops']:.0f}", f"{x['speedup']:.3f}") for x in rows]
    conditions = "{gpu}, {sm_mhz} MHz, CUDA {cuda}, torch {torch}; {sets} sets, {rounds} blocks of {seconds} s"
    title = wrapped(f"{about['problem']}, {about['config']}\n{conditions.format(**about)}")
    text = f"{title}\n\n{format_table(table)}"
    print_outcome({**about, "contenders": rows}, text, None, as_json)


def _torch_with_gpu() -> Any:
    """Return torch. Raises DeviceError if it is not installed or sees no GPU."""
    try:
        import torch
    except ImportError:
        raise DeviceError("bench: torch is not installed; use pip install 'gemmsmith[torch]'") from None
    if not torch.cuda.is_available():
        raise DeviceError("bench: torch sees no GPU; use a machine with one, or gemmsmith show --why for an estimate")
    return torch


def _torch_dtype(dtype: DType) -> Any:
    import torch

    from gemmsmith.torch.fallback import TORCH_DTYPES

    return TORCH_DTYPES.get(dtype) or getattr(torch, dtype.name)


def _random_sets(request: Request, group_sizes: tuple[int, ...] | None) -> list[Request]:
    """Return copies of the request with random tensors on the GPU in place of Specs.

    They are at least MIN_SETS, and fill FAR times the L2.
    """
    import torch

    def tensor(spec: Spec) -> Any:
        x = torch.empty_strided(spec.shape, spec.strides, dtype=_torch_dtype(spec.dtype), device="cuda")
        return x.random_(-128, 128) if spec.dtype.is_integer else x.copy_(torch.randn(spec.shape, device="cuda"))

    def scale(spec: Spec | None) -> Any:
        return None if spec is None else torch.empty(spec.shape, device="cuda").uniform_(0.5, 2)

    def made() -> Request:
        operands = {name: tensor(x) if isinstance(x, Spec) else x for name, x in request.operands.items()}
        if group_sizes:
            operands["sizes"] = torch.tensor(group_sizes, dtype=torch.int32, device="cuda")
        return request._replace(
            a=tensor(request.a), b=tensor(request.b), operands=operands, scale_a=scale(request.scale_a),
            scale_b=scale(request.scale_b),
        )  # fmt: skip

    first = made()
    size = sum(x.numel() * x.element_size() for x in (first.a, first.b))
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return [first, *(made() for _ in range(max(MIN_SETS, math.ceil(FAR * l2_bytes / max(size, 1))) - 1))]


# -- contenders --------------------------------------------------------------------------------------------------------
def _contenders(plan: PlannedGemm, first: Request) -> dict[str, Call]:
    """Return the functions to compare, by name, gemmsmith's first; those that do not take the problem are left out."""
    import torch

    is_tf32 = f"{plan.binding.mma.a}" == "tf32" and not plan.problem.is_3xtf32
    torch.backends.cuda.matmul.allow_tf32 = is_tf32  # also below an epilogue
    ours = {"gemmsmith": lambda x: plan.run(x.a, x.b, **x.inputs)}
    if first.epilogue:
        return {**ours, **_fused_by_torch(plan)}
    if first.grouping:
        return {**ours, **_grouped_by_torch()}
    return {**ours, **_by_torch(plan), **_by_cublaslt(plan, first)}


def _by_torch(plan: PlannedGemm) -> dict[str, Call]:
    """Return torch's product for the operands' dtype, without scales of blocks."""
    import torch

    out_dtype, dtype = _torch_dtype(plan.binding.out_dtype), f"{plan.binding.a.dtype}"
    if dtype == "int8":
        return {"torch._int_mm": lambda x: torch._int_mm(x.a, x.b)}
    if dtype.startswith("fp8"):
        one = torch.ones((), device="cuda")
        is_fast = not plan.problem.promoted
        return {"torch._scaled_mm": lambda x: torch._scaled_mm(
            x.a, x.b, one if x.scale_a is None else x.scale_a, one if x.scale_b is None else x.scale_b,
            out_dtype=out_dtype, use_fast_accum=is_fast,
        )}  # fmt: skip
    return {"torch.matmul": lambda x: torch.matmul(x.a, x.b)}


def _grouped_by_torch() -> dict[str, Call]:
    import torch

    return {"torch._grouped_mm": lambda x: torch._grouped_mm(
        x.a, x.b, x.operands["sizes"].cumsum(0, dtype=torch.int32)
    )}  # fmt: skip


def _fused_by_torch(plan: PlannedGemm) -> dict[str, Call]:
    import torch

    from gemmsmith.torch.fallback import evaluate_graph

    graph, names = plan.binding.source_graph, plan.binding.graph.result_names

    def eager(x: Request) -> Any:
        results = evaluate_graph(graph, torch.matmul(x.a, x.b), x.operands)
        return tuple(results[name] for name in names)

    def of_tensors(a: Any, b: Any, operands: Any) -> Any:
        return eager(Request(a, b, operands=operands))

    compiled = torch.compile(of_tensors, dynamic=False)
    return {"torch eager": eager, "torch.compile": lambda x: compiled(x.a, x.b, dict(x.operands))}


def _by_cublaslt(plan: PlannedGemm, first: Request) -> dict[str, Call]:
    """Return the fastest of the algorithms that cuBLASLt suggests, or none if it does not take the problem."""
    import torch

    from gemmsmith.cli import cublaslt

    if first.scale_a is not None or first.scale_b is not None or plan.problem.is_3xtf32:
        return {}
    d = torch.empty(plan.binding.shape, dtype=_torch_dtype(plan.binding.out_dtype), device="cuda")
    try:
        algorithms = cublaslt.algorithms(first.a, first.b, d, tf32=f"{plan.binding.mma.a}" == "tf32")
    except (ValueError, OSError, cublaslt.CublasLtError):
        return {}
    times: dict[int, float] = {}
    for i, algorithm in enumerate(algorithms):
        try:
            algorithm(first.a, first.b, d)
            times[i] = _gpu_us(partial(algorithm, first.a, first.b, d), 20)
        except cublaslt.CublasLtError:  # it does not run with these operands
            continue
    if not times:
        return {}
    fastest = algorithms[min(times, key=times.__getitem__)]

    def call(x: Request) -> Any:
        fastest(x.a, x.b, d)
        return d

    return {f"cuBLASLt, best of {len(times)}": call}


# -- timing ------------------------------------------------------------------------------------------------------------
def _measure(
    plan: PlannedGemm, sets: Sequence[Request], seconds: float, progress: ProgressCallback
) -> tuple[list[dict[str, Any]], int]:
    """Return a row for each contender (name, us, tflops, speedup), and the SMs' clock in MHz under load."""
    import torch

    progress("selecting cuBLASLt's algorithm")
    contenders = _contenders(plan, sets[0])
    want, graphs = _first_result(contenders["gemmsmith"](sets[0])).float(), dict[str, Any]()
    for name, call in contenders.items():
        progress(f"capturing {name}")
        try:
            result = _first_result(call(sets[0])).float()
        except Exception as error:
            if name == "gemmsmith":
                raise
            click.echo(f"{name} is left out: {' '.join(str(error).split())[:200]}", err=True)
            continue
        difference = float((result - want).norm() / want.norm()) if want.numel() else 0.0
        if not difference <= LARGEST_DIFFERENCE:
            click.echo(f"{name} is left out: its result differs by {difference:.2g} (Frobenius norm)", err=True)
            continue
        graphs[name] = _captured(call, sets)
    us = {name: _gpu_us(graph.replay, 2) / 2 for name, graph in graphs.items()}
    repeats = {name: max(1, round(seconds * 1e6 / x)) for name, x in us.items()}
    for _ in range(5 * repeats["gemmsmith"]):  # until the clock is that of the power limit
        graphs["gemmsmith"].replay()
    clock, times = _sm_clock(), {name: list[float]() for name in graphs}
    torch.cuda.synchronize()
    for i in range(ROUNDS):
        progress("measuring", i / ROUNDS)
        for name in random.sample(list(graphs), len(graphs)):
            _gpu_us(graphs[name].replay, math.ceil(repeats[name] / 8))
            times[name].append(_gpu_us(graphs[name].replay, repeats[name]) / repeats[name] / len(sets))
    flops = plan.problem.flops
    return [
        {"name": name, "us": (median := statistics.median(t)), "tflops": flops / median / 1e6,
         "speedup": statistics.median(x / y for x, y in zip(t, times["gemmsmith"], strict=True))}
        for name, t in times.items()
    ], clock  # fmt: skip


def _first_result(results: Any) -> Any:
    if isinstance(results, dict):
        results = tuple(results.values())
    return results[0] if isinstance(results, tuple) else results


def _captured(call: Call, sets: Sequence[Request]) -> Any:
    """Return one CUDA graph that calls once with each set."""
    import torch

    for x in sets:
        call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in sets:
            call(x)
    return graph


def _sm_clock() -> int:
    """Return the current clock of the SMs in MHz, or 0 if nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return 0


def _gpu_us(call: Callable[[], Any], count: int) -> float:
    """Return the GPU time in microseconds of `count` calls on torch's current stream, in total."""
    import torch

    return time_calls(call, torch.cuda.current_stream().cuda_stream, count)
