"""Microbenchmarks of the peak throughput of multiply instructions: loops of one instruction in registers."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import BF16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.mma import MMA_SYNC, select_mma
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, U32, U64, ScalarType
from gemmsmith.lang.values import RegisterArray, Value

THREADS = 256
"""Threads per CTA."""
REGISTERS_PER_SIDE = 8
"""Rows and columns of a thread's results, with fma and dp4a."""
FRAGMENTS_PER_WARP = 8
"""Independent mma.sync instructions per warp."""
WGMMA_ROWS = 64
"""Rows of a warpgroup's results, with wgmma."""
WGMMA_COLUMNS = 256
"""Columns of a warpgroup's results, with wgmma."""
TILE_K = 64
"""K of the tiles that wgmma multiplies."""
RANDOM_BITS = 0x807F_807F
"""Bits of an operand's word that vary."""
EXPONENT_BITS = 0x3F80_3F80
"""Bits of an operand's word that are set: values of bf16 and fp32 have magnitudes from 1 to 2."""
LoopBody = tuple[Callable[[], None], list[RegisterArray]]
"""Function that records one iteration, and the registers it accumulates into."""


class LoopLaunch(NamedTuple):
    """Launch arguments: iterations, CTAs, and the address of a word per thread, stored to keep the loop alive."""

    rounds: int
    ctas: int
    out: Pointer = Pointer("out")


def multiply_add(instruction: Callable[..., Value], operand: ScalarType, result: ScalarType) -> LoopBody:
    """Return a loop body with 8x8 results per thread, from 8 registers of A and 8 of B."""
    a, b = (random_registers(operand, REGISTERS_PER_SIDE, name) for name in "ab")
    results = random_registers(result, REGISTERS_PER_SIDE * REGISTERS_PER_SIDE, "results")

    def multiply() -> None:
        k = current_builder()
        with k.unroll(REGISTERS_PER_SIDE, name="i") as i, k.unroll(REGISTERS_PER_SIDE, name="j") as j:
            results[i * REGISTERS_PER_SIDE + j] = instruction(a[i], b[j], results[i * REGISTERS_PER_SIDE + j])

    return multiply, [results]


def mma(dtype: DType) -> LoopBody:
    """Return a loop body with 8 result fragments per warp, from two of A and four of B."""
    instruction = select_mma(dtype, dtype, INT32 if dtype == INT8 else FP32, MMA_SYNC)
    a, b = [random_registers(U32, 4, "a") for _ in range(2)], [random_registers(U32, 2, "b") for _ in range(4)]
    results = [random_registers(I32 if dtype == INT8 else F32, 4, "results") for _ in range(FRAGMENTS_PER_WARP)]

    def multiply() -> None:
        for i, fragment in enumerate(results):
            hw.mma_sync(fragment, a[i // 4], b[i % 4], instruction)

    return multiply, results


def wgmma() -> LoopBody:
    """Return a loop body with 64x256 results per warpgroup, from tiles in shared memory."""
    k, accumulator = current_builder(), Accumulator(select_mma(BF16, BF16, FP32), WGMMA_ROWS, WGMMA_COLUMNS)
    tiles = [Tile(BF16, rows, TILE_K, "K") for rows in (WGMMA_ROWS, WGMMA_COLUMNS)]
    a, b = (k.shared(tile, name=name)[0] for tile, name in zip(tiles, "AB", strict=True))
    for view, tile in zip((a, b), tiles, strict=True):
        with k.range(tile.bytes // (4 * THREADS), name="i") as i:
            hw.store_shared_word(view.address + ((i * THREADS + k.thread) * 4).to(U32), random_word(i), "word")
    hw.fence_proxy_async()
    k.comment("all threads have written the tiles that wgmma reads")
    hw.sync_threads()
    accumulator.clear()

    def multiply() -> None:
        accumulator.multiply(a, b, accumulate=True)
        accumulator.wait(pending=0)

    return multiply, [*accumulator.fragments]


MICROBENCHMARKS: dict[str, tuple[Callable[[], LoopBody], int]] = {
    "fma": (lambda: multiply_add(hw.fma, F32, F32), REGISTERS_PER_SIDE * REGISTERS_PER_SIDE),
    "dp4a": (lambda: multiply_add(hw.dp4a, U32, I32), 4 * REGISTERS_PER_SIDE * REGISTERS_PER_SIDE),
    "mma_bf16": (lambda: mma(BF16), FRAGMENTS_PER_WARP * 16 * 8 * 16 // 32),
    "mma_tf32": (lambda: mma(TF32), FRAGMENTS_PER_WARP * 16 * 8 * 8 // 32),
    "mma_int8": (lambda: mma(INT8), FRAGMENTS_PER_WARP * 16 * 8 * 32 // 32),
    "wgmma_bf16": (wgmma, WGMMA_ROWS * WGMMA_COLUMNS * TILE_K // 128),
}
"""Loop bodies by name, and the multiply-adds per thread and iteration."""


def microbenchmark(name: str, chip: Chip) -> Kernel:
    """Build the kernel of one of MICROBENCHMARKS, which is launched with LoopLaunch."""
    make, _ = MICROBENCHMARKS[name]
    with Builder(f"loop_{name}", threads=THREADS, chip=chip) as k:
        k.work_clusters = attrgetter("ctas")
        rounds, out = k.parameter("rounds", compute=attrgetter("rounds")), k.pointer("out", compute=attrgetter("out"))
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


def random_word(i: Value | int) -> Value:
    """Return a pseudo-random word that depends on the thread and on i, since power depends on the data."""
    word: Value = (current_builder().thread * 0x9E37 + i * 0x85EB).to(U32) * 0x9E37_79B1
    return word & RANDOM_BITS | EXPONENT_BITS


def random_registers(type: ScalarType, count: int, name: str) -> RegisterArray:
    """Return registers with pseudo-random words."""
    k = current_builder()
    registers = k.registers(type, count, name)
    for i in range(count):
        registers[i] = hw.as_float(random_word(i)) if type == F32 else random_word(i).to(type)
    return registers
