"""The choice of a matmul's kernel on a GPU, by time: torch's, gemmsmith's, or gemmsmith's with a fused epilogue.

Kernels are compiled in background threads while torch compiles the rest of the graph.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch._inductor.config

from gemmsmith.arrays import Spec
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.binding.request import Request
from gemmsmith.core.errors import GemmsmithError
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.torch.compiler.fx_epilogue import FxEpilogueTracer
from gemmsmith.torch.compiler.matmuls import Matmul
from gemmsmith.torch.compiler.measure import Timer, call_of_epilogue, call_of_node
from gemmsmith.torch.compiler.nodes import (
    Node,
    belongs_to_training,
    fake_tensor,
    have_hints,
    is_row_major,
    shape,
    size_hints,
)
from gemmsmith.torch.compiler.region import FusionCandidate, Region
from gemmsmith.torch.ops import as_request, fp32_precision
from gemmsmith.tuning.choose import estimate_us

MIN_PLAIN_US = 100
"""Estimated us from which a matmul without an epilogue is replaced if kernels are not timed. In benchmarks/results
(dense-suite-h200, dense-unseen-h200, layers-h100, layouts-h100, kinds-h100) the bf16 and fp16 GEMMs of that size are
1.043 times as fast as torch.mm in the geometric mean of 288; 6 % lose, one of them more than 2 % (0.968). Shorter ones
win 1.086, but 16 % lose, 24 of 294 more than 2 %. All 5 in 3xTF32 win, 1.6 and more; of 20 in TF32 and of 10 batched
ones a quarter loses, so they stay with torch."""
FP32_FLOPS_PER_US = 48_000_000
"""FLOPs per us of torch.mm in fp32: 40 to 50 TFLOP/s for 15 GEMMs on an H100 (kinds-h100)."""

MIN_SAVED_US = 5
"""Time in us that fusing has to save in training without CUDA graphs, where the host may limit a step: the call of an
operator takes longer there than those of torch.mm and of a Triton kernel. BERT large with 26 fused matmuls, half of
which saved 3 us each, took 1.20 of Inductor's time (hf-models-h100). Chosen; not measured."""


@dataclass(frozen=True)
class Times:
    """Times in us of a matmul, or of both matmuls of a pair.

    Attributes:
        fused: the time of gemmsmith's kernel with an epilogue; None if there is nothing to fuse.
        plain: the time of gemmsmith's kernel without an epilogue.
        torch: the time of torch's kernel; None if it was not measured, and cannot be estimated (only 3xTF32 can).
        saved: the estimated time of Inductor's kernels that fusing makes unnecessary.
        measured: whether the first three were measured on a GPU; otherwise they are estimates.
    """

    fused: float | None
    plain: float
    torch: float | None
    saved: float
    measured: bool

    @property
    def unfused(self) -> float:
        """The time without fusing: the faster kernel without an epilogue, and the kernels that fusing saves."""
        return min(self.plain, self.torch or self.plain) + self.saved


@dataclass(frozen=True)
class Choice:
    """The choice of a matmul's kernel.

    Attributes:
        candidate: the nodes that a kernel of gemmsmith replaces; None: the matmul stays torch's.
        reason: why no epilogue is fused; "" if one is.
        times: the times that decided; None if there was no choice.
    """

    candidate: FusionCandidate | None
    reason: str
    times: Times | None = None


def choose_kernel(region: Region, candidate: FusionCandidate | None, reason: str, timer: Timer | None) -> Choice:
    """Choose the fastest kernel of a matmul, and start to compile it if it is gemmsmith's.

    Without a `candidate`, `reason` says why. Without a `timer`, the cost model estimates the times.
    """
    matmul = region.matmul
    if candidate is None and (matmul.epilogue or matmul.second):
        return Choice(None, reason)
    try:
        times = _times(region, candidate, timer)
    except GemmsmithError as error:
        unsupported = f"no kernel supports it: {error}"
        return choose_kernel(region, None, unsupported, timer) if candidate else Choice(None, unsupported)
    if candidate and times.fused is not None and (reason := _reason_not_worthwhile(matmul, times, times.fused)):
        candidate = None
    if candidate is None and _is_plain_faster(matmul, times):
        candidate = region.plain_candidate
    if candidate:
        compile_async(plan_operator(region.epilogue, candidate.outputs))
    return Choice(candidate, reason, times)


def _reason_not_worthwhile(matmul: Matmul, times: Times, fused_us: float) -> str:
    """Return why a fused kernel that takes `fused_us` is not worthwhile; "" if it is."""
    faster_us = times.unfused - fused_us
    if faster_us <= 0:
        slower_us = times.saved - faster_us
        return f"fusing would slow the matmul by {slower_us:.1f} us and save {times.saved:.1f} us elsewhere"
    launched_by_host = belongs_to_training(matmul.node) and not torch._inductor.config.triton.cudagraphs
    if launched_by_host and faster_us < MIN_SAVED_US:
        return f"fusing would save {faster_us:.1f} us, less than a call may cost on the host"
    return ""


def _is_plain_faster(matmul: Matmul, times: Times) -> bool:
    """Return whether gemmsmith's kernel without an epilogue is faster than torch's, and may replace a matmul.

    Without measured times it counts as faster for GEMMs of the kinds and times for which benchmarks say so, see
    MIN_PLAIN_US.
    """
    if matmul.epilogue or matmul.second or not is_row_major(matmul.node):
        return False
    if times.measured and times.torch is not None:
        return times.plain < times.torch
    a = fake_tensor(matmul.a)
    dtype_wins = a.element_size() == 2 or fp32_precision(a) == "3xtf32"
    return times.plain >= MIN_PLAIN_US and dtype_wins and len(matmul.shape) == 2 and _has_hints(matmul)


def _has_hints(matmul: Matmul) -> bool:
    """Return whether all sizes of a matmul are numbers, or symbols with a hint."""
    return all(have_hints(shape(x)) for x in matmul.arrays)


def _times(region: Region, candidate: FusionCandidate | None, timer: Timer | None) -> Times:
    """Return the times of a matmul's kernels. Raises GemmsmithError if no kernel supports the matmul.

    They are estimates if there is no timer, a symbolic size has no hint, or the memory does not suffice to measure.
    """
    matmul, saved = region.matmul, saved_us(candidate) if candidate else 0.0
    us = {"plain": estimated_us(plan_operator(*unfused_epilogue(region)))}
    if candidate:
        us["fused"] = estimated_us(plan_operator(region.epilogue, candidate.outputs))
    measured = False
    if timer and _has_hints(matmul):
        calls = {"plain": call_of_epilogue(*unfused_epilogue(region))}
        if not matmul.epilogue:
            calls["torch"] = call_of_node(matmul.node)
        if candidate:
            calls["fused"] = call_of_epilogue(region.epilogue, candidate.outputs)
        with suppress(torch.OutOfMemoryError):
            us = dict(zip(calls, timer(tuple(calls.values())), strict=True))
            measured = True
    elif not matmul.epilogue and fp32_precision(fake_tensor(matmul.a)) == "3xtf32":
        flops = 2 * math.prod(size_hints((*matmul.shape, shape(matmul.a)[-1])))
        us["torch"] = flops / FP32_FLOPS_PER_US
    count = len(matmul.nodes)
    torch_us = count * us["torch"] if "torch" in us else None
    return Times(us.get("fused"), count * us["plain"], torch_us, saved, measured)


INDUCTOR_BYTES_PER_US = 4_200_000
"""Memory throughput of Inductor's kernels on an H200, at best. Chosen, just below the 4.33 TB/s of docs/ladder.md."""
LAUNCH_US = 0.8
"""Time in us that the launch of one kernel takes in a CUDA graph: that of an empty kernel (docs/notebook/README.md)."""
MAX_COMPILE_THREADS = 8
"""Background threads that compile kernels, at most. Chosen; not measured."""


def estimated_us(planned: PlannedGemm) -> float:
    """Return the time in us of a plan's kernels, launches included, by the cost model.

    That of wgmma also compares kernels without it, which it does not cover.
    """
    us = estimate_us(planned.unswapped, planned.config, planned.unswapped_epilogue, planned.gpu)
    return us + len(planned.launches.all) * LAUNCH_US


def saved_us(candidate: FusionCandidate) -> float:
    """Return the estimated time in us of Inductor's kernels that a candidate makes unnecessary, launches included."""
    # The graph moves bytes_saved less, although the fused kernel moves extra_bytes more
    saved_bytes = candidate.bytes_saved + candidate.extra_bytes
    return saved_bytes / INDUCTOR_BYTES_PER_US + candidate.kernels_saved * LAUNCH_US


def unfused_epilogue(region: Region) -> tuple[FxEpilogueTracer, Sequence[Node]]:
    """Return the epilogue of a region's matmul (the first one of a pair) without fused nodes, and the nodes it stores.

    A matmul that is gemmsmith's operator already keeps its own epilogue.
    """
    if region.matmul.second is None:
        return region.epilogue, region.plain_candidate.outputs
    return FxEpilogueTracer(replace(region.matmul, second=None), region.traffic), [region.matmul.node]


def plan_operator(epilogue: FxEpilogueTracer, outputs: Sequence[Node]) -> PlannedGemm:
    """Return the plan of the operator that computes the nodes `outputs` by an epilogue.

    Symbolic sizes are replaced by their hints. Raises GemmsmithError if no kernel supports it.
    """
    graph = epilogue.graph(outputs)
    numbers, tensors = epilogue.arguments(graph)
    a, *weights = (_spec(fake_tensor(x)) for x in epilogue.matmul.arrays)
    operands = [_spec(fake_tensor(x).reshape(extents)) for x, extents in tensors]
    request = as_request(graph, a, tuple(weights) if epilogue.matmul.second else weights[0], numbers, operands)
    return _cached_plan(request._replace(precision=fp32_precision(fake_tensor(epilogue.matmul.a))))


@lru_cache(maxsize=1024)
def _cached_plan(request: Request) -> PlannedGemm:
    """Return the plan of a matmul; layers of equal shapes share it."""
    return PlannedGemm(request)


def _spec(x: Any) -> Spec:
    return Spec(size_hints(x.shape), x.dtype, size_hints(x.stride()))


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_COMPILE_THREADS, os.cpu_count() or 1), "gemmsmith")


@lru_cache(maxsize=1024)
def compile_async(planned: PlannedGemm) -> list[Future[Any]]:
    """Start to compile a plan's kernels in background threads; the results are in the kernel cache. Once per plan."""
    return [_pool().submit(compile_source, x.kernel.source, x.kernel.name) for x in planned.launches.all]


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
    os.register_at_fork(after_in_child=compile_async.cache_clear)
