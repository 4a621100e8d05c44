"""The cost model: durations on an H200, in SM cycles. Rough on purpose: it only orders events and draws timelines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Latencies (cycles) and bandwidths (bytes per cycle) of one SM.

    The cycles of a wgmma are given by each operation (N / 2 for m64nNk16: 4096 dense 16-bit FMAs per cycle, from
    NVIDIA's 989 TFLOP/s at 1.83 GHz); TMA latency and L2 bandwidth are from micro-benchmarks of H100 (Luo et al.,
    2024).
    """

    instruction: int = 4
    memory_instruction: int = 20
    tma_latency: int = 700
    tma_bytes_per_cycle: int = 64
    store_latency: int = 500
    barrier: int = 20


H200_COST_MODEL = CostModel()
