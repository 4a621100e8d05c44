"""Barriers of a CTA and of a warp: how they print; tests/conformance and tests/backends/sim say what they do."""

from __future__ import annotations

import pytest
from tests.hw.one import Forms, ptx

from gemmsmith import hw
from gemmsmith.lang.builder import Builder

FORMS: Forms = {
    "barrier.cta.sync.aligned %0, 64;": lambda k: hw.barrier_sync(3, 64),
    "barrier.cta.arrive.aligned %0, 128;": lambda k: hw.barrier_arrive(k.lane, 128),
}


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


def test_two_counts_of_threads_are_two_wrappers() -> None:
    def record(k: Builder) -> None:
        for threads in (64, 96, 64):
            hw.barrier_sync(1, threads)

    assert ptx(record) == "barrier.cta.sync.aligned %0, 64; barrier.cta.sync.aligned %0, 96;"


def test_those_of_cuda_are_calls() -> None:
    with Builder("k", threads=64) as k:
        hw.sync_threads()
        hw.sync_warp()
        source = k.finish().source
    assert "__syncthreads();" in source
    assert "__syncwarp();" in source
