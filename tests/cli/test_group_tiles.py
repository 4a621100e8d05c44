"""The tiles that `gemmsmith raster --groups` draws are those of the kernel's scheduler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gemmsmith import Config, Grouping, Spec, hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.cli.raster import GroupTile, group_tiles, plot_group_tiles
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.make_spec import make_spec
from gemmsmith.core.problem import BoundProblem
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U32, U64
from gemmsmith.tile_scheduler import make_tile_scheduler

TILE = Config(tile=(64, 48, 64), consumers=1, raster_group=2)
SIZES = (100, 0, 257, 64, 1)


def scheduled(config: Config, m: int, n: int) -> list[tuple[int, ...]]:
    """(group, row, first row after it, column) of each tile of the only cluster's first CTA, in the kernel."""
    a, b, table = Spec((m, 64), "bf16"), Spec((len(SIZES), 64, n), "bf16"), Spec((len(SIZES),), "int32")
    binding = bind(Request(a, b, operands={"sizes": table}, grouping=Grouping("sizes")))
    binding = binding.transposed() if config.swap_ab else binding
    spec = make_spec(binding.problem, config)
    assert spec.grouping
    with Builder("walk", threads=128, cluster=(spec.cluster_size, 1, 1)) as k:
        scheduler, out, count = make_tile_scheduler(spec), k.pointer("out"), k.var(I32, 0, "count")
        scheduler.finish_prologue()
        with scheduler.tile_loop() as tile:
            found = k.registers(U32, 4, "found")
            coord, column = (tile.b, tile.m) if config.swap_ab else (tile.a, tile.n)
            for i, value in enumerate((tile.group, coord.mn, coord.group_end, column)):
                found[i] = value.to(U32)
            is_first = (k.thread == 0) & (hw.block_index() == 0)
            hw.store_global(found, out + (count.get() * 16).to(U64), is_first)
            count.set(count.get() + 1)
        kernel = k.finish()
    found, memory = np.full((200, 4), 9999, np.uint32), GlobalMemory()
    address = memory.add_buffer(np.array(SIZES, np.int32), "sizes")
    others = {"sizes": (binding.problem.a, address)}  # of the table, the kernel needs the address only
    bound = BoundProblem.from_problem(binding.problem, Pointer("a"), Pointer("b"), {}, others)  # type: ignore[arg-type]
    arguments = {**kernel.arguments(bound), "out": memory.add_buffer(found, "out")}
    assert simulate(kernel, spec.cluster_size, arguments, memory, seed=0).hazards == []
    return [tuple(x) for x in found.tolist() if x[0] != 9999]


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("raster", ["m", "n"])
def test_tiles_are_the_schedulers(swap_ab: bool, cluster: tuple[int, int], raster: str) -> None:
    config = TILE.replace(cluster=cluster, raster=raster, swap_ab=swap_ab)
    drawn = list(group_tiles(SIZES, 200, config))
    found = scheduled(config, sum(SIZES) + 10, 200)
    assert [(x.group, x.row, x.column) for x in drawn] == [(group, row, column) for group, row, _, column in found]
    along = cluster[1 if swap_ab else 0]
    if along == 1:  # the CTA's tile is as high as the cluster's
        ends = np.minimum([end for _, _, end, _ in found], [x.row + config.tile[swap_ab] for x in drawn])
        assert [x.row + x.rows for x in drawn] == ends.tolist()
    covered = np.zeros((sum(SIZES), 200), int)
    for x in drawn:
        covered[x.row : x.row + x.rows, x.column : x.column + x.columns] += 1
    assert (covered == 1).all()


def test_a_picture_of_many_groups(tmp_path: Path) -> None:
    plot_group_tiles([3, 0] * 100, 300, 64, TILE, tmp_path / "groups.png")
    assert (tmp_path / "groups.png").stat().st_size
    assert next(group_tiles([0, 3], 64, TILE)) == GroupTile(1, 0, 0, 3, 0, 48)
