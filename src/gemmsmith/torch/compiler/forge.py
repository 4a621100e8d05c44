"""Kernels of fused products: whether there is one, whether the model of the GPU says that it wins, and compiling it
while torch compiles the rest of the graph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from gemmsmith.arrays import Spec
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.core.errors import GemmsmithError
from gemmsmith.core.graph import Graph
from gemmsmith.plans import Plan
from gemmsmith.torch.compiler.nodes import hints, value
from gemmsmith.torch.compiler.region import Choice, Region
from gemmsmith.torch.operator import precision

BYTES_PER_US = 4_200_000
"""What Inductor's kernels move of an H200's memory, at best."""
LAUNCH_US = 0.8
"""What the launch of a kernel takes, in a CUDA graph."""
MOST_THREADS = 8


def refusal(region: Region, choice: Choice) -> str:
    """Why the operator would not win on a GPU; "" if it would. Its kernels are being compiled then."""
    try:
        fused, bare = fused_plan(region, choice), bare_plan(region)
    except GemmsmithError as error:
        return f"there is no kernel for it: {error}"
    fewer = choice.spared - len(fused.launches.all) + len(bare.launches.all)
    longer = fused.estimate - bare.estimate
    spared = (choice.saved + choice.beside) / BYTES_PER_US + fewer * LAUNCH_US
    if longer >= spared:
        return f"the product would take {longer:.1f} us longer, and spare other kernels {spared:.1f} us"
    forge(fused)
    return ""


def fused_plan(region: Region, choice: Choice) -> Plan:
    """The plan of the operator that a choice makes. GemmsmithError where there is no kernel for it."""
    epilogue = region.epilogue
    graph = epilogue.graph(choice.stored)
    nodes = {operand.name: x for x, operand in epilogue.operands.items()}
    tensors = {o.name: value(nodes[o.name]).reshape(epilogue.given(o.extent)) for o in graph.operands if o.dtype}
    return _plan(
        region, graph, {**tensors, **{o.name: epilogue.numbers[o.name] for o in graph.operands if not o.dtype}}
    )


def bare_plan(region: Region) -> Plan:
    """The plan of a region's product as it is."""
    operands = {name: x if isinstance(x, float) else value(x) for name, x in region.product.operands.items()}
    return _plan(region, region.product.epilogue, operands)


def _plan(region: Region, epilogue: Graph | None, operands: Mapping[str, Any]) -> Plan:
    a, b = value(region.product.a), value(region.product.b)
    given = {name: x if isinstance(x, float) else _spec(x) for name, x in operands.items()}
    bare = epilogue is None or epilogue.is_bare
    return _planned(_spec(a), _spec(b), None if bare else epilogue, tuple(given.items()), precision(a))


@lru_cache(maxsize=1024)
def _planned(a: Spec, b: Spec, epilogue: Graph | None, operands: tuple[tuple[str, Any], ...], kind: str | None) -> Plan:
    """The plan of one product, and of all layers' that are like it."""
    return Plan(a, b, epilogue=epilogue, operands=dict(operands), precision=kind)


def _spec(x: Any) -> Spec:
    return Spec(hints(x.shape), x.dtype, hints(x.stride()))


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "gemmsmith")


@lru_cache(maxsize=1024)
def forge(plan: Plan) -> list[Future[Any]]:
    """Starts compiling a plan's kernels, for the cache in which a call finds them."""
    return [_pool().submit(compile_source, x.kernel.source, x.kernel.name) for x in plan.launches.all]
