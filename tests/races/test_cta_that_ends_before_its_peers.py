"""A CTA ends while a peer of its cluster still arrives at its barriers, or copies into its shared memory.

Source: of CUTLASS #2404's kind. A CTA's shared memory is there only while it runs: an arrival or a multicast that comes
later hits memory that nobody has, or another CTA's. It shows as a hang or an illegal access, and only now and then.
Mended: a pipeline's tail waits for what peers have yet to do to this CTA, or the cluster meets at the end.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run
from tests.conformance.case import sync_cluster

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

SEEDS = range(6)
TAILS = ["wait", "meet", "none"]


def barrier(k: Builder, name: str) -> Value:
    """One for a single arrival, which the cluster knows of."""
    made = k.shared(8, alignment=8, name=name)
    with k.when(k.thread == 0):
        hw.mbarrier_init(made[0], 1)
        hw.fence_mbarrier_init()
    sync_cluster()
    return made[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tail", TAILS)
def test_a_peer_still_releases_a_stage(tail: str, seed: int) -> None:
    """The producer has no more to load, so it does not need the stage that a peer's consumer hands back."""

    def record(k: Builder, out: Value) -> None:
        empty = barrier(k, "empty")
        with k.when(k.thread == 32):
            hw.mbarrier_arrive_remote(empty, (hw.cluster_rank() ^ 1).to(U32), "cta")
        if tail == "wait":
            hw.mbarrier_wait(empty, 0)
        elif tail == "meet":
            sync_cluster()

    result = run(record, threads=64, grid=2, cluster=2, seed=seed)
    assert kinds(result) == ({"access to exited CTA"} if tail == "none" else set())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tail", ["wait", "none"])
def test_a_peer_still_multicasts(tail: str, seed: int) -> None:
    """One CTA brings a tile to both; the other has no use for it, and leaves."""

    def record(k: Builder, out: Value) -> None:
        box = k.tensor_map("map")
        tile = k.shared(512, alignment=128, name="tile")
        full = barrier(k, "full")
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(full, 512)
        with k.when((k.thread == 0) & (hw.cluster_rank() == 0)):
            hw.tma_load_multicast(box, 0, 0, 0, tile[0], full, 3, 0)
        with k.when((hw.cluster_rank() == 0) | (tail == "wait")):
            hw.mbarrier_wait(full, 0)

    result = run(record, threads=64, grid=2, cluster=2, seed=seed)
    found = kinds(result)
    assert ("access to exited CTA" in found) == (tail == "none")
    assert tail == "none" or not found
