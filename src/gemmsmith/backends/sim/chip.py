"""The cost model: how long things take on an H200, in SM cycles. Rough on purpose; it orders and draws, no more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Latencies and bandwidths of one SM.

    wgmma's cycles come with each operation (N / 2 for m64nNk16: 4096 dense 16-bit FMAs a cycle, from NVIDIA's
    989 TFLOP/s at 1.83 GHz); TMA latency and L2 bandwidth from micro-benchmarks of H100 (Luo et al., 2024).
    """

    instruction: int = 4
    memory_instruction: int = 20
    tma_latency: int = 700
    tma_bytes_per_cycle: int = 64
    store_latency: int = 500
    barrier: int = 20


H200 = Chip()
