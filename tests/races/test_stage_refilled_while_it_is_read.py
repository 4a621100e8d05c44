"""A cp.async pipeline refills the stage that other warps still read.

Source: CUTLASS, MmaMultistage, and every multistage loop like it: one barrier a k-tile tells both that all have copied
and that all have read. A loop that waits for its copies, meets, multiplies and then copies into the stage just read has
no barrier between the reads and the copies. Mended: the stage that was read before the last barrier is filled.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Value

STAGES, K_TILES, THREADS = 3, 5, 64


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("ahead", "pending"), [(2, 1), (3, 1), (2, 2)])
def test_a_multistage_loop(ahead: int, pending: int, seed: int) -> None:
    """`ahead`: k-tiles that are copied beside the one that is read; `pending`: groups that a wait leaves open."""

    def record(k: Builder, out: Value) -> None:
        stages = k.shared(16 * THREADS, stages=STAGES, name="stage")
        own = (k.thread * 16).to(U32)
        other = ((k.thread ^ 32) * 16).to(U32)  # what another warp has copied

        def copy(k_tile: int) -> None:
            source = out + (own + 16 * THREADS * (k_tile % 4)).to(U64)
            hw.cp_async_copy(stages[k_tile % STAGES].address + own, source, 16, 16)
            hw.cp_async_commit()

        for k_tile in range(2):
            copy(k_tile)
        for k_tile in range(K_TILES):
            hw.cp_async_wait(pending)
            hw.sync_threads()
            hw.load_shared(k.registers(U32, 4, "got"), stages[k_tile % STAGES].address + other)
            copy(k_tile + ahead)
        hw.cp_async_wait(0)

    right = (ahead, pending) == (2, 1)
    assert kinds(run(record, THREADS, seed=seed)) - {"uninitialized read"} == (set() if right else {"race"})
