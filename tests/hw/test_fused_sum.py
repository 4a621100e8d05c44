"""The simulator's tensor cores give the bits that an H200 computed (docs/notebook/tensor-cores.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.rows import RESULTS, read_arrays
from gemmsmith.core.dtypes import INT32, TF32, TF32_BITS, DType
from gemmsmith.core.mma import MMA_SYNC, WGMMA, Mma
from gemmsmith.hw.mma import fused_mma, fused_sum

TABLES = {"wgmma": WGMMA.instructions, "mma": MMA_SYNC.instructions, "wmma": MMA_SYNC.instructions}
MEASURED = [
    pytest.param(path, mma, id=f"{name}-{mma}")
    for name, table in TABLES.items()
    if (path := RESULTS / f"{name}-h200.npz.xz").exists()
    for mma in table
    if mma.d != INT32
]
each_instruction = pytest.mark.parametrize(("measured", "mma"), MEASURED, indirect=["measured"])


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Mapping[str, np.ndarray]:
    return read_arrays(request.param)


def of(measured: Mapping[str, np.ndarray], mma: Mma, name: str) -> np.ndarray:
    return measured[f"{mma.d.ptx}_{mma.a.ptx}_{mma.b.ptx}_{name}"]


def numbers(bits: np.ndarray, dtype: DType) -> np.ndarray:
    return (bits & TF32_BITS if dtype == TF32 else bits).view(dtype.numpy).astype(float)


def computed(measured: Mapping[str, np.ndarray], mma: Mma, model: Mma) -> np.ndarray:
    """The bits of D of the chosen vectors."""
    a, b, c = (
        numbers(of(measured, mma, name), dtype) for name, dtype in zip("abc", (mma.a, mma.b, mma.d), strict=True)
    )
    return fused_sum(a.T, b.T, c, model).view(f"u{mma.d.bytes}")


@each_instruction
def test_chosen_vectors(measured: Mapping[str, np.ndarray], mma: Mma) -> None:
    got, want = computed(measured, mma, mma), of(measured, mma, "d")
    names = str(of(measured, mma, "name")).split("\n")
    assert len(want) > 1800
    assert not [f"{names[i]}: got {got[i]:#x}, measured {want[i]:#x}" for i in np.nonzero(got != want)[0]]


@each_instruction
def test_random_tiles(measured: Mapping[str, np.ndarray], mma: Mma) -> None:
    a, b, c = (
        numbers(of(measured, mma, f"random_{name}"), dtype)
        for name, dtype in zip("abc", (mma.a, mma.b, mma.d), strict=True)
    )
    got = np.stack([fused_mma(*tile, mma) for tile in zip(a, b, c, strict=True)])
    assert got.size >= 6 * 64 * 8
    np.testing.assert_array_equal(got.view(f"u{mma.d.bytes}"), of(measured, mma, "random_d"))


@each_instruction
@pytest.mark.parametrize("bits", [-1, 1])
def test_they_tell_a_bit_more_or_less(measured: Mapping[str, np.ndarray], mma: Mma, bits: int) -> None:
    other = computed(measured, mma, replace(mma, aligned_fraction_bits=mma.aligned_fraction_bits + bits))
    assert np.count_nonzero(other != of(measured, mma, "d")) > 10


@pytest.mark.parametrize("mma", [mma for mma in WGMMA.instructions if not mma.d.is_integer], ids=str)
@pytest.mark.parametrize("largest", [1, 3, 8, 100])
def test_sums_of_small_integers_need_no_steps(mma: Mma, largest: int, rng: np.random.Generator) -> None:
    """Negative zeros among them; where some are not small, they go the long way."""
    a, b = (rng.integers(-largest, largest + 1, (rows, mma.k)).astype(np.float64) for rows in (64, 40))
    c = rng.integers(-largest, largest + 1, (64, 40)).astype(np.float64)
    a[a == 0] = -0.0
    c[:, 0], b[0] = -0.0, -0.0
    long = fused_sum(a.T[:, :, None], b.T[:, None, :], c, mma)
    bits = f"u{mma.d.bytes}"
    np.testing.assert_array_equal(fused_mma(a, b, c, mma).view(bits), long.view(bits))
