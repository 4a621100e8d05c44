"""Two FP8 layers with SwiGLU between them, in two kernels: the first one's epilogue quantizes what the second reads.

python examples/fp8_mlp.py

On a CPU a small one runs in the simulator, every access checked; on a Hopper GPU a whole one. Activations have a scale
for 128 neighbors of a row, weights one for 128 x 128; both are multiplied within the mainloop. Nothing but the two
kernels runs: weights are quantized once, before, and no scale, no operand is rearranged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import gemmsmith

SIZES = {"cpu": (96, 256, 256), "cuda": (4096, 4096, 14336)}
"""Tokens, and the widths of the model and of what lies between the layers."""


def quantized_weight(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (k, n) in fp8 with contiguous columns, as the tensor cores read it, and the scales of its blocks."""
    values, scales = gemmsmith.quantize(w.T, "128x128")
    return values.T, scales.T


def swiglu(acc: Any) -> Any:
    """What lies between the layers, in fp8, and its scales."""
    gate, up = gemmsmith.deinterleave(acc)
    return gemmsmith.quantize(F.silu(gate) * up, "1x128")


class Layers:
    """y = (silu(x @ gate) * (x @ up)) @ down, of weights (width, hidden), (width, hidden) and (hidden, width)."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, backend: Any = "auto") -> None:
        self.first, self.first_scales = quantized_weight(gemmsmith.interleave(gate, up))
        self.second, self.second_scales = quantized_weight(down)
        self.backend = backend

    def __call__(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """y in bf16, of x (tokens, width) in fp8 with the scales of its blocks of 128 columns."""
        between, of_between = gemmsmith.gemm(
            x, self.first, scale_a=scales, scale_b=self.first_scales, epilogue=swiglu, backend=self.backend
        )
        y: torch.Tensor = gemmsmith.gemm(
            between, self.second, scale_a=of_between, scale_b=self.second_scales, backend=self.backend
        )
        return y


def exact(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The same in fp32, of numbers that are not quantized."""
    x, gate, up, down = (t.float() for t in (x, gate, up, down))
    return (F.silu(x @ gate) * (x @ up)) @ down


def launches(layers: Layers, x: torch.Tensor, scales: torch.Tensor) -> list[int]:
    """How many kernels each layer launches."""
    tokens = x.shape[0]
    first = gemmsmith.plan(x, layers.first, scale_a=scales, scale_b=layers.first_scales, epilogue=swiglu)
    between = gemmsmith.Spec((tokens, layers.second.shape[0]), "fp8_e4m3")
    blocks = gemmsmith.Spec((tokens, -(-layers.second.shape[0] // 128)), "fp32", (1, -(-tokens // 4) * 4))
    second = gemmsmith.plan(between, layers.second, scale_a=blocks, scale_b=layers.second_scales)
    return [len(plan.launches.all) for plan in (first, second)]


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
    y, want = layers(*quantized).float(), exact(x, gate, up, down)
    error = ((y - want).norm() / want.norm()).item()
    print(f"{tokens} tokens, {width} to 2 x {hidden} to {width}, on {device}")
    print(f"kernels: {launches(layers, *quantized)}; error against fp32 of what was not quantized: {error:.1%}")
    if not error < 0.08:
        raise SystemExit("that is more than fp8's rounding explains")


if __name__ == "__main__":
    main()
