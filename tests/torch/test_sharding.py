"""Two processes on the CPU: every sharding of a GEMM gives one process's results and gradients."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch._inductor.utils import run_and_get_code

import gemmsmith.torch
from gemmsmith.core.dtypes import BF16, INT32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch import FusedLinear, FusedLinearCrossEntropy, FusedMLP, FusedMoE, gemm
from gemmsmith.torch.sharding import partial_sum_operands

M, N, K = 6, 16, 8

CASES: dict[str, Any] = {
    "bias": (lambda acc, row, column: ((acc + row) * column).relu(), ("row", "column")),
    "linear": (lambda acc, row: (acc * row * 0.5, acc.sum(-1)), ("row",)),
    "reductions": (lambda acc, row: (acc.sum(-1), (acc + row).sum(-2), acc.logsumexp(-1)), ("row",)),
    "most": (lambda acc: (acc, acc.amax(), acc.amax(-1)), ()),
    "matrix": (lambda acc, matrix: acc.tanh() * matrix, ("matrix",)),
    "halves": (lambda acc: gemmsmith.deinterleave(acc)[0].relu() * gemmsmith.deinterleave(acc)[1], ()),
}  # fmt: skip
SHAPES = {"row": (N,), "column": (M, 1), "matrix": (M, N)}


def both(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    operators(mesh)
    for module in (linears(), FusedMLP(K, N, bias=True), FusedMLP(K, N, "gelu")):
        tensor_parallel(mesh, module)
    tensor_parallel(mesh, FusedMLP(K, N, bias=True), compiled=True)
    for compiled in (False, True):
        data_parallel(compiled)
        expert_parallel(mesh, compiled)
    sharded_tokens(mesh)
    for counts in ((5, 2), (0, 3), (3, 0), (0, 0)):
        uneven_tokens(mesh, counts)
    layers_of_dtensors(mesh)
    clipped_steps(mesh)
    clipped_steps_with_fsdp(mesh)
    wrong_experts(mesh)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # The mesh keeps gloo's threads. Where one lets go of a tensor while the interpreter ends, the process aborts.
    os._exit(0)


def operators(mesh: Any) -> None:
    """Check all shardings of the operator's operands."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    for function, names in CASES.values():
        for a_spec, b_spec in [
            (Shard(0), Replicate()),
            (Replicate(), Shard(1)),
            (Shard(1), Shard(0)),
            (Shard(0), Shard(1)),
        ]:
            plain = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((M, K), (K, N))]
            plain += [torch.randn(SHAPES[n], dtype=torch.float64, requires_grad=True) for n in names]
            placements = [a_spec, b_spec, *[Replicate() for _ in names]]
            split = [distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
                     for x, p in zip(plain, placements, strict=True)]  # fmt: skip
            results = []
            for a, b, *others in (split, plain):
                y = gemm(a, b, epilogue=function, **dict(zip(names, others, strict=True)))
                results.append(y if isinstance(y, tuple) else (y,))
            for actual, expected in zip(*results, strict=True):
                torch.testing.assert_close(actual.full_tensor(), expected)
            total = sum(x.square().sum() for x in results[0])
            actual = torch.autograd.grad(total, split)
            expected = torch.autograd.grad(sum(x.square().sum() for x in results[1]), plain)
            for x, y in zip(actual, expected, strict=True):
                torch.testing.assert_close(x.full_tensor() if isinstance(x, DTensor) else x, y)
    a, b = (distribute_tensor(torch.randn(s, dtype=torch.float64), mesh, [p])
            for s, p in (((M, K), Shard(1)), ((K, N), Shard(0))))  # fmt: skip
    assert gemm(a, b, epilogue=lambda acc: acc * 2).placements == (Partial("sum"),)
    whole = a.full_tensor() @ b.full_tensor()
    for function in (None, torch.relu, torch.neg):  # which DTensor's cache of shardings tells apart
        torch.testing.assert_close(gemm(a, b, epilogue=function).full_tensor(), (function or torch.clone)(whole))
    for a_spec, b_spec in (
        (Shard(0), Shard(0)),
        (Shard(1), Replicate()),
        (Replicate(), Shard(2)),
        (Shard(2), Shard(1)),
    ):
        plain = [torch.randn(2, M, K, dtype=torch.float64), torch.randn(2, K, N, dtype=torch.float64)]
        split = [distribute_tensor(x, mesh, [p]) for x, p in zip(plain, (a_spec, b_spec), strict=True)]
        for x, y in zip(
            *(gemm(*x, epilogue=lambda acc: (acc.relu(), acc.sum(-1))) for x in (split, plain)), strict=True
        ):
            torch.testing.assert_close(x.full_tensor(), y)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        gemm(a, torch.randn(K, N, dtype=torch.float64))


def linears() -> Any:
    return torch.nn.Sequential(FusedLinear(K, N, activation="gelu"), FusedLinear(N, K))


class Model(torch.nn.Module):
    """Every module, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mlp = FusedLinear(K, K, activation="gelu"), FusedMLP(K, N, bias=True)
        self.loss = FusedLinearCrossEntropy(K, N)

    def forward(self, x: Any, target: Any) -> Any:
        x = self.first(x)
        return self.loss(x + self.mlp(x), target)


def inputs() -> Any:
    return torch.randn(2, M, K, dtype=torch.float64, requires_grad=True)


def equal_after_a_step(sharded: Any, plain: Any) -> None:
    """Check the gradients, and the parameters after a step of an optimizer."""
    for model in (sharded, plain):
        torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    for actual, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), expected.grad)
        torch.testing.assert_close(actual.full_tensor(), expected)


def equal_parameters(sharded: Any, plain: Any) -> None:
    for actual, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.full_tensor() if hasattr(actual, "full_tensor") else actual, expected)


def tensor_parallel(mesh: Any, module: Any, compiled: bool = False) -> None:
    """Shard columns, then rows: one all-reduce in the forward pass, and one in the backward pass."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    from gemmsmith.torch.parallel import ColwiseParallel, RowwiseParallel

    plain = copy.deepcopy(module).double()
    with pytest.raises(NotImplementedError, match=r"only support nn.Linear"):  # torch's own style, and no FusedLinear
        parallelize_module(linears(), mesh, {"0": torch.distributed.tensor.parallel.ColwiseParallel()})
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"0": columns, "1": rows, "gate": columns, "up": columns, "down": rows}
    present = {name: style for name, style in plan.items() if name in dict(plain.named_children())}
    sharded = parallelize_module(copy.deepcopy(plain), mesh, present)
    x = inputs()
    if compiled:
        run = torch.compile(sharded, options=gemmsmith.torch.options(), fullgraph=True)
        y, codes = run_and_get_code(run, x)
        assert len(re.findall(r"^ *(\w+ = )?torch\.ops\._c10d_functional\.all_reduce", codes[0], re.MULTILINE)) == 1
        assert "gemmsmith.gemm" in codes[0]
    else:
        with CommDebugMode() as forward:
            y = sharded(x)
        assert [*forward.get_comm_counts().values()] == [1]
    cotangent = torch.randn_like(y)
    if compiled:
        y.backward(cotangent)
    else:
        with CommDebugMode() as backward:
            y.backward(cotangent)
        assert [*backward.get_comm_counts().values()] == [1]
    of_x, x.grad = x.grad, None
    expected = plain(x)
    expected.backward(cotangent)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(of_x, x.grad)
    equal_after_a_step(sharded, plain)
    if hasattr(plain, "down"):  # another hook's layers are called one by one, and DTensors beside other parameters
        for some in (
            {"down": RowwiseParallel(input_layouts=Replicate())},
            {"up": ColwiseParallel(output_layouts=Replicate())},
        ):
            mixed = parallelize_module(copy.deepcopy(plain), mesh, some)
            torch.testing.assert_close(mixed(x), plain(x))
        for model in (sharded, plain):
            model.down.register_forward_hook(lambda _, inputs, y: 2 * y)
        torch.testing.assert_close(sharded(x), plain(x))


def data_parallel(compiled: bool) -> None:
    """Shard parameters by FSDP2, which gathers them for a forward and a backward pass, for each module and the rest."""
    from torch.distributed.fsdp import fully_shard

    plain = Model().double()
    sharded = copy.deepcopy(plain)
    if compiled:
        sharded.mlp.compile(options=gemmsmith.torch.options())
    for module in (sharded.first, sharded.mlp):
        fully_shard(module)
    fully_shard(sharded)
    x, target = inputs(), torch.randint(N, (2, M))
    losses = [model(x, target) for model in (sharded, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    equal_after_a_step(sharded, plain)
    one_layer = FusedMLP(K, N).double()
    expected = one_layer(x)
    fully_shard(one_layer.up)
    torch.testing.assert_close(one_layer(x), expected)


def expert_parallel(mesh: Any, compiled: bool) -> None:
    """Shard experts: one all-reduce in the forward pass, and in the backward pass one of x, and one of the weights.

    On a CPU the forward pass has a second one, of the numbers of tokens.
    """
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    from gemmsmith.torch.parallel import ExpertParallel

    plain = FusedMoE(K, N, 6, 2, shared_hidden=8).double()
    sharded = parallelize_module(copy.deepcopy(plain), mesh, {"experts": ExpertParallel()})
    assert [len(x.to_local()) for x in sharded.experts.parameters()] == [3, 3]
    x = inputs()
    run = torch.compile(sharded, fullgraph=True) if compiled else sharded
    with contextlib.nullcontext() if compiled else CommDebugMode() as forward:
        y = run(x)
    cotangent = torch.randn_like(y)
    with contextlib.nullcontext() if compiled else CommDebugMode() as backward:
        y.backward(cotangent)
    if not compiled:
        assert [sum(x.get_comm_counts().values()) for x in (forward, backward)] == [2, 2]
    of_x, x.grad = x.grad, None
    expected = plain(x)
    expected.backward(cotangent)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(of_x, x.grad)
    with torch.no_grad():
        torch.testing.assert_close(sharded(x), expected)
    for actual, parameter in zip(sharded.parameters(), plain.parameters(), strict=True):
        gradient = actual.grad.full_tensor() if hasattr(actual.grad, "full_tensor") else actual.grad
        torch.testing.assert_close(gradient, parameter.grad)


def sharded_tokens(mesh: Any) -> None:
    """Each rank routes its own tokens, and gets their results."""
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from gemmsmith.torch.parallel import ExpertParallel

    plain, rank = FusedMoE(K, N, 4, 3).double(), mesh.get_local_rank()
    style = ExpertParallel(input_layouts=Shard(0), output_layouts=Shard(0))
    sharded = parallelize_module(copy.deepcopy(plain), mesh, {"experts": style})
    x = inputs()
    own = x.detach()[rank].clone().requires_grad_()
    y, expected = sharded(own), plain(x)
    torch.testing.assert_close(y, expected[rank])
    cotangent = torch.randn_like(expected)
    y.backward(cotangent[rank])
    expected.backward(cotangent)
    torch.testing.assert_close(own.grad, x.grad[rank])
    for actual, parameter in zip(sharded.experts.parameters(), plain.experts.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), parameter.grad)
    as_sums = ExpertParallel(output_layouts=Partial(), use_local_output=False)
    sharded, tokens = parallelize_module(copy.deepcopy(plain), mesh, {"experts": as_sums}), x.detach().flatten(0, 1)
    y = sharded.experts(tokens, *sharded.gate(tokens))
    assert isinstance(y, DTensor)
    assert y.placements == (Partial(),)
    torch.testing.assert_close(y.full_tensor(), plain(tokens))


def uneven_tokens(mesh: Any, counts: tuple[int, int]) -> None:
    """Ranks have different numbers of tokens, all of them in one dimension."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from gemmsmith.torch.parallel import ExpertParallel

    plain, rank = FusedMoE(K, N, 4, 3, shared_hidden=8).double(), mesh.get_local_rank()
    xs = [torch.randn(count, K, dtype=torch.float64, requires_grad=True) for count in counts]
    style = ExpertParallel(input_layouts=Shard(0), output_layouts=Shard(0))
    sharded = parallelize_module(copy.deepcopy(plain), mesh, {"experts": style})
    y, expected = sharded(xs[rank]), [plain(x) for x in xs]
    torch.testing.assert_close(y, expected[rank])
    cotangents = [torch.randn_like(x) for x in expected]
    y.backward(cotangents[rank])
    of_x, xs[rank].grad = xs[rank].grad, None
    for result, cotangent in zip(expected, cotangents, strict=True):
        result.backward(cotangent)
    torch.testing.assert_close(of_x, xs[rank].grad)
    for actual, parameter in zip(sharded.experts.parameters(), plain.experts.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), parameter.grad)
    even = torch.randn(3, K, dtype=torch.float64)
    torch.testing.assert_close(sharded(even), plain(even))
    if counts[0] == counts[1]:
        return
    tokens = f"{min(counts)} to {max(counts)} tokens on the ranks"
    for layouts, message in (
        (
            (Replicate(), Replicate()),
            rf"input_layouts: got R.* and {tokens}; use Shard\(0\), or the same tokens on each",
        ),
        ((Shard(0), Replicate()), rf"output_layouts: got R.* and {tokens}; use Shard\(0\)"),
    ):
        style = ExpertParallel(input_layouts=layouts[0], output_layouts=layouts[1])
        sharded = parallelize_module(copy.deepcopy(plain), mesh, {"experts": style})
        with pytest.raises(ArgumentError, match=message):  # on both
            sharded(xs[rank])


def layers_of_dtensors(mesh: Any) -> None:
    """The other parameters are replicated DTensors, and the tokens, an odd number of them, too or sharded."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from gemmsmith.torch.parallel import ExpertParallel

    plain = FusedMoE(K, N, 8, 2, scores="sigmoid", groups=4, top_k_groups=2, shared_hidden=8).double()
    for placement in (Replicate(), Shard(0)):
        sharded = copy.deepcopy(plain)
        parallelize_module(sharded, mesh, {"experts": ExpertParallel(use_local_output=False)})
        distribute_module(sharded, mesh)
        x = torch.randn(5, K, dtype=torch.float64)
        y, expected = sharded(distribute_tensor(x, mesh, [placement])), plain(x)
        torch.testing.assert_close(y.full_tensor(), expected)
        y.square().sum().backward()
        plain.zero_grad()
        expected.square().sum().backward()
        for actual, parameter in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.full_tensor(), parameter.grad)


def clipped_steps(mesh: Any) -> None:
    """The experts' parameters are DTensors, and the others are not; functions of both take the latter as replicated."""
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import parallelize_module

    from gemmsmith.torch.parallel import ExpertParallel

    plain = torch.nn.Sequential(FusedLinear(K, K), FusedMoE(K, N, 4, 2, shared_hidden=8)).double()
    sharded = parallelize_module(copy.deepcopy(plain), mesh, {"1.experts": ExpertParallel()})
    models = sharded, plain
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True) for model in models]
    for _ in range(3):
        x, norms = inputs(), []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            with implicit_replication():
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        equal_parameters(sharded, plain)


def clipped_steps_with_fsdp(mesh: Any) -> None:
    """The other parameters are DTensors, too, on a mesh of their own: a norm and a group of parameters for each."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    from gemmsmith.torch.parallel import ExpertParallel

    plain, data_mesh = FusedMoE(K, N, 4, 2, shared_hidden=8).double(), torch.distributed.init_device_mesh("cpu", (2,))
    style = ExpertParallel(input_layouts=Shard(0), output_layouts=Shard(0))
    sharded = parallelize_module(copy.deepcopy(plain), mesh, {"experts": style})
    experts = list(sharded.experts.parameters())
    fully_shard(sharded, mesh=data_mesh, ignored_params=set(experts))
    sharded.set_gradient_divide_factor(1.0)
    groups = [experts, [x for x in sharded.parameters() if all(x is not expert for expert in experts)]]
    optimizers = [torch.optim.AdamW([{"params": x} for x in groups], lr=0.01, foreach=True),
                  torch.optim.AdamW(plain.parameters(), lr=0.01)]  # fmt: skip
    for _ in range(2):
        x = inputs()
        for model, own in ((sharded, x[mesh.get_local_rank()]), (plain, x)):
            model(own).square().sum().backward()
        norms = [get_total_norm([x.grad for x in group]).full_tensor() for group in groups]
        for group in groups:
            clip_grads_with_norm_(group, 0.5, get_total_norm(norms))
        torch.testing.assert_close(get_total_norm(norms), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        equal_parameters(sharded, plain)


def wrong_experts(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from gemmsmith.torch.parallel import ExpertParallel

    with pytest.raises(ArgumentError, match="ExpertParallel: got FusedMoE; use the submodule experts of FusedMoE"):
        parallelize_module(FusedMoE(K, N, 4, 2), mesh, ExpertParallel())
    with pytest.raises(ArgumentError, match="gate_up, down: got 3 experts for 2 ranks; use a multiple"):
        parallelize_module(FusedMoE(K, N, 3, 2), mesh, {"experts": ExpertParallel()})
    gathered = parallelize_module(FusedMoE(K, N, 4, 2), mesh, {"experts": ExpertParallel(input_layouts=Shard(0))})
    with pytest.raises(ArgumentError, match="experts: got 12 results of 6 tokens; use ExpertParallel with output_layo"):
        gathered(torch.randn(M, K))
    by_hand = FusedMoE(K, N, 4, 2)
    for name, x in list(by_hand.experts.named_parameters()):
        by_hand.experts.register_parameter(name, torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(1)])))
    with pytest.raises(ArgumentError, match=r"x: got no DTensor on gate_up's mesh; use .*ExpertParallel"):
        by_hand(torch.randn(M, K))
    x = distribute_tensor(torch.randn(M, K), mesh)
    experts, weights = (distribute_tensor(y.detach(), mesh) for y in by_hand.gate(x.to_local()))
    with pytest.raises(ArgumentError, match=r"gate_up: got \(Shard\(dim=1\),\); use Shard\(0\)"):
        by_hand.experts(x, experts, weights)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_processes() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(both, (port,), nprocs=2)


@pytest.mark.parametrize(
    ("function", "added"),
    [
        (lambda acc, row: acc * row / 2, set()),
        (lambda acc, row: (acc * row - acc, acc.sum(-1)), set()),
        (lambda acc, row: acc + row, {"row"}),
        (lambda acc, row: gemmsmith.deinterleave(acc + row)[0] / 3, {"row"}),
        (lambda acc, row: acc + 1 + 0 * row, None),  # it would be added by every process
        (lambda acc, row: acc * row + row, None),
        (lambda acc, row: (acc * row).relu(), None),
        (lambda acc, row: acc * acc * row, None),
        (lambda acc, row: (acc + row.relu(), acc), None),
        (lambda acc, row: (acc * row).amax(), None),
        (lambda acc, row: acc.bfloat16() * row, None),
        (lambda acc, row: row / acc, None),
        (lambda acc, row: (acc, row * 2), {"row"}),
    ],
)
def test_which_epilogues_split_k(function: Any, added: set[str] | None) -> None:
    assert partial_sum_operands(trace(function, (M, N), {"row": (BroadcastDims(columns_per_value=1), BF16)})) == added


def test_a_number_is_no_share_of_a_sum() -> None:
    assert partial_sum_operands(trace(lambda acc, s: acc + s, (M, N), {"s": (BroadcastDims(), None)})) is None
    assert partial_sum_operands(trace(lambda acc, s: acc * s, (M, N), {"s": (BroadcastDims(), None)})) == set()
    assert (
        partial_sum_operands(trace(lambda acc, s: acc + s, (M, N), {"s": (BroadcastDims(columns_per_value=1), INT32)}))
        is None
    )
