"""Mistakes in mma_multistage: every deleted, moved or weakened wait, commit and barrier, and parts of warps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.mutants.mutate import mutants
from tests.mutants.test_mutants import execute

from gemmsmith import hw
from gemmsmith.collective import fragments, multistage, swizzle
from gemmsmith.collective.copied_operand import CopiedOperand
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.graph import bare
from gemmsmith.core.mma import find_mma
from gemmsmith.core.spec import EpilogueSpec, KernelSpec
from gemmsmith.kernels.build import build
from gemmsmith.lang.types import U32

Patch = pytest.MonkeyPatch

SIZES = (128, 64, 160, 1)
"""Two tiles of one CTA, with more k-tiles than stages."""
SEEDS = 3
LOST_DATA = {"race", "uninitialised read"}
WAIT = LOST_DATA | {"exited CTA"}
"""Of the last one nobody reads what lands."""
EXPECTED = {
    ("delete", "cp_async_wait"): WAIT,
    ("delete", "cp_async_commit"): LOST_DATA,
    ("delete", "sync_threads"): LOST_DATA,
    ("delete", "barrier_sync"): LOST_DATA,
    ("+1 pending of", "cp_async_wait"): WAIT,
    ("-32 threads of", "barrier_sync"): {"deadlock", "race", "barrier"},
    ("move", "cp_async_wait"): WAIT,
    ("move", "cp_async_commit"): LOST_DATA,
    ("move", "sync_threads"): LOST_DATA,
    ("move", "barrier_sync"): LOST_DATA,
    **{("by one lane", name): {"divergence"} for name in ("sync_threads", "barrier_sync", "load_matrix", "mma_sync")},
}


EQUIVALENT = {
    ("delete", "barrier_sync"): "before results are written over the last tile's: the mainloop's barriers do the same",
}


def spec_of(config: Config) -> KernelSpec:
    out = frozenset({"out"})
    return KernelSpec(config, find_mma(BF16, BF16, FP32, "mma"), ("K", "K"), EpilogueSpec(bare(BF16), out))


def test_every_mutant_is_reported() -> None:
    spec, count, equivalents, unreported = (
        spec_of(Config("mma_multistage", (64, 64, 32), (1, 1), 3, 2, chip="sm_80")),
        0,
        0,
        [],
    )
    for mutant in mutants(spec):
        count += 1
        kinds: set[str] = set()
        for seed in range(SEEDS):
            kinds |= execute(spec, mutant.kernel, seed, SIZES)
            if kinds:
                break
        what = "move" if mutant.what.startswith("move") else mutant.what
        if not kinds and (what, mutant.target) in EQUIVALENT:
            equivalents += 1
        elif not kinds & EXPECTED.get((what, mutant.target), set()):
            unreported.append(f"{mutant}: reported as {kinds}")
    assert not unreported, "\n".join(unreported)
    assert count > 20
    assert equivalents <= 1


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_the_unbroken_design_is_never_reported(chip: str) -> None:
    spec = spec_of(Config("mma_multistage", (64, 64, 32), (1, 1), 3, 2, chip=chip))
    for seed in range(8):
        assert execute(spec, build(spec), seed, SIZES) == set()


def swizzled_otherwise_where_it_is_copied(p: Patch) -> None:
    p.setattr(swizzle, "swizzled", lambda address, width: address)


def swizzled_otherwise_where_it_is_read(p: Patch) -> None:
    p.setattr(fragments, "chunk_offset", lambda tile, row, chunk: (row * tile.pitch + (chunk << 4)).to(U32))


def one_k_tile_too_many_in_flight(p: Patch) -> None:
    p.setattr(multistage.MultistageMainloop, "_land", lambda self: hw.cp_async_wait(self.spec.config.stages - 1))


def a_stage_refilled_while_it_is_read(p: Patch) -> None:
    p.setattr(multistage.hw, "sync_threads", lambda: None)


def rows_that_are_not_aligned(p: Patch) -> None:
    begin = CopiedOperand.begin

    def shifted(self: Any, *given: Any) -> None:
        begin(self, *given)
        self._source.set(self._source.get() + 2)

    p.setattr(CopiedOperand, "begin", shifted)


WRONG = [swizzled_otherwise_where_it_is_copied, swizzled_otherwise_where_it_is_read]
HAZARDS = {
    one_k_tile_too_many_in_flight: "race", a_stage_refilled_while_it_is_read: "race",
    rows_that_are_not_aligned: "alignment",
}  # fmt: skip


@pytest.mark.parametrize("mistake", [*WRONG, *HAZARDS], ids=lambda x: x.__name__)
def test_mistakes_show(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """As hazards, or in the result."""
    build.cache_clear()
    mistake(monkeypatch)
    spec = spec_of(Config("mma_multistage", (64, 64, 32), (1, 1), 3, 2, chip="sm_80"))
    try:
        if mistake in WRONG:
            with pytest.raises(AssertionError):
                execute(spec, build(spec), 0, SIZES)
        else:
            assert HAZARDS[mistake] in set.union(*(execute(spec, build(spec), seed, SIZES) for seed in range(3)))
    finally:
        build.cache_clear()
