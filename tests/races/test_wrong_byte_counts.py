"""An mbarrier is told to expect another number of bytes than its copies bring.

Source: triton #9046. With too many bytes a phase never completes, and who waits hangs. With too few it completes once
the first copies have landed: the others' data is read before it is there, and their bytes count for the next phase.
Mended: the expectation is computed from the copies.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

BYTES = 512
"""Of one copy."""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("expected", "found"),
    [(2 * BYTES, set()), (3 * BYTES, {"deadlock"}), (2 * BYTES + 16, {"deadlock"}), (BYTES, {"race", "barrier"})],
)
def test_two_copies_on_one_barrier(expected: int, found: set[str], seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        box = k.tensor_map("map")
        tiles = [k.shared(BYTES, alignment=128, name=name) for name in "AB"]
        full = k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(full[0], 1)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(full[0], expected)
            for tile in tiles:
                hw.tma_load(box, 0, 0, 0, tile[0], full[0], 0)
        hw.mbarrier_wait(full[0], 0)
        for tile in tiles:
            hw.load_shared(k.registers(U32, 1, "got"), tile[0].address + (k.thread * 4).to(U32))

    result = run(record, seed=seed)
    assert kinds(result) >= found
    assert found or not result.hazards
    if "deadlock" in found:
        assert f"{expected - 2 * BYTES} bytes are missing" in str(result.hazards[0])
