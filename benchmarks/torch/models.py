"""The models of torch_layers.py, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class SwiGLU(nn.Module):
    """gt.FusedMLP(dim, hidden) in plain PyTorch."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GeluMLP(nn.Module):
    """gt.FusedMLP(dim, hidden, "gelu_tanh", bias=True) in plain PyTorch."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Head(nn.Module):
    """gt.FusedLinearCrossEntropy(dim, classes) in plain PyTorch; returns the logits if there is no target."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Linear(dim, classes, bias=False).weight

    def forward(self, x: Any, target: Any = None) -> Any:
        logits = x @ self.weight.T
        return logits if target is None else F.cross_entropy(logits.float().flatten(0, -2), target.flatten())


class Labels(nn.Module):
    """A multi-label classifier; returns the mean of binary cross-entropies, or the logits."""

    def __init__(self, features: int, labels: int) -> None:
        super().__init__()
        self.out = nn.Linear(features, labels)

    def forward(self, x: Any, labels: Any = None) -> Any:
        logits = self.out(x)
        return logits if labels is None else F.binary_cross_entropy_with_logits(logits.float(), labels.float())


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias), nn.Linear(dim, dim, bias)

    def forward(self, x: Any, angles: Any) -> Any:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.rotary:
            q, k = rotated(q, angles), rotated(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotated(x: Any, angles: Any) -> Any:
    (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, mlp: nn.Module, llama: bool) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, bias=not llama, rotary=llama)
        self.norm1, self.norm2 = (nn.RMSNorm(dim) if llama else nn.LayerNorm(dim) for _ in range(2))
        self.mlp = mlp

    def forward(self, x: Any, angles: Any) -> Any:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A transformer like Llama (RMSNorm, rotary embeddings, SwiGLU, no biases) or GPT (LayerNorm, gelu, biases).

    Returns the loss for tokens (batch, length) and targets, or the logits without targets.
    """

    def __init__(self, dim: int, hidden: int, heads: int, layers: int, classes: int, length: int, llama: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, dim)
        self.places = None if llama else nn.Embedding(length, dim)
        mlp = SwiGLU if llama else GeluMLP
        self.blocks = nn.ModuleList(Block(dim, heads, mlp(dim, hidden), llama) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim) if llama else nn.LayerNorm(dim), Head(dim, classes)
        frequencies = torch.logspace(0, -4, dim // heads // 2, dtype=torch.float32)
        self.register_buffer("angles", torch.arange(length)[:, None] * frequencies)

    def forward(self, tokens: Any, targets: Any = None) -> Any:
        length = tokens.shape[1]
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, self.angles[:length])
        return self.head(self.norm(x), targets)
