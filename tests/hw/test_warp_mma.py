"""mma.sync and wmma: the PTX of each type, register counts, parts of a warp, misaligned tiles, and opaque fragments."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.sim.tiny import run
from tests.hw.one import computed, ptx, registers

from gemmsmith import hw
from gemmsmith.core.chip import CHIPS
from gemmsmith.core.dtypes import BF16, FP16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.errors import KernelError
from gemmsmith.core.mma import MMA_SYNC, WGMMA, Mma, select_mma
from gemmsmith.hw.wmma import fragment_registers
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32, U32, U64
from gemmsmith.lang.values import Value

BF16_FP32 = select_mma(BF16, BF16, FP32, MMA_SYNC)
TYPES: dict[DType, object] = {FP32: F32, INT32: I32, FP16: U32}


def fragments(k: Builder, mma: Mma):
    d = registers(k, fragment_registers(mma, "d"), TYPES[mma.d])
    return d, registers(k, fragment_registers(mma, "a")), registers(k, fragment_registers(mma, "b"))


@pytest.mark.parametrize(("mma", "text"), [
    (BF16_FP32, "row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"),
    (select_mma(FP16, FP16, FP16, MMA_SYNC), "m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}"),
    (select_mma(TF32, TF32, FP32, MMA_SYNC), "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
    (select_mma(INT8, INT8, INT32, MMA_SYNC), "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"),
])  # fmt: skip
def test_text(mma: Mma, text: str) -> None:
    def record(k: Builder) -> None:
        hw.mma_sync(registers(k, mma.accumulator_registers(8), TYPES[mma.d]), registers(k, 4), registers(k, 2), mma)

    assert text in ptx(record)


def test_wmma_text() -> None:
    def record(k: Builder) -> None:
        d, a, b = fragments(k, BF16_FP32)
        hw.wmma_load(a, k.smem, 16, "a", "row", BF16_FP32)
        hw.wmma_load_global(b, k.pointer("b"), 24, "b", "col", BF16_FP32)
        hw.wmma_mma(d, a, b, "row", "col", BF16_FP32)
        hw.wmma_store(d, k.smem, 16, "row", BF16_FP32)

    found = ptx(record)
    for text in (
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;",
        "wmma.load.b.sync.aligned.col.m16n16k16.global.bf16 {%0, %1, %2, %3}, [%4], %5;",
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32 {%0, ",
        "wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%8], {%0, ",
    ):
        assert text in found


def test_int8_sums_wrap() -> None:
    """As those of a product of k >= 131,072 may."""

    def summed(start: Value, four: Value) -> Value:
        k, mma = current_builder(), select_mma(INT8, INT8, INT32, MMA_SYNC)
        d, a, b = registers(k, 4, I32), registers(k, 4), registers(k, 2)
        for array, x in ((d, start.to(I32)), (a, four), (b, four)):
            for i in range(len(array)):
                array[i] = x
        hw.mma_sync(d, a, b, mma)
        return d[3].to(U32)

    start = np.arange(2**31 - 16, 2**31 + 16).astype(np.uint32)
    found = computed(summed, start, np.full(32, 0x80808080, np.uint32))
    np.testing.assert_array_equal(found, start + np.uint32(32 * 128 * 128))


def test_what_does_not_exist() -> None:
    with Builder("k", threads=128) as k:
        with pytest.raises(KernelError, match="mma.sync: got f32.bf16.bf16; use one of"):
            hw.mma_sync(registers(k, 4, F32), registers(k, 4), registers(k, 2), WGMMA.instructions[0])
        with pytest.raises(KernelError, match=r"mma.sync: got \(4, 4, 4\) .*; use \(4, 4, 2\)"):
            hw.mma_sync(registers(k, 4, F32), registers(k, 4), registers(k, 4), BF16_FP32)
        with pytest.raises(KernelError, match="wmma: got 8 registers of a; use 4"):
            hw.wmma_load(registers(k, 8), k.smem, 16, "a", "row", BF16_FP32)
        with pytest.raises(KernelError, match=r"wmma.mma: got \(4, 4, 4\) .*; use \(8, 4, 4\)"):
            hw.wmma_mma(registers(k, 4, F32), registers(k, 4), registers(k, 4), "row", "col", BF16_FP32)


def test_part_of_a_warp() -> None:
    def record(k: Builder, out: Value) -> None:
        d, a, b = fragments(k, BF16_FP32)
        read, tile = (k.shared(1024, stages=2, name=name)[k.warp_index] for name in ("read", "tile"))
        four = registers(k, 4, F32)
        with k.when(k.warp_index == 1):  # all of a warp
            hw.mma_sync(four, a, registers(k, 2), BF16_FP32)
        with k.when(k.lane < 31):
            hw.mma_sync(four, a, registers(k, 2), BF16_FP32)
            hw.wmma_load(a, read, 16, "a", "row", BF16_FP32)
            hw.wmma_mma(d, a, b, "row", "col", BF16_FP32)
            hw.wmma_store(d, tile, 16, "row", BF16_FP32)

    hazards = run(record, threads=64).hazards
    found = [str(h) for h in hazards]
    for what in ("mma.sync", "wmma.load", "wmma.mma", "wmma.store"):
        assert sum(f"{what} by some lanes of a warp" in h for h in found) == 1
    assert {h.kind for h in hazards} == {"divergence", "uninitialized read"}


@pytest.mark.parametrize(("offset", "stride", "message"), [
    (16, 16, "a tile address aligned to 32 bytes"), (0, 18, "a stride of a multiple of 16 bytes"),
    (None, 16, "the address and the stride must be uniform"),
])  # fmt: skip
def test_misaligned_tiles(offset: int | None, stride: int, message: str) -> None:
    def record(k: Builder, out: Value) -> None:
        d, _, _ = fragments(k, BF16_FP32)
        tile = k.shared(4096, name="tile", alignment=32)[0]
        address = tile.address + (k.lane * 32).to(U32) if offset is None else tile.at(offset)
        hw.wmma_store(d, address, stride, "row", BF16_FP32)

    assert any(message in str(h) for h in run(record, threads=32).hazards)


def test_fragments_are_opaque() -> None:
    """An arrangement that one seed happens to choose is another's mistake."""

    def record(k: Builder, out: Value) -> None:
        d = registers(k, 8, F32)
        tile = k.shared(1024, name="tile", alignment=32)[0]
        d[0] = k.lane.to(F32)
        hw.wmma_store(d, tile, 16, "row", BF16_FP32)
        hw.sync_warp()
        with k.unroll(8, name="i") as i:
            one = k.registers(F32, 1, "one")
            hw.load_shared(one, tile.address + ((i * 32 + k.lane) * 4).to(U32))
            hw.store_global(one, out + ((i * 32 + k.lane) * 4).to(U64), True)

    places = []
    for seed in range(3):
        out = np.full(256, np.nan, np.float32)
        assert run(record, threads=32, seed=seed, out=out).hazards == []
        assert sorted(out) == sorted([*range(32), *[0] * 224])
        places.append(out)
    assert not np.array_equal(places[0], places[1])
    assert not np.array_equal(places[1], places[2])


def test_chips() -> None:
    """A kernel keeps to the instructions of its chip; what waits for earlier grids is left out where none need it."""
    for chip, waits in ((CHIPS["sm_80"], False), (CHIPS["sm_90"], True), (CHIPS["sm_120"], True)):
        with Builder("k", threads=32, chip=chip) as k:
            d, a, b = fragments(k, BF16_FP32)
            hw.wmma_mma(d, a, b, "row", "col", BF16_FP32)
            hw.mma_sync(registers(k, 4, F32), a, registers(k, 2), BF16_FP32)
            hw.load_matrix(a, k.smem)
            hw.grid_dependency_wait()
            assert ("griddepcontrol" in k.finish().source) == waits
            assert f"NVRTC for {chip.target}" in k.finish().source


@pytest.mark.parametrize(("chip", "instruction", "needs"), [
    ("sm_80", "store_matrix", "sm_90"), ("sm_86", "pack_fp8", "sm_89"), ("sm_89", "elect_one", "sm_90"),
    ("sm_100", "set_max_nreg", "sm_90a"), ("sm_120", "wgmma_fence", "sm_90a"),
])  # fmt: skip
def test_what_a_chip_lacks(chip: str, instruction: str, needs: str) -> None:
    with Builder("k", threads=128, chip=CHIPS[chip]) as k:
        if instruction == "store_matrix":
            hw.store_matrix(registers(k, 4), k.smem)
        elif instruction == "pack_fp8":
            hw.pack_fp8(hw.as_float(k.smem), hw.as_float(k.smem), "e4m3")
        elif instruction == "set_max_nreg":
            hw.set_registers(40)
        else:
            getattr(hw, instruction)()
        message = f"{instruction} at test_warp_mma.py:.*: it requires {needs}, the kernel is for {chip}$"
        with pytest.raises(KernelError, match=message):
            k.finish()
