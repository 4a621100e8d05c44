"""Arrays of any library, described without importing that library: dtype, shape, strides, address, device.

torch tensors, numpy arrays, anything with `__cuda_array_interface__` (CuPy, Numba), anything with `__dlpack__`
(JAX, TensorFlow), and `Spec`, a stand-in for an array that does not exist yet. Each has a file with its `Adapter`,
which `access.py` chooses by the array's type.
"""

from gemmsmith.arrays.access import (
    adapter_of,
    address_of,
    arrays_overlap,
    as_numpy,
    cache_key_and_address,
    current_stream,
    describe,
    empty_like_kind,
    is_array,
)
from gemmsmith.arrays.array_info import ArrayInfo, ArrayLike, ArrayT, Operand, Pair, Spec, byte_range, row_major
from gemmsmith.arrays.interleaved_pair import INTERLEAVE_COLUMNS

__all__ = [
    "INTERLEAVE_COLUMNS",
    "ArrayInfo",
    "ArrayLike",
    "ArrayT",
    "Operand",
    "Pair",
    "Spec",
    "adapter_of",
    "address_of",
    "arrays_overlap",
    "as_numpy",
    "byte_range",
    "cache_key_and_address",
    "current_stream",
    "describe",
    "empty_like_kind",
    "is_array",
    "row_major",
]
