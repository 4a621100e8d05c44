"""A tile of results is refilled while the TMA store of the last ones still reads it.

Sources: TileOPs #1550; cudnn-frontend #1049; TransformerEngine #3417, where the threads that refill a buffer had not
waited for the leader's store: groups of bulk copies belong to the thread that committed them, so nobody else's
wait_group waits for them, and a wait of the leader tells the others nothing until they meet.
Mended: the leader waits, then all meet, then they write.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run, word
from tests.instructions import bulk_wait

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

CASES = [("leader", True, True), ("leader", False, False), ("others", True, False), ("nobody", True, False)]
"""Who waits before the tile is refilled, whether all meet after that, and whether that is right."""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("waits", "meets", "right"), CASES)
def test_by_the_next_results(waits: str, meets: bool, right: bool, seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        box, tile = k.tensor_map("map"), k.shared(512, alignment=128, name="C")
        hw.grid_dependency_wait()
        for turn in range(3):
            if turn and waits != "nobody":
                with k.when(k.thread == 0 if waits == "leader" else k.thread != 0):
                    bulk_wait(0)  # the next store is to the same place
            if meets:
                hw.sync_threads()
            hw.store_shared(word(k, (k.thread + turn).to(U32)), tile[0].address + (k.thread * 4).to(U32))
            hw.fence_proxy_async()
            hw.sync_threads()
            with k.when(k.thread == 0):
                hw.tma_store(box, 0, 0, 0, tile[0])
                hw.bulk_commit()
        with k.when(k.thread == 0):
            hw.bulk_wait_read(0)

    done = run(record, seed=seed)
    assert kinds(done) == (set() if right else {"race"})
    assert right or any("write after read of C" in h.message for h in done.hazards)
