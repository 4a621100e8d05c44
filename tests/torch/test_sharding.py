"""Two processes on the CPU: every way to split a product gives what one process computes, with its gradients."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing

from gemmsmith.core.dtypes import BF16
from gemmsmith.core.graph import Extent
from gemmsmith.epilogue.frontend.tracer import trace
from gemmsmith.torch import FusedLinear, gemm
from gemmsmith.torch.sharding import _linear

M, N, K = 6, 16, 8

CASES: dict[str, Any] = {
    "bias": (lambda acc, row, column: ((acc + row) * column).relu(), ("row", "column")),
    "linear": (lambda acc, row: (acc * row * 0.5, acc.sum(-1)), ("row",)),
    "reductions": (lambda acc, row: (acc.sum(-1), (acc + row).sum(-2), acc.logsumexp(-1)), ("row",)),
    "most": (lambda acc: (acc, acc.amax(), acc.amax(-1)), ()),
    "matrix": (lambda acc, matrix: acc.tanh() * matrix, ("matrix",)),
}  # fmt: skip
SHAPES = {"row": (N,), "column": (M, 1), "matrix": (M, N)}


def both(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    for function, names in CASES.values():
        for of_a, of_b in [
            (Shard(0), Replicate()),
            (Replicate(), Shard(1)),
            (Shard(1), Shard(0)),
            (Shard(0), Shard(1)),
        ]:
            plain = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((M, K), (K, N))]
            plain += [torch.randn(SHAPES[n], dtype=torch.float64, requires_grad=True) for n in names]
            placements = [of_a, of_b, *[Replicate() for _ in names]]
            split = [distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
                     for x, p in zip(plain, placements, strict=True)]  # fmt: skip
            found = []
            for a, b, *others in (split, plain):
                y = gemm(a, b, epilogue=function, **dict(zip(names, others, strict=True)))
                found.append(y if isinstance(y, tuple) else (y,))
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got.full_tensor(), want)
            total = sum(x.square().sum() for x in found[0])
            got = torch.autograd.grad(total, split)
            want = torch.autograd.grad(sum(x.square().sum() for x in found[1]), plain)
            for x, y in zip(got, want, strict=True):
                torch.testing.assert_close(x.full_tensor() if isinstance(x, DTensor) else x, y)
    a, b = (distribute_tensor(torch.randn(s, dtype=torch.float64), mesh, [p])
            for s, p in (((M, K), Shard(1)), ((K, N), Shard(0))))  # fmt: skip
    assert gemm(a, b, epilogue=lambda acc: acc * 2).placements == (Partial("sum"),)
    model = torch.nn.Sequential(FusedLinear(K, N, activation="gelu"), FusedLinear(N, K)).double()
    x = torch.randn(M, K, dtype=torch.float64)
    want = model(x)
    gradient = torch.autograd.grad(want.square().sum(), model[0].weight)[0]
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    got = model(x)
    torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), model[0].weight)[0].full_tensor(), gradient)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_processes() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(both, (port,), nprocs=2)


@pytest.mark.parametrize(
    ("function", "linear"),
    [
        (lambda acc, row: acc * row / 2, True),
        (lambda acc, row: (acc * row - acc, acc.sum(-1)), True),
        (lambda acc, row: acc + row, False),  # it would be added by every process
        (lambda acc, row: (acc * row).relu(), False),
        (lambda acc, row: acc * acc * row, False),
        (lambda acc, row: acc.bfloat16() * row, False),
        (lambda acc, row: row / acc, False),
    ],
)
def test_which_epilogues_split_k(function: Any, linear: bool) -> None:
    assert _linear(trace(function, (M, N), {"row": (Extent(width=1), BF16)})) == linear
