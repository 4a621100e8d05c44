"""Whatever moves bytes: TMA loads and stores, cp.async, loads and stores of global and shared memory, matrices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from tests.conformance.case import (
    Case,
    Map,
    at,
    barriers,
    dump,
    fill,
    integers,
    load_shared_word,
    poisoned,
    read_word,
    slot,
    staged,
    sync_cluster,
    words,
    write,
)
from tests.instructions import bulk_wait

from gemmsmith import hw
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.tile import Tile
from gemmsmith.hw.tma import EVICT_FIRST, EVICT_LAST, EVICT_NORMAL
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U32, U64
from gemmsmith.lang.values import Constant
from gemmsmith.tile_scheduler.tiles import OperandCoord

CASES: list[Case] = []
SWIZZLES = (128, 64, 32, 0)


# -- TMA -----------------------------------------------------------------------------------------------
def box_of(x: np.ndarray, at: Sequence[int], box: Sequence[int]) -> np.ndarray:
    """The box (z, y, x) at those coordinates (x, y, z) of a (batch, outer, inner) array, zeros outside."""
    index = [start + np.arange(size) for start, size in zip(at, box, strict=True)][::-1]
    found = x[np.ix_(*(i.clip(0, extent - 1) for i, extent in zip(index, x.shape, strict=True)))]
    for axis, (i, extent) in enumerate(zip(index, x.shape, strict=True)):
        found[(slice(None),) * axis + ((i < 0) | (i >= extent),)] = 0
    return found


def swizzle_image(x: np.ndarray, swizzle: int) -> np.ndarray:
    """How TMA lays (rows, columns) in shared memory: PTX ISA, "Tensor swizzling modes", row by row."""
    x = np.ascontiguousarray(x)
    raw = x.view(np.uint8).reshape(x.shape[0], -1, 16)
    row, chunk = np.arange(raw.shape[0])[:, None], np.arange(raw.shape[1])[None, :]
    moved = {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2, 0: row * 0}[swizzle] ^ chunk
    image = np.empty_like(raw)
    image[row, moved] = raw
    return image.reshape(-1).view(x.dtype)


def tma_load(
    name: str, dtype: DType, shape: tuple[int, int, int], box: tuple[int, int, int], swizzle: int,
    *places: tuple[int, int, int], cache: Constant = EVICT_NORMAL, columns: int | None = None, batches: int = 0,
) -> Case:  # fmt: skip
    """Boxes side by side in shared memory, dumped as they lie there.

    `columns` is how many of a row's elements the map has, `batches` how often it repeats the first by a stride of 0.
    """
    x = integers(name, shape, dtype.numpy, 100)
    size = int(np.prod(box)) * dtype.bytes
    seen = np.repeat(x[:1], batches, 0) if batches else x[:, :, :columns]
    map = Map("x", dtype, seen.shape[::-1], (shape[2], 0 if batches else shape[1] * shape[2]), box, swizzle)

    def record(k: Builder) -> None:
        out, source = k.pointer("out"), k.tensor_map("source")
        buffer = k.shared(size * len(places), alignment=1024)
        (full,) = barriers(1)
        with k.when(k.thread == 0):
            hw.prefetch_tensor_map(source)
            hw.mbarrier_arrive_expect_tx(full, size * len(places))
            for i, place in enumerate(places):
                hw.tma_load(source, *place, buffer[0].at(size * i), full, cache)
        hw.mbarrier_wait(full, 0)
        dump(buffer[0], size * len(places), out)

    images = [swizzle_image(box_of(seen, p, box).reshape(-1, box[0]), swizzle) for p in places]
    return Case(f"tma_load_{name}", record, np.concatenate(images), {"x": x}, {"source": map})


def tma_store(
    name: str, dtype: DType, shape: tuple[int, int, int], box: tuple[int, int, int], swizzle: int,
    *places: tuple[int, int, int], turn: bool = False, streaming: bool = False,
) -> Case:  # fmt: skip
    """Boxes from shared memory, each a group of its own; `turn` refills one buffer once it has been read; `streaming`:
    the L2 is told to evict them first."""
    images = integers(name, (len(places), box[2] * box[1], box[0]), dtype.numpy, 100)
    laid = np.concatenate([swizzle_image(x, swizzle) for x in images])
    size = images[0].nbytes

    def record(k: Builder) -> None:
        x, target = k.pointer("x"), k.tensor_map("target")
        buffer = k.shared(size * (1 if turn else len(places)), alignment=1024)
        if not turn:
            fill(buffer[0], size * len(places), x)
        for i, place in enumerate(places):
            if turn:
                fill(buffer[0], size, x + size * i)
            hw.fence_proxy_async()
            hw.sync_threads()
            with k.when(k.thread == 0):
                store = target, *place, buffer[0].at(0 if turn else size * i)
                if streaming:
                    hw.tma_store_hint(*store, EVICT_FIRST)
                else:
                    hw.tma_store(*store)
                hw.bulk_commit()
                if turn:
                    hw.bulk_wait_read(0)
            if turn:
                hw.sync_threads()
        with k.when(k.thread == 0):
            for i in reversed(range(len(places))):
                bulk_wait(i)

    expected = poisoned(shape, dtype.numpy)
    for image, place in zip(images, places, strict=True):
        image = image.reshape(box[::-1])
        target = [slice(max(p, 0), p + b) for p, b in zip(place, box, strict=True)][::-1]
        part = tuple(slice(t.start - p, None) for t, p in zip(target, place[::-1], strict=True))
        written = expected[tuple(target)]
        written[:] = image[part][tuple(slice(0, n) for n in written.shape)]
    maps = {"target": Map("out", dtype, shape[::-1], (shape[2], shape[1] * shape[2]), box, swizzle)}
    return Case(f"tma_store_{name}", record, expected, {"x": laid}, maps)


def short_rows(dtype: DType, columns: int) -> Case:
    """A tensor whose rows end within a chunk of 16 bytes, in an array with wider ones: whole chunks are written."""
    wide = 128 // dtype.bytes
    image = integers(f"short {dtype}", (8, wide), dtype.numpy, 100) + dtype.numpy.type(1)

    def record(k: Builder) -> None:
        x, target, buffer = k.pointer("x"), k.tensor_map("target"), k.shared(image.nbytes, alignment=1024)
        fill(buffer[0], image.nbytes, x)
        hw.fence_proxy_async()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.tma_store(target, 0, 0, 0, buffer[0])
            hw.bulk_commit()
            bulk_wait(0)

    expected = poisoned((8, wide + 16), dtype.numpy)
    expected[:, :wide] = image
    maps = {"target": Map("out", dtype, (columns, 8, 1), (wide + 16, 0), (wide, 8, 1), 0)}
    return Case(f"tma_store_short_rows_{dtype}", record, expected, {"x": image}, maps)


for dtype, swizzle in product((BF16, FP16, FP32), SWIZZLES):
    inner = (swizzle or 96) // dtype.bytes
    tag, wide = f"{dtype}_swizzle{swizzle}", 256 // dtype.bytes
    CASES.append(tma_load(tag, dtype, (1, 64, wide), (inner, 32, 1), swizzle, (0, 0, 0), (16, 24, 0)))
    CASES.append(tma_store(tag, dtype, (1, 64, wide), (inner, 32, 1), swizzle, (0, 0, 0), (16, 32, 0)))
    edges = [(wide - 8, 10, 0), (0, 18, 1), (wide - 16, 18, 2), (wide, 0, 0), (8, 30, 0), (0, 0, 3)]
    CASES.append(tma_load(f"outside_{tag}", dtype, (3, 30, wide), (inner, 16, 1), swizzle, *edges))
    CASES.append(tma_store(f"outside_{tag}", dtype, (3, 30, wide), (inner, 16, 1), swizzle, *edges))
for swizzle in SWIZZLES:
    inner = (swizzle or 48) // 2
    tag, shape, box = f"swizzle{swizzle}", (2, 40, 128), (inner, 16, 1)
    before = [(-8, -3, 0), (-inner, 0, 0), (8, -16, 1), (-8, 5, 1), (8, 2, 0), (0, 0, -1)]
    CASES.append(tma_load(f"before_{tag}", BF16, shape, box, swizzle, *before))
    CASES.append(tma_load(f"batches_{tag}", BF16, (4, 16, 64), (inner, 8, 2), swizzle, (0, 4, 1), (8, 12, 3)))
    turns = [(0, 8 * i, i % 2) for i in range(4)]
    CASES.append(tma_store(f"streaming_{tag}", FP16, shape, box, swizzle, *turns, streaming=True))
    CASES.append(tma_store(f"turns_{tag}", FP16, shape, box, swizzle, *turns, turn=True))
CASES += [short_rows(BF16, 61), short_rows(FP32, 30)]
CASES += [tma_load(f"cache_{cache.name}", BF16, (1, 8, 64), (64, 8, 1), 128, (0, 0, 0), cache=cache)
          for cache in (EVICT_FIRST, EVICT_NORMAL, EVICT_LAST)]  # fmt: skip
CASES += [tma_load("stride_0", FP16, (1, 16, 64), (64, 8, 1), 128, (0, 0, 4), (0, 8, 1), (0, 0, 5), batches=5)]
# A row of 37 elements is no multiple of 16 bytes: rows are padded, and the padding is never read.
CASES += [tma_load(f"padded_swizzle{swizzle}", BF16, (1, 21, 64), ((swizzle or 64) // 2, 16, 1), swizzle, (32, 10, 0),
                   columns=37) for swizzle in SWIZZLES]  # fmt: skip


def tile_load(dtype: DType, mn: int, depth: int, major: str, parts: int = 1) -> Case:
    """A whole tile by `Operand.load`, against `Tile.offset`; `parts` CTAs bring a part each to all of them."""
    tile = Tile(dtype, mn, depth, major)  # type: ignore[arg-type]
    name = f"tile_{dtype}_{mn}x{depth}_{major}_parts{parts}"
    shape = (mn, depth) if major == "K" else (depth, mn)
    x = integers(name, shape, dtype.numpy, 100)

    def record(k: Builder) -> None:
        out, rank = k.pointer("out"), hw.cluster_rank() if parts > 1 else k.lane * 0
        operand = staged("source", tile)
        operand.enable_multicast(parts, rank, (1 << parts) - 1)
        buffer = operand.stages
        (full,) = barriers(1)
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(full, tile.bytes)
            operand.load(Constant(I32, 0), full, OperandCoord(k.lane * 0, k.lane * 0), k.lane * 0)
        hw.mbarrier_wait(full, 0)
        dump(buffer[0], tile.bytes, out + (rank * tile.bytes).to(U64))

    image = np.zeros(tile.bytes // dtype.bytes, dtype.numpy)
    row, column = np.mgrid[:mn, :depth]
    image[tile.offset(row, column) // dtype.bytes] = x if major == "K" else x.T
    maps = {"source": Map("x", dtype, (shape[1], shape[0], 1), (shape[1], 0),
                          (tile.box_inner, tile.outer // parts, 1), tile.swizzle)}  # fmt: skip
    numbers = {f"source_multicast_slice_{'k' if major == 'MN' else 'n'}": tile.outer // parts} if parts > 1 else {}
    return Case(
        f"tma_{name}", record, np.tile(image, parts), {"x": x}, maps, cluster=parts, grid=parts, numbers=numbers
    )


for major, parts in product(("K", "MN"), (1, 2, 4)):
    sizes = [(64, 16), (64, 32), (64, 64), (64, 128), (128, 192), (256, 64), (96, 64), (80, 32), (32, 64)]
    CASES += [tile_load(BF16, mn, depth, major, parts) for mn, depth in sizes]
CASES += [tile_load(BF16, mn, 64, "MN") for mn in (8, 24, 40)]  # rows padded to 32 bytes


def multicast(mask: int) -> Case:
    """Rank 0 sends a box to the CTAs of `mask` (not itself, where it is not in it), each of which waits for it."""
    x = integers(f"multicast{mask}", (1, 32, 64), BF16.numpy, 100)
    size = 32 * 128

    def record(k: Builder) -> None:
        out, source, rank = k.pointer("out"), k.tensor_map("source"), hw.cluster_rank()
        buffer = k.shared(size, alignment=1024)
        (full,) = barriers(1)
        receives = ((Constant(I32, mask) >> rank) & 1) == 1
        with k.when((k.thread == 0) & receives):
            hw.mbarrier_arrive_expect_tx(full, size)
        sync_cluster()
        with k.when((k.thread == 0) & (rank == 0)):
            hw.tma_load_multicast(source, 0, 0, 0, buffer[0], full, mask, EVICT_NORMAL)
        with k.when(receives):
            hw.mbarrier_wait(full, 0)
            dump(buffer[0], size, out + (rank * size).to(U64))
        sync_cluster()

    expected = poisoned((4, 32 * 64), BF16.numpy)
    for rank in range(4):
        if mask >> rank & 1:
            expected[rank] = swizzle_image(x[0], 128)
    maps = {"source": Map("x", BF16, (64, 32, 1), (64, 0), (64, 32, 1), 128)}
    return Case(f"tma_multicast_{mask:04b}", record, expected, {"x": x}, maps, cluster=4, grid=4)


CASES += [multicast(mask) for mask in (0b0001, 0b0010, 0b1010, 0b1111)]


# -- global and shared memory ----------------------------------------------------------------------------
def global_copy(count: int) -> Case:
    """Predicated loads (zeros elsewhere) and stores of 4 * count bytes, at address 0 where nothing is moved."""
    x = integers(f"global{count}", (128, count))

    def record(k: Builder) -> None:
        out, source = k.pointer("out"), k.pointer("x")
        loads, stores = k.thread % 3 != 0, k.thread % 5 != 0
        values = k.registers(U32, count, "values")
        hw.load_global(values, k.select(loads, at(source, 127 - k.thread, 4 * count), 0), loads)
        hw.store_global(values, k.select(stores, at(out, k.thread, 4 * count), 0), stores)

    thread = np.arange(128)[:, None]
    expected = np.where(thread % 3 != 0, x[::-1], 0).astype(np.uint32)
    expected = np.where(thread % 5 != 0, expected, poisoned(x.shape, x.dtype))
    return Case(f"global_{4 * count}_bytes", record, expected, {"x": x})


def global_halves(k: Builder) -> None:
    out, source = k.pointer("out"), k.pointer("x")
    loads, stores = k.thread % 3 != 0, k.thread % 5 != 0
    value = hw.load_global_u8_or_u16(k.select(loads, at(source, 127 - k.thread, 2), 0), loads, 16)
    hw.store_global_u8_or_u16(k.select(stores, at(out, k.thread, 2), 0), value, stores, 16)


def global_bytes(k: Builder) -> None:
    out, source = k.pointer("out"), k.pointer("x")
    loads, stores = k.thread % 3 != 0, k.thread % 5 != 0
    value = hw.load_global_u8_or_u16(k.select(loads, at(source, 127 - k.thread, 1), 0), loads, 8)
    hw.store_global_u8_or_u16(k.select(stores, at(out, k.thread, 1), 0), value, stores, 8)


_x, _t = integers("halves", (64,)).view(np.uint16), np.arange(128)
_halves = np.where(_t % 5 != 0, np.where(_t % 3 != 0, _x[::-1], 0), poisoned((128,), np.uint16)).astype(np.uint16)
CASES += [global_copy(count) for count in (1, 2, 4)]
CASES += [Case("global_2_bytes", global_halves, _halves, {"x": _x})]
_y = integers("bytes", (32,)).view(np.uint8)
_bytes = np.where(_t % 5 != 0, np.where(_t % 3 != 0, _y[::-1], 0), poisoned((128,), np.uint8)).astype(np.uint8)
CASES += [Case("global_1_byte", global_bytes, _bytes, {"x": _y})]


def shared_copy(count: int) -> Case:
    """st.shared and ld.shared by another thread, 4 * count bytes."""
    x = integers(f"shared{count}", (128, count))

    def record(k: Builder) -> None:
        out, source, buffer = k.pointer("out"), k.pointer("x"), k.shared(128 * 4 * count)
        values, back = k.registers(U32, count, "values"), k.registers(U32, count, "back")
        hw.load_global(values, at(source, k.thread, 4 * count), True)
        hw.store_shared(values, slot(buffer[0], k.thread, 4 * count))
        hw.sync_threads()
        hw.load_shared(back, slot(buffer[0], k.thread ^ 77, 4 * count))
        hw.store_global(back, at(out, k.thread, 4 * count), True)

    return Case(f"shared_{4 * count}_bytes", record, x[np.arange(128) ^ 77], {"x": x})


def shared_halves(k: Builder) -> None:
    out, source, buffer = k.pointer("out"), k.pointer("x"), k.shared(256)
    hw.store_shared_u16(slot(buffer[0], k.thread, 2), hw.load_global_u8_or_u16(at(source, k.thread, 2), True, 16))
    hw.sync_threads()
    with k.when(k.thread < 64):
        write(out, k.thread, load_shared_word(slot(buffer[0], 63 - k.thread, 4)))


def shared_narrow(k: Builder) -> None:
    """A byte and a half of shared memory, extended by zeros."""
    out, source, buffer = k.pointer("out"), k.pointer("x"), k.shared(256)
    with k.when(k.thread < 64):
        hw.store_shared(words(read_word(source, k.thread)), slot(buffer[0], k.thread, 4))
    hw.sync_threads()
    narrow = [(255 - k.thread, 8), (127 - k.thread, 16)]
    loaded = [hw.load_shared_u8_or_u16(slot(buffer[0], index, bits // 8), bits) for index, bits in narrow]
    write(out, k.thread, *(x.to(U32) for x in loaded))


def local_copy(k: Builder) -> None:
    """Within a warp, ordered by __syncwarp."""
    out, source, buffer = k.pointer("out"), k.pointer("x"), k.shared(512)
    hw.store_shared(words(read_word(source, k.thread)), slot(buffer[0], k.thread, 4))
    hw.sync_warp()
    write(out, k.thread, load_shared_word(slot(buffer[0], k.thread ^ 21, 4)))


_w = integers("local", (128,))
CASES += [shared_copy(count) for count in (1, 2, 4)]
CASES += [Case("shared_2_bytes", shared_halves, _x.view(np.uint32)[::-1].copy(), {"x": _x})]
_narrow = np.stack([_x.view(np.uint8)[::-1][:128], _x[::-1]], 1).astype(np.uint32)
CASES += [Case("shared_1_and_2_bytes", shared_narrow, _narrow, {"x": _x.view(np.uint32)})]
CASES += [Case("shared_in_a_warp", local_copy, _w[np.arange(128) ^ 21], {"x": _w})]


def cp_async(nbytes: int) -> Case:
    """Two groups; thread t copies the first t % (nbytes + 1) bytes of its own, and zeros after them."""
    x = integers(f"cp_async{nbytes}", (2, 128, nbytes // 4))

    def record(k: Builder) -> None:
        out, source, buffer = k.pointer("out"), k.pointer("x"), k.shared(128 * nbytes, stages=2)
        amount = (k.thread % (nbytes + 1)).to(U32)
        for group in range(2):
            address = at(source + group * 128 * nbytes, k.thread, nbytes)
            hw.cp_async_copy(slot(buffer[group], k.thread, nbytes), address, amount, nbytes)
            hw.cp_async_commit()
        for group in range(2):
            hw.cp_async_wait(1 - group)
            hw.sync_threads()
            dump(buffer[group], 128 * nbytes, out + group * 128 * nbytes)

    kept = np.arange(nbytes)[None, :] < np.arange(128)[:, None] % (nbytes + 1)
    expected = np.where(kept, x.view(np.uint8), 0).astype(np.uint8)
    return Case(f"cp_async_{nbytes}_bytes", record, expected, {"x": x})


CASES += [cp_async(nbytes) for nbytes in (4, 8, 16)]


def cp_async_on_a_barrier() -> Case:
    """Thread t copies word t twice, for two phases, in each of which all 128 arrive when their copies have landed."""
    x = integers("cp_async_barrier", (2, 128))

    def record(k: Builder) -> None:
        out, source, buffer = k.pointer("out"), k.pointer("x"), k.shared(512, stages=2)
        full = barriers(128)
        for phase in range(2):
            hw.cp_async_copy(slot(buffer[phase], k.thread, 4), at(source + phase * 512, k.thread, 4), 4, 4)
            hw.cp_async_arrive(full[0])
            hw.mbarrier_wait(full[0], phase)
            dump(buffer[phase], 512, out + phase * 512)

    return Case("cp_async_on_a_barrier", record, x, {"x": x})


CASES += [cp_async_on_a_barrier()]


# -- ldmatrix, stmatrix ----------------------------------------------------------------------------------
def matrices(count: int, transposed: bool, store: bool) -> Case:
    """Each of 4 warps moves `count` matrices whose rows lie scattered in its 512 bytes of shared memory."""
    name = f"{'st' if store else 'ld'}matrix_x{count}{'_trans' * transposed}"
    lane = np.arange(32)
    scattered = (lane * 7 + 3) % 32  # the row of shared memory that lane gives the address of
    x = integers(name, (4, 32, count if store else 4))

    def record(k: Builder) -> None:
        out, source, buffer = k.pointer("out"), k.pointer("x"), k.shared(4 * 512)
        fill(buffer[0], 4 * 512, None if store else source)
        hw.sync_threads()
        address = slot(buffer[0], k.warp_index * 32 + (k.lane * 7 + 3) % 32, 16)
        values = k.registers(U32, count, "values")
        if store:
            hw.load_global(values, at(source, k.thread, 4 * count), True)
            hw.store_matrix(values, address, transposed)
            hw.sync_threads()
            dump(buffer[0], 4 * 512, out)
        else:
            hw.load_matrix(values, address, transposed)
            hw.store_global(values, at(out, k.thread, 4 * count), True)

    # PTX ISA: lane l holds elements 2 (l % 4) and one more of row l / 4; lane 8 j + r points to row r of matrix j.
    row, column = lane[:, None] // 4, lane[:, None] % 4 * 2 + np.arange(2)
    shared = np.zeros((4, 32, 8), np.uint16) if store else x.view(np.uint16).reshape(4, 32, 8)
    held = x.view(np.uint16).reshape(4, 32, count, 2) if store else np.zeros((4, 32, count, 2), np.uint16)
    for j in range(count):
        places = scattered[8 * j : 8 * j + 8]
        if store:
            matrix = np.zeros((4, 8, 8), np.uint16)
            matrix[:, row, column] = held[:, :, j]
            shared[:, places] = matrix.swapaxes(1, 2) if transposed else matrix
        else:
            matrix = shared[:, places].swapaxes(1, 2) if transposed else shared[:, places]
            held[:, :, j] = matrix[:, row, column]
    return Case(name, record, shared if store else held, {"x": x})


CASES += [matrices(*how) for how in product((1, 2, 4), (False, True), (False, True))]
