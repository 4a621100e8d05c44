"""One named barrier serves two roles, which do not know of each other.

Source: TileOPs #1898. A named barrier counts threads, not who they are: where two warpgroups use one identifier for
two purposes, the arrivals of either complete the other's phase. Its warps go on before their own neighbors have come.
Mended: an identifier each.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run, word

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

SEEDS = range(8)


def exchange(k: Builder, words: SharedView, own: Value, identifier: int, threads: int) -> None:
    """The threads of a group give each other a word through shared memory, over a barrier of their own."""
    hw.store_shared(word(k, own.to(U32)), words.address + (own * 4).to(U32))
    hw.barrier_sync(identifier, threads)
    hw.load_shared(k.registers(U32, 1, "got"), words.address + ((own ^ (threads // 2)) * 4).to(U32))


@pytest.mark.parametrize("apart", [True, False])
def test_two_warpgroups(apart: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        words = k.shared(512, stages=2, name="words")
        for group in range(2):
            with k.warpgroup(group):
                exchange(k, words[group], k.thread - 128 * group, 1 + group * apart, 128)

    found = [kinds(run(record, threads=256, seed=seed)) for seed in SEEDS]
    assert all(found) if not apart else not any(found), found


@pytest.mark.parametrize("apart", [True, False])
def test_two_pairs_of_warps(apart: bool) -> None:
    """Each warp has a role."""

    def record(k: Builder, out: Value) -> None:
        words = k.shared(256, stages=2, name="words")
        with k.warpgroup(0):
            for warp in range(4):
                group = warp // 2
                with k.warp(warp):
                    exchange(k, words[group], k.thread - 64 * group, 1 + group * apart, 64)

    found = [kinds(run(record, seed=seed)) for seed in SEEDS]
    assert all(found) if not apart else not any(found), found
