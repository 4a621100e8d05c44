"""Tests marked `gpu` are skipped, and counted, where there is no Hopper GPU; hypothesis draws afresh every time."""

from __future__ import annotations

import gc
import os

# Before numpy is imported: beside as many workers as cores, a BLAS's own threads wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "gemmsmith",
    deadline=None,  # a first call compiles
    derandomize=False,
    max_examples=40,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("gemmsmith")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    from gemmsmith.backends.cuda import driver

    if not driver.available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not among the tests, and once for many objects: a simulated kernel
    makes thousands."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random data; the seed is shown when a test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)
