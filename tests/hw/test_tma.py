"""TMA: the PTX of loads, stores and bulk groups, L2 policies, and coordinates that are illegal instructions."""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run
from tests.hw.one import Forms, ptx
from tests.instructions import bulk_wait

from gemmsmith import hw
from gemmsmith.hw.tma import EVICT_FIRST, EVICT_LAST, EVICT_NORMAL
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.values import Value

LOAD = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"


def load(k: Builder) -> object:
    return hw.tma_load(k.tensor_map("map"), 0, k.lane, 1, k.smem, k.smem, EVICT_LAST)


def multicast(k: Builder) -> object:
    return hw.tma_load_multicast(k.tensor_map("map"), 0, k.lane, 1, k.smem, k.smem, 3, EVICT_LAST)


FORMS: Forms = {
    f"{LOAD}.L2::cache_hint [%4], [%0, {{%1, %2, %3}}], [%5], %6;": load,
    f"{LOAD}.multicast::cluster.L2::cache_hint [%4], [%0, {{%1, %2, %3}}], [%5], %6, %7;": multicast,
    f"{STORE} [%0, {{%1, %2, %3}}], [%4];": lambda k: hw.tma_store(k.tensor_map("map"), 0, k.lane, 1, k.smem),
    f"{STORE}.L2::cache_hint [%0, {{%1, %2, %3}}], [%4], %5;": lambda k: hw.tma_store_hint(
        k.tensor_map("map"), 0, k.lane, 1, k.smem, EVICT_FIRST
    ),
    "cp.async.bulk.commit_group;": lambda k: hw.bulk_commit(),
    "cp.async.bulk.wait_group 1;": lambda k: bulk_wait(1),
    "cp.async.bulk.wait_group.read 0;": lambda k: hw.bulk_wait_read(0),
    "prefetch.tensormap [%0];": lambda k: hw.prefetch_tensor_map(k.tensor_map("map")),
}


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


def test_policies_are_those_of_cutlass() -> None:
    """include/cute/arch/copy_sm90_desc.hpp, TMA::CacheHintSm90."""
    policies = [(x.name, x.value) for x in (EVICT_NORMAL, EVICT_FIRST, EVICT_LAST)]
    assert policies == [
        ("EVICT_NORMAL", 0x1000000000000000), ("EVICT_FIRST", 0x12F0000000000000), ("EVICT_LAST", 0x14F0000000000000),
    ]  # fmt: skip


def moved(store: bool, x: int, y: int, offset: int) -> tuple[set[str], str]:
    """Hazards of one copy of a box of 32 x 4 words, at (x, y, 0), `offset` bytes into shared memory."""

    def record(k: Builder, out: Value) -> None:
        map, buffer, barrier = (
            k.tensor_map("map"),
            k.shared(1024, alignment=1024, allow_uninitialized_reads=True),
            k.shared(8),
        )
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 1)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.thread == 0):
            if store:
                hw.tma_store(map, x, y, 0, buffer[0].at(offset))
                hw.bulk_commit()
                bulk_wait(0)
            else:
                hw.mbarrier_arrive_expect_tx(barrier[0], 512)
                hw.tma_load(map, x, y, 0, buffer[0].at(offset), barrier[0], EVICT_NORMAL)
        if not store:
            hw.mbarrier_wait(barrier[0], 0)

    done = run(record)
    return kinds(done), "\n".join(map(str, done.hazards))


@pytest.mark.parametrize(("x", "y", "offset"), [(0, 0, 0), (-4, -1, 128), (36, 9, 256)])
def test_loads_start_anywhere_that_is_aligned(x: int, y: int, offset: int) -> None:
    assert moved(False, x, y, offset) == (set(), "")


@pytest.mark.parametrize(("x", "y", "offset"), [(2, 0, 0), (-2, 0, 0), (0, 0, 64), (0, 0, 16)])
def test_loads_that_are_not_aligned(x: int, y: int, offset: int) -> None:
    found, text = moved(False, x, y, offset)
    assert "alignment" in found
    assert f"of x = {x}: needs 128- and 16-byte alignment" in text


@pytest.mark.parametrize(("x", "y", "offset"), [(0, 0, 0), (4, 3, 128), (36, 9, 256)])
def test_stores_start_anywhere_that_is_aligned(x: int, y: int, offset: int) -> None:
    assert moved(True, x, y, offset) == (set(), "")


@pytest.mark.parametrize(("x", "y", "offset"), [(2, 0, 0), (-4, 0, 0), (0, -1, 0), (0, 0, 64)])
def test_stores_that_are_not_aligned_or_before_the_tensor(x: int, y: int, offset: int) -> None:
    found, text = moved(True, x, y, offset)
    assert "alignment" in found
    assert f"to {(x, y, 0)}: needs 128- and 16-byte alignment, and no negative coordinate" in text
