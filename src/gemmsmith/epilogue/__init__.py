"""Epilogues: graphs of what happens to the accumulator, their optimization and their lowering to kernels."""
