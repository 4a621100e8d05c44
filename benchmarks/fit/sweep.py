"""Time the configs of the tuner's space on the suite, to fit the cost model of tuning/.

For every shape the configs that the model ranks first are compiled in parallel and timed in CUDA graphs over rotated
buffers, in rounds that keep the better ones; the last few and torch.mm then in random order in blocks as long as
benchmarks/speed/dense.py's, which repeat within 0.3 %.

    python -m benchmarks.fit.sweep --json sweep.json [--shape MxNxK ...] [--max-configs 64]
    python -m benchmarks.fit.sweep --json again.json --again sweep.json
    python -m benchmarks.fit.sweep --json finals.json --finals candidates.json
    python -m benchmarks.fit.sweep --enter finals.json --table src/gemmsmith/tuning/tuned.json

--again times an earlier sweep's finalists again, also with transposed clusters, with today's choice and the model's
first configs. --finals times the configs of a file, whose rows are like a sweep's, and today's choice, in long blocks
only. --enter enters a sweep's best configs into the table that the package ships.
"""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gemmsmith
from benchmarks.rows import Row, by_shape, read, write_builtin_table
from benchmarks.suite import SUITE, Shape, specs
from benchmarks.timing import block, block_seconds, captured, options, replayed, rotated, save
from gemmsmith import Config
from gemmsmith.tuning.candidates import fit_stages
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.search import compile_all, steady_state_us, successive_halving
from gemmsmith.tuning.tuned_table import builtin_rows

Rounds = tuple[tuple[int, float], ...]
"""Rounds of `successive_halving`: configs, and microseconds of a block."""
ROUNDS = ((64, 5_000.0), (16, 12_000.0), (6, 30_000.0))
FINALISTS = 6
ONCE = ((1000, 1.0),)
"""One or two calls of each config, to check that it runs and is correct."""
AGAIN = 3
"""Configs of an earlier sweep that are timed again."""
MODELS = 12
"""The model's first configs that are timed with these."""
ROUNDS_AGAIN = ((64, 20_000.0), (8, 40_000.0))
"""The rounds for both."""
ALIKE = 2
"""Configs of one tile that are tried, except among the first dozen."""
BETTER = 1.003
"""Ratio to the table's config that a config must exceed to replace it: blocks repeat within that."""


def sweep(shape: Shape, configs: list[Config], rounds: Rounds, finalists: int | None) -> list[Row]:
    """Return a row for each config, the fastest first: its time and torch's; if it is a finalist (None: all), their
    ratio."""
    m, n, k = shape
    sets = rotated(m, n, k, torch.bfloat16, "nt", least=2)
    right = sets[0][0] @ sets[0][1]
    graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def measure(config: Config, microseconds: float) -> float:
        if config not in graphs:
            plan = gemmsmith.plan(*sets[0][:2], out=sets[0][2], config=config)
            space = torch.empty(max(16, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
            sets[0][2].fill_(float("nan"))
            graphs[config] = captured(lambda a, b, d: plan.run(a, b, d, workspace=space), sets), space
            if not ((sets[0][2].float() - right.float()).norm() / right.float().norm()).item() < 1e-2:
                print(f"WRONG {shape} {config}", flush=True)
                raise ArithmeticError
        return steady_state_us(partial(replayed, graphs[config][0]), microseconds, 2 * m * n * k) / len(sets)

    random.shuffle(configs)
    results = successive_halving(configs, measure, rounds)
    graphs["torch"] = captured(lambda a, b, d: torch.mm(a, b, out=d), sets), None
    contenders: list[Any] = ["torch", *(x.config for x in results[:finalists])]
    random.shuffle(contenders)
    us = {x: block(graphs[x][0], len(sets), block_seconds(m)) for x in contenders}
    ratios = {x: us["torch"] / us[x] for x in contenders}
    ordered = sorted(results, key=lambda x: -ratios.get(x.config, 0.0))
    about = {"m": m, "n": n, "k": k, "torch_us": us["torch"], "block_seconds": block_seconds(m)}
    return [
        {**about, "config": str(x.config), "us": us.get(x.config, x.us), "ratio": ratios.get(x.config)} for x in ordered
    ]


def varied(configs: list[Config], most: int) -> list[Config]:
    """Return the first dozen configs, and of the others at most ALIKE of one tile."""
    seen: dict[Any, int] = {}
    results = []
    for config in configs:
        key = config.design, config.tile, config.splits == 1
        seen[key] = seen.get(key, 0) + 1
        if len(results) < 12 or seen[key] <= ALIKE:
            results.append(config)
    return results[:most]


def again(shape: Shape, earlier: list[Row], problem: Any) -> list[Config]:
    """Return today's choice, the first finalists of an earlier sweep and the model's first configs.

    Each is also returned with its cluster transposed.
    """
    results = [
        gemmsmith.plan(*specs(shape)).config,
        *(Config.parse(r["config"]) for r in earlier[:AGAIN]),
    ]
    both = []
    for c in results + rank_configs(problem, limit=MODELS, any_splits=True):
        both.append(c)
        rows, columns = c.cluster
        if {rows, columns} == {1, 2} and c.splits == 1 and c.tile[1] % (8 * columns) == 0:
            both.append(c.replace(cluster=(columns, rows), raster="n" if rows > columns else "m"))
    return list(dict.fromkeys(both))


def shapes_of(rows: list[Row]) -> dict[Shape, list[Row]]:
    """Return a sweep's rows by shape."""
    return {(group[0]["m"], group[0]["n"], group[0]["k"]): group for group in by_shape(rows)}


def is_candidate(shape: Shape, config: Config) -> bool:
    """Return whether a plan leaves a config of the table its stages."""
    return fit_stages(gemmsmith.plan(*specs(shape), config=config)._planned.spec) == config


def enter(sweep: Path, table: Path) -> None:
    """Enter each shape's best config into the table, if a plan would take it as it is.

    It replaces the table's config if it is BETTER.
    """
    others = [r for r in builtin_rows() if r["operands"] != "16 bits"]
    rows = {(r["m"], r["n"], r["k"]): r for r in builtin_rows() if r["operands"] == "16 bits"}
    results = read(sweep)
    for shape, group in shapes_of(results["rows"]).items():
        if group[0].get("block_seconds", 0) < block_seconds(shape[0]):
            raise SystemExit(f"{sweep}, {shape}: its blocks are too short; time its finalists with --again")
        timed = {Config.parse(r["config"]): r for r in group if r["ratio"]}
        timed = {config: r for config, r in timed.items() if is_candidate(shape, config)}
        chosen = max(timed, key=lambda config: timed[config]["ratio"])
        current = Config.parse(rows[shape]["config"]) if shape in rows else chosen
        if current in timed and timed[chosen]["ratio"] < timed[current]["ratio"] * BETTER:
            chosen = current
        rows[shape] = {**dict(zip("mnk", shape, strict=True)), "config": str(chosen)}
    made_with = {name: x for name, x in results["machine"].items() if name not in ("command", "note")}
    write_builtin_table(table, made_with, [*rows.values(), *others])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shape", action="append", help="MxNxK instead of the suite; may be repeated")
    parser.add_argument("--max-configs", type=int, default=64, help="configs per shape")
    parser.add_argument("--again", type=Path, help="an earlier sweep's times: its shapes and finalists, once more")
    parser.add_argument(
        "--finals", type=Path, help="rows whose configs are timed in long blocks, beside today's choice"
    )
    parser.add_argument("--enter", type=Path, help="an earlier sweep's times, instead of measuring")
    parser.add_argument("--table", type=Path, help="the table to enter it in")
    arguments = parser.parse_args()
    if arguments.enter:
        return enter(arguments.enter, arguments.table)
    given = arguments.again or arguments.finals
    earlier = shapes_of(read(given)["rows"]) if given else {}
    shapes: list[Any] = list(earlier) or SUITE
    if arguments.shape:
        shapes = [tuple(map(int, s.split("x"))) for s in arguments.shape]
    begun = time.perf_counter()
    contests: dict[Shape, tuple[list[Config], Rounds, int | None]] = {}
    for shape in shapes:
        problem = gemmsmith.plan(*specs(shape), config=Config()).problem
        if shape in earlier and arguments.finals:
            named = [Config.parse(r["config"]) for r in earlier[shape]]
            contests[shape] = list(dict.fromkeys([gemmsmith.plan(*specs(shape)).config, *named])), ONCE, None
        elif shape in earlier:
            contests[shape] = again(shape, earlier[shape], problem), ROUNDS_AGAIN, FINALISTS
        else:
            some = varied(
                rank_configs(problem, limit=4 * arguments.max_configs, any_splits=True), arguments.max_configs
            )
            contests[shape] = some, ROUNDS, FINALISTS
    kernels = {(p.source, p._planned.kernel.name) for s, (cs, _, _) in contests.items() for c in cs
               for p in [gemmsmith.plan(*specs(s), config=c)]}  # fmt: skip
    print(f"{len(kernels)} kernels built in {time.perf_counter() - begun:.0f} s", flush=True)
    compile_all(kernels)
    print(f"compiled by {time.perf_counter() - begun:.0f} s", flush=True)
    rows: list[Row] = []
    for shape, contest in contests.items():
        best, *others = sweep(shape, *contest)
        rows += [best, *others]
        print(f"{shape} torch {best['torch_us']:.1f} best {best['us']:.1f} ratio {best['ratio']:.3f} {best['config']}",
              flush=True)  # fmt: skip
        save(arguments.json, rows)
    print(f"done after {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
