"""The transpose of a matrix in 8 bits, each group of rows filled to whole blocks: operands of products along K."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmsmith.arrays import ArrayInfo, as_numpy, empty_like_kind
from gemmsmith.binding import checks
from gemmsmith.core.dtypes import INT32, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import MAX_EXTENT
from gemmsmith.host.output_kernels import OutputKernels, OutputSpec, has_vector_rows, to_canonical_matrix
from gemmsmith.kernels.quantize import QuantizeSpec
from gemmsmith.kernels.quantize_groups import FILLED, BoundQuantizeGroups, filled_rows, quantize_groups
from gemmsmith.lang.launch import Launch, Launches


class QuantizedGroups:
    """The kernel for arrays of one signature."""

    def __init__(
        self, x: ArrayInfo, table: ArrayInfo, grouping: Grouping, backend: str, dtype: DType, scale_dtype: DType,
        output_specs: Callable[[tuple[int, ...]], tuple[OutputSpec, OutputSpec]],
    ) -> None:  # fmt: skip
        """Build the kernel.

        Args:
            x: (m, n).
            table: The table of the groups.
            grouping: What it holds.
            backend: The backend.
            dtype: Dtype of the values.
            scale_dtype: Dtype of the scales.
            output_specs: Returns the specs of the values and the scales of a transposed array.
        """
        name = grouping.table
        checks.check_addressable({"x": x, name: table})
        if table.dtype != INT32 or len(table.shape) != 1 or not checks.is_contiguous(table):
            raise ArgumentError(
                f"{name}: got {table.dtype} of shape {tuple(table.shape)}; use a contiguous int32 array (groups,)"
            )
        self.grouping, self.backend, self.groups = grouping.with_room_for(table.shape[0]), backend, table.shape[0]
        self.dtype, self.scale_dtype = dtype, scale_dtype
        m, n = x.shape
        if filled_rows(m, self.groups) > MAX_EXTENT:
            raise ArgumentError(
                f"x: got {m} rows of {self.groups} groups; use at most {MAX_EXTENT} when they are filled"
            )
        values, scales = output_specs((n, filled_rows(m, self.groups)))
        self.outputs = {
            "columnwise": values,
            "columnwise_scales": scales,
            FILLED.name: OutputSpec((self.groups,), INT32),
        }
        source = to_canonical_matrix(x)
        spec = QuantizeSpec(source.dtype, dtype, scale_dtype, None, "column", vectorizable=has_vector_rows(source))
        arrays = {"source": source, "columnwise": values.matrix, "columnwise_scales": scales.matrix}
        kernel = quantize_groups(spec, self.grouping)
        launch = Launch.from_kernel(kernel, BoundQuantizeGroups(arrays, self.grouping, self.groups))
        self.kernels = OutputKernels(Launches(None, False, (launch,)), self.outputs)

    def run(self, x: Any, table: Any) -> tuple[Any, ...]:
        """Return the values and scales of the transposed array, and the ends of the filled groups."""
        if self.backend == "reference":
            return self._reference(x, table)
        return tuple(self.kernels(self.backend, {"source": x, self.grouping.table: table}, x).values())

    def _reference(self, x: Any, table: Any) -> tuple[Any, ...]:
        from gemmsmith.backends.reference.quantize import quantize_groups as reference

        results = [
            output.view(empty_like_kind(x, output.allocated_shape, output.dtype)) for output in self.outputs.values()
        ]
        reference(
            as_numpy(x, "x"), as_numpy(table, self.grouping.table), self.grouping, self.dtype, self.scale_dtype,
            *map(as_numpy, results),
        )  # fmt: skip
        return tuple(results)
