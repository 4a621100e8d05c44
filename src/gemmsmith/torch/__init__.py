"""gemmsmith in PyTorch: products with epilogues that have gradients and can be compiled."""

from gemmsmith.torch.api import chain, gemm
from gemmsmith.torch.modules import FusedLinear, FusedLinearCrossEntropy, FusedMLP

__all__ = ["FusedLinear", "FusedLinearCrossEntropy", "FusedMLP", "chain", "gemm"]
