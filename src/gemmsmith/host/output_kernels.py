"""Kernels that compute new arrays from given ones, on a GPU or in the simulator, without a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gemmsmith.arrays import ArrayInfo, address_of, as_numpy, cache_key_and_address, describe, empty_like_kind
from gemmsmith.binding.matrices import to_matrix
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import HazardError
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.problem import TMA_ALIGNMENT_BYTES, Matrix
from gemmsmith.core.scalars import round_up
from gemmsmith.kernels.register_tile import VECTOR_ELEMENTS
from gemmsmith.lang.launch import Launches

T = TypeVar("T")
MAX_CACHED_RUNS = 1024
"""Cache size per kind of kernel. Chosen; not measured."""


@dataclass(frozen=True)
class OutputSpec:
    """An output array to allocate.

    Attributes:
        shape: Shape that the caller sees: up to one batch dimension, rows, columns; or fewer than two dimensions.
        column_major: Whether columns are contiguous in memory, instead of rows.
        padding: The contiguous dimension is padded to a multiple of this number of elements.
    """

    shape: tuple[int, ...]
    dtype: DType
    column_major: bool = False
    padding: int = 1

    @classmethod
    def for_tma(cls, shape: tuple[int, ...], dtype: DType, column_major: bool = False) -> OutputSpec:
        """Return a spec whose contiguous dimension is padded to 16 bytes, so that TMA can load the array."""
        return cls(shape, dtype, column_major, TMA_ALIGNMENT_BYTES // dtype.bytes)

    @cached_property
    def allocated_shape(self) -> tuple[int, ...]:
        """The shape in memory with padding, row-major; that of a column-major array is (columns, rows)."""
        if len(self.shape) < 2:
            return self.shape
        *batch, rows, columns = self.shape
        outer, inner = (columns, rows) if self.column_major else (rows, columns)
        return *batch, outer, round_up(inner, self.padding)

    @property
    def matrix(self) -> Matrix:
        """The array as a kernel's argument, with its strides in elements; without rows and columns, 1 x 1."""
        if len(self.shape) < 2:
            return Matrix(self.dtype, 1, 1, 1, 1)
        *batch, rows, columns = self.shape
        pitch = self.allocated_shape[-1]
        row_stride, col_stride = (1, pitch) if self.column_major else (pitch, 1)
        batch_and_stride = (batch[0], self.allocated_shape[-2] * pitch) if batch else ()
        return Matrix(self.dtype, rows, columns, row_stride, col_stride, *batch_and_stride)

    def view(self, allocated: Any) -> Any:
        """Return the caller's view of an array of `allocated_shape`: padding cut off, transposed if column-major."""
        if len(self.shape) < 2:
            return allocated
        inner = self.shape[-2] if self.column_major else self.shape[-1]
        unpadded = allocated if inner == self.allocated_shape[-1] else allocated[..., :inner]
        return unpadded.swapaxes(-1, -2) if self.column_major else unpadded


class OutputKernels:
    """Kernels that compute new arrays from input arrays of one signature (dtype, shape, strides, alignment).

    Without any launches, the arrays have no elements. `output_specs`: the arrays to allocate, by Pointer name.
    `reference` computes the same on the CPU, from numpy arrays: the inputs, followed by the arrays to write.
    """

    def __init__(
        self, launches: Launches, output_specs: Mapping[str, OutputSpec], reference: Callable[..., None] | None = None
    ) -> None:
        self.launches, self.output_specs, self.reference = launches, output_specs, reference
        self._bound_launches: Any = None

    def __call__(self, backend: str, inputs: Mapping[str, Any], like: Any) -> dict[str, Any]:
        """Allocate the outputs in `like`'s library and on its device, compute them, and return them by name.

        `backend`: "cuda", "sim" or "reference". Raises HazardError with "sim", if the simulator finds hazards.
        """
        allocated = {name: empty_like_kind(like, x.allocated_shape, x.dtype) for name, x in self.output_specs.items()}
        outputs = {name: x.view(allocated[name]) for name, x in self.output_specs.items()}
        if backend == "reference":
            assert self.reference
            self.reference(*map(as_numpy, (*inputs.values(), *outputs.values())))
        elif self.launches.all and backend == "cuda":
            from gemmsmith.backends.cuda.run import BoundLaunches

            self._bound_launches = self._bound_launches or BoundLaunches(self.launches, {}, like, {})
            self._bound_launches.launch(
                {name: address_of(x) for name, x in (*inputs.items(), *allocated.items())}, like, None
            )
        elif self.launches.all:
            from gemmsmith.backends.sim.run import run

            infos = {name: describe(x, name) for name, x in (*inputs.items(), *allocated.items())}
            if hazards := run(self.launches, infos, 0, None).hazards:
                raise HazardError(hazards)
        return outputs


def get_or_create(cache: dict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """Return the cache's entry for the key, created by `make` if there is none.

    A key that is not hashable is not looked up: `make` then raises the error for the option that is not, or its result
    is not cached.
    """
    try:
        if (found := cache.get(key)) is not None:
            return found
    except TypeError:
        return make()
    cache[key] = made = make()
    return made


def describe_no_grad(x: Any, argument: str) -> ArrayInfo:
    """Return the array's info. Raises ArgumentError, naming `argument`, also for a torch tensor that requires grad."""
    cache_key_and_address(x, argument)  # checks requires_grad, as `describe` does not
    return describe(x, argument)


def to_canonical_matrix(x: ArrayInfo) -> Matrix:
    """Return an array as a kernel's argument; strides of length-1 dimensions become ones that TMA accepts."""
    return to_matrix(x, x.shape[0] if len(x.shape) == 3 else 1).canonical()


def has_vector_rows(matrix: Matrix) -> bool:
    """Return whether each row consists of whole vectors of VECTOR_ELEMENTS elements, aligned to 16 bytes.

    Kernels then load vectors; otherwise they load single elements.
    """
    return matrix.is_row_major and matrix.is_tma_compatible and matrix.cols % VECTOR_ELEMENTS == 0
