"""Time the model's best config with `splits` against its best without, where it prefers splits: drawn TF32 GEMMs.

    python -m benchmarks.fit.splits --json splits.json --seconds 220

Decides for which GEMMs a choice considers `splits` (tuning/config_table.py, splits_pay). In turns, five blocks of 8 ms
each and their median; operands beyond the L2.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gemmsmith
from benchmarks.rows import write
from gemmsmith import Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.gpus import gpu_at

M = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
N = (256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 8192)
K = (2048, 4096, 6144, 8192, 11008, 14336, 16384, 28672)
ROTATED_BYTES, BLOCK_US, BLOCKS = 150e6, 8000, 5


def matrix(rows: int, columns: int, letter: str) -> torch.Tensor:
    """Return random fp32 numbers, row-major (n) or column-major (t)."""
    return torch.randn(rows, columns, device="cuda") if letter == "n" else torch.randn(columns, rows, device="cuda").T


def block_us(run: Callable[[int], Any], calls: int) -> float:
    """Return the microseconds per call of a block."""
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    for i in range(calls):
        run(i)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls * 1e3


def row(kind: str, layout: str, m: int, n: int, k: int) -> dict[str, Any] | None:
    """Return a measured row, or None if the model prefers no splits."""
    a, b = (
        Spec((rows, columns), "fp32", (columns, 1) if letter == "n" else (1, rows))
        for rows, columns, letter in ((m, k, layout[0]), (k, n, layout[1]))
    )
    problem, gpu = bind(Request(a, b, precision=kind)).problem, gpu_at(0)
    ranked = rank_configs(problem, limit=1000, gpu=gpu, any_splits=True)
    configs = ranked[0], next(c for c in ranked if c.splits == 1)
    if configs[0].splits == 1:
        return None
    sets = max(2, int(ROTATED_BYTES / (4 * k * (m + n))) + 1)
    operands = [(matrix(m, k, layout[0]), matrix(k, n, layout[1])) for _ in range(sets)]

    def run(config: gemmsmith.Config, i: int) -> None:
        gemmsmith.gemm(*operands[i % sets], config=config, precision=kind)

    runs = [partial(run, config) for config in configs]
    calls = [max(8, int(BLOCK_US / block_us(x, 20))) for x in (*runs, *runs)][len(runs) :]
    times = np.median([[block_us(*x) for x in zip(runs, calls, strict=True)] for _ in range(BLOCKS)], axis=0)
    return {
        "kind": kind, "layout": layout, "m": m, "n": n, "k": k, "splits_us": times[0], "us": times[1],
        "splits_config": str(configs[0]), "config": str(configs[1]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    end, rng, rows, seen = time.time() + options.seconds, random.Random(options.seed), [], set()
    while time.time() < end:
        kind = rng.choice(["tf32"] * 3 + ["3xtf32"])
        layout = rng.choice(["nt", "nn", "tn", "tt"]) if kind == "tf32" else "nt"
        job = kind, layout, rng.choice(M), rng.choice(N), rng.choice(K)
        if job not in seen and (measured := row(*job)):
            rows.append(measured)
        seen.add(job)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    write(options.json, {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
