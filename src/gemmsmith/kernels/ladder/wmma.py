"""WMMA as it is meant: tiles staged in shared memory by cp.async, padded rows, several fragments a warp."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.mma import find_mma
from gemmsmith.hw.wmma import SIDE as FRAGMENT
from gemmsmith.hw.wmma import fragment_registers
from gemmsmith.kernels.ladder.product import ZERO, Product, zeros
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, U32, U64
from gemmsmith.lang.values import Constant, Value

ROWS, COLUMNS, DEPTH, WARPS, MOST_STAGES = 256, 128, 32, 8, 4
OWN = 64
"""Rows and columns, of a CTA's tile, that a warp has."""
PITCH = 2 * DEPTH + 16
"""Bytes of a row: with 16 more than it has, 8 rows begin in different banks."""
CHUNKS = 2 * DEPTH // 16
STEPS, ACROSS, COUNT = DEPTH // FRAGMENT, COLUMNS // OWN, OWN // FRAGMENT
BAND = 8


def wmma(dtype: DType, chip: Chip) -> Kernel:
    """A's rows and B's columns are contiguous and whole chunks of 16 bytes; what lies otherwise is packed so. Copies
    run a few k-tiles ahead, and a step's fragments are loaded while the last one's are multiplied. Results leave
    through shared memory, since fragments are opaque."""
    mma = find_mma(dtype, dtype, FP32, "mma")
    stages = min(MOST_STAGES, chip.shared_bytes // ((ROWS + COLUMNS) * PITCH))
    with Builder(f"wmma_{dtype}", threads=32 * WARPS, chip=chip) as k:
        x = Product(dtype, FP32, ROWS, COLUMNS)
        x.in_bands(BAND)
        of_a, of_b = (
            k.shared(lines * PITCH, stages=stages, alignment=128, name=name)
            for name, lines in zip("AB", (ROWS, COLUMNS), strict=True)
        )
        row, column = (k.warp_index // ACROSS * OWN).named("row"), (k.warp_index % ACROSS * OWN).named("column")
        a = k.register_rows(U32, 2 * COUNT, fragment_registers(mma, "a"), "a_fragments")
        b = k.register_rows(U32, 2 * COUNT, fragment_registers(mma, "b"), "b_fragments")
        d = zeros(COUNT * COUNT, fragment_registers(mma, "d"), name="d_fragments")

        def copy(k_tile: Value) -> None:
            """A group of this thread's copies of a k-tile; zeros behind the last one."""
            for tile, lines, operand in (of_a, ROWS, "a"), (of_b, COLUMNS, "b"):
                with k.unroll(lines * CHUNKS // (32 * WARPS), name="turn") as turn:
                    number = turn * (32 * WARPS) + k.thread
                    eighth, chunk = number // CHUNKS % 8, (number % CHUNKS).named("chunk")
                    # lines 0, 4, 1, 5 ... of 8: two that are written at once, of 64 bytes each, are in different banks
                    line = (number // CHUNKS // 8 * 8 + eighth // 2 + eighth % 2 * 4).named("line")
                    depth = chunk * 8
                    if operand == "a":
                        first, inside = x.a.at(ZERO, x.row + line, depth), x.row + line < x.m
                    else:
                        first, inside = x.b.at(ZERO, depth, x.column + line), x.column + line < x.n
                    nbytes = k.select(inside & (depth < x.k - k_tile * DEPTH), Constant(U32, 16), 0)
                    to = tile[k_tile % stages].address + (line * PITCH + chunk * 16).to(U32)
                    hw.cp_async_copy(to, first + (k_tile * (2 * DEPTH)).to(U64), nbytes, 16)
            hw.cp_async_commit()

        def load(k_tile: Value, step: Value, to: Value) -> None:
            """A step's fragments of a k-tile."""
            with k.unroll(COUNT, name="n") as n:
                at = of_a[k_tile % stages].address + ((row + n * FRAGMENT) * PITCH + step * (2 * FRAGMENT)).to(U32)
                hw.wmma_load(a[to * COUNT + n].part(0, a.count), at, PITCH // 2, "a", "row", mma)
            with k.unroll(COUNT, name="n") as n:
                at = of_b[k_tile % stages].address + ((column + n * FRAGMENT) * PITCH + step * (2 * FRAGMENT)).to(U32)
                hw.wmma_load(b[to * COUNT + n].part(0, b.count), at, PITCH // 2, "b", "col", mma)

        def land(copied: int) -> None:
            """All see the first of some k-tiles that are being copied, and are done with the one before, whose place is
            filled next."""
            hw.cp_async_wait(copied - 1)
            hw.sync_threads()

        for stage in range(stages):
            copy(Constant(I32, stage))
        land(stages)
        load(ZERO, ZERO, ZERO)
        with k.range((x.k + (DEPTH - 1)) // DEPTH, name="k_tile") as k_tile, k.unroll(STEPS, name="step") as step:
            after = step + 1
            with k.when(after == STEPS):
                land(stages - 1)
            load(k_tile + after // STEPS, after % STEPS, after % 2)
            with k.unroll(COUNT, name="down") as down, k.unroll(COUNT, name="right") as right:
                of_d, held = d[down * COUNT + right].part(0, d.count), step % 2 * COUNT
                rows, columns = a[held + down].part(0, a.count), b[held + right].part(0, b.count)
                hw.wmma_mma(of_d, rows, columns, "row", "col", mma)
            with k.when(after == STEPS):
                copy(k_tile + stages)
        hw.cp_async_wait(0)
        hw.sync_threads()
        results = of_a[0].at(k.warp_index, 4 * FRAGMENT * FRAGMENT)  # of this warp, in the stages
        for n in range(len(d)):
            to_row, to_column = row + n // COUNT * FRAGMENT, column + n % COUNT * FRAGMENT
            if n:
                hw.sync_warp()  # all lanes have read what lay there
            hw.wmma_store(d.rows[n], results, FRAGMENT, "row", mma)
            hw.sync_warp()
            with k.unroll(FRAGMENT * FRAGMENT // 32, name="turn") as turn:
                element = (turn * 32 + k.lane).named("element")
                value = hw.load_shared_word(results.address + (element * 4).to(U32), F32, "one")
                x.store(x.row + to_row + element // FRAGMENT, x.column + to_column + element % FRAGMENT, value)
        return k.finish()
