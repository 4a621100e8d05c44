"""Fused epilogues against the plain GEMM and against torch, in one run.

For each shape and epilogue the plain gemmsmith GEMM, the fused kernel, torch eager, torch.compile, and torch.compile in
max-autotune mode are captured in CUDA graphs that rotate enough buffers to exceed the L2, and run in alternating blocks
with a warm-up each. `cost` is the fused kernel's time over the plain GEMM's, `over_*` torch's time over the fused
kernel's; medians over the rounds.

    python -m benchmarks.speed.epilogues --json benchmarks/results/epilogues-h200.json
    python -m benchmarks.speed.epilogues --functions --mode compile --json functions-h100.json
    python -m benchmarks.speed.epilogues --unseen 30 --json benchmarks/results/epilogues-unseen-h200.json --resume
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import gemmsmith
from benchmarks import portions
from benchmarks.suite import UNSEEN
from benchmarks.timing import block_seconds, captured, options, rotated, save, shuffled

SHAPES = [(4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (8192, 28672, 4096), (512, 4096, 4096),
          (128, 28672, 4096)]  # fmt: skip
FUNCTION_SHAPES = [(4096, n, k) for n, k in ((65536, 1024), (16384, 2048), (16384, 4096), (16384, 8192))]
"""With --functions: N as of a large classifier, and K from where functions take the most of the time."""
COPY_BYTES_PER_US = 4.0e6
"""Bandwidth of a device-to-device copy in bytes per us: the cost of reading an extra matrix."""


@dataclass(frozen=True)
class Case:
    """An epilogue for gemmsmith and the same with the GEMM in torch. torch gets the columns of `gated` operands in
    halves. `rows`, `total`: the second result is a sum of each row, or of everything.
    """

    fused: Callable[..., Any]
    torch: Callable[..., Any]
    eager: Callable[..., Any]
    operands: tuple[str, ...] = ()
    gated: bool = False
    rows: bool = False
    total: bool = False


def bias_gelu(acc: Any, bias: Any) -> Any:
    return F.gelu(acc + bias, approximate="tanh")


def bias_residual(acc: Any, bias: Any, residual: Any) -> Any:
    return acc + bias + residual


def swiglu(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return F.silu(gate) * up


def relu_rows(acc: Any, bias: Any) -> Any:
    x = F.relu(acc + bias)
    return x, x.sum(-1)


def bce(acc: Any, bias: Any, labels: Any) -> Any:
    """Return the gradient of binary cross-entropy with logits, and the loss, summed."""
    x = acc + bias
    return x.sigmoid() - labels, (F.softplus(x) - x * labels).sum()


def bce_loss(acc: Any, bias: Any, labels: Any) -> Any:
    x = acc + bias
    return x, (F.softplus(x) - x * labels).sum()


def dgelu(acc: Any, residual: Any) -> Any:
    """Return the gradient of gelu, of which acc is the upstream gradient and `residual` the argument."""
    x = residual
    density = (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return acc * (0.5 + 0.5 * (x * math.sqrt(0.5)).erf() + x * density)


def softplus(acc: Any, bias: Any) -> Any:
    return F.softplus(acc + bias)


def gelu(acc: Any, bias: Any) -> Any:
    return F.gelu(acc + bias)


def _of_product(fused: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for torch, in fp32 from the product on."""

    def call(a: Any, b: Any, *more: Any) -> Any:
        results = fused((a @ b).float(), *(x.float() for x in more))
        if isinstance(results, tuple):
            return results[0].to(a.dtype), *results[1:]
        return results.to(a.dtype)

    return call


def _swiglu_torch(a: Any, b: Any) -> Any:
    gate, up = (a @ b).chunk(2, -1)
    return F.silu(gate) * up


def _relu_rows_torch(a: Any, b: Any, bias: Any) -> Any:
    x = F.relu(a @ b + bias)
    return x, x.sum(-1, dtype=torch.float32)


def _relu_rows_eager(a: Any, b: Any, bias: Any) -> Any:
    x = F.relu(torch.addmm(bias, a, b))
    return x, x.sum(-1, dtype=torch.float32)


CASES = {
    "bias_gelu": Case(
        bias_gelu, lambda a, b, bias: F.gelu(a @ b + bias, approximate="tanh"),
        lambda a, b, bias: F.gelu(torch.addmm(bias, a, b), approximate="tanh"), ("bias",),
    ),
    "bias_residual": Case(
        bias_residual, lambda a, b, bias, residual: a @ b + bias + residual,
        lambda a, b, bias, residual: torch.addmm(bias, a, b) + residual, ("bias", "residual"),
    ),
    "swiglu": Case(swiglu, _swiglu_torch, _swiglu_torch, gated=True),
    "bias_relu_rows": Case(relu_rows, _relu_rows_torch, _relu_rows_eager, ("bias",), rows=True),
}  # fmt: skip


FUNCTIONS = {
    **{f.__name__: Case(f, _of_product(f), _of_product(f), ("bias", "labels"), total=True) for f in (bce, bce_loss)},
    "dgelu": Case(dgelu, _of_product(dgelu), _of_product(dgelu), ("residual",)),
    **{f.__name__: Case(f, _of_product(f), _of_product(f), ("bias",)) for f in (softplus, gelu)},
}
"""Epilogues whose functions take the time, for --functions."""
ALL_CASES = {**CASES, **FUNCTIONS}


def extra(case: Case, m: int, n: int) -> dict[str, torch.Tensor]:
    """Return the case's operands, random normal; labels are 0 or 1."""
    made = {"bias": (n,), "residual": (m, n), "labels": (m, n)}
    operands = {name: torch.randn(made[name], device="cuda").bfloat16() for name in case.operands}
    return {name: (x > 0).bfloat16() if name == "labels" else x for name, x in operands.items()}


def outputs(case: Case, m: int, n: int) -> dict[str, torch.Tensor]:
    """Return buffers for the fused kernel's results, full of NaN."""
    width = n // 2 if case.gated else n
    made = {"out": torch.full((m, width), float("nan"), device="cuda", dtype=torch.bfloat16)}
    if case.rows:
        made["out1"] = torch.full((m,), float("nan"), device="cuda")
    if case.total:
        made["out1"] = torch.full((), float("nan"), device="cuda")
    return made


def halves(b: torch.Tensor) -> torch.Tensor:
    """Return an interleaved gated weight as torch takes it: gate columns, then up columns."""
    return torch.cat(gemmsmith.deinterleave(b), dim=-1)


def contenders(name: str, sets: list[tuple[torch.Tensor, ...]], modes: list[str]) -> tuple[dict[str, Any], Any, str]:
    """Return CUDA graphs of one case: ours, and torch's in each mode; the buffers they need; and our config."""
    case = ALL_CASES[name]
    m, n = sets[0][2].shape
    buffers = [(a, b, outputs(case, m, n), extra(case, m, n)) for a, b, _ in sets]
    plan = gemmsmith.plan(*buffers[0][:2], epilogue=case.fused, operands=buffers[0][3], out=buffers[0][2])
    spaces = [torch.empty(max(16, plan.workspace_bytes), dtype=torch.uint8, device="cuda") for _ in buffers]
    ours = [(*x, space) for x, space in zip(buffers, spaces, strict=True)]
    graphs = {
        "fused": captured(lambda a, b, out, more, space: plan.run(a, b, out, operands=more, workspace=space), ours)
    }
    theirs = [(a, halves(b) if case.gated else b, *more.values()) for a, b, _, more in buffers]
    right = case.torch(*(x.float() for x in theirs[0]))
    for actual, expected in zip(buffers[0][2].values(), right if isinstance(right, tuple) else (right,), strict=True):
        difference = ((actual.float() - expected).norm() / expected.norm()).item()
        if not difference < 1e-2:
            raise SystemExit(f"{name} {m}x{n}: off torch's result by {difference:.3g}")
    del right
    for mode in modes:
        call = case.eager
        if mode != "eager":
            torch._dynamo.reset()
            call = torch.compile(case.torch, mode=None if mode == "compile" else "max-autotune-no-cudagraphs")
        graphs[mode] = captured(call, theirs)
    return graphs, (ours, theirs), str(plan.config)


def measure(m: int, n: int, k: int, name: str, modes: list[str], rounds: int) -> dict[str, Any]:
    """Return the row of a shape and an epilogue."""
    sets = rotated(m, n, k, torch.bfloat16, "nt")
    plan = gemmsmith.plan(*sets[0][:2], out=sets[0][2])
    graphs, alive, config = contenders(name, sets, modes)
    graphs["bare"] = captured(lambda a, b, d: plan.run(a, b, d), sets)
    times, clocks = shuffled(graphs, len(sets), block_seconds(m), rounds)
    del alive  # graphs read it until here
    us = {contender: statistics.median(t) for contender, t in times.items()}
    matrices = sum(more in ("residual", "labels") for more in ALL_CASES[name].operands)
    return {
        "m": m, "n": n, "k": k, "dtype": "bfloat16", "epilogue": name, "us": us["fused"], "bare_us": us["bare"],
        "cost": statistics.median(f / b for f, b in zip(times["fused"], times["bare"], strict=True)),
        "extra_matrix_cost": matrices * 2 * m * n / COPY_BYTES_PER_US / us["bare"],
        **{f"{mode}_us": us[mode] for mode in modes},
        **{f"over_{mode}": us[mode] / us["fused"] for mode in modes},
        "tflops": 2 * m * n * k / us["fused"] / 1e6, "config": config, "bare_config": str(plan.config),
        "sm_mhz": clocks,
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", action="append", choices=list(ALL_CASES), help="instead of all; may be repeated")
    parser.add_argument("--shape", action="append", help="MxNxK instead of the suite; may be repeated")
    parser.add_argument("--functions", action="store_true", help="epilogues whose functions take the time, at 4 K")
    parser.add_argument("--unseen", type=int, help="so many shapes of the class unseen, instead of the suite")
    parser.add_argument("--mode", action="append", choices=["eager", "compile", "max_autotune"], help="torch's; all")
    portions.add_options(parser)
    arguments = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in arguments.shape] if arguments.shape else SHAPES
    cases = FUNCTIONS if arguments.functions else CASES
    if arguments.functions and not arguments.shape:
        shapes = FUNCTION_SHAPES
    if arguments.unseen:  # N of whole groups of 16 columns, which gated ones need
        shapes = [s for s in UNSEEN if s[1] % 16 == 0][:: len(UNSEEN) // arguments.unseen][: arguments.unseen]
    modes = arguments.mode or ["eager", "compile", "max_autotune"]
    rows, all_jobs = (
        portions.load_rows(arguments),
        [(*shape, name) for shape in shapes for name in arguments.case or cases],
    )
    left = portions.missing(all_jobs, rows, lambda r: (r["m"], r["n"], r["k"], r["epilogue"]), arguments.part)
    for m, n, k, name in portions.in_time(left, arguments.seconds):
        rows.append(measure(m, n, k, name, modes, arguments.rounds))
        r = rows[-1]
        torch_times = "  ".join(f"{mode} {r[f'over_{mode}']:.2f}x" for mode in modes)
        print(f"{m:>6} {n:>6} {k:>6} {name:<15} {r['us']:8.1f} us {r['tflops']:5.0f} TFLOP/s  cost {r['cost']:.3f}"
              f" (+{r['extra_matrix_cost']:.3f} allowed)  faster than {torch_times}", flush=True)  # fmt: skip
        save(arguments.json, rows)


if __name__ == "__main__":
    main()
