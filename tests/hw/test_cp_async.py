"""cp.async: the PTX of each size, and sizes that do not exist."""

from __future__ import annotations

import pytest
from tests.hw.one import Forms, ptx

from gemmsmith import hw
from gemmsmith.core.errors import KernelError
from gemmsmith.lang.builder import Builder

FORMS: Forms = {
    # .cg, past the L1, exists for 16 bytes only.
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": lambda k: hw.cp_async_copy(k.smem, k.pointer("p"), 9, 16),
    "cp.async.ca.shared.global [%0], [%1], 8, %2;": lambda k: hw.cp_async_copy(k.smem, k.pointer("p"), 8, 8),
    "cp.async.ca.shared.global [%0], [%1], 4, %2;": lambda k: hw.cp_async_copy(k.smem, k.pointer("p"), 0, 4),
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];": lambda k: hw.cp_async_arrive(k.smem),
    "cp.async.commit_group;": lambda k: hw.cp_async_commit(),
    "cp.async.wait_group 2;": lambda k: hw.cp_async_wait(2),
}


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


@pytest.mark.parametrize("nbytes", [2, 12, 32])
def test_it_moves_4_8_or_16_bytes(nbytes: int) -> None:
    with Builder("k", threads=32) as k, pytest.raises(KernelError, match=f"got {nbytes} bytes; use 4, 8 or 16"):
        hw.cp_async_copy(k.smem, k.pointer("p"), 0, nbytes)
