"""Dense GEMMs against torch.mm (cuBLAS) and cuBLASLt's fastest algorithm, in one run.

For each shape all contenders are captured in CUDA graphs that rotate enough buffers to exceed the L2, and run in
alternating blocks with a warm-up each, in reversed order every other time, because the first one after a pause is
faster. Blocks take half a second, or one second from 128 rows on: there the chip is power-limited and its clock
oscillates with a period of a second, by 5 to 8 %. The ratio of a pair of blocks is the other's time over ours, and the
median over the pairs is reported. Every result is checked against float64. cuBLASLt's algorithm is the fastest, in
short blocks, of up to 32 that its heuristic suggests for a workspace of 32 MiB (cublaslt.py). Memory-bound shapes
(M <= 64) are also compared with a copy of as many bytes, unaligned shapes with padding, torch.mm and cropping. With
--half, fp32 accumulation is compared with fp16.

    python -m benchmarks.speed.dense --json benchmarks/results/dense-h200.json
    python -m benchmarks.speed.dense --suite all --json benchmarks/results/dense-suite-h200.json.xz
    python -m benchmarks.speed.dense --suite unseen --json benchmarks/results/dense-unseen-h200.json.xz --resume
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch

import gemmsmith
from benchmarks import portions
from benchmarks.suite import FLAGSHIPS, SUITE, UNALIGNED, UNSEEN, classes, specs
from benchmarks.timing import block, block_seconds, captured, exact, fastest, is_right, options, rotated, save, sm_clock
from gemmsmith.cli import cublaslt
from gemmsmith.tuning.search import compile_all

SUITES = {"flagships": FLAGSHIPS, "all": SUITE, "unaligned": UNALIGNED, "unseen": UNSEEN}


def lt_graphs(sets: list[tuple[torch.Tensor, ...]], product: torch.Tensor) -> dict[Any, torch.cuda.CUDAGraph]:
    """Return a graph for each of cuBLASLt's algorithms that runs and gives the correct result for the first set."""
    graphs = {}
    for algorithm in cublaslt.algorithms(*sets[0]):
        try:
            right = is_right(algorithm, *sets[0], product)
        except cublaslt.CublasLtError:
            continue
        if right:
            graphs[algorithm] = captured(algorithm, sets)
        else:
            print(f"cuBLASLt's result is wrong: {algorithm}", file=sys.stderr)
    return graphs


def measure(
    m: int, n: int, k: int, dtype: torch.dtype, layout: str, rounds: int, half: bool, lt: bool
) -> dict[str, Any]:
    """Return one row: a shape, all times, and the median ratios torch / ours and, with `lt`, cuBLASLt / ours.

    There is no lt_us if cuBLASLt suggests no algorithm.
    """
    sets = rotated(m, n, k, dtype, layout)
    size = (m * k + k * n + m * n) * torch.finfo(dtype).bits // 8
    plan = gemmsmith.plan(*sets[0][:2], out=sets[0][2])
    calls = {"ours": lambda a, b, d: plan.run(a, b, d), "torch": lambda a, b, d: torch.mm(a, b, out=d)}
    product = exact(*sets[0][:2])
    for name, call in calls.items():
        if not is_right(call, *sets[0], product):
            raise SystemExit(f"{m}x{n}x{k}: {name} is off the float64 product")
    graphs = {name: captured(call, sets) for name, call in calls.items()}
    about_lt = {}
    if lt:
        suggested = lt_graphs(sets, product)
        fastest_algorithm = fastest(suggested, len(sets))
        about_lt = {"lt_algorithms": len(suggested)}
        if fastest_algorithm:
            graphs["lt"] = suggested[fastest_algorithm]
            about_lt["lt_algorithm"] = str(fastest_algorithm)
        del suggested
    del product
    if m <= 64:
        halves = [(torch.empty(size // 2, dtype=torch.uint8, device="cuda"), torch.empty(size // 2, dtype=torch.uint8,
                device="cuda")) for _ in sets]  # fmt: skip
        graphs["copy"] = captured(lambda x, y: y.copy_(x), halves)
    if (m, n, k) in UNALIGNED:
        graphs["padded"] = captured(padded, sets)
    if half:
        fp16 = gemmsmith.plan(*sets[0][:2], out=sets[0][2], accumulate="fp16")
        graphs["half"] = captured(lambda a, b, d: fp16.run(a, b, d), sets)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    clocks = []
    for i in range(rounds):
        for name in list(graphs)[:: -1 if i % 2 else 1]:
            times[name].append(block(graphs[name], len(sets), block_seconds(m)))
        clocks.append(sm_clock())
    us, torch_us = (statistics.median(times[name]) for name in ("ours", "torch"))
    ratio = {name: statistics.median(t / o for o, t in zip(times["ours"], times[name], strict=True)) for name in times}
    if "lt" in times:
        about_lt["lt_ratio"] = ratio["lt"]
    return {
        "m": m, "n": n, "k": k, "dtype": str(dtype).removeprefix("torch."), "layout": layout,
        "us": us, "torch_us": torch_us, "ratio": ratio["torch"],
        **{f"{name}_us": statistics.median(t) for name, t in times.items() if name not in ("ours", "torch")},
        **about_lt,
        "tflops": 2 * m * n * k / us / 1e6, "torch_tflops": 2 * m * n * k / torch_us / 1e6,
        "config": str(plan.config), "sm_mhz": clocks,
    }  # fmt: skip


def padded(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
    """Return what a torch user does with unaligned rows: pad to multiples of 8, multiply, crop."""
    m, k, n = *a.shape, b.shape[1]
    wide = torch.nn.functional.pad(a, (0, -k % 8, 0, -m % 8)) @ torch.nn.functional.pad(b, (0, -n % 8, 0, -k % 8))
    d.copy_(wide[:m, :n])


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per class and peer: the number of shapes, the geometric mean of the ratios, and the minimum."""
    rows_by_class: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for name in classes((row["m"], row["n"], row["k"])):
            rows_by_class.setdefault(name, []).append(row)
    lines = []
    for name, members in rows_by_class.items():
        for other, ratio in (("torch.mm", "ratio"), ("cuBLASLt", "lt_ratio")):
            compared = [r for r in members if ratio in r]
            if compared:
                least = min(compared, key=lambda r: r[ratio])
                mean = statistics.geometric_mean(r[ratio] for r in compared)
                lines.append(f"{name:<22} {len(compared):>4} shapes   {other} / ours   geometric mean {mean:.3f}   "
                             f"least {least[ratio]:.3f} at {least['m']}x{least['n']}x{least['k']}")  # fmt: skip
        for other in ("copy", "padded", "half"):
            against = [r[f"{other}_us"] / r["us"] for r in members if f"{other}_us" in r]
            if len(against) == len(members):
                lines[-1] += f"   {other} / ours {statistics.geometric_mean(against):.3f}, least {min(against):.3f}"
    return lines


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--layout", default="nt", choices=["nn", "nt", "tn", "tt"], help="n row-major, t column-major")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of blocks a shape; an even number")
    parser.add_argument("--suite", default="flagships", choices=list(SUITES))
    parser.add_argument("--shape", action="append", help="MxNxK instead of a suite; may be repeated")
    parser.add_argument("--half", action="store_true", help="also fp16 accumulation, for --dtype float16")
    parser.add_argument("--lt", action=argparse.BooleanOptionalAction, default=True, help="cuBLASLt's fastest too")
    portions.add_options(parser)
    arguments = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in arguments.shape] if arguments.shape else SUITES[arguments.suite]
    rows = portions.load_rows(arguments)
    left = portions.missing(shapes, rows, lambda r: (r["m"], r["n"], r["k"]), arguments.part)
    plans = (gemmsmith.plan(*specs(shape, arguments.dtype, arguments.layout)) for shape in left)
    compile_all((plan.source, plan._planned.kernel.name) for plan in plans)
    dtype = getattr(torch, arguments.dtype)
    for m, n, k in portions.in_time(left, arguments.seconds):
        rows.append(measure(m, n, k, dtype, arguments.layout, arguments.rounds, arguments.half, arguments.lt))
        r = rows[-1]
        lt = f"cuBLASLt {r['lt_us']:9.1f} us, ratio {r['lt_ratio']:.3f}" if "lt_us" in r else ""
        print(f"{m:>6} {n:>6} {k:>6}  {r['us']:9.1f} us {r['tflops']:6.0f} TFLOP/s   torch {r['torch_us']:9.1f} us "
              f"{r['torch_tflops']:6.0f}   ratio {r['ratio']:.3f}   {lt}   {r['config']}", flush=True)  # fmt: skip
        save(arguments.json, rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
