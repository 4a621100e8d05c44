"""wgmma: every shape, type, layout and source of its operands."""

from __future__ import annotations

from itertools import product

import numpy as np
from tests.conformance.case import Case, Map, at, barriers, floats, integers, staged

from gemmsmith import hw
from gemmsmith.backends.reference.matmul import truncate_to_tf32
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import BF16, FP16, FP32, INT32
from gemmsmith.core.mma import WGMMA, Mma, fragment_column, fragment_row, select_mma
from gemmsmith.core.tile import Tile
from gemmsmith.hw.mma import fused_mma
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, RegisterArray, Value
from gemmsmith.tile_scheduler.tiles import OperandCoord

BF16_FP32 = select_mma(BF16, BF16, FP32)
KINDS = (BF16_FP32, select_mma(FP16, FP16, FP32), select_mma(FP16, FP16, FP16))
ROWS = 64


def _places(k: Builder, row: Value, n: int, half: bool) -> list[tuple[int, Value]]:
    """(register, element offset in D) of every pair of neighbors that a thread holds; registers hold pairs if half."""
    first = (row + fragment_row(k.warp_index % 4, k.lane)) * n + fragment_column(k.lane)
    return [(i if half else 2 * i, first + (i // 2 * 8 + i % 2 * 8 * n)) for i in range(n // 4)]


def _move(
    k: Builder, d: RegisterArray, pointer: Value, places: list[tuple[int, Value]], half: bool, load: bool
) -> None:
    size, count = (2, 1) if half else (4, 2)
    for register, offset in places:
        pair = k.registers(d.type, count, "pair")
        if load:
            hw.load_global(pair, at(pointer, offset, size), True)
        for i in range(count):
            if load:
                d[register + i] = pair[i]
            else:
                pair[i] = d[register + i]
        if not load:
            hw.store_global(pair, at(pointer, offset, size), True)


def _read(x: np.ndarray) -> np.ndarray:
    """The numbers that it multiplies."""
    return (truncate_to_tf32(x) if x.dtype == np.float32 else x).astype(float)


def wgmma(
    n: int, mma: Mma, *, majors: str = "KK", depth: int = 64, accumulate: bool = True,
    a_rows: int = 0, warpgroups: int = 1, cluster: int = 1, from_registers: bool = False, groups: int = 1,
    rounds: bool = False,
) -> Case:  # fmt: skip
    """D = A B^T (+ C) with a tile `a_rows` high (of which each warpgroup multiplies 64 rows) and `depth` deep, of small
    integers; or of numbers for which it `rounds`, as the model of the sums says."""
    name = {"K": "K", "M": "MN"}
    half = mma.d == FP16
    a_tile = Tile(mma.a, a_rows or ROWS * warpgroups, depth, name[majors[0]])  # type: ignore[arg-type]
    b_tile = Tile(mma.b, n, depth, name[majors[1]])  # type: ignore[arg-type]
    tag = "".join(
        f"_{text}" for text, present in (
            ("registers", from_registers), ("overwrite", not accumulate), (f"a{a_rows}", a_rows),
            (f"warpgroups{warpgroups}", warpgroups > 1), (f"cluster{cluster}", cluster > 1),
            (f"groups{groups}", groups > 1), ("rounds", rounds),
        ) if present
    )  # fmt: skip
    title = f"wgmma_{mma.a}_{mma.b}_{mma.d}_n{n}_k{depth}_{majors}{tag}"
    rows = ROWS * warpgroups

    def record(k: Builder) -> None:
        out, c, a_words = k.pointer("out"), k.pointer("c"), k.pointer("a")
        a, b, first = staged("a_map", a_tile), staged("b_map", b_tile), Constant(I32, 0)
        a_smem, b_smem = a.stages, b.stages
        (full,) = barriers(1)
        rank = hw.cluster_rank() if cluster > 1 else k.lane * 0
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(full, b_tile.bytes + (0 if from_registers else a_tile.bytes))
            if not from_registers:
                a.load(first, full, OperandCoord(rank * rows, k.lane * 0), k.lane * 0)
            b.load(first, full, OperandCoord(rank * n, k.lane * 0), k.lane * 0)
        hw.mbarrier_wait(full, 0)
        row = rank * rows + k.warpgroup_index * ROWS
        places = _places(k, row, n, half)
        (d,) = Accumulator(mma, ROWS, n).fragments
        _move(k, d, c, places, half, load=True)
        fragments = []
        for step in range(depth // mma.k if from_registers else 0):
            fragment = k.registers(U32, 4, f"a_{step}")
            for i in range(4):
                word = k.registers(U32, 1, "word")
                a_row = row + fragment_row(k.warp_index % 4, k.lane) + i % 2 * 8
                column = k.lane % 4 + (8 * step + i // 2 * 4)  # in words
                hw.load_global(word, at(a_words, a_row * (depth * mma.a.bytes // 4) + column, 4), True)
                fragment[i] = word[0]
            fragments.append(fragment)
        a_view = a_smem[0] if a_rows else a_smem[0].rows(k.warpgroup_index * ROWS, ROWS)
        hw.wgmma_fence()
        for step in range(depth // mma.k):
            keep, b_desc = accumulate or step > 0, hw.descriptor(b_smem[0], step)
            if from_registers:
                hw.wgmma_mma_rs(d, fragments[step], b_desc, keep, n, mma, b_tile.major)
            else:
                a_desc = hw.descriptor(a_view, step)
                hw.wgmma_mma(d, a_desc, b_desc, keep, n, mma, a_tile.major, b_tile.major)
            if groups == 2 and step == depth // mma.k // 2 - 1:
                hw.wgmma_commit()
        hw.wgmma_commit()
        if groups == 2:
            hw.wgmma_wait(1)
        hw.wgmma_wait(0)
        hw.fence_operand(d)
        _move(k, d, out, places, half, load=False)

    inputs, maps = {}, {}
    for letter, tile, count in (("a", a_tile, rows * cluster), ("b", b_tile, n * cluster)):
        shape = (count, depth) if tile.major == "K" else (depth, count)
        inputs[letter] = (
            floats(title + letter, shape, tile.dtype) if rounds else integers(title + letter, shape, tile.dtype.numpy)
        )
        maps[f"{letter}_map"] = Map(
            letter, tile.dtype, (shape[1], shape[0], 1), (shape[1], 0), (tile.box_inner, tile.outer, 1), tile.swizzle
        )
    shape = (rows * cluster, n)
    inputs["c"] = floats(title + "c", shape, mma.d) if rounds else integers(title + "c", shape, mma.d.numpy, 100)
    a, b = (x if major == "K" else x.T for x, major in zip((inputs["a"], inputs["b"]), majors, strict=True))
    c = inputs["c"] if accumulate else np.zeros_like(inputs["c"])
    if rounds:
        result = c
        for k in range(0, depth, mma.k):
            result = fused_mma(_read(a[:, k : k + mma.k]), _read(b[:, k : k + mma.k]), result.astype(float), mma)
    else:
        a, b = a.astype(np.int64).reshape(cluster, rows, depth), b.astype(np.int64).reshape(cluster, n, depth)
        result = ((a @ b.swapaxes(1, 2)).reshape(shape) + c.astype(np.int64)).astype(c.dtype)
    return Case(
        title, record, result, inputs, maps, threads=128 * warpgroups, cluster=cluster,
        grid=cluster,
    )  # fmt: skip


LAYOUTS = ("KK", "KM", "MK", "MM")
CASES = [wgmma(n, kind, majors=m) for n, kind, m in product((8, 16, 24, 64, 96, 128, 256), KINDS, LAYOUTS)]
# Swizzles of a K-major tile follow its depth: 16 is 32 bytes, 32 is 64, 128 two boxes of 128.
CASES += [wgmma(n, kind, majors=m, depth=d) for n, kind, m, d in product((32, 64), KINDS, LAYOUTS, (16, 32, 128))]
# Of an MN-major tile they follow its rows: 80 is five boxes of 32 bytes, 96 three of 64.
CASES += [wgmma(80, BF16_FP32, majors=m, a_rows=r, depth=d) for m, r, d in product(("MK", "MM"), (80, 96), (16, 64))]
CASES += [wgmma(64, kind, majors=m, accumulate=False) for kind, m in product(KINDS, LAYOUTS)]
CASES += [
    wgmma(n, kind, majors=m, depth=d, from_registers=True)
    for n, kind, m, d in product((8, 64, 256), KINDS, ("KK", "KM"), (16, 64))
]
CASES += [wgmma(64, BF16_FP32, from_registers=True, accumulate=False)]
CASES += [wgmma(n, BF16_FP32, majors=m, warpgroups=w) for n, m, w in product((64, 192), LAYOUTS, (2, 3))]
# Shared addresses of rank 1 carry bits that do not fit a descriptor; several boxes need the stride beside them.
CASES += [
    wgmma(n, BF16_FP32, majors=m, cluster=2, warpgroups=w, depth=d)
    for n, m, w, d in product((64, 256), LAYOUTS, (1, 2), (64, 128))
    if d == 64 or n == 64
]
CASES += [wgmma(64, BF16_FP32, majors=m, depth=128, groups=2) for m in LAYOUTS]
# What is read K-major only.
K_MAJOR = [mma for mma in WGMMA.instructions if mma.majors == ("K",)]
CASES += [wgmma(n, mma, depth=d * mma.k) for n, mma, d in product((8, 64, 256), K_MAJOR, (1, 4, 8))]
CASES += [wgmma(n, mma, accumulate=False, depth=2 * mma.k) for n, mma in product((24, 96), K_MAJOR)]
CASES += [wgmma(n, mma, depth=2 * mma.k, from_registers=True) for n, mma in product((16, 128), K_MAJOR)]
CASES += [wgmma(64, mma, cluster=2, warpgroups=2, depth=64) for mma in K_MAJOR]
# Where sums round, every bit is the model's.
FLOATS = [mma for mma in WGMMA.instructions if mma.d != INT32]
CASES += [wgmma(256, mma, depth=4 * mma.k, rounds=True) for mma in FLOATS]
CASES += [wgmma(64, mma, depth=4 * mma.k, accumulate=False, rounds=True) for mma in FLOATS]
CASES += [wgmma(64, mma, depth=4 * mma.k, from_registers=True, rounds=True) for mma in FLOATS]
CASES += [wgmma(64, kind, majors=m, rounds=True) for kind, m in product(KINDS, LAYOUTS[1:])]
