"""CUDA cores at their best: warps with tiles of their own, 8x16 results a thread, copies ahead by cp.async."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.kernels.ladder.product import ZERO, Product, SharedMatrix, zeros
from gemmsmith.lang.builder import Builder, current
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, U32
from gemmsmith.lang.values import Constant, RegisterRows, Value

ROWS, COLUMNS, DEPTH, STAGES = 256, 128, 8, 4
WARP, VECTOR, LANES_DOWN, LANES_RIGHT = 64, 4, 8, 4
"""Rows and columns of a warp's tile; results that are neighbours in a thread; lanes of a warp below one another, and
side by side."""
GROUPS_DOWN, GROUPS_RIGHT = WARP // (VECTOR * LANES_DOWN), WARP // (VECTOR * LANES_RIGHT)
"""Of such neighbours, which a thread has."""
THREADS = ROWS // WARP * (COLUMNS // WARP) * 32
BAND = 8


def sgemm(dtype: DType, chip: Chip) -> Kernel:
    """A's columns and B's rows are contiguous and whole chunks of 16 bytes; what lies otherwise is packed so. One load
    of 16 bytes from shared memory serves 21 products; while some are computed the next depth's are loaded."""
    with Builder("sgemm", threads=THREADS, chip=chip) as k:
        x = Product(dtype, dtype, ROWS, COLUMNS)
        x.in_bands(BAND)
        a, b = SharedMatrix("A", DEPTH, ROWS, stages=STAGES), SharedMatrix("B", DEPTH, COLUMNS, stages=STAGES)
        row, column = own_results()
        results = zeros(VECTOR * GROUPS_DOWN, VECTOR * GROUPS_RIGHT)
        of_a = k.register_rows(F32, 2, VECTOR * GROUPS_DOWN, "of_a")
        of_b = k.register_rows(F32, 2, VECTOR * GROUPS_RIGHT, "of_b")

        def copy(k_tile: Value) -> None:
            """A group of this thread's copies of a k-tile; zeros behind the last one."""
            for tile, side in ((a, ROWS), (b, COLUMNS)):
                tile.stage = k_tile % STAGES
                across = side // VECTOR
                with k.unroll(DEPTH * across // THREADS, name="turn") as turn:
                    number = (turn * THREADS + k.thread).named("number")
                    deep, along = number // across, number % across * VECTOR
                    depth = k_tile * DEPTH + deep
                    if tile is a:
                        where, inside = x.a.at(ZERO, x.row + along, depth), x.row + along < x.m
                    else:
                        where, inside = x.b.at(ZERO, depth, x.column + along), x.column + along < x.n
                    nbytes = k.select(inside & (depth < x.k), Constant(U32, 16), 0)
                    hw.cp_async_copy(tile.address(deep, along), where, nbytes, 16)
            hw.cp_async_commit()

        def load(k_tile: Value, depth: Value, buffer: Value) -> None:
            """What this thread needs of a depth of a k-tile."""
            for tile, registers, first, apart in (
                (a, of_a, row, VECTOR * LANES_DOWN), (b, of_b, column, VECTOR * LANES_RIGHT),
            ):  # fmt: skip
                tile.stage = k_tile % STAGES
                with k.unroll(0, registers.count, VECTOR, name="i") as i:
                    chunk = tile.load(depth, first + i // VECTOR * apart, VECTOR)
                    for j in range(VECTOR):
                        registers[buffer][i + j] = chunk[j]

        def land() -> None:
            """Each waits for its own copies of the next k-tile; the barrier makes them known to all."""
            hw.cp_async_wait(STAGES - 2)
            hw.sync_threads()

        first = Constant(I32, 0)
        with k.range(STAGES - 1, name="k_tile") as k_tile:
            copy(k_tile)
        land()
        load(first, first, first)
        with k.range((x.k + (DEPTH - 1)) // DEPTH, name="k_tile") as k_tile, k.unroll(DEPTH, name="depth") as depth:
            with k.when(depth == DEPTH - 1):
                land()
            load(k_tile + (depth + 1) // DEPTH, (depth + 1) % DEPTH, (depth + 1) % 2)
            with k.when(depth == 0):
                copy(k_tile + (STAGES - 1))
            with k.unroll(len(results), name="i") as i, k.unroll(results.count, name="j") as j:
                results[i][j] = hw.fma(of_a[depth % 2][i], of_b[depth % 2][j], results[i][j])
        hw.cp_async_wait(0)
        store(x, results, row, column)
        return k.finish()


def own_results() -> tuple[Value, Value]:
    """Where this thread's results begin in the CTA's tile."""
    k, across = current(), COLUMNS // WARP
    row = k.warp_index // across * WARP + k.lane // LANES_RIGHT * VECTOR
    column = k.warp_index % across * WARP + k.lane % LANES_RIGHT * VECTOR
    return row.named("row"), column.named("column")


def store(x: Product, results: RegisterRows, row: Value, column: Value) -> None:
    """Element by element: D may lie in any layout."""
    k = current()
    with k.unroll(len(results), name="i") as i, k.unroll(results.count, name="j") as j:
        down = i // VECTOR * (VECTOR * LANES_DOWN) + i % VECTOR
        right = j // VECTOR * (VECTOR * LANES_RIGHT) + j % VECTOR
        x.store(x.row + row + down, x.column + column + right, results[i][j])
