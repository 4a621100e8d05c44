"""Kernels that mma.py runs: one instruction, or a chain of them, for tiles of 64 x 64 sums."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from benchmarks.probe.vectors import N
from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.tma_operand import TmaOperand
from gemmsmith.core.dtypes import FP16, INT32, DType
from gemmsmith.core.mma import FRAGMENT_ROWS_PER_WARP, MMA_SYNC, WGMMA, Mma, fragment_column, fragment_row
from gemmsmith.core.operand import MmaOperand
from gemmsmith.core.product import ROLES
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.core.tile import Tile
from gemmsmith.hw.wmma import TILE_MN, fragment_registers
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I32, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value
from gemmsmith.tile_scheduler.tiles import OperandCoord

KINDS = {
    name: [mma for mma in table if mma.d != INT32]
    for name, table in (("wgmma", WGMMA.instructions), ("mma", MMA_SYNC.instructions), ("wmma", MMA_SYNC.instructions))
}
"""The instructions, and for each the types that round."""


def title(mma: Mma) -> str:
    return f"{mma.d.ptx}_{mma.a.ptx}_{mma.b.ptx}"


def kernel_of(instruction: str, mma: Mma, steps: int) -> Kernel:
    """Build a kernel whose CTA i computes tile i of `out` = A B^T + C by `steps` consecutive instructions."""
    with Builder(f"probe_{instruction}_{title(mma)}_{steps}", threads=128) as k:
        row = (hw.block_index() * N).named("row")
        {"wgmma": wgmma, "mma": mma_sync, "wmma": wmma}[instruction](mma, steps, row)
        return k.finish()


def wgmma(mma: Mma, steps: int, row: Value) -> None:
    def unbound(problem: object) -> NoReturn:
        raise AssertionError

    k = current_builder()
    a, b = (
        TmaOperand(MmaOperand(f"{role}_map", role, Tile(dtype, N, steps * mma.k, "K"), unbound), 1)
        for role, dtype in zip(ROLES, (mma.a, mma.b), strict=True)
    )
    full = k.shared(8, stages=1, alignment=8, name="barrier")[0]
    with k.when(k.thread == 0):
        hw.mbarrier_init(full, 1)
        hw.fence_mbarrier_init()
    hw.sync_threads()
    with k.when(k.thread == 0):
        hw.mbarrier_arrive_expect_tx(full, a.tile.bytes + b.tile.bytes)
        for operand in (a, b):
            operand.load(Constant(I32, 0), full, OperandCoord(row, k.lane * 0), k.lane * 0)
    hw.mbarrier_wait(full, 0)
    d = loaded(mma, row)
    hw.wgmma_fence()
    for step in range(steps):
        hw.wgmma_mma(d, hw.descriptor(a.stages[0], step), hw.descriptor(b.stages[0], step), True, N, mma, "K", "K")
    hw.wgmma_commit()
    hw.wgmma_wait(0)
    hw.fence_operand(d)
    store(d, mma, row)


def mma_sync(mma: Mma, steps: int, row: Value) -> None:
    """Compute a tile with four warps of 16 rows each, whose fragments of D are those of a wgmma.

    Words are loaded as A's and B's layouts say.
    """
    k, d, count = current_builder(), loaded(mma, row), mma.accumulator_registers(8)
    a, b = k.registers(U32, 4, "a_fragment"), k.registers(U32, 2, "b_fragment")
    pointers = k.pointer("a"), k.pointer("b")

    def load(fragment: RegisterArray, i: int, pointer: Value, tile_row: Value, word: Value) -> None:
        one = k.registers(U32, 1, "one")
        hw.load_global(one, pointer + ((tile_row * (8 * steps) + word) * 4).to(U64), True)
        fragment[i] = one[0]

    for step in range(steps):
        word = k.lane % 4 + 8 * step
        for i in range(4):
            load(a, i, pointers[0], row + fragment_row(k.warp_index, k.lane) + i % 2 * 8, word + i // 2 * 4)
        for chunk in range(N // 8):
            for i in range(2):
                load(b, i, pointers[1], row + chunk * 8 + k.lane // 4, word + i * 4)
            hw.mma_sync(d.slice(chunk * count, count), a, b, mma)
    store(d, mma, row)


def wmma(mma: Mma, steps: int, row: Value) -> None:
    """Compute a tile with four warps of 16 rows each, from and to global memory."""
    k, stride = current_builder(), steps * mma.k
    out, c, pointers = k.pointer("out"), k.pointer("c"), (k.pointer("a"), k.pointer("b"))
    a, b = (k.registers(U32, fragment_registers(mma, name), f"{name}_fragment") for name in ("a", "b"))
    (d,) = Accumulator(mma, N, TILE_MN).fragments
    first = (row + k.warp_index * FRAGMENT_ROWS_PER_WARP).named("first")
    for column in range(0, N, TILE_MN):
        place = ((first * N + column) * mma.d.bytes).to(U64)
        hw.wmma_load_global(d, c + place, N, "d", "row", mma)
        for step in range(steps):
            for fragment, pointer, name, layout, tile_row in (
                (a, pointers[0], "a", "row", first), (b, pointers[1], "b", "col", row + column)
            ):  # fmt: skip
                tile = pointer + ((tile_row * stride + step * mma.k) * mma.a.bytes).to(U64)
                hw.wmma_load_global(fragment, tile, stride, name, layout, mma)
            hw.wmma_mma(d, a, b, "row", "col", mma)
        hw.wmma_store_global(d, out + place, N, "row", mma)


def loaded(mma: Mma, row: Value) -> RegisterArray:
    """Return a 64 x 64 accumulator that holds C."""
    (d,), c = Accumulator(mma, N, N).fragments, current_builder().pointer("c")
    for register, count, place in pairs(mma, row):
        pair = current_builder().registers(d.type, count, "pair")
        hw.load_global(pair, c + place, True)
        for i in range(count):
            d[register + i] = pair[i]
    return d


def store(d: RegisterArray, mma: Mma, row: Value) -> None:
    out = current_builder().pointer("out")
    for register, count, place in pairs(mma, row):
        pair = current_builder().registers(d.type, count, "pair")
        for i in range(count):
            pair[i] = d[register + i]
        hw.store_global(pair, out + place, True)


def pairs(mma: Mma, row: Value) -> list[tuple[int, int, Value]]:
    """Yield for each pair of neighbors that a thread holds: the first register, how many, and their offset in bytes."""
    k, (size, count) = current_builder(), (2, 1) if mma.d == FP16 else (4, 2)
    first = (row + fragment_row(k.warp_index, k.lane)) * N + fragment_column(k.lane)
    return [(i * count, count, (first + (i // 2 * 8 + i % 2 * 8 * N)).to(U64) * size) for i in range(N // 4)]


def map_of(dtype: DType, address: int, rows: int, depth: int) -> TensorMap:
    tile = Tile(dtype, N, depth, "K")
    box = tile.box_inner, tile.outer, 1
    return TensorMap(address, dtype, (depth, rows, 1), (depth * dtype.bytes, 0), box, tile.swizzle)


class Runner:
    """Runs tiles of an instruction on a backend; `seconds` is what that took, compilation included."""

    def __init__(self, instruction: str, backend: str) -> None:
        self.instruction, self.run = instruction, {"cuda": on_gpu, "sim": simulated}[backend]
        self.kernels: dict[tuple[Mma, int], Kernel] = {}
        self.seconds = 0.0

    def tiles(self, mma: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """Return D (tiles, 64, 64) for a and b (tiles, 64, steps * k) and c (tiles, 64, 64)."""
        begin, depth, rows = time.perf_counter(), a.shape[2], a.shape[0] * N
        if (mma, depth) not in self.kernels:
            self.kernels[mma, depth] = kernel_of(self.instruction, mma, depth // mma.k)
        arrays = {
            "a": np.ascontiguousarray(a, mma.a.numpy), "b": np.ascontiguousarray(b, mma.b.numpy),
            "c": np.ascontiguousarray(c, mma.d.numpy), "out": np.full(c.shape, np.nan, mma.d.numpy),
        }  # fmt: skip

        def bound(addresses: dict[str, int]) -> dict[str, Any]:
            maps = {f"{name}_map": map_of(dtype, addresses[name], rows, depth)
                    for name, dtype in (("a", mma.a), ("b", mma.b))}  # fmt: skip
            return {**addresses, **maps}

        out = self.run(self.kernels[mma, depth], a.shape[0], arrays, bound)
        self.seconds += time.perf_counter() - begin
        return out

    def vectors(self, mma: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """Return D (vectors,) for a and b (vectors, k) and c (vectors,), which are on the diagonals of tiles."""
        count, tiles = len(a), -(-len(a) // N)
        spread_a, spread_b = (np.zeros((tiles * N, x.shape[1]), x.dtype) for x in (a, b))
        spread_a[:count], spread_b[:count] = a, b
        spread_c = np.zeros((tiles, N, N), mma.d.numpy)
        diagonal = np.arange(tiles * N) // N, np.arange(tiles * N) % N, np.arange(tiles * N) % N
        spread_c[tuple(x[:count] for x in diagonal)] = c
        sums = self.tiles(mma, spread_a.reshape(tiles, N, -1), spread_b.reshape(tiles, N, -1), spread_c)
        return sums[diagonal][:count]


Bound = Callable[[dict[str, int]], dict[str, Any]]
"""The kernel's arguments: addresses by name."""


def simulated(kernel: Kernel, grid: int, arrays: dict[str, np.ndarray], bound: Bound) -> np.ndarray:
    memory = GlobalMemory()
    addresses = {name: memory.add_buffer(x, name, writable=name == "out") for name, x in arrays.items()}
    result = simulate(kernel, grid, bound(addresses), memory)
    assert not result.hazards, result.hazards[0]
    return arrays["out"]


def on_gpu(kernel: Kernel, grid: int, arrays: dict[str, np.ndarray], bound: Bound) -> np.ndarray:
    from gemmsmith.backends.cuda.kernel_loader import device_guard, load_kernel
    from gemmsmith.backends.cuda.launch_template import LaunchTemplate
    from gemmsmith.backends.cuda.memory import DeviceArray

    with device_guard(0):
        ready = load_kernel(
            kernel.source, kernel.name, 0, 0, threads=kernel.threads, cluster=kernel.cluster,
            shared_bytes=kernel.shared_bytes, parameter_kinds=kernel.parameter_kinds,
        )  # fmt: skip
        device = {name: DeviceArray.from_numpy(x) for name, x in arrays.items()}
        arguments = bound({name: x.address for name, x in device.items()})
        LaunchTemplate(ready, grid, [arguments[p.name or ""] for p in kernel.parameters], pdl=False).launch({}, 0)
        return device["out"].numpy()
