"""The cost of a call on the host against torch's calls, alternating in one run, on GEMMs too small to wait for.

Also that of calls of gemmsmith.torch, with gradients or without, and of the first call with a new M when the kernel
exists: each odd M once, after all even ones.

    python -m benchmarks.speed.launch --json benchmarks/results/launch-h200.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import gemmsmith
import gemmsmith.torch as gt
from benchmarks.timing import operands, options, save

CALLS = 500
ROUNDS = 21
MAX_ROWS = 256
WEIGHTS = {"tuned": 4096, "not tuned": 4160}
"""N and K of GEMMs whose M changes, by whether the table of tuned configs has them."""

Call = Callable[[], object]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def block(call: Call, count: int) -> float:
    """Return microseconds per call of `count` calls that the GPU does not slow down: it is idle before them."""
    synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - begun
    synchronize()
    return spent / count * 1e6


def in_turns(calls: dict[str, Call], count: int = CALLS, rounds: int = ROUNDS) -> dict[str, float]:
    """Return microseconds of each call: the median over alternating rounds, after one that does not count."""
    times = [{name: block(call, count) for name, call in calls.items()} for _ in range(1 + rounds)]
    return {name: statistics.median(t[name] for t in times[1:]) for name in calls}


def once(call: Call) -> float:
    """Return microseconds of a single call."""
    synchronize()
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e6


def biased(acc: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (acc + bias).relu()


def two_calls(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Compute the epilogue with torch's calls, into `d`."""
    return torch.relu_(torch.addmm(bias, a, b, out=d))


def repeated() -> list[dict[str, Any]]:
    """Return rows of repeated calls with the same arrays."""
    a, b, d = operands(64, 64, 64, torch.bfloat16, "nt")
    bias = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    plan = gemmsmith.plan(a, b, out=d)
    fp8_a, fp8_b = (torch.randn(64, 256, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    fp8_b, rows = fp8_b.T, {"scale_a": torch.ones(64, 1, device="cuda"), "scale_b": torch.ones(1, 64, device="cuda")}
    blocks = {"scale_a": torch.ones(2, 64, device="cuda").T, "scale_b": torch.ones(1, 4, device="cuda").T[:2]}
    scaled = partial(torch._scaled_mm, fp8_a, fp8_b, out_dtype=torch.bfloat16)
    theirs: dict[str, Call] = {
        "torch.mm(out=)": lambda: torch.mm(a, b, out=d),
        "torch.mm": lambda: torch.mm(a, b),
        "torch.addmm(out=), relu_": lambda: two_calls(bias, a, b, d),
        "torch.addmm, relu": lambda: torch.relu(torch.addmm(bias, a, b)),
        "torch._scaled_mm": partial(scaled, *rows.values()),
        "torch._scaled_mm(out=)": partial(scaled, *rows.values(), out=d),
        "torch._scaled_mm(out=), blocks": partial(scaled, *blocks.values(), out=d),
    }
    ours: dict[str, tuple[Call, str]] = {
        "gemm(out=)": (lambda: gemmsmith.gemm(a, b, out=d), "torch.mm(out=)"),
        "plan.run": (lambda: plan.run(a, b, d), "torch.mm(out=)"),
        "plan.prepare(...)()": (plan.prepare(a, b, d), "torch.mm(out=)"),
        "gemm": (lambda: gemmsmith.gemm(a, b), "torch.mm"),
        "gemm(epilogue=, out=)": (
            lambda: gemmsmith.gemm(a, b, epilogue=biased, out=d, bias=bias), "torch.addmm(out=), relu_",
        ),
        "gemm(epilogue=)": (lambda: gemmsmith.gemm(a, b, epilogue=biased, bias=bias), "torch.addmm, relu"),
        "gemm(scales)": (lambda: gemmsmith.gemm(fp8_a, fp8_b, **rows), "torch._scaled_mm"),
        "gemm(scales, out=)": (lambda: gemmsmith.gemm(fp8_a, fp8_b, **rows, out=d), "torch._scaled_mm(out=)"),
        "gemm(block scales, out=)": (
            lambda: gemmsmith.gemm(fp8_a, fp8_b, **blocks, out=d), "torch._scaled_mm(out=), blocks",
        ),
    }  # fmt: skip
    return compared(theirs, ours)


def compared(theirs: dict[str, Call], ours: dict[str, tuple[Call, str]]) -> list[dict[str, Any]]:
    """Return rows of torch's calls, and of ours with the name of the one that each is compared with."""
    us = in_turns(theirs | {name: call for name, (call, _) in ours.items()})
    rows = [{"call": name, "us": us[name], "beside": name, "over_torch": 1.0} for name in theirs]
    return rows + [
        {"call": name, "us": us[name], "beside": baseline, "over_torch": us[name] / us[baseline]}
        for name, (_, baseline) in ours.items()
    ]


def without_gradients(call: Call) -> Call:
    """Return the call with gradients disabled."""

    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def with_backward(call: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> Call:
    """Return a call that also computes the gradients of `inputs`."""
    gradient = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), inputs, gradient)


def differentiable() -> list[dict[str, Any]]:
    """Return rows of repeated calls of gemmsmith.torch, whose weights require gradients."""
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, offsets = torch.randn(64, 64, **made), torch.arange(16, 65, 16, device="cuda", dtype=torch.int32)
    w, bias = torch.randn(64, 64, **made).requires_grad_(), torch.randn(64, **made).requires_grad_()
    experts = torch.randn(4, 64, 64, **made).requires_grad_()
    linear, fused = torch.nn.Linear(64, 64, **made), gt.FusedLinear(64, 64, activation="relu", **made)

    def grouped() -> torch.Tensor:
        return gt.grouped_gemm(x, experts.mT, offsets=offsets)

    def torch_grouped() -> torch.Tensor:
        return torch._grouped_mm(x, experts.mT, offs=offsets)

    def gemm() -> torch.Tensor:
        return gt.gemm(x, w.mT, epilogue=biased, bias=bias)

    def linear_relu() -> torch.Tensor:
        return torch.relu(torch.nn.functional.linear(x, w, bias))

    theirs: dict[str, Call] = {
        "linear, relu, recording gradients": linear_relu,
        "nn.Linear, relu, recording gradients": lambda: torch.relu(linear(x)),
        "torch._grouped_mm": without_gradients(torch_grouped),
        "torch._grouped_mm, recording gradients": torch_grouped,
        "linear, relu, forward and backward": with_backward(linear_relu, w, bias),
        "torch._grouped_mm, forward and backward": with_backward(torch_grouped, experts),
    }
    ours: dict[str, tuple[Call, str]] = {
        "gt.gemm(epilogue=), recording gradients": (gemm, "linear, relu, recording gradients"),
        "FusedLinear, recording gradients": (lambda: fused(x), "nn.Linear, relu, recording gradients"),
        "gt.grouped_gemm": (without_gradients(grouped), "torch._grouped_mm"),
        "gt.grouped_gemm, recording gradients": (grouped, "torch._grouped_mm, recording gradients"),
        "gt.gemm(epilogue=), forward and backward": (
            with_backward(gemm, w, bias),
            "linear, relu, forward and backward",
        ),
        "gt.grouped_gemm, forward and backward": (
            with_backward(grouped, experts),
            "torch._grouped_mm, forward and backward",
        ),
    }
    return compared(theirs, ours)


def new_rows(which: str, fused: bool) -> list[dict[str, Any]]:
    """Return rows of the first call with each odd M, after calls with every even M, which compile the kernels."""
    size = WEIGHTS[which]
    a, b, d = operands(MAX_ROWS, size, size, torch.bfloat16, "nt")
    bias = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    given: dict[str, Any] = {"epilogue": biased, "bias": bias} if fused else {}

    def pair(m: int) -> dict[str, Call]:
        some_a, some_d = a[:m], d[:m]
        return {
            "ours": lambda: gemmsmith.gemm(some_a, b, out=some_d, **given),
            "torch's": lambda: two_calls(bias, some_a, b, some_d) if fused else torch.mm(some_a, b, out=some_d),
        }

    times: dict[str, list[float]] = {"ours": [], "torch's": []}
    for m in [*range(2, MAX_ROWS + 1, 2), *range(1, MAX_ROWS, 2)]:
        calls = list(pair(m).items())
        for name, call in calls if m % 4 < 2 else reversed(calls):
            us = once(call)
            if m % 2:
                times[name].append(us)
    ours, theirs = (statistics.median(times[name]) for name in ("ours", "torch's"))
    name = f"{'gemm(epilogue=, out=)' if fused else 'gemm(out=)'}, a new M, {which}"
    baseline = f"{'torch.addmm(out=), relu_' if fused else 'torch.mm(out=)'}, a new M, {which}"
    return [
        {"call": baseline, "us": theirs, "beside": baseline, "over_torch": 1.0},
        {"call": name, "us": ours, "beside": baseline, "over_torch": ours / theirs},
    ]


def main() -> None:
    arguments = options(__doc__).parse_args()
    rows = repeated() + differentiable()
    for which in WEIGHTS:
        for fused in (False, True):
            rows += new_rows(which, fused)
    for row in rows:
        print(f"{row['call']:<46} {row['us']:7.2f} us   {row['over_torch']:5.2f}x of {row['beside']}")
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
