"""Kernels that leave Python: cubins, and a C header that launches them for any sizes, strides and addresses."""
