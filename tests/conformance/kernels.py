"""Tiny kernels, one instruction or one operand layout each, with what plain numpy says they must leave in memory.

All data are small integers, exact in fp32, so that a GPU and the simulator must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.operand import Operand
from gemmsmith.collective.pipeline import PipelineAsync, PipelineTmaAsync, PipelineTransactionAsync, start
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.core.tile import Tile
from gemmsmith.hw.tma import EVICT_FIRST
from gemmsmith.hw.wgmma import K
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, U16, U32, U64
from gemmsmith.lang.values import Value, ValueLike

RNG = np.random.default_rng(20)
U = np.uint32


@dataclass
class Case:
    """`record(k, pointers)` writes the kernel; pointers are in0, in1 …, and out. `maps` makes tensor maps from
    addresses by name. Every byte of `expected` that the kernel must leave alone is 0xEE."""

    name: str
    record: Callable[[Builder, dict[str, Value]], None]
    inputs: list[np.ndarray]
    expected: np.ndarray
    threads: int = 128
    cluster: int = 1
    maps: dict[str, Callable[[dict[str, int]], TensorMap]] = field(default_factory=dict)

    def kernel(self) -> Kernel:
        with Builder("conformance", threads=self.threads, cluster=(self.cluster, 1, 1)) as k:
            names = [f"in{i}" for i in range(len(self.inputs))] + ["out"]
            pointers: dict[str, Value] = {name: k.pointer(name) for name in names}
            pointers |= {name: k.tensor_map(name) for name in self.maps}
            self.record(k, pointers)
            return k.finish()


# -- pieces --------------------------------------------------------------------------------------------------------


def store_word(out: Value, index: Value, value: Value, when: ValueLike = True) -> None:
    word = _word(value)
    hw.store_global(word, out + (index * 4).to(U64), when)


def _word(value: Value) -> Any:
    from gemmsmith.lang.builder import current

    word = current().registers(value.type, 1, "word")
    word[0] = value
    return word


def load_word(source: Value, index: Value) -> Value:
    from gemmsmith.lang.builder import current

    word = current().registers(U32, 1, "loaded")
    hw.load_global(word, source + (index * 4).to(U64), True)
    return word[0]


def dump(k: Builder, address: Value, nbytes: int, out: Value) -> None:
    """All threads copy shared memory to `out`, word by word."""
    words = nbytes // 4
    with k.range(-(-words // k.threads), name="turn") as turn:
        index = turn * k.threads + k.thread
        with k.when(index < words):
            word = k.registers(U32, 1, "dumped")
            hw.load_shared(word, address + (index * 4).to(U32))
            hw.store_global(word, out + (index * 4).to(U64), True)


def fill(k: Builder, address: Value, nbytes: int, source: Value) -> None:
    """All threads copy `source` to shared memory, word by word."""
    words = nbytes // 4
    with k.range(-(-words // k.threads), name="turn") as turn:
        index = turn * k.threads + k.thread
        with k.when(index < words):
            hw.store_shared(_word(load_word(source, index)), address + (index * 4).to(U32))


def integers(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return RNG.integers(-4, 5, shape).astype(dtype)


def tensor(name: str, x: np.ndarray, box: tuple[int, int, int], swizzle: int, dtype: DType = BF16, batch: int = -1):
    """The map of a (batch, outer, inner) array; `batch` 0 makes it a broadcast of one."""
    size = x.dtype.itemsize
    b, outer, inner = x.shape
    stride = 0 if batch == 0 else outer * inner * size

    def make(addresses: dict[str, int]) -> TensorMap:
        extents = (inner, outer, b if batch < 1 else batch)
        return TensorMap(addresses[name], dtype, extents, (inner * size, stride), box, swizzle)

    return make


def tile_bytes(tile: Tile, matrix: np.ndarray) -> np.ndarray:
    """What shared memory holds of a (mn, k) tile, as words; `matrix` is zero-padded to the tile's boxes."""
    image = np.zeros(tile.bytes, np.uint8)
    mn, kk = np.meshgrid(*(np.arange(n) for n in matrix.shape), indexing="ij")
    offsets = tile.offset(mn, kk).reshape(-1)
    size = matrix.dtype.itemsize
    image[offsets[:, None] + np.arange(size)] = np.ascontiguousarray(matrix).reshape(-1, 1).view(np.uint8)
    return image.view(U)


def window(x: np.ndarray, row: int, column: int, rows: int, columns: int) -> np.ndarray:
    """x[row:, column:] cut to a size, zeros outside."""
    result = np.zeros((rows, columns), x.dtype)
    part = x[row : row + rows, column : column + columns]
    result[: part.shape[0], : part.shape[1]] = part
    return result


# -- TMA -----------------------------------------------------------------------------------------------------------


def tma_loads() -> Iterator[Case]:
    shapes = [("K", 64, 64), ("K", 64, 32), ("K", 24, 16), ("K", 64, 128), ("MN", 64, 16), ("MN", 32, 64),
              ("MN", 16, 32), ("MN", 128, 64), ("MN", 96, 16)]  # fmt: skip
    for major, mn, depth in shapes:
        tile = Tile(BF16, mn, depth, major)
        for at in ((0, 0), (16, 8), (136, 200)):  # the last hangs over both edges
            x = integers((2, 160, 232), BF16.numpy) if major == "K" else integers((2, 232, 160), BF16.numpy)
            logical = x[1] if major == "K" else x[1].T

            def record(k: Builder, p: dict[str, Value], tile: Tile = tile, at: tuple[int, int] = at) -> None:
                smem, barrier = k.shared(tile, name="tile"), k.shared(8, alignment=8, name="barrier")
                with k.when(k.thread == 0):
                    hw.mbarrier_init(barrier[0], 1)
                    hw.fence_mbarrier_init()
                hw.sync_threads()
                with k.when(k.thread == 0):
                    hw.mbarrier_arrive_expect_tx(barrier[0], tile.bytes)
                    row, column = (k.thread + x for x in at)
                    Operand(p["map"], tile).load(smem[0], barrier[0], row, column, k.thread + 1, EVICT_FIRST)
                hw.mbarrier_wait(barrier[0], 0)
                dump(k, smem[0].address, tile.bytes, p["out"])

            expected = tile_bytes(tile, window(logical, *at, tile.mn, tile.k))
            box = (tile.box_inner, tile.outer, 1)
            yield Case(f"tma_load {major} {mn}x{depth} at {at}", record, [x], expected,
                       maps={"map": tensor("in0", x, box, tile.swizzle)})  # fmt: skip


def tma_multicasts() -> Iterator[Case]:
    for major, mn, depth, broadcast in (("K", 64, 64, False), ("MN", 128, 64, False), ("MN", 64, 32, True)):
        tile = Tile(BF16, mn, depth, major)
        x = integers((1 if broadcast else 3, 128, 128), BF16.numpy)
        logical = x[0 if broadcast else 2] if major == "K" else x[0 if broadcast else 2].T

        def record(k: Builder, p: dict[str, Value], tile: Tile = tile) -> None:
            smem, barrier = k.shared(tile, name="tile"), k.shared(8, alignment=8, name="barrier")
            rank = hw.cluster_rank()
            with k.when(k.thread == 0):
                hw.mbarrier_init(barrier[0], 1)
                hw.fence_mbarrier_init()
            hw.cluster_arrive()
            hw.cluster_wait()
            with k.when(k.thread == 0):
                hw.mbarrier_arrive_expect_tx(barrier[0], tile.bytes)
                zero = k.thread * 0
                Operand(p["map"], tile, 2, rank, 3).load(smem[0], barrier[0], zero, zero, zero + 2)
            hw.mbarrier_wait(barrier[0], 0)
            hw.cluster_arrive()
            hw.cluster_wait()
            dump(k, smem[0].address, tile.bytes, p["out"] + (rank * tile.bytes).to(U64))

        image = tile_bytes(tile, window(logical, 0, 0, tile.mn, tile.k))
        box = (tile.box_inner, tile.outer // 2, 1)
        yield Case(f"tma multicast {major} broadcast {broadcast}", record, [x], np.concatenate([image, image]),
                   cluster=2, maps={"map": tensor("in0", x, box, tile.swizzle, batch=3 if not broadcast else 0)
                                    if not broadcast else _broadcast_map(x, box, tile.swizzle)})  # fmt: skip


def _broadcast_map(x: np.ndarray, box: tuple[int, int, int], swizzle: int):
    return lambda at: TensorMap(at["in0"], BF16, (x.shape[2], x.shape[1], 3), (x.shape[2] * 2, 0), box, swizzle)


def tma_stores() -> Iterator[Case]:
    for dtype, columns in ((BF16, 64), (BF16, 32), (BF16, 16), (BF16, 8), (FP32, 32), (FP32, 8)):
        tile = Tile(dtype, 64, columns, "K")
        out = np.full((2, 80, 72), 0, dtype.numpy)
        out.view(np.uint8)[...] = 0xEE
        data = integers((64, columns), dtype.numpy)
        for at in ((0, 0), (40, 48)):

            def record(k: Builder, p: dict[str, Value], tile: Tile = tile, at: tuple[int, int] = at) -> None:
                smem = k.shared(tile, name="tile")
                fill(k, smem[0].address, tile.bytes, p["in0"])
                hw.fence_proxy_async()
                hw.sync_threads()
                with k.when(k.thread == 0):
                    hw.tma_store(p["map"], k.thread + at[1], k.thread + at[0], k.thread + 1, smem[0])
                    hw.bulk_commit()
                    hw.bulk_wait(0)

            expected = out.copy()
            kept = window(data, 0, 0, min(64, 80 - at[0]), min(columns, 72 - at[1]))
            expected[1, at[0] : at[0] + 64, at[1] : at[1] + columns] = kept
            yield Case(f"tma_store {dtype} x{columns} at {at}", record, [tile_bytes(tile, data)], expected,
                       maps={"map": tensor("out", out, (tile.box_inner, 64, 1), tile.swizzle, dtype)})  # fmt: skip


# -- wgmma ---------------------------------------------------------------------------------------------------------


def fragments(d: np.ndarray) -> np.ndarray:
    """A 64 x n matrix as (128, n / 2) registers. PTX ISA, figure of the wgmma m64nNk16 accumulator."""
    t, i = np.arange(128)[:, None], np.arange(d.shape[1] // 2)[None, :]
    return d[16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2]


def dump_registers(k: Builder, accumulator: Accumulator, out: Value) -> None:
    block = accumulator.blocks[0]
    with k.unroll(len(block), name="i") as i:
        store_word(out, k.thread * len(block) + i, block[i])


def wgmmas() -> Iterator[Case]:
    plain = [(n, d, a, "K", "K", 64) for n in (8, 16, 24, 64, 96, 128, 256) for d, a in ((BF16, FP32), (FP16, FP16))]
    layouts = [(64, FP16, FP32, x, y, depth) for x in ("K", "MN") for y in ("K", "MN") for depth in (16, 32, 64, 128)]
    wide = [(n, BF16, FP32, "K", "MN", 64) for n in (16, 32, 96, 128, 192, 256)]
    for n, dtype, accumulate, a_major, b_major, depth in (*plain, *layouts, *wide):
        for cluster in (1, 2) if n == 256 else (1,):
            yield _wgmma(n, dtype, accumulate, a_major, b_major, depth, cluster)


def _wgmma(n: int, dtype: DType, accumulate: DType, a_major: Any, b_major: Any, depth: int, cluster: int) -> Case:
    a_tile, b_tile = Tile(dtype, 64, depth, a_major), Tile(dtype, n, depth, b_major)
    a, b = integers((64, 2 * depth), dtype.numpy), integers((n, 2 * depth), dtype.numpy)

    def record(k: Builder, p: dict[str, Value]) -> None:
        """Two k-tiles, the first without and the second with accumulation."""
        smem = [k.shared(tile, stages=2, name=name) for tile, name in ((a_tile, "A"), (b_tile, "B"))]
        pipe = PipelineTmaAsync(2, transaction_bytes=a_tile.bytes + b_tile.bytes)
        start(pipe)
        rank = hw.cluster_rank()
        with k.warpgroups(0, 1):
            write, read = pipe.producer_start_state(), pipe.consumer_start_state()
            with k.range(2, name="turn") as turn:
                with k.when(k.thread == 0):
                    pipe.producer_acquire(write)
                    for name, tile, buffer in (("a", a_tile, smem[0]), ("b", b_tile, smem[1])):
                        operand = Operand(p[name], tile)
                        operand.load(buffer[write.index], pipe.barrier(write), turn * 0, turn * depth, turn * 0)
                write.advance()
            accumulator = Accumulator(64, n, dtype, accumulate)
            with k.range(2, name="turn") as turn:
                pipe.consumer_wait(read)
                accumulator.multiply(smem[0][read.index].rows(0, 64), smem[1][read.index], turn > 0)
                read.advance()
            accumulator.wait(0)
            pipe.consumer_release(pipe.consumer_start_state("free"))
            dump_registers(k, accumulator, p["out"] + (rank * (128 * len(accumulator.blocks[0]) * 4)).to(U64))

    product = fragments(a.astype(np.float64) @ b.astype(np.float64).T)
    image = product.astype(np.float32).view(U) if accumulate == FP32 else product.astype(np.float16).view(U)

    def operand(x: np.ndarray, major: str) -> np.ndarray:
        return np.ascontiguousarray(x if major == "K" else x.T)[None]

    inputs = [operand(a, a_major), operand(b, b_major)]
    maps = {
        name: tensor(f"in{i}", inputs[i], (tile.box_inner, tile.outer, 1), tile.swizzle, dtype)
        for i, (name, tile) in enumerate((("a", a_tile), ("b", b_tile)))
    }
    name = f"wgmma n{n} {dtype} {accumulate} {a_major}{b_major} depth {depth} cluster {cluster}"
    return Case(name, record, inputs, np.concatenate([image] * cluster), cluster=cluster, maps=maps)


def wgmma_register_a() -> Iterator[Case]:
    for n, b_major in ((32, "K"), (64, "MN")):
        tile = Tile(BF16, n, K, b_major)  # type: ignore[arg-type]
        a, b = integers((64, K), BF16.numpy), integers((n, K), BF16.numpy)
        t, i = np.arange(128)[:, None], np.arange(8)[None, :]
        packed = a[16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2].view(U)

        def record(k: Builder, p: dict[str, Value], tile: Tile = tile, n: int = n, b_major: str = b_major) -> None:
            smem = k.shared(tile, name="B")
            fill(k, smem[0].address, tile.bytes, p["in1"])
            hw.fence_proxy_async()
            hw.sync_threads()
            left = k.registers(U32, 4, "left")
            for j in range(4):
                left[j] = load_word(p["in0"], k.thread * 4 + j)
            accumulator = Accumulator(64, n, BF16, FP32)
            hw.wgmma_fence()
            hw.wgmma_mma_register_a(
                accumulator.blocks[0], left, hw.descriptor(smem[0], 0), False, n=n, dtype="bf16", b_major=b_major
            )
            hw.wgmma_commit()
            accumulator.wait(0)
            dump_registers(k, accumulator, p["out"])

        expected = fragments((a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32)).view(U)
        yield Case(f"wgmma register A n{n} {b_major}", record, [packed, tile_bytes(tile, b)], expected)


# -- matrices, memory, lanes ---------------------------------------------------------------------------------------


def matrices() -> Iterator[Case]:
    for count in (1, 2, 4):
        for transposed in (False, True):
            data = RNG.integers(0, 2**16, (count, 8, 8)).astype(np.uint16)
            lanes = np.swapaxes(data, 1, 2) if transposed else data
            held = np.ascontiguousarray(lanes.reshape(count, 32, 2).transpose(1, 0, 2)).view(U)[..., 0]

            def rows_address(k: Builder, address: Value, count: int = count) -> Value:
                return address + (k.lane % (8 * count) * 16).to(U32)

            def store(k: Builder, p: dict[str, Value], count: int = count, transposed: bool = transposed,
                      place: Any = rows_address) -> None:  # fmt: skip
                smem = k.shared(count * 128, name="matrices")
                values = k.registers(U32, count, "values")
                for j in range(count):
                    values[j] = load_word(p["in0"], k.lane * count + j)
                hw.store_matrix(values, place(k, smem[0].address), transposed)
                hw.sync_threads()
                dump(k, smem[0].address, count * 128, p["out"])

            def load(k: Builder, p: dict[str, Value], count: int = count, transposed: bool = transposed,
                     place: Any = rows_address) -> None:  # fmt: skip
                smem = k.shared(count * 128, name="matrices")
                fill(k, smem[0].address, count * 128, p["in0"])
                hw.sync_threads()
                values = k.registers(U32, count, "values")
                hw.load_matrix(values, place(k, smem[0].address), transposed)
                for j in range(count):
                    store_word(p["out"], k.lane * count + j, values[j])

            words = data.reshape(-1).view(U)
            yield Case(f"stmatrix x{count} transposed {transposed}", store, [held], words, threads=32)
            yield Case(f"ldmatrix x{count} transposed {transposed}", load, [words], held, threads=32)


def memory() -> Iterator[Case]:
    data = RNG.integers(0, 2**32, 128, dtype=U)
    for count in (1, 2, 4):

        def move(k: Builder, p: dict[str, Value], count: int = count) -> None:
            """Through registers, shared memory and back, where the lane is even; others load zeros, store nothing."""
            smem = k.shared(32 * 16, name="words")
            values, again = k.registers(U32, count, "values"), k.registers(U32, count, "again")
            at = (k.thread * (4 * count)).to(U64)
            hw.load_global(values, p["in0"] + at, k.lane % 2 == 0)
            hw.store_shared(values, smem[0].address + (k.thread * 16).to(U32))
            hw.load_shared(again, smem[0].address + (k.thread * 16).to(U32))
            hw.store_global(again, p["out"] + at, k.lane < 20)

        expected = np.full((32, count), 0xEEEEEEEE, U)
        expected[:20] = data[: 32 * count].reshape(32, count)[:20] * (np.arange(20) % 2 == 0)[:, None]
        yield Case(f"ld/st {4 * count} bytes", move, [data[: 32 * count]], expected, threads=32)

    halves = RNG.integers(0, 2**16, 32).astype(np.uint16)

    def move16(k: Builder, p: dict[str, Value]) -> None:
        smem = k.shared(64, name="halves")
        value = hw.load_global_16(p["in0"] + (k.thread * 2).to(U64), k.lane > 3)
        hw.store_shared_16(smem[0].address + (k.thread * 2).to(U32), value)
        hw.sync_warp()
        word = k.registers(U32, 1, "pair")
        hw.load_shared(word, smem[0].address + (k.thread // 2 * 4).to(U32))
        picked = (word[0] >> (k.thread % 2 * 16)).to(U16)
        hw.store_global_16(p["out"] + (k.thread * 2).to(U64), picked, k.lane < 30)

    kept = np.where(np.arange(32) > 3, halves, 0).astype(np.uint16)
    kept[30:] = 0xEEEE
    yield Case("ld/st 2 bytes", move16, [halves], kept, threads=32)

    for nbytes in (4, 8, 16):

        def copy(k: Builder, p: dict[str, Value], nbytes: int = nbytes) -> None:
            smem = k.shared(32 * nbytes, alignment=128, name="copied")
            full = k.select(k.lane < 9, k.lane * 0 + nbytes, 0)
            at = k.thread * nbytes
            hw.cp_async_copy(smem[0].address + at.to(U32), p["in0"] + at.to(U64), full.to(U32), nbytes)
            hw.cp_async_commit()
            hw.cp_async_wait(0)
            hw.sync_threads()
            dump(k, smem[0].address, 32 * nbytes, p["out"])

        source = data[: 8 * nbytes]
        zeroed = source.copy()
        zeroed[9 * nbytes // 4 :] = 0
        yield Case(f"cp.async {nbytes}", copy, [source], zeroed, threads=32)

    def atomics(k: Builder, p: dict[str, Value]) -> None:
        """128 threads add to a counter and a float; the old counters are a permutation, counted back."""
        old = hw.atomic_add(p["out"], 1)
        hw.reduce_add(p["out"] + 4, 2.0)
        store_word(p["out"], old.to(I32) + 2, k.smem * 0 + 7)

    # The first word is poisoned with 0xEEEEEEEE, so old values start there and wrap to small indices in i32 only
    # after subtraction: the kernel is given zeroed words instead through in0.
    def zeroed_atomics(k: Builder, p: dict[str, Value]) -> None:
        with k.when(k.thread < 2):
            store_word(p["out"], k.thread, k.smem * 0)
        hw.sync_threads()
        atomics(k, p)

    counted = np.full(130, 7, U)
    counted[0], counted[1:2] = 128, np.float32(256).reshape(1).view(U)
    yield Case("atom, red", zeroed_atomics, [], counted)

    def release(k: Builder, p: dict[str, Value]) -> None:
        with k.when(k.thread == 0):
            hw.store_release(p["out"], 41)
        hw.fence_acq_rel()
        hw.sync_threads()
        with k.when(k.thread == 64):
            seen = hw.load_acquire(p["out"])
            store_word(p["out"], k.thread - 63, seen + 1)

    yield Case("st.release, ld.acquire", release, [], np.array([41, 42], U))


def lanes() -> Iterator[Case]:
    lane = np.arange(64) % 32

    def shuffles(k: Builder, p: dict[str, Value]) -> None:
        x = load_word(p["in0"], k.thread)
        for row, y in enumerate((hw.shuffle_xor(x, 5), hw.shuffle_index(x, (k.lane * 3 % 32).to(U32)),
                                 hw.shuffle_down(x, 4))):  # fmt: skip
            store_word(p["out"], k.thread + 64 * row, y)

    x = RNG.integers(0, 2**32, 64, dtype=U)
    base = np.arange(64) - lane
    expected = np.stack([x[base + (lane ^ 5)], x[base + lane * 3 % 32], x[base + np.where(lane < 28, lane + 4, lane)]])
    yield Case("shuffles", shuffles, [x], expected, threads=64)

    def elect(k: Builder, p: dict[str, Value]) -> None:
        with k.when(k.thread < 4):
            store_word(p["out"], k.thread, k.smem * 0)
        hw.sync_threads()
        with k.when(hw.elect_one()):
            hw.atomic_add(p["out"] + (k.warp_index * 4).to(U64), 1)

    yield Case("elect.sync", elect, [], np.ones(4, U))

    def named(k: Builder, p: dict[str, Value]) -> None:
        """Warpgroup 1 writes, arrives; warpgroup 0 waits, reads."""
        smem = k.shared(512, name="words")
        with k.warpgroup(0):
            hw.set_registers(96)
            hw.barrier_sync(3, 256)
            dump_one = k.registers(U32, 1, "one")
            hw.load_shared(dump_one, smem[0].address + ((k.thread ^ 77) * 4).to(U32))
            hw.store_global(dump_one, p["out"] + (k.thread * 4).to(U64), True)
        with k.warpgroup(1):
            hw.set_registers(160)
            mine = load_word(p["in0"], k.thread - 128)
            hw.store_shared(_word(mine), smem[0].address + ((k.thread - 128) * 4).to(U32))
            hw.barrier_arrive(3, 256)

    words = RNG.integers(0, 2**32, 128, dtype=U)
    yield Case("named barrier, setmaxnreg", named, [words], words[np.arange(128) ^ 77], threads=256)

    def dependent(k: Builder, p: dict[str, Value]) -> None:
        hw.grid_dependency_launch()
        hw.grid_dependency_wait()
        store_word(p["out"], k.thread, (hw.block_index() * 100 + hw.grid_size()).to(U32))

    yield Case("griddepcontrol, blockIdx", dependent, [], np.full(32, 1, U), threads=32)


def conversions() -> Iterator[Case]:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 0, -0.0, 65504, 1e-7], np.float32)
    x = np.concatenate([ties, integers((56,), np.float32)])
    for dtype, kind in ((BF16, ml_dtypes.bfloat16), (FP16, np.float16)):

        def pack(k: Builder, p: dict[str, Value], dtype: DType = dtype) -> None:
            pair = k.registers(F32, 2, "pair")
            hw.load_global(pair, p["in0"] + (k.thread * 8).to(U64), True)
            store_word(p["out"], k.thread, hw.pack(pair[0], pair[1], dtype))

        yield Case(f"cvt to {dtype}", pack, [x], x.astype(kind).view(U), threads=32)

    halves = RNG.standard_normal(64).astype(np.float16)

    def unpack(k: Builder, p: dict[str, Value]) -> None:
        pair = load_word(p["in0"], k.thread)
        for half in range(2):
            store_word(p["out"], k.thread * 2 + half, hw.as_unsigned(hw.unpack_fp16(pair, half)))

    yield Case("cvt from fp16", unpack, [halves], halves.astype(np.float32).view(U), threads=32)


# -- clusters and pipelines ----------------------------------------------------------------------------------------


def clusters() -> Iterator[Case]:
    words = RNG.integers(0, 2**32, 64, dtype=U)

    def exchange(k: Builder, p: dict[str, Value]) -> None:
        """Each CTA writes into its peer's shared memory, and reads its peer's again from there."""
        smem = k.shared(256, stages=2, name="words")
        rank = hw.cluster_rank()
        peer = (rank ^ 1).to(U32)
        at = (k.thread * 4).to(U32)
        mine = load_word(p["in0"], rank * 32 + k.thread)
        hw.store_cluster(_word(mine), hw.mapa(smem[0].address + at, peer))
        hw.cluster_arrive()
        hw.cluster_wait()
        there = k.registers(U32, 1, "there")
        hw.load_cluster(there, hw.mapa(smem[0].address + at, peer))
        here = k.registers(U32, 1, "here")
        hw.load_shared(here, smem[0].address + at)
        store_word(p["out"], rank * 64 + k.thread, there[0])
        store_word(p["out"], rank * 64 + 32 + k.thread, here[0])
        hw.cluster_arrive()
        hw.cluster_wait()

    a, b = words[:32], words[32:]
    yield Case("mapa, distributed shared memory", exchange, [words], np.stack([a, b, b, a]), threads=32, cluster=2)

    def remote(k: Builder, p: dict[str, Value]) -> None:
        """Lanes 0 and 1 of every warp of both CTAs arrive at both CTAs' barrier: 4 warps x 2 CTAs."""
        barrier = k.shared(8, alignment=8, name="barrier")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 8)
            hw.fence_mbarrier_init()
        hw.cluster_arrive()
        hw.cluster_wait()
        early = hw.mbarrier_try_wait(barrier[0], 1)
        with k.when(k.lane < 2):
            hw.mbarrier_arrive_cluster(barrier[0], k.lane.to(U32))
        hw.mbarrier_wait(barrier[0], 0)
        word = k.select(early, k.smem * 0 + 1, k.smem * 0)
        store_word(p["out"], hw.cluster_rank() * 128 + k.thread, word)
        hw.cluster_arrive()
        hw.cluster_wait()

    yield Case("remote arrive, try_wait", remote, [], np.ones(256, U), cluster=2)


def pipelines() -> Iterator[Case]:
    turns, stages = 7, 3

    def record(k: Builder, p: dict[str, Value], kind: Any) -> None:
        """A warp brings numbered rows of 32 words; a warpgroup reads each, adds its turn and stores it."""
        smem = k.shared(128, stages=stages, alignment=128, name="rows")
        pipe = kind(stages)
        start(pipe)
        with k.warpgroup(0), k.warp(0):
            write = pipe.producer_start_state()
            with k.range(turns, name="turn") as turn:
                pipe.producer_acquire(write, pipe.producer_try_acquire(write))
                row = load_word(p["in0"], turn * 32 + k.lane)
                hw.store_shared(_word(row), smem[write.index].address + (k.lane * 4).to(U32))
                if kind is PipelineTransactionAsync:
                    with k.when(k.lane == 0):
                        pipe.producer_expect(write, 0)
                pipe.producer_commit(write)
                write.advance()
            pipe.producer_tail(write)
        with k.warpgroup(1):
            read = pipe.consumer_start_state()
            with k.range(turns, name="turn") as turn:
                pipe.consumer_wait(read, pipe.consumer_try_wait(read))
                word = k.registers(U32, 1, "word")
                hw.load_shared(word, smem[read.index].address + (k.lane * 4).to(U32))
                pipe.consumer_release(read)
                read.advance()
                store_word(p["out"], turn * 128 + k.thread - 128, word[0] + turn.to(U32))

    rows = RNG.integers(0, 2**30, (turns, 32), dtype=U)
    expected = np.tile(rows, (1, 4)) + np.arange(turns, dtype=U)[:, None]
    for kind in (PipelineAsync, PipelineTransactionAsync):
        yield Case(kind.__name__, lambda k, p, kind=kind: record(k, p, kind), [rows], expected, threads=256)


CASES: list[Case] = [
    *tma_loads(), *tma_multicasts(), *tma_stores(), *wgmmas(), *wgmma_register_a(), *matrices(), *memory(), *lanes(),
    *conversions(), *clusters(), *pipelines(),
]  # fmt: skip
