"""Sums of the rows of each token, on a GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from gemmsmith.arrays import cache_key_and_address, describe
from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.host.output_kernels import MAX_CACHED_RUNS, OutputKernels, OutputSpec, get_or_create
from gemmsmith.kernels.register_tile import VECTOR_ELEMENTS
from gemmsmith.lang.launch import Launch, Launches
from gemmsmith.moe.slot_sum import BoundSlotSum, SlotSumSpec
from gemmsmith.moe.slot_sum import slot_sum as slot_sum_kernel

_CACHE: dict[Hashable, OutputKernels] = BoundedCache(MAX_CACHED_RUNS)
"""Kernels by the signature of the slots, the rows of a token, and the names of the other arrays."""


def slot_sum(slots: Any, rows: int, addend: Any, backend: str, row_of_slot: Any = None) -> Any:
    """Return the sums (tokens, n) of each token's rows, plus the addend, added in fp32 and rounded once.

    The arguments are not checked.

    Args:
        slots: (tokens * rows, n), contiguous, bf16 or fp16, of at least one token; n is a multiple of 8, and there are
            at most 2^33 elements.
        rows: Rows of a token, at most MAX_ROWS.
        addend: (tokens, n), contiguous, of the same dtype; or None. All are aligned to 16 bytes.
        backend: "cuda" or "sim".
        row_of_slot: (tokens * rows,), int32: which row of `slots` each slot's is; None: they are in order.
    """
    others = {name: x for name, x in (("addend", addend), ("row_of_slot", row_of_slot)) if x is not None}
    key: Hashable = cache_key_and_address(slots)[0], rows, tuple(others)
    kernels = get_or_create(_CACHE, key, lambda: _make(slots, rows, addend is not None, row_of_slot is not None))
    return kernels(backend, {"slots": slots, **others}, slots)["sums"]


def _make(slots: Any, rows: int, has_addend: bool, gathers: bool) -> OutputKernels:
    info = describe(slots)
    tokens, columns = info.shape[0] // rows, info.shape[1]
    bound = BoundSlotSum(tokens, columns // VECTOR_ELEMENTS)
    launch = Launch.from_kernel(slot_sum_kernel(SlotSumSpec(info.dtype, rows, has_addend, gathers)), bound)
    outputs = {"sums": OutputSpec((tokens, columns), info.dtype)}
    return OutputKernels(Launches(None, False, (launch,), is_dependent=True), outputs)
