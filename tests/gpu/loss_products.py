"""Loss heads, forward and backward, for the program that runs products again and again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tests.gpu.products import Product, Results

from gemmsmith.torch.loss import cross_entropy

SIZES = {
    "cuda": ((1, 200, 1024, 3000), (128, 1000, 2048), (64, 520, 1024)),
    "cpu": ((1, 30, 70), (16, 48), (16, 40)),
}
"""Rows, classes and dim."""


@dataclass
class LossHead(Product):
    """The loss and the gradients of rows `a` (rows, dim) and of a weight, the transpose of `b` (dim, classes).

    `operands`: the labels.
    """

    chunks: int | None = None
    low_memory: bool = False

    def __str__(self) -> str:
        return f"{tuple(self.a.shape)} x {self.b.shape[1]} classes, chunks {self.chunks}, low_memory {self.low_memory}"

    def __call__(self, outs: Results | None = None) -> Results:
        x, weight = (y.detach().requires_grad_() for y in (self.a, self.b.T))
        loss = cross_entropy(x, weight, self.operands["labels"], -100, "mean", self.chunks, self.low_memory)
        results = [loss.detach(), *torch.autograd.grad(loss, (x, weight))]
        if outs is None:
            return results
        for out, result in zip(outs, results, strict=True):
            out.copy_(result)
        return outs

    def plan(self) -> Any:
        return SimpleNamespace(_planned=SimpleNamespace(compiled=None, kernel=None))

    def expect(self) -> None:
        self.isolated_results = self()
        x, weight = (y.detach().double().requires_grad_() for y in (self.a, self.b.T))
        logits = x @ weight.T
        labels = self.operands["labels"]
        loss = F.cross_entropy(logits, labels)
        (of_logits,) = torch.autograd.grad(loss, logits, retain_graph=True)
        self.wants = [loss.detach(), *torch.autograd.grad(loss, (x, weight))]
        of_logits, coarse = of_logits.abs(), 2.0**-6  # roundings of logits, of their gradient, and of the result
        sums = of_logits @ weight.detach().abs(), of_logits.T @ x.detach().abs()
        self.bounds = [1e-4 + 1e-5 * loss.detach().abs(), *(coarse * s + 1e-6 for s in sums)]


def drawn_heads(device: str, count: int, rng: random.Random) -> Iterator[Product]:
    """`count` heads of random sizes, chunks and labels, of which some are ignored."""
    dice = torch.Generator().manual_seed(rng.getrandbits(32))
    for _ in range(count):
        rows, classes, dim = (rng.choice(sizes) for sizes in SIZES[device])
        x = torch.randn(rows, dim, generator=dice).to(device, torch.bfloat16)
        weight = (torch.randn(classes, dim, generator=dice) * dim**-0.5).to(device, torch.bfloat16)
        labels = torch.randint(classes, (rows,), generator=dice)
        labels[torch.rand(rows, generator=dice) < 0.1] = -100
        labels[0] = 0
        options = {"chunks": rng.choice([None, 1, 3]), "low_memory": rng.random() < 0.5}
        yield LossHead(x, weight.T, None, "loss", {"labels": labels.to(device)}, False, **options)
