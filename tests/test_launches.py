"""What a launch's tensor maps and byte counts say of operands smaller than a tile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from gemmsmith import Config, Spec
from gemmsmith.core.dtypes import BF16
from gemmsmith.core.tile import Tile
from gemmsmith.launches import Route, box_rows, part_rows
from gemmsmith.problems import problem_of


@given(rows=some.sampled_from([8, 16, 64, 96, 128, 256]), extent=some.integers(1, 400), log=some.integers(0, 2))
def test_parts_bring_every_row_once(rows: int, extent: int, log: int) -> None:
    parts = 1 << log
    if rows % (8 * parts):
        return
    tile = Tile(BF16, rows, 64, "K")
    part = part_rows(tile, extent, parts)
    box = box_rows(tile, extent, part)
    assert part % 8 == 0 or parts == 1
    assert box <= part <= rows // parts
    brought = [row for p in range(parts) for row in range(p * part, p * part + box)]
    assert len(set(brought)) == len(brought)
    assert set(range(min(extent, rows))) <= set(brought) <= set(range(rows))
    assert part_rows(Tile(BF16, rows, 64, "MN"), extent, parts) == 64 // parts  # depth is zeros outside


def test_a_stage_is_the_bytes_of_its_boxes() -> None:
    config = Config(tile=(64, 64, 64), cluster=(1, 2), consumers=1, raster="n")
    for m, expected in ((1, 2 * 1 + 64), (16, 16 + 64), (20, 2 * 16 + 64), (64, 128), (300, 128)):
        p = problem_of(Spec((m, 512), "bf16"), Spec((512, 4096), "bf16", (1, 512)))
        arguments = Route.of(p, config).launches[0].arguments
        assert arguments["stage_bytes"] == expected * 128
