"""Counters: wavefronts and sectors of accesses that are known, each beside the ideal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.backends.sim.tiny import run, word

from gemmsmith import hw
from gemmsmith.backends.sim.execute.counters import Count, Counters, wavefronts
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.mma import MMA_SYNC, select_mma
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, U16, U32, U64
from gemmsmith.lang.values import Value, as_value
from gemmsmith.machine import Access

Bytes = Callable[[Value], Value]
"""Where a lane's bytes are."""


def counted(record: Callable[[Builder, Value], None], threads: int = 32, clean: bool = True) -> list[Count]:
    counters = Counters()
    hazards = run(record, threads, counters=counters).hazards
    assert not (clean and hazards), "\n".join(map(str, hazards))
    (kernel,) = counters.kernels
    return counters.lines(kernel)


def of(lines: list[Count], instruction: str) -> Count:
    (line,) = [x for x in lines if x.instruction == instruction]
    return line


def shared(place: Bytes, registers: int, store: bool = False, threads: int = 32) -> tuple[int, int, int]:
    """Instructions, wavefronts and the ideal of one access by all lanes."""

    def record(k: Builder, out: Value) -> None:
        buffer, values = k.shared(1 << 15, allow_uninitialized_reads=True), k.registers(U32, registers, "values")
        address = buffer[0].address + place(k.thread).to(U32)
        for i in range(registers):
            values[i] = 0
        (hw.store_shared if store else hw.load_shared)(values, address)

    count = of(counted(record, threads), "store_shared" if store else "load_shared")
    assert (count.memory, count.sectors) == ("buffer", 0)
    return count.instructions, count.wavefronts, count.ideal_wavefronts


@pytest.mark.parametrize(
    ("place", "registers", "taken", "ideal"),
    [
        (lambda lane: lane * 4, 1, 1, 1),
        (lambda lane: lane * 8, 1, 2, 1),
        (lambda lane: lane * 12, 1, 1, 1),  # an odd stride
        (lambda lane: lane * 128, 1, 32, 1),  # a column of 32 words: all in one bank
        (lambda lane: lane * 132, 1, 1, 1),  # the same of padded rows
        (lambda lane: lane * 0, 1, 1, 1),  # a broadcast
        (lambda lane: lane // 2 * 128, 1, 16, 1),  # words of 16, each twice
        (lambda lane: lane * 8, 2, 2, 2),
        (lambda lane: lane * 16, 4, 4, 4),
        (lambda lane: lane * 32, 4, 8, 4),  # of a quarter's 8 lanes two are in the same banks
        (lambda lane: lane * 128, 4, 32, 4),
        (lambda lane: lane * 0, 4, 2, 1),  # neighbors that are equal go together: two halves
        (lambda lane: lane // 2 * 16, 4, 2, 2),
        (lambda lane: lane % 2 * 16 + lane // 4 * 32, 4, 2, 2),  # neighbors by 2
        (lambda lane: lane % 8 * 16, 4, 4, 1),  # each quarter the same: no neighbors
        (lambda lane: lane // 2 * 8, 2, 1, 1),
    ],
)
def test_loads_from_shared_memory(place: Bytes, registers: int, taken: int, ideal: int) -> None:
    assert shared(place, registers) == (1, taken, ideal)


@pytest.mark.parametrize(
    ("place", "registers", "taken", "ideal"),
    [(lambda lane: lane * 4, 1, 1, 1), (lambda lane: lane * 128, 1, 32, 1), (lambda lane: lane * 16, 4, 4, 4),
     (lambda lane: lane * 64, 2, 16, 2)],
)  # fmt: skip
def test_stores_to_shared_memory(place: Bytes, registers: int, taken: int, ideal: int) -> None:
    assert shared(place, registers, store=True) == (1, taken, ideal)


def test_each_warp_by_itself() -> None:
    """Of a warpgroup, whose second warp has conflicts."""
    places = lambda thread: thread * 4 + (thread // 32 % 2) * (thread % 32) * 4  # noqa: E731
    assert shared(places, 1, threads=64) == (2, 3, 2)
    assert shared(lambda thread: thread * 16, 4, threads=128) == (4, 16, 16)


def test_halves_of_a_word_are_one() -> None:
    def record(k: Builder, out: Value) -> None:
        place = k.shared(256, allow_uninitialized_reads=True)[0].address
        hw.store_shared_u16(place + (k.thread * 2).to(U32), as_value(0, U16))

    count = of(counted(record), "store_shared_u16")
    assert (count.wavefronts, count.ideal_wavefronts) == (1, 1)


@pytest.mark.parametrize(
    ("place", "taken", "ideal"),
    [
        (lambda row: row * 128, 32, 4),
        (lambda row: row * 128 + row % 8 * 16, 4, 4),  # swizzled
        (lambda row: row // 8 * 16, 4, 1),  # of each matrix one row 8 times: matrices do not go together
    ],
)
def test_matrices(place: Bytes, taken: int, ideal: int) -> None:
    """Four of 8 rows each: all rows of a matrix in the same banks, or each in banks of its own."""

    def record(k: Builder, out: Value) -> None:
        tile, values = k.shared(4096, allow_uninitialized_reads=True)[0], k.registers(U32, 4, "values")
        hw.load_matrix(values, tile.address + place(k.thread).to(U32))

    count = of(counted(record), "load_matrix")
    assert (count.wavefronts, count.ideal_wavefronts) == (taken, ideal)


@pytest.mark.parametrize(
    ("width", "source", "place", "nbytes", "taken"),
    [
        (16, lambda lane: lane * 16, lambda lane: lane * 16, 16, 4),
        (16, lambda lane: lane * 16, lambda lane: 496 - lane * 16, 16, 4),
        (16, lambda lane: lane * 16, lambda lane: lane * 128, 16, 32),
        (16, lambda lane: lane * 16, lambda lane: lane % 16 * 16, 16, 2),  # each place twice
        (16, lambda lane: lane // 4 * 512 + lane % 4 * 16, lambda lane: lane * 16, 16, 8),  # rows of 64 bytes
        (16, lambda lane: lane * 0, lambda lane: lane * 16, 0, 4),  # zeros
        (16, lambda lane: lane * 0, lambda lane: lane // 4 * 80 + lane % 4 * 16, 0, 8),  # into padded rows
        (4, lambda lane: lane * 4, lambda lane: 144 + (lane ^ 1) * 4, 4, 1),  # sgemm's B
        (4, lambda lane: lane % 2 * 32 + lane // 2 % 2 * 256 + lane // 4 * 4, lambda lane: lane * 4, 4, 2),  # its A
        (4, lambda lane: lane * 4, lambda lane: lane * 8, 4, 2),
        (4, lambda lane: lane * 0, lambda lane: lane * 4, 0, 1),
    ],
)
def test_copies_by_threads(width: int, source: Bytes, place: Bytes, nbytes: int, taken: int) -> None:
    """As Nsight Compute counts them on an H200: what comes from one line of global memory goes at once."""

    def record(k: Builder, out: Value) -> None:
        tile = k.shared(4096, alignment=128, allow_uninitialized_reads=True)[0]
        hw.cp_async_copy(tile.address + place(k.thread).to(U32), out + source(k.thread).to(U64), nbytes, width)
        hw.cp_async_commit()
        hw.cp_async_wait(0)

    is_race = len({place(lane) for lane in range(32)}) < 32
    assert of(counted(record, clean=not is_race), f"cp_async_{width}").wavefronts == taken


def test_wmma() -> None:
    """As ptxas makes it: LDSM of rows, STS.64 of 8 rows of 32 bytes, and LDG of 8 rows of 16, each half a sector."""
    mma = select_mma(BF16, BF16, FP32, MMA_SYNC)

    def record(k: Builder, out: Value) -> None:
        tile, a, d = k.shared(1024, alignment=128)[0], k.registers(U32, 4, "a"), k.registers(F32, 8, "d")
        for i in range(8):
            d[i] = 0.0
        hw.wmma_store(d, tile.address, 16, "row", mma)
        hw.sync_warp()
        hw.wmma_load(a, tile.address, 16, "a", "row", mma)
        hw.wmma_load_global(a, out, as_value(64, U32), "a", "row", mma)
        hw.wmma_store_global(d, out + as_value(2048, U64), as_value(32, U32), "row", mma)

    lines = {x.instruction.replace("row_bf16_f32_", ""): x for x in counted(record)}
    assert lines["wmma_store_row_f32_shared"].wavefronts == 16  # 4 STS.64 of 4
    assert lines["wmma_load_a_shared"].wavefronts == 8  # rows of 32 bytes, of which four have all banks
    assert lines["wmma_load_a_global"].sectors == 32
    assert lines["wmma_store_row_f32_global"].sectors == 32


@pytest.mark.parametrize(
    ("place", "registers", "taken", "ideal"),
    [
        (lambda lane: lane * 4, 1, 4, 4),
        (lambda lane: lane * 8, 1, 8, 4),
        (lambda lane: lane * 128, 1, 32, 4),  # a column: a sector for each word
        (lambda lane: lane * 4 + 4, 1, 5, 4),  # not aligned to a sector
        (lambda lane: lane * 0, 1, 1, 1),
        (lambda lane: lane * 16, 4, 16, 16),
        (lambda lane: lane * 32, 4, 32, 16),
    ],
)
def test_global_memory(place: Bytes, registers: int, taken: int, ideal: int) -> None:
    def record(k: Builder, out: Value) -> None:
        values = k.registers(U32, registers, "values")
        hw.load_global(values, out + place(k.thread).to(U64), k.thread < 32)

    count = of(counted(record), "load_global")
    assert (count.memory, count.instructions, count.sectors, count.ideal_sectors) == ("out", 1, taken, ideal)
    assert count.wavefronts == 0


def test_lanes_that_do_not_take_part() -> None:
    def record(k: Builder, out: Value) -> None:
        hw.load_global(k.registers(U32, 1, "value"), out + (k.thread * 32).to(U64), k.thread < 3)
        with k.when(k.thread < 5):
            hw.store_shared(word(k, as_value(0, U32)), k.shared(4096)[0].address + (k.thread * 128).to(U32))

    lines = counted(record)
    assert (of(lines, "load_global").sectors, of(lines, "load_global").ideal_sectors) == (3, 1)
    assert (of(lines, "store_shared").wavefronts, of(lines, "store_shared").ideal_wavefronts) == (5, 1)


def test_copies_by_threads_and_by_tma() -> None:
    """cp.async of two warps, a quarter of whose lanes copy nothing; a box of 4 rows of 128 bytes."""

    def record(k: Builder, out: Value) -> None:
        tile, barrier = k.shared(1024, alignment=128, allow_uninitialized_reads=True), k.shared(8)
        nbytes = k.select(k.thread % 32 < 24, as_value(16, U32), 0)
        hw.cp_async_copy(tile[0].address + (k.thread * 16).to(U32), out + (k.thread * 16).to(U64), nbytes, 16)
        hw.cp_async_commit()
        hw.cp_async_wait(0)
        hw.fence_proxy_async()
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 1)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(barrier[0], 512)
            hw.tma_load(k.tensor_map("map"), 0, 0, 0, tile[0], barrier[0], EVICT_NORMAL)
        hw.mbarrier_wait(barrier[0], 0)

    lines = counted(record, 64)
    copy, load = of(lines, "cp_async_16"), of(lines, "tma_load")
    assert (copy.memory, copy.wavefronts, copy.ideal_wavefronts) == ("out, buffer", 8, 8)
    assert (copy.instructions, copy.sectors, copy.ideal_sectors) == (2, 24, 24)
    assert (load.instructions, load.wavefronts, load.sectors, load.ideal_sectors) == (1, 4, 16, 16)


@pytest.mark.parametrize(("apart", "padding", "taken"), [
    (16, 0, 16), (32, 0, 32), (16, 16, 20),
], ids=["side by side", "each in a sector of its own", "rows of 80 bytes"])  # fmt: skip
def test_copies_take_the_sectors_that_they_fill(apart: int, padding: int, taken: int) -> None:
    """A warp's cp.async of 512 bytes, 16 a lane, for each of 4 lines; as an H200 counts them."""

    def record(k: Builder, out: Value) -> None:
        tile = k.shared(2048, alignment=128, allow_uninitialized_reads=True)
        place = k.lane * apart + k.lane // 4 * padding
        hw.cp_async_copy(tile[0].address + place.to(U32), out + (k.lane * 16).to(U64), as_value(16, U32), 16)
        hw.cp_async_commit()
        hw.cp_async_wait(0)

    copy = of(counted(record, 32), "cp_async_16")
    assert (copy.sectors, copy.ideal_sectors) == (taken, 16)


def test_products() -> None:
    """Of a warp's mma.sync, m16n8k16, and an FFMA of 20 lanes; both on a line of a loop."""

    def record(k: Builder, out: Value) -> None:
        d, a, b = k.registers(F32, 4, "d"), k.registers(U32, 4, "a"), k.registers(U32, 2, "b")
        for array in (d, a, b):
            for i in range(array.count):
                array[i] = 0
        with k.range(3, name="i"):
            hw.mma_sync(d, a, b, select_mma(BF16, BF16, FP32, MMA_SYNC))
        with k.when(k.thread < 20):
            d[0] = hw.fma(d[0], d[1], d[2])

    lines = counted(record, 64)
    mma, fma = of(lines, "mma_m16n8k16_f32_bf16"), of(lines, "fused_multiply_add")
    assert (mma.instructions, mma.macs) == (6, 6 * 16 * 8 * 16)
    assert (fma.instructions, fma.macs) == (1, 20)


def test_wavefronts_of_any_access(rng: np.random.Generator) -> None:
    """Against the rule written plainly: of each quarter, half or whole warp the bank with the most words."""
    for width in (2, 4, 8, 16):
        for _ in range(20):
            threads = np.flatnonzero(rng.random(128) < 0.7)
            addresses = rng.integers(0, 200, len(threads)) * width
            together = 128 // max(4, width)
            expected = 0
            for group in set(threads // together):
                words = {
                    int(w) for a in addresses[threads // together == group] for w in range(a // 4, -(-(a + width) // 4))
                }
                expected += max(sum(w % 32 == bank for w in words) for bank in range(32))
            assert wavefronts(Access("shared", addresses, width, threads=threads))[0] == expected
