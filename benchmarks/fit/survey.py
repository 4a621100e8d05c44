"""Time many configs on random shapes, to fit and evaluate the cost model of tuning/.

For every shape the configs that the model ranks first, and others drawn from its next thousand, run in CUDA graphs over
rotated buffers, in short blocks in random order, with torch.mm and the algorithms that cuBLASLt suggests; the median of
the blocks counts. Each result is compared with torch's. The shapes are layers of public models like those of the class
"unseen" (suite.py), but different from them; with --unseen they are those, with --middle others, most of them with 65
to 512 rows, and fewer configs. With --fp8 the operands are those of fp8.py, with block scales, compared with torch
only. With --layout nn, tn or tt they are the GEMMs of a training step that have that layout, of layers with 256 rows or
more.

    python -m benchmarks.fit.survey --json benchmarks/results/survey-h200.json.xz [--seconds 480] [--part 0/2]
    python -m benchmarks.fit.survey --fp8 --json benchmarks/results/survey-fp8-h200.json.xz
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gemmsmith
from benchmarks.fit.sweep import varied
from benchmarks.rows import write
from benchmarks.speed import fp8
from benchmarks.suite import POWER_LIMITED, SMALL, TRAINING, UNSEEN, Shape, in_blocks, layers, roles, specs
from benchmarks.timing import captured, machine, replayed, rotated
from gemmsmith import Config
from gemmsmith.cli import cublaslt
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.search import steady_state_us

FIRST = 44
"""Configs per shape that the model ranks first."""
OTHERS = 20
"""Other configs per shape, drawn from the next ones."""
DRAWN_FROM = 1000
"""Number of the model's configs from which the others are drawn."""
MIDDLE_COUNTS = 28, 6, 300
"""FIRST, OTHERS and DRAWN_FROM with --middle."""
FEW_FIRST = 16
"""FIRST for a layout other than nt."""
FEW_OTHERS = 18
"""OTHERS for a layout other than nt."""
FEW_DRAWN_FROM = 300
"""DRAWN_FROM for a layout other than nt."""
MIN_ROWS = 256
"""Rows of layers for a layout other than nt, at least."""
L2_MULTIPLE = 8
"""Multiple of the L2's size over which buffers are rotated, up to MAX_SETS sets."""
MAX_SETS = 300
"""Sets of buffers, at most."""
BLOCKS = 3
"""Blocks per config."""
BLOCK_US = 6_000
"""Length of a block in us."""
LONG_BLOCK_US = 10_000
"""Length of a block of power-limited GEMMs in us."""
LT_KEPT = 3


Set = tuple[Any, ...]
"""Operands and results of one call."""


@dataclass(frozen=True)
class Products:
    """The GEMMs of one kind.

    The fields are how they are planned, sets of operands, a plan's call with a workspace, the peers' calls, where in a
    set the result is, and the correct result.
    """

    plan: Callable[[Shape, Config | None], gemmsmith.Plan]
    sets: Callable[[Shape], list[Set]]
    call: Callable[[gemmsmith.Plan, torch.Tensor], Callable[..., Any]]
    peers: Callable[[Set], dict[Any, Callable[..., Any]]]
    result: Callable[[Set], torch.Tensor]
    right: Callable[[Set], torch.Tensor]


def dense(layout: str) -> Products:
    """Return the GEMMs of bf16, with A and B in `layout`."""
    return Products(
        lambda shape, config: gemmsmith.plan(*specs(shape, layout=layout), config=config),
        lambda shape: rotated(*shape, torch.bfloat16, layout, least=2, far=L2_MULTIPLE, most=MAX_SETS),
        lambda plan, space: lambda a, b, d: plan.run(a, b, d, workspace=space),
        lambda s: {"torch": lambda a, b, d: torch.mm(a, b, out=d)} | {x: x for x in cublaslt.algorithms(*s)},
        lambda s: s[2],
        lambda s: (s[0] @ s[1]).float(),
    )


KINDS = {
    "bf16": dense("nt"),
    **{layout: dense(layout) for layout in ("nn", "tn", "tt")},
    "fp8": Products(
        fp8.planned,
        lambda shape: [(case,) for case in fp8.sets_of(*shape, least=2, far=L2_MULTIPLE, most=MAX_SETS)],
        lambda plan, space: lambda c: plan.run(
            c.a, c.b, c.d, scale_a=c.scale_a, scale_b=c.scale_b, workspace=space
        ),
        lambda s: {"torch": fp8.peers(s[0])["torch"]},
        lambda s: s[0].d,
        lambda s: s[0].exact(torch.float32)[0],
    ),
}  # fmt: skip


def contenders(kind: str, shape: Shape, dice: random.Random, is_middle: bool = False) -> list[Config]:
    """Return the chosen config, the model's first and others."""
    plan = KINDS[kind].plan
    problem = plan(shape, SMALL).problem
    counts = FIRST, OTHERS, DRAWN_FROM
    if kind in ("nn", "tn", "tt"):
        counts = FEW_FIRST, FEW_OTHERS, FEW_DRAWN_FROM
    if is_middle:
        counts = MIDDLE_COUNTS
    ranked = rank_configs(problem, limit=counts[2], any_splits=True)
    first = varied(ranked, counts[0])
    left = [c for c in ranked if c not in first]
    file = [plan(shape, None).config, *first, *dice.sample(left, min(counts[1], len(left)))]
    return list(dict.fromkeys(file))


def middle() -> list[Shape]:
    """Return layers that are neither fitted to nor held out, most of them with 65 to 512 rows."""
    drawn = [x for x in layers(1400, 64, UNSEEN + TRAINING) if x[0] <= 64 or x[0] * x[1] * x[2] < 3e11]
    some, few, many = ([x for x in drawn if x[0] in rows] for rows in (range(65, 513), range(65), range(513, 1 << 20)))
    shapes: list[Shape] = []
    for i, shape in enumerate(some):
        shapes.append(shape)
        if i % 4 == 3:
            shapes.append(few[i])
        if i % 8 == 7 and len(shapes) < 120:
            shapes.append(many[i])
    return shapes[:120]


def of_training(shapes: Sequence[Shape], layout: str) -> list[Shape]:
    """Return the GEMMs with this layout of a training step: nn for the input's gradient, tn for the weight's."""
    some = [x for x in shapes if x[0] >= MIN_ROWS and x[0] % 8 == 0]
    return [(roles(x) | {"tt": x})[layout] for x in some]


def compiled(kind: str, shape: Shape, configs: list[Config]) -> None:
    """Fills the cubin cache with the kernels of these configs."""
    from gemmsmith.backends.cuda.compiler import compile_source

    for config in configs:
        plan = KINDS[kind].plan(shape, config)
        try:
            compile_source(plan.source, plan._planned.kernel.name)
        except gemmsmith.CompileError:
            continue


def survey(kind: str, shape: Shape, configs: list[Config]) -> dict[str, Any]:
    """Return a row: microseconds of torch, of the fastest of cuBLASLt, and of each config that ran correctly."""
    products, (m, n, k) = KINDS[kind], shape
    sets = products.sets(shape)
    result, calls = products.result(sets[0]), products.peers(sets[0])
    right = products.right(sets[0])
    spaces = {}
    for config in configs:
        plan = products.plan(shape, config)
        spaces[config] = torch.empty(max(16, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        calls[config] = products.call(plan, spaces[config])
    graphs: dict[Any, torch.cuda.CUDAGraph] = {}
    for name, call in calls.items():
        result.fill_(float("nan"))
        try:
            graphs[name] = captured(call, sets)
        except (cublaslt.CublasLtError, gemmsmith.GemmsmithError, RuntimeError):  # torch refuses some shapes
            continue
        if not ((result.float() - right).norm() / right.norm()).item() < 1e-2:
            print(f"WRONG {shape} {name}", flush=True)
            del graphs[name]
    times: dict[Any, list[float]] = {name: [] for name in graphs}
    long = LONG_BLOCK_US if 2 * m * n * k >= POWER_LIMITED else BLOCK_US
    names = list(graphs)
    lt = [x for x in names if x != "torch" and not isinstance(x, Config)]
    for i in range(BLOCKS):
        random.shuffle(names)
        for name in names:
            times[name].append(steady_state_us(partial(replayed, graphs[name]), long, 1e12) / len(sets))
        if i == 0:
            slower = sorted(lt, key=lambda x: times[x][0])[LT_KEPT:]
            names = [x for x in names if x not in slower]
    us = {name: round(statistics.median(times[name]), 3) for name in names}
    best = min((x for x in lt if x in us), key=us.__getitem__, default=None)
    about_lt = {"lt_us": us[best], "lt_algorithm": str(best)} if best else {}
    return {
        "m": m,
        "n": n,
        "k": k,
        "torch_us": us.get("torch"),
        **about_lt,
        "us": {c: us[c] for c in configs if c in us},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the times go")
    parser.add_argument("--seconds", type=float, default=1e9, help="no shape is begun later")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th shape, from the i-th on")
    parser.add_argument("--fp8", action="store_true", help="operands of FP8 with block scales")
    parser.add_argument("--layout", default="nt", choices=("nt", "nn", "tn", "tt"), help="of A and of B, with bf16")
    parser.add_argument("--middle", action="store_true", help="other layers, most of them with 65 to 512 rows")
    parser.add_argument("--unseen", action="store_true", help="the class that nothing is fitted to")
    arguments = parser.parse_args()
    begun, kind = time.perf_counter(), "fp8" if arguments.fp8 else "bf16"
    kind = kind if arguments.layout == "nt" else arguments.layout
    part, parts = map(int, arguments.part.split("/"))
    dice = random.Random(part)
    shapes = middle() if arguments.middle else UNSEEN if arguments.unseen else TRAINING
    shapes = in_blocks(shapes) if arguments.fp8 else shapes
    shapes = of_training(shapes, kind) if arguments.layout != "nt" else shapes
    contests = {shape: contenders(kind, shape, dice, arguments.middle) for shape in shapes[part::parts]}
    workers = max(1, (os.cpu_count() or 1) // parts)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    building: dict[Shape, list[Future[None]]] = {
        shape: [pool.submit(compiled, kind, shape, configs[i::8]) for i in range(8)]
        for shape, configs in contests.items()
    }
    about, rows, known = machine(), [], dict[Config, int]()
    for shape, configs in contests.items():
        if time.perf_counter() - begun > arguments.seconds:
            break
        for future in building[shape]:
            future.result()
        row = survey(kind, shape, configs)
        best = min(row["us"], key=row["us"].__getitem__)
        print(f"{shape} torch {row['torch_us'] or 0:.1f} cuBLASLt {row.get('lt_us', 0):.1f} chosen "
              f"{row['us'].get(configs[0], 0):.1f} best {row['us'][best]:.1f} {best}", flush=True)  # fmt: skip
        row["chosen"] = known.setdefault(configs[0], len(known))
        row["us"] = [(known.setdefault(c, len(known)), us) for c, us in row["us"].items()]
        rows.append(row)
        if arguments.json:
            file = {"machine": about, "operands": kind, "configs": [*map(str, known)], "rows": rows}
            write(arguments.json, file)
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"done after {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
