"""Mistakes in mma_multistage and sgemm: every deleted, moved or weakened wait, commit and barrier; parts of warps;
loops that begin one late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.mutants.mutate import mutants
from tests.mutants.test_mutants import EXPECTED as HOPPERS
from tests.mutants.test_mutants import execute, reported

from gemmsmith import hw
from gemmsmith.collective import cp_async_mainloop, fragments, simt, swizzle
from gemmsmith.collective.cp_async_operand import CpAsyncCopies
from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.dtypes import BF16, FP32, TF32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.mma import Major, select_mma
from gemmsmith.core.spec import KernelSpec
from gemmsmith.kernels.build import build
from gemmsmith.lang.types import U32

Patch = pytest.MonkeyPatch

SIZES = (128, 64, 160, 1)
"""Two tiles of one CTA, with more k-tiles than stages."""
LOST_DATA = {"race", "uninitialized read"}
WAIT = LOST_DATA | {"access to exited CTA"}
"""Of the last one nobody reads what lands."""
EXPECTED = HOPPERS | {
    ("delete", "cp_async_wait"): WAIT,
    ("delete", "cp_async_commit"): LOST_DATA,
    ("delete", "sync_threads"): LOST_DATA,
    ("delete", "barrier_sync"): LOST_DATA,
    ("+1 pending of", "cp_async_wait"): WAIT,
    ("-32 threads of", "barrier_sync"): {"deadlock", "race", "barrier"},
    ("late start of", "stage"): LOST_DATA,
    ("late start of", "tile_ordinal"): {"wrong"},
    ("move", "cp_async_wait"): WAIT,
    ("move", "cp_async_commit"): LOST_DATA,
    ("move", "sync_threads"): LOST_DATA,
    ("move", "barrier_sync"): LOST_DATA,
    **{("by one lane", name): {"divergence"} for name in ("sync_threads", "barrier_sync", "load_matrix", "mma_sync")},
}


EQUIVALENT = {
    ("narrow scope of", "relaxed store_strong"): "who makes a word zero again has synchronized with all that use it",
    ("delete", "barrier_sync"): "before results are written over the last tile's: the mainloop's barriers do the same",
}


def spec_of(config: Config, major: Major = "K", *, low_parts: bool = False) -> KernelSpec:
    out, by = frozenset({"out"}), get_design(config.design).mma_op
    dtype = TF32 if low_parts else FP32 if not by.uses_tensor_cores else BF16
    epilogue = EpilogueSpec(identity_graph(BF16), out)
    return KernelSpec(
        config, select_mma(dtype, dtype, FP32, by), (major, major), epilogue, promoted=low_parts, is_3xtf32=low_parts
    )


SMALL = Config("mma_multistage", (64, 64, 32), (1, 1), 3, 2, chip="sm_80")
SPECS = {
    "plain": (spec_of(SMALL), SIZES),
    "columns": (spec_of(SMALL, "MN"), SIZES),
    "stream-K": (spec_of(SMALL.replace(tile=(64, 32, 32), consumers=1, splits=0)), (192, 32, 96, 2)),
    "3xtf32": (spec_of(SMALL.replace(tile=(64, 32, 16), consumers=1), low_parts=True), (128, 32, 80, 1)),
    "sgemm": (spec_of(SMALL.replace(design="sgemm", tile=(64, 32, 8), consumers=1)), (128, 32, 40, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_mutant_is_reported(name: str) -> None:
    (spec, sizes), count, equivalents, unreported = SPECS[name], 0, 0, []
    for mutant in mutants(spec):
        count += 1
        what = "move" if mutant.what.startswith("move") else mutant.what
        expected = EXPECTED.get((what, mutant.target), set())
        kinds = reported(spec, mutant.kernel, expected, sizes)
        if not kinds and (what, mutant.target) in EQUIVALENT:
            equivalents += 1
        elif not kinds & expected:
            unreported.append(f"{mutant}: reported as {kinds}")
    assert not unreported, "\n".join(unreported)
    assert count > 20
    assert equivalents <= len(EQUIVALENT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chip"), [("plain", "sm_90"), *((name, "sm_80") for name in SPECS)])
def test_the_unbroken_designs_are_never_reported(name: str, chip: str) -> None:
    spec, sizes = SPECS[name]
    spec = replace(spec, config=spec.config.replace(chip=chip))
    for seed in range(8):
        assert execute(spec, build(spec), seed, sizes) == set()


def swizzled_otherwise_where_it_is_copied(p: Patch) -> None:
    p.setattr(swizzle, "swizzled", lambda address, width: address)


def swizzled_otherwise_where_it_is_read(p: Patch) -> None:
    p.setattr(fragments, "swizzled_vector_offset", lambda tile, row, i: (row * tile.pitch + (i << 4)).to(U32))


def words_in_another_order_where_they_are_copied(p: Patch) -> None:
    p.setattr(simt.SmemVectorLayout, "mn_of_smem_index", lambda self, smem_index: smem_index)


def one_k_tile_too_many_in_flight(p: Patch) -> None:
    mainloop = cp_async_mainloop.CpAsyncMainloop
    p.setattr(mainloop, "_wait_next_stage", lambda self: hw.cp_async_wait(self.spec.config.stages - 1))


def a_stage_refilled_while_it_is_read(p: Patch) -> None:
    p.setattr(cp_async_mainloop.hw, "sync_threads", lambda: None)


def rows_that_are_not_aligned(p: Patch) -> None:
    set_tile = CpAsyncCopies.set_tile

    def shifted(self: Any, *given: Any) -> None:
        set_tile(self, *given)
        self._gmem_ptr.set(self._gmem_ptr.get() + 2)

    p.setattr(CpAsyncCopies, "set_tile", shifted)


WRONG = [
    swizzled_otherwise_where_it_is_copied, swizzled_otherwise_where_it_is_read,
    words_in_another_order_where_they_are_copied,
]  # fmt: skip
HAZARDS = {
    one_k_tile_too_many_in_flight: "race", a_stage_refilled_while_it_is_read: "race",
    rows_that_are_not_aligned: "alignment",
}  # fmt: skip


@pytest.mark.parametrize("mistake", [*WRONG, *HAZARDS], ids=lambda x: x.__name__)
def test_mistakes_show(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """As hazards, or in the result."""
    build.cache_clear()
    mistake(monkeypatch)
    spec, sizes = SPECS["sgemm" if mistake is words_in_another_order_where_they_are_copied else "plain"]
    try:
        if mistake in WRONG:
            assert execute(spec, build(spec), 0, sizes) == {"wrong"}
        else:
            assert HAZARDS[mistake] in set.union(*(execute(spec, build(spec), seed, sizes) for seed in range(3)))
    finally:
        build.cache_clear()
