"""pack(): repacks a weight once into the layout that the kernels read directly."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

import numpy as np

from gemmsmith.arrays import ArrayT
from gemmsmith.backends import Backend, chip_of, resolve_backend
from gemmsmith.binding import checks
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import MAX_EXTENT
from gemmsmith.host.output_kernels import (
    MAX_CACHED_RUNS,
    OutputKernels,
    OutputSpec,
    describe_no_grad,
    get_or_create,
    to_canonical_matrix,
)
from gemmsmith.kernels.pack import BoundPacking, Packing
from gemmsmith.lang.launch import Launch, Launches

OPERAND_DTYPES = (BF16, FP16, FP32, E4M3, E5M2, INT8)
"""Dtypes that `pack` accepts."""
_CACHE: dict[Hashable, OutputKernels] = BoundedCache(MAX_CACHED_RUNS)
"""Kernels by the array's description, with the alignment instead of the address."""


def pack(b: ArrayT, *, backend: Backend = "auto") -> ArrayT:
    """Return b in column-major layout with 16-byte aligned columns: b itself if it already is, else a copy.

    `gemm` copies ("packs") some operands in every call; pack a weight once to avoid that. It copies a row-major b of
    fp8, int8 or fp32, since the tensor cores read these dtypes K-major only (one TF32 operand may be MN-major). And it
    copies any b whose columns (rows, if it is row-major) do not start at multiples of 16 bytes. For a, use pack(a.T).T.

    Args:
        b: (k, n) or (batch, k, n), of a dtype that `gemm` multiplies, with any strides >= 0.
        backend: As in `gemm`.

    Returns:
        (k, n) or (batch, k, n), column-major, with columns padded to 16 bytes.

    Raises:
        ArgumentError: If b has a wrong dtype, shape or device.
        DeviceError: If the GPU or driver does not support it.
        HazardError: With backend="sim", if the simulator finds hazards.
    """
    x = describe_no_grad(b, "b")
    checks.check_addressable({"b": x})
    if len(x.shape) not in (2, 3):
        raise ArgumentError(f"b: got shape {tuple(x.shape)}; use (k, n) or (batch, k, n)")
    if x.dtype not in OPERAND_DTYPES:
        raise ArgumentError(f"b: got dtype {x.dtype}; use one of {', '.join(map(str, OPERAND_DTYPES))}")
    backend, matrix = resolve_backend(backend, x, "b"), to_canonical_matrix(x).T
    if matrix.is_tma_compatible and not matrix.is_column_major:
        return b
    if matrix.batch > 1 and not matrix.batch_stride and 0 not in x.shape:
        raise ArgumentError("b: got one matrix broadcast over a batch; pack that matrix, which gemm broadcasts too")
    packing = Packing(matrix, chip=chip_of(x))
    if packing.total_vectors > MAX_EXTENT:
        raise ArgumentError(f"b: got shape {tuple(x.shape)}; a copy has at most {MAX_EXTENT} vectors of 16 bytes")

    def make_kernels() -> OutputKernels:
        """Return the kernels that copy arrays like x; an array without elements needs no launch."""
        bound = BoundPacking(packing, Pointer("source"), Pointer("packed"))
        launches = (Launch.from_kernel(packing.make_kernel(), bound),) if packing.total_vectors else ()
        packed = OutputSpec.for_tma(tuple(x.shape), x.dtype, column_major=True)
        return OutputKernels(Launches(None, False, launches), {"packed": packed}, lambda x, y: np.copyto(y, x))

    kernels = get_or_create(_CACHE, x._replace(address=x.alignment), make_kernels)
    return cast("ArrayT", kernels(backend, {"source": b}, b)["packed"])
