"""The ladder: kernels below Hopper's designs, one optimization step per file, and their counts. See docs/ladder.md."""
