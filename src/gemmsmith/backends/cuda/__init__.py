"""The CUDA backend: NVRTC, the cubin cache, tensor maps and launches. Only tensor maps and launches need a driver."""
