"""The instruction itself: which lane holds which element of a fragment, and how ldmatrix brings it there."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.mma import find_mma, fragment_element
from gemmsmith.kernels.ladder.product import Product
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, U16, U32

ROWS, COLUMNS, DEPTH, LANES = 16, 8, 16, 32


def mma_naive(dtype: DType, chip: Chip) -> Kernel:
    """One warp, and 16x8 results, a CTA. A's tile lies in shared memory row by row, B's column by column, of 16
    elements of 16 bits each: so both lie along K. ldmatrix takes 8 rows of 16 bytes, whose addresses 8 lanes give, and
    hands each lane a pair of them."""
    mma = find_mma(dtype, dtype, FP32, "mma")
    with Builder(f"mma_naive_{dtype}", threads=LANES, chip=chip) as k:
        x = Product(dtype, FP32, ROWS, COLUMNS)
        a_tile, b_tile = (k.shared(2 * DEPTH * lines, name=name)[0] for name, lines in (("A", ROWS), ("B", COLUMNS)))
        a, b = k.registers(U32, 4, "a_fragment"), k.registers(U32, 2, "b_fragment")
        d = k.registers(F32, 4, "d_fragment")
        with k.unroll(d.count, name="i") as i:
            d[i] = 0.0
        # Lane l gives row l % 8 of matrix l / 8: of A rows 0..7 and 8..15 of the first half of K, then of the second.
        of_a = a_tile.address + (k.lane % 16 * 32 + k.lane // 16 * 16).to(U32)
        of_b = b_tile.address + (k.lane % 8 * 32 + k.lane // 8 % 2 * 16).to(U32)
        with k.range(0, x.k, DEPTH, name="first") as first:
            for tile, lines in ((a_tile, ROWS), (b_tile, COLUMNS)):
                with k.unroll(lines * DEPTH // LANES, name="turn") as turn:
                    element = (turn * LANES + k.lane).named("element")
                    line, depth = element // DEPTH, first + element % DEPTH
                    value = x.load_a(x.row + line, depth) if lines == ROWS else x.load_b(depth, x.column + line)
                    hw.store_shared_16(tile.address + (element * 2).to(U32), hw.pack(value, value, dtype).to(U16))
            hw.sync_warp()
            hw.load_matrix(a, of_a)
            hw.load_matrix(b, of_b)
            hw.mma_sync(d, a, b, mma)
            hw.sync_warp()
        for element_of_lane in range(d.count):
            row, column = fragment_element(k.lane, element_of_lane)
            x.store(x.row + row, x.column + column, d[element_of_lane])
        return k.finish()
