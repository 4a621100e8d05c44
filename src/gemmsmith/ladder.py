"""The ladder: one product by every rung, from one thread a result to Hopper's designs, counted in the simulator.

One tile of a rung (or a cluster's tiles) is simulated twice, the second time with twice as much of K. Counts are linear
in K, so the two simulations give those of any product. The rows of the tile are as far apart as the whole product's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.backends.sim.counters import Count, Counters
from gemmsmith.backends.sim.run import run
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import BF16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.errors import ArgumentError, HazardError
from gemmsmith.kernels.ladder.rungs import RUNGS, launches
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launches
from gemmsmith.plans import Plan
from gemmsmith.runs import matrix_of

Sizes = tuple[int, int, int]
ALIGNED = 16
"""Elements of a row, in which every rung reads it as it is."""


@dataclass(frozen=True)
class Step:
    """A rung of `kernels/ladder/`, or a `config`'s kernel, for operands of a dtype that lie as it wants them: A and B
    row-major (n) or column-major (t). `tile`: rows and columns that are simulated, to depth `depth` and twice as deep.
    """

    name: str
    dtype: DType
    layout: str
    tile: tuple[int, int]
    depth: int
    config: Config | None = None

    @property
    def output(self) -> DType:
        """D's dtype."""
        if self.config:
            return {INT8: INT32, TF32: FP32}.get(self.dtype, self.dtype)
        return RUNGS[self.name].output(self.dtype)

    def launches(self, a: Any, b: Any, d: Any) -> tuple[Launches, Mapping[str, ArrayInfo | float]]:
        """What computes D = A B of arrays, and its arguments by name."""
        if self.config:
            plan = Plan(a, b, d, config=self.config, precision="tf32" if self.dtype == TF32 else None)
            return plan.launches, plan.binding.arguments
        arrays = {"a": describe(a, "a"), "b": describe(b, "b"), "d": describe(d, "d")}
        of_a, of_b, of_d = (matrix_of(x) for x in arrays.values())
        return launches(self.name, of_a, of_b, of_d, HOPPER), arrays

    def arrays(self, sizes: Sizes, tile: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A, B and D of a tile (m, n, k) that is a part of a product of `sizes`: zeros."""
        (m, n, k), (rows, columns, depth) = sizes, tile

        def part(height: int, width: int, whole: int, dtype: DType) -> np.ndarray:
            return np.zeros((height, max(whole, width)), dtype.numpy)[:, :width]

        a = part(rows, depth, k, self.dtype) if self.layout[0] == "n" else part(depth, rows, m, self.dtype).T
        b = part(depth, columns, n, self.dtype) if self.layout[1] == "n" else part(columns, depth, k, self.dtype).T
        return a, b, part(rows, columns, n, self.output)


STEPS = (
    Step("naive_m", FP32, "nn", (16, 16), 64),
    Step("naive", FP32, "nn", (16, 16), 64),
    Step("block_tile", FP32, "nn", (32, 32), 64),
    Step("thread_tile", FP32, "nn", (128, 128), 64),
    Step("vectorized", FP32, "tn", (128, 128), 64),
    Step("double_buffer", FP32, "tn", (128, 128), 64),
    Step("sgemm", FP32, "tn", (256, 128), 64, Config("sgemm", (256, 128, 8), (1, 1), 4)),
    Step("dp4a", INT8, "nt", (64, 64), 256),
    Step("mma_multistage", INT8, "nt", (256, 128), 512, Config("mma_multistage", (256, 128, 128), (1, 1), 3)),
    Step("mma_multistage", TF32, "nt", (256, 128), 128, Config("mma_multistage", (256, 128, 32), (1, 1), 3)),
    Step("wmma_naive", BF16, "nt", (16, 16), 256),
    Step("mma_naive", BF16, "nt", (64, 64), 256),
    Step("wmma", BF16, "nt", (256, 128), 256),
    Step("mma_multistage", BF16, "nt", (256, 128), 256, Config("mma_multistage", (256, 128, 64), (1, 1), 3)),
    Step("tma", BF16, "nt", (128, 256), 512, Config("tma", (128, 256, 64), (1, 1), 4)),
    Step("pingpong", BF16, "nt", (128, 512), 512, Config("pingpong", (128, 128, 64), (1, 2), 6, raster="n")),
    Step("cooperative", BF16, "nt", (256, 256), 512, Config()),
)
"""From the plainest to the fastest, of fp32, int8, tf32 and bf16."""
NAMES = list(dict.fromkeys(x.name for x in STEPS))


def counted(step: Step, sizes: Sizes) -> tuple[Kernel, list[Count]]:
    """The kernel of a rung, and the counts by line of a product of `sizes` (m, n, k). Raises ArgumentError for sizes
    with which operands would have to be packed first, and HazardError."""
    (m, n, k), (rows, columns) = sizes, step.tile
    if any(x % ALIGNED for x in sizes):
        raise ArgumentError(f"m, n, k: got {m}x{n}x{k}; use multiples of {ALIGNED}")
    (kernel, shallow), (_, deep) = (_simulated(step, sizes, (rows, columns, step.depth * x)) for x in (1, 2))
    tiles, deeper = -(-m // rows) * -(-n // columns), k / step.depth - 1
    return kernel, [_at(deeper, tiles, shallow.get(key), count) for key, count in deep.items()]


def _simulated(step: Step, sizes: Sizes, tile: Sizes) -> tuple[Kernel, dict[tuple[Any, str, str], Count]]:
    counters = Counters()
    held = step.arrays(sizes, tile)
    found, arguments = step.launches(*held)
    if hazards := run(found, arguments, 0, None, counters).hazards:
        raise HazardError(hazards)
    (kernel,) = counters.kernels  # nothing is packed
    return kernel, {(x.where, x.instruction, x.memory): x for x in counters.lines(kernel)}


def _at(deeper: float, tiles: int, shallow: Count | None, deep: Count) -> Count:
    """The counts of so many tiles, whose K is the first depth times 1 + `deeper`."""
    numbers: dict[str, Any] = {}
    for name, last in vars(deep).items():
        if isinstance(last, int):
            first = getattr(shallow, name) if shallow else 0
            numbers[name] = round(tiles * (first + deeper * (last - first)))
    return replace(deep, **numbers)
