"""Small models for tests, and the results of a training step with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def wide(x: Any) -> Any:
    """Cast as autocast does: to fp32, but leave float64."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(dim))

    def forward(self, x: Any) -> Any:
        y = wide(x)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * self.weight


class Block(nn.Module):
    """A layer like Llama's: rotary embeddings, SwiGLU, no biases."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, dim))
        z = self.norm2(x)
        return x + self.down(functional.silu(self.gate(z)) * self.up(z))


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def attention(q: Any, k: Any, v: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Llama(nn.Module):
    """With two layers 11 matmuls, 33 with their gradients. Tokens and targets (batch, length) -> the loss."""

    def __init__(
        self, classes: int = 96, dim: int = 32, heads: int = 2, hidden: int = 64, length: int = 16, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, classes, bias=False)
        angles = torch.arange(length)[:, None] * torch.logspace(0, -2, dim // heads // 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return functional.cross_entropy(wide(self.head(self.norm(x))).flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """A model like GPT-2: LayerNorm, biases, gelu. x (batch, length, dim), targets (batch, length) -> the loss."""

    def __init__(self, classes: int = 48, dim: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Any, targets: Any) -> Any:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=False):
            x = x + down(functional.gelu(up(norm(x)), approximate="tanh"))
        return functional.cross_entropy(wide(self.head(self.norms[-1](x))).flatten(0, 1), targets.flatten())


class Classifier(nn.Module):
    """A multi-label classifier. x (rows, 32), labels of 0 and 1 (rows, 64) -> the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(32, 48), nn.Linear(48, 64)

    def forward(self, x: Any, labels: Any) -> Any:
        return functional.binary_cross_entropy_with_logits(
            wide(self.out(functional.gelu(self.hidden(x)))), wide(labels)
        )


def model(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a model and inputs for it."""
    match name:
        case "llama":
            return Llama().to(dtype), (torch.randint(96, (2, 16)), torch.randint(96, (2, 16)))
        case "gpt":
            return GPT().to(dtype), (torch.randn(2, 16, 32, dtype=dtype), torch.randint(48, (2, 16)))
    return Classifier().to(dtype), (torch.randn(24, 32, dtype=dtype), torch.randint(2, (24, 64)).to(dtype))


def trained(forward: Callable[..., Any], of: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Return the loss and every parameter's gradient."""
    of.zero_grad()
    loss = forward(*inputs)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in of.named_parameters()}


def whole_step(of: nn.Module) -> Callable[..., Any]:
    """Return forward and backward as one function of the model's inputs, which returns what `trained` does."""

    def step(parameters: dict[str, Any], inputs: tuple[Any, ...]) -> dict[str, Any]:
        loss = lambda p: torch.func.functional_call(of, p, inputs)  # noqa: E731
        gradients, value = torch.func.grad_and_value(loss)(parameters)
        return {"loss": value} | gradients

    return step
