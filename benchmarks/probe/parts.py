"""A kernel's time without some of its work, against the full kernel and torch.mm, in one run.

Lines are cut out of the generated source: the copies of A except those that first fill a stage, the stores of D, and,
for few rows, the math. The results are wrong, but the multiplied data stays random, because zeros or NaN would take
less power. What is left reads the weights and multiplies (or stores), and is a lower bound for kernels that only move A
(and D) better. Shapes with M <= 64 that are over 32 MiB and slower than 0.95 of a copy of as many bytes are compared
with that copy.

    python -m benchmarks.probe.parts --json rows.json
"""

from __future__ import annotations

import re
import statistics
from typing import Any

import torch

import gemmsmith
from benchmarks.suite import SUITE, Shape, classes
from benchmarks.timing import block_seconds, captured, edited, options, rotated, save, shuffled
from gemmsmith import Config

COPIED: list[Shape] = [(16, 4096, 4096), (16, 6144, 4096), (16, 32768, 512), (64, 4096, 4096), (64, 6144, 4096),
                       (64, 32768, 512), (64, 24576, 1536), (64, 4096, 14336)]  # fmt: skip
"""Shapes over 32 MiB that are slower than 0.95 of a copy, or nearly so."""
SHAPES = [s for s in SUITE if "middle, M 128 to 512" in classes(s)] + COPIED


def variants(m: int) -> dict[str, tuple[str, ...]]:
    """Return what is left out, by what is left."""
    if m <= 64:
        return {"all": (), "b and d": ("a", "math"), "b": ("a", "d", "math")}
    return {"all": (), "b, math and d": ("a",), "b and math": ("a", "d")}


def without(source: str, parts: tuple[str, ...], config: Config) -> str:
    """Return the source of a kernel of `config` without some parts."""
    if not parts:
        return source
    place = source.rindex("    grid_dependency_wait();\n")
    head, tail = source[:place], source[place:]
    if "a" in parts:
        few, rows = ("b", config.tile[0]) if config.swap_ab else ("a", config.tile[1])
        weights = 2 * rows * config.tile[2]
        tail = replaced(rf"(?=tma_load(_multicast)?\(&{few},)", "if (fills) ", tail)
        tail = replaced(r"(?=int \w*write_stage = )", "int filled = prologue_k_tiles; ", tail)
        tail = replaced(r"(mbarrier_arrive_expect_tx\([^;]*),\s+stage_bytes\);",
                        rf"const bool fills = filled++ < {config.stages}; \1, fills ? stage_bytes : {weights}u);",
                        tail)  # fmt: skip
    if "d" in parts:
        tail = replaced(r"\n\s*(tma_store|store_global\w*)\([^;]*;", "", tail)
    if "math" in parts:
        tail = replaced(r"\n\s*wgmma_m64[^;]*;", "", tail)
    return head + tail


def replaced(pattern: str, by: str, source: str) -> str:
    """Return the source with all matches of a pattern replaced. Raises SystemExit if there is none."""
    source, matches = re.subn(pattern, by, source)
    if not matches:
        raise SystemExit(f"no {pattern} in the kernel")
    return source


def measure(m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Return one row: microseconds of torch.mm, of the kernel, of what is left of it, and of a copy."""
    sets = rotated(m, n, k, torch.bfloat16, "nt", least=2)
    whole = gemmsmith.plan(*sets[0][:2], out=sets[0][2])
    kernel, config = whole.kernel, whole.config
    graphs = {"torch": captured(lambda a, b, d: torch.mm(a, b, out=d), sets)} if m > 64 else {}
    alive: list[Any] = []
    for name, parts in variants(m).items():
        with edited(kernel, without(kernel.source, parts, config)):
            plan = gemmsmith.plan(*sets[0][:2], out=sets[0][2], config=config)
            space = torch.empty(max(16, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
            graphs[name] = captured(lambda a, b, d, p=plan, s=space: p.run(a, b, d, workspace=s), sets)
        alive += [plan, space]
    if m <= 64:
        size = m * k + k * n + m * n
        halves = [torch.empty(2, size, dtype=torch.uint8, device="cuda") for _ in sets]
        graphs["copy"] = captured(lambda x: x[1].copy_(x[0]), [(x,) for x in halves])
    times, clocks = shuffled(graphs, len(sets), block_seconds(m), rounds)
    us = {name: statistics.median(t) for name, t in times.items()}
    return {"m": m, "n": n, "k": k, "us": us, "config": str(config), "sm_mhz": clocks}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shape", action="append", help="MxNxK instead of the suite's; may be repeated")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in arguments.shape] if arguments.shape else SHAPES
    rows = []
    for m, n, k in shapes:
        rows.append(measure(m, n, k, arguments.rounds))
        us = rows[-1]["us"]
        print(f"{m:>6} {n:>6} {k:>6}  " + "  ".join(f"{name} {t:.2f}" for name, t in us.items()), flush=True)
        save(arguments.json, rows)
    for against, group in (("torch", [r for r in rows if r["m"] > 64]), ("copy", [r for r in rows if r["m"] <= 64])):
        for name in variants(group[0]["m"]) if group else ():
            ratios = [r["us"][against] / r["us"][name] for r in group]
            print(f"{against} / {name}: geometric mean {statistics.geometric_mean(ratios):.3f} of {len(group)} shapes, "
                  f"{min(ratios):.3f} to {max(ratios):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
