"""mbarriers: the PTX of each form and scope, and how long a phase lasts."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.sim.tiny import run
from tests.conformance.case import at, words
from tests.hw.one import Forms, ptx

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

MAPA = "mapa.shared::cluster.u32 remote, %0, %1;"
TRY = "mbarrier.try_wait.parity{}.shared::cta.b64 complete, [%{}], %{};"
TEST = TRY.replace("try_wait", "test_wait")
LOOP = "{{ .reg .pred complete; WAIT: {} @complete bra DONE; bra WAIT; DONE: }}"
FORMS: Forms = {
    "mbarrier.init.shared::cta.b64 [%0], %1;": lambda k: hw.mbarrier_init(k.smem, 3),
    "fence.mbarrier_init.release.cluster;": lambda k: hw.fence_mbarrier_init(),
    "mbarrier.arrive.shared::cta.b64 _, [%0];": lambda k: hw.mbarrier_arrive(k.smem),
    f"{{ .reg .b32 remote; {MAPA} mbarrier.arrive.shared::cluster.b64 _, [remote]; }}":
        lambda k: hw.mbarrier_arrive_remote(k.smem, 1, "cta"),
    f"{{ .reg .b32 remote; {MAPA} mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }}":
        lambda k: hw.mbarrier_arrive_remote(k.smem, 1, "cluster"),
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": lambda k: hw.mbarrier_arrive_expect_tx(k.smem, 64),
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;": lambda k: hw.mbarrier_expect_tx(k.smem, 64),
    f"{{ .reg .pred complete; {TEST.format('', 1, 2)} selp.b32 %0, 1, 0, complete; }}":
        lambda k: hw.mbarrier_test_wait(k.smem, 0),
    f"{{ .reg .pred complete; {TEST.format('.acquire.cluster', 1, 2)} selp.b32 %0, 1, 0, complete; }}":
        lambda k: hw.mbarrier_test_wait(k.smem, 0, "cluster"),
    LOOP.format(TRY.format("", 0, 1)): lambda k: hw.mbarrier_wait(k.smem, 1),
    LOOP.format(TRY.format(".acquire.cluster", 0, 1)): lambda k: hw.mbarrier_wait(k.smem, 1, "cluster"),
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


@pytest.mark.parametrize("needed", [1, 5, 32])
def test_a_phase_ends_with_its_last_arrival(needed: int) -> None:
    """Of one lane, again and again; the phase is tested before each of its arrivals, and waited for after the last."""
    phases = 32 // needed

    def record(k: Builder, out: Value) -> None:
        barrier = k.shared(8, alignment=8)[0]
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier, needed)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.range(phases, name="phase") as phase:
            parity = (phase % 2).to(U32)
            for i in range(needed):
                done = hw.mbarrier_test_wait(barrier, parity)
                hw.store_global(words(done.to(U32)), at(out, phase * needed + i, 4), k.lane == 0)
                hw.sync_warp()  # all lanes have looked
                with k.when(k.lane == 0):
                    hw.mbarrier_arrive(barrier)
            hw.mbarrier_wait(barrier, parity)

    found = np.full(1024, 9, np.uint32)
    assert run(record, threads=32, out=found).hazards == []
    assert found[: phases * needed].tolist() == [0] * (phases * needed)
    assert set(found[phases * needed :]) == {9}
