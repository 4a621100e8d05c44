"""A stable counting sort of a router's slots by their experts, by one CTA.

Slot t * top_k + i is the i-th expert of token t. Sorted, the slots are the rows of a grouped GEMM. A warp has
consecutive slots. It compares the experts of 32 slots at a time, which gives each slot its rank among the slots of the
same warp and expert, and a count for each expert and warp. An exclusive prefix sum of the counts, in the order (expert,
warp), says at which row the slots of each expert and warp begin.

The same CTA may select the experts before: then they are in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gemmsmith import hw
from gemmsmith.core.scalars import ceil_div
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.types import F32, I32, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value
from gemmsmith.moe.route import RouteSpec, TokenRouter, array

THREADS = 1024
"""Threads of the CTA, the most there are."""
WARPS = THREADS // 32
SLOTS_PER_THREAD = (1, 2, 4, 8)
"""Slots in the registers of a thread, by kernel; with 16, ptxas spills, since 1024 threads have 64 registers each."""
MAX_SLOTS = THREADS * SLOTS_PER_THREAD[-1]
"""Slots that the kernel sorts, at most."""
MAX_EXPERTS = 1024
"""Experts at most: as many as the groups of a grouped GEMM."""
MAX_ROUTED_EXPERTS = 256
"""Experts at most if the kernel selects them, too; with 500 ptxas spills."""
COUNTS_PER_EXPERT = WARPS + 1
"""A count for each warp, and a zero: then the counts of one warp are in different banks of shared memory."""


@dataclass(frozen=True)
class SortSpec:
    """Compile-time parameters of the kernel.

    Attributes:
        experts: Number of experts; slots of others come last.
        index_bytes: Bytes of an expert's index, 4 or 8; signed.
        slots_per_thread: One of SLOTS_PER_THREAD.
        route: How the kernel selects the experts; None: it reads them.
    """

    experts: int
    index_bytes: int
    slots_per_thread: int
    route: RouteSpec | None = None

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        if self.route:
            return f"route_and_sort_{self.route.name}_{THREADS * self.slots_per_thread}"
        return f"sort_by_expert_{self.experts}_i{8 * self.index_bytes}_{THREADS * self.slots_per_thread}"

    @property
    def counts_per_thread(self) -> int:
        """Consecutive counts that a thread adds up: an odd number, so that threads read from different banks."""
        return ceil_div((self.experts + 1) * COUNTS_PER_EXPERT, THREADS) | 1


@dataclass(frozen=True)
class BoundSort:
    """Launch arguments: the numbers of slots and of a token's experts. Arrays are at the Pointers of their names.

    `scale`: factor of the weights, if the kernel selects the experts.
    """

    slots: int
    top_k: int
    scale: float = 1.0


@lru_cache(maxsize=256)
def sort_by_expert(spec: SortSpec) -> Kernel:
    """Build the kernel of a spec.

    Reads experts (slots,) and weights (slots,) fp32. Writes, as int32: offsets (experts,), the end of each expert's
    rows; slot_of_row and token_of_row (slots,), the slot and the token of each sorted row; row_of_slot (slots,), the
    row of each slot; and row_weights (slots,) fp32, the weight of each row. With `spec.route` it reads what the kernel
    `route` does, and writes experts and weights, too.
    """
    with Builder(spec.name, threads=THREADS) as k:
        k.header += [f"gemmsmith: {spec.name}", "sorts the slots of tokens by their experts, stable"]
        source = _RoutedSlots(spec, spec.route) if spec.route else _GivenSlots(spec)
        offsets, row_weights = map(array, ("offsets", "row_weights"))
        slot_of_row, token_of_row, row_of_slot = map(array, ("slot_of_row", "token_of_row", "row_of_slot"))
        slots, top_k = k.parameter("slots", compute=lambda p: p.slots), k.parameter("top_k", compute=lambda p: p.top_k)
        counts = k.shared(4 * THREADS * spec.counts_per_thread, name="counts")
        warp_sums = k.shared(4 * WARPS, name="warp_sums")
        with k.unroll(spec.counts_per_thread, name="i") as i:
            _store(counts, k.thread + i * THREADS, Constant(U32, 0))
        first_slot = (k.warp_index * (32 * spec.slots_per_thread) + k.lane).named("first_slot")
        counter, rank = (k.registers(U32, spec.slots_per_thread, name) for name in ("counter", "rank"))
        weight = k.registers(F32, spec.slots_per_thread, "weight")
        hw.grid_dependency_wait()
        if isinstance(source, _RoutedSlots):
            source.select()
            k.comment("all counts are zero, and all experts are selected")
            hw.sync_threads()
        with k.unroll(spec.slots_per_thread, name="i") as i:
            slot = (first_slot + i * 32).named("slot")
            exists = (slot < slots).named("exists")
            counter[i] = (source.expert(slot, exists) * COUNTS_PER_EXPERT).to(U32) + k.warp_index.to(U32)
            source.load_weight(weight.slice(i, 1), slot, exists)
        if isinstance(source, _GivenSlots):
            k.comment("all counts are zero")
            hw.sync_threads()
        lower_lanes = ((Constant(U32, 1) << k.lane) - 1).named("lower_lanes")
        with k.unroll(spec.slots_per_thread, name="i") as i:
            peers = hw.match_any(counter[i]).named("peers")
            before = hw.population_count(peers & lower_lanes).named("peers_before")
            count = _load(counts, counter[i].to(I32), "count")
            rank[i] = count + before
            k.comment("all lanes have read the count that the first of them changes")
            hw.sync_warp()
            with k.when(before == 0):
                _store(counts, counter[i].to(I32), count + hw.population_count(peers))
            hw.sync_warp()
        k.comment("all warps have counted")
        hw.sync_threads()
        _sum_of_counts_before(counts, warp_sums, spec.counts_per_thread)
        k.comment("all sums are written")
        hw.sync_threads()
        end = _load(counts, k.minimum(k.thread + 1, spec.experts) * COUNTS_PER_EXPERT, "end")
        hw.store_global_word(_element(offsets, k.thread), end, k.thread < spec.experts, "end")
        with k.unroll(spec.slots_per_thread, name="i") as i:
            slot = (first_slot + i * 32).named("slot")
            exists = (slot < slots).named("exists")
            row = (_load(counts, counter[i].to(I32), "begin") + rank[i]).to(I32).named("row")
            hw.store_global_word(_element(slot_of_row, row), slot, exists, "slot")
            hw.store_global_word(_element(token_of_row, row), slot // top_k, exists, "token")
            hw.store_global_word(_element(row_of_slot, slot), row, exists, "row")
            hw.store_global(weight.slice(i, 1), _element(row_weights, row), exists)
        return k.finish()


class _GivenSlots:
    """Experts and weights in global memory."""

    def __init__(self, spec: SortSpec) -> None:
        self._spec, self._experts, self._weights = spec, array("experts"), array("weights")

    def expert(self, slot: Value, exists: Value) -> Value:
        """Return a slot's expert; the number of experts if its index is invalid, or if the slot does not exist."""
        k, words, count = current_builder(), self._spec.index_bytes // 4, self._spec.experts
        index = k.registers(U32, words, "index")
        hw.load_global(index, _element(self._experts, slot, self._spec.index_bytes), exists)
        is_one = exists & (index[0] < count)
        if words == 2:
            is_one = is_one & (index[1] == 0)
        return k.select(is_one, index[0].to(I32), count).named("expert")

    def load_weight(self, weight: RegisterArray, slot: Value, exists: Value) -> None:
        hw.load_global(weight, _element(self._weights, slot), exists)


class _RoutedSlots:
    """Experts and weights that the CTA selects and keeps in shared memory, a token of each warp at a time."""

    def __init__(self, spec: SortSpec, route: RouteSpec) -> None:
        k, self._count, self._top_k = current_builder(), spec.experts, route.top_k
        self._router = TokenRouter(route)
        self._tokens = k.parameter("tokens", compute=lambda p: p.slots // p.top_k)
        self._experts, self._weights = (
            k.shared(4 * THREADS * spec.slots_per_thread, name=name, allow_uninitialized_reads=True)
            for name in ("selected_experts", "selected_weights")
        )

    def select(self) -> None:
        """Select the experts of all tokens."""
        k = current_builder()
        with k.range((self._tokens + WARPS - 1) // WARPS, name="round") as round:
            token = (round * WARPS + k.warp_index).named("token")
            with k.when(token < self._tokens):
                expert, weight = self._router.select(token)
                with k.when(k.lane < self._top_k):
                    slot = (token * self._top_k + k.lane).named("slot")
                    _store(self._experts, slot, expert)
                    _store(self._weights, slot, weight)
                self._router.store(token, expert, weight)

    def expert(self, slot: Value, exists: Value) -> Value:
        """Return a slot's expert; the number of experts if the slot does not exist."""
        expert = _load(self._experts, slot, "selected").to(I32)
        return current_builder().select(exists, expert, self._count).named("expert")

    def load_weight(self, weight: RegisterArray, slot: Value, exists: Value) -> None:
        hw.load_shared(weight, self._weights[0].at(slot, 4).address)


def _sum_of_counts_before(counts: SharedBuffer, warp_sums: SharedBuffer, per_thread: int) -> None:
    """Replace each count by the sum of the counts before it (an exclusive prefix sum). All threads execute it.

    A thread adds up `per_thread` consecutive counts; the sums of the threads before come from its warp's lanes, and
    through `warp_sums`, a word for each warp, from the other warps. Others may read the counts after a barrier.
    """
    k = current_builder()
    first = (k.thread * per_thread).named("first")
    thread_sum = k.var(U32, 0, "thread_sum")
    with k.unroll(per_thread, name="i") as i:
        thread_sum.set(thread_sum.get() + _load(counts, first + i, "count"))
    before = hw.sum_of_lanes_before(thread_sum.get()).named("lanes_before")
    with k.when(k.lane == 31):
        _store(warp_sums, k.warp_index, before + thread_sum.get())
    k.comment("all warps have their sums")
    hw.sync_threads()
    warps_before = hw.sum_of_lanes_before(_load(warp_sums, k.lane, "warp_sum"))
    total = k.var(U32, before + hw.shuffle_index(warps_before, k.warp_index.to(U32)), "total")
    with k.unroll(per_thread, name="i") as i:
        count = _load(counts, first + i, "count")
        _store(counts, first + i, total.get())
        total.set(total.get() + count)


def _element(array: Value, index: Value, nbytes: int = 4) -> Value:
    return array + (index * nbytes).to(U64)


def _store(buffer: SharedBuffer, index: Value, value: Value) -> None:
    hw.store_shared_word(buffer[0].at(index, 4).address, value, "stored")


def _load(buffer: SharedBuffer, index: Value, name: str) -> Value:
    return hw.load_shared_word(buffer[0].at(index, 4).address, U32, name)
