"""A grouped GEMM from outside the package: a tile scheduler that reads where the groups end from device memory.

python examples/own_grouped.py

Rows ends[g - 1] to ends[g] of A are multiplied by matrix g of B, as in a mixture of experts. Groups may end at any row
and may be empty. All but the scheduler is the cooperative design's.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import gemmsmith
from gemmsmith import Config, Design, hw
from gemmsmith.kernels import KernelSpec, OperandCoord, Problem, TileScheduler, WorkRange, WorkTile, record_cooperative
from gemmsmith.lang import I32, INT32, U64, Builder, Constant, Value


class GroupedTileScheduler(TileScheduler):
    """Assigns the tiles of all groups, along N first, to the clusters of a persistent grid."""

    def __init__(self, k: Builder, spec: KernelSpec) -> None:
        super().__init__(spec)
        self.k = k
        self.tile_m, self.tile_n, _ = spec.config.tile
        self.rows, self.columns = self.tile_m * spec.config.cluster[0], self.tile_n * spec.config.cluster[1]
        self.ends = k.pointer("ends", lambda p: p.bound_operands["ends"][1])
        self.groups = k.parameter("groups", compute=lambda p: p.b.batch)

    def grid(self, p: Problem) -> tuple[int, int]:
        """Return the most tiles along M, of which each group may fill one partly, and the tiles along N."""
        tiles_m, tiles_n = super().grid(p)
        return tiles_m + p.b.batch, tiles_n

    def first_work_tile(self) -> WorkTile | None:
        """Return None: `ends` may be written by the kernel before, for which the prologue has not waited yet."""
        return None

    def locate(self, m_tile: Value) -> tuple[Value, Value, Value, Value]:
        """Return the group of a tile along M, its first row, the end of the group, and the number of tiles along M."""
        k, names = self.k, ("group", "m_offset", "m_end", "group_begin", "group_first_tile")
        group, m, m_end, begin, first_tile = (k.var(I32, 0, name) for name in names)
        with k.range(self.groups, name="g") as g:
            end = hw.load_global_word(self.ends + (g * 4).to(U64), True, I32, "group_end")
            end_tile = (first_tile.get() + (end - begin.get() + self.rows - 1) // self.rows).named("group_end_tile")
            is_in_group = ((m_tile >= first_tile.get()) & (m_tile < end_tile)).named("is_in_group")
            row = begin.get() + (m_tile - first_tile.get()) * self.rows + self.position.m * self.tile_m
            for variable, value in (group, g), (m, row), (m_end, end):
                variable.set(k.select(is_in_group, value, variable.get()))
            begin.set(end)
            first_tile.set(end_tile)
        return group.get(), m.get(), m_end.get(), first_tile.get()

    def persistent_range(self) -> WorkRange:
        """Return the range of the loop over this CTA's tiles."""
        *_, tiles_m = self.locate(Constant(I32, 0))
        return WorkRange(self.cluster_idx, (tiles_m * self.tiles_n).named("tiles"), self.cluster_count, self.work_tile)

    def work_tile(self, tile: Value) -> WorkTile:
        """Return a tile, which ends where its group ends."""
        group, m, m_end, _ = self.locate((tile // self.tiles_n).named("m_tile"))
        n = (tile % self.tiles_n * self.columns + self.position.n * self.tile_n).named("n_offset")
        zero = Constant(I32, 0)
        a, b = OperandCoord(m, zero, group_end=m_end), OperandCoord(n, group)
        return WorkTile(a, b, m, n, zero, zero, self.k_tiles)


def grouped(k: Builder, spec: KernelSpec) -> None:
    """Record the kernel."""
    record_cooperative(k, spec, lambda spec: GroupedTileScheduler(k, spec))


GROUPED = gemmsmith.register_design(Design(
    "grouped", grouped, producer_warpgroups=1, max_accumulator_registers={1: 200, 2: 200, 3: 100},
    arrays={"ends": INT32}, shapes="mk,gkn,g->mn", clips_rows=True,
))  # fmt: skip


def main() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((300, 192), (4, 192, 136)))
    ends = np.array([131, 131, 170, 300], np.int32)
    simulation = gemmsmith.simulate(a, b, ends=ends, config=Config("grouped", tile=(128, 128, 64), cluster=(2, 1)))
    groups = zip(np.split(a, ends[:-1]), b, strict=True)
    expected = np.concatenate([x.astype(float) @ y.astype(float) for x, y in groups])
    error = np.abs(simulation.result.astype(float) - expected).max() / np.abs(expected).max()
    print(f"groups that end at {ends}: maximum error {error:.4f} of the largest, {len(simulation.hazards)} hazards")


if __name__ == "__main__":
    main()
