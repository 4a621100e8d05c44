"""What a GEMM costs at the power limit: two configs in short blocks in turns, in long ones, and among other kernels.

In short blocks in random order all contenders share one clock, that of their mean power: a config that draws more is as
fast as its cycles, at the expense of the others. In blocks of a second, and in a workload, its own power decides.

Of each layer of benchmarks/speed/autotuned.py beyond SHORT_FLOPS (tuning/gpus.py), the model's first cooperative and
its first pingpong config are timed, and torch. With --shares, GEMMs also alternate with y += x on operands in DRAM,
which takes that share of the time.

    python -m benchmarks.fit.power --json benchmarks/results/power-h200.json.xz --resume --seconds 500
    python -m benchmarks.fit.power --shares 0.25 0.5 0.7 --json benchmarks/results/power-shares-h200.json --seconds 200
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch

import gemmsmith
from benchmarks import portions
from benchmarks.rows import Row
from benchmarks.speed.autotuned import BLOCK_US, BLOCKS, Job, in_long_blocks, jobs, medians
from benchmarks.speed.epilogues import COPY_BYTES_PER_US
from benchmarks.suite import specs
from benchmarks.timing import captured, options, rotated, save
from gemmsmith import Config
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.gpus import SHORT_FLOPS

MAX_RANKED = 200
"""Configs among which the first of each design is looked for. Chosen."""
MAX_ELEMENTS = 1 << 30
"""Elements of y, at most: 2 GiB."""


def long_jobs() -> list[Job]:
    """Return the layers beyond SHORT_FLOPS, in an order that mixes their kinds."""
    long = [(layout, m, n, k) for layout, m, n, k in jobs() if 2 * m * n * k > SHORT_FLOPS]
    random.Random(7).shuffle(long)
    return long


def contenders(layout: str, m: int, n: int, k: int) -> list[Config]:
    """Return the config of each design that the model expects to be the fastest."""
    ranked = rank_configs(bind(Request(*specs((m, n, k), layout=layout))).problem, limit=MAX_RANKED)
    return list({c.design: c for c in reversed(ranked)}.values())


def measured(job: Job) -> Row:
    """Return microseconds of torch and of each config, in short and in long blocks."""
    layout, m, n, k = job
    sets = rotated(m, n, k, torch.bfloat16, layout, least=2)
    a, b, d = sets[0]
    calls: dict[str, Any] = {"torch": lambda a, b, d: torch.mm(a, b, out=d)}
    calls |= {str(c): gemmsmith.plan(a, b, out=d, config=c).run for c in contenders(*job)}
    graphs = {name: captured(call, sets) for name, call in calls.items()}
    short = {name: us / len(sets) for name, us in medians(graphs, BLOCKS, BLOCK_US).items()}
    long = in_long_blocks(graphs, len(sets))
    us = {name: {"short": short[name], "long": long[name]} for name in graphs}
    return {"layout": layout, "m": m, "n": n, "k": k, "us": us}


def among_others(job: Job, shares: list[float]) -> list[Row]:
    """Return a row for each share: microseconds of a GEMM and y += x together, and of y += x alone."""
    layout, m, n, k = job
    sets, rows = rotated(m, n, k, torch.bfloat16, layout, least=2), []
    a, b, d = sets[0]
    plans = {str(c): gemmsmith.plan(a, b, out=d, config=c) for c in contenders(*job)}
    alone = medians({name: captured(plan.run, sets) for name, plan in plans.items()}, 2, 50_000)
    most = torch.zeros(2, MAX_ELEMENTS, device=a.device, dtype=torch.bfloat16)

    def both(plan: gemmsmith.Plan, x: torch.Tensor, y: torch.Tensor, *operands: torch.Tensor) -> None:
        plan.run(*operands)
        y.add_(x)

    for share in shares:
        other_us = min(alone.values()) / len(sets) * share / (1 - share)
        x, y = most[:, : int(other_us * COPY_BYTES_PER_US / 3 / most.itemsize)]
        graphs = {name: captured(partial(both, plan, x, y), sets) for name, plan in plans.items()}
        graphs["other"] = captured(lambda *_, x=x, y=y: y.add_(x), sets)
        us = in_long_blocks(graphs, len(sets))
        rows.append({"layout": layout, "m": m, "n": n, "k": k, "share": share, "us": us})
    return rows


def main() -> None:
    parser = options(__doc__)
    portions.add_options(parser)
    parser.add_argument("--shares", type=float, nargs="+", help="of another kernel's time; instead of short blocks")
    arguments = parser.parse_args()
    rows = portions.load_rows(arguments)
    left = portions.missing(long_jobs(), rows, lambda r: (r["layout"], r["m"], r["n"], r["k"]), arguments.part)
    for job in portions.in_time(left, arguments.seconds):
        more = among_others(job, arguments.shares) if arguments.shares else [measured(job)]
        rows += more
        for row in more:
            print(*job, row.get("share", ""), row["us"], flush=True)
        save(arguments.json, rows)


if __name__ == "__main__":
    main()
