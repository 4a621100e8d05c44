"""Promoted products with scales on a GPU: the digits of exact sums tell which scales were used, float64 how exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.scales import E4M3, E5M2, FP32, RECIPES, UE8M0, digits, ones, operands, scales, within

import gemmsmith
from gemmsmith import Config
from gemmsmith.backends.reference import bounds
from gemmsmith.core.dtypes import FP32 as SINGLE

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

TILE = Config(tile=(64, 64, 128), cluster=(1, 1), consumers=1, stages=4)
CONFIGS = [
    None,
    TILE,
    TILE.replace(tile=(128, 128, 128), consumers=2, stages=5),
    TILE.replace(tile=(128, 128, 128), consumers=2, stages=5, cluster=(2, 1), serpentine=True, sync_clusters=True),
    TILE.replace(tile=(256, 128, 128), consumers=2, stages=3, cluster=(1, 2)),
    TILE.replace(tile=(256, 144, 128), consumers=2, stages=3),
    TILE.replace(tile=(128, 192, 128), consumers=2, stages=3, cluster=(2, 1)),
    TILE.replace(tile=(128, 208, 128), consumers=2, stages=3),
    TILE.replace(tile=(128, 256, 128), consumers=2, stages=3, cluster=(2, 2)),
    TILE.replace(tile=(192, 128, 128), consumers=3, stages=4),
    TILE.replace(tile=(192, 160, 128), consumers=3, stages=3),
    TILE.replace(tile=(64, 256, 128), stages=3),
    TILE.replace(design="pingpong", tile=(128, 128, 128), consumers=2, stages=5, cluster=(2, 1)),
    TILE.replace(design="pingpong", tile=(64, 128, 128), consumers=2, stages=6, cluster=(1, 2), serpentine=True),
    TILE.replace(tile=(128, 16, 128), consumers=2, swap_ab=True, stages=8),
    TILE.replace(tile=(64, 24, 128), swap_ab=True, splits=4),
    TILE.replace(tile=(64, 64, 128), swap_ab=True, cluster_splits=4),
    TILE.replace(tile=(128, 112, 128), consumers=2, splits=0, serpentine=True),
    TILE.replace(tile=(64, 64, 128), alias_epilogue=True),
]
TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, FP32: torch.float32, UE8M0: torch.uint8}
Array = np.ndarray


def on_gpu(x: Array | None) -> torch.Tensor | None:
    """The same array on the GPU, in as much memory around it."""
    if x is None:
        return None
    root = x
    while root.base is not None:
        root = root.base
    raw = torch.from_numpy(root.reshape(-1).view(np.float32 if x.dtype == FP32 else np.uint8)).cuda()
    size = x.itemsize
    first = (x.__array_interface__["data"][0] - root.__array_interface__["data"][0]) // size
    return raw.view(TORCH[x.dtype]).as_strided(x.shape, [s // size for s in x.strides], first)


def computed(a: Array, b: Array, scale_a: Array | None, scale_b: Array | None, **options) -> Array:
    """The product by the GPU, twice the same, whose result is poisoned first."""
    on_device = [on_gpu(x) for x in (a, b, scale_a, scale_b)]
    outs = []
    for _ in range(2):
        out = torch.full((a.shape[-2], b.shape[-1]), torch.nan, device="cuda")
        gemmsmith.gemm(*on_device[:2], scale_a=on_device[2], scale_b=on_device[3], out=out, **options)
        outs.append(out.cpu().numpy())
    np.testing.assert_array_equal(*outs)
    return outs[0]


def fitted(config: Config | None, recipe: tuple[int, int]) -> Config | None:
    """With a tile that has registers for the scales of each column."""
    if config and recipe[config.swap_ab - 1] == 1 and config.tile[1] > 96:
        return config.replace(tile=(config.tile[0], config.tile[1] // 2, 128))
    return config


@pytest.mark.parametrize("recipe", [*RECIPES, (0, 0)], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_scale_is_applied_where_it_belongs(config: Config | None, recipe: tuple[int, int]) -> None:
    """Ones, scaled by powers of two: each sum is exact, and another scale in it would show."""
    rng = random.Random(repr((config, recipe)))
    for most in (300, 3000):
        m, n, k = rng.randint(2, most), rng.randint(2, most), rng.randint(1, 128 * 12)  # n = 1 turns the product
        dtype, turned, pad = rng.choice([FP32, FP32, UE8M0]), rng.random() < 0.5, rng.choice([1, 2, 3, 4, 16, 16])
        (scale_a, scale_b), want = digits(m, n, k, recipe, dtype=dtype, turned=turned, pad=pad)
        out = computed(*ones(m, n, k), scale_a, scale_b, config=fitted(config, recipe))
        np.testing.assert_array_equal(out, want, str((m, n, k, dtype, turned, pad)))


@pytest.mark.parametrize("spread", [2, 20])
@pytest.mark.parametrize("recipe", [*RECIPES, (0, 0)], ids=str)
def test_each_element_is_within_its_bound(recipe: tuple[int, int], spread: int) -> None:
    rng = random.Random(repr((recipe, spread)))
    data = np.random.default_rng(rng.randint(0, 1 << 30))
    for config in CONFIGS:
        m, n, k = rng.randint(1, 500), rng.randint(1, 500), rng.choice([1, 127, 129, 500, 2000, 5000])
        dtypes = rng.choice([(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
        a, b = operands(data, m, n, k, dtypes, outliers=rng.random() < 0.5)
        turned, pad = rng.random() < 0.5, rng.choice([1, 2, 3, 4, 16, 16])
        scale_a, scale_b = scales(data, m, n, k, recipe, spread=spread, turned=turned, pad=pad)
        out = computed(a, b, scale_a, scale_b, config=fitted(config, recipe))
        bounds.check(out, a, b, SINGLE, SINGLE, promoted=True, scale_a=scale_a, scale_b=scale_b).require()


@pytest.mark.parametrize("outliers", [False, True])
def test_deep_products(outliers: bool) -> None:
    data = np.random.default_rng(0)
    a, b = operands(data, 130, 140, 65536, outliers=outliers)
    for recipe, spread in (((1, 128), 4), ((1, 128), 20), ((0, 0), 0)):
        scale_a, scale_b = scales(data, 130, 140, 65536, recipe, spread=spread)
        out = computed(a, b, scale_a, scale_b, config=TILE)
        bounds.check(out, a, b, SINGLE, SINGLE, promoted=True, scale_a=scale_a, scale_b=scale_b).require()


@pytest.mark.parametrize("dtype", [FP32, UE8M0])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 144), (70, 1), (300, 500)])
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_scales_of_rows_and_columns(accumulate: str, m: int, n: int, dtype: np.dtype) -> None:
    data = np.random.default_rng(m + n)
    scale_a, scale_b = (within((2.0 ** data.integers(-4, 5, x)).astype(dtype)) for x in ((m, 1), (1, n)))
    out = computed(*ones(m, n, 384), scale_a, scale_b, accumulate=accumulate)
    np.testing.assert_array_equal(out, 384 * scale_a.astype(np.float64) * scale_b.astype(np.float64))
