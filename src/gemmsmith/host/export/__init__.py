"""Kernels that leave Python: a cubin, and a C header that launches it for any sizes, strides and addresses."""
