"""ldmatrix and stmatrix: the PTX of each form, and counts that do not exist."""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import run
from tests.hw.one import Forms, ptx, registers

from gemmsmith import hw
from gemmsmith.core.errors import KernelError
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

FORMS: Forms = {
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%1], {%0};": lambda k: hw.store_matrix(registers(k, 1), k.smem),
    "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%2], {%0, %1};": lambda k: hw.store_matrix(registers(k, 2), k.smem),
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%4], {%0, %1, %2, %3};":
        lambda k: hw.store_matrix(registers(k, 4), k.smem, transposed=True),
    "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];":
        lambda k: hw.load_matrix(registers(k, 1), k.smem, transposed=True),
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];":
        lambda k: hw.load_matrix(registers(k, 4), k.smem),
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("move", [hw.load_matrix, hw.store_matrix])
def test_they_move_1_2_or_4_matrices(move, count: int) -> None:
    with pytest.raises(KernelError, match=f"got {count} matrices; use 1, 2 or 4"):
        ptx(lambda k: move(registers(k, count), k.smem))


@pytest.mark.parametrize(("move", "what"), [(hw.load_matrix, "ldmatrix"), (hw.store_matrix, "stmatrix")])
def test_all_lanes_of_a_warp_take_part(move, what: str) -> None:
    def record(k: Builder, out: Value) -> None:
        buffer = k.shared(512)
        hw.store_shared(registers(k, 4), buffer[0].address + (k.lane * 16).to(U32))
        hw.sync_warp()
        with k.when(k.lane != 5):
            move(registers(k, 4), buffer[0].address + (k.lane * 16).to(U32))

    done = run(record, threads=32)
    assert done.hazards
    assert what in str(done.hazards[0])
