"""A kernel of one's own in the language that gemmsmith's are written in: a transpose through shared memory.

python examples/own_kernel.py

The description is printed as CUDA C++, executed on the CPU with every access checked, once more with its barrier left
out, which is reported, and, where there is a Hopper GPU, run there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gemmsmith import DeviceError, hw
from gemmsmith.backends.cuda import driver, launcher
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.backends.cuda.run import prepared
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.core.pointer import Pointer
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launch
from gemmsmith.lang.types import F32, U32, U64

TILE, ROWS = 32, 8
"""Elements of a side of a tile; rows of it that a CTA's 256 threads move at a time."""
PITCH = TILE + 1
"""Elements from one row to the next in shared memory: a column's then lie in 32 banks."""


class Transpose(NamedTuple):
    """What the kernel is launched for: `target` (columns, rows) = `source` (rows, columns) transposed, in fp32."""

    rows: int
    columns: int
    source: Pointer | int = Pointer("source")
    target: Pointer | int = Pointer("target")

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE) * -(-self.columns // TILE)


def transpose(*, barrier: bool = True) -> Kernel:
    """One tile a CTA, read by rows and written by columns. Without `barrier` it has a race."""
    with Builder("transpose", threads=TILE * ROWS) as k:
        k.header += ["target (columns, rows) = source (rows, columns) transposed, fp32, row-major"]
        k.grid = lambda t: t.tiles
        source, target = k.pointer("source", lambda t: t.source), k.pointer("target", lambda t: t.target)
        rows, columns = k.parameter("rows", bind=lambda t: t.rows), k.parameter("columns", bind=lambda t: t.columns)
        tile = k.shared(4 * TILE * PITCH, name="tile")[0]
        across = (columns + (TILE - 1)) // TILE
        first_row = (hw.block_index() // across * TILE).named("first_row")
        first_column = (hw.block_index() % across * TILE).named("first_column")
        along, start = (k.thread % TILE).named("along"), (k.thread // TILE).named("start")
        with k.unroll(0, TILE, ROWS, name="i") as i:
            row, column = first_row + start + i, first_column + along
            one = k.registers(F32, 1, "element")
            place = source + ((row.to(U64) * columns.to(U64) + column.to(U64)) * 4)
            hw.load_global(one, place, (row < rows) & (column < columns))
            hw.store_shared(one, tile.address + (((start + i) * PITCH + along) * 4).to(U32))
        if barrier:
            hw.sync_threads()
        with k.unroll(0, TILE, ROWS, name="j") as j:
            row, column = first_row + along, first_column + start + j
            one = k.registers(F32, 1, "element")
            hw.load_shared(one, tile.address + ((along * PITCH + start + j) * 4).to(U32))
            place = target + ((column.to(U64) * rows.to(U64) + row.to(U64)) * 4)
            hw.store_global(one, place, (row < rows) & (column < columns))
        return k.finish()


def on_cpu(kernel: Kernel, x: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """The result, and what the simulator has to say."""
    memory, out = GlobalMemory(), np.full(x.shape[::-1], np.nan, np.float32)
    source, target = memory.place(x, "source", writable=False), memory.place(out, "target")
    task = Transpose(*x.shape, source, target)
    done = simulate(kernel, kernel.grid(task), kernel.arguments(task), memory)
    return out, [str(hazard) for hazard in done.hazards]


def on_gpu(kernel: Kernel, x: np.ndarray) -> np.ndarray:
    """The result; raises DeviceError without a Hopper GPU."""
    driver.require_chip(0)
    with launcher.device_guard(0):
        source, target = DeviceArray.from_numpy(x), DeviceArray.from_numpy(np.full(x.shape[::-1], np.nan, np.float32))
        launch = prepared(Launch.of(kernel, Transpose(*x.shape)), device=0, stream=0, pdl=False)
        launch.launch({"source": source.address, "target": target.address}, stream=0)
        return target.numpy()


def main() -> None:
    x = np.random.default_rng(0).standard_normal((70, 45)).astype(np.float32)
    kernel = transpose()
    print(kernel.source)
    found, hazards = on_cpu(kernel, x)
    print(f"on the CPU: {'right' if np.array_equal(found, x.T) else 'wrong'}, hazards: {hazards or 'none'}")
    _, hazards = on_cpu(transpose(barrier=False), x)
    print(f"without the barrier: {hazards[0]}")
    try:
        print(f"on the GPU: {'right' if np.array_equal(on_gpu(kernel, x), x.T) else 'wrong'}")
    except DeviceError as error:
        print(f"on the GPU: not run, {error}")


if __name__ == "__main__":
    main()
