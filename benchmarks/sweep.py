"""Times the configs of the tuner's space on the suite: what the model of tuning/ is fitted to.

For every shape the configs that the model ranks first are compiled in parallel and timed in CUDA graphs over rotated
buffers, in rounds that keep the better ones; the last few and torch.mm in random order in blocks as long as
benchmarks/dense.py's, which repeat within 0.3 %.

    python benchmarks/sweep.py --json sweep.json [--shape MxNxK ...] [--most 64]
    python benchmarks/sweep.py --json again.json --again sweep.json
    python benchmarks/sweep.py --json finals.json --finals candidates.json
    python benchmarks/sweep.py --enter finals.json --table src/gemmsmith/tuning/tuned.json

The second times an earlier sweep's finalists again, with their clusters turned, what would be chosen now, and what the
model now puts first; the third times what a file names, rows as a sweep's, beside what would be chosen now, in the long
blocks alone; the fourth enters what a sweep found best in the table that the package ships.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dense import block, block_seconds, captured, machine, replayed, rotated
from suite import SUITE, Shape, specs

import gemmsmith
from gemmsmith import Config
from gemmsmith.tuning.choose import ranked
from gemmsmith.tuning.fitting import fitting
from gemmsmith.tuning.measure import compile_all, halving, settled

Rounds = tuple[tuple[int, float], ...]
"""As of `halving`."""
ROUNDS = ((64, 5_000.0), (16, 12_000.0), (6, 30_000.0))
FINALISTS = 6
ONCE = ((1000, 1.0),)
"""A call or two of each: whether it runs, and is right."""
AGAIN, MODELS, ROUNDS_AGAIN = 3, 12, ((64, 20_000.0), (8, 40_000.0))
"""How many configs of an earlier sweep are timed again, and of the model's first ones; and the rounds for those."""
ALIKE = 2
"""Configs of one tile that are tried, but for the first dozen."""
BETTER = 1.003
"""Than what the table has a config must be: blocks repeat within that."""


def sweep(shape: Shape, configs: list[Config], rounds: Rounds, finalists: int | None) -> dict[str, Any]:
    """One shape's row: torch's time, and every config's; of the finalists (None: all) also the ratio to torch."""
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
        return settled(partial(replayed, graphs[config][0]), microseconds, 2 * m * n * k) / len(sets)

    random.shuffle(configs)
    found = halving(configs, measure, rounds)
    graphs["torch"] = captured(lambda a, b, d: torch.mm(a, b, out=d), sets), None
    contenders: list[Any] = ["torch", *(x.config for x in found[:finalists])]
    random.shuffle(contenders)
    us = {x: block(graphs[x][0], len(sets), block_seconds(m)) for x in contenders}
    ratios = {x: us["torch"] / us[x] for x in contenders}
    ordered = sorted(found, key=lambda x: -ratios.get(x.config, 0.0))
    return {"m": m, "n": n, "k": k, "torch_us": us["torch"], "block_seconds": block_seconds(m),
            "configs": [{"config": vars(x.config), "us": us.get(x.config, x.us), "ratio": ratios.get(x.config)}
                        for x in ordered]}  # fmt: skip


def varied(configs: list[Config], most: int) -> list[Config]:
    """The first dozen, and of the others at most ALIKE of a tile."""
    seen: dict[Any, int] = {}
    found = []
    for config in configs:
        key = config.design, config.tile, config.splits == 1
        seen[key] = seen.get(key, 0) + 1
        if len(found) < 12 or seen[key] <= ALIKE:
            found.append(config)
    return found[:most]


def again(shape: Shape, earlier: dict[str, Any], problem: Any) -> list[Config]:
    """What would be chosen now, the first finalists of an earlier sweep's row and of the model's, each also with its
    cluster turned."""
    found = [
        gemmsmith.plan(*specs(shape)).config,
        *(Config.stored(c["config"]) for c in earlier["configs"][:AGAIN]),
    ]
    both = []
    for c in found + ranked(problem, most=MODELS):
        both.append(c)
        rows, columns = c.cluster
        if {rows, columns} == {1, 2} and c.splits == 1 and c.tile[1] % (8 * columns) == 0:
            both.append(c.replace(cluster=(columns, rows), raster="n" if rows > columns else "m"))
    return list(dict.fromkeys(both))


def kept(shape: Shape, row: dict[str, Any]) -> bool:
    """Whether a plan leaves a config of the table its stages."""
    config = Config.stored(row["config"])
    return fitting(config, gemmsmith.plan(*specs(shape), config=config).spec) == config


def enter(sweep: Path, table: Path) -> None:
    """Each shape's best config that a plan would take as it is goes into the table, in place of what is there if it is
    BETTER."""
    entries = json.loads(table.read_text())["rows"] if table.exists() else []
    others = [r for r in entries if "operands" in r]  # of 8 bits
    rows = {(r["m"], r["n"], r["k"]): r for r in entries if "operands" not in r}
    found = json.loads(sweep.read_text())
    for r in found["rows"]:
        shape = r["m"], r["n"], r["k"]
        if r.get("block_seconds", 0) < block_seconds(r["m"]):
            raise SystemExit(f"{sweep}, {shape}: its blocks are too short; time its finalists with --again")
        timed = [c for c in r["configs"] if c["ratio"] and kept(shape, c)]
        best = max(timed, key=lambda c: c["ratio"])
        held = next((c for c in timed if c["config"] == rows.get(shape, {}).get("config")), best)
        if best["ratio"] < held["ratio"] * BETTER:
            best = held
        figures = {"us": round(best["us"], 2), "torch_us": round(r["torch_us"], 2), "ratio": round(best["ratio"], 3)}
        sizes = {"m": r["m"], "n": r["n"], "k": r["k"]}
        rows[shape] = {**sizes, "config": best["config"], **figures}
    lines = ",\n".join(json.dumps(r) for r in [*(rows[key] for key in sorted(rows)), *others])
    made_with = {name: x for name, x in found["machine"].items() if name not in ("command", "note")}
    table.write_text(f'{{"machine": {json.dumps(made_with)},\n"rows": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="MxNxK instead of the suite; may be repeated")
    parser.add_argument("--most", type=int, default=64, help="configs a shape")
    parser.add_argument("--json", type=Path, help="where the times go")
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
    before = json.loads(given.read_text())["rows"] if given else []
    earlier = {(r["m"], r["n"], r["k"]): r for r in before}
    shapes: list[Any] = list(earlier) or SUITE
    if arguments.shape:
        shapes = [tuple(map(int, s.split("x"))) for s in arguments.shape]
    begun = time.perf_counter()
    contests: dict[Shape, tuple[list[Config], Rounds, int | None]] = {}
    for shape in shapes:
        problem = gemmsmith.plan(*specs(shape), config=Config()).problem
        if shape in earlier and arguments.finals:
            named = [Config.stored(c["config"]) for c in earlier[shape]["configs"]]
            contests[shape] = list(dict.fromkeys([gemmsmith.plan(*specs(shape)).config, *named])), ONCE, None
        elif shape in earlier:
            contests[shape] = again(shape, earlier[shape], problem), ROUNDS_AGAIN, FINALISTS
        else:
            some = varied(ranked(problem, most=4 * arguments.most), arguments.most)
            contests[shape] = some, ROUNDS, FINALISTS
    kernels = {(p.source, p.kernel.name) for s, (cs, _, _) in contests.items() for c in cs
               for p in [gemmsmith.plan(*specs(s), config=c)]}  # fmt: skip
    print(f"{len(kernels)} kernels built in {time.perf_counter() - begun:.0f} s", flush=True)
    compile_all(kernels)
    print(f"compiled by {time.perf_counter() - begun:.0f} s", flush=True)
    rows = []
    for shape, contest in contests.items():
        rows.append(sweep(shape, *contest))
        best = rows[-1]["configs"][0]
        print(f"{shape} torch {rows[-1]['torch_us']:.1f} best {best['us']:.1f} ratio {best['ratio']:.3f} "
              f"{Config.stored(best['config'])}", flush=True)  # fmt: skip
        found = {"machine": machine(), "rows": rows}
        if arguments.json:
            arguments.json.write_text(json.dumps(found) + "\n")
    print(f"done after {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
