"""A stage's data or its full barrier are written anew before all readers of the last ones are done.

Sources: mlc-ai/TIRx-kernels #53, where a producer does not wait for the empty barrier of its single stage before it
arrives at the full one again; TIRx-kernels #42, where a barrier's next phase overtakes warps that wait for the last;
NVlabs/cuda-oxide #1066, where a scheduler overwrites the coordinates of a tile; tilelang #2420, where consumers hand a
stage back and read it then. A reader gets the next data, or waits for a parity that has passed: it hangs.
Mended: the producer waits for the empty barrier first, and consumers arrive there after their last read.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run, word
from tests.conformance.case import barriers, load_shared_word

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

READERS, TURNS = 3, 4
CASES = [
    ("", set()),
    ("not acquired", {"race", "phase aliasing", "deadlock"}),
    ("written first", {"race"}),
    ("acquired by parity 0", {"deadlock"}),
    ("released first", {"race"}),
]
"""What is wrong, and what is found, one of these kinds at least."""


def release(k: Builder, barrier: SharedView) -> None:
    """One arrival of a warp that has met."""
    hw.sync_warp()
    with k.when(k.lane == 0):
        hw.mbarrier_arrive(barrier)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("wrong", "found"), CASES)
def test_a_single_stage(wrong: str, found: set[str], seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        slot = k.shared(128, name="coordinates")[0]
        full, empty = barriers(1, READERS)
        with k.warpgroup(0):
            with k.warp(0), k.when(k.lane == 0):
                for turn in range(TURNS):
                    if wrong == "written first":
                        hw.store_shared(word(k, k.thread.to(U32) + turn), slot.address)
                    if wrong != "not acquired":
                        hw.mbarrier_wait(empty, (turn + (wrong != "acquired by parity 0")) % 2)
                    if wrong != "written first":
                        hw.store_shared(word(k, k.thread.to(U32) + turn), slot.address)
                    hw.mbarrier_arrive(full)
            for warp in range(1, 1 + READERS):
                with k.warp(warp):
                    for turn in range(TURNS):
                        hw.mbarrier_wait(full, turn % 2)
                        if wrong == "released first":
                            release(k, empty)
                        load_shared_word(slot.address)
                        if wrong != "released first":
                            release(k, empty)

    reported = kinds(run(record, seed=seed))
    assert reported & found if found else not reported, reported
