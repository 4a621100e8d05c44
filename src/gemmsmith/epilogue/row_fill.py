"""Rows of a grouped GEMM's results that are no group's: zeros; and NaN everywhere if the table is invalid."""

from __future__ import annotations

from collections.abc import Sequence

from gemmsmith import hw
from gemmsmith.collective.global_array import GlobalArray
from gemmsmith.collective.swizzle import VECTOR_BYTES
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT32, UE8M0
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.core.mma import THREADS_PER_WARPGROUP
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.outputs import ScaleStore, Stores
from gemmsmith.epilogue.reductions import Reduction
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import U16, U32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.tile_scheduler.group_table import GroupTable

NAN_BITS = {FP32: 0x7FC00000, BF16: 0x7FC0, FP16: 0x7E00, E4M3: 0x7F, E5M2: 0x7F, INT32: 0x80000000, UE8M0: 0xFF}
"""NaN in each dtype; the least int32, which has none."""


class RowFill:
    """Stores zeros, or NaN, to the rows of no group: the consumer warpgroups of all CTAs do, after their last tiles.

    With the groups along the columns of a transposed product, for "rows" read "columns".

    Kernel arguments: fill_rows, the rows of a result in the whole batch; fill_rows_of_one, those of one matrix;
    fill_columns_, followed by the result's name, its columns.
    """

    def __init__(
        self, spec: KernelSpec, table: GroupTable, stores: Stores | None, scales: Sequence[ScaleStore],
        reductions: Sequence[Reduction],
    ) -> None:  # fmt: skip
        assert spec.grouping
        k, self._grouping, self._table, self._consumers = current_builder(), spec.grouping, table, spec.config.consumers
        self._axis = 0 if spec.grouping.role == "a" else 1
        self._rows = k.parameter("fill_rows", compute=lambda p: p.batch * (p.d.rows, p.d.cols)[self._axis])
        self._rows_of_one = k.parameter("fill_rows_of_one", compute=lambda p: (p.d.rows, p.d.cols)[self._axis])
        self._reductions = reductions
        self._targets: list[tuple[GlobalArray, Value, int]] = []
        """Results, the elements of a row of each, and how many of them a thread stores at once."""
        if stores:
            for name, array in stores.arrays.items():
                is_contiguous = (name in spec.epilogue.column_major) == (self._axis == 1)
                is_vector = name in spec.epilogue.tma_eligible and is_contiguous
                columns = self._columns_of(name, stores.result_dims[name])
                self._targets.append((array, columns, VECTOR_BYTES // array.dtype.bytes if is_vector else 1))
        self._targets += [(x.array, self._scale_columns(x), 1) for x in scales]

    def _columns_of(self, name: str, dims: BroadcastDims) -> Value:
        """Declare the kernel argument for the number of columns of the result `name`, and return it."""

        def columns(p: Problem) -> int:
            return p.n // dims.columns_per_value if self._axis == 0 else p.m // dims.rows_per_value

        return current_builder().parameter(f"fill_columns_{name}", compute=columns)

    def _scale_columns(self, x: ScaleStore) -> Value:
        return current_builder().parameter(f"fill_columns_{x.array.name}", compute=lambda p: ceil_div(p.n, x.columns))

    def store(self, warpgroup: Value) -> None:
        """Store this CTA's share of the rows of no group, of all results. Each consumer warpgroup executes it.

        They follow the last group; there are none if the grouping does not fill rows. If the table is invalid, all rows
        get NaN.
        """
        k, zero_fills = current_builder(), self._grouping.fills_rows
        k.comment("rows of no group")
        is_invalid = self._table.is_invalid
        first = k.select(is_invalid, 0, self._table.end if zero_fills else self._rows)
        threads = THREADS_PER_WARPGROUP * self._consumers
        thread = (warpgroup * THREADS_PER_WARPGROUP + k.thread % THREADS_PER_WARPGROUP).named("consumer_thread")
        with k.range(first + hw.block_index(), self._rows, hw.grid_size(), name="row") as row:
            batch = (row // self._rows_of_one).named("batch")
            row_in_matrix = (row - batch * self._rows_of_one).named("row_in_matrix")
            for array, columns, vector in self._targets:
                # a word of NaNs, as many as fit
                bits = NAN_BITS[array.dtype]
                word = sum(bits << shift for shift in range(0, 32, array.dtype.bits))
                with k.range(0, columns, threads * vector, name="first_column") as first_column:
                    column = (first_column + thread * vector).named("fill_column")
                    index = (row_in_matrix, column) if self._axis == 0 else (column, row_in_matrix)
                    address, in_bounds = array.element_address(batch, *index), column < columns
                    value = k.select(is_invalid, Constant(U32, word), 0)
                    if vector * array.dtype.bytes == VECTOR_BYTES or array.dtype.bits == 32:
                        words = k.registers(U32, max(vector * array.dtype.bytes // 4, 1), "fill")
                        with k.unroll(len(words), name="i") as i:
                            words[i] = value
                        hw.store_global(words, address, in_bounds)
                    else:
                        hw.store_global_u8_or_u16(address, value.to(U16), in_bounds, array.dtype.bits)
        for reduction in self._reductions:
            reduction.fill(self._table, thread, threads)
