"""Train a small transformer on the Python of this repository, byte by byte, with gemmsmith's fused layers.

python examples/train_tiny_transformer.py [--compile] [--steps N]

With --compile, torch's own layers are fused by torch.compile instead. At the end the losses are compared with those of
plain PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import gemmsmith.torch as gt

BYTES = 256


class Size(NamedTuple):
    """The sizes of the model and of a batch."""

    dim: int
    heads: int
    hidden: int
    layers: int
    batch: int
    length: int
    dtype: torch.dtype


SMALL = Size(32, 2, 64, 1, 8, 32, torch.float32)
FULL = Size(1024, 16, 2816, 8, 16, 1024, torch.bfloat16)


class MLP(nn.Module):
    """gt.FusedMLP in plain PyTorch."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LinearCrossEntropy(nn.Module):
    """gt.FusedLinearCrossEntropy in plain PyTorch."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Linear(dim, classes, bias=False).weight

    def forward(self, x: Any, target: Any) -> Any:
        return F.cross_entropy((x @ self.weight.T).float().flatten(0, -2), target.flatten())


class Layers(NamedTuple):
    """The layers of a model; the parameters have the same names in both."""

    linear: Any
    mlp: Any
    loss: Any


FUSED = Layers(gt.FusedLinear, gt.FusedMLP, gt.FusedLinearCrossEntropy)
PLAIN = Layers(nn.Linear, MLP, LinearCrossEntropy)


class Block(nn.Module):
    def __init__(self, layers: Layers, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(size.dim), nn.RMSNorm(size.dim)
        self.qkv, self.out = layers.linear(size.dim, 3 * size.dim), layers.linear(size.dim, size.dim)
        self.mlp = layers.mlp(size.dim, size.hidden)

    def forward(self, x: Any) -> Any:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Returns the loss, for bytes (batch, length) and the bytes after them."""

    def __init__(self, layers: Layers, size: Size) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, size.dim), nn.Embedding(size.length, size.dim)
        self.blocks = nn.ModuleList(Block(layers, size) for _ in range(size.layers))
        self.norm, self.loss = nn.RMSNorm(size.dim), layers.loss(size.dim, BYTES)

    def forward(self, x: Any, target: Any) -> Any:
        h = self.bytes(x) + self.positions.weight
        for block in self.blocks:
            h = block(h)
        return self.loss(self.norm(h), target)


def batches(size: Size, steps: int, device: str) -> list[tuple[Any, Any]]:
    """Return random sections of the Python of this repository, and their next bytes."""
    sources = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - size.length, (steps, size.batch, 1))
    sections = text[starts + torch.arange(size.length + 1)].to(device)
    return [(section[:, :-1].contiguous(), section[:, 1:].contiguous()) for section in sections]


def trained(model: nn.Module, data: list[tuple[Any, Any]], name: str, **compile_options: Any) -> list[float]:
    """Train a model and return its losses; print every fifth."""
    forward = torch.compile(model, **compile_options) if compile_options else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if data[0][0].is_cpu else 3e-4)
    losses, start = [], time.perf_counter()
    for step, (x, target) in enumerate(data):
        loss = forward(x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 5 == 0 or step == len(data) - 1:
            print(f"{name:<9} step {step:>3}  loss {loss.item():.4f}  {time.perf_counter() - start:.1f} s", flush=True)
    return torch.stack(losses).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="PyTorch's own layers, fused by torch.compile")
    parser.add_argument("--steps", type=int, default=31)
    arguments = parser.parse_args()
    device, size = ("cuda", FULL) if torch.cuda.is_available() else ("cpu", SMALL)
    data = batches(size, arguments.steps, device)
    plain = Transformer(PLAIN, size).to(device, size.dtype)
    if arguments.compile:
        losses = trained(copy.deepcopy(plain), data, "compiled", options=gt.options())
    else:
        fused = Transformer(FUSED, size).to(device, size.dtype)
        fused.load_state_dict(plain.state_dict())
        losses = trained(fused, data, "fused")
    expected = trained(plain, data, "torch")
    difference = max(abs(x - y) / y for x, y in zip(losses, expected, strict=True))
    print(f"maximum relative difference of the losses: {difference:.1e}")
    if not difference < (2e-2 if size.dtype == torch.bfloat16 else 1e-3):  # rounding errors accumulate over the steps
        raise SystemExit("the losses differ by more than rounding")


if __name__ == "__main__":
    main()
