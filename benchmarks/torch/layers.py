"""Layers, losses and whole training steps of PyTorch models, in one run.

Compares gemmsmith.torch with eager PyTorch, Inductor in its modes and, if installed, Liger and Cut Cross-Entropy.

A step is a forward and a backward pass, or, for inference, a forward pass in a CUDA graph. The optimizer is always
torch's, and not timed. Contenders alternate in blocks, in a random order in each round:

    eager, inductor, max_autotune (no CUDA graphs; with TMA templates), reduce_overhead: torch
    fused, low_memory          gemmsmith.torch's modules in eager mode
    compiled, compiled_graphs  the plain model by torch.compile(options=gt.options()), and with CUDA graphs
    liger, liger_8             Liger's fused loss, with its own chunks and with chunk_mem_const=8
    cce                        Cut Cross-Entropy, which leaves out no gradient

Gradients are checked against the same step in fp32. `extra_bytes` is the peak memory of a step above what was allocated
before, without the gradients. `ratio` is the time of torch's best over that of ours. The case "host" is the cost of a
call on the host.

    python -m benchmarks.torch.layers --json benchmarks/results/torch-layers-h200.json --resume --seconds 300
    python -m benchmarks.torch.layers --case llama --contender inductor --contender compiled --json ...
    python -m benchmarks.torch.layers --tiny        # every case on the CPU, in seconds: times mean nothing
"""

from __future__ import annotations

import os

os.environ.setdefault("ENABLE_PERSISTENT_TMA_MATMUL", "1")  # before torch is imported
os.environ.setdefault("ENABLE_TEMPLATE_TMA_STORE", "1")

import copy
import statistics
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

import gemmsmith
import gemmsmith.torch as gt
from benchmarks import portions, timing
from benchmarks.speed import launch
from benchmarks.torch.models import GeluMLP, Head, Labels, SwiGLU, Transformer

THEIRS = {
    "eager": None, "inductor": {}, "max_autotune": {"mode": "max-autotune-no-cudagraphs"},
    "reduce_overhead": {"mode": "reduce-overhead"},
}  # fmt: skip
OURS = {"compiled": {}, "compiled_graphs": {"triton.cudagraphs": True}}
MODULES = ("fused", "low_memory")
"""Contenders that are modules of gemmsmith.torch."""
WARM_UPS = 3
"""Steps before the first timed one: CUDA graphs are recorded in the second."""

Call = Callable[..., Any]


class Work(NamedTuple):
    """A plain model and its inputs.

    Also what is passed to backward (nothing for a loss), and modules with the same parameters, by their contenders'
    names.
    """

    plain: nn.Module
    inputs: tuple[Any, ...]
    cotangent: Any = None
    others: dict[str, nn.Module] = {}  # noqa: RUF012


@dataclass(frozen=True)
class Case:
    """What makes the work, with these sizes; `training`, or inference."""

    make: Callable[..., Work]
    sizes: dict[str, Any]
    tiny: dict[str, Any]
    training: bool = True


def mlp(tokens: int, dim: int, hidden: int, gated: bool) -> Work:
    plain = SwiGLU(dim, hidden) if gated else GeluMLP(dim, hidden)
    fused = gt.FusedMLP(dim, hidden) if gated else gt.FusedMLP(dim, hidden, "gelu_tanh", bias=True)
    x = torch.randn(tokens, dim, requires_grad=True)
    return Work(plain, (x,), torch.randn(tokens, dim), {"fused": fused})


class PeerHead(Head):
    """A function of (x, weight, target)."""

    def __init__(self, dim: int, classes: int, loss: Call, **options: Any) -> None:
        super().__init__(dim, classes)
        self.loss, self.options = loss, options

    def forward(self, x: Any, target: Any = None) -> Any:
        return self.loss(x, self.weight, target, **self.options)


def head(tokens: int, dim: int, classes: int) -> Work:
    others: dict[str, nn.Module] = {
        "fused": gt.FusedLinearCrossEntropy(dim, classes),
        "low_memory": gt.FusedLinearCrossEntropy(dim, classes, low_memory=True),
    }
    if find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        others |= {"liger": PeerHead(dim, classes, liger), "liger_8": PeerHead(dim, classes, liger, chunk_mem_const=8)}
    if find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cce

        others["cce"] = PeerHead(dim, classes, cce, filter_eps=None)
    x = torch.randn(tokens, dim, requires_grad=True)
    return Work(Head(dim, classes), (x, torch.randint(classes, (tokens,))), None, others)


def labels(rows: int, features: int, labels: int, targets: bool = True) -> Work:
    targets_ = (torch.randint(2, (rows, labels)).to(torch.get_default_dtype()),) if targets else ()
    return Work(Labels(features, labels), (torch.randn(rows, features), *targets_))


def transformer(batch: int, length: int, classes: int, targets: bool = True, **sizes: Any) -> Work:
    tokens = [torch.randint(classes, (batch, length)) for _ in range(2 if targets else 1)]
    return Work(Transformer(classes=classes, length=length, **sizes), tuple(tokens))


WIDTHS, FEW = {"dim": 4096, "hidden": 14336}, {"dim": 32, "hidden": 64}
LLAMA = {**WIDTHS, "heads": 32, "layers": 2, "classes": 32000, "llama": True}
GPT = {"dim": 2048, "hidden": 8192, "heads": 16, "layers": 4, "classes": 50304, "llama": False}
LABELS, CLASSES = {"features": 1024, "labels": 65536}, {"tokens": 8192, "dim": 4096, "classes": 128256}
TINY_LABELS, TINY_CLASSES = {"rows": 16, "features": 32, "labels": 64}, {"tokens": 16, "dim": 32, "classes": 96}


def tiny(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes of a small transformer."""
    return {"batch": 2, "length": 8, **sizes, **FEW, "heads": 2, "layers": 1, "classes": 48}


CASES = {
    **{f"{'swiglu' if gated else 'gelu'}-{tokens}": Case(
        mlp, {"tokens": tokens, **WIDTHS, "gated": gated}, {"tokens": 16, **FEW, "gated": gated})
       for gated in (True, False) for tokens in (2048, 8192)},
    "cross-entropy": Case(head, CLASSES, TINY_CLASSES),
    "cross-entropy-eval": Case(head, CLASSES, TINY_CLASSES, training=False),
    "llama": Case(transformer, {"batch": 2, "length": 2048, **LLAMA}, tiny(LLAMA)),
    "gpt": Case(transformer, {"batch": 4, "length": 1024, **GPT}, tiny(GPT)),
    "labels": Case(labels, {"rows": 4096, **LABELS}, TINY_LABELS),
}  # fmt: skip
for m in (1, 16, 128):
    batch = {"batch": m, "length": 1, "targets": False}
    CASES[f"llama-{m}"] = Case(transformer, {**LLAMA, **batch}, {**tiny(LLAMA), **batch}, training=False)
    CASES[f"gpt-{m}"] = Case(transformer, {**GPT, **batch}, {**tiny(GPT), **batch}, training=False)
    rows = {"rows": m, "targets": False}
    CASES[f"labels-{m}"] = Case(labels, {**LABELS, **rows}, {**TINY_LABELS, **rows}, training=False)


def contenders(
    work: Work, training: bool, is_tiny: bool, names: Collection[str] = ()
) -> dict[str, tuple[Call, nn.Module]]:
    """Return what is called for each contender, or each of `names` and eager, and the module with its parameters.

    For inference, contenders that make a CUDA graph of their own are left out: each contender is captured in one.
    """
    ways = THEIRS | {name: {"options": gt.options(**others)} for name, others in OURS.items()}
    outputs_and_grads: dict[str, tuple[Call, nn.Module]] = {}
    for name, how in ways.items():
        if how is None:
            outputs_and_grads[name] = work.plain, work.plain
        elif training or name not in ("reduce_overhead", "compiled_graphs"):
            compiled = torch.compile(work.plain, **how)
            outputs_and_grads[name] = work.plain if is_tiny else compiled, work.plain  # compiling takes long
    for name, module in work.others.items():
        module.load_state_dict(work.plain.state_dict(), assign=True)
        outputs_and_grads[name] = module, module.requires_grad_()
    return {name: x for name, x in outputs_and_grads.items() if not names or name in names or name == "eager"}


def leaves(module: nn.Module, work: Work) -> list[Any]:
    """Return what gets a gradient."""
    return [*module.parameters(), *(x for x in work.inputs if x.requires_grad)]


def step(forward: Call, module: nn.Module, work: Work, training: bool) -> Callable[[], Any]:
    """Return one step, which returns the result and leaves gradients."""

    def train() -> Any:
        for x in leaves(module, work):
            x.grad = None
        torch.compiler.cudagraph_mark_step_begin()
        y = forward(*work.inputs)
        y.backward(work.cotangent)
        return y.detach()

    return train if training else torch.no_grad()(lambda: forward(*work.inputs))


def outputs_and_grads(run: Callable[[], Any], module: nn.Module, work: Work) -> list[Any]:
    """Return the gradients of a step, or its result if there are none."""
    y = run()
    return [x.grad for x in leaves(module, work) if x.grad is not None] or [y]


def error(values: list[Any], exact: list[Any]) -> float:
    """Return the norm of the difference over that of the exact values."""
    off = sum((x.double() - y.double()).square().sum().item() for x, y in zip(values, exact, strict=True))
    return float((off / sum(y.double().square().sum().item() for y in exact)) ** 0.5)


def dtype(work: Work) -> torch.dtype:
    return next(work.plain.parameters()).dtype


def reference(work: Work, training: bool) -> list[Any]:
    """Return the same step, computed in higher precision than the model's."""
    wide = torch.float32 if dtype(work) == torch.bfloat16 else torch.float64

    def cast(x: Any) -> Any:
        return (
            x.detach().to(wide).requires_grad_(x.requires_grad) if torch.is_tensor(x) and x.is_floating_point() else x
        )

    exact = copy.deepcopy(work.plain).to(wide)
    work = Work(exact, tuple(cast(x) for x in work.inputs), cast(work.cotangent))
    return outputs_and_grads(step(exact, exact, work, training), exact, work)


def extra_bytes(run: Callable[[], Any], module: nn.Module, work: Work) -> int:
    """Return a step's peak memory above what was allocated before, without its gradients."""
    for x in leaves(module, work):
        x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    gradients = sum(x.grad.nbytes for x in leaves(module, work) if x.grad is not None)
    return torch.cuda.max_memory_allocated() - before - gradients


def timed(
    runs: dict[str, Callable[[], Any]], training: bool, seconds: float, rounds: int
) -> tuple[dict[str, list[float]], list[int]]:
    """Return microseconds of each step, one block per round, and the SMs' MHz; without a GPU of a single step."""
    if not torch.cuda.is_available():
        return {name: [launch.once(run)] for name, run in runs.items()}, []
    if training:
        return timing.shuffled({n: SimpleNamespace(replay=run) for n, run in runs.items()}, 1, seconds, rounds)
    return timing.shuffled({n: timing.captured(run, [()]) for n, run in runs.items()}, 1, seconds, rounds)


def measure(
    name: str, case: Case, is_tiny: bool, seconds: float, rounds: int, names: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of a case, of all contenders or of `names`."""
    sizes = case.tiny if is_tiny else case.sizes
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float32 if is_tiny else torch.bfloat16)
    with torch.device("cpu" if is_tiny else "cuda"):
        work = case.make(**sizes)
    torch.set_default_dtype(torch.float32)
    exact = reference(work, case.training)
    all_contenders = contenders(work, case.training, is_tiny, names)
    row: dict[str, Any] = {"case": name, **sizes, "training": case.training}
    runs = {}
    for contender, (forward, module) in all_contenders.items():
        begun = time.perf_counter()
        runs[contender] = run = step(forward, module, work, case.training)
        for _ in range(WARM_UPS):
            run()
        row[f"{contender}_ready_s"] = time.perf_counter() - begun
        row[f"{contender}_error"] = off = error(outputs_and_grads(run, module, work), exact)
        if not off <= 2 * row["eager_error"] + 4 * torch.finfo(dtype(work)).eps:
            raise SystemExit(
                f"{name}: {contender} is off the exact step by {off:.3g}, eager by {row['eager_error']:.3g}"
            )
        if not is_tiny:
            row[f"{contender}_extra_bytes"] = extra_bytes(run, module, work)
        print(f"  {contender} is ready: {row[f'{contender}_ready_s']:.1f} s", file=sys.stderr, flush=True)
    times, clocks = timed(runs, case.training, seconds, rounds)
    us = {contender: statistics.median(t) for contender, t in times.items()}
    theirs = min((c for c in us if c in THEIRS), key=us.__getitem__)
    ours = min((c for c in us if c in MODULES or c in OURS), key=us.__getitem__)
    row |= {f"{contender}_us": t for contender, t in us.items()}
    row |= {"ours": ours, "theirs": theirs, "ratio": us[theirs] / us[ours], "sm_mhz": clocks}
    return [row]


def biased(acc: Any, bias: Any) -> Any:
    return (acc + bias).relu()


def host(is_tiny: bool) -> list[dict[str, Any]]:
    """Return rows with the cost of a call on the host, and its difference to other calls."""
    device = "cpu" if is_tiny else "cuda"
    a, b = (torch.randn(64, 64, device=device).bfloat16() for _ in range(2))
    bias, leaf = torch.randn(64, device=device).bfloat16(), a.clone().requires_grad_()
    layer = gt.FusedLinear(64, 64, activation="relu", device=device, dtype=torch.bfloat16)
    of_torch = nn.Linear(64, 64, device=device, dtype=torch.bfloat16)

    def without_grad(call: Call) -> Call:
        return torch.no_grad()(call)

    calls: dict[str, Call] = {
        "torch.mm": lambda: torch.mm(a, b),
        "gemmsmith.gemm": lambda: gemmsmith.gemm(a, b),
        "gt.gemm": lambda: gt.gemm(a, b),
        "torch.addmm, relu": lambda: torch.relu(torch.addmm(bias, a, b)),
        "gemmsmith.gemm(epilogue=)": lambda: gemmsmith.gemm(a, b, epilogue=biased, bias=bias),
        "gt.gemm(epilogue=)": lambda: gt.gemm(a, b, epilogue=biased, bias=bias),
        "gt.gemm(epilogue=), with grad": lambda: gt.gemm(leaf, b, epilogue=biased, bias=bias),
        "torch.addmm, relu, with grad": lambda: torch.relu(torch.addmm(bias, leaf, b)),
        "nn.Linear, relu": without_grad(lambda: torch.relu(of_torch(a))),
        "FusedLinear": without_grad(lambda: layer(a)),
    }
    baselines = {
        "gt.gemm": ["gemmsmith.gemm", "torch.mm"],
        "gt.gemm(epilogue=)": ["gemmsmith.gemm(epilogue=)", "torch.addmm, relu"],
        "gt.gemm(epilogue=), with grad": ["gt.gemm(epilogue=)", "torch.addmm, relu, with grad"],
        "FusedLinear": ["nn.Linear, relu"],
    }
    us = launch.in_turns(calls, *((2, 1) if is_tiny else ()))
    more = {name: {other: us[name] - us[other] for other in others} for name, others in baselines.items()}
    return [{"case": "host", "call": name, "us": t, "more_us_than": more.get(name, {})} for name, t in us.items()]


def shown(row: dict[str, Any]) -> str:
    if row["case"] == "host":
        more = "  ".join(f"{t:+.2f} of {other}" for other, t in row["more_us_than"].items())
        return f"host  {row['call']:<30} {row['us']:8.2f} us  {more}"
    times = "  ".join(f"{key.removesuffix('_us')} {t:.0f}" for key, t in row.items() if key.endswith("_us"))
    return f"{row['case']:<18} ratio {row['ratio']:.3f} ({row['theirs']} / {row['ours']})  us: {times}"


def main(description: str | None = __doc__, cases: dict[str, Case | None] = CASES | {"host": None}) -> None:
    """Measure the cases that the command line selects; None: the cost of calls on the host."""
    parser = timing.options(description)
    parser.add_argument("--case", action="append", choices=list(cases), help="instead of all; may be repeated")
    parser.add_argument("--contender", action="append", choices=[*THEIRS, *OURS, *MODULES, "liger", "liger_8", "cce"],
                        help="beside eager, instead of all; may be repeated")  # fmt: skip
    parser.add_argument("--block", type=float, default=1.05, help="seconds of a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, nothing compiled")
    portions.add_options(parser)
    arguments = parser.parse_args()
    rows = portions.load_rows(arguments)
    left = portions.missing(arguments.case or list(cases), rows, lambda r: str(r["case"]), arguments.part)
    for name in portions.in_time(left, arguments.seconds):
        print(name, file=sys.stderr, flush=True)
        case, pace = cases[name], (arguments.tiny, arguments.block, arguments.rounds)
        rows += measure(name, case, *pace, arguments.contender or ()) if case else host(arguments.tiny)
        for row in rows:
            if row["case"] == name:
                print(shown(row), flush=True)
        timing.save(arguments.json, rows)


if __name__ == "__main__":
    main()
