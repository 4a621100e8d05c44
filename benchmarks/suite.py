"""The problems that speed is claimed for, by class."""

from __future__ import annotations

import random

Shape = tuple[int, int, int]

FLAGSHIPS: list[Shape] = [(4096, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 14336), (4096, 28672, 4096)]
CUBES: list[Shape] = [(n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384)]
ROWS = (1, 16, 64, 128, 256, 512, 2048, 4096, 8192)
"""M: tokens."""
WEIGHTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 8192), (57344, 8192),
           (8192, 28672), (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (7168, 2048)]  # fmt: skip
"""(N, K) of layers of Llama 3 8B and 70B, and of DeepSeek V3."""
LAYERS: list[Shape] = [(m, n, k) for m in ROWS for n, k in WEIGHTS]
RAGGED: list[Shape] = [
    (dice.randint(1, 10000), dice.randint(1, 10000), dice.randint(1, 10000))
    for dice in [random.Random(2026)]
    for _ in range(40)
]


def classes(shape: Shape) -> list[str]:
    """The classes a shape of the suite belongs to."""
    m, n, k = shape
    if shape in RAGGED:
        return ["ragged"]
    found = ["cubes" if shape in CUBES else "layers", "all"]
    if m <= 64:
        found.append("memory-bound, M <= 64")
    if 128 <= m <= 512:
        found.append("middle, M 128 to 512")
    if 2 * m * n * k >= 1e11:
        found.append("large, 2MNK >= 1e11")
    return found


SUITE: list[Shape] = list(dict.fromkeys([*CUBES, *LAYERS]))
