"""Kernels in the language, a file each: the designs of a GEMM, and those that pack operands and end reductions."""
