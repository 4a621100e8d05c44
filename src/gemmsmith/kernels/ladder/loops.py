"""Loops of one instruction and nothing else: how fast a chip multiplies at best, which no product is faster than."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import BF16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.mma import find_mma
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import Builder, current
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, U32, U64, Type
from gemmsmith.lang.values import Registers, Value

THREADS, SIDE, FRAGMENTS, ROWS, COLUMNS, DEPTH = 256, 8, 8, 64, 256, 64
"""Of a CTA; results of a thread's row and column; mma.syncs of a warp that do not wait for one another; a warpgroup's
results by wgmma, and how deep the tiles are that it multiplies."""
FREE, FIXED = 0x807F_807F, 0x3F80_3F80
"""Bits of a word that vary, and that are set: numbers of bf16 and fp32 then are from 1 to 2, of either sign."""
Loop = tuple[Callable[[], None], list[Registers]]
"""What multiplies once, and into what."""


class Rounds(NamedTuple):
    """What a loop is launched for. `out`: a word for each thread, of no meaning; without it nothing would be done."""

    rounds: int
    ctas: int
    out: Pointer = Pointer("out")


def multiply_add(instruction: Callable[..., Value], operand: Type, result: Type) -> Loop:
    """8x8 results a thread, of 8 registers and 8 others."""
    a, b, results = filled(operand, SIDE, "a"), filled(operand, SIDE, "b"), filled(result, SIDE * SIDE, "results")

    def multiply() -> None:
        k = current()
        with k.unroll(SIDE, name="i") as i, k.unroll(SIDE, name="j") as j:
            results[i * SIDE + j] = instruction(a[i], b[j], results[i * SIDE + j])

    return multiply, [results]


def mma(dtype: DType) -> Loop:
    """8 fragments a warp, of two of A and four of B."""
    found = find_mma(dtype, dtype, INT32 if dtype == INT8 else FP32, "mma")
    a, b = [filled(U32, 4, "a") for _ in range(2)], [filled(U32, 2, "b") for _ in range(4)]
    results = [filled(I32 if dtype == INT8 else F32, 4, "results") for _ in range(FRAGMENTS)]

    def multiply() -> None:
        for i, fragment in enumerate(results):
            hw.mma_sync(fragment, a[i // 4], b[i % 4], found)

    return multiply, results


def wgmma() -> Loop:
    """64x256 results a warpgroup, of tiles in shared memory."""
    k, accumulator = current(), Accumulator(find_mma(BF16, BF16, FP32), ROWS, COLUMNS)
    tiles = [Tile(BF16, rows, DEPTH, "K") for rows in (ROWS, COLUMNS)]
    a, b = (k.shared(tile, name=name)[0] for tile, name in zip(tiles, "AB", strict=True))
    for view, tile in zip((a, b), tiles, strict=True):
        with k.range(tile.bytes // (4 * THREADS), name="i") as i:
            hw.store_shared_word(view.address + ((i * THREADS + k.thread) * 4).to(U32), noise(i), "word")
    hw.fence_proxy_async()
    hw.sync_threads()
    accumulator.clear()

    def multiply() -> None:
        accumulator.multiply(a, b, accumulate=True)
        accumulator.wait(pending=0)

    return multiply, [*accumulator.blocks]


LOOPS: dict[str, tuple[Callable[[], Loop], int]] = {
    "fma": (lambda: multiply_add(hw.fma, F32, F32), SIDE * SIDE),
    "dp4a": (lambda: multiply_add(hw.dp4a, U32, I32), 4 * SIDE * SIDE),
    "mma_bf16": (lambda: mma(BF16), FRAGMENTS * 16 * 8 * 16 // 32),
    "mma_tf32": (lambda: mma(TF32), FRAGMENTS * 16 * 8 * 8 // 32),
    "mma_int8": (lambda: mma(INT8), FRAGMENTS * 16 * 8 * 32 // 32),
    "wgmma_bf16": (wgmma, ROWS * COLUMNS * DEPTH // 128),
}
"""What is repeated, and the products that a thread sums each time."""


def loop(name: str, chip: Chip) -> Kernel:
    """One of LOOPS. A CTA has 256 threads; a launch is for Rounds."""
    make, _ = LOOPS[name]
    with Builder(f"loop_{name}", threads=THREADS, chip=chip) as k:
        k.grid, k.persistent = attrgetter("ctas"), False
        rounds, out = k.parameter("rounds", bind=attrgetter("rounds")), k.pointer("out", bind=attrgetter("out"))
        with k.warpgroups(0, THREADS // 128, "math"):
            multiply, results = make()
            with k.range(rounds, name="round"):
                multiply()
            total = k.registers(U32, 1, "total")
            total[0] = 0
            for array in results:
                with k.unroll(array.count, name="i") as i:
                    total[0] = total[0] + (hw.as_unsigned(array[i]) if array.type == F32 else array[i].to(U32))
            hw.store_global(total, out + ((hw.block_index() * THREADS + k.thread) * 4).to(U64), k.thread >= 0)
        return k.finish()


def noise(i: Value | int) -> Value:
    """A word that differs from thread to thread and from i to i: how much power a chip takes depends on its data."""
    word: Value = (current().thread * 0x9E37 + i * 0x85EB).to(U32) * 0x9E37_79B1
    return word & FREE | FIXED


def filled(type: Type, count: int, name: str) -> Registers:
    """Registers of noise."""
    k = current()
    registers = k.registers(type, count, name)
    for i in range(count):
        registers[i] = hw.as_float(noise(i)) if type == F32 else noise(i).to(type)
    return registers
