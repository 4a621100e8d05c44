"""Registers that hold A are written again while wgmma reads them.

Source: DeepGEMM #449. Operands that are converted on the way, such as those that are promoted, may go to wgmma in
registers. It reads them when it is executed, not when it is issued: the next k-step's must lie in others, or wait.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run, word

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import BF16, E4M3, FP32
from gemmsmith.core.mma import select_mma
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value


@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("waits", [True, False])
def test_while_they_are_read(waits: bool, dtype) -> None:
    mma = select_mma(dtype, dtype, FP32)

    def record(k: Builder, out: Value) -> None:
        b = k.shared(Tile(dtype, 16, mma.k, "K"), name="b")
        hw.store_shared(word(k, k.thread.to(U32)), b[0].address + (k.thread * 4).to(U32))
        hw.fence_proxy_async()
        hw.sync_threads()
        (d,) = Accumulator(mma, 64, 16).fragments
        a = k.registers(U32, 4, "a")
        for i in range(4):
            a[i] = k.thread.to(U32)
        hw.wgmma_fence()
        hw.wgmma_mma_rs(d, a, hw.descriptor(b[0], 0), False, 16, mma)
        hw.wgmma_commit()
        if waits:
            hw.wgmma_wait(0)
            hw.fence_operand(a)
        a[3] = k.thread.to(U32)
        hw.wgmma_wait(0)
        hw.fence_operand(d)

    result = run(record)
    assert kinds(result) == (set() if waits else {"wgmma register hazard"})
    assert waits or "a accessed while wgmma m64n16k" in str(result.hazards[0])
