"""Hardware counters of the bytes that GEMMs read from DRAM and from the L2, which tuning/l2.py models.

Nsight Compute (`ncu`) runs this file again and reports on each kernel, with caches flushed before.

    python -m benchmarks.probe.counters --json benchmarks/results/counters-h200.json
"""

from __future__ import annotations

from typing import Any

import torch

import gemmsmith
from benchmarks.probe import nsight
from benchmarks.timing import operands, options, save
from gemmsmith import Config
from gemmsmith.core.tile import SECTOR_BYTES
from gemmsmith.tuning.l2 import simulate_traffic

WALKS = [
    *((4096, 4096, 4096, raster, raster_group) for raster in "mn" for raster_group in (1, 4, 8, 16)),
    (8192, 8192, 4096, "m", 8), (8192, 8192, 4096, "n", 1), (2048, 28672, 4096, "m", 8), (2048, 28672, 4096, "m", 2),
]  # fmt: skip
CHOSEN = [(8192, 8192, 8192), (2048, 28672, 4096), (8192, 28672, 4096), (4096, 7168, 2048)]
"""The table's config, in serpentine order, with L2 eviction hints, and all but the last in sync_clusters."""
METRICS = {"dram": "dram__bytes_read.sum", "sectors": "lts__t_sectors_srcunit_tex.sum"}


def plans() -> list[gemmsmith.Plan]:
    """Return the plans whose counters are read."""
    walks = [((m, n, k), Config(raster=raster, raster_group=width)) for m, n, k, raster, width in WALKS]
    return [
        gemmsmith.plan(gemmsmith.Spec((m, k), "bf16"), gemmsmith.Spec((k, n), "bf16", (1, k)), config=config)
        for (m, n, k), config in [*walks, *((shape, None) for shape in CHOSEN)]
    ]


def profiled() -> None:
    """Run each GEMM once."""
    for plan in plans():
        p = plan.problem
        a, b, d = operands(p.m, p.n, p.k, torch.bfloat16, "nt")
        gemmsmith.gemm(a, b, out=d, config=plan.config)
    torch.cuda.synchronize()


def counted() -> list[dict[str, float]]:
    """Return the counters of each GEMM."""
    launches = nsight.parsed(
        nsight.profiled(["-m", __spec__.name, "--profiled"], "cooperative|pingpong", [*METRICS.values()])
    )
    return [{name: x[metric] for name, metric in METRICS.items()} for x in launches]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--profiled", action="store_true", help="only run the products")
    arguments = parser.parse_args()
    if arguments.profiled:
        return profiled()
    rows: list[dict[str, Any]] = []
    for plan, seen in zip(plans(), counted(), strict=True):
        p, model = plan.problem, simulate_traffic(plan.problem, plan.config)
        rows.append({"m": p.m, "n": p.n, "k": p.k, "config": str(plan.config), "dram_bytes": seen["dram"],
                     "l2_bytes": seen["sectors"] * SECTOR_BYTES, "model_dram_bytes": model.dram_bytes,
                     "model_l2_bytes": model.l2_bytes})  # fmt: skip
        print(f"{p.m:>5} {p.n:>5} {p.k:>5} DRAM {seen['dram'] / 1e6:7.1f} MB, model {model.dram_bytes / 1e6:7.1f}   "
              f"L2 {seen['sectors'] * SECTOR_BYTES / 1e6:7.1f} MB, model {model.l2_bytes / 1e6:7.1f}   {plan.config}",
              flush=True)  # fmt: skip
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
