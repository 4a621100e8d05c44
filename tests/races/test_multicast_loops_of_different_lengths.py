"""Two CTAs that multicast to one another go through different numbers of k-tiles.

Sources: DeepGEMM pull requests 415 and 429. Where groups have odd numbers of tiles, a cluster may lie across two groups
along K, whose slices are not of one length. Each CTA brings half of B for both, and a stage is free when both have read
it: who has more k-tiles waits for bytes, or for a release, that its peer never sends.
Mended: the CTAs of a cluster belong to one group.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run
from tests.conformance.case import barriers, load_shared_word, sync_cluster

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Constant, Value

HALF, STAGES = 512, 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("k_tiles", [(6, 6), (6, 4), (4, 5)])
def test_a_pair_of_ctas(k_tiles: tuple[int, int], seed: int) -> None:
    """One warp loads, another one reads."""

    def record(k: Builder, out: Value) -> None:
        box, rank = k.tensor_map("map"), hw.cluster_rank()
        b = k.shared(2 * HALF, stages=STAGES, alignment=128, name="b")
        full, empty = barriers(*[1] * STAGES), barriers(*[2] * STAGES)
        own_k_tiles = k_tiles[0] + rank * (k_tiles[1] - k_tiles[0])
        for k_tile in range(max(k_tiles)):
            stage, phase = k_tile % STAGES, k_tile // STAGES % 2
            with k.when((k.thread == 0) & (own_k_tiles > k_tile)):
                hw.mbarrier_wait(empty[stage], 1 - phase, "cluster")
                hw.mbarrier_arrive_expect_tx(full[stage], 2 * HALF)
                hw.tma_load_multicast(box, 0, 0, 0, b[stage].address + rank.to(U32) * HALF, full[stage], 3, 0)
            with k.when((k.warp_index == 1) & (own_k_tiles > k_tile)):
                hw.mbarrier_wait(full[stage], phase)
                load_shared_word(b[stage].address + (k.lane * 4).to(U32))
                hw.fence_proxy_async()
                hw.sync_warp()
                with k.when(k.lane == 0):
                    for peer in range(2):
                        hw.mbarrier_arrive_remote(empty[stage], Constant(U32, peer), "cluster")
        sync_cluster()

    reported = kinds(run(record, threads=64, grid=2, cluster=2, seed=seed))
    assert "deadlock" in reported if k_tiles[0] != k_tiles[1] else not reported, reported
