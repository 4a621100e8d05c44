"""The instruction itself: which lane holds which element of a fragment, and how ldmatrix brings it there."""

from __future__ import annotations

from itertools import product

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.mma import find_mma, fragment_element
from gemmsmith.kernels.ladder.product import Product, zeros
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import U16, U32

SIDE, OWN, THREADS, DEPTH = 64, 32, 128, 16
"""Rows and columns of a CTA's tile, and of a warp's part of it; threads; depth of a k-tile."""
ROWS, COLUMNS, PITCH = 16, 8, 2 * DEPTH
"""Of an instruction's results; bytes of a row of a k-tile."""
DOWN, ACROSS = range(OWN // ROWS), range(OWN // COLUMNS)


def mma_naive(dtype: DType, chip: Chip) -> Kernel:
    """Four warps, of 32x32 results each, a CTA. A's tile lies in shared memory row by row, B's column by column, of 16
    elements of 16 bits each: so both lie along K. ldmatrix takes 8 rows of 16 bytes, whose addresses 8 lanes give, and
    hands each lane a pair of them."""
    mma = find_mma(dtype, dtype, FP32, "mma")
    with Builder(f"mma_naive_{dtype}", threads=THREADS, chip=chip) as k:
        x = Product(dtype, FP32, SIDE, SIDE)
        a_tile, b_tile = (k.shared(SIDE * PITCH, name=name)[0] for name in "AB")
        a = [k.registers(U32, 4, "a_fragment") for _ in DOWN]
        b = [k.registers(U32, 2, "b_fragment") for _ in ACROSS]
        d = [zeros(len(ACROSS), 4, name="d_fragments").rows for _ in DOWN]
        first_row, first_column = k.warp_index // 2 * OWN, k.warp_index % 2 * OWN
        # Lane l gives row l % 8 of matrix l / 8: of A rows 0..7 and 8..15 of the first half of K, then of the second.
        of_a = a_tile.address + ((first_row + k.lane % 16) * PITCH + k.lane // 16 * 16).to(U32)
        of_b = b_tile.address + ((first_column + k.lane % 8) * PITCH + k.lane // 8 % 2 * 16).to(U32)
        with k.range(0, x.k, DEPTH, name="first") as first:
            for tile in a_tile, b_tile:
                with k.unroll(SIDE * DEPTH // THREADS, name="turn") as turn:
                    element = (turn * THREADS + k.thread).named("element")
                    line, depth = element // DEPTH, first + element % DEPTH
                    value = x.load_a(x.row + line, depth) if tile is a_tile else x.load_b(depth, x.column + line)
                    hw.store_shared_16(tile.address + (element * 2).to(U32), hw.pack(value, value, dtype).to(U16))
            hw.sync_threads()
            for i in DOWN:
                hw.load_matrix(a[i], of_a + i * ROWS * PITCH)
            for j in ACROSS:
                hw.load_matrix(b[j], of_b + j * COLUMNS * PITCH)
            for i, j in product(DOWN, ACROSS):
                hw.mma_sync(d[i][j], a[i], b[j], mma)
            hw.sync_threads()
        for i, j, e in product(DOWN, ACROSS, range(4)):
            row, column = fragment_element(k.lane, e)
            row, column = first_row + i * ROWS + row, first_column + j * COLUMNS + column
            x.store(x.row + row, x.column + column, d[i][j][e])
        return k.finish()
