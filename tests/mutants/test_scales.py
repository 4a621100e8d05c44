"""Mistakes in promotion and in block scales: each is a hazard, or shows in the digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.scales import digits, ones

import gemmsmith
from gemmsmith import Config
from gemmsmith.collective import block_scales, pipeline, staged_scales
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.block_scales import ColumnBlocks, WarpgroupScales
from gemmsmith.collective.promotion import Promotion
from gemmsmith.collective.staged_scales import KMajorScaleReader, LaneCopies, TmaKMajorScales, TmaScales
from gemmsmith.collective.tma_mainloop import TmaMainloop
from gemmsmith.kernels.build import build
from gemmsmith.kernels.promoted_mainloop import PromotedMainloop
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import PRED
from gemmsmith.lang.values import Constant

CONFIG = Config(tile=(128, 104, 128), cluster=(1, 1), stages=4, consumers=2)
M, N, K = 200, 230, 700
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _unbroken_afterwards() -> Iterator[None]:
    build.cache_clear()
    yield
    build.cache_clear()


def _shifted(p: Patch, blocks: int, sides: str) -> None:
    start = LaneCopies.__init__

    def shifted(self: Any, scales: Any, tile: Any) -> None:
        start(self, scales, tile)
        if scales.role in sides:
            self._next_address.set(self._next_address.get() + self._step * blocks)

    p.setattr(LaneCopies, "__init__", shifted)


def the_next_blocks_scales(p: Patch) -> None:
    _shifted(p, 1, "ab")


def the_next_blocks_scales_of_a(p: Patch) -> None:
    _shifted(p, 1, "a")


def the_next_blocks_scales_of_b(p: Patch) -> None:
    _shifted(p, 1, "b")


def the_scales_of_the_block_before(p: Patch) -> None:
    _shifted(p, -1, "ab")


def a_partial_sum_that_is_not_cleared(p: Patch) -> None:
    multiply = Accumulator.multiply
    p.setattr(Accumulator, "multiply", lambda self, a, b, accumulate: multiply(self, a, b, True))


def a_total_that_is_not_cleared(p: Patch) -> None:
    p.setattr(Accumulator, "clear", lambda self: None)


def a_wait_that_leaves_one_more_group_running(p: Patch) -> None:
    wait = Promotion.wait
    p.setattr(Promotion, "wait", lambda self, slot, pending: wait(self, slot, pending + 1))


def promotion_before_the_wait(p: Patch) -> None:
    p.setattr(Promotion, "wait", lambda self, slot, pending: None)


def release_before_the_wait(p: Patch) -> None:
    add, wait = Promotion.add, Promotion.wait

    def waits(self: Any, slot: int, subtile: Any) -> None:
        wait(self, slot, 0)
        add(self, slot, subtile)

    p.setattr(Promotion, "wait", lambda self, slot, pending: None)
    p.setattr(Promotion, "add", waits)


def scales_read_after_the_release(p: Patch) -> None:
    add, read = Promotion.add, WarpgroupScales.read

    def reads(self: Any, slot: int, subtile: Any) -> None:
        self.scales[slot] = self.scales[slot]()
        add(self, slot, subtile)

    p.setattr(WarpgroupScales, "read", lambda self, stage: lambda: read(self, stage))
    p.setattr(Promotion, "add", reads)


def scales_read_before_the_stage_is_full(p: Patch) -> None:
    mma, read, wait = PromotedMainloop._step, WarpgroupScales.read, TmaMainloop.consumer_wait
    tiles, early = list[Any](), list[Any]()

    def waits(self: Any, state: Any, token: Any) -> None:
        early.append(read(tiles[-1], state.index))
        wait(self, state, token)

    p.setattr(PromotedMainloop, "_step", lambda self, count: (tiles.append(self._scales), mma(self, count)))
    p.setattr(WarpgroupScales, "read", lambda self, stage: early.pop(0))
    p.setattr(TmaMainloop, "consumer_wait", waits)


def a_stage_taken_for_full(p: Patch) -> None:
    p.setattr(pipeline.PipelineTmaAsync, "consumer_test_wait", lambda self, state: Constant(PRED, True))


def a_release_by_one_lane_before_others_have_read(p: Patch) -> None:
    p.setattr(block_scales.hw, "sync_warp", lambda: None)


def an_arrival_before_the_copies_have_landed(p: Patch) -> None:
    p.setattr(pipeline.hw, "cp_async_arrive", pipeline.hw.mbarrier_arrive)


def copies_that_a_full_stage_does_not_count(p: Patch) -> None:
    """As bytes that expect_tx leaves out."""

    def uncounted(self: Any, state: Any, lanes: int, **kinds: bool) -> None:
        pipeline.hw.cp_async_arrive(self._full[state.index])

    p.setattr(pipeline.PipelineTmaAsync, "non_tma_producer_commit", uncounted)


def copies_that_never_arrive(p: Patch) -> None:
    p.setattr(pipeline.hw, "cp_async_arrive", lambda barrier: None)


def copies_into_stages_that_are_not_free(p: Patch) -> None:
    p.setattr(pipeline.PipelineTmaAsync, "non_tma_producer_acquire", lambda self, state: None)


def the_scales_of_a_and_b_swapped(p: Patch) -> None:
    of = staged_scales.operand_getter
    others = {"scale_a": "scale_b", "scale_b": "scale_a"}
    p.setattr(staged_scales, "operand_getter", lambda name: of(others.get(name, name)))


def the_border_8_columns_off(p: Patch) -> None:
    at_column = ColumnBlocks.at_column
    p.setattr(
        ColumnBlocks,
        "at_column",
        lambda self, scales, first, column, n8: at_column(self, scales, first, column + 8, n8),
    )


def the_rows_of_the_other_half(p: Patch) -> None:
    p.setattr(block_scales, "FRAGMENT_HALF_ROWS", -block_scales.FRAGMENT_HALF_ROWS)


def the_rows_of_the_tile_for_every_warpgroup(p: Patch) -> None:
    start = WarpgroupScales.__init__
    p.setattr(WarpgroupScales, "__init__", lambda self, scales, row: start(self, scales, row - row))


def rows_beyond_the_last(p: Patch) -> None:
    row = LaneCopies._row
    p.setattr(LaneCopies, "_row", lambda self, first: (first, row(self, first)[1] | (first < 1000)))


def bytes_that_a_full_stage_does_not_count(p: Patch) -> None:
    p.setattr(TmaScales, "stage_bytes", lambda self, problem: 0)


def the_next_k_tiles_scales(p: Patch) -> None:
    load = TmaScales.load

    def shifted(self: Any, *given: Any) -> None:
        *others, k_block, write = given
        load(self, *others, k_block + 1, write)

    p.setattr(TmaScales, "load", shifted)


def the_next_stage(p: Patch) -> None:
    load = TmaScales.load

    def shifted(self: Any, stage: Any, *given: Any) -> None:
        load(self, (stage + 1) % CONFIG.stages, *given)

    p.setattr(TmaScales, "load", shifted)


def bytes_that_a_full_box_does_not_count(p: Patch) -> None:
    init = TmaKMajorScales.__init__

    def made(self: Any, *given: Any) -> None:
        init(self, *given)
        self.pipeline.transaction_bytes -= 16

    p.setattr(TmaKMajorScales, "__init__", made)


def the_next_box(p: Patch) -> None:
    copy = staged_scales.hw.tma_load

    def shifted(map: Any, x: Any, *given: Any, **options: Any) -> None:
        copy(map, x + staged_scales.SCALES_PER_TMA_BOX, *given, **options)

    p.setattr(staged_scales.hw, "tma_load", shifted)


def the_k_tile_beside_in_a_box(p: Patch) -> None:
    wait = KMajorScaleReader.wait

    def beside(self: Any, tile: Any) -> None:
        wait(self, tile)
        self._k_block = self._k_block + 1

    p.setattr(KMajorScaleReader, "wait", beside)


def a_box_that_is_read_before_it_is_full(p: Patch) -> None:
    def number(self: Any, tile: Any) -> None:
        self._k_block = tile.k_tile_index(self._k_tile.get())

    p.setattr(KMajorScaleReader, "wait", number)


def a_box_that_is_handed_back_early(p: Patch) -> None:
    """Before its last k-tile is read; the next one is then taken for it."""
    edge = staged_scales._is_box_boundary
    p.setattr(staged_scales, "_is_box_boundary", lambda tile, number, at: edge(tile, number, max(at - 1, 0)))


def a_box_that_is_released_before_it_is_read(p: Patch) -> None:
    read, release = KMajorScaleReader.read, pipeline.PipelineTmaAsync.consumer_release

    def late(self: Any, *given: Any) -> Any:
        release(self._pipeline, self._read_state)
        return read(self, *given)

    p.setattr(KMajorScaleReader, "read", late)


def a_box_that_is_released_with_its_tile_only(p: Patch) -> None:
    edge = staged_scales._is_box_boundary
    p.setattr(
        staged_scales, "_is_box_boundary", lambda tile, number, at: edge(tile, number, at) if at == 0 else number < 0
    )


def a_box_that_may_not_be_free(p: Patch) -> None:
    acquire = pipeline.PipelineTmaAsync._acquire

    def acquired(self: Any, state: Any) -> None:
        if not self.name.startswith("scale"):
            acquire(self, state)

    p.setattr(pipeline.PipelineTmaAsync, "_acquire", acquired)


def a_tile_that_begins_in_the_last_ones_box(p: Patch) -> None:
    """In the producer alone: it loads no box for a tile's first k-tile as such."""
    edge, when, of_producer = staged_scales._is_box_boundary, Builder.when, list[Any]()

    def boundary(tile: Any, number: Any, at: int) -> Any:
        found = edge(tile, number, at)
        if at == 0:
            of_producer.append(found)
        return found

    def only_boundaries(k: Builder, condition: Any) -> Any:
        *_, last = getattr(condition, "operands", (None,))
        return when(k, last if any(last is x for x in of_producer) else condition)

    p.setattr(staged_scales, "_is_box_boundary", boundary)
    p.setattr(Builder, "when", only_boundaries)


def a_producer_that_begins_with_the_first_box_again(p: Patch) -> None:
    start = TmaKMajorScales.producer_start_state
    p.setattr(TmaKMajorScales, "producer_start_state", lambda self, k_tiles: start(self, k_tiles * 0))


def early_k_tiles_beyond_the_first_box(p: Patch) -> None:
    p.setattr(TmaKMajorScales, "limit_prologue", lambda self, k_tiles, tile: k_tiles)


COARSE, EACH = (1, 128), (1, 1)
MUTANTS = [
    (the_next_blocks_scales, COARSE), (the_next_blocks_scales, EACH), (the_scales_of_the_block_before, COARSE),
    (the_next_blocks_scales_of_a, COARSE), (the_next_blocks_scales_of_b, COARSE), (the_next_blocks_scales_of_b, EACH),
    (a_partial_sum_that_is_not_cleared, COARSE), (a_total_that_is_not_cleared, COARSE),
    (promotion_before_the_wait, COARSE), (a_wait_that_leaves_one_more_group_running, COARSE),
    (release_before_the_wait, COARSE), (scales_read_after_the_release, COARSE), (scales_read_after_the_release, EACH),
    (scales_read_before_the_stage_is_full, COARSE), (a_stage_taken_for_full, COARSE),
    (copies_that_a_full_stage_does_not_count, COARSE),
    (copies_that_never_arrive, EACH), (a_release_by_one_lane_before_others_have_read, COARSE),
    (an_arrival_before_the_copies_have_landed, COARSE), (copies_into_stages_that_are_not_free, COARSE),
    (the_scales_of_a_and_b_swapped, COARSE), (the_scales_of_a_and_b_swapped, (128, 128)),
    (the_border_8_columns_off, COARSE), (the_rows_of_the_other_half, COARSE),
    (the_rows_of_the_tile_for_every_warpgroup, COARSE), (rows_beyond_the_last, COARSE), (rows_beyond_the_last, EACH),
]  # fmt: skip


BY_TMA = {"turned": True, "pad": 16}
"""The layout of scales that TMA brings: those of A contiguous along M."""
MUTANTS_BY_TMA = [
    bytes_that_a_full_stage_does_not_count, the_next_k_tiles_scales, the_next_stage, scales_read_after_the_release,
    scales_read_before_the_stage_is_full, a_release_by_one_lane_before_others_have_read, the_scales_of_a_and_b_swapped,
]  # fmt: skip


IN_BOXES = {"pad": 16}
"""The layout of those that TMA brings in boxes: those of A contiguous along K."""
MUTANTS_IN_BOXES = [
    bytes_that_a_full_box_does_not_count, the_next_box, the_k_tile_beside_in_a_box, a_box_that_is_handed_back_early,
    a_box_that_is_read_before_it_is_full, a_box_that_is_released_before_it_is_read,
    a_box_that_is_released_with_its_tile_only,
    a_box_that_may_not_be_free, a_tile_that_begins_in_the_last_ones_box,
    a_producer_that_begins_with_the_first_box_again, early_k_tiles_beyond_the_first_box,
    a_release_by_one_lane_before_others_have_read, the_scales_of_a_and_b_swapped,
]  # fmt: skip
IN_BOXES_CONFIGS = [
    Config(tile=(64, 64, 128), cluster=(1, 1), stages=3, consumers=1, serpentine=True),
    Config(tile=(64, 64, 128), cluster=(1, 1), stages=3, consumers=1, splits=0),
    Config(tile=(64, 64, 128), cluster=(1, 1), stages=4, consumers=1, cluster_splits=2),
]


def is_wrong(recipe: tuple[int, int], seed: int, config: Config = CONFIG, **layout: Any) -> bool:
    """Whether something is reported, or a digit differs."""
    (scale_a, scale_b), want = digits(M, N, K, recipe, **layout)
    out = np.full((M, N), np.nan, np.float32)
    done = gemmsmith.simulate(*ones(M, N, K), scale_a=scale_a, scale_b=scale_b, out=out, config=config, seed=seed)
    return bool(done.hazards) or not np.array_equal(out, want)


@pytest.mark.slow
@pytest.mark.parametrize(("mutate", "recipe"), MUTANTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_every_mistake_is_found(mutate: Any, recipe: tuple[int, int], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    assert any(is_wrong(recipe, seed) for seed in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTANTS_BY_TMA)
def test_mistakes_with_scales_by_tma_are_found(mutate: Any, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    assert any(is_wrong(COARSE, seed, **BY_TMA) for seed in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTANTS_IN_BOXES)
def test_mistakes_with_scales_in_boxes_are_found(mutate: Any, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    assert any(is_wrong(COARSE, 0, config, **IN_BOXES) for config in IN_BOXES_CONFIGS)


@pytest.mark.slow
@pytest.mark.parametrize("config", IN_BOXES_CONFIGS)
def test_boxes_that_are_right(config: Config, rng: np.random.Generator) -> None:
    assert not is_wrong(COARSE, int(rng.integers(1 << 30)), config, **IN_BOXES)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, BY_TMA, IN_BOXES])
@pytest.mark.parametrize("recipe", [COARSE, EACH, (128, 128)])
def test_without_one_nothing_is_wrong(
    recipe: tuple[int, int], layout: dict[str, Any], rng: np.random.Generator
) -> None:
    assert not is_wrong(recipe, int(rng.integers(1 << 30)), **layout)
