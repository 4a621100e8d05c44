"""The linear layer and cross-entropy of language models' heads, forward and backward, in one run.

Contenders, checks and rows are those of benchmarks/torch/layers.py.

    python -m benchmarks.torch.loss_heads --contender inductor --contender fused --contender low_memory \\
        --json benchmarks/results/loss-heads-h200.json
"""

from __future__ import annotations

from benchmarks.torch import layers

HEADS = ((2048, 5120, 152064), (4096, 4096, 128256), (8192, 4096, 128256), (16384, 2304, 256000), (4096, 2048, 32768))
"""Rows, dim and classes: of Qwen, Llama and Gemma, and one whose logits are few."""
CASES = {
    "x".join(map(str, sizes)): layers.Case(
        layers.head, dict(zip(("tokens", "dim", "classes"), sizes, strict=True)), layers.TINY_CLASSES
    )
    for sizes in HEADS
}

if __name__ == "__main__":
    layers.main(__doc__, CASES)
