"""The sort of a router's slots by their experts, on a GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from gemmsmith.arrays import ArrayInfo, cache_key_and_address, describe
from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.core.dtypes import FP32, INT32
from gemmsmith.host.output_kernels import MAX_CACHED_RUNS, OutputKernels, OutputSpec, get_or_create
from gemmsmith.kernels.sort_by_expert import MAX_SLOTS, SLOTS_PER_THREAD, THREADS, BoundSort, SortSpec
from gemmsmith.kernels.sort_by_expert import sort_by_expert as sort_kernel
from gemmsmith.lang.launch import Launch, Launches

_CACHE: dict[Hashable, OutputKernels] = BoundedCache(MAX_CACHED_RUNS)
"""Kernels by the signature of the experts, and by their number."""


def sort_by_expert(experts: Any, weights: Any, count: int, backend: str) -> dict[str, Any]:
    """Return offsets, slot_of_row, token_of_row, row_of_slot and row_weights, as the kernel writes them.

    The arguments are not checked.

    Args:
        experts: (tokens, top_k), contiguous, int32 or int64; 1 to MAX_SLOTS elements.
        weights: (tokens, top_k), contiguous, fp32.
        count: Number of experts, at most MAX_EXPERTS.
        backend: "cuda" or "sim".
    """
    key: Hashable = cache_key_and_address(experts)[0], count
    kernels = get_or_create(_CACHE, key, lambda: _make(describe(experts), count))
    return kernels(backend, {"experts": experts, "weights": weights}, experts)


def _make(experts: ArrayInfo, count: int) -> OutputKernels:
    tokens, top_k = experts.shape
    slots = tokens * top_k
    assert 0 < slots <= MAX_SLOTS
    slots_per_thread = next(x for x in SLOTS_PER_THREAD if slots <= THREADS * x)
    kernel = sort_kernel(SortSpec(count, experts.itemsize, slots_per_thread))
    outputs = {name: OutputSpec((slots,), INT32) for name in ("slot_of_row", "token_of_row", "row_of_slot")}
    outputs |= {"offsets": OutputSpec((count,), INT32), "row_weights": OutputSpec((slots,), FP32)}
    return OutputKernels(Launches(None, False, (Launch.from_kernel(kernel, BoundSort(slots, top_k)),)), outputs)
