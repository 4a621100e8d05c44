"""Layers that no table holds: the config that is chosen, and the one that autotune takes, against torch and cuBLASLt.

A third of the layers each have up to 64 rows, 65 to 512, and more; of the last, a third each are the products of a
training step: forward, the input's gradient, and the weight's. Contenders are captured in CUDA graphs that rotate
buffers past the L2, and run in blocks in random order: short ones, whose medians count, or, beyond SHORT_FLOPS, long
ones: in short ones all share the clock of their mean power (benchmarks/fit/power.py). cuBLASLt is the fastest of its
first algorithm and of those that are the fastest in a few short blocks.
--grid takes other products: 120 of the thousand whose M, N and K are ten sizes from 64 to 16384, which CUDA-L2
(arXiv:2512.02551) is measured on.

    python -m benchmarks.speed.autotuned --json benchmarks/results/autotuned-h200.json [--seconds 480 --resume]
    python -m benchmarks.speed.autotuned --grid --json benchmarks/results/grid-h200.json [--seconds 300 --resume]
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

import gemmsmith
from benchmarks import portions
from benchmarks.models import PUBLIC_LAYERS
from benchmarks.rows import Row
from benchmarks.suite import CLASSES, TRAINING, UNSEEN, layers, roles, token_count
from benchmarks.timing import captured, options, replayed, rotated, save, shuffled
from gemmsmith.cli import cublaslt
from gemmsmith.tuning.gpus import SHORT_FLOPS
from gemmsmith.tuning.search import steady_state_us

SEED = 64
PER_CLASS = 70
BLOCKS, BLOCK_US = 12, 8_000
"""Blocks of a contender, and their length. Chosen."""
LONG_BLOCKS, LONG_BLOCK_SECONDS = 2, 0.85
"""The same beyond SHORT_FLOPS. Chosen: two blocks differ by less than 0.5 %."""
LT_BLOCKS, LT_BLOCK_US, LT_FINALISTS = 2, 3_000, 2
"""The same of cuBLASLt's algorithms, and how many of them are timed like the others. Chosen."""
Job = tuple[str, int, int, int]
"""The layout of A and B, and M, N, K."""


GRID = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
"""Sizes of CUDA-L2's products."""
GRID_COUNT = 120


def jobs() -> list[Job]:
    """Return products of layers that the table does not hold, the classes in turn."""
    drawn = [x for x in layers(4000, SEED, [*UNSEEN, *TRAINING]) if x[1:] not in PUBLIC_LAYERS]
    of_class = [[x for x in drawn if x[0] in rows][:PER_CLASS] for rows in CLASSES.values()]
    products: list[Job] = []
    for i, row in enumerate(zip(*of_class, strict=True)):
        *few, many = row
        layout, shape = list(roles(many).items())[i % 3]
        products += [*(("nt", *x) for x in few), (layout, *shape)]
    return products


def grid_jobs() -> list[Job]:
    """Return products of the grid, drawn at random."""
    products = list(itertools.product(GRID, repeat=3))
    return [("nt", *x) for x in random.Random(SEED).sample(products, GRID_COUNT)]


def measure(layout: str, m: int, n: int, k: int) -> Row:
    """Return the microseconds of torch, of cuBLASLt's fastest algorithm, and of the chosen and the tuned config."""
    sets = rotated(m, n, k, torch.bfloat16, layout, least=2)
    a, b, d = sets[0]
    chosen = gemmsmith.plan(a, b, out=d)
    begun = time.perf_counter()
    with gemmsmith.autotune():
        gemmsmith.gemm(a, b, out=d)
    seconds = time.perf_counter() - begun
    tuned = gemmsmith.plan(a, b, out=d)
    calls: dict[Any, Any] = {"torch": lambda a, b, d: torch.mm(a, b, out=d), "chosen": chosen.run}
    if tuned.config != chosen.config:
        calls["tuned"] = tuned.run
    calls |= {x: x for x in cublaslt.algorithms(a, b, d)}
    graphs: dict[Any, torch.cuda.CUDAGraph] = {}
    for name, call in calls.items():
        with suppress(cublaslt.CublasLtError, RuntimeError):  # torch refuses some shapes
            graphs[name] = captured(call, sets)
    algorithms = {x: graph for x, graph in graphs.items() if not isinstance(x, str)}
    first = medians(algorithms, LT_BLOCKS, LT_BLOCK_US)
    for algorithm in sorted(first, key=first.__getitem__)[LT_FINALISTS:]:
        if algorithm != next(iter(first)):
            del graphs[algorithm]
    if 2 * m * n * k > SHORT_FLOPS:
        us = in_long_blocks(graphs, len(sets))
    else:
        us = {name: t / len(sets) for name, t in medians(graphs, BLOCKS, BLOCK_US).items()}
    fastest = min((x for x in us if not isinstance(x, str)), key=us.__getitem__, default=None)
    return {
        "layout": layout, "m": m, "n": n, "k": k, "torch_us": us.get("torch"), "lt_us": us.get(fastest),
        "lt_algorithm": str(fastest), "chosen": str(chosen.config), "chosen_us": us["chosen"],
        "tuned": str(tuned.config), "tuned_us": us.get("tuned", us["chosen"]), "tuning_s": seconds,
    }  # fmt: skip


def medians(graphs: dict[Any, torch.cuda.CUDAGraph], blocks: int, block_us: float) -> dict[Any, float]:
    """Return the microseconds of a replay of each graph: the median of its blocks, in random order."""
    times: dict[Any, list[float]] = {name: [] for name in graphs}
    for _ in range(blocks):
        for name in random.sample(list(graphs), len(graphs)):
            times[name].append(steady_state_us(partial(replayed, graphs[name]), block_us, 1e12))
    return {name: statistics.median(t) for name, t in times.items()}


def in_long_blocks(graphs: dict[Any, torch.cuda.CUDAGraph], calls: int) -> dict[Any, float]:
    """Return the microseconds of a call of each graph: the mean of its long blocks, in random order."""
    times, _ = shuffled(graphs, calls, LONG_BLOCK_SECONDS, LONG_BLOCKS)
    return {name: statistics.mean(t) for name, t in times.items()}


def summary(rows: Iterable[Row]) -> str:
    """Return, for each class, geometric means and the least of the peers' times over those of both configs."""
    lines, rows = [], list(rows)
    for name, ms in CLASSES.items():
        some = [r for r in rows if token_count(r) in ms]
        for config in ("chosen", "tuned"):
            parts = []
            for peer in ("torch", "lt"):
                ratios = [r[f"{peer}_us"] / r[f"{config}_us"] for r in some if r[f"{peer}_us"]]
                if ratios:
                    parts.append(f"{peer} {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}")
            lines.append(f"{name}, {len(some)}, {config}: {'; '.join(parts)}")
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__)
    portions.add_options(parser)
    parser.add_argument("--grid", action="store_true", help="products of the grid instead of layers")
    arguments = parser.parse_args()
    rows = portions.load_rows(arguments)
    left = portions.missing(
        grid_jobs() if arguments.grid else jobs(), rows, lambda r: (r["layout"], r["m"], r["n"], r["k"]), arguments.part
    )
    for job in portions.in_time(left, arguments.seconds):
        rows.append(measure(*job))
        save(arguments.json, rows)
    print(summary(rows))


if __name__ == "__main__":
    main()
