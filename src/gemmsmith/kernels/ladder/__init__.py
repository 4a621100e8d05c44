"""Kernels of the ladder below Hopper's designs, one optimization step per file. See docs/ladder.md."""
