"""The kernels themselves, in the kernel language: one file a design, each readable from top to bottom."""
