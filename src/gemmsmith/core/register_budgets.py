"""Thresholds of registers per thread, up to which ptxas was seen not to spill."""

from __future__ import annotations

MAX_ACCUMULATOR_FRACTIONS = {
    "plain": (1, 1, 1),
    "plain, 32 bits stored by threads": (0.9, 0.9, 0.9),
    "functions": (0.8, 0.8, 0.8),
    "several matrices": (0.8, 0.64, 0),
    "several matrices, by threads or of 32 bits": (0.8, 0, 0),
    "matrix loaded by threads": (0.44, 0, 0),
}
"""Fraction of the design's accumulator registers that accumulators, and elements to be quantized, may take, by the
class of the epilogue: if a warpgroup has up to 64 rows, if it has more, and if it has more and K is split or sums are
promoted. Within it candidates do not spill, but for 256x112 with `splits` (20 bytes). Some epilogues of each class are
compiled by benchmarks/fit/register_budgets.py."""
MAX_ACC_REGISTERS_WITH_GATHER = 192
"""Maximum accumulator registers of designs with TMA if rows are gathered, which leaves the consumers fewer registers.
With 32-bit results the next one applies. With more the kernels spilled."""
MAX_ACC_REGISTERS_WITH_SCATTER = 160
"""The maximum if rows are scattered."""
REGISTER_HEAVY_OPS = frozenset({"erf", "gelu", "ndtr", "expm1", "elu"})
"""Functions whose intermediate values would spill with the largest accumulators."""
MAX_EXCHANGED_COLUMNS = 192
"""Maximum tile N of a cluster split if the epilogue needs full rows in registers; wider tiles spill."""
MAX_ODD_TRANSPOSED_COLUMNS = 144
"""Maximum tile N of pingpong's tiles of 128 rows that store 32-bit elements along columns, if it is no multiple of 16:
then epilogue subtiles have full width, and spill."""
MAX_TRANSPOSED_COLUMNS_WITH_OPERANDS = 176
"""The maximum of such tiles, of any width, if the epilogue has operands: with 192 columns and a bias ptxas spills."""
CLUSTER_REDUCTION_REGISTERS = 12
"""Registers reserved by promotion for the cluster reduction if several warpgroups share an SM; with fewer it spills."""
RESERVED_REGISTERS_CLUSTER_SPLIT = 32
"""Registers that promotion must leave for a cluster split, or for an epilogue that needs full rows if K is split
otherwise. This and the next three: with fewer ptxas spills."""
RESERVED_REGISTERS_SPLIT_QUANTIZE = 4
"""Registers that promotion must leave for a quantizing epilogue with split-K or stream-K."""
RESERVED_REGISTERS_SPLIT_QUANTIZE_PASSES = 40
"""The same if promotion takes several passes: 128x208 tiles, which leave 36, spill with blocks of 16 columns."""
RESERVED_REGISTERS_NO_TMA_LOAD = 16
"""Registers that promotion, with the accumulators of all k-tiles in flight, must leave for an epilogue that loads a
matrix without TMA."""
MAX_LIVE_REGISTERS = 200
"""Maximum registers of mma_multistage's accumulators, A's fragments of a k-step, B's of two, and residuals; with more
the kernels spilled."""
MAX_DOUBLE_BUFFERED_REGISTERS = 40
"""Maximum registers of one buffer of sgemm's A and B with double buffering. Those of a tile 256 columns wide do not fit
together with its accumulator."""
SM80_REGISTER_BUDGET = 116
"""Registers for the accumulator and `REGISTERS_PER_SUBTILE_MATRIX` of each matrix of the epilogue in the sm_80 designs.
This and the next two: kernels with more spilled on one chip or another (tests/kernels/test_chosen.py)."""
REGISTERS_PER_SUBTILE_MATRIX = 32
"""Registers for a 64x64 subtile of a matrix."""
MAX_REDUCTIONS = 3
"""Maximum reductions of an epilogue of the sm_80 designs without spills."""
