"""What products read from DRAM and from the L2, by hardware counters: what tuning/l2.py models.

Nsight Compute (`ncu`) runs this file again and reports on each kernel, caches flushed before.

    python benchmarks/counters.py --json benchmarks/results/counters-h200.json
"""

from __future__ import annotations

import csv
import subprocess
import sys
from typing import Any

import torch
from dense import operands, options, save

import gemmsmith
from gemmsmith import Config
from gemmsmith.tuning.l2 import traffic

CASES = [
    *((4096, 4096, 4096, raster, swizzle) for raster in "mn" for swizzle in (1, 4, 8, 16)),
    (8192, 8192, 4096, "m", 8), (8192, 8192, 4096, "n", 1), (2048, 28672, 4096, "m", 8), (2048, 28672, 4096, "m", 2),
]  # fmt: skip
METRICS = {"dram": "dram__bytes_read.sum", "sectors": "lts__t_sectors_srcunit_tex.sum"}
SECTOR = 32
"""Bytes."""


def config(raster: str, swizzle: int) -> Config:
    return Config(raster=raster, swizzle=swizzle)  # type: ignore[arg-type]


def profiled() -> None:
    """The products, one launch each."""
    for m, n, k, raster, swizzle in CASES:
        a, b, d = operands(m, n, k, torch.bfloat16, "nt")
        gemmsmith.gemm(a, b, out=d, config=config(raster, swizzle))
    torch.cuda.synchronize()


def counted() -> list[dict[str, float]]:
    """Each product's counters."""
    command = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none", "-k", "regex:warp_specialized",
               "--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--profiled"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        found.setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return [{name: x[metric] for name, metric in METRICS.items()} for x in found.values()]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--profiled", action="store_true", help="only run the products")
    arguments = parser.parse_args()
    if arguments.profiled:
        return profiled()
    rows: list[dict[str, Any]] = []
    for (m, n, k, raster, swizzle), seen in zip(CASES, counted(), strict=True):
        a, b = gemmsmith.Spec((m, k), "bf16"), gemmsmith.Spec((k, n), "bf16", (1, k))
        model = traffic(gemmsmith.plan(a, b, config=config(raster, swizzle)).problem, config(raster, swizzle))
        rows.append({"m": m, "n": n, "k": k, "raster": raster, "swizzle": swizzle, "dram_bytes": seen["dram"],
                     "l2_bytes": seen["sectors"] * SECTOR, "model_dram_bytes": model.dram,
                     "model_l2_bytes": model.l2})  # fmt: skip
        print(f"{m:>5} {n:>5} {k:>5} {raster}{swizzle:<3} DRAM {seen['dram'] / 1e6:7.1f} MB, model "
              f"{model.dram / 1e6:7.1f}   L2 {seen['sectors'] * SECTOR / 1e6:7.1f} MB, model "
              f"{model.l2 / 1e6:7.1f}", flush=True)  # fmt: skip
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
