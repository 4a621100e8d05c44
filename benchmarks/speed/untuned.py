"""The cost model's choice against the tuned table's, in one run, for the shapes of the suite.

Both are captured in CUDA graphs that rotate enough buffers to exceed the L2, and run in blocks in a random order. If
both choices are equal the ratio is 1, and nothing is timed.

    python -m benchmarks.speed.untuned --json benchmarks/results/untuned-h200.json.xz
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import gemmsmith
from benchmarks.suite import SUITE
from benchmarks.timing import block_seconds, captured, options, rotated, save, shuffled
from gemmsmith.tuning.choose import choose


def measure(m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Return one row: microseconds with both configs, and the ratio of the table's to the model's."""
    sets = rotated(m, n, k, torch.bfloat16, "nt", least=2)
    tuned = gemmsmith.plan(*sets[0][:2], out=sets[0][2])
    untuned_config = choose(tuned.problem.T if tuned.config.swap_ab else tuned.problem)
    row = {"m": m, "n": n, "k": k, "config": str(tuned.config), "chosen": str(untuned_config), "ratio": 1.0}
    if untuned_config == tuned.config:
        return row
    untuned = gemmsmith.plan(*sets[0][:2], out=sets[0][2], config=untuned_config)
    graphs = {name: captured(plan.run, sets) for name, plan in (("us", tuned), ("untuned_us", untuned))}
    times, clocks = shuffled(graphs, len(sets), block_seconds(m), rounds)
    us = {name: statistics.median(t) for name, t in times.items()}
    return {**row, **us, "ratio": us["us"] / us["untuned_us"], "sm_mhz": clocks}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    rows = []
    for shape in SUITE:
        rows.append(measure(*shape, arguments.rounds))
        r = rows[-1]
        print(f"{r['m']:>6} {r['n']:>6} {r['k']:>6}  {r['ratio']:.3f}   {r['chosen']}", flush=True)
        save(arguments.json, rows)
    for name, some in (("all", rows), ("M <= 64", [r for r in rows if r["m"] <= 64]),
                       ("M >= 128", [r for r in rows if r["m"] >= 128])):  # fmt: skip
        ratios = [r["ratio"] for r in some]
        print(f"{name}: {len(some)} shapes, geometric mean {statistics.geometric_mean(ratios):.3f}, "
              f"least {min(ratios):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
