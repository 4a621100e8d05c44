"""Building a kernel from a spec."""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.graph import BroadcastDims
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.epilogue.partials import shared_partials
from gemmsmith.kernels import cooperative, mma_multistage, pingpong, sgemm, tma  # noqa: F401 they register themselves
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.location import hide_frames
from gemmsmith.lang.types import TENSOR_MAP
from gemmsmith.tile_scheduler.sync_clusters import SYNC_INTERVAL_K_TILES

hide_frames(__file__)


@lru_cache(maxsize=256)
def build(spec: KernelSpec) -> Kernel:
    """Build and verify the kernel of a spec.

    Raises ConfigError if the spec is invalid, KernelError if the recorded kernel is.
    """
    with Builder(spec.name, threads=spec.threads, cluster=(spec.cluster_size, 1, 1), chip=spec.chip) as k:
        spec.design.record(k, spec)
        k.header += _header(spec, [x.name or "" for x in k.parameters if x.type == TENSOR_MAP])
        return k.finish()


_TF32X3 = " (3xTF32: a_residual x b + a x b_residual + a x b)"
_SWAPPED = "swap_ab: computes D^T with A and B swapped (A, B, D here: B^T, A^T, D^T of the GEMM with a row-major D)"


def _extents(dims: BroadcastDims) -> str:
    """Return the shape of an epilogue operand in the kernel's orientation, without the batch, such as (M, 1)."""
    extents = [("1", x, f"{x}/2")[per_value] for x, per_value in (("M", dims[1]), ("N", dims[2]))]
    return f"({', '.join(extents)})"


def _header(spec: KernelSpec, tensor_maps: list[str]) -> list[str]:
    """Return the lines of the printed kernel's header; `tensor_maps` are the names of what TMA loads and stores."""
    c, mma, graph = spec.config, spec.mma, spec.epilogue.graph
    results = graph.results
    reductions = shared_partials(graph, spec.epilogue.deterministic)
    partials = [x for x in results if x.name in reductions and not spec.epilogue.is_atomic(x)]
    written = [
        f"{x.name} {x.dtype}{' (atomic sums)' * (spec.adds_rows or x.name in reductions)}"
        for x in results
        if x not in partials and graph.constant_operand_of(x) is None
    ]
    stores = [x.name for x in results if result_argument(x.name) in tensor_maps]
    loads = [x.removeprefix("in_") for x in tensor_maps if x not in map(result_argument, stores)]
    majors = [
        f"{name} {major}-major ({'row' if (major == 'K') == (name == 'A') else 'column'}-major)"
        for name, major in zip("AB", spec.majors, strict=True)
    ]
    tile, cluster = ("x".join(map(str, x)) for x in (c.tile, c.cluster))
    cluster += f" times {c.cluster_splits} splits" * (c.cluster_splits > 1)
    role = "consumer" if spec.design.uses_tma else "math"  # others copy and multiply in the same threads
    warpgroups = f"{c.consumers} {role} warpgroup{'s' * (c.consumers > 1)}"
    lines = "columns" if c.raster == "m" else "rows"
    options = [
        (True, f"raster along {c.raster.upper()}, in groups of {c.raster_group} tile {lines}"),
        (c.splits != 1, "stream-K, or split-K if the grid is a multiple of the tiles"),
        (c.cluster_splits > 1, f"split-K over {c.cluster_splits} CTAs of a cluster"),
        (c.alias_epilogue, "alias_epilogue"),
        (c.serpentine, "serpentine"),
        (c.sync_clusters, f"sync_clusters (clusters wait for one another once per {SYNC_INTERVAL_K_TILES} k-tiles)"),
    ]
    hints = [f"{name} evict_{policy}" for name, policy in zip("AB", c.evict, strict=True) if policy != "normal"]
    hints += ["stores evict_first"] * c.streaming_stores
    scales = []
    for name, side, scale in zip("AB", ("row", "column"), spec.scales, strict=True):
        if scale:
            extent = f"{SCALE_BLOCK} {side}s" if scale.granularity > 1 else side
            scales.append(f"{scale.dtype} per {extent} of {name} and {SCALE_BLOCK} of K")
    accesses = {"TMA loads": loads, "TMA stores": stores, "L2 hints": hints}
    operands = [f"{x.name} {_extents(x.broadcast_dims)}" for x in graph.operands]
    kind = f"{mma.a} x {mma.b} with {mma.d} accumulators, {spec.design.mma_op.mnemonic}{_TF32X3 * spec.is_3xtf32}"
    header = [
        (True, f"gemmsmith: {spec.name}"),
        (True, f"D = epilogue(A @ B): {kind}; results: {', '.join(written) or 'none'}"),
        (partials, f"fp32 partials of {', '.join(x.name for x in partials)}, which other kernels combine"),
        (operands, f"epilogue operands: {', '.join(operands)}"),
        (c.swap_ab, _SWAPPED),
        (True, f"{c.design} schedule, tile {tile}, cluster {cluster}, {warpgroups}, {c.stages} stages"),
        (True, ", ".join(text for is_set, text in options if is_set)),
        (True, "; ".join([", ".join(majors), *(f"{name}: {', '.join(x)}" for name, x in accesses.items() if x)])),
        (scales, f"block scales: {', '.join(scales)}"),
    ]
    return [line for condition, line in header if condition]
