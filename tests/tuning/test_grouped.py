"""What the model says of a tile that a group does not fill: the columns that the kernel multiplies, and the rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import gemmsmith
from gemmsmith import Config, Grouping, Spec
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.mma import select_mma
from gemmsmith.tuning.config_table import ConfigTable
from gemmsmith.tuning.grouped import PARTIAL_TILE_GAIN, UNMULTIPLIED_COLUMN_COST, _with_partial_tiles


def partial(config: Config, rows: int) -> ConfigTable:
    return _with_partial_tiles(ConfigTable.from_configs([config]), rows)


@pytest.mark.parametrize("n", [8, 64, 96, 256])
def test_columns_that_a_swapped_tile_multiplies(n: int) -> None:
    """The fewest of the accumulator's widths that hold the group; the others are only loaded."""
    config = Config("cooperative", (64, n, 64), (1, 1), 3, 1, swap_ab=True)
    accumulator = SimpleNamespace(n=n, mma=select_mma(BF16, BF16, FP32))
    for rows in range(1, n + 1):
        multiplied = next(x for x in Accumulator.widths.fget(accumulator) if x >= rows)
        expected = multiplied + UNMULTIPLIED_COLUMN_COST * (n - multiplied)
        assert partial(config, rows).tile_n == pytest.approx(expected), rows


@pytest.mark.parametrize("along", ["m", "k"])
def test_nothing_is_chosen_that_counts_on_whole_waves(along: str) -> None:
    """Tiles of groups are as many as the table says, which the host does not read."""
    a, b = (Spec((8192, 4096), "bf16"), Spec((8, 4096, 8192), "bf16"))
    if along == "k":
        a, b = Spec((4096, 8192), "bf16", (1, 4096)), Spec((8192, 8192), "bf16")
    sizes = Spec((8,), "int32")
    config = gemmsmith.plan(a, b, sizes=sizes, grouping=Grouping("sizes", along)).config
    assert not config.serpentine
    assert not config.sync_clusters
    assert config.splits == config.cluster_splits == 1


@pytest.mark.parametrize(("rows", "multiplied"), [(1, 64), (64, 64), (65, 128), (128, 128), (300, 320 / 3)])
def test_rows_of_a_tile_are_multiplied_64_at_a_time(rows: int, multiplied: float) -> None:
    table = partial(Config("cooperative", (128, 64, 64), (1, 1), 3, 1), rows)
    assert table.tile_m == pytest.approx(128 - PARTIAL_TILE_GAIN * (128 - multiplied))
    assert table.tile_n == 64
