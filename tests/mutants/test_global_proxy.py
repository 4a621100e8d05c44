"""Threads write global memory, which TMA reads: every mutant of two small kernels. No kernel of the library does so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.backends.sim.tiny import execute, kernel, kinds, word
from tests.mutants.mutate import mutants_of

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Constant, Value

COPY, FLAG, BYTES = 2048, 1024, 512
"""Bytes from `out` on: where what TMA reads at `out` is stored, and a flag; and the bytes of a box."""
EQUIVALENT = {
    ("move later (past sync_threads)", "fence_proxy_async"): "the thread that copies fences for all that it knows of",
    ("move earlier (past fence_proxy_async)", "sync_threads"): "the same",
    ("move earlier (past if)", "sync_threads"): "the others wait for the copy, which comes after the flag",
}


def barrier(k: Builder) -> SharedView:
    """Initialized by thread 0, with which the others have yet to meet."""
    full = k.shared(8, alignment=8, name="full")[0]
    with k.when(k.thread == 0):
        hw.mbarrier_init(full, 1)
        hw.fence_mbarrier_init()
    return full


def copy(k: Builder, out: Value, full: SharedView) -> None:
    """TMA brings what is at `out`, which the threads copy to `out` + COPY."""
    box, tile = k.tensor_map("map"), k.shared(BYTES, alignment=128, name="tile")[0]
    with k.when(k.thread == 0):
        hw.mbarrier_arrive_expect_tx(full, BYTES)
        hw.tma_load(box, 0, 0, 0, tile, full, 0)
    hw.mbarrier_wait(full, 0)
    got = k.registers(U32, 1, "got")
    hw.load_shared(got, tile.address + (k.thread * 4).to(U32))
    hw.store_global(got, out + COPY + (k.thread * 4).to(U64), True)


def write(k: Builder, out: Value) -> None:
    hw.store_global(word(k, k.thread.to(U32) + 1), out + (k.thread * 4).to(U64), True)


def in_one_cta(k: Builder, out: Value) -> None:
    full = barrier(k)
    write(k, out)
    hw.fence_proxy_async("global")
    hw.sync_threads()
    copy(k, out, full)


def for_another_cta(k: Builder, out: Value) -> None:
    """By a flag, after whose wait the reader fences."""
    full = barrier(k)
    with k.when(hw.block_index() == 0):
        write(k, out)
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.store_strong(out + FLAG, Constant(U32, 1), "release", "gpu")
    with k.when(hw.block_index() == 1):
        with k.when(k.thread == 0):
            hw.spin_until_equal(out + FLAG, Constant(U32, 1))
            hw.fence_proxy_async("global")
        hw.sync_threads()
        copy(k, out, full)


def found(made: Kernel, grid: int, seed: int) -> set[str]:
    memory = np.zeros(1024, np.uint32)
    reported = kinds(execute(made, grid, seed, memory.view(np.uint8)))
    is_right = np.array_equal(memory[COPY // 4 :][:128], np.arange(1, 129))
    return reported or (set() if is_right else {"wrong"})


@pytest.mark.parametrize(("record", "grid"), [(in_one_cta, 1), (for_another_cta, 2)])
def test_every_mutant_is_reported(record: Callable[[Builder, Value], None], grid: int) -> None:
    """By seed 0."""
    unreported, changes = [], []
    for mutant in mutants_of(lambda: kernel(record, 128)):
        reported = found(mutant.kernel, grid, 0)
        changes.append((mutant.what, mutant.target))
        if not reported and (mutant.what, mutant.target) not in EQUIVALENT:
            unreported.append(str(mutant))
        if mutant.target == "fence_proxy_async" and not mutant.what.startswith("move"):
            assert reported == {"missing proxy fence"}
    assert not unreported, "\n".join(unreported)
    assert ("delete", "fence_proxy_async") in changes
    assert ("other space of", "fence_proxy_async") in changes
    assert not any(found(kernel(record, 128), grid, seed) for seed in range(20))
