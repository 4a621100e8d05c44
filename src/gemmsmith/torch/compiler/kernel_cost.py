"""Kernels of fused matmuls: whether there is one, whether the cost model predicts that it wins, and its compilation.

Kernels are compiled in background threads while torch compiles the rest of the graph.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from gemmsmith.arrays import Spec
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.binding.request import Request
from gemmsmith.core.errors import GemmsmithError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.host.plans import Plan
from gemmsmith.torch.compiler.nodes import fake_tensor, size_hints
from gemmsmith.torch.compiler.region import FusionCandidate, Region
from gemmsmith.torch.ops import fp32_precision

INDUCTOR_BYTES_PER_US = 4_200_000
"""Memory throughput of Inductor's kernels on an H200, at best. Chosen, just below the 4.33 TB/s of docs/ladder.md."""
LAUNCH_US = 0.8
"""Time in us that the launch of one kernel takes in a CUDA graph: that of an empty kernel in docs/notebook."""
MAX_COMPILE_THREADS = 8
"""Background threads that compile kernels, at most. Chosen; not measured."""


def reason_not_to_fuse(region: Region, candidate: FusionCandidate) -> str:
    """Return the reason not to fuse a candidate on this GPU, or "".

    If it is worthwhile, starts compiling its kernels.
    """
    try:
        fused, unfused = fused_plan(region, candidate), unfused_plan(region)
    except GemmsmithError as error:
        return f"no kernel supports it: {error}"
    matmuls = len(region.matmul.nodes)
    launches_saved = candidate.kernels_saved - len(fused.launches.all) + matmuls * len(unfused.launches.all)
    extra_us = fused.estimated_us - matmuls * unfused.estimated_us
    saved_us = (candidate.bytes_saved + candidate.extra_bytes) / INDUCTOR_BYTES_PER_US + launches_saved * LAUNCH_US
    if extra_us >= saved_us:
        return f"fusing would slow the matmul by {extra_us:.1f} us and save {saved_us:.1f} us elsewhere"
    compile_async(fused)
    return ""


def fused_plan(region: Region, candidate: FusionCandidate) -> Plan:
    """Return the plan of the operator that computes a candidate. Raises GemmsmithError if no kernel supports it."""
    epilogue = region.epilogue
    graph = epilogue.graph(candidate.outputs)
    nodes = {operand.name: x for x, operand in epilogue.operands.items()}
    tensors = {
        o.name: fake_tensor(nodes[o.name]).reshape(epilogue.operand_shape(o.broadcast_dims))
        for o in graph.operands
        if o.dtype
    }
    numbers = {o.name: epilogue.numbers[o.name] for o in graph.operands if not o.dtype}
    return _plan_matmul(region, graph, {**tensors, **numbers}, region.matmul.second is not None)


def unfused_plan(region: Region) -> Plan:
    """Return the plan of a region's matmul, or of each of its two, without further fusion."""
    operands = {name: x if isinstance(x, float) else fake_tensor(x) for name, x in region.matmul.operands.items()}
    return _plan_matmul(region, region.matmul.epilogue, operands)


def _plan_matmul(
    region: Region, epilogue: EpilogueGraph | None, operands: Mapping[str, Any], of_two: bool = False
) -> Plan:
    a, b = fake_tensor(region.matmul.a), _spec(fake_tensor(region.matmul.b))
    specs = {name: x if isinstance(x, float) else _spec(x) for name, x in operands.items()}
    is_plain = epilogue is None or epilogue.is_identity
    return _cached_plan(
        _spec(a), (b, b) if of_two else b, None if is_plain else epilogue, tuple(specs.items()), fp32_precision(a)
    )


@lru_cache(maxsize=1024)
def _cached_plan(
    a: Spec, b: Spec | tuple[Spec, Spec], epilogue: EpilogueGraph | None, operands: tuple[tuple[str, Any], ...],
    fp32_precision: str | None,
) -> Plan:  # fmt: skip
    """Return the plan of a matmul; layers of equal shapes share it."""
    return Plan(Request(a, b, operands=dict(operands), epilogue=epilogue, precision=fp32_precision))


def _spec(x: Any) -> Spec:
    return Spec(size_hints(x.shape), x.dtype, size_hints(x.stride()))


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_COMPILE_THREADS, os.cpu_count() or 1), "gemmsmith")


@lru_cache(maxsize=1024)
def compile_async(plan: Plan) -> list[Future[Any]]:
    """Start compiling a plan's kernels into the kernel cache."""
    return [_pool().submit(compile_source, x.kernel.source, x.kernel.name) for x in plan.launches.all]
