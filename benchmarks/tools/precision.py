"""Plot of the accumulation error of FP8 GEMMs over K: promoted, fast, and of the same numbers in bf16.

Sums are computed bit for bit as an H200 computes them (hw/mma.py), so this needs no GPU. The error is the
Frobenius norm of the differences over that of the exact result.

python -m benchmarks.tools.precision --picture docs/pictures/precision.png
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from gemmsmith.core import pictures
from gemmsmith.core.dtypes import BF16, E4M3, FP32
from gemmsmith.core.mma import Mma, select_mma
from gemmsmith.hw.mma import fused_sum

ROWS, COLUMNS, BLOCK = 16, 16, 128
DEPTHS = [BLOCK << i for i in range(10)]
"""K from 128 to 65536."""
FP8_MMA, BF16_MMA = select_mma(E4M3, E4M3, FP32), select_mma(BF16, BF16, FP32)
COLORS = {"fast": pictures.PALETTE[3], "promoted": pictures.PALETTE[0], "bf16": pictures.GRAY}
Array = np.ndarray
Random = np.random.Generator


def normal(rng: Random, shape: tuple[int, int]) -> Array:
    return rng.standard_normal(shape)


def positive(rng: Random, shape: tuple[int, int]) -> Array:
    return rng.random(shape)


def outliers(rng: Random, shape: tuple[int, int]) -> Array:
    """Multiply one in a thousand elements by a thousand, within e4m3's range."""
    return np.clip(0.1 * rng.standard_normal(shape) * np.where(rng.random(shape) < 1e-3, 1000, 1), -448, 448)


KINDS: dict[str, tuple[Callable[[Random, tuple[int, int]], Array], int]] = {
    "normal": (normal, 0),
    "uniform in 0 to 1": (positive, 0),
    "normal, one in 1000 times 1000": (outliers, 0),
    "normal, block scales from $2^{-20}$ to $2^{20}$": (normal, 20),
}
"""Data, and the range of exponents of its block scales, which are powers of two, so that bf16 represents them too."""


class Operands:
    """A (rows, k) and B (columns, k) of e4m3 in float64, with one scale per row and 128 of k."""

    def __init__(self, kind: str, k: int = DEPTHS[-1], seed: int = 0) -> None:
        rng, (make, self.spread) = np.random.default_rng(seed), KINDS[kind]
        sizes = ROWS, COLUMNS
        self.a, self.b = (make(rng, (n, k)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) for n in sizes)
        exponents = (rng.integers(-self.spread, self.spread + 1, (n, k // BLOCK)) for n in sizes)
        self.scale_a, self.scale_b = (2.0**x for x in exponents)

    @property
    def scaled(self) -> tuple[Array, Array]:
        return tuple(x * np.repeat(s, BLOCK, 1) for x, s in ((self.a, self.scale_a), (self.b, self.scale_b)))


def exact(x: Operands) -> Array:
    """Return the sums of the first blocks of k, (blocks, rows, columns), in float64."""
    a, b = (in_blocks(y) for y in x.scaled)
    return np.cumsum(a @ b.swapaxes(1, 2), axis=0)


def promoted(x: Operands) -> Array:
    """Return the sums of the first blocks of k: each block is summed by the tensor core, scaled, and added in fp32."""
    a, b = in_blocks(x.a), in_blocks(x.b)
    partial = np.zeros((len(a), ROWS, COLUMNS))
    for first in range(0, BLOCK, FP8_MMA.k):
        partial = added(a[..., first : first + FP8_MMA.k], b[..., first : first + FP8_MMA.k], partial, FP8_MMA)
    factors = x.scale_a.T[:, :, None] * x.scale_b.T[:, None, :]
    total, sums = np.zeros((ROWS, COLUMNS)), []
    for block in partial * factors:
        total = (total + block).astype(np.float32).astype(np.float64)
        sums.append(total)
    return np.array(sums)


def running(a: Array, b: Array, mma: Mma) -> Array:
    """Return the sums of the first blocks of k: all of k is summed by the tensor core."""
    total, sums = np.zeros((ROWS, COLUMNS)), []
    for first in range(0, a.shape[1], mma.k):
        total = added(a[:, first : first + mma.k], b[:, first : first + mma.k], total, mma)
        sums.append(total)
    return np.array(sums[BLOCK // mma.k - 1 :: BLOCK // mma.k])


def added(a: Array, b: Array, c: Array, mma: Mma) -> Array:
    """Return C + A B^T of one instruction, of (…, rows, k), (…, columns, k) and (…, rows, columns)."""
    k_first = (np.moveaxis(x, -1, 0) for x in (a[..., :, None, :], b[..., None, :, :]))
    return fused_sum(*k_first, c, mma).astype(np.float64)


def in_blocks(x: Array) -> Array:
    """Return (rows, k) as (blocks, rows, 128)."""
    return x.reshape(len(x), -1, BLOCK).swapaxes(0, 1)


def errors(x: Operands) -> dict[str, Array]:
    """Return the errors by DEPTHS. Sums of fp8 that are not promoted have no block scales."""
    sums = {"promoted": promoted(x), "bf16": running(*x.scaled, BF16_MMA)}
    if not x.spread:
        sums["fast"] = running(x.a, x.b, FP8_MMA)
    want, at = exact(x), [depth // BLOCK - 1 for depth in DEPTHS]
    return {name: norms((y - want)[at]) / norms(want[at]) for name, y in sums.items()}


def norms(x: Array) -> Array:
    return np.linalg.norm(x, axis=(1, 2))


def draw(path: Path) -> None:
    title = "relative error of sums of e4m3, fast and promoted, and of the same values in bf16: wgmma as simulated"
    with pictures.drawing(path, 9, 6.5, title) as figure:
        grid = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes, kind in zip(grid.flat, KINDS, strict=True):
            for name, error in sorted(errors(Operands(kind)).items()):
                error[error == 0] = np.nan  # which a logarithm cannot show
                axes.plot(DEPTHS, error, marker="o", markersize=3, color=COLORS[name])
            axes.set_title(kind, loc="left", fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        for axes in grid[1]:
            axes.set_xlabel("K")
        for axes in grid[:, 0]:
            axes.set_ylabel("relative error")
        pictures.legend(figure, COLORS)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, required=True)
    draw(parser.parse_args().picture)


if __name__ == "__main__":
    main()
