"""Kernels that leave Python: a cubin, and a C header that launches it for any sizes, strides and addresses.

A tool of the repository: it is not in the package yet, which has no room for it.

    python -m benchmarks.export 1024x1024x1024 --out build --name gemm [--layout nn --config "pingpong 128x128x64 …"]
"""
