"""Registers and lanes: PTX of setmaxnreg and elect, CUDA's shuffles, and what a diverged warp is told."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tests.backends.sim.tiny import kinds, run
from tests.hw.one import Forms, computed, ptx

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value


def budgets(k: Builder, first: int, second: int) -> None:
    with k.warpgroup(0):
        hw.set_registers(first)
    with k.warpgroups(1, 3):
        hw.set_registers(second)


FORMS: Forms = {
    "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }": lambda k: hw.elect_one(),
    "match.any.sync.b32 %0, %1, 0xffffffff;": lambda k: hw.match_any(k.smem),
    "popc.b32 %0, %1;": lambda k: hw.population_count(k.smem),
    "redux.sync.max.u32 %0, %1, 0xffffffff;": lambda k: hw.redux(k.smem, "max"),
}


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


def test_registers_are_given_back_below_the_launchs_share_and_taken_above_it() -> None:
    printed = ptx(lambda k: budgets(k, 40, 232), threads=384)  # 65536 / 384 is 168 a thread
    assert "setmaxnreg.dec.sync.aligned.u32 40;" in printed
    assert "setmaxnreg.inc.sync.aligned.u32 232;" in printed
    assert ptx(lambda k: budgets(k, 40, 168), threads=384).count("setmaxnreg.inc.sync.aligned.u32 168;") == 1
    assert ptx(lambda k: hw.set_registers(None)) == ""


def test_shuffles_are_cudas() -> None:
    with Builder("k", threads=32) as k:
        x = k.smem
        for result in (hw.shuffle_xor(x, 3), hw.shuffle_index(x, 5)):
            with k.when(result == 0):
                hw.sync_warp()
        source = k.finish().source
    for call in ("__shfl_xor_sync(0xffffffff, smem, 3)", "__shfl_sync(0xffffffff, smem, 5u)"):
        assert call in source


def test_shuffles_stay_within_a_warp(rng: np.random.Generator) -> None:
    x = rng.integers(0, 1 << 32, (2, 32), np.uint32)
    flat = x.reshape(-1)
    np.testing.assert_array_equal(computed(lambda v: hw.shuffle_xor(v, 5), flat), x[:, np.arange(32) ^ 5].reshape(-1))
    other = computed(
        lambda v: hw.shuffle_index(v, (current_builder().lane + 33).to(U32)), flat
    )  # a lane's number wraps
    np.testing.assert_array_equal(other, np.roll(x, -1, axis=1).reshape(-1))


DIVERGED = {
    "elect.sync": lambda k: hw.elect_one(),
    "a shuffle": lambda k: hw.shuffle_xor(k.smem, 1),
    "redux": lambda k: hw.redux(k.smem, "min"),
}


@pytest.mark.parametrize("what", DIVERGED)
def test_all_lanes_of_a_warp_take_part(what: str) -> None:
    def record(k: Builder, out: Value) -> None:
        with k.when(k.lane < 31), k.when(DIVERGED[what](k).to(U32) == 7):
            hw.sync_warp()

    done = run(record, threads=32)
    assert len(kinds(done)) == 1
    assert what in str(done.hazards[0])


def test_lanes_match_within_a_warp(rng: np.random.Generator) -> None:
    x = rng.integers(0, 5, 64, np.uint32)
    want = [sum(1 << j for j in range(32) if x[i // 32 * 32 + j] == x[i]) for i in range(64)]
    np.testing.assert_array_equal(computed(hw.match_any, x), np.array(want, np.uint32))


def test_population_count(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.integers(0, 1 << 32, 30, np.uint32), np.array([0, 2**32 - 1], np.uint32)])
    np.testing.assert_array_equal(computed(hw.population_count, x), [int(word).bit_count() for word in x])


def test_redux_is_over_a_warp(rng: np.random.Generator) -> None:
    x = rng.integers(0, 1 << 32, (2, 32), np.uint32)
    for action, reduce in (("min", np.min), ("max", np.max)):
        got = computed(partial(hw.redux, action=action), x.ravel())
        np.testing.assert_array_equal(got, np.repeat(reduce(x, 1), 32))


def test_sum_of_lanes_before(rng: np.random.Generator) -> None:
    x = rng.integers(0, 1000, (2, 32), np.uint32)
    np.testing.assert_array_equal(computed(hw.sum_of_lanes_before, x.ravel()), (x.cumsum(1) - x).ravel())
