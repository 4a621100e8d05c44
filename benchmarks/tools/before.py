"""Kernels whose source has changed since an earlier commit, against their earlier versions, in one run.

    python -m benchmarks.tools.before --write FOLDER        # on the earlier commit; needs no GPU
    python -m benchmarks.tools.before --against FOLDER --json rows.json

Times blocks of our kernel, of the earlier kernel with the same config, of torch.mm, and, up to 64 rows, of a copy of as
many bytes, in a random order in each round. A row is like dense.py's, with the earlier kernel's time and its ratio to
ours.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

import gemmsmith
from benchmarks.suite import SUITE, Shape
from benchmarks.timing import block_seconds, captured, edited, options, rotated, save, shuffled
from gemmsmith import Spec


def source_of(shape: Shape) -> str:
    """Return the source of the kernel of a shape of the suite."""
    m, n, k = shape
    return gemmsmith.plan(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k))).source


def file_of(folder: Path, shape: Shape) -> Path:
    return folder / f"{'x'.join(map(str, shape))}.cu"


def compared(shape: Shape, before: str, rounds: int) -> dict[str, Any]:
    """Return the row of a shape."""
    m, n, k = shape
    sets = rotated(m, n, k, torch.bfloat16, "nt")
    a, b, d = sets[0]
    right = torch.mm(a, b).float()

    def graph() -> torch.cuda.CUDAGraph:
        d.fill_(float("nan"))
        plan = gemmsmith.plan(a, b, out=d)
        made = captured(lambda a, b, d: plan.run(a, b, d), sets)
        if not (d.float() - right).norm() < 1e-2 * right.norm():
            raise SystemExit(f"{m}x{n}x{k}: not torch's result")
        return made

    plan = gemmsmith.plan(a, b, out=d)
    graphs = {"ours": graph(), "torch": captured(lambda a, b, d: torch.mm(a, b, out=d), sets)}
    with edited(plan._planned.kernel, before):
        graphs["before"] = graph()
    if m <= 64:
        size = m * k + k * n + m * n  # a copy of half the bytes reads and writes all
        halves = [tuple(torch.empty(size, dtype=torch.uint8, device="cuda") for _ in "xy") for _ in sets]
        graphs["copy"] = captured(lambda x, y: y.copy_(x), halves)
    times, clocks = shuffled(graphs, len(sets), block_seconds(m), rounds)
    us = {f"{name}_us": statistics.median(t) for name, t in times.items()}
    flops = 2e-6 * m * n * k
    return {
        "m": m, "n": n, "k": k, "dtype": "bfloat16", "layout": "nt", "us": us.pop("ours_us"), **us,
        "ratio": statistics.median(t / o for o, t in zip(times["ours"], times["torch"], strict=True)),
        "before_over_ours": statistics.median(t / o for o, t in zip(times["ours"], times["before"], strict=True)),
        "tflops": flops / statistics.median(times["ours"]), "torch_tflops": flops / us["torch_us"],
        "config": str(plan.config), "sm_mhz": clocks,
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", type=Path, help="writes the suite's kernels into a folder")
    way.add_argument("--against", type=Path, help="times those that differ from a folder's")
    arguments = parser.parse_args()
    if arguments.write:
        arguments.write.mkdir(parents=True, exist_ok=True)
        for shape in SUITE:
            file_of(arguments.write, shape).write_text(source_of(shape))
        return
    rows: list[dict[str, Any]] = []
    for shape in SUITE:
        before = file_of(arguments.against, shape).read_text()
        if before == source_of(shape):
            continue
        rows.append(compared(shape, before, arguments.rounds))
        r = rows[-1]
        print(f"{shape!s:24} {r['us']:9.1f} us   before {r['before_us']:9.1f}   torch {r['torch_us']:9.1f}   "
              f"before / ours {r['before_over_ours']:.3f}   {r['config']}", flush=True)  # fmt: skip
        save(arguments.json, rows)
    if rows:
        print(f"mean {statistics.geometric_mean(r['before_over_ours'] for r in rows):.4f} over {len(rows)}")


if __name__ == "__main__":
    main()
