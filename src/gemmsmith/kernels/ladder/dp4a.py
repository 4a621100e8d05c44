"""int8 without tensor cores: dp4a sums four products at once. 4x4 results a thread, of words that lie along K."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import INT32, DType
from gemmsmith.kernels.ladder.product import ZERO, Product, SharedMatrix, zeros
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I32, U32

SIDE, WORDS, OWN = 64, 8, 4
"""Of a CTA's tile; of a row of its k-tiles; of a thread's part of it."""
THREADS, BYTES = (SIDE // OWN) ** 2, 4


def dp4a(dtype: DType, chip: Chip) -> Kernel:
    """A's rows and B's columns are contiguous and whole chunks of 16 bytes; what lies otherwise is packed so. Of words
    that are padded by one a warp's lanes read from different banks."""
    with Builder("dp4a", threads=THREADS, chip=chip) as k:
        x = Product(dtype, INT32, SIDE, SIDE)
        a, b = (SharedMatrix(name, SIDE, WORDS, pitch=WORDS + 1, type=U32) for name in "AB")
        row, column = (k.thread // (SIDE // OWN)).named("row"), (k.thread % (SIDE // OWN)).named("column")
        results = zeros(OWN, OWN, I32)
        with k.range(0, x.k, WORDS * BYTES, name="first") as first:
            with k.unroll(SIDE * WORDS // THREADS, name="turn") as turn:
                line, word = (k.thread + turn * THREADS) // WORDS, k.thread % WORDS
                depth, of_a, of_b = first + word * BYTES, k.registers(U32, 1, "of_a"), k.registers(U32, 1, "of_b")
                m, n, inside = x.row + line, x.column + line, depth < x.k
                hw.load_global(of_a, x.a.at(ZERO, m, depth), inside & (m < x.m))
                hw.load_global(of_b, x.b.at(ZERO, depth, n), inside & (n < x.n))
                a.store(line, word, of_a)
                b.store(line, word, of_b)
            hw.sync_threads()
            with k.unroll(WORDS, name="word") as word:
                of_a, of_b = k.registers(U32, OWN, "of_a"), k.registers(U32, OWN, "of_b")
                with k.unroll(OWN, name="i") as i:  # rows, and columns, 16 apart
                    of_a[i] = a.load(row + i * (SIDE // OWN), word)[0]
                    of_b[i] = b.load(column + i * (SIDE // OWN), word)[0]
                with k.unroll(OWN, name="i") as i, k.unroll(OWN, name="j") as j:
                    results[i][j] = hw.dp4a(of_a[i], of_b[j], results[i][j])
            hw.sync_threads()
        with k.unroll(OWN, name="i") as i, k.unroll(OWN, name="j") as j:
            x.store(x.row + row + i * (SIDE // OWN), x.column + column + j * (SIDE // OWN), results[i][j])
        return k.finish()
