"""Packing: copies of any layout, and the largest sizes that a plan admits."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from gemmsmith import hw
from gemmsmith.backends.reference.matmul import truncate_to_tf32
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.problem import MAX_EXTENT, Matrix, Problem
from gemmsmith.hw.cluster import BlockIndex, GridSize
from gemmsmith.kernels.pack import (
    THREADS,
    BoundPacking,
    Packing,
    operand_packings,
    strided_copy,
    transpose,
    with_packed_operands,
)

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32}
EIGHT = 8
"""16-bit elements of 16 bytes."""


@pytest.mark.slow
@settings(max_examples=60)
@given(
    dtype=some.sampled_from([E4M3, BF16, TF32]), batch=some.sampled_from([1, 1, 3]), broadcast=some.booleans(),
    rows=some.integers(1, 300), cols=some.integers(1, 300), across=some.booleans(), pad=some.sampled_from([0, 0, 1, 4]),
    apart=some.sampled_from([1, 1, 1, 2]), offset=some.sampled_from([0, 0, 1, 4]), grid=some.integers(1, 3),
    seed=some.integers(0, 1 << 32),
)  # fmt: skip
def test_copies_of_any_layout(
    dtype: DType, batch: int, broadcast: bool, rows: int, cols: int, across: bool, pad: int, apart: int, offset: int,
    grid: int, seed: int,
) -> None:  # fmt: skip
    """Nothing beyond the matrix is read, or it would be reported, and the padding of rows is zeros."""
    inner, outer = (rows, cols) if across else (cols, rows)
    pitch, copies = inner * apart + pad, 1 if broadcast else batch
    last = (copies * outer - 1) * pitch + (inner - 1) * apart + 1  # elements to the last one, and no more
    memory = np.random.default_rng(seed).integers(0, 256, (offset + last) * dtype.bytes, np.uint8)
    memory = memory.view(UNSIGNED[dtype.bits])
    size = memory.itemsize
    strides = (outer * pitch * size * (not broadcast), *((apart, pitch) if across else (pitch, apart)))
    strides = (strides[0], strides[1] * size, strides[2] * size)
    want = np.lib.stride_tricks.as_strided(memory[offset:], (batch, rows, cols), strides)
    alignment = next(n for n in (16, 8, 4, 2, 1) if offset * size % n == 0)
    steps = [s // size for s in strides]
    matrix = Matrix(dtype, rows, cols, steps[1], steps[2], batch, steps[0] * (batch > 1), alignment)
    packing = Packing(matrix)
    assert packing.packed.is_tma_compatible
    assert not packing.packed.is_column_major
    copy = np.full(packing.bytes, 0xA5, np.uint8)
    places = GlobalMemory()
    source, to = places.add_buffer(memory, "source"), places.add_buffer(copy, "packed")
    kernel = packing.make_kernel()
    arguments = kernel.arguments(BoundPacking(packing, source + offset * size, to))  # type: ignore[arg-type]
    assert not simulate(kernel, grid, arguments, places).hazards
    got = copy.view(memory.dtype).reshape(packing.num_matrices, rows, -1)
    assert (got[..., :cols] == want[: packing.num_matrices]).all()
    assert not got[..., cols:].any()


def test_neighboring_threads_read_neighboring_elements() -> None:
    def kernel(dtype: DType, row_stride: int, col_stride: int, rows: int = 64, alignment: int = 16) -> object:
        return Packing(Matrix(dtype, rows, 100, row_stride, col_stride, alignment=alignment)).make_kernel()

    assert kernel(BF16, 101, 1) is kernel(FP16, 101, 1) is strided_copy(16, False, False, HOPPER)
    assert kernel(BF16, 102, 1) is strided_copy(16, True, False, HOPPER)
    assert kernel(E4M3, 102, 1) is kernel(E4M3, 104, 2) is strided_copy(8, False, False, HOPPER)
    assert kernel(TF32, 101, 1) is strided_copy(32, True, False, HOPPER)
    assert kernel(E4M3, 1, 64) is kernel(INT8, 1, 68) is transpose(8, True, False, HOPPER)
    # a word of neighbors along the rows: not where columns begin anywhere, are strided, or end within one
    for found in (kernel(E4M3, 1, 65), kernel(E5M2, 2, 256), kernel(E4M3, 1, 64, 62), kernel(E4M3, 1, 64, 64, 2)):
        assert found is transpose(8, False, False, HOPPER)
    assert kernel(TF32, 1, 65) is transpose(32, True, False, HOPPER)


@pytest.mark.parametrize("skipped", range(2))
@pytest.mark.parametrize(("dtype", "rows"), [(E4M3, 300), (E4M3, 302), (TF32, 300)])
def test_each_barrier_is_needed(dtype: DType, rows: int, skipped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before what others wrote is read, and before a block's next tile overwrites it."""
    packing, real, numbers = Packing(Matrix(dtype, rows, 300, 1, rows)), hw.sync_threads, count()
    monkeypatch.setattr(hw, "sync_threads", lambda: None if next(numbers) == skipped else real())
    words = rows % 4 == 0
    kernel = transpose.__wrapped__(dtype.bits, words, False, HOPPER)
    source, copy, places = (
        np.ones(rows * 300 * dtype.bytes, np.uint8),
        np.zeros(packing.bytes, np.uint8),
        GlobalMemory(),
    )
    bound = BoundPacking(packing, places.add_buffer(source, "source"), places.add_buffer(copy, "packed"))  # type: ignore[arg-type]
    assert "race" in {hazard.kind for hazard in simulate(kernel, 1, kernel.arguments(bound), places).hazards}


@pytest.mark.parametrize("dtype", [FP32])
@pytest.mark.parametrize("across", [False, True])
def test_low_parts(rng: np.random.Generator, dtype: DType, across: bool) -> None:
    """What is left of each element without its upper 19 bits, exactly."""
    x = rng.standard_normal((70, 52), np.float32) * np.exp2(rng.integers(-100, 100, (70, 52))).astype(np.float32)
    memory, copy, places = np.ascontiguousarray(x.T if across else x), np.zeros((70, 52), np.float32), GlobalMemory()
    packing = Packing(Matrix(dtype, 70, 52, *((1, 70) if across else (52, 1))), tf32_residual=True)
    bound = BoundPacking(packing, places.add_buffer(memory, "source"), places.add_buffer(copy, "packed"))  # type: ignore[arg-type]
    assert not simulate(packing.make_kernel(), 2, packing.make_kernel().arguments(bound), places).hazards
    assert (truncate_to_tf32(x) + copy == x).all()
    assert (np.abs(copy) < np.abs(x) * 2.0**-10).all()
    assert (copy != 0).any()


@pytest.mark.parametrize(("dtype", "mn_major"), [(BF16, True), (E4M3, False), (INT8, False), (TF32, False)])
def test_what_is_packed(dtype: DType, mn_major: bool) -> None:
    """What TMA cannot read; and what lies MN-major of elements that wgmma reads K-major only, but a TF32 A."""
    accumulate = INT32 if dtype == INT8 else FP32
    d = Matrix(FP32, 64, 32, 32, 1)

    def of(a: Matrix, b: Matrix) -> list[bool]:
        problem = Problem(a, b, d, accumulate)
        for x in with_packed_operands(problem).operands:
            assert x.is_tma_compatible
            assert mn_major or not x.is_column_major or (dtype == TF32 and x is a)
        return [packing is not None for packing in operand_packings(problem)]

    k_major = Matrix(dtype, 64, 128, 128, 1), Matrix(dtype, 128, 32, 1, 128)
    mn = Matrix(dtype, 64, 128, 1, 64), Matrix(dtype, 128, 32, 32, 1)
    assert of(*k_major) == [False, False]
    assert of(*mn) == [not mn_major and dtype != TF32, not mn_major]
    assert of(Matrix(dtype, 64, 128, 129, 1), k_major[1]) == [True, False]
    assert of(k_major[0], Matrix(dtype, 128, 32, 1, 128, alignment=4)) == [False, True]
    assert of(Matrix(dtype, 64, 128, 256, 2), k_major[1]) == [True, False]


@given(grid=some.integers(1 << 20, (1 << 23) - 1), total=some.integers(MAX_EXTENT - 5000, MAX_EXTENT), data=some.data())
def test_the_last_turn_of_a_huge_copy(grid: int, total: int, data: some.DataObject) -> None:
    """Of one block of a grid, and of the copy what that block writes last."""
    threads = grid * THREADS
    last = (total - 1) // threads * threads  # the last turn's first chunk
    ends = (total - 1 - last) // THREADS  # in this block
    block = data.draw(some.sampled_from([0, ends // 2, ends, min(ends + 1, grid - 1), grid - 1]), label="block")
    first = last + block * THREADS
    values = np.random.default_rng().integers(1, 1 << 16, EIGHT).astype(np.uint16)
    copied = np.zeros((THREADS, EIGHT), np.uint16)
    memory = GlobalMemory()
    source, to = memory.add_buffer(values, "source"), memory.add_buffer(copied, "packed")
    arguments = {
        "source": source, "packed": to - first * 16, "rows": total, "columns": EIGHT,
        "vectors_per_row": 1, "total_vectors": total,
        "row_stride": 0, "column_stride": 1, "batch_stride": 0,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridSize, "simulate", lambda self, machine: grid)
        patch.setattr(BlockIndex, "simulate", lambda self, machine: block)
        hazards = simulate(strided_copy(16, False, False, HOPPER), 1, arguments, memory).hazards
    assert {hazard.kind for hazard in hazards} <= {"out of bounds"}  # earlier turns write far away
    written = min(max(total - first, 0), THREADS)
    assert (copied[:written] == values).all()
    assert not copied[written:].any()
