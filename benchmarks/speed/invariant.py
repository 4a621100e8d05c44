"""The cost of batch invariance: plans whose rows do not depend on M against the free choice, in one run.

For each layer and M the batch-invariant plan, the plan that `gemm` makes otherwise, and torch.mm run in CUDA graphs
over rotated buffers, in alternating blocks in a random order. The ratio is the free choice's time over the
batch-invariant one's. Before that, the bits of rows are compared: those of each M with the same rows of the largest M.

    python -m benchmarks.speed.invariant --json benchmarks/results/invariant-h200.json --resume --seconds 400
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import gemmsmith
from benchmarks import portions
from benchmarks.timing import block_seconds, captured, exact, is_right, operands, options, rotated, save, shuffled

LAYERS = [(4096, 4096), (14336, 4096), (4096, 14336), (6144, 4096), (2112, 7168), (7168, 2048), (57344, 8192)]
"""N and K of layers."""
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
FEW = (1, 7, 64, 100, 3000)
"""M for which only bits are compared."""


def planned(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, batch_invariant: bool) -> Any:
    """Return a plan, and a function that runs it."""
    plan = gemmsmith.plan(a, b, out=d, batch_invariant=batch_invariant)
    return plan, lambda a, b, d: plan.run(a, b, d)


def require_same_rows(n: int, k: int) -> None:
    """Raise SystemExit if the first or last rows of some M differ in a bit from those rows of the largest M."""
    a, b, d = operands(max(ROWS), n, k, torch.bfloat16, "nt")
    planned(a, b, d, batch_invariant=True)[1](a, b, d)
    for m in (*FEW, *ROWS):
        for first in (0, len(a) - m):
            rows, actual = a[first : first + m], torch.full_like(d[:m], float("nan"))
            planned(rows, b, actual, batch_invariant=True)[1](rows, b, actual)
            if not torch.equal(actual.view(torch.int16), d[first : first + m].view(torch.int16)):
                raise SystemExit(f"{m}x{n}x{k}: rows from {first} on differ from those of M = {len(a)}")


def measure(m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Return one row: microseconds of the three, and the median ratio of the free choice to the batch-invariant one."""
    sets = rotated(m, n, k, torch.bfloat16, "nt", least=2)
    product = exact(*sets[0][:2])
    plans = {name: planned(*sets[0], batch_invariant=name == "invariant") for name in ("invariant", "free")}
    for name, (_, call) in plans.items():
        if not is_right(call, *sets[0], product):
            raise SystemExit(f"{m}x{n}x{k}: {name} is off the float64 product")
    del product
    graphs = {name: captured(call, sets) for name, (_, call) in plans.items()}
    graphs["torch"] = captured(lambda a, b, d: torch.mm(a, b, out=d), sets)
    times, clocks = shuffled(graphs, len(sets), block_seconds(m), rounds)
    ratios = {
        name: statistics.median(other / own for own, other in zip(times["invariant"], times[name], strict=True))
        for name in ("free", "torch")
    }
    return {
        "m": m, "n": n, "k": k, **{f"{name}_us": statistics.median(x) for name, x in times.items()},
        "ratio": ratios["free"], "torch_ratio": ratios["torch"],
        **{f"{name}_config": str(plan.config) for name, (plan, _) in plans.items()}, "sm_mhz": clocks,
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each, a shape")
    parser.add_argument("--layer", action="append", help="NxK instead of all; may be repeated")
    portions.add_options(parser)
    arguments = parser.parse_args()
    layers = [tuple(map(int, x.split("x"))) for x in arguments.layer] if arguments.layer else LAYERS
    rows = portions.load_rows(arguments)
    left = portions.missing(layers, rows, lambda r: (r["n"], r["k"]), arguments.part)
    for n, k in portions.in_time(left, arguments.seconds):
        require_same_rows(n, k)
        fresh = []
        for m in ROWS:
            r = measure(m, n, k, arguments.rounds)
            fresh.append(r)
            print(f"{m:>6} {n:>6} {k:>6}  invariant {r['invariant_us']:8.1f} us  free {r['free_us']:8.1f}  ratio "
                  f"{r['ratio']:.3f}  torch.mm {r['torch_us']:8.1f}  ratio {r['torch_ratio']:.3f}  "
                  f"{r['invariant_config']}  free:  {r['free_config']}", flush=True)  # fmt: skip
        rows += fresh
        save(arguments.json, rows)
        mean = statistics.geometric_mean(r["ratio"] for r in fresh)
        print(f"N {n}, K {k}: the same bits; geometric mean {mean:.3f}", flush=True)
    for name in ("ratio", "torch_ratio"):
        least = min(rows, key=lambda r: r[name])
        print(f"{name}: geometric mean {statistics.geometric_mean(r[name] for r in rows):.3f}, least {least[name]:.3f} "
              f"at {least['m']}x{least['n']}x{least['k']}")  # fmt: skip


if __name__ == "__main__":
    main()
