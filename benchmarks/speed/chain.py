"""A chain of GEMMs, each of which reads the previous one's result, with and without programmatic dependent launch.

Each mode is one CUDA graph. Weights are rotated so that they come from DRAM, and the modes' blocks alternate.

    python -m benchmarks.speed.chain --json benchmarks/results/chain-h200.json
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import gemmsmith
from benchmarks.timing import L2_BYTES, block, options, save

SHAPES = [(1, 4096), (16, 4096), (64, 8192), (128, 4096), (512, 4096), (2048, 2048), (4096, 4096)]
"""Numbers of rows, and the width of square weights."""
ROUNDS = 5


def measure(m: int, width: int) -> dict[str, Any]:
    """Return microseconds per GEMM of the chain with and without PDL, after checking that both give the same bits."""
    count = max(8, 3 * L2_BYTES // (2 * width * width))
    weights = [torch.randn(width, width, device="cuda").bfloat16().T / width**0.5 for _ in range(count)]
    x = torch.randn(m, width, device="cuda").bfloat16()
    base_config = gemmsmith.plan(x, weights[0], out=torch.empty_like(x)).config
    graphs, results = {}, {}
    for pdl in (False, True):
        results[pdl] = these = [x.clone(), torch.empty_like(x)]
        plan = gemmsmith.plan(x, weights[0], out=these[1], config=base_config.replace(pdl=pdl))
        plan.run(x, weights[0], these[1])
        torch.cuda.synchronize()
        graphs[pdl] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[pdl]):
            for i, w in enumerate(weights):
                plan.run(these[i % 2], w, these[(i + 1) % 2])
        these[0].copy_(x)
        graphs[pdl].replay()
    torch.cuda.synchronize()
    if not torch.equal(results[False][count % 2], results[True][count % 2]):
        raise SystemExit(f"{m} x {width}: results differ")
    times: dict[bool, list[float]] = {pdl: [] for pdl in graphs}
    for _ in range(ROUNDS):
        for pdl, graph in graphs.items():
            times[pdl].append(block(graph, count, 0.2, 0.05))
    gain = statistics.median(a / b for a, b in zip(times[False], times[True], strict=True))
    return {"m": m, "n": width, "k": width, "us": statistics.median(times[False]),
            "pdl_us": statistics.median(times[True]), "gain": gain, "config": str(base_config)}  # fmt: skip


def main() -> None:
    arguments = options(__doc__).parse_args()
    rows = []
    for m, width in SHAPES:
        rows.append(measure(m, width))
        r = rows[-1]
        print(f"{m:>5} x {width}: {r['us']:7.2f} us, with pdl {r['pdl_us']:7.2f} us: {r['gain']:.3f}x", flush=True)
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
