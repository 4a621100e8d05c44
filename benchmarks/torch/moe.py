"""Whole mixture-of-experts layers, router included: FusedMoE against the same layer with other grouped products.

| contender | experts |
| --- | --- |
| ours | gemmsmith.torch.FusedMoE |
| fp8 | ours with `experts_dtype=torch.float8_e4m3fn`; in training, compiled, with `multiply_in_fp8=True` |
| copied | as ours, with rows copied in the order of experts, as for training (inference only) |
| grouped_mm | torch's grouped_mm, gate and up in one product, pointwise operations by Inductor |
| triton | as grouped_mm, with the products of ../speed/triton_grouped.py (inference only) |
| loop | transformers' eager experts: a loop over the experts in use, which waits for the router on the host |

Inference is replayed as a CUDA graph (but `loop`). `bytes_us`: what reading the weights of the experts in use takes at
the chip's copy speed. Training is forward and backward of all parameters and of the input.

    python -m benchmarks.torch.moe --json benchmarks/results/moe-h100.json --seconds 300 [--training]
"""

from __future__ import annotations

import random
import statistics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks import contest
from benchmarks.speed import triton_grouped
from benchmarks.speed.grouped import COPY_SPEED, copy_chip
from gemmsmith.torch import FusedMoE
from gemmsmith.torch.moe.experts import gated_experts

LAYERS = {
    "small experts": (2816, 704, 128, 8),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Qwen3-235B-A22B": (4096, 1536, 128, 8),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}
"""(dim, hidden, experts, top_k)."""
TOKENS = (1, 16, 128, 1024, 4096)
TRAINED = (("Qwen3-30B-A3B", 8192), ("small experts", 8192), ("Mixtral-8x7B", 4096))


class Job(NamedTuple):
    layer: str
    tokens: int
    training: bool


def job_of(row: contest.Row) -> Job:
    return Job(*(row[name] for name in Job._fields))


# -- the experts of the contenders -----------------------------------------------------------------------------------
def sort_by_expert(experts: Any, count: int) -> tuple[Any, Any]:
    """Return the slots in the order of their experts, and the ends of each expert's, by torch's operations."""
    sorted_experts, order = experts.flatten().sort(stable=True)
    all_experts = torch.arange(count, device=experts.device)
    return order, torch.searchsorted(sorted_experts, all_experts, right=True, out_int32=True)


def by_grouped_mm(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    order, offsets = sort_by_expert(experts, len(gate_up))
    top_k = experts.shape[1]
    gate, up = torch._grouped_mm(x[order // top_k], gate_up.mT, offs=offsets).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=offsets) * weights.flatten()[order].unsqueeze(-1)
    slots = torch.empty_like(y).index_copy(0, order, y)
    return slots.view(len(x), top_k, -1).sum(1).to(x.dtype)


class TritonExperts:
    """Experts by the Triton kernel, whose configs are selected at the first call."""

    def __init__(self) -> None:
        self.products: dict[int, Any] = {}

    def product(self, a: Any, b: Any, offsets: Any) -> Any:
        d = a.new_empty(len(a), b.shape[2])
        if b.shape[1] not in self.products:
            self.products[b.shape[1]] = triton_grouped.tuned(a, b, d, offsets)
        self.products[b.shape[1]](a, b, d, offsets)
        return d

    def __call__(self, x: Any, experts: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        order, offsets = sort_by_expert(experts, len(gate_up))
        top_k = experts.shape[1]
        h = gated(self.product(x[order // top_k], gate_up.mT, offsets))
        return combined(self.product(h, down.mT, offsets), weights, order, len(x)).to(x.dtype)


@torch.compile(dynamic=True)
def gated(gate_up: Any) -> Any:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@torch.compile(dynamic=True)
def combined(y: Any, weights: Any, order: Any, tokens: int) -> Any:
    y = y * weights.flatten()[order].unsqueeze(-1)
    return torch.empty_like(y).index_copy(0, order, y).view(tokens, -1, y.shape[-1]).sum(1)


def copied(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """Return what ours computes, with rows that are copied in the order of the experts before they are multiplied."""
    with torch.enable_grad():
        return gated_experts(x.detach().requires_grad_(), experts, weights, gate_up, down).detach()


def by_loop(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    y = torch.zeros_like(x)
    for e in experts.unique().tolist():
        token, slot = torch.where(experts == e)
        gate, up = F.linear(x[token], gate_up[e]).chunk(2, -1)
        expert = F.linear(F.silu(gate) * up, down[e]) * weights[token, slot, None]
        y = y.index_add(0, token, expert.to(y.dtype))
    return y


def layer_with(layer: FusedMoE, experts: Any) -> Any:
    """Return the layer's forward with other experts."""
    return lambda x: experts(x, *layer.gate(x), layer.experts.gate_up_proj, layer.experts.down_proj)


# -- measuring -------------------------------------------------------------------------------------------------------
def made(job: Job, **options: Any) -> tuple[FusedMoE, Any]:
    dim, hidden, experts, top_k = LAYERS[job.layer]
    torch.manual_seed(48)
    layer = FusedMoE(dim, hidden, experts, top_k, device="cuda", dtype=torch.bfloat16, **options)
    return layer, torch.randn(job.tokens, dim, device="cuda", dtype=torch.bfloat16)


def exact(layer: FusedMoE, x: Any) -> Any:
    """Return the layer's output for the same experts and weights, in float64."""
    ids, weights = layer.gate(x)
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        gate, up = (x[token].double() @ layer.experts.gate_up_proj[e].double().T).chunk(2, -1)
        h = F.silu(gate) * up
        y.index_add_(0, token, (h @ layer.experts.down_proj[e].double().T) * weights[token, slot, None])
    return y


def measure(job: Job, pace: contest.Pace) -> contest.Row:
    layer, x = made(job)
    if job.training:
        return {**job._asdict(), **train(layer, made(job, multiply_in_fp8=True)[0], x, pace)}
    with torch.no_grad():
        ids, _ = layer.gate(x)
        want, used = exact(layer, x), int(ids.unique().numel())
        graphs: dict[str, Any] = {}
        others = {"copied": copied, "triton": TritonExperts()}
        calls = {"ours": layer, **{name: layer_with(layer, experts) for name, experts in others.items()},
                 "grouped_mm": torch.compile(layer_with(layer, by_grouped_mm))}  # fmt: skip
        if LAYERS[job.layer][1] % 128 == 0:  # whole blocks of scales
            calls["fp8"] = made(job, experts_dtype=torch.float8_e4m3fn)[0]
            calls["fp8"].load_state_dict(layer.state_dict())
        errors = {}
        for name, call in calls.items():
            for _ in range(3):
                y = call(x)
            errors[name] = float((y.double() - want).norm() / want.norm())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call(x)
            graphs[name] = graph
        times, mhz = contest.timed(graphs, 1, pace)
    us = {name: statistics.median(t) for name, t in times.items()}
    dim, hidden, _, top_k = LAYERS[job.layer]
    flops = 6 * job.tokens * top_k * dim * hidden
    return {
        **job._asdict(), **{f"{name}_us": t for name, t in us.items()}, "used": used, "errors": errors,
        **{f"{name}_ratio": statistics.median(b / a for a, b in zip(times["ours"], t, strict=True))
           for name, t in times.items() if name != "ours"},
        "bytes_us": used * 6 * dim * hidden / COPY_SPEED[copy_chip()] / 1e6, "tflops": flops / us["ours"] / 1e6,
        "sm_mhz": mhz, "times": times,
    }  # fmt: skip


def train(layer: FusedMoE, in_fp8: FusedMoE, x: Any, pace: contest.Pace) -> contest.Row:
    """Return the times of forward and backward, which are not captured. `in_fp8` gets the layer's parameters."""
    in_fp8.gate = layer.gate
    for name, parameter in layer.experts.named_parameters():
        setattr(in_fp8.experts, name, parameter)
    x.requires_grad_()
    upstream = torch.randn_like(x)
    compiled, grouped_mm = torch.compile(layer), torch.compile(layer_with(layer, by_grouped_mm))
    calls = {"ours": layer, "ours_compiled": compiled, "fp8": torch.compile(in_fp8), "grouped_mm": grouped_mm,
             "loop": layer_with(layer, by_loop)}  # fmt: skip

    def step(call: Any) -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        call(x).backward(upstream)

    gradients: dict[str, Any] = {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(3):
            step(call)
        assert x.grad is not None
        gradients[name] = [x.grad.float(), layer.experts.down_proj.grad.float()]
    want = gradients["loop"]
    errors = {
        name: max(float((a - b).norm() / b.norm()) for a, b in zip(g, want, strict=True))
        for name, g in gradients.items()
    }
    for _ in range(pace.rounds):
        for name in random.sample(list(calls), len(calls)):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            step(calls[name])
            start.record()
            for _ in range(5):
                step(calls[name])
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop) * 200)
    us = {name: statistics.median(t) for name, t in times.items()}
    return {
        **{f"{name}_us": t for name, t in us.items()}, "errors": errors, "times": times,
        **{f"{name}_ratio": t / us["ours"] for name, t in us.items() if name != "ours"},
    }  # fmt: skip


def told(row: contest.Row) -> str:
    names = ("fp8", "copied", "grouped_mm", "triton", "loop", "ours_compiled")
    others = "   ".join(f"{n} {row[f'{n}_us']:.0f} ({row[f'{n}_ratio']:.2f})" for n in names if f"{n}_us" in row)
    about = "training" if row["training"] else f"bytes {row['bytes_us']:.0f}   {row['tflops']:.0f} TFLOP/s"
    errors = " ".join(f"{x:.1e}" for x in row["errors"].values())
    return (
        f"{row['layer']:<16} {row['tokens']:>5}   ours {row['ours_us']:.0f} us   {others}   {about}   errors {errors}"
    )


def main() -> None:
    parser = contest.parser_for(__doc__)
    parser.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--layer", action="append", choices=list(LAYERS), help="instead of all; may be repeated")
    arguments = parser.parse_args()
    pace = contest.pace_of(arguments)
    listed = (
        [Job(name, tokens, True) for name, tokens in TRAINED] if arguments.training
        else [Job(name, tokens, False) for name in LAYERS for tokens in TOKENS]
    )  # fmt: skip
    listed = [job for job in listed if job.layer in (arguments.layer or [job.layer])]
    rows = contest.measured(
        arguments, listed, job_of, lambda left: None, lambda job: measure(job, pace), told
    )  # fmt: skip
    contest.write_down(arguments.json, rows, contest.summary(rows, lambda r: "layers", lambda r: str(job_of(r))))


if __name__ == "__main__":
    main()
