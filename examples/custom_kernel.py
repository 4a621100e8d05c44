"""A custom kernel in gemmsmith's kernel language: a transpose through shared memory.

python examples/custom_kernel.py

The kernel is printed as CUDA C++ and simulated on the CPU with every access checked. Without its barrier the simulator
reports a race. On arrays of a GPU `launch` runs it there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gemmsmith import HazardError, hw, launch
from gemmsmith.lang import F32, U32, U64, Builder, Kernel

TILE = 32
"""Rows and columns of a tile, in elements."""
ROWS = 8
"""Rows of a tile that a CTA's 256 threads copy at a time."""
PITCH = TILE + 1
"""Elements from one row to the next in shared memory: the elements of a column are then in 32 different banks."""


class Transpose(NamedTuple):
    """The problem: the shape of `source`, of which `target` (columns, rows) is the transpose, in fp32."""

    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE) * -(-self.columns // TILE)


def transpose(*, barrier: bool = True) -> Kernel:
    """Build the kernel: one tile per CTA, read by rows and written by columns. Without `barrier` it has a race."""
    with Builder("transpose", threads=TILE * ROWS) as k:
        k.header += ["target (columns, rows) = source (rows, columns) transposed, fp32, row-major"]
        k.work_clusters = lambda t: t.tiles
        source, target = k.pointer("source"), k.pointer("target")
        rows = k.parameter("rows", compute=lambda t: t.rows)
        columns = k.parameter("columns", compute=lambda t: t.columns)
        tile = k.shared(4 * TILE * PITCH, name="tile")[0]
        tiles_per_row = (columns + (TILE - 1)) // TILE
        first_row = (hw.block_index() // tiles_per_row * TILE).named("first_row")
        first_column = (hw.block_index() % tiles_per_row * TILE).named("first_column")
        tile_column, tile_row = (k.thread % TILE).named("tile_column"), (k.thread // TILE).named("tile_row")
        with k.unroll(0, TILE, ROWS, name="i") as i:
            row, column = first_row + tile_row + i, first_column + tile_column
            element = k.registers(F32, 1, "element")
            address = source + ((row.to(U64) * columns.to(U64) + column.to(U64)) * 4)
            hw.load_global(element, address, (row < rows) & (column < columns))
            hw.store_shared(element, tile.address + (((tile_row + i) * PITCH + tile_column) * 4).to(U32))
        if barrier:
            hw.sync_threads()
        with k.unroll(0, TILE, ROWS, name="j") as j:
            row, column = first_row + tile_column, first_column + tile_row + j
            element = k.registers(F32, 1, "element")
            hw.load_shared(element, tile.address + ((tile_column * PITCH + tile_row + j) * 4).to(U32))
            address = target + ((column.to(U64) * rows.to(U64) + row.to(U64)) * 4)
            hw.store_global(element, address, (row < rows) & (column < columns))
        return k.finish()


def hazards(kernel: Kernel) -> list[str]:
    """Return the hazards that the simulator finds in the kernel."""
    x = np.ones((70, 45), np.float32)
    try:
        launch(kernel, Transpose(*x.shape), source=x, target=np.empty_like(x))
    except HazardError as error:
        return [str(hazard) for hazard in error.hazards]
    return []


def main() -> None:
    x = np.random.default_rng(0).standard_normal((70, 45)).astype(np.float32)
    kernel, result = transpose(), np.full(x.shape[::-1], np.nan, np.float32)
    print(kernel.source)
    launch(kernel, Transpose(*x.shape), source=x, target=result)  # arrays on a GPU: it runs there
    print(f"on the CPU: {'pass' if np.array_equal(result, x.T) else 'FAIL'}, no hazard")
    print(f"without the barrier: {hazards(transpose(barrier=False))[0]}")


if __name__ == "__main__":
    main()
