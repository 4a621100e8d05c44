"""CTAs that wait for one another: only those that are resident at once may."""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run

from gemmsmith import hw
from gemmsmith.core.chip import HOPPER
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Constant, Value

GRID = HOPPER.sm_count + 4
"""CTAs: four more than are resident, since the shared memory of an SM suffices for one."""


@pytest.mark.parametrize(
    ("waiting", "writing", "cluster", "starts"),
    [
        (0, GRID - 1, 1, False),
        (GRID - 2, GRID - 1, 1, False),
        (0, HOPPER.sm_count, 2, False),
        (GRID - 1, 0, 1, True),
        (0, HOPPER.sm_count - 1, 1, True),
        (GRID - 2, GRID - 1, 2, True),
    ],
)
def test_a_cta_waits_for_those_that_have_started(waiting: int, writing: int, cluster: int, starts: bool) -> None:
    """They start in order of index; those of a cluster start together."""

    def record(k: Builder, out: Value) -> None:
        k.shared(HOPPER.max_shared_bytes_per_cta // 2 + 1024)
        with k.when(k.thread == 0):
            with k.when(hw.block_index() == waiting):
                hw.spin_until_equal(out, Constant(U32, 1))
            with k.when(hw.block_index() == writing):
                hw.store_strong(out, Constant(U32, 1), "release", "gpu")

    done = run(record, threads=32, grid=GRID, cluster=cluster)
    assert kinds(done) == (set() if starts else {"deadlock"})
    if not starts:
        assert f"CTA {waiting} waits for CTA {writing}, which may not have started" in done.hazards[0].message
        assert f"{HOPPER.sm_count} of {GRID} CTAs are resident" in done.hazards[0].message


def test_a_grid_of_small_ctas_is_not_resident_either() -> None:
    def record(k: Builder, out: Value) -> None:
        with k.when(k.thread == 0):
            with k.when(hw.block_index() == 0):
                hw.spin_until_equal(out, Constant(U32, 1))
            with k.when(hw.block_index() == 299):
                hw.store_strong(out, Constant(U32, 1), "release", "gpu")

    assert kinds(run(record, threads=128, grid=300)) == {"deadlock"}
