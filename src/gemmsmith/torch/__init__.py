"""gemmsmith in PyTorch: products with epilogues that have gradients and can be compiled."""
