"""Tests marked `gpu` are skipped, and counted, where there is no Hopper GPU; those marked `torch` need torch.

hypothesis draws afresh every time. The cache is an empty folder of the run's own.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers inherit the variable, so they share what is compiled
        folder = tempfile.mkdtemp(prefix="gemmsmith-tests-")
        os.environ["GEMMSMITH_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


NEED_TORCH = {Path(__file__).parent / name for name in ("torch", "gpu", "type_checkers")}


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not NEED_TORCH.isdisjoint(item.path.parents):
            item.add_marker(pytest.mark.torch)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    from gemmsmith.backends.cuda import driver

    if not driver.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that was skipped for lack of torch has to be among those that `-m torch` chooses."""
    report = yield
    if report.skipped and "import 'torch'" in str(report.longrepr) and not item.get_closest_marker("torch"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} needs torch: mark it pytest.mark.torch"
    return report


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not among the tests, and once for many objects: a simulated kernel
    makes thousands."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.fixture(autouse=True)
def highest_precision_of_fp32() -> Iterator[None]:
    """torch multiplies fp32 as by default, whatever the test before has set."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_float32_matmul_precision("highest")


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random data; the seed is shown when a test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)
