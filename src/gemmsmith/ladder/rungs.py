"""The ladder: one GEMM by kernels ("rungs") from one thread per result to Hopper's designs, counted in the simulator.

One tile of a rung (or a cluster's tiles) is simulated twice, the second time with twice the K. Counts are linear in K,
so the two simulations give those of any GEMM. The tile's rows have the leading dimensions of the whole GEMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.backends.sim.execute.counters import Count, Counters
from gemmsmith.backends.sim.run import run
from gemmsmith.binding.request import Request
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import BF16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.errors import ArgumentError, HazardError
from gemmsmith.core.scalars import ceil_div
from gemmsmith.host.output_kernels import to_canonical_matrix
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.ladder.launches import LADDER_KERNELS, ladder_launches
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launches

Sizes = tuple[int, int, int]
SIZE_MULTIPLE = 16
"""m, n and k must be multiples of this number of elements, so that no rung repacks operands."""


@dataclass(frozen=True)
class RungCase:
    """A rung: a kernel of `ladder/`, or that of a config, for a dtype and the layouts of A and B that it needs.

    Attributes:
        name: The ladder kernel's name, or the config's design.
        dtype: Dtype of A and B.
        layout: A and B row-major (n) or column-major (t).
        tile: Rows and columns of D that are simulated.
        simulated_k: K of the first simulation; the second has twice that.
        config: The config; None: a kernel of `ladder/`.
    """

    name: str
    dtype: DType
    layout: str
    tile: tuple[int, int]
    simulated_k: int
    config: Config | None = None

    @property
    def out_dtype(self) -> DType:
        if self.config:
            return {INT8: INT32, TF32: FP32}.get(self.dtype, self.dtype)
        return LADDER_KERNELS[self.name].output(self.dtype)

    def launches(self, a: Any, b: Any, d: Any) -> tuple[Launches, Mapping[str, ArrayInfo | float]]:
        """Return (launches that compute D = A @ B, their arguments by name), for arrays `a`, `b` and `d`."""
        if self.config:
            precision = "tf32" if self.dtype == TF32 else None
            planned = PlannedGemm(Request(a, b, d, config=self.config, precision=precision))
            return planned.launches, planned.binding.arguments
        arrays = {"a": describe(a, "a"), "b": describe(b, "b"), "d": describe(d, "d")}
        matrix_a, matrix_b, matrix_d = (to_canonical_matrix(x) for x in arrays.values())
        return ladder_launches(self.name, matrix_a, matrix_b, matrix_d, HOPPER), arrays

    def arrays(self, sizes: Sizes, tile: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return zeros for A, B and D of a tile (m, n, k), with the leading dimensions of a GEMM of `sizes` (m, n, k).

        The counts of memory sectors depend on the leading dimensions.
        """
        (m, n, k), (tile_m, tile_n, tile_k) = sizes, tile

        def zeros(rows: int, columns: int, full_columns: int, dtype: DType) -> np.ndarray:
            return np.zeros((rows, max(full_columns, columns)), dtype.numpy)[:, :columns]

        a_is_row_major, b_is_row_major = (x == "n" for x in self.layout)
        a = zeros(tile_m, tile_k, k, self.dtype) if a_is_row_major else zeros(tile_k, tile_m, m, self.dtype).T
        b = zeros(tile_k, tile_n, n, self.dtype) if b_is_row_major else zeros(tile_n, tile_k, k, self.dtype).T
        return a, b, zeros(tile_m, tile_n, n, self.out_dtype)


RUNG_CASES = (
    RungCase("naive_m", FP32, "nn", (16, 16), 64),
    RungCase("naive", FP32, "nn", (16, 16), 64),
    RungCase("block_tile", FP32, "nn", (32, 32), 64),
    RungCase("thread_tile", FP32, "nn", (128, 128), 64),
    RungCase("vectorized", FP32, "tn", (128, 128), 64),
    RungCase("double_buffer", FP32, "tn", (128, 128), 64),
    RungCase("sgemm", FP32, "tn", (256, 128), 64, Config("sgemm", (256, 128, 8), (1, 1), 4)),
    RungCase("dp4a", INT8, "nt", (64, 64), 256),
    RungCase("mma_multistage", INT8, "nt", (256, 128), 512, Config("mma_multistage", (256, 128, 128), (1, 1), 3)),
    RungCase("mma_multistage", TF32, "nt", (256, 128), 128, Config("mma_multistage", (256, 128, 32), (1, 1), 3)),
    RungCase("wmma_naive", BF16, "nt", (16, 16), 256),
    RungCase("mma_naive", BF16, "nt", (64, 64), 256),
    RungCase("wmma", BF16, "nt", (256, 128), 256),
    RungCase("mma_multistage", BF16, "nt", (256, 128), 256, Config("mma_multistage", (256, 128, 64), (1, 1), 3)),
    RungCase("tma", BF16, "nt", (128, 256), 512, Config("tma", (128, 256, 64), (1, 1), 4)),
    RungCase("pingpong", BF16, "nt", (128, 512), 512, Config("pingpong", (128, 128, 64), (1, 2), 6, raster="n")),
    RungCase("cooperative", BF16, "nt", (256, 256), 512, Config()),
)
"""The rungs from the plainest to the fastest, for fp32, int8, tf32 and bf16."""
RUNG_NAMES = list(dict.fromkeys(x.name for x in RUNG_CASES))


def simulate_rung(case: RungCase, sizes: Sizes) -> tuple[Kernel, list[Count]]:
    """Return the kernel of a rung, and the counts of a GEMM of `sizes` (m, n, k), by source line.

    Raises ArgumentError for sizes that would need repacked operands, and HazardError if the simulator finds a hazard.
    """
    (m, n, k), (tile_m, tile_n) = sizes, case.tile
    if any(x % SIZE_MULTIPLE for x in sizes):
        raise ArgumentError(f"m, n, k: got {m}x{n}x{k}; use multiples of {SIZE_MULTIPLE}")
    (kernel, first), (_, second) = (
        _simulate_tile(case, sizes, (tile_m, tile_n, case.simulated_k * factor)) for factor in (1, 2)
    )
    tiles, k_factor = ceil_div(m, tile_m) * ceil_div(n, tile_n), k / case.simulated_k - 1
    return kernel, [_extrapolate(k_factor, tiles, first.get(key), count) for key, count in second.items()]


def _simulate_tile(case: RungCase, sizes: Sizes, tile: Sizes) -> tuple[Kernel, dict[tuple[Any, str, str], Count]]:
    """Simulate a GEMM of the size of `tile` (m, n, k), with the leading dimensions of a GEMM of `sizes`.

    Return the kernel, and its counts by source line, instruction and kind of memory.
    """
    counters = Counters()
    arrays = case.arrays(sizes, tile)  # keeps the memory alive that the simulator reads by address
    launches, arguments = case.launches(*arrays)
    if hazards := run(launches, arguments, 0, None, counters).hazards:
        raise HazardError(hazards)
    (kernel,) = counters.kernels  # nothing is repacked
    return kernel, {(x.location, x.instruction, x.memory): x for x in counters.lines(kernel)}


def _extrapolate(k_factor: float, tiles: int, first: Count | None, second: Count) -> Count:
    """Extrapolate counts, which are linear in K, to a GEMM of `tiles` tiles and (1 + `k_factor`) times the first K.

    `first` and `second` are the counts of a line in the simulations with K and with twice K; None: the line was not
    executed in the first, so its counts are zero.
    """
    counts: dict[str, Any] = {}
    for name, second_count in vars(second).items():
        if isinstance(second_count, int):
            first_count = getattr(first, name) if first else 0
            counts[name] = round(tiles * (first_count + k_factor * (second_count - first_count)))
    return replace(second, **counts)
