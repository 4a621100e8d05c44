"""A flag tells another CTA of partial sums that other threads of its own CTA have written.

Sources: NVIDIA/Fuser #2391, where the CTAs of a split-K sum take turns, and thread 0 raises a flag after a barrier;
pytorch/pytorch #128455, the same with a counter. Both add __threadfence() in all threads, before the barrier.
With a release, which Fuser's flag is, no fence is needed: what happens before the barrier happens before the release,
too (PTX ISA, "Causality order"). With a relaxed write only a fence of the thread that writes, after the barrier, makes
a release pattern (PTX ISA, "Release and Acquire Patterns"). The threads' own fences precede no write of theirs to the
flag, so they order nothing: that mend is reported, as the fault is.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.sim.tiny import kinds, run, word

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Value

THREADS, CTAS, FLAG = 64, 3, 2048
CASES = [("release", "", True), ("release", "all", True), ("relaxed", "", False), ("relaxed", "all", False),
         ("relaxed", "last", True)]  # fmt: skip
"""How the flag is raised, whether all threads fence before the barrier or the last one does after it, and whether that
is right."""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("order", "fence", "right"), CASES)
def test_of_ctas_that_take_turns(order: str, fence: str, right: bool, seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        turn, own = hw.block_index(), out + (k.thread * 4).to(U64)
        with k.when((k.thread == 0) & (turn > 0)):
            hw.spin_until_equal(out + FLAG, turn.to(U32))
        hw.sync_threads()
        total = word(k, k.thread.to(U32))
        with k.when(turn > 0):
            hw.load_global(total, own, True)
        hw.store_global(word(k, total[0] + 1), own, True)
        if fence == "all":
            hw.fence_acq_rel()
        hw.sync_threads()
        with k.when(k.thread == 0):
            if fence == "last":
                hw.fence_acq_rel()
            hw.store_strong(out + FLAG, (turn + 1).to(U32), order, "gpu")

    memory = np.zeros(1024, np.uint32)
    done = run(record, threads=THREADS, grid=CTAS, seed=seed, out=memory.view(np.uint8))
    assert kinds(done) == (set() if right else {"race"})
    assert not right or np.array_equal(memory[:THREADS], np.arange(THREADS) + CTAS)
