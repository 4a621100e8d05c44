"""Mistakes in the rungs: every deleted or moved wait, commit and barrier, one more group pending, parts of warps,
loops that begin one late."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.mutants.mutate import MAX_HAZARDS, first_kinds, mutants_of, stopping_after

from gemmsmith.arrays import describe
from gemmsmith.backends.sim.run import run
from gemmsmith.core.chip import CHIPS
from gemmsmith.core.problem import Matrix
from gemmsmith.ladder.launches import LADDER_KERNELS, ladder_launches
from gemmsmith.lang.kernel import Kernel

SIZES = {"block_tile": (16, 16, 48), "mma_naive": (64, 64, 48), "thread_tile": (64, 64, 16), "dp4a": (64, 64, 96),
         "wmma": (128, 128, 320)}  # fmt: skip
"""One tile, with more k-tiles than stages; others have (128, 128, 24)."""
SYNCHRONIZED = [name for name in LADDER_KERNELS if name not in ("naive_m", "naive", "wmma_naive")]
SEEDS = 3
LOST_DATA = {"race", "uninitialized read"}
EXPECTED = {
    "delete cp_async_wait": LOST_DATA | {"access to exited CTA"},
    "+1 pending of cp_async_wait": LOST_DATA | {"access to exited CTA"},
    "delete cp_async_commit": LOST_DATA, "delete sync_threads": LOST_DATA, "delete sync_warp": LOST_DATA,
    "move cp_async_wait": LOST_DATA | {"access to exited CTA"}, "move cp_async_commit": LOST_DATA,
    "move sync_threads": LOST_DATA, "late start of k0": {"wrong"}, "late start of k_tile": LOST_DATA,
    **{f"by one lane {name}": {"divergence"} for name in (
        "sync_threads", "sync_warp", "load_matrix", "mma_sync", "wmma_load", "wmma_mma", "wmma_store",
    )},
}  # fmt: skip

EQUIVALENT = {
    ("move later (past loop)", "cp_async_commit"): "copies of the next k-tile join the first one's, and land with them",
    ("move earlier (past mma_sync)", "sync_threads"): "mma.sync reads registers alone",
}


def reported(name: str, kernel: Kernel, seed: int, limit: int = MAX_HAZARDS) -> tuple[set[str], str]:
    """The kinds of hazard up to so many, on fresh random data, or "wrong" if the result is and there are none.

    And what the simulator says of other schedules.
    """
    rng, rung = np.random.default_rng(seed), LADDER_KERNELS[name]
    m, n, k = SIZES.get(name, (128, 128, 24))
    dtype = rung.dtypes[0]
    a, b = (rng.integers(-4, 5, shape).astype(dtype.numpy) for shape in ((m, k), (n, k)))
    if rung.contiguous_along == "MN":
        a, b = (np.asfortranarray(x) for x in (a, b))
    d = np.full((m, n), -99, rung.output(dtype).numpy)
    arrays = {"a": describe(a), "b": describe(b.T), "d": describe(d)}
    found = ladder_launches(name, *(seen(x) for x in arrays.values()), CHIPS["sm_80"])
    assert len(found.all) == 1
    with stopping_after(limit):
        result = run(replace(found, all=(replace(found.all[0], kernel=kernel),)), arrays, seed, None)
    kinds = {h.kind for h in result.hazards}
    if not kinds and not np.array_equal(d, a.astype(np.int64) @ b.T.astype(np.int64)):
        kinds = {"wrong"}
    return kinds, result.verdict.scope


def seen(x: Any) -> Matrix:
    return Matrix(x.dtype, *x.shape, *x.strides, alignment=x.alignment).canonical()


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_every_mutant_is_reported(name: str) -> None:
    unreported, alone, count = [], set[str](), 0

    def make() -> Kernel:
        return LADDER_KERNELS[name].make(LADDER_KERNELS[name].dtypes[0], CHIPS["sm_80"])

    for mutant in mutants_of(make):
        count += 1
        if mutant.what == "by one lane" and str(mutant) in alone:  # of a loop that Python unrolls
            continue
        alone.add(str(mutant))
        what = "move" if mutant.what.startswith("move") else mutant.what
        expected = EXPECTED.get(f"{what} {mutant.target}", set())
        kinds = first_kinds(partial(reported, name, mutant.kernel), expected, SEEDS)
        if not kinds and (mutant.what, mutant.target) in EQUIVALENT:
            continue
        if not kinds & expected:
            unreported.append(f"{mutant}: reported as {kinds}")
    assert not unreported, "\n".join(unreported)
    assert count >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_the_unbroken_rungs_are_never_reported(name: str) -> None:
    kernel = LADDER_KERNELS[name].make(LADDER_KERNELS[name].dtypes[0], CHIPS["sm_80"])
    for seed in range(3):
        assert reported(name, kernel, seed)[0] == set()
