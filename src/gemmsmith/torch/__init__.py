"""gemmsmith in PyTorch: products with epilogues that have gradients and can be compiled."""

from gemmsmith.torch.api import gemm

__all__ = ["gemm"]
