"""Kernels of matmuls: whether there is one, its time by the cost model, and its compilation.

Kernels are compiled in background threads while torch compiles the rest of the graph.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gemmsmith.arrays import Spec
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.binding.request import Request
from gemmsmith.host.plans import Plan
from gemmsmith.torch.compiler.fx_epilogue import FxEpilogueTracer
from gemmsmith.torch.compiler.nodes import Node, fake_tensor, size_hints
from gemmsmith.torch.compiler.region import FusionCandidate, Region
from gemmsmith.torch.ops import fp32_precision

INDUCTOR_BYTES_PER_US = 4_200_000
"""Memory throughput of Inductor's kernels on an H200, at best. Chosen, just below the 4.33 TB/s of docs/ladder.md."""
LAUNCH_US = 0.8
"""Time in us that the launch of one kernel takes in a CUDA graph: that of an empty kernel (docs/notebook/README.md)."""
MAX_COMPILE_THREADS = 8
"""Background threads that compile kernels, at most. Chosen; not measured."""


def estimated_us(plan: Plan) -> float:
    """Return the time in us of a plan's kernels, launches included, by the cost model."""
    return plan.estimated_us + len(plan.launches.all) * LAUNCH_US


def saved_us(candidate: FusionCandidate) -> float:
    """Return the time in us of Inductor's kernels that a candidate makes unnecessary, launches included."""
    saved_bytes = candidate.bytes_saved + candidate.extra_bytes
    return saved_bytes / INDUCTOR_BYTES_PER_US + candidate.kernels_saved * LAUNCH_US


def fused_plan(region: Region, candidate: FusionCandidate) -> Plan:
    """Return the plan of the operator that computes a candidate. Raises GemmsmithError if no kernel supports it."""
    return _plan(region.epilogue, candidate.outputs)


def unfused_plan(region: Region) -> Plan:
    """Return the plan of a region's matmul, or of each of its two, without further fusion."""
    return _plan(*unfused_epilogue(region))


def unfused_epilogue(region: Region) -> tuple[FxEpilogueTracer, Sequence[Node]]:
    """Return the epilogue of a region's matmul, or of the first of its two, without further fusion, and its outputs."""
    if region.matmul.second is None:
        return region.epilogue, region.plain_candidate.outputs
    return FxEpilogueTracer(replace(region.matmul, second=None), region.traffic), [region.matmul.node]


def _plan(epilogue: FxEpilogueTracer, outputs: Sequence[Node]) -> Plan:
    graph = epilogue.graph(outputs)
    a, *weights = [_spec(fake_tensor(x)) for x in epilogue.matmul.arrays]
    operands = {
        name: _spec(fake_tensor(x[0]).reshape(x[1])) if isinstance(x, tuple) else x
        for name, x in epilogue.arguments(graph).items()
    }
    b = tuple(weights) if epilogue.matmul.second else weights[0]
    precision = fp32_precision(fake_tensor(epilogue.matmul.a))
    if graph.is_identity:
        return _cached_plan(Request(a, b, out_dtype=graph.results[0].dtype, precision=precision))
    return _cached_plan(Request(a, b, operands=operands, epilogue=graph, precision=precision))


@lru_cache(maxsize=1024)
def _cached_plan(request: Request) -> Plan:
    """Return the plan of a matmul; layers of equal shapes share it."""
    return Plan(request)


def _spec(x: Any) -> Spec:
    return Spec(size_hints(x.shape), x.dtype, size_hints(x.stride()))


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_COMPILE_THREADS, os.cpu_count() or 1), "gemmsmith")


@lru_cache(maxsize=1024)
def compile_async(plan: Plan) -> list[Future[Any]]:
    """Start compiling a plan's kernels into the kernel cache."""
    return [_pool().submit(compile_source, x.kernel.source, x.kernel.name) for x in plan.launches.all]


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
    os.register_at_fork(after_in_child=compile_async.cache_clear)
