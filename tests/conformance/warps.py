"""What a warp multiplies: mma.sync and wmma, of every type; and dp4a, fma.f16x2, cvt.rna.tf32."""

from __future__ import annotations

from itertools import product

import numpy as np
from tests.conformance.case import Case, at, floats, integers, read_word, write

from gemmsmith import hw
from gemmsmith.backends.reference.matmul import truncate_to_tf32
from gemmsmith.core.dtypes import FP16, INT32, TF32, DType
from gemmsmith.core.mma import D_FRAGMENT, MMA_SYNC, Mma
from gemmsmith.hw.mma import fused_mma
from gemmsmith.hw.wmma import fragment_registers, k_per_hmma, wmma_k
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, I32, U32, U64, ScalarType

WARPS = 4
_REGISTERS: dict[DType, ScalarType] = {FP16: U32, INT32: I32}


def _integers(title: str, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    return integers(title, shape, dtype.numpy, 127 if dtype.bits == 8 else 3)


def _floats(title: str, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    return floats(title, (shape[0] * shape[1], shape[2]), dtype).reshape(shape)


def _expected(a: np.ndarray, b: np.ndarray, c: np.ndarray, mma: Mma, step: int | None = None) -> np.ndarray:
    """a @ b + c of every warp, so many of k at once."""
    if mma.d.is_integer:
        return (a.astype(np.int64) @ b.astype(np.int64) + c).astype(np.int32)
    a, b = (truncate_to_tf32(x) if mma.a == TF32 else x for x in (a, b))
    step = step or a.shape[-1]
    for k in range(0, a.shape[-1], step):
        columns = b[:, k : k + step].swapaxes(-1, -2).astype(float)
        c = fused_mma(a[..., k : k + step].astype(float), columns, c.astype(float), mma)
    return c


def mma_sync(mma: Mma, rounds: bool = False) -> Case:
    """A 16 x k tile times a k x 8 tile by each warp; words are loaded as the fragments say."""
    title = f"mma_sync_{mma.a}_{mma.d}{'_rounds' * rounds}"

    def record(k: Builder) -> None:
        out, c = k.pointer("out"), k.pointer("c")
        a, b = k.registers(U32, 4, "a_fragment"), k.registers(U32, 2, "b_fragment")
        sources, warp = {"a": k.pointer("a"), "b": k.pointer("b")}, k.warp_index
        for name, registers, rows in (("a", a, 16), ("b", b, 8)):
            for i in range(registers.count):
                row = k.lane // 4 + (8 * (i % 2) if name == "a" else 0)
                word = k.lane % 4 + 4 * (i // 2 if name == "a" else i)
                registers[i] = read_word(sources[name], (warp * rows + row) * 8 + word)
        d = k.registers(_REGISTERS.get(mma.d, F32), mma.accumulator_registers(8), "d")
        for load in (True, False):
            for i in range(d.count):
                row, column = D_FRAGMENT.element(k.lane, i * (2 if mma.d == FP16 else 1))
                place = (warp * 16 + row) * 8 + column
                one = k.registers(d.type, 1, "one")
                if load:
                    hw.load_global(one, at(c, place, mma.d.bytes), True)
                    d[i] = one[0]
                else:
                    one[0] = d[i]
                    hw.store_global(one, at(out, place, mma.d.bytes), True)
            if load:
                hw.mma_sync(d, a, b, mma)

    shapes = (WARPS, 16, mma.k), (WARPS, 8, mma.k), (WARPS, 16, 8)
    dtypes = mma.a, mma.a, mma.d
    make = _floats if rounds else _integers
    a, b, c = (make(title + name, s, x) for name, s, x in zip("abc", shapes, dtypes, strict=True))
    return Case(title, record, _expected(a, b.swapaxes(1, 2), c, mma), {"a": a, "b": b, "c": c}, threads=32 * WARPS)


def wmma(mma: Mma, layouts: str, space: str, rounds: bool = False) -> Case:
    """A 16 x k tile times a k x 16 tile by each warp, in any layout, through shared or from global memory."""
    deep, title = wmma_k(mma), f"wmma_{mma.a}_{mma.d}_{layouts}_{space}{'_rounds' * rounds}"
    names = {"r": "row", "c": "col"}
    major = dict(zip("abd", (names[x] for x in layouts), strict=True))
    shapes = {"a": (16, deep), "b": (deep, 16), "d": (16, 16)}

    def record(k: Builder) -> None:
        pointers = {"a": k.pointer("a"), "b": k.pointer("b"), "d": k.pointer("c")}
        out, warp, fragments = k.pointer("out"), k.warp_index, {}
        for name, pointer in pointers.items():
            type, dtype = _REGISTERS.get(mma.d, F32) if name == "d" else U32, mma.d if name == "d" else mma.a
            fragment = fragments[name] = k.registers(type, fragment_registers(mma, name), f"{name}_fragment")
            rows, columns = shapes[name]
            stride, size = columns if major[name] == "row" else rows, rows * columns * dtype.bytes
            if space == "global":
                hw.wmma_load_global(fragment, pointer + (warp * size).to(U64), stride, name, major[name], mma)
                continue
            tile = k.shared(size, stages=WARPS, alignment=32, name=f"{name}_tile")[warp]
            with k.range(0, size // 4, 32, name="i") as i, k.when(i + k.lane < size // 4):
                word = k.registers(U32, 1, "word")
                word[0] = read_word(pointer, warp * (size // 4) + i + k.lane)
                hw.store_shared(word, tile.address + ((i + k.lane) * 4).to(U32))
            hw.sync_warp()
            hw.wmma_load(fragment, tile, stride, name, major[name], mma)
        d = fragments["d"]
        hw.wmma_mma(d, fragments["a"], fragments["b"], major["a"], major["b"], mma)
        size = 256 * mma.d.bytes
        if space == "global":
            hw.wmma_store_global(d, out + (warp * size).to(U64), 16, major["d"], mma)
            return
        tile = k.shared(size, stages=WARPS, alignment=32, name="out_tile")[warp]
        hw.wmma_store(d, tile, 16, major["d"], mma)
        hw.sync_warp()
        with k.range(0, size // 4, 32, name="i") as i:
            word = k.registers(U32, 1, "word")
            hw.load_shared(word, tile.address + ((i + k.lane) * 4).to(U32))
            hw.store_global(word, at(out, warp * (size // 4) + i + k.lane, 4), True)

    inputs, seen = {}, {}
    for name, (rows, columns) in shapes.items():
        dtype = mma.d if name == "d" else mma.a
        shape = (WARPS, rows, columns) if major[name] == "row" else (WARPS, columns, rows)
        x = _floats(title + name, shape, dtype) if rounds else _integers(title + name, shape, dtype)
        inputs["c" if name == "d" else name] = x
        seen[name] = x if major[name] == "row" else x.swapaxes(1, 2)
    expected = _expected(seen["a"], seen["b"], seen["d"], mma, k_per_hmma(mma))
    expected = np.ascontiguousarray(expected if major["d"] == "row" else expected.swapaxes(1, 2))
    return Case(title, record, expected, inputs, threads=32 * WARPS)


def _dp4a() -> Case:
    a, b, c = (integers(f"dp4a{name}", (128,)) for name in "abc")

    def record(k: Builder) -> None:
        out, (x, y, z) = k.pointer("out"), (read_word(k.pointer(name), k.thread) for name in "abc")
        write(out, k.thread, hw.dp4a(x, y, z.to(I32)).to(U32))

    products = a.view(np.int8).reshape(-1, 4).astype(np.int64) * b.view(np.int8).reshape(-1, 4)
    return Case("dp4a", record, (products.sum(1) + c.astype(np.int64)).astype(np.uint32), {"a": a, "b": b, "c": c})


FLOATS = [mma for mma in MMA_SYNC.instructions if mma.d != INT32]
CASES = [mma_sync(mma) for mma in MMA_SYNC.instructions] + [mma_sync(mma, rounds=True) for mma in FLOATS]
CASES += [wmma(mma, "rcr", space) for mma, space in product(MMA_SYNC.instructions, ("shared", "global"))]
CASES += [wmma(MMA_SYNC.instructions[0], layouts, "shared") for layouts in ("rrr", "crc", "ccr")]
CASES += [wmma(mma, "rcr", "shared", rounds=True) for mma in FLOATS]
CASES += [_dp4a()]
