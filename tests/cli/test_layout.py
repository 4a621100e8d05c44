"""`gemmsmith layout`: each number beside a second source: the PTX ISA, tensor-layouts, the simulator."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as some
from tests.conformance.case import Case, Map, barriers, dump, fill, read_word, staged, write
from tests.conformance.test_instructions import in_simulator

from gemmsmith import ArgumentError, hw
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.listing import disassemble
from gemmsmith.cli import main
from gemmsmith.cli.layout import make_page
from gemmsmith.cli.tile_layout import KINDS, MATRICES, describe, fragment_elements, make_tile
from gemmsmith.core.dtypes import BF16, E4M3, FP16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.mma import MMA_SYNC, WGMMA, Major, Mma, select_mma
from gemmsmith.core.tile import Tile
from gemmsmith.hw.wgmma import operand_access
from gemmsmith.hw.wmma import fragment_registers, wmma_k
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, I32, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value
from gemmsmith.tile_scheduler.tiles import OperandCoord

TILES = [
    (64, 64, BF16, "K", None), (64, 128, BF16, "K", None), (32, 32, BF16, "K", None), (24, 16, FP16, "K", None),
    (128, 64, BF16, "MN", None), (48, 32, BF16, "MN", None), (64, 128, E4M3, "K", 64), (64, 32, FP32, "K", 32),
    (64, 64, BF16, "K", 0), (64, 64, BF16, "MN", 64), (40, 24, BF16, "K", None),
]  # fmt: skip
each_tile = pytest.mark.parametrize(("mn", "k", "dtype", "major", "swizzle"), TILES)
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def units_of(tile: Tile, layout: str) -> np.ndarray:
    """(rows, columns) of memory: the byte of each element, by the units that the command shows."""
    units, size = np.array(describe(tile)["units"][layout]), tile.dtype.bytes
    return np.repeat(units, 16 // size, 1) + np.arange(tile.inner) % (16 // size) * size


@given(some.sampled_from([0, 32, 64, 128]), some.integers(1, 8), some.integers(1, 2), some.sampled_from(["K", "MN"]))
def test_units_are_those_of_the_ptx_isa(swizzle: int, atoms: int, boxes: int, major: Major) -> None:
    """Its swizzling modes: bits 4 to 6 of an address are xor-ed with the lowest 3, 2 or 1 of bits 7 to 9."""
    inner, outer = 64 * boxes, 8 * atoms
    tile = make_tile(*((outer, inner) if major == "K" else (inner, outer)), BF16, major, swizzle)
    width = swizzle or 2 * inner
    row, unit = np.arange(outer)[:, None], np.arange(inner // 8)[None, :] * 16
    address = unit // width * outer * width + row * width + unit % width
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    expected = address
    for bit in range(bits):
        expected = expected ^ ((address >> 7 + bit & 1) << 4 + bit)
    found = describe(tile)
    np.testing.assert_array_equal(found["units"]["without"], address)
    np.testing.assert_array_equal(found["units"]["with"], expected)
    assert (found["boxes"]["count"], found["boxes"]["row_bytes"]) == (2 * inner // width, width)


@pytest.mark.parametrize(("swizzle", "bits"), [(128, 3), (64, 2), (32, 1)])
def test_units_are_those_of_tensor_layouts(swizzle: int, bits: int) -> None:
    layouts = pytest.importorskip("tensor_layouts")
    tile = make_tile(64, swizzle // 2, BF16, "K", swizzle)
    of_cute = layouts.compose(layouts.Swizzle(bits, 4, 3), layouts.Layout((64, swizzle // 16), (swizzle, 16)))
    found = describe(tile)["units"]["with"]
    assert found == [[of_cute(row, unit) for unit in range(swizzle // 16)] for row in range(64)]


def of_tensor_layouts(layout: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of a thread-value layout into a column-major matrix."""
    cute = pytest.importorskip("tensor_layouts")
    threads, values = (cute.size(cute.mode(layout, i)) for i in range(2))
    index = np.array([[layout(t, v) for v in range(values)] for t in range(threads)])
    return index % rows, index // rows


@pytest.mark.parametrize(("kind", "dtype"), [
    ("mma-a", BF16), ("mma-b", BF16), ("mma-d", BF16), ("mma-a", FP32), ("mma-b", FP32), ("mma-a", INT8),
    ("mma-b", INT8), ("wgmma-d", BF16), ("wgmma-a", BF16), ("wmma-a", BF16), ("wmma-b", BF16), ("wmma-d", BF16),
    ("wmma-a", FP32), ("wmma-b", FP32),
])  # fmt: skip
def test_fragments_are_those_of_tensor_layouts(kind: str, dtype: DType) -> None:
    nvidia = pytest.importorskip("tensor_layouts.atoms_nv")
    atom = {BF16: nvidia.SM80_16x8x16_F32BF16BF16F32_TN, FP32: nvidia.SM80_16x8x8_F32TF32TF32F32_TN,
            INT8: nvidia.SM80_16x8x32_S32S8S8S32_TN}[dtype]  # fmt: skip
    if kind == "wgmma-d":
        expected, width = of_tensor_layouts(nvidia.gmma_c_layout(64), 64), 64
    else:
        expected = of_tensor_layouts(
            getattr(atom, f"{kind[-1].replace('d', 'c')}_layout"), 8 if kind[1:] in ("ma-b", "mma-b") else 16
        )
        width = 8 if kind == "mma-d" else 32 // dtype.bytes
    if kind in ("wmma-b", "wmma-d"):  # 16 columns of N, of two mma.sync
        rows, columns = (8, 0) if kind == "wmma-b" else (0, 8)
        expected = np.hstack([expected[0], expected[0] + rows]), np.hstack([expected[1], expected[1] + columns])
    if kind == "wgmma-a":  # a warp has 16 rows, with the fragment of mma.sync
        expected = np.vstack([expected[0] + 16 * warp for warp in range(4)]), np.vstack([expected[1]] * 4)
    for found, wanted in zip(fragment_elements(make_tile(64, width, dtype, "K"), kind), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", [x for x in MATRICES if "matrix" in x])
@pytest.mark.parametrize(("dtype", "major"), [(BF16, "K"), (BF16, "MN"), (FP32, "K"), (INT8, "K")])
def test_matrices_are_those_of_tensor_layouts(kind: str, dtype: DType, major: Major) -> None:
    """Whose copy atoms have the lane that passes an address, and a bit of the row there, for each bit of a register."""
    nvidia = pytest.importorskip("tensor_layouts.atoms_nv")
    count, tile = len(MATRICES[kind]), make_tile(64, 64, dtype, major)
    width, suffix = (f"U32x{count}", "N") if major == "K" else (f"U16x{2 * count}", "T")
    is_load = kind.startswith("ld")
    atom = getattr(nvidia, f"SM75_{width}_LDSM_{suffix}" if is_load else f"SM90_{width}_STSM_{suffix}")
    layout = atom.dst_layout_bits if is_load else atom.src_layout_bits
    bits = np.array([[layout(lane, i) for i in range(0, 32 * count, dtype.bits)] for lane in range(32)])
    (instruction,) = describe(tile, kind, "fragment")["access"]["instructions"]
    lane, inner = bits // 128, bits % 128 // dtype.bits
    outer, inner = np.array(instruction["rows"])[lane], np.array(instruction["columns"])[lane] + inner
    for found, wanted in zip(fragment_elements(tile, kind), (outer, inner)[:: 1 if major == "K" else -1], strict=True):
        np.testing.assert_array_equal(found, wanted)


WMMA = [(mma, x) for mma in MMA_SYNC.instructions for x in ("a", "b", "d") if x == "d" or mma.d != FP16]


@pytest.mark.parametrize(("mma", "operand"), WMMA, ids=str)
def test_wmma_has_the_fragments_that_ptxas_makes(mma: Mma, operand: Literal["a", "b", "d"]) -> None:
    """A kernel loads a tile and stores the fragment's registers; its SASS has the bytes of the tile that each gets."""
    dtype, deep, count = mma.d if operand == "d" else mma.a, wmma_k(mma), fragment_registers(mma, operand)
    columns, per_register = 16 if operand == "d" else deep, 32 // dtype.bits
    tile = make_tile(16, columns, FP32 if mma.a == TF32 else mma.a, "K", 0)
    row, column = fragment_elements(tile, f"wmma-{operand}")
    expected = ((row * columns + column) * dtype.bytes)[:, ::per_register]
    lane, loaded_at_once = np.arange(32)[:, None], 8 if operand == "d" and dtype != FP16 else 4
    first = lane // 4 * columns * dtype.bytes + lane % 4 * loaded_at_once
    np.testing.assert_array_equal(expected - first, np.broadcast_to(expected[0], expected.shape))
    with Builder("probe", threads=32) as k:
        source, out = k.pointer("source"), k.pointer("out")
        values = k.registers({FP32: F32, INT32: I32}.get(dtype, U32), count, "values")
        hw.wmma_load_global(values, source, columns, operand, "col" if operand == "b" else "row", mma)
        stored = expected.shape[1]  # of fp16, the others repeat these
        for i in range(0, stored, width := min(stored, 4)):
            hw.store_global(values.slice(i, width), out + (k.lane * 32 + i * 4).to(U64), True)
        kernel = k.finish()
    sass = disassemble(compile_source(kernel.source, kernel.name).cubin)
    assert re.search(r"SHF\.R\.U32\.HI R\d+, RZ, 0x2, R\d+", sass), sass  # lane // 4
    assert distances_of_stored_registers(sass) == expected[0].tolist(), sass


def distances_of_stored_registers(sass: str) -> list[int]:
    """Of each register that a listing stores, the bytes from the address of the first load to that of its own."""
    words, distances, loaded, stored = dict[str, int](), dict[str, int](), dict[int, int](), list[int]()
    for line in sass.splitlines():
        if x := re.search(r"(?:VIADD|IADD3) (R\d+), (R\d+)(?:\.reuse)?, (0x\w+)(?:, RZ)? ;", line):
            words[x[1]] = words.get(x[2], 0) + int(x[3], 16)
        elif x := re.search(r"IMAD\.WIDE (R\d+), (R\d+), 0x4, ", line):
            distances[x[1]] = 4 * words.get(x[2], 0)
        elif x := re.search(r"LDG\.E(\.64)? R(\d+), desc\[\w+\]\[(R\d+)\.64(?:\+(0x\w+))?\]", line):
            for i in range(2 if x[1] else 1):
                loaded[int(x[2]) + i] = distances.get(x[3], 0) + int(x[4] or "0", 16) + 4 * i
        elif x := re.search(r"MOV(?:\.U32)? R(\d+), (?:RZ, RZ, )?R(\d+) ;", line):
            loaded[int(x[1])] = loaded.get(int(x[2]), -1)
        elif x := re.search(r"STG\.E(?:\.(64|128))? desc\S+, R(\d+)", line):  # in the order of the program
            stored += [loaded[int(x[2]) + i] for i in range(int(x[1] or "32") // 32)]
    return stored


# -- beside what the simulator does --------------------------------------------------------------------------------


def executed(name: str, record: Callable[[Builder, Value], None], out: np.ndarray, threads: int = 128,
             maps: dict[str, Map] | None = None, **inputs: np.ndarray) -> np.ndarray:  # fmt: skip
    """What a kernel leaves in an array like `out`."""
    case = Case(name, lambda k: record(k, k.pointer("out")), out, inputs, maps or {}, threads=threads)
    return in_simulator(case, case.kernel(), 0)


def map_of(name: str, tile: Tile) -> Map:
    count, rows = (tile.k, tile.mn) if tile.major == "K" else (tile.mn, tile.k)
    return Map(name, tile.dtype, (count, rows, 1), (count, 0), (tile.box_inner, tile.outer, 1), tile.swizzle)


def load(k: Builder, **tiles: Tile) -> list:
    """Load tiles by TMA, and wait for them."""
    operands, (full,), zero = [staged(f"{x}_map", tile) for x, tile in tiles.items()], barriers(1), Constant(I32, 0)
    with k.when(k.thread == 0):
        hw.mbarrier_arrive_expect_tx(full, sum(tile.bytes for tile in tiles.values()))
        for x in operands:
            x.load(zero, full, OperandCoord(k.lane * 0, k.lane * 0), k.lane * 0)
    hw.mbarrier_wait(full, 0)
    return [x.stages for x in operands]


@each_tile
def test_tma_writes_there(mn: int, k: int, dtype: DType, major: Major, swizzle: int | None) -> None:
    tile = make_tile(mn, k, dtype, major, swizzle)
    shape = (mn, k) if major == "K" else (k, mn)
    place, number = units_of(tile, "with")[:, : shape[1]], np.arange(shape[0] * shape[1]).reshape(shape)

    def record(k: Builder, out: Value) -> None:
        (x,) = load(k, x=tile)
        dump(x[0], tile.bytes, out)

    for shift in range(0, 16, min(dtype.bits, 16)):  # a byte of the number at a time, if elements are bytes
        source = (number >> shift).astype(f"u{dtype.bytes}")
        memory = executed("tma", record, np.zeros(tile.bytes, np.uint8), maps={"x_map": map_of("x", tile)},
                          x=source.view(dtype.numpy))  # fmt: skip
        np.testing.assert_array_equal(memory.view(source.dtype)[place // dtype.bytes], source)


@each_tile
def test_a_descriptor_reads_the_elements_of_its_k_step(
    mn: int, k: int, dtype: DType, major: Major, swizzle: int | None
) -> None:
    """By the simulator's reading of the 64 bits."""
    tile = make_tile(mn, k, dtype, major, swizzle)
    descriptor = describe(tile)["descriptor"]
    if not tile.swizzle or tile.k * dtype.bytes % 32:
        assert "swizzled tiles, of whole k-steps of 32 bytes" in descriptor["reason"]
        return
    assert len(descriptor["k_steps"]) == k * dtype.bytes // 32
    step, count = 32 // dtype.bytes, mn // 8 * 8
    for i, value in enumerate(descriptor["k_steps"]):
        read = operand_access(int(value, 16), count, major == "MN").addresses
        rows, ks = np.arange(count), np.arange(i * step, (i + 1) * step)
        if major == "K":
            expected = tile.offset(rows[:, None], ks[None, :: 16 // dtype.bytes])
        else:
            expected = tile.offset(rows[None, ::8], ks[:, None])
        np.testing.assert_array_equal(read.reshape(expected.shape), expected)
    value = int(descriptor["value"], 16)
    for field in descriptor["fields"]:
        assert value >> field["first_bit"] & (1 << field["bits"]) - 1 == field["value"] == int(field["binary"], 2)


def loaded(k: Builder, source: Value, count: int) -> RegisterArray:
    """Row `thread` of a table of words, in registers."""
    registers = k.registers(U32, count, "loaded")
    for i in range(count):
        registers[i] = read_word(source, k.thread * count + i)
    return registers


def sums(k: Builder, out: Value, d: RegisterArray) -> None:
    """Write a thread's sums as its row of a table."""
    write(out, k.thread, *(hw.as_unsigned(d[i]) if d.type == F32 else d[i].to(U32) for i in range(d.count)))


def held(tile: Tile, kind: str, matrix: np.ndarray) -> np.ndarray:
    """(threads, registers): the words of a fragment of a matrix."""
    row, column = fragment_elements(tile, kind)
    return np.ascontiguousarray(matrix[row, column]).view(np.uint32)


def matrix_of(tile: Tile, kind: str, registers: np.ndarray) -> np.ndarray:
    """The matrix whose fragment the registers are, each an element."""
    row, column = fragment_elements(tile, kind)
    matrix = np.zeros((row.max() + 1, column.max() + 1), registers.dtype)
    matrix[row, column] = registers
    return matrix


def wgmma(k: Builder, out: Value, mma, n: int, a: RegisterArray | None, a_tile: Tile, b_tile: Tile) -> None:
    views = load(k, b=b_tile) if a else load(k, b=b_tile, a=a_tile)
    d = k.registers(F32 if mma.d == FP32 else I32, n // 2, "d")
    for i in range(n // 2):
        d[i] = 0
    hw.wgmma_fence()
    b = hw.descriptor(views[0][0], 0)
    if a:
        hw.wgmma_mma_rs(d, a, b, False, n, mma, "K")
    else:
        hw.wgmma_mma(d, hw.descriptor(views[1][0], 0), b, False, n, mma, "K", "K")
    hw.wgmma_commit()
    hw.wgmma_wait(0)
    hw.fence_operand(d)
    sums(k, out, d)


def test_wgmma_leaves_its_sums_there() -> None:
    """D[row, column] = 64 row + column, of A in shared memory."""
    tile, mma, i = make_tile(64, 16, BF16, "K"), select_mma(BF16, BF16, FP32), np.arange(64)
    a, b = np.zeros((2, 64, 16), BF16.numpy)
    a[:, 0], a[:, 1], b[:, 0], b[:, 1] = i, 1, 64, i
    maps = {"a_map": map_of("a", tile), "b_map": map_of("b", tile)}
    out = np.zeros((128, 32), np.float32)
    found = executed("wgmma_d", lambda k, out: wgmma(k, out, mma, 64, None, tile, tile), out, maps=maps, a=a, b=b)
    of_d = make_tile(64, 64, BF16, "K")
    np.testing.assert_array_equal(matrix_of(of_d, "wgmma-d", found), i[:, None] * 64 + i)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, E4M3, INT8], ids=str)
def test_wgmma_reads_a_there(dtype: DType) -> None:
    """A times the identity is A; its elements are numbers of three digits, a digit at a time."""
    depth, types = 32 // dtype.bytes, (dtype if dtype != FP32 else "tf32")
    a_tile, b_tile = make_tile(64, depth, dtype, "K"), make_tile(depth, depth, dtype, "K")
    mma = next(x for x in WGMMA.instructions if (x.a.name, x.b.name) == (str(types),) * 2 and x.d in (FP32, INT32))
    number, word = np.arange(64 * depth).reshape(64, depth), np.float32 if mma.d == FP32 else np.int32
    for shift in (0, 4, 8):
        a = (number >> shift & 15).astype(dtype.numpy)

        def record(k: Builder, out: Value) -> None:
            wgmma(k, out, mma, depth, loaded(k, k.pointer("a"), 4), a_tile, b_tile)

        found = executed("wgmma_a", record, np.zeros((128, depth // 2), word), maps={"b_map": map_of("b", b_tile)},
                         b=np.eye(depth).astype(dtype.numpy), a=held(a_tile, "wgmma-a", a))  # fmt: skip
        np.testing.assert_array_equal(matrix_of(make_tile(64, depth, BF16, "K"), "wgmma-d", found), a.astype(word))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, INT8], ids=str)
def test_mma_multiplies_what_is_there(dtype: DType, rng: np.random.Generator) -> None:
    depth, types = 32 // dtype.bytes, (dtype if dtype != FP32 else "tf32")
    mma = next(x for x in MMA_SYNC.instructions if x.a.name == str(types) and x.d in (FP32, INT32))
    a, b = (rng.integers(-8, 9, (rows, depth)).astype(dtype.numpy) for rows in (16, 8))
    tile, word = make_tile(16, depth, dtype, "K"), np.float32 if mma.d == FP32 else np.int32

    def record(k: Builder, out: Value) -> None:
        d = k.registers(F32 if mma.d == FP32 else I32, 4, "d")
        for i in range(4):
            d[i] = 0
        hw.mma_sync(d, loaded(k, k.pointer("a"), 4), loaded(k, k.pointer("b"), 2), mma)
        sums(k, out, d)

    found = executed(
        "mma", record, np.zeros((32, 4), word), threads=32, a=held(tile, "mma-a", a), b=held(tile, "mma-b", b)
    )
    np.testing.assert_array_equal(matrix_of(tile, "mma-d", found), a.astype(word) @ b.astype(word).T)


MOVES = [(BF16, "K", None), (BF16, "MN", None), (FP16, "K", 0), (FP32, "K", None), (INT8, "K", None)]


def lanes_bytes(tile: Tile, kind: str) -> np.ndarray:
    """The byte of the tile whose address each lane passes, by the access that the command shows."""
    (instruction,) = describe(tile, kind, "fragment")["access"]["instructions"]
    passed = units_of(tile, "with")[instruction["rows"], instruction["columns"]].astype(np.uint32)
    return np.resize(passed, 32)  # the addresses of the other lanes are not used


def numbered(tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """(mn, k) of numbers, and their bytes in shared memory. Elements of a byte have their numbers modulo 251."""
    number = (np.arange(tile.mn * tile.k) % (251 if tile.dtype.bits == 8 else 1 << 16)).reshape(tile.mn, tile.k)
    number = number.astype(f"u{tile.dtype.bytes}")
    memory, place = np.zeros(tile.bytes // tile.dtype.bytes, number.dtype), units_of(tile, "with") // tile.dtype.bytes
    memory[place] = number if tile.major == "K" else number.T
    return number, memory


@pytest.mark.parametrize(("dtype", "major", "swizzle"), MOVES)
@pytest.mark.parametrize("kind", ["ldmatrix", "ldmatrix.x2", "ldmatrix.x1"])
def test_ldmatrix_loads_what_mma_multiplies(kind: str, dtype: DType, major: Major, swizzle: int | None) -> None:
    tile, count = make_tile(64, 64, dtype, major, swizzle), len(MATRICES[kind])
    number, memory = numbered(tile)

    def record(k: Builder, out: Value) -> None:
        buffer = k.shared(tile.bytes, alignment=1024)
        fill(buffer[0], tile.bytes, k.pointer("memory"))
        hw.sync_threads()
        values = k.registers(U32, count, "values")
        address = buffer[0].address + read_word(k.pointer("lanes"), k.thread)
        hw.load_matrix(values, address, major == "MN")
        write(out, k.thread, *(values[i] for i in range(count)))

    found = executed("ldmatrix", record, np.zeros((32, count), np.uint32), threads=32, memory=memory.view(np.uint32),
                     lanes=lanes_bytes(tile, kind))  # fmt: skip
    np.testing.assert_array_equal(found, held(tile, kind, number))
    if count > 1:
        multiplied = fragment_elements(tile, "mma-a" if count == 4 else "mma-b")
        for a, b in zip(fragment_elements(tile, kind), multiplied, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("dtype", "major", "swizzle"), MOVES)
@pytest.mark.parametrize("kind", ["stmatrix", "stmatrix.x2", "stmatrix.x1"])
def test_stmatrix_stores_there(kind: str, dtype: DType, major: Major, swizzle: int | None) -> None:
    tile = make_tile(64, 64, dtype, major, swizzle)
    number, memory = numbered(tile)

    def record(k: Builder, out: Value) -> None:
        buffer = k.shared(tile.bytes, alignment=1024)
        fill(buffer[0], tile.bytes, None)
        hw.sync_threads()
        values = loaded(k, k.pointer("values"), len(MATRICES[kind]))
        address = buffer[0].address + read_word(k.pointer("lanes"), k.thread)
        hw.store_matrix(values, address, major == "MN")
        hw.sync_threads()
        dump(buffer[0], tile.bytes, out)

    found = executed("stmatrix", record, np.zeros_like(memory), threads=32, lanes=lanes_bytes(tile, kind),
                     values=held(tile, kind, number))  # fmt: skip
    row, column = fragment_elements(tile, kind)
    place = units_of(tile, "with")[(row, column) if major == "K" else (column, row)] // dtype.bytes
    expected = np.zeros_like(memory)
    expected[place] = memory[place]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP32, INT8], ids=str)
def test_elements_and_registers_are_a_round_trip(kind: str, dtype: DType) -> None:
    found = describe(make_tile(64, 64, dtype, "K"), kind)["fragment"]
    size = found["elements_per_register"]
    seen = set()
    for row, line in enumerate(found["holders"]):
        for column, (thread, register, part) in enumerate(line):
            assert found["elements"][thread][register * size + part] == [row, column]
            seen.add((thread, register, part))
    assert len(seen) == found["rows"] * found["columns"] == found["threads"] * len(found["elements"][0])


# -- bank conflicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("swizzle", "ways"), [(128, 1), (64, 2), (32, 4)])
@pytest.mark.parametrize("dtype", [BF16, FP32, INT8], ids=str)
def test_conflicts_of_a_column(dtype: DType, swizzle: int, ways: int) -> None:
    """8 lanes share a wavefront, of rows of as many bytes as the swizzle: without it, 128 bytes apart, all conflict."""
    tile = make_tile(64, 128 // dtype.bytes, dtype, "K", swizzle)
    found = describe(tile, access="column")["access"]
    assert found["wavefronts"]["ideal"] == 4
    assert found["wavefronts"]["without"] == 4 * swizzle // 16
    assert found["wavefronts"]["with"] == 4
    (one,) = found["instructions"]
    assert set(one["without"]["ways"]) == {swizzle // 16}
    assert set(one["with"]["ways"]) == {1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("major", ["K", "MN"])
def test_conflicts_are_the_most_words_of_a_bank(kind: str, swizzle: int, major: Major) -> None:
    tile = make_tile(64, 64, BF16, major, swizzle)
    if kind.startswith("wmma") and swizzle:
        with pytest.raises(ArgumentError, match=f"got {kind} of a swizzled tile"):
            describe(tile, kind, "fragment")
        return
    found = describe(tile, kind, "fragment")["access"]
    for layout in ("without", "with"):
        byte, total = units_of(tile, layout), 0
        for one in found["instructions"]:
            places = byte[one["rows"], one["columns"]]
            group = {16: 8, 8: 16}.get(one["bytes"], 32)
            expected = []
            for first in range(0, len(places), group):
                words = {
                    (p + b) // 4 for p in places[first : first + group].tolist() for b in range(0, one["bytes"], 1)
                }
                expected += [max(sum(w % 32 == bank for w in words) for bank in range(32))] * group
            assert one[layout]["ways"] == expected[: len(places)]
            assert one[layout]["wavefronts"] == sum(expected[::group])
            total += sum(expected[::group])
        assert found["wavefronts"][layout] == total
    if swizzle == 128 and major == "K":
        assert found["wavefronts"]["with"] == found["wavefronts"]["ideal"] < found["wavefronts"]["without"]


# -- refusals, text, page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "message"), [
    ("64x60", "MNxK: got K 60; TMA copies 16-byte units, so use a multiple of 8"),
    ("60x64", "MNxK: got M or N 60; an atom has 8 rows, so use a multiple of 8"),
    ("64x60 --major MN", "MNxK: got K 60; an atom has 8 rows, so use a multiple of 8"),
    ("64x16 --swizzle 128", "--swizzle: got 128 for rows of 32 bytes; use 32 or 0"),
    ("512x64", "MNxK: got boxes of 512 x 64; use up to 256 x 256"),
    ("256x512 --dtype fp32", "MNxK: got 256x512, 524288 bytes; use a tile of up to 232448 bytes"),
    ("64x64 --access fragment", "--access: got fragment without --fragment; add one, such as --fragment ldmatrix"),
    ("32x64 --fragment wgmma-a", "--fragment: got wgmma-a for 32x64; use a multiple of 64x16"),
    ("64x320 --fragment wgmma-d", "--fragment: got wgmma-d for 64x320; use a multiple of 64x256"),
    ("64x64 --fragment mma-a --dtype fp8_e5m2", "got mma-a of fp8_e5m2; use bf16, fp16, int8 or fp32, or wgmma-a"),
    ("64x64 --fragment ldmatrix --major MN --dtype int8", "got ldmatrix of MN-major int8; it transposes 16 bits"),
    ("64x64 --fragment wmma-a --access fragment", "got wmma-a of a swizzled tile, which wmma cannot access; use"),
    ("64x64 --fragment wmma-b --dtype fp8_e4m3", "got wmma-b of fp8_e4m3; use bf16, fp16, int8 or fp32, or wgmma-a"),
    ("68x64 --fragment ldmatrix.x1 --swizzle 0", "got ldmatrix.x1 for 68x64; use a multiple of 8x8"),
    ("64x64 --fragment wmma", "'wmma' is not one of 'wgmma-a', 'wgmma-d', 'mma-a'"),
    ("64x64 --dtype fp4", "Invalid value for '--dtype': 'fp4' is not one of 'bf16'"),
    ("64x64 --swizzle 16", "Invalid value for '--swizzle': '16' is not one of '128', '64', '32', '0'"),
    ("64", "'64' is not 2 integers joined by x"),
])  # fmt: skip
def test_refusals(arguments: str, message: str) -> None:
    result = CliRunner().invoke(main, ["layout", *arguments.split()])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_text_and_json() -> None:
    words = ["layout", "64x64", "--fragment", "ldmatrix", "--access", "fragment"]
    text = CliRunner().invoke(main, words).stdout
    for line in ("0      0:0    16:4    32:8   48:12   64:16   80:20   96:24  112:28",
                 "1    144:4   128:0  176:12   160:8  208:20  192:16  240:28  224:24",
                 "stride byte offset   45-32     64  00000001000000  1024 bytes: from an atom, 8 rows, to the next",
                 "k-step 3: 0x4000004000010006"):  # fmt: skip
        assert line in text
    assert "  1  T4 R0   T5 R0   T6 R0   T7 R0   T4 R2   T5 R2   T6 R2   T7 R2" in text
    assert text.splitlines()[-1].split() == ["all", "4", "32", "4"]
    found = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert found == json.loads(json.dumps(describe(make_tile(64, 64, BF16, "K"), "ldmatrix", "fragment")))


def test_a_tile_that_wgmma_cannot_read_has_no_descriptor() -> None:
    reasons = [describe(make_tile(64, 64, dtype, major, swizzle))["descriptor"]["reason"]
               for dtype, major, swizzle in ((BF16, "K", 0), (INT8, "MN", None), (FP32, "MN", None))]  # fmt: skip
    assert "swizzled tiles" in reasons[0]
    assert reasons[1:] == [f"wgmma reads no MN-major {x} from shared memory" for x in ("int8", "tf32")]


@pytest.mark.parametrize(("tile", "fragment", "access"), [
    (make_tile(64, 64, BF16, "K"), None, None), (make_tile(256, 64, BF16, "MN"), "wgmma-a", "fragment"),
    (make_tile(64, 256, BF16, "K"), "wgmma-d", "fragment"),
])  # fmt: skip
def test_the_page_is_one_small_file(tile: Tile, fragment: str | None, access: str | None) -> None:
    page = make_page(describe(tile, fragment, access))
    assert len(gzip.compress(page.encode())) < 15_000
    assert "http" not in page
    assert "src=" not in page


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
@pytest.mark.parametrize(("arguments", "start"), [
    ("64x64 --fragment ldmatrix --access fragment", (3, 0)), ("128x64 --major MN --fragment wgmma-a", (3, 0)),
    ("64x64 --swizzle 0 --access column", (3, 0)), ("64x64 --swizzle 0 --fragment wmma-b --dtype fp16", (3, 0)),
])  # fmt: skip
def test_the_page_in_a_browser(arguments: str, start: tuple[int, int], tmp_path: Path) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    result = CliRunner().invoke(main, ["layout", *arguments.split(), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    found = json.loads(CliRunner().invoke(main, ["layout", *arguments.split(), "--json"]).stdout)
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for x in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(x)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    with webdriver.Chrome(options=options, service=service) as browser:
        browser.get((tmp_path / "page.html").as_uri())
        names = ["row", "column", "byte-without", "byte-with", "bank-with"]
        read = f"return {names}.map(x => +document.getElementById(x).textContent)"
        size, random_ = found["tile"]["element_bytes"], random.Random(0)

        def check(row: int, column: int) -> None:
            bytes_ = [found["units"][x][row][column * size // 16] + column * size % 16 for x in ("without", "with")]
            assert browser.execute_script(read) == [row, column, *bytes_, bytes_[1] // 4 % 32]

        check(*start)
        grid = browser.find_elements("css selector", "canvas")[-1]
        browser.execute_script("arguments[0].focus()", grid)
        row, column = start
        for key, (down, right) in {"\ue015": (1, 0), "\ue014": (0, 1), "\ue013": (-1, 0), "\ue012": (0, -1)}.items():
            for _ in range(2 if down + right > 0 else 1):
                webdriver.ActionChains(browser).send_keys(key).perform()
                row, column = row + down, column + right
                check(row, column)
        point = """
            const [canvas, byte, size] = arguments, width = (canvas.clientWidth - 44) / 8;
            const x = 44 + (byte % 128 + size / 2) / 16 * width, y = (Math.floor(byte / 128) + 0.5) * 20;
            const {left, top} = canvas.getBoundingClientRect();
            canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: left + x, clientY: top + y}));
        """
        for _ in range(50):
            row, column = random_.randrange(found["rows"]["count"]), random_.randrange(found["columns"]["count"])
            byte = found["units"]["with"][row][column * size // 16] + column * size % 16
            browser.execute_script(point, grid, byte, size)
            check(row, column)
        note = found["fragment"] and found["fragment"]["note"]
        assert not note or note in browser.execute_script("return document.getElementById('legend').textContent")
        assert browser.get_log("browser") == []
