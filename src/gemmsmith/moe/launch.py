"""The launches of these kernels, on a GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from gemmsmith.arrays import ArrayInfo, cache_key_and_address, describe
from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.dtypes import FP32, INT32
from gemmsmith.host.output_kernels import MAX_CACHED_RUNS, OutputKernels, OutputSpec, get_or_create
from gemmsmith.kernels.register_tile import VECTOR_ELEMENTS
from gemmsmith.lang.launch import Launch, Launches
from gemmsmith.moe.route import BoundRoute, RouteSpec
from gemmsmith.moe.route import route as route_kernel
from gemmsmith.moe.slot_sum import BoundSlotSum, SlotSumSpec
from gemmsmith.moe.slot_sum import slot_sum as slot_sum_kernel
from gemmsmith.moe.sort_by_expert import (
    MAX_ROUTED_EXPERTS,
    MAX_SLOTS,
    SLOTS_PER_THREAD,
    THREADS,
    BoundSort,
    SortSpec,
)
from gemmsmith.moe.sort_by_expert import sort_by_expert as sort_kernel

MAX_ROUTED_TOKENS = 8
"""Tokens at most whose experts the CTA that sorts them selects, one in each warp; of more, a kernel before it does. On
an H100, 128 experts, top 8: 1 token 2.7 us, with two kernels 3.4; 16 tokens 3.5 and 3.5, 32 tokens 4.7 and 3.7."""
_CACHE: dict[Hashable, OutputKernels] = BoundedCache(MAX_CACHED_RUNS)
"""Kernels by their name, the signature of the first array, and what else they depend on."""


def sort_by_expert(experts: Any, weights: Any, count: int, backend: str) -> dict[str, Any]:
    """Return offsets, slot_of_row, token_of_row, row_of_slot and row_weights, by name (see moe/sort_by_expert.py).

    The arguments are not checked: `experts` (tokens, top_k), contiguous, int32 or int64, of 1 to MAX_SLOTS elements;
    `weights` likewise, fp32; `count`, of experts, at most MAX_EXPERTS; `backend`: "cuda" or "sim".
    """
    key: Hashable = "sort", cache_key_and_address(experts)[0], count
    kernels = get_or_create(_CACHE, key, lambda: _make_sort(describe(experts), count))
    return kernels(backend, {"experts": experts, "weights": weights}, experts)


def route(logits: Any, bias: Any, spec: RouteSpec, scale: float, backend: str) -> dict[str, Any]:
    """Return experts and weights, by name, as the kernel of moe/route.py writes them.

    If there are at most MAX_SLOTS slots (an expert of a token each), also what `sort_by_expert` returns. The arguments
    are not checked: `logits` (tokens, experts), contiguous, of spec.dtype, of at least one token; `bias` (experts,),
    contiguous, fp32, or None with softmax; `scale`, a factor of the weights; `backend`: "cuda" or "sim".
    """
    key: Hashable = "route", cache_key_and_address(logits)[0], spec, scale
    kernels = get_or_create(_CACHE, key, lambda: _make_route(describe(logits).shape[0], spec, scale))
    return kernels(backend, {"logits": logits} if bias is None else {"logits": logits, "bias": bias}, logits)


def _make_sort(experts: ArrayInfo, count: int) -> OutputKernels:
    """Return the kernel that sorts the slots of `experts` (tokens, top_k), of `count` experts."""
    tokens, top_k = experts.shape
    launch, outputs = _sort_launch(tokens, top_k, count, experts.itemsize)
    return OutputKernels(Launches(None, False, (launch,), is_dependent=True), outputs)


def _make_route(tokens: int, spec: RouteSpec, scale: float) -> OutputKernels:
    """Return the kernels that select the experts of so many tokens and, if there are few enough slots, sort these.

    For up to MAX_ROUTED_TOKENS tokens one kernel does both.
    """
    outputs = {name: OutputSpec((tokens, spec.top_k), x) for name, x in (("experts", INT32), ("weights", FP32))}
    is_one_kernel = tokens <= MAX_ROUTED_TOKENS and spec.experts <= MAX_ROUTED_EXPERTS
    launches = [] if is_one_kernel else [Launch.from_kernel(route_kernel(spec), BoundRoute(tokens, scale))]
    if tokens * spec.top_k <= MAX_SLOTS:
        route_ = spec if is_one_kernel else None
        launch, sorted_ = _sort_launch(tokens, spec.top_k, spec.experts, INT32.bytes, route_, scale)
        launches.append(launch)
        outputs |= sorted_
    return OutputKernels(Launches(None, False, tuple(launches), is_dependent=True), outputs)


def _sort_launch(
    tokens: int, top_k: int, count: int, index_bytes: int, route: RouteSpec | None = None, scale: float = 1.0
) -> tuple[Launch, dict[str, OutputSpec]]:
    """Return the launch of the sort, and the specs of the arrays that it writes, by name.

    `count`: of experts. `index_bytes`: of an expert's index. `route`: how the kernel selects the experts itself, with
    weights times `scale`; None: it reads them.
    """
    slots = tokens * top_k
    assert 0 < slots <= MAX_SLOTS
    slots_per_thread = next(x for x in SLOTS_PER_THREAD if slots <= THREADS * x)
    kernel = sort_kernel(SortSpec(count, index_bytes, slots_per_thread, route))
    outputs = {name: OutputSpec((slots,), INT32) for name in ("slot_of_row", "token_of_row", "row_of_slot")}
    outputs |= {"offsets": OutputSpec((count,), INT32), "row_weights": OutputSpec((slots,), FP32)}
    return Launch.from_kernel(kernel, BoundSort(slots, top_k, scale)), outputs


def slot_sum(slots: Any, rows: int, addend: Any, backend: str, row_of_slot: Any = None) -> Any:
    """Return the sums (tokens, n) of each token's rows, plus the addend, added in fp32 and rounded once.

    The arguments are not checked.

    Args:
        slots: (tokens * rows, n), contiguous, bf16 or fp16, of at least one token; n is a multiple of 8, and there are
            at most 2^33 elements.
        rows: Rows of a token, at most MAX_ROWS.
        addend: (tokens, n), contiguous, of the same dtype; or None. All are aligned to 16 bytes.
        backend: "cuda" or "sim".
        row_of_slot: (tokens * rows,), int32: entry i is the row of `slots` that belongs to slot i, where the slots of
            token t are t * rows to t * rows + rows - 1; None: row i.
    """
    others = {name: x for name, x in (("addend", addend), ("row_of_slot", row_of_slot)) if x is not None}
    key: Hashable = "sum", cache_key_and_address(slots)[0], rows, tuple(others)
    kernels = get_or_create(_CACHE, key, lambda: _make_sum(slots, rows, addend is not None, row_of_slot is not None))
    return kernels(backend, {"slots": slots, **others}, slots)["sums"]


def _make_sum(slots: Any, rows: int, has_addend: bool, gathers: bool) -> OutputKernels:
    """Return the kernel that sums each token's rows, for arrays of the shape and dtype of `slots`."""
    info = describe(slots)
    tokens, columns = info.shape[0] // rows, info.shape[1]
    bound = BoundSlotSum(tokens, columns // VECTOR_ELEMENTS)
    launch = Launch.from_kernel(slot_sum_kernel(SlotSumSpec(info.dtype, rows, has_addend, gathers)), bound)
    outputs = {"sums": OutputSpec((tokens, columns), info.dtype)}
    return OutputKernels(Launches(None, False, (launch,), is_dependent=True), outputs)
