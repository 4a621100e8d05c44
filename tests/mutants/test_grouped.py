"""Mistakes in grouped GEMMs: each is a hazard, or shows in the result; and every mutant of three grouped kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.mutants.mutate import MAX_HAZARDS, first_kinds, mutants, stopping_after
from tests.mutants.test_mutants import EQUIVALENT, EQUIVALENT_ALONE, EXPECTED

import gemmsmith
from gemmsmith import Config, Grouping, Spec, hw, tile_scheduler
from gemmsmith.backends.sim import GlobalMemory
from gemmsmith.collective import pipeline, ragged_k
from gemmsmith.collective.pipeline import PipelineTmaAsync
from gemmsmith.collective.ragged_k import RaggedK
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.row_fill import RowFill
from gemmsmith.epilogue.store_strategies import ClippedTmaStores, StoreGroup
from gemmsmith.host import launch_sequence
from gemmsmith.kernels import wgmma_mainloop
from gemmsmith.kernels.build import build
from gemmsmith.kernels.wgmma_mainloop import WgmmaMainloop
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Addresses, Launch
from gemmsmith.lang.types import I32, PRED, U64
from gemmsmith.lang.values import Constant, Value
from gemmsmith.tile_scheduler import group_table
from gemmsmith.tile_scheduler.group_table import GroupTable
from gemmsmith.tile_scheduler.grouped import KGroupedTileScheduler, RowGroupedTileScheduler
from gemmsmith.tile_scheduler.tiles import NO_END, WorkRange, WorkTile

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

COOPERATIVE = Config("cooperative", (128, 64, 64), (1, 1), 3, 2)
PINGPONG = Config("pingpong", (64, 64, 64), (1, 1), 3, 2)
SWAPPED = Config("cooperative", (64, 64, 64), (1, 1), 3, 1, swap_ab=True)
MULTISTAGE = Config("mma_multistage", (64, 64, 64), (1, 1), 3, 2, chip="sm_90")
SM80 = MULTISTAGE.replace(chip="sm_80")
TALL = Config("cooperative", (64, 64, 64), (2, 1), 3, 1)
WITHOUT_ROWS = [COOPERATIVE, COOPERATIVE.replace(cluster=(2, 1)), PINGPONG.replace(cluster=(2, 1))]
"""Some tiles have a warpgroup that has no row of the group."""
SKIPPING = [
    SWAPPED.replace(tile=(128, 256, 64), consumers=2),
    COOPERATIVE.replace(tile=(256, 96, 64), stages=4),
]  # fmt: skip
DESIGNS = [COOPERATIVE, PINGPONG, SWAPPED, MULTISTAGE, SM80]
WITH_TMA = [COOPERATIVE, PINGPONG, SWAPPED]
SIZES = (70, 0, 64, 1, 130)
"""Rows of groups along M: less and more than a tile, a whole tile, none and one."""
SLICES = (70, 0, 64, 130)
"""Likewise elements of groups along K."""
UNWRITTEN = 0.5
"""What no sum of products of integers is."""
SEEDS = 3


@pytest.fixture(autouse=True)
def _unbroken_afterwards() -> Iterator[None]:
    build.cache_clear()
    yield
    build.cache_clear()


@dataclass(frozen=True)
class Case:
    """A grouped product whose result is exact, so that one foreign element shows."""

    grouping: Grouping
    sizes: tuple[int, ...] = SIZES
    n: int = 64
    k: int = 72
    m: int = 64
    options: tuple[str, ...] = ()
    infinite: bool = False
    """Whether every other group along K has infinities, in A and in B."""

    def findings(self, config: Config, seed: int = 0) -> set[str]:
        """The kinds of hazards, and "wrong" if an element of the result or beside it is wrong."""
        return self.execute(config, seed)[0]

    def execute(self, config: Config, seed: int, limit: int = MAX_HAZARDS) -> tuple[set[str], str]:
        """The same up to so many hazards, and what the simulator says of other schedules."""
        rng = np.random.default_rng(seed)
        sizes = np.array(self.sizes, np.int32)
        ends, groups = sizes.cumsum(), len(sizes)

        def random(*shape: int) -> Any:
            return rng.integers(-4, 5, shape).astype(ml_dtypes.bfloat16)

        options: dict[str, Any] = {"out_dtype": "fp32", "config": config, "seed": seed, "grouping": self.grouping}
        table = {self.grouping.table: (ends if self.grouping.table == "offsets" else sizes).astype(np.int32)}
        if self.grouping.along == "k":
            total = int(sizes.sum()) + 64
            a, b = random(self.m, total), random(total, self.n)
            a[:, ends[-1] :], b[ends[-1] :] = np.nan, np.inf
            if self.infinite:
                for end, size in list(zip(ends, sizes, strict=True))[2::2]:
                    a[:, end - size] = b[end - size] = np.inf
            a = np.asfortranarray(a)
            out = np.full((groups, self.m, self.n), UNWRITTEN)
            want = np.stack([
                a[:, end - size : end].astype(float) @ b[end - size : end].astype(float)
                for end, size in zip(ends, sizes, strict=True)
            ])  # fmt: skip
        elif self.grouping.is_masked:
            m = max(self.sizes) + 3
            a, b, out = (
                random(groups, m, self.k),
                random(groups, self.k, self.n),
                np.full((groups, m, self.n), UNWRITTEN),
            )
            want = out.copy()
            for group, size in enumerate(sizes):
                a[group, size:] = np.nan
                want[group, :size] = a[group, :size].astype(float) @ b[group].astype(float)
        else:
            m = int(sizes.sum()) + 9
            a, b, out = random(m, self.k), random(groups, self.k, self.n), np.full((m, self.n), UNWRITTEN)
            want = np.zeros(out.shape)
            for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
                want[end - size : end] = a[end - size : end].astype(float) @ b[group].astype(float)
            a[ends[-1] :] = np.nan
        if "bias" in self.options:
            bias = rng.integers(-4, 5, (groups, 1, self.n)).astype(np.float32)
            options |= {"epilogue": lambda acc, bias: acc + bias, "bias": bias}
            for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
                want[end - size : end] += bias[group]
        out = out.astype(np.float32)
        with stopping_after(limit):
            done = gemmsmith.simulate(a, b, out=out, **table, **options)
        found = {x.kind for x in done.hazards}
        is_right = np.array_equal(out, want.astype(np.float32), equal_nan=True)
        return found if is_right else found | {"wrong"}, done.verdict.scope

    def spec(self, config: Config) -> KernelSpec:
        """The spec of the kernel of `findings`."""
        rows, groups = sum(self.sizes), len(self.sizes)
        if self.grouping.along == "k":
            a, b = Spec((self.m, rows + 64), "bf16", (1, self.m)), Spec((rows + 64, self.n), "bf16")
        else:
            a, b = Spec((rows + 9, self.k), "bf16"), Spec((groups, self.k, self.n), "bf16")
        sizes = Spec((groups,), "int32")
        plan = gemmsmith.plan(
            a, b, sizes=sizes, grouping=self.grouping, config=config, out_dtype="fp32", backend="sim"
        )  # fmt: skip
        return plan._planned.spec

    def found_in_any(self, config: Config, seeds: int = SEEDS) -> set[str]:
        """The same of several schedules, up to the first that finds something."""
        for seed in range(seeds):
            found, scope = self.execute(config, seed)
            if found or scope == "every schedule":
                return found
        return set()


ROWS, MASKED, ALONG_K = (
    Case(Grouping("sizes")),
    Case(Grouping("counts"), (70, 0, 64, 1)),
    Case(Grouping("sizes", "k"), SLICES),
)


@pytest.mark.parametrize("config", DESIGNS, ids=str)
def test_without_a_mistake_nothing_is_found(config: Config) -> None:
    cases = [ROWS, MASKED, replace(ROWS, options=("bias",))]
    for case in cases if config.design == "pingpong" else [*cases, ALONG_K]:
        assert case.findings(config) == set()


# -- the ends of groups ----------------------------------------------------------------------------------


def ends_off_by(change: int) -> Plant:
    """A group's end, as the stores see it, or along K the zeroing."""

    def plant(p: Patch) -> None:
        of_rows, of_k = RowGroupedTileScheduler.work_tile, KGroupedTileScheduler.work_tile

        def off(self: Any, tile: Value) -> WorkTile:
            work = of_rows(self, tile)
            if work.a.is_clipped:
                return replace(work, a=replace(work.a, group_end=work.a.group_end + change))
            return replace(work, b=replace(work.b, group_end=work.b.group_end + change))

        def off_along_k(self: Any, tile: Value) -> WorkTile:
            work = of_k(self, tile)
            return replace(work, group_k_extent=work.group_k_extent + change)

        p.setattr(RowGroupedTileScheduler, "work_tile", off)
        p.setattr(KGroupedTileScheduler, "work_tile", off_along_k)

    return plant


@pytest.mark.parametrize("config", DESIGNS, ids=str)
@pytest.mark.parametrize("change", [-1, 1])
def test_ends_off_by_one(config: Config, change: int, monkeypatch: Patch) -> None:
    ends_off_by(change)(monkeypatch)
    assert ROWS.found_in_any(config)
    assert MASKED.found_in_any(config)
    if config.design != "pingpong":
        assert ALONG_K.found_in_any(config)


def tma_stores_that_pass_the_end(p: Patch) -> None:
    of = ClippedTmaStores._is_before_end
    p.setattr(
        ClippedTmaStores,
        "_is_before_end",
        lambda self, coord, whole: Constant(PRED, True) if whole else of(self, coord, whole),
    )


def tma_stores_of_tiles_that_begin_inside(p: Patch) -> None:
    """As if only subtiles wholly past the end needed care."""
    of = ClippedTmaStores._is_before_end
    p.setattr(ClippedTmaStores, "_is_before_end", lambda self, coord, whole: of(self, coord, whole=False))


def stores_that_no_end_clips(p: Patch) -> None:
    of_rows = RowGroupedTileScheduler.work_tile

    def endless(self: Any, tile: Value) -> WorkTile:
        work = of_rows(self, tile)
        return replace(work, a=replace(work.a, group_end=NO_END), b=replace(work.b, group_end=NO_END))

    p.setattr(RowGroupedTileScheduler, "work_tile", endless)


@pytest.mark.parametrize("plant", [tma_stores_that_pass_the_end, tma_stores_of_tiles_that_begin_inside])
@pytest.mark.parametrize("config", [*WITH_TMA, MULTISTAGE], ids=str)
def test_tma_stores_past_the_end(config: Config, plant: Plant, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    for case in (ROWS, MASKED):
        assert case.found_in_any(config)


def test_thread_stores_past_the_end(monkeypatch: Patch) -> None:
    stores_that_no_end_clips(monkeypatch)
    for case in (ROWS, MASKED):
        assert case.found_in_any(SM80)


# -- the table -------------------------------------------------------------------------------------------


class TilesOfCtas(RowGroupedTileScheduler):
    """Counts the tiles of CTAs, so that the CTAs of a cluster may belong to two groups."""

    def __init__(self, spec: Any) -> None:
        super().__init__(replace(spec, config=spec.config.replace(cluster=(1, 1))))
        self.spec, self.position = spec, self._position()
        self.cluster_idx = (hw.block_index() // spec.cluster_size).named("cluster_idx")
        self.cluster_count = (hw.grid_size() // spec.cluster_size).named("cluster_count")

    def persistent_range(self) -> WorkRange:
        size = self.spec.config.cluster[self._axis]
        tiles = (self._table.tiles + (size - 1)) // size * self._other_tiles
        return WorkRange(self.cluster_idx, tiles.named("tiles"), self.cluster_count, self.work_tile)

    def work_tile(self, tile: Value) -> WorkTile:
        size, spec, position = self.spec.config.cluster[self._axis], self.spec, self.position
        along = tile // self._other_tiles * size + (position.m, position.n)[self._axis]
        self.spec = replace(spec, config=spec.config.replace(cluster=(1, 1)))
        self.position = replace(position, m=0, n=0)
        work = super().work_tile(along * self._other_tiles + tile % self._other_tiles)
        self.spec, self.position = spec, position
        return work


@pytest.mark.parametrize("config", [TALL, TALL.replace(tile=(64, 64, 64), cluster=(1, 2), swap_ab=True)], ids=str)
def test_a_cluster_with_tiles_of_two_groups(config: Config, monkeypatch: Patch) -> None:
    """Each CTA multicasts its half of its own group's B to the other one."""
    assert ROWS.findings(config) == set()
    build.cache_clear()
    monkeypatch.setattr(tile_scheduler, "RowGroupedTileScheduler", TilesOfCtas)
    assert "wrong" in ROWS.found_in_any(config)


def a_tile_of_every_empty_group(p: Patch) -> None:
    tiles = GroupTable._tiles
    p.setattr(GroupTable, "_tiles", lambda self, size: current_builder().maximum(tiles(self, size), 1))


@pytest.mark.parametrize("config", DESIGNS, ids=str)
def test_empty_groups_that_are_not_skipped(config: Config, monkeypatch: Patch) -> None:
    """Those behind the last one, for which the kernel has room, have no operands. Of others nothing is stored, and TMA
    reads nothing out of bounds: without operands of the epilogue they only cost time."""
    a_tile_of_every_empty_group(monkeypatch)
    with_bias = replace(ROWS, options=("bias",))
    assert "out of bounds" in with_bias.findings(config)
    if config in WITH_TMA:
        assert ROWS.findings(config) == set()
    else:
        assert "out of bounds" in ROWS.findings(config)


def _without(module: Any, *names: str) -> Any:
    """`module`, in which some functions do nothing."""
    return SimpleNamespace(**{**vars(module), **{name: lambda *given: None for name in names}})


@pytest.mark.parametrize("config", [COOPERATIVE, PINGPONG, SWAPPED, MULTISTAGE], ids=str)
@pytest.mark.parametrize("case", [ROWS, ALONG_K], ids=["m", "k"])
def test_a_table_read_before_the_kernel_before_has_ended(config: Config, case: Case, monkeypatch: Patch) -> None:
    if case is ALONG_K and config is PINGPONG:
        return
    monkeypatch.setattr(group_table, "hw", _without(hw, "grid_dependency_wait"))
    assert "race" in case.findings(config)


def writes_to_the_table(p: Patch) -> None:
    """Of the first CTA, once its tiles are stored, to a table that may be written."""
    fill, add = RowFill.store, GlobalMemory.add_buffer
    p.setattr(GlobalMemory, "add_buffer", lambda *given, **options: add(*given, **{**options, "writable": True}))

    def store(self: Any, warpgroup: Value) -> None:
        k = current_builder()
        with k.when((hw.block_index() == 0) & (k.lane == 0) & (k.warp_index % 4 == 0)):
            hw.store_global_word(self._table._table, Constant(I32, 1), Constant(PRED, True), "size")
        fill(self, warpgroup)

    p.setattr(RowFill, "store", store)


def tables_read_again(p: Patch) -> None:
    """Where each role needs a group's begin, as if the sums were in global memory."""
    begin = GroupTable.begin

    def read_again(self: Any, group: Value) -> Value:
        k = current_builder()
        address = self._table + (k.minimum(group, 0) * 4).to(U64)
        again = hw.load_global_word(address, Constant(PRED, True), I32, "size_again")
        return begin(self, group) + k.minimum(k.maximum(again, 0), 0)

    p.setattr(GroupTable, "begin", read_again)


@pytest.mark.parametrize("config", DESIGNS, ids=str)
@pytest.mark.parametrize("plants", [(writes_to_the_table, tables_read_again), (writes_to_the_table,)])
def test_a_table_that_changes_between_two_reads(config: Config, plants: tuple[Plant, ...], monkeypatch: Patch) -> None:
    for plant in plants:
        plant(monkeypatch)
    assert "race" in ROWS.found_in_any(config)


def without_the_wait_for_the_table(p: Patch) -> None:
    for scheduler in (RowGroupedTileScheduler, KGroupedTileScheduler):
        p.setattr(scheduler, "finish_prologue", lambda self: None)


@pytest.mark.parametrize("config", [*DESIGNS, TALL], ids=str)
@pytest.mark.parametrize("case", [ROWS, ALONG_K], ids=["m", "k"])
def test_a_table_read_before_it_is_in_shared_memory(config: Config, case: Case, monkeypatch: Patch) -> None:
    """Where a prologue of one CTA has barriers to initialize, or maps to prefetch, another barrier comes before."""
    if case is ALONG_K and config is PINGPONG:
        return
    without_the_wait_for_the_table(monkeypatch)
    if config not in (SM80, TALL):
        assert case.findings(config) == set()
        build.cache_clear()
        monkeypatch.setattr(pipeline, "hw", _without(hw, "sync_threads"))
    assert case.found_in_any(config) & {"race", "uninitialized read"}


# -- rows behind the last group --------------------------------------------------------------------------


@pytest.mark.parametrize("config", DESIGNS, ids=str)
@pytest.mark.parametrize("change", [-130, -1, 1])
def test_row_fills_that_begin_elsewhere(config: Config, change: int, monkeypatch: Patch) -> None:
    end = GroupTable.end.fget
    assert end
    monkeypatch.setattr(GroupTable, "end", property(lambda self: end(self) + change))
    found = ROWS.found_in_any(config)
    assert found >= {"wrong", "unwritten result"} if change > 0 else found & {"wrong", "race"}


@pytest.mark.parametrize("config", DESIGNS, ids=str)
def test_row_fills_of_a_result_whose_rows_are_not_all_a_groups(config: Config, monkeypatch: Patch) -> None:
    """As if (G, M, N) ended where the last group does."""
    init = RowFill.__init__

    def of_rows(self: Any, spec: Any, *given: Any) -> None:
        init(self, spec, *given)
        self._grouping = replace(self._grouping, table="sizes", along="m")

    monkeypatch.setattr(RowFill, "__init__", of_rows)
    assert MASKED.found_in_any(config)


# -- along K ---------------------------------------------------------------------------------------------


def only_one_operand_is_zeroed(which: int) -> Plant:
    init, zero = RaggedK.__init__, RaggedK.zero_past_end

    def plant(p: Patch) -> None:
        def made(self: Any, spec: Any) -> None:
            init(self, spec)
            self._operand_tiles = self._operand_tiles[which : which + 1]

        p.setattr(RaggedK, "__init__", made)
        p.setattr(
            RaggedK,
            "zero_past_end",
            lambda self, tile, k_tile, stage: zero(self, tile, k_tile, stage[which : which + 1]),
        )  # fmt: skip

    return plant


def nothing_is_zeroed(p: Patch) -> None:
    p.setattr(RaggedK, "zero_past_end", lambda self, tile, k_tile, stage: None)


def zeros_without_a_proxy_fence(p: Patch) -> None:
    p.setattr(ragged_k, "hw", _without(hw, "fence_proxy_async"))


def zeros_without_a_barrier(p: Patch) -> None:
    p.setattr(ragged_k, "hw", _without(hw, "barrier_sync"))


def a_fence_after_the_barrier(p: Patch) -> None:
    def fence_after(*given: Any) -> None:
        hw.barrier_sync(*given)
        hw.fence_proxy_async()

    p.setattr(
        ragged_k, "hw", SimpleNamespace(**{**vars(_without(hw, "fence_proxy_async")), "barrier_sync": fence_after})
    )


def zeros_of_the_k_tile_before(p: Patch) -> None:
    zero = RaggedK.zero_past_end
    p.setattr(RaggedK, "zero_past_end", lambda self, tile, k_tile, stage: zero(self, tile, k_tile - 1, stage))


ZEROING = [
    (only_one_operand_is_zeroed(0), "wrong"), (only_one_operand_is_zeroed(1), "wrong"), (nothing_is_zeroed, "wrong"),
    (zeros_of_the_k_tile_before, "wrong"), (zeros_without_a_proxy_fence, "missing proxy fence"),
    (a_fence_after_the_barrier, "missing proxy fence"), (zeros_without_a_barrier, "race"),
]  # fmt: skip


@pytest.mark.parametrize("config", [COOPERATIVE, SWAPPED, TALL], ids=str)
@pytest.mark.parametrize(("plant", "kind"), ZEROING, ids=lambda x: getattr(x, "__name__", None))
def test_the_rest_of_a_k_tile(config: Config, plant: Plant, kind: str, monkeypatch: Patch) -> None:
    """Here a neighbor has infinities: zero times these is NaN."""
    plant(monkeypatch)
    assert kind in INFINITE.found_in_any(config)


@pytest.mark.parametrize("cluster", [(2, 1), (2, 2)])
@pytest.mark.parametrize("scope", ["cluster", "cta"])
def test_zeros_come_before_multicasts_of_peers(cluster: tuple[int, int], scope: str, monkeypatch: Patch) -> None:
    """Consumers write their stage; another CTA's TMA writes it next, once it is released to that CTA. What wgmma has
    read since is in order; the columns beside the tile, of whole boxes, are not read."""
    case, release = replace(ALONG_K, sizes=(65,) * 12, m=128, n=72), PipelineTmaAsync.consumer_release
    config = TALL.replace(cluster=cluster, tile=(64, 48, 64))
    if scope == "cta":
        monkeypatch.setattr(PipelineTmaAsync, "consumer_release", lambda self, stage, scope=None: release(self, stage))
    found = [case.findings(config, seed) for seed in range(1, 3)]
    assert all("race" in x for x in found) if scope == "cta" else found == [set(), set()]


@pytest.mark.parametrize("config", [MULTISTAGE, SM80], ids=str)
def test_copies_of_the_next_group(config: Config, monkeypatch: Patch) -> None:
    of_k = KGroupedTileScheduler.work_tile
    monkeypatch.setattr(
        KGroupedTileScheduler, "work_tile", lambda self, tile: replace(of_k(self, tile), group_k_extent=NO_END)
    )
    assert "wrong" in INFINITE.found_in_any(config)


class OfTwoGroups(KGroupedTileScheduler):
    """The CTAs of a cluster take the same tile of two groups."""

    def _work_tile(self, *given: Any, **others: Any) -> WorkTile:
        work = super()._work_tile(*given, **others)
        return replace(work, batch=((work.batch + self.position.cta_rank) % 2).named("group_of_cta"))


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2)])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_slices_of_different_lengths_in_a_cluster(cluster: tuple[int, int], seed: int, monkeypatch: Patch) -> None:
    """DeepGEMM, pull request 429: two CTAs that multicast to one another sum 6 and 4 k-tiles. One waits for ever."""
    case = replace(ALONG_K, sizes=(384, 256), m=64 * cluster[0], n=64 * cluster[1])
    config = TALL.replace(cluster=cluster)
    assert case.findings(config, seed) == set()
    build.cache_clear()
    monkeypatch.setattr(tile_scheduler, "KGroupedTileScheduler", OfTwoGroups)
    assert "deadlock" in case.findings(config, seed)


# -- warpgroups without rows, and subtiles that are skipped ----------------------------------------------


def stages_that_are_not_released(p: Patch) -> None:
    multiply = WgmmaMainloop._mma

    def multiply_rows(self: Any, tile: WorkTile, rows: int, *given: Any) -> None:
        if rows:
            multiply(self, tile, rows, *given)

    p.setattr(WgmmaMainloop, "_mma", multiply_rows)


def stages_released_by_a_lane_alone(p: Patch) -> None:
    p.setattr(wgmma_mainloop, "hw", _without(hw, "sync_warp"))


@pytest.mark.parametrize(
    "config", [COOPERATIVE, COOPERATIVE.replace(cluster=(2, 1)), PINGPONG.replace(cluster=(2, 1))], ids=str
)
def test_a_warpgroup_without_rows_that_releases_nothing(config: Config, monkeypatch: Patch) -> None:
    stages_that_are_not_released(monkeypatch)
    assert "deadlock" in LONG.found_in_any(config)


@pytest.mark.parametrize(
    "config", [COOPERATIVE, COOPERATIVE.replace(cluster=(2, 1)), PINGPONG.replace(cluster=(2, 1))], ids=str
)
def test_a_warpgroup_without_rows_whose_lanes_do_not_meet(config: Config, monkeypatch: Patch) -> None:
    stages_released_by_a_lane_alone(monkeypatch)
    assert LONG.found_in_any(config)


INFINITE = replace(ALONG_K, infinite=True)
LONG = replace(ROWS, k=64 * 9)


def skipped_subtiles_without_bulk_groups(p: Patch) -> None:
    def when_inside(self: Any, group: StoreGroup) -> Any:
        if not group.first_subtile:
            return nullcontext()
        return current_builder().when(self._is_before_end(group.first_subtile, whole=False))

    p.setattr(ClippedTmaStores, "when_inside", when_inside)


@pytest.mark.parametrize("config", SKIPPING, ids=str)
def test_skipped_subtiles_without_bulk_groups(config: Config, monkeypatch: Patch) -> None:
    """A buffer is acquired by counting the bulk groups since: with fewer, its store may not have read it."""
    case = replace(ROWS, sizes=(64,) * 8, n=192)
    assert case.found_in_any(config) == set()
    build.cache_clear()
    skipped_subtiles_without_bulk_groups(monkeypatch)
    assert {"race", "missing wait_group"} & case.found_in_any(config, 8)


# -- every mutant of three kernels -----------------------------------------------------------------------


ANOTHER = "in a cluster of one CTA the prologue has two barriers after the table is read, of which each suffices"
EQUIVALENT_IN_GROUPS = {
    ("delete", "sync_threads"): ANOTHER,
    ("move earlier (past if)", "sync_threads"): ANOTHER,
    ("move earlier (past grid_dependency_wait)", "sync_threads"): ANOTHER,
    ("delete", "bulk_commit"): "of skipped subtiles, where one buffer is acquired by a wait for all groups",
    (
        "arrive before the wait",
        "mbarrier_arrive",
    ): "of a warpgroup without rows, whose lanes have met since they waited for the stage that is released",
    **{
        ("late start of", name): "along K nothing is filled, but results of an invalid table"
        for name in ("row", "first_column")
    },
}
EXPECTED_IN_GROUPS = EXPECTED | {
    ("delete", "sync_warp"): {"race", "phase aliasing"},
    ("move", "mbarrier_wait"): {"phase aliasing"},
}

SMALL = {
    "rows": (replace(ROWS, sizes=(70, 0, 128, 130, 128, 256), n=192, k=320), COOPERATIVE),
    "columns": (replace(ROWS, sizes=(5, 0, 12, 32, 20, 96, 30, 64), n=320, k=320), SWAPPED.replace(tile=(64, 32, 64))),
    "k": (replace(ALONG_K, sizes=(70, 0, 330), m=256, n=192), COOPERATIVE),
}
"""Kernels of which each CTA has several tiles, whole ones too, and more k-tiles than stages."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_mutant_is_found(name: str, monkeypatch: Patch) -> None:
    """As the right kind, where it is a hazard."""
    (case, config), unreported, equivalents = SMALL[name], [], 0
    changed: list[Kernel] = []
    monkeypatch.setattr(launch_sequence, "build", lambda spec: changed[-1])
    resolve = Launch.resolve

    def resolved(self: Launch, addresses: Addresses, *others: Any) -> dict[str, Any]:
        arguments = resolve(self, addresses, *others)
        if "stage_bytes" in arguments:
            arguments |= {f"stage_bytes{change:+d}": arguments["stage_bytes"] + change for change in (-16, 16)}
        return arguments

    monkeypatch.setattr(Launch, "resolve", resolved)
    for mutant in mutants(case.spec(config)):
        changed.append(mutant.kernel)
        what = "move" if mutant.what.startswith("move") else mutant.what
        expected, key = EXPECTED_IN_GROUPS.get((what, mutant.target), set()), (mutant.what, mutant.target)
        kinds = first_kinds(lambda *run: case.execute(config, *run), expected, SEEDS)
        if not kinds and (key in EQUIVALENT or key in EQUIVALENT_ALONE or key in EQUIVALENT_IN_GROUPS):
            equivalents += 1
            continue
        if not kinds & (expected | {"wrong"}):
            unreported.append(f"{mutant}: reported as {kinds}")
    assert not unreported, "\n".join(unreported)
    assert len(changed) > 60
    assert equivalents <= 14
