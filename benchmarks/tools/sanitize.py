"""Small GEMMs of unaligned sizes for compute-sanitizer.

They cover both designs, with and without a cluster, and fused epilogues with every kind of operand and result.

for tool in memcheck racecheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 1 python -m benchmarks.tools.sanitize
done
"""

from __future__ import annotations

from typing import Any

import numpy as np

import gemmsmith
from gemmsmith import Config
from gemmsmith.backends.cuda import kernel_loader
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.backends.reference import bounds
from gemmsmith.binding.results import result_shape
from gemmsmith.core.dtypes import FP16, FP32


def everything(acc: Any, s: Any, r: Any, c: Any, x: Any) -> Any:
    z = acc * s + r * c - x
    return {"out": z.tanh(), "aux": z.to("fp32"), "columns": z.sum(-2), "rows": z.amax(-1), "all": z.sum()}


def gated(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    q, scales = gemmsmith.quantize(gate.silu() * up)
    return {"out": q, "scales": scales}


def epilogues(rng: np.random.Generator) -> None:
    """Run fused kernels. Their numbers are tested elsewhere."""
    for function, m, n, k, config in (
        (everything, 300, 264, 328, Config(tile=(128, 128, 64), cluster=(2, 1), stages=2)),
        (everything, 300, 264, 328, Config(tile=(128, 64, 64), cluster=(1, 2), stages=3, alias_epilogue=True)),
        (everything, 129, 67, 45, Config("tma", (128, 64, 64), (1, 1), 2)),
        (gated, 200, 512, 64, Config(tile=(128, 256, 64), cluster=(1, 1), stages=2)),
    ):
        a, b = (rng.standard_normal(s, np.float32).astype(np.float16) for s in ((m, k), (k, n)))
        row, column, whole = (rng.standard_normal(s, np.float32).astype(np.float16) for s in ((n,), (m, 1), (m, n)))
        given: dict[str, Any] = {"s": 0.5, "r": row, "c": column, "x": whole} if function is everything else {}
        plan = gemmsmith.plan(a, b, epilogue=function, operands=given, config=config)
        there = {name: x if isinstance(x, float) else DeviceArray.from_numpy(x) for name, x in given.items()}
        results = {
            r.name: DeviceArray.from_numpy(
                np.zeros(result_shape(plan._planned.binding.graph, r, (m, n)), r.dtype.numpy)
            )
            for r in plan._planned.binding.graph.results
        }
        workspace = DeviceArray.from_numpy(np.zeros(max(plan.workspace_bytes, 1), np.uint8))
        plan.run(*(DeviceArray.from_numpy(x) for x in (a, b)), results, operands=there, workspace=workspace)
        assert np.isfinite(results["out"].numpy().astype(np.float32)).all()
        print(plan._planned.spec.name, m, n, k, "done", flush=True)


def main() -> None:
    rng = np.random.default_rng()
    with kernel_loader.device_guard(0):
        epilogues(rng)
        for design, splits, cluster_splits, sync_clusters in (
            ("cooperative", 1, 1, False), ("tma", 1, 1, False), ("pingpong", 1, 1, False),
            ("cooperative", 0, 1, False), ("cooperative", 1, 2, False), ("cooperative", 1, 1, True),
        ):  # fmt: skip
            for tile, cluster in (((128, 128, 64), (1, 1)), ((128, 128, 64), (2, 1)), ((128, 64, 32), (1, 2))):
                for m, n, k in ((300, 264, 328), (129, 67, 45)):
                    a, b = (rng.standard_normal(s, np.float32).astype(np.float16) for s in ((m, k), (k, n)))
                    out = np.full((m, n), np.nan, np.float16)
                    on_device = [DeviceArray.from_numpy(x) for x in (a, b, out)]
                    shares = {"splits": splits, "cluster_splits": cluster_splits}
                    config = Config(design, tile, cluster, 3, **shares, sync_clusters=sync_clusters)
                    plan = gemmsmith.plan(a, b, out=out, config=config)
                    workspace = DeviceArray.from_numpy(np.zeros(max(plan.workspace_bytes, 1), np.uint8))
                    plan.run(*on_device, workspace=workspace)
                    bounds.check(on_device[2].numpy(), a, b, FP32, FP16).require()
                    print(plan._planned.spec.name, m, n, k, "right", flush=True)


if __name__ == "__main__":
    main()
