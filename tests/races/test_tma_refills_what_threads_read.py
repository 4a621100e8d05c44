"""A stage that threads have read by ld.shared is refilled by TMA, and no proxy fence stands between.

Sources: DeepGEMM #389 and mlc-ai/TIRx-kernels #53, where a warp sums stages that TMA fills in turn; flash-attention
#2462, TransformerEngine #2695; triton #7262, which inserts such fences. That the threads have met orders their reads
before the copy's issue, not before its writes, which are another proxy's (PTX ISA, "Causality order").
Mended: each thread that reads fences, then all meet, then one issues the copy. A fence of the issuer alone, as in
DeepEP #642, is reported: it is for what that thread has read.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run
from tests.conformance.case import barriers, load_shared_word

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

BYTES, COPIES = 512, 5
CASES = [("readers", True, set()), ("", True, {"missing proxy fence"}), ("issuer", True, {"missing proxy fence"}),
         ("late", True, {"missing proxy fence"}), ("readers", False, {"race"})]  # fmt: skip
"""Who fences, whether all meet before the next copy, and what is found. "late" ones fence after they have met."""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize(("fences", "meet", "found"), CASES)
def test_two_stages_in_turn(fences: str, meet: bool, found: set[str], threads: int, seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        box, stages = k.tensor_map("map"), k.shared(BYTES, stages=2, alignment=128, name="stage")
        full = barriers(1, 1)

        def copy(number: int) -> None:
            with k.when(k.thread == 0):
                if fences == "issuer" and number > 1:
                    hw.fence_proxy_async()
                hw.mbarrier_arrive_expect_tx(full[number % 2], BYTES)
                hw.tma_load(box, 0, 0, 0, stages[number % 2], full[number % 2], 0)

        copy(0)
        for number in range(COPIES):
            if number + 1 < COPIES:
                copy(number + 1)
            hw.mbarrier_wait(full[number % 2], number // 2 % 2)
            for step in range(BYTES // 4 // threads):
                load_shared_word(stages[number % 2].address + ((k.thread + step * threads) * 4).to(U32))
            if fences == "readers":
                hw.fence_proxy_async()
            if meet:
                hw.sync_threads()
            if fences == "late":
                hw.fence_proxy_async()

    reported = kinds(run(record, threads=threads, seed=seed))
    assert reported >= found
    assert found or not reported
