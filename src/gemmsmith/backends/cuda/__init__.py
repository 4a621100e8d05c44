"""From CUDA C++ to a running kernel: NVRTC, the cubin cache, tensor maps, launches. All but the last need no GPU."""
