"""pack: a weight as kernels read it, once, so that no product packs it again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from gemmsmith import checks, plans
from gemmsmith.arrays import as_numpy, empty_like_kind
from gemmsmith.core.bounded import Bounded
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import MAX_EXTENT
from gemmsmith.kernels.pack import BoundPacking, Packing
from gemmsmith.lang.launch import Launch, Launches
from gemmsmith.runs import MOST_RUNS, Made, Run, chosen, matrix_of, remembered, without_gradient

OPERANDS = (BF16, FP16, FP32, E4M3, E5M2, INT8)
_KNOWN: dict[Hashable, Run] = Bounded(MOST_RUNS)
"""What has run, by the array's signature."""


def pack(b: Any, *, backend: str = "auto") -> Any:
    """b with contiguous columns, which `gemm` reads as they lie: b itself where it has them, else a copy.

    b: (k, n) or (batch, k, n), of a dtype that `gemm` multiplies, any strides >= 0. The tensor cores read fp8, int8 and
    fp32 only along k (of TF32 one operand across it), so `gemm` packs a row-major b of these in every call, as it does
    any b whose columns (rows, if it is row-major) do not begin at multiples of 16 bytes; of a weight this does it once.
    The copy's columns are padded to 16 bytes. For a (m, k), pack(a.T).T does the same. Arrays, `backend` and errors as
    in `gemm`.
    """
    x = without_gradient(b, "b")
    checks.memory({"b": x})
    if len(x.shape) not in (2, 3):
        raise ArgumentError(f"b: got shape {tuple(x.shape)}; use (k, n) or (batch, k, n)")
    if x.dtype not in OPERANDS:
        raise ArgumentError(f"b: got dtype {x.dtype}; use one of {', '.join(map(str, OPERANDS))}")
    where, rows = chosen(backend, x, "b"), matrix_of(x).T
    if rows.tma_ready and not rows.column_major:
        return b
    if rows.batch > 1 and not rows.batch_stride and 0 not in x.shape:
        raise ArgumentError("b: got one matrix broadcast over a batch; pack that matrix, which gemm broadcasts too")
    made = Made.for_tma(tuple(x.shape), x.dtype, column_major=True)
    if where == "reference":
        copy = made.view(empty_like_kind(b, made.memory, x.dtype))
        as_numpy(copy)[...] = as_numpy(b, "b")
        return copy
    packing = Packing(rows, chip=plans.chip_of(x))
    if packing.total > MAX_EXTENT:
        raise ArgumentError(f"b: got shape {tuple(x.shape)}; a copy has at most {MAX_EXTENT} chunks of 16 bytes")

    def run() -> Run:
        bound = BoundPacking(packing, Pointer("source"), Pointer("packed"))
        launches = (Launch.of(packing.kernel, bound),) if packing.total else ()
        return Run(Launches(None, False, launches), {"packed": made})

    return remembered(_KNOWN, x._replace(address=x.alignment), run)(where, {"source": b}, b)["packed"]
