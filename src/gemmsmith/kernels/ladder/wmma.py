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

ROWS, COLUMNS, WARPS, MOST_STAGES = 256, 128, 8, 4
OWN = 64
"""Rows and columns, of a CTA's tile, that a warp has."""
DEPTHS, LEAST_STAGES = (64, 32), 3
"""Of a k-tile: the first one of which there is room for so many stages."""
PADDING = 16
"""Bytes that a row of a k-tile has more than its elements: so 8 rows begin in different banks."""
ACROSS, COUNT = COLUMNS // OWN, OWN // FRAGMENT
BAND = 8


def wmma(dtype: DType, chip: Chip) -> Kernel:
    """A's rows and B's columns are contiguous and whole chunks of 16 bytes; what lies otherwise is packed so. Copies
    run a few k-tiles ahead, and a step's fragments are loaded while the last one's are multiplied. Results leave
    through shared memory, since fragments are opaque."""
    mma = find_mma(dtype, dtype, FP32, "mma")
    room = {x: chip.shared_bytes // ((ROWS + COLUMNS) * (2 * x + PADDING)) for x in DEPTHS}
    depth = next(x for x in DEPTHS if room[x] >= LEAST_STAGES)
    stages, pitch, chunks, steps = min(MOST_STAGES, room[depth]), 2 * depth + PADDING, depth // 8, depth // FRAGMENT
    with Builder(f"wmma_{dtype}", threads=32 * WARPS, chip=chip) as k:
        x = Product(dtype, FP32, ROWS, COLUMNS)
        x.in_bands(BAND)
        of_a, of_b = (
            k.shared(lines * pitch, stages=stages, alignment=128, name=name)
            for name, lines in zip("AB", (ROWS, COLUMNS), strict=True)
        )
        row, column = (k.warp_index // ACROSS * OWN).named("row"), (k.warp_index % ACROSS * OWN).named("column")
        a = k.register_rows(U32, 2 * COUNT, fragment_registers(mma, "a"), "a_fragments")
        b = k.register_rows(U32, 2 * COUNT, fragment_registers(mma, "b"), "b_fragments")
        d = zeros(COUNT * COUNT, fragment_registers(mma, "d"), name="d_fragments")

        def copy(k_tile: Value, share: int = 0, shares: int = 1) -> None:
            """A share of this thread's copies of a k-tile, which are a group; zeros behind the last one."""
            for tile, lines, operand in (of_a, ROWS, "a"), (of_b, COLUMNS, "b"):
                turns = lines * chunks // (32 * WARPS)
                with k.unroll(share * turns // shares, (share + 1) * turns // shares, name="turn") as turn:
                    number = turn * (32 * WARPS) + k.thread
                    eighth, chunk = number // chunks % 8, (number % chunks).named("chunk")
                    # lines 0, 4, 1, 5 ... of 8: two of 64 bytes, that are written at once, are in different banks
                    line = (number // chunks // 8 * 8 + eighth // 2 + eighth % 2 * 4).named("line")
                    at = chunk * 8
                    if operand == "a":
                        first, inside = x.a.at(ZERO, x.row + line, at), x.row + line < x.m
                    else:
                        first, inside = x.b.at(ZERO, at, x.column + line), x.column + line < x.n
                    nbytes = k.select(inside & (at < x.k - k_tile * depth), Constant(U32, 16), 0)
                    to = tile[k_tile % stages].address + (line * pitch + chunk * 16).to(U32)
                    hw.cp_async_copy(to, first + (k_tile * (2 * depth)).to(U64), nbytes, 16)
            if share == shares - 1:
                hw.cp_async_commit()

        def load(k_tile: Value, step: Value, to: Value) -> None:
            """A step's fragments of a k-tile."""
            with k.unroll(COUNT, name="n") as n:
                at = of_a[k_tile % stages].address + ((row + n * FRAGMENT) * pitch + step * (2 * FRAGMENT)).to(U32)
                hw.wmma_load(a[to * COUNT + n].part(0, a.count), at, pitch // 2, "a", "row", mma)
            with k.unroll(COUNT, name="n") as n:
                at = of_b[k_tile % stages].address + ((column + n * FRAGMENT) * pitch + step * (2 * FRAGMENT)).to(U32)
                hw.wmma_load(b[to * COUNT + n].part(0, b.count), at, pitch // 2, "b", "col", mma)

        def land(copied: int) -> None:
            """All see the first of some k-tiles that are being copied, and are done with the one before, whose place is
            filled next."""
            hw.cp_async_wait(copied - 1)
            hw.sync_threads()

        for stage in range(stages - 1):
            copy(Constant(I32, stage))
        land(stages - 1)
        load(ZERO, ZERO, ZERO)
        with k.range((x.k + (depth - 1)) // depth, name="k_tile") as k_tile, k.unroll(steps, name="step") as step:
            after = step + 1
            with k.when(after == steps):
                land(stages - 1)
            load(k_tile + after // steps, after % steps, after % 2)
            with k.unroll(COUNT, name="down") as down, k.unroll(COUNT, name="right") as right:
                of_d, held = d[down * COUNT + right].part(0, d.count), step % 2 * COUNT
                rows, columns = a[held + down].part(0, a.count), b[held + right].part(0, b.count)
                hw.wmma_mma(of_d, rows, columns, "row", "col", mma)
            for share in range(steps - 1):
                with k.when(step == share):
                    copy(k_tile + (stages - 1), share, steps - 1)
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
