"""Two FP8 layers with SwiGLU between them, in two kernels: the first one's epilogue quantizes the second one's input.

python examples/fp8_mlp.py     # with torch

On a CPU a small model runs in the simulator, with every access checked; on a Hopper GPU a full-size one. Activations
have one scale per 1 x 128 block, weights one per 128 x 128 block; both are applied in the mainloop. Only the two
kernels run: weights are quantized once, before, and no scale or operand is rearranged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import gemmsmith

SIZES = {"cpu": (96, 256, 256), "cuda": (4096, 4096, 14336)}
"""Tokens, the width of the model, and the width of the hidden layer, by device."""


def quantized_weight(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight (k, n) in fp8 with contiguous columns, as the tensor cores read it, and its block scales."""
    values, scales = gemmsmith.quantize(w.T, "128x128")
    return values.T, scales.T


def swiglu(acc: Any) -> Any:
    """Return the hidden layer in fp8, and its scales."""
    gate, up = gemmsmith.deinterleave(acc)
    return gemmsmith.quantize(F.silu(gate) * up, "1x128")


class Layers:
    """Computes (silu(x @ gate) * (x @ up)) @ down.

    gate and up are (width, hidden), down is (hidden, width).
    """

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, backend: Any = "auto") -> None:
        self.first, self.first_scales = quantized_weight(gemmsmith.interleave(gate, up))
        self.second, self.second_scales = quantized_weight(down)
        self.backend = backend

    def __call__(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return y in bf16, for x (tokens, width) in fp8 with one scale per block of 128 columns."""
        hidden, hidden_scales = gemmsmith.gemm(
            x, self.first, scale_a=scales, scale_b=self.first_scales, epilogue=swiglu, backend=self.backend
        )
        y: torch.Tensor = gemmsmith.gemm(
            hidden, self.second, scale_a=hidden_scales, scale_b=self.second_scales, backend=self.backend
        )
        return y


def exact(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return y in fp32, of unquantized arguments."""
    x, gate, up, down = (t.float() for t in (x, gate, up, down))
    return (F.silu(x @ gate) * (x @ up)) @ down


def workspaces(layers: Layers, x: torch.Tensor, scales: torch.Tensor) -> list[int]:
    """Return the bytes of workspace of each layer: 0, since nothing is repacked, and each is one kernel."""
    tokens = x.shape[0]
    first = gemmsmith.plan(x, layers.first, scale_a=scales, scale_b=layers.first_scales, epilogue=swiglu)
    hidden = gemmsmith.Spec((tokens, layers.second.shape[0]), "fp8_e4m3")
    hidden_scales = gemmsmith.Spec((tokens, -(-layers.second.shape[0] // 128)), "fp32", (1, -(-tokens // 4) * 4))
    second = gemmsmith.plan(hidden, layers.second, scale_a=hidden_scales, scale_b=layers.second_scales)
    return [plan.workspace_bytes for plan in (first, second)]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "cpu"
    tokens, width, hidden = SIZES[device]
    x = torch.randn(tokens, width, device=device).bfloat16()
    gate, up, down = (
        (torch.randn(shape, device=device) / shape[0] ** 0.5).bfloat16()
        for shape in ((width, hidden), (width, hidden), (hidden, width))
    )
    layers = Layers(gate, up, down, backend="cuda" if device == "cuda" else "sim")
    quantized = gemmsmith.quantize(x)
    y, expected = layers(*quantized).float(), exact(x, gate, up, down)
    error = ((y - expected).norm() / expected.norm()).item()
    print(f"{tokens} tokens, {width} to 2 x {hidden} to {width}, on {device}")
    print(f"bytes of workspace: {workspaces(layers, *quantized)}; error against unquantized fp32: {error:.1%}")
    if not error < 0.08:
        raise SystemExit("the error is larger than fp8's rounding")


if __name__ == "__main__":
    main()
