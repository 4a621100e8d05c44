"""The cluster's barrier and named barriers that are used out of order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.backends.sim.tiny import run
from tests.instructions import cluster_arrive

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.values import Value


def good() -> None:
    for _ in range(3):
        cluster_arrive()
        hw.cluster_wait()


def twice() -> None:
    cluster_arrive()
    good()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (good, None),
        (twice, "barrier.cluster.arrive twice"),
        (hw.cluster_wait, "barrier.cluster.wait without an arrive"),
    ],
)
def test_arrivals_and_waits_alternate(steps: Callable[[], object], message: str | None) -> None:
    done = run(lambda k, out: steps(), threads=64, grid=2, cluster=2)
    if message is None:
        assert done.hazards == []
    else:
        assert done.hazards[0].kind == "barrier"
        assert message in done.hazards[0].message


@pytest.mark.parametrize("other", [64, 96])
def test_a_named_barrier_has_one_number_of_threads(other: int) -> None:
    def record(k: Builder, out: Value) -> None:
        with k.when(k.warp_index == 0):
            hw.barrier_sync(1, 64)
        with k.when(k.warp_index == 1):
            hw.barrier_sync(1, other)

    done = run(record, threads=96)
    if other == 64:
        assert done.hazards == []
    else:
        assert any("used by other threads" in str(h) for h in done.hazards)
