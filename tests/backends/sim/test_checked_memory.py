"""Accesses outside of memories: the message says which bytes of what."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.sim.tiny import kinds, word

from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, SimulationResult, simulate
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U64
from gemmsmith.lang.values import Value


def accessed(store: bool, offset: int, *, size: int = 16, writable: bool = True, base: int = 0) -> SimulationResult:
    """The hazards of one access of 4 bytes, `offset` bytes behind the start of `size` (or `base`)."""
    with Builder("k", threads=32) as k:
        x: Value = k.pointer("x")
        if base:
            x = x * 0 + base
        with k.when(k.thread == 0):
            move = hw.store_global if store else hw.load_global
            move(word(k, k.smem), x + (k.lane + offset).to(U64), True)
        kernel = k.finish()
    memory = GlobalMemory()
    return simulate(kernel, 1, {"x": memory.add_buffer(np.zeros(size, np.uint8), "x", writable=writable)}, memory)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("offset", [0, 12])
def test_the_first_and_the_last_word_are_inside(store: bool, offset: int) -> None:
    assert accessed(store, offset).hazards == []


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(("offset", "size"), [(16, 16), (12, 14), (12, 15)])
def test_a_word_behind_the_last_or_half_of_one(store: bool, offset: int, size: int) -> None:
    done = accessed(store, offset, size=size)
    assert kinds(done) == {"out of bounds"}
    assert f"bytes {offset}..{offset + 4} of x, whose size is {size} bytes" in str(done.hazards[0])


@pytest.mark.parametrize("store", [False, True])
def test_an_address_in_no_buffer(store: bool) -> None:
    done = accessed(store, 0, base=4096)
    assert kinds(done) == {"out of bounds"}
    assert "global address 0x1000 is outside every buffer" in str(done.hazards[0])


def test_inputs_are_read_only() -> None:
    assert accessed(False, 4, writable=False).hazards == []
    done = accessed(True, 4, writable=False)
    assert kinds(done) == {"out of bounds"}
    assert "write to read-only buffer x" in str(done.hazards[0])
