"""Comparison of contenders for one GEMM in a few seconds, for layers.py, kinds.py, fused.py and heavy.py.

All contenders are captured in CUDA graphs that rotate operands beyond the L2's size. They run once under a sustained
load of the GEMM, then in several rounds of short blocks, in a random order in each round. A ratio is the other's time
over ours within a round; the median over the rounds is reported. cuBLASLt is the fastest of the first algorithms that
its heuristic suggests, selected in shorter blocks. Each contender is first checked against float64, with its result
prefilled with NaN; those that fail are reported and excluded.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gemmsmith
from benchmarks import portions
from benchmarks.timing import L2_BYTES, captured, fastest, machine, options, replayed, save, sm_clock
from gemmsmith.cli import cublaslt
from gemmsmith.tuning.search import compile_all

Call = Callable[[Any], Any]
"""A GEMM of one set of operands."""
Row = dict[str, Any]
MIN_SETS = 3
"""Sets of operands, at least. Chosen; not measured."""
FAR = 4
"""Multiple of the L2's size that all sets of operands fill together. Chosen; not measured."""
LT_ALGORITHMS = 16
"""Algorithms of cuBLASLt that are tried, at most. Chosen; not measured."""
SELECTION = ((4, 0.008), (1, 0.04))
"""Rounds that select cuBLASLt's algorithm: how many are left after blocks of this many seconds, as in dense.py."""
LEAD = 8
"""A block is preceded by 1 / LEAD of its repeats, untimed. Chosen; not measured."""
REFERENCE_SIZE = 4096
"""M, N and K of the bf16 GEMM by torch.mm whose time identifies a machine."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a block, number of rounds of blocks, and seconds of load before them."""

    block: float = 0.12
    rounds: int = 6
    warm_up: float = 0.5


class WrongError(ArithmeticError):
    """Our result is not the GEMM's."""


def sets_of(first: Any, make: Callable[[], Any], size: int) -> list[Any]:
    """Return MIN_SETS or more sets of operands of `size` bytes, starting with `first`, which fill FAR times the L2."""
    return [first, *(make() for _ in range(max(MIN_SETS, math.ceil(FAR * L2_BYTES / size)) - 1))]


def runs_of(us: float, seconds: float) -> int:
    """Return how many replays of `us` microseconds take `seconds`."""
    return max(1, round(seconds * 1e6 / us))


def clock_under_load(graph: Any, us: float, seconds: float) -> int:
    """Return the SMs' clock in MHz while replays of `us` microseconds each keep them busy for `seconds`."""
    for _ in range(runs_of(us, seconds)):
        graph.replay()
    mhz = sm_clock()
    torch.cuda.synchronize()
    return mhz


def timed(graphs: dict[str, Any], calls: int, pace: Pace) -> tuple[dict[str, list[float]], int]:
    """Return microseconds per call for each graph and round, and the SMs' clock in MHz under the load before them."""
    us = {name: replayed(graph, 2) / 2 for name, graph in graphs.items()}
    first = next(iter(graphs))
    mhz = clock_under_load(graphs[first], us[first], pace.warm_up)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(pace.rounds):
        for name in random.sample(list(graphs), len(graphs)):
            repeats = runs_of(us[name], pace.block)
            replayed(graphs[name], math.ceil(repeats / LEAD))
            times[name].append(replayed(graphs[name], repeats) / repeats / calls)
    return times, mhz


def refusal(call: Call, case: Any, check: Callable[[Any], str]) -> str:
    """Return why a contender is excluded, or "" if its result is correct."""
    try:
        call(case)
        return check(case)
    except (RuntimeError, ValueError, cublaslt.CublasLtError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]


def compared(
    ours: Call, others: dict[str, Call], lt: Callable[[], dict[Any, Call]], sets: list[Any],
    check: Callable[[Any], str], pace: Pace, unchecked: dict[str, Call] | None = None,
) -> Row:  # fmt: skip
    """Return the times of ours, the others, and the fastest of cuBLASLt's algorithms, on the same sets of operands.

    `unchecked` calls compute something else, whose time is compared.
    `check` returns what is wrong with a case's result, and then fills it with NaN. Raises WrongError if ours is wrong.
    """
    graphs, refused = {}, {}
    ours(sets[0])
    if why := check(sets[0]):
        raise WrongError(f"ours: {why}")
    graphs["ours"] = captured(ours, [(s,) for s in sets])
    for name, call in others.items():
        if why := refusal(call, sets[0], check):
            refused[name] = why
        else:
            graphs[name] = captured(call, [(s,) for s in sets])
    for name, call in (unchecked or {}).items():
        graphs[name] = captured(call, [(s,) for s in sets])
    suggested = {}
    try:
        algorithms = lt()
    except (ValueError, cublaslt.CublasLtError) as error:
        algorithms, refused["lt"] = {}, str(error)
    for algorithm, call in list(algorithms.items())[:LT_ALGORITHMS]:
        if why := refusal(call, sets[0], check):
            refused[f"lt: {algorithm}"] = why
        else:
            suggested[algorithm] = captured(call, [(s,) for s in sets])
    fastest_algorithm = fastest(suggested, len(sets), SELECTION)
    about_lt = {"lt_algorithms": len(suggested)} if algorithms else {}
    if fastest_algorithm is not None:
        graphs["lt"], about_lt["lt_algorithm"] = suggested[fastest_algorithm], str(fastest_algorithm)
    del suggested
    times, mhz = timed(graphs, len(sets), pace)
    us = {name: statistics.median(t) for name, t in times.items()}
    ratios = {
        f"{name}_ratio": statistics.median(t / o for o, t in zip(times["ours"], times[name], strict=True))
        for name in times
        if name != "ours"
    }
    refusals = {"refused": refused} if refused else {}
    return {
        "us": us.pop("ours"), **{f"{name}_us": x for name, x in us.items()}, **ratios, **about_lt, **refusals,
        "sm_mhz": mhz, "sets": len(sets), "times": {n: [round(x, 4) for x in t] for n, t in times.items()},
    }  # fmt: skip


def kernels(plans: Iterable[gemmsmith.Plan]) -> list[tuple[str, str]]:
    """Return (source, name) of all kernels that these plans launch, packing and second steps included."""
    launches = [launch for plan in plans for launch in plan._planned.launches.all]
    return [(launch.kernel.source, launch.kernel.name) for launch in launches]


# -- summaries -------------------------------------------------------------------------------------------------------
def summary(rows: Sequence[Row], group: Callable[[Row], str], name: Callable[[Row], str]) -> list[str]:
    """Return a line per group and contender: the number of GEMMs, the geometric mean of the ratios, and the minimum."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group(row), []).append(row)
    width, lines = max(map(len, groups), default=0), []
    for title, members in groups.items():
        for ratio in dict.fromkeys(key for r in members for key in r if key.endswith("_ratio")):
            compared_rows = [r for r in members if ratio in r]
            mean = statistics.geometric_mean(r[ratio] for r in compared_rows)
            least = min(compared_rows, key=lambda r: r[ratio])
            other = ratio.removesuffix("_ratio")
            lines.append(f"{title:<{width}} {len(compared_rows):>4} GEMMs   {other:<5} / ours   "
                         f"geometric mean {mean:.3f}   minimum {least[ratio]:.3f} at {name(least)}")  # fmt: skip
        failed = [f"{name(r)}: {r['error']}" for r in members if "error" in r]
        lines += [f"{title:<{width}} FAILED {why}" for why in failed]
    return lines


# -- the script around it --------------------------------------------------------------------------------------------
def parser_for(about: str | None) -> argparse.ArgumentParser:
    """Return the options that layers.py, kinds.py, fused.py and heavy.py share."""
    parser = options(about)
    portions.add_options(parser)
    pace = Pace()
    parser.add_argument("--block", type=float, default=pace.block, help="seconds of a block")
    parser.add_argument("--rounds", type=int, default=pace.rounds, help="of blocks")
    parser.add_argument("--warm-up", type=float, default=pace.warm_up, help="seconds of load before the rounds")
    parser.add_argument("--shape", action="append", help="MxNxK instead of the suite; may be repeated")
    parser.add_argument("--commit", default="", help="of the project, to be written down")
    parser.add_argument("--dry", action="store_true", help="plans all, compiles a few kernels, measures nothing")
    return parser


def pace_of(arguments: argparse.Namespace) -> Pace:
    return Pace(arguments.block, arguments.rounds, arguments.warm_up)


def shapes_of(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the shapes given on the command line: (M, N, K), or with a batch first."""
    return [tuple(map(int, s.split("x"))) for s in arguments.shape or ()]


def known_us() -> float:
    """Return the microseconds of torch.mm for KNOWN x KNOWN x KNOWN in bf16."""
    sets = [
        tuple(torch.randn(REFERENCE_SIZE, REFERENCE_SIZE, device="cuda", dtype=torch.bfloat16) for _ in "abd")
        for _ in range(3)
    ]
    graph = captured(lambda a, b, d: torch.mm(a, b, out=d), sets)
    times, _ = timed({"torch": graph}, len(sets), Pace(0.1, 3, 0.5))
    return statistics.median(times["torch"])


def measured(
    arguments: argparse.Namespace, jobs: Sequence[Hashable], job_of: Callable[[Row], Any],
    prepare: Callable[[list[Any]], None], measure: Callable[[Any], Row], told: Callable[[Row], str],
) -> list[Row]:  # fmt: skip
    """Return the rows of all jobs, and write them after each job.

    Earlier rows are kept with --resume; jobs are started only within the time limit. `prepare` builds the kernels of
    the jobs that are left. A job that fails gets a row with its error.
    """
    begun = time.perf_counter()
    rows = [r for r in portions.load_rows(arguments) if "error" not in r]
    left = portions.missing(jobs, rows, job_of, arguments.part)
    print(f"{len(left)} of {len(jobs)} GEMMs", flush=True)
    prepare(left)
    print(f"ready after {time.perf_counter() - begun:.0f} s", flush=True)
    if arguments.dry or not left:
        return rows
    about = machine() | {"commit": arguments.commit, "known_us": known_us(), "pace": vars(pace_of(arguments)),
                         "buffers_over_l2": FAR}  # fmt: skip
    print(
        f"{about['gpu']}: torch.mm with M = N = K = {REFERENCE_SIZE} in bf16 takes {about['known_us']:.1f} us",
        flush=True,
    )
    for job in portions.in_time(left, arguments.seconds - (time.perf_counter() - begun)):
        try:
            row = measure(job)
        except (RuntimeError, WrongError, gemmsmith.GemmsmithError, ValueError) as error:
            row = dict(job._asdict()) | {"error": f"{type(error).__name__}: {error}"}
        rows.append(row)
        print(f"FAILED {job}: {row['error']}" if "error" in row else told(row), flush=True)
        save(arguments.json, rows, about)
        torch.cuda.synchronize()  # raises after an error that the device does not recover from
        torch.cuda.empty_cache()
    print(f"done after {time.perf_counter() - begun:.0f} s", flush=True)
    return rows


def built(plans: Sequence[gemmsmith.Plan], dry: bool) -> None:
    """Compile what plans launch, in parallel; only the first few kernels if `dry`."""
    launched = list(dict.fromkeys(kernels(plans)))
    print(f"{len(launched)} kernels", flush=True)
    compile_all(launched[:4] if dry else launched)


def write_down(path: Path | None, rows: Sequence[Row], lines: Sequence[str]) -> None:
    """Print a summary, and where the rows are."""
    print("\n".join(lines))
    if path and rows:
        print(f"{len(rows)} rows in {path}")
