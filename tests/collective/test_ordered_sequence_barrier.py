"""Warpgroups that take turns, and named barriers that nobody shares."""

from __future__ import annotations

import numpy as np
import pytest

from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.collective.pipeline import OrderedSequenceBarrier
from gemmsmith.core.errors import KernelError
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32, U64


@pytest.mark.parametrize("seed", range(4))
def test_warpgroups_take_turns(seed: int) -> None:
    """Each notes its number where the turns before it have left off."""
    rounds = 3
    with Builder("turns", threads=256) as k:
        out = k.pointer("out")
        with k.warpgroups(0, 2) as group:
            order = OrderedSequenceBarrier(2, group)
            order.prime()
            with k.range(rounds, name="round") as turn:
                order.wait()
                one = k.registers(U32, 1, "one")
                one[0] = group.to(U32)
                place = (turn * 2 + group).to(U64) * 4
                hw.store_global(one, out + place, k.thread % 128 == 0)
                order.arrive()
            with k.when(group == 0):  # takes the last arrival, which is for nobody
                order.wait()
        kernel = k.finish()
    memory, found = GlobalMemory(), np.full(2 * rounds, 9, np.uint32)
    done = simulate(kernel, 1, {"out": memory.add_buffer(found, "out")}, memory, seed=seed)
    assert done.hazards == []
    assert found.tolist() == [0, 1] * rounds


def test_named_barriers_are_given_out_once() -> None:
    with Builder("barriers", threads=128) as k:
        assert [k.named_barriers(count) for count in (1, 3, 11)] == [1, 2, 5]
        with pytest.raises(KernelError, match="named barriers: got 16; use at most 15 per CTA"):
            k.named_barriers(1)
