"""From a spec to a built kernel."""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.design import find
from gemmsmith.core.spec import KernelSpec
from gemmsmith.kernels import cooperative, mma_multistage, pingpong, sgemm, tma  # noqa: F401 they register themselves
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel


@lru_cache(maxsize=256)
def build(spec: KernelSpec) -> Kernel:
    """The kernel of a spec, verified. Raises ConfigError or KernelError."""
    results = ", ".join(f"{r.name} {r.dtype}" for r in spec.epilogue.graph.results)
    with Builder(spec.name, threads=spec.threads, cluster=(spec.cluster_size, 1, 1), chip=spec.chip) as k:
        k.header += [
            f"gemmsmith: {spec.name}",
            f"D = epilogue(A @ B), {spec.mma} by {spec.mma.by}; results: {results}",
            f"config: {spec.config.replace(splits=int(spec.config.splits == 1), swap_ab=False)}",  # not how many
            spec.layouts,
        ]
        find(spec.config.design).record(k, spec)
        return k.finish()
