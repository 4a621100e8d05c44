"""mbarriers that are initialized wrongly."""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.values import Value


@pytest.mark.parametrize(
    ("counts", "offset", "message"),
    [
        ((1, 1), 0, "full is initialized twice"),
        ((0,), 0, "full is initialized for 0 arrivals"),
        ((1,), 4, "full: mbarrier address is not a multiple of 8"),
        ((1,), 0, None),
    ],
)
def test_an_mbarrier_is_initialized_once_for_some_arrivals(
    counts: tuple[int, ...], offset: int, message: str | None
) -> None:
    def record(k: Builder, out: Value) -> None:
        barrier = k.shared(16, alignment=8, name="full")
        with k.when(k.thread == 0):
            for count in counts:
                hw.mbarrier_init(barrier[0].at(offset), k.smem * 0 + count)

    done = run(record, threads=32)
    assert [h.message.partition(" [")[0] for h in done.hazards] == ([] if message is None else [message])
    assert kinds(done) == (set() if message is None else {"alignment"} if offset else {"barrier"})
