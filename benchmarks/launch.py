"""What a call costs on the host, beside torch.mm(out=): in turns in one run, on a product too small to wait for.

python benchmarks/launch.py --json benchmarks/results/launch-h200.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from dense import operands, options, save

import gemmsmith

CALLS, ROUNDS = 500, 21


def block(call: Callable[[], object]) -> float:
    """Microseconds of a call that the GPU does not slow down: it is waited for before and after."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - begun
    torch.cuda.synchronize()
    return spent / CALLS * 1e6


def biased(acc: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (acc + bias).relu()


def main() -> None:
    arguments = options(__doc__).parse_args()
    a, b, d = operands(64, 64, 64, torch.bfloat16, "nt")
    bias = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    plan = gemmsmith.plan(a, b, out=d)
    calls: dict[str, Callable[[], object]] = {
        "torch.mm(out=)": lambda: torch.mm(a, b, out=d),
        "gemm(out=)": lambda: gemmsmith.gemm(a, b, out=d),
        "plan.run": lambda: plan.run(a, b, d),
        "plan.prepare(...)()": plan.prepare(a, b, d),
        "gemm(epilogue=, out=)": lambda: gemmsmith.gemm(a, b, epilogue=biased, out=d, bias=bias),
    }
    for call in calls.values():
        block(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(block(call))
    torch_us = statistics.median(times["torch.mm(out=)"])
    rows = [{"call": name, "us": statistics.median(t), "over_torch": statistics.median(t) / torch_us}
            for name, t in times.items()]  # fmt: skip
    for row in rows:
        print(f"{row['call']:<24} {row['us']:6.2f} us   {row['over_torch']:.2f}x of torch.mm(out=)")
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
