"""WMMA as it is meant: tiles staged in shared memory by cp.async, padded rows, several fragments a warp."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.mma import find_mma
from gemmsmith.hw.wmma import SIDE as FRAGMENT
from gemmsmith.hw.wmma import fragment_registers
from gemmsmith.kernels.ladder.product import ZERO, Product
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, U32
from gemmsmith.lang.values import Constant, Value

SIDE, DEPTH, STAGES, WARPS = 128, 32, 3, 8
OWN_ROWS, OWN_COLUMNS = 64, 32
"""Of a CTA's tile, that a warp has."""
PITCH = 2 * DEPTH + 16
"""Bytes of a row: with 16 more than it has, 8 rows begin in different banks."""
CHUNKS = 2 * DEPTH // 16


def wmma(dtype: DType, chip: Chip) -> Kernel:
    """A's rows and B's columns are contiguous and whole chunks of 16 bytes; what lies otherwise is packed so. Copies
    run STAGES - 1 k-tiles ahead. Results leave through shared memory, since fragments are opaque."""
    mma = find_mma(dtype, dtype, FP32, "mma")
    with Builder(f"wmma_{dtype}", threads=32 * WARPS, chip=chip) as k:
        x = Product(dtype, FP32, SIDE, SIDE)
        tiles = [k.shared(SIDE * PITCH, stages=STAGES, alignment=128, name=name) for name in "AB"]
        down, right = OWN_ROWS // FRAGMENT, OWN_COLUMNS // FRAGMENT
        row = (k.warp_index // (SIDE // OWN_COLUMNS) * OWN_ROWS).named("row")
        column = (k.warp_index % (SIDE // OWN_COLUMNS) * OWN_COLUMNS).named("column")
        a = k.register_rows(U32, down, fragment_registers(mma, "a"), "a_fragments")
        b = k.register_rows(U32, right, fragment_registers(mma, "b"), "b_fragments")
        d = k.register_rows(F32, down * right, fragment_registers(mma, "d"), "d_fragments")
        with k.unroll(down * right, name="i") as i, k.unroll(d.count, name="j") as j:
            d[i][j] = 0.0

        def copy(k_tile: Value) -> None:
            """A group of this thread's copies of a k-tile; zeros behind the last one."""
            for tile, operand in zip(tiles, "ab", strict=True):
                with k.unroll(SIDE * CHUNKS // (32 * WARPS), name="turn") as turn:
                    number = turn * (32 * WARPS) + k.thread
                    line, chunk = (number // CHUNKS).named("line"), (number % CHUNKS).named("chunk")
                    depth = k_tile * DEPTH + chunk * 8
                    if operand == "a":
                        where, inside = x.a.at(ZERO, x.row + line, depth), x.row + line < x.m
                    else:
                        where, inside = x.b.at(ZERO, depth, x.column + line), x.column + line < x.n
                    nbytes = k.select(inside & (depth < x.k), Constant(U32, 16), 0)
                    to = tile[k_tile % STAGES].address + (line * PITCH + chunk * 16).to(U32)
                    hw.cp_async_copy(to, where, nbytes, 16)
            hw.cp_async_commit()

        for stage in range(STAGES - 1):
            copy(Constant(I32, stage))
        with k.range((x.k + (DEPTH - 1)) // DEPTH, name="k_tile") as k_tile:
            hw.cp_async_wait(STAGES - 2)
            hw.sync_threads()  # all see this k-tile, and are done with the last one, whose place is filled next
            copy(k_tile + (STAGES - 1))
            of_a, of_b = (tile[k_tile % STAGES] for tile in tiles)
            with k.unroll(0, DEPTH, FRAGMENT, name="depth") as depth:
                for n, fragment in enumerate(a):
                    at = of_a.address + ((row + n * FRAGMENT) * PITCH + depth * 2).to(U32)
                    hw.wmma_load(fragment, at, PITCH // 2, "a", "row", mma)
                for n, fragment in enumerate(b):
                    at = of_b.address + ((column + n * FRAGMENT) * PITCH + depth * 2).to(U32)
                    hw.wmma_load(fragment, at, PITCH // 2, "b", "col", mma)
                for n, result in enumerate(d):
                    hw.wmma_mma(result, a.rows[n // right], b.rows[n % right], "row", "col", mma)
        hw.cp_async_wait(0)
        hw.sync_threads()
        results = tiles[0][0].at(k.warp_index, 4 * FRAGMENT * FRAGMENT)  # of this warp, in the stages
        for n in range(down * right):
            to_row, to_column = row + n // right * FRAGMENT, column + n % right * FRAGMENT
            if n:
                hw.sync_warp()  # all lanes have read what lay there
            hw.wmma_store(d.rows[n], results, FRAGMENT, "row", mma)
            hw.sync_warp()
            with k.unroll(FRAGMENT * FRAGMENT // 32, name="turn") as turn:
                element, one = (turn * 32 + k.lane).named("element"), k.registers(F32, 1, "one")
                hw.load_shared(one, results.address + (element * 4).to(U32))
                x.store(x.row + to_row + element // FRAGMENT, x.column + to_column + element % FRAGMENT, one[0])
        return k.finish()
