"""Mistakes in reductions of grouped GEMMs: each is a hazard, or shows in a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, Grouping
from gemmsmith.epilogue.inputs import WarpgroupTile
from gemmsmith.epilogue.partials import GroupPartials
from gemmsmith.epilogue.reductions import Reduction
from gemmsmith.kernels.build import build
from gemmsmith.lang.types import I32, PRED
from gemmsmith.lang.values import Constant

Patch = pytest.MonkeyPatch
COOPERATIVE = Config("cooperative", (128, 64, 64), (1, 1), 3, 2)
CLUSTERS = COOPERATIVE.replace(tile=(64, 64, 64), cluster=(2, 1), consumers=1)
SWAPPED = COOPERATIVE.replace(swap_ab=True)
SM80 = Config("mma_multistage", (64, 64, 64), (1, 1), 3, 2, chip="sm_80")
SIZES = np.array([70, 0, 64, 1, 130], np.int32)


@pytest.fixture(autouse=True)
def _unbroken_afterwards() -> Iterator[None]:
    build.cache_clear()
    yield
    build.cache_clear()


def findings(config: Config, deterministic: bool) -> set[str]:
    """The kinds of hazards, and "wrong" if an element is: sums of integers are exact in any order."""
    rng, total = np.random.default_rng(0), int(SIZES.sum())
    a = rng.integers(-4, 5, (total + 9, 72)).astype(ml_dtypes.bfloat16)
    b = rng.integers(-4, 5, (len(SIZES), 72, 64)).astype(ml_dtypes.bfloat16)
    a[total:] = np.nan
    out = {"columns": np.full((len(SIZES), 64), 0.5, "f"), "rows": np.full(len(a), 0.5, "f")}
    out["both"] = np.full(len(SIZES), 0.5, "f")
    done = gemmsmith.simulate(
        a, b, sizes=SIZES, grouping=Grouping("sizes"), out=out, config=config, deterministic=deterministic,
        epilogue=lambda acc: {"columns": acc.sum(0), "rows": acc.sum(1), "both": acc.sum()},
    )  # fmt: skip
    y = np.split(a[:total].astype(float), SIZES.cumsum()[:-1])
    y = [x @ z.astype(float) for x, z in zip(y, b, strict=True)]
    want = {"columns": np.stack([z.sum(0) for z in y]), "both": np.array([z.sum() for z in y])}
    want["rows"] = np.concatenate([*(z.sum(1) for z in y), np.zeros(9)])
    is_right = all(np.array_equal(out[name], x) for name, x in want.items())
    return {x.kind for x in done.hazards} | (set() if is_right else {"wrong"})


KERNELS = [
    (COOPERATIVE, True), (COOPERATIVE, False), (CLUSTERS, True), (CLUSTERS, False), (SWAPPED, False), (SM80, True),
    (SM80, False),
]  # fmt: skip


@pytest.mark.parametrize(("config", "deterministic"), KERNELS, ids=str)
def test_without_a_mistake_nothing_is_found(config: Config, deterministic: bool) -> None:
    assert findings(config, deterministic) == set()


def rows_of_the_next_group(p: Patch) -> None:
    inside = Constant(PRED, True)
    p.setattr(WarpgroupTile, "row_in_bounds", lambda *given: inside)
    p.setattr(WarpgroupTile, "columns_in_bounds", lambda *given: (inside, inside))


def results_of_the_first_group(p: Patch) -> None:
    p.setattr(Reduction, "batch_of", lambda *given: Constant(I32, 0))


def nothing_beside_the_tiles(p: Patch) -> None:
    p.setattr(Reduction, "fill", lambda *given: None)


def rows_of_no_group_from_the_second_on(p: Patch) -> None:
    fill = Reduction.fill

    def late(self: Any, table: Any, *given: Any) -> None:
        fill(self, SimpleNamespace(is_invalid=table.is_invalid, begin=table.begin, end=table.end + 1), *given)

    p.setattr(Reduction, "fill", late)


def blocks_that_groups_share(p: Patch) -> None:
    block_of = GroupPartials.block_of
    p.setattr(GroupPartials, "block_of", lambda self, tile, row: block_of(self, tile, row) - tile.work.group)


def partials_of_one_block_more(p: Patch) -> None:
    store = GroupPartials.store_ranges

    def of_taller_groups(self: Any, *given: Any) -> None:
        self._rows, rows = self._rows // 2, self._rows
        store(self, *given)
        self._rows = rows

    p.setattr(GroupPartials, "store_ranges", of_taller_groups)


MISTAKES = [
    (rows_of_the_next_group, {"wrong"}, KERNELS), (results_of_the_first_group, {"wrong"}, KERNELS[1:4:2]),
    (nothing_beside_the_tiles, {"wrong", "uninitialized read"}, KERNELS[:3:2]),
    (rows_of_no_group_from_the_second_on, {"uninitialized read"}, KERNELS[:3:2]),
    (blocks_that_groups_share, {"wrong", "race", "uninitialized read"}, KERNELS[:3:2]),
    (partials_of_one_block_more, {"wrong", "race", "uninitialized read"}, KERNELS[:3:2]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "kinds", "config", "deterministic"),
    [(plant, kinds, *kernel) for plant, kinds, kernels in MISTAKES for kernel in kernels],
    ids=lambda x: " ".join(sorted(x)) if isinstance(x, set) else getattr(x, "__name__", str(x)),
)
def test_mistakes(
    plant: Callable[[Patch], None], kinds: set[str], config: Config, deterministic: bool, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    assert findings(config, deterministic) & kinds
