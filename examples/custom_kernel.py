"""A custom kernel in gemmsmith's kernel language: a transpose through shared memory.

python examples/custom_kernel.py

The kernel is printed as CUDA C++ and simulated on the CPU with every access checked. Without its barrier the simulator
reports a race. If there is a Hopper GPU, the kernel also runs there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gemmsmith import DeviceError, hw
from gemmsmith.backends.cuda import driver, kernel_loader
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.backends.cuda.run import load_launch_template
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.core.pointer import Pointer
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launch
from gemmsmith.lang.types import F32, U32, U64

TILE = 32
"""Rows and columns of a tile, in elements."""
ROWS = 8
"""Rows of a tile that a CTA's 256 threads copy at a time."""
PITCH = TILE + 1
"""Elements from one row to the next in shared memory: the elements of a column are then in 32 different banks."""


class Transpose(NamedTuple):
    """The kernel's launch arguments: `target` (columns, rows) = `source` (rows, columns) transposed, in fp32."""

    rows: int
    columns: int
    source: Pointer | int = Pointer("source")
    target: Pointer | int = Pointer("target")

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE) * -(-self.columns // TILE)


def transpose(*, barrier: bool = True) -> Kernel:
    """Build the kernel: one tile per CTA, read by rows and written by columns. Without `barrier` it has a race."""
    with Builder("transpose", threads=TILE * ROWS) as k:
        k.header += ["target (columns, rows) = source (rows, columns) transposed, fp32, row-major"]
        k.work_clusters = lambda t: t.tiles
        source, target = k.pointer("source", lambda t: t.source), k.pointer("target", lambda t: t.target)
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


def on_cpu(kernel: Kernel, x: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Simulate the kernel, and return its result and the simulator's hazards."""
    memory, out = GlobalMemory(), np.full(x.shape[::-1], np.nan, np.float32)
    source, target = memory.add_buffer(x, "source", writable=False), memory.add_buffer(out, "target")
    task = Transpose(*x.shape, source, target)
    simulation = simulate(kernel, kernel.work_clusters(task), kernel.arguments(task), memory)
    return out, [str(hazard) for hazard in simulation.hazards]


def on_gpu(kernel: Kernel, x: np.ndarray) -> np.ndarray:
    """Run the kernel, and return its result. Raises DeviceError without a Hopper GPU."""
    driver.require_chip(0)
    with kernel_loader.device_guard(0):
        source, target = DeviceArray.from_numpy(x), DeviceArray.from_numpy(np.full(x.shape[::-1], np.nan, np.float32))
        launch = load_launch_template(Launch.from_kernel(kernel, Transpose(*x.shape)), device=0, stream=0, pdl=False)
        launch.launch({"source": source.address, "target": target.address}, stream=0)
        return target.numpy()


def main() -> None:
    x = np.random.default_rng(0).standard_normal((70, 45)).astype(np.float32)
    kernel = transpose()
    print(kernel.source)
    result, hazards = on_cpu(kernel, x)
    print(f"on the CPU: {'pass' if np.array_equal(result, x.T) else 'FAIL'}, hazards: {hazards or 'none'}")
    _, hazards = on_cpu(transpose(barrier=False), x)
    print(f"without the barrier: {hazards[0]}")
    try:
        print(f"on the GPU: {'pass' if np.array_equal(on_gpu(kernel, x), x.T) else 'FAIL'}")
    except DeviceError as error:
        print(f"on the GPU: not run, {error}")


if __name__ == "__main__":
    main()
