"""The packing kernel at the largest sizes that a plan admits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.core.problem import MAX_EXTENT
from gemmsmith.hw.cluster import BlockIndex, GridSize
from gemmsmith.kernels.pack import CHUNK, THREADS, pack


@given(grid=some.integers(1 << 20, (1 << 23) - 1), total=some.integers(MAX_EXTENT - 5000, MAX_EXTENT), data=some.data())
def test_the_last_turn_of_a_huge_copy(grid: int, total: int, data: some.DataObject) -> None:
    """Of one block of a grid, and of the copy what that block writes last."""
    threads = grid * THREADS
    last = (total - 1) // threads * threads  # the last turn's first chunk
    ends = (total - 1 - last) // THREADS  # in this block
    block = data.draw(some.sampled_from([0, ends // 2, ends, min(ends + 1, grid - 1), grid - 1]), label="block")
    first = last + block * THREADS
    values = np.random.default_rng().integers(1, 1 << 16, CHUNK).astype(np.uint16)
    copied = np.zeros((THREADS, CHUNK), np.uint16)
    memory = GlobalMemory()
    source, packed = memory.place(values, "source"), memory.place(copied, "packed")
    arguments = {
        "source": source, "packed": packed - first * 16, "rows": total, "columns": CHUNK, "chunks": 1, "total": total,
        "row_stride": 0, "column_stride": 1, "batch_stride": 0,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridSize, "simulate", lambda self, machine: grid)
        patch.setattr(BlockIndex, "simulate", lambda self, machine: block)
        hazards = simulate(pack(), 1, arguments, memory).hazards
    assert {hazard.kind for hazard in hazards} <= {"out of bounds"}  # earlier turns write far away
    written = min(max(total - first, 0), THREADS)
    assert (copied[:written] == values).all()
    assert not copied[written:].any()
