"""TF32 with an MN-major operand: read as it lies, right in every layout, design and schedule; no bank conflicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.simulated.test_dtypes import FLOAT, judge, matrix, poisoned

import gemmsmith
from gemmsmith import Config, ConfigError, Spec
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.core.spec import KernelSpec

COOPERATIVE = Config("cooperative", (128, 64, 32), (1, 1), 3, 2)
CONFIGS = [
    COOPERATIVE,
    COOPERATIVE.replace(tile=(256, 48, 64), cluster=(2, 1), stages=2),
    COOPERATIVE.replace(tile=(128, 32, 8), consumers=1),
    COOPERATIVE.replace(tile=(64, 32, 16), cluster=(2, 2), consumers=1, serpentine=True),
    COOPERATIVE.replace(tile=(192, 64, 32), consumers=3),
    COOPERATIVE.replace(tile=(64, 64, 128), consumers=1, stages=2, alias_epilogue=True),
    COOPERATIVE.replace(splits=0),
    COOPERATIVE.replace(splits=3),
    COOPERATIVE.replace(cluster_splits=2),
    COOPERATIVE.replace(sync_clusters=True),
    Config("pingpong", (64, 64, 32), (1, 1), 3, 2),
    Config("pingpong", (128, 32, 32), (1, 2), 3, 2),
    Config("tma", (128, 64, 32), (1, 1), 3, 1),
]


def arrays(layout: str, m: int, n: int, k: int, batch: tuple[int, ...] = (), pad: int = 0) -> tuple[Any, Any, Any]:
    """A and B, row-major (n) or column-major (t), and D, in which no element is right."""
    rng = np.random.default_rng(m + n + k)
    a = matrix(rng, (*batch, m, k), FLOAT, layout[0] == "t", pad, 0)
    return a, matrix(rng, (*batch, k, n), FLOAT, layout[1] == "t", pad, 0), poisoned((*batch, m, n), "fp32", False)


def specs(layout: str, m: int, n: int, k: int) -> tuple[Spec, Spec]:
    strides = (1, m) if layout[0] == "t" else None, (1, k) if layout[1] == "t" else None
    return Spec((m, k), "fp32", strides[0]), Spec((k, n), "fp32", strides[1])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_design(config: Config, rng: np.random.Generator) -> None:
    """In a fresh schedule each."""
    for layout, swap_ab in (("tt", False), ("nn", True)):
        a, b, out = arrays(layout, 260, 132, 200)
        plan = gemmsmith.plan(a, b, out=out, precision="tf32", config=config.replace(swap_ab=swap_ab))
        assert plan._planned.spec.majors == ("MN", "K")
        assert plan.simulate(a, b, out, seed=int(rng.integers(1 << 30))).hazards == []
        judge(out, a, b)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize(("sizes", "batch", "pad"), [
    ((64, 64, 32), (), 0), ((200, 72, 100), (), 0), ((36, 132, 4), (), 0), ((132, 68, 76), (3,), 8),
    ((7, 132, 65), (), 0), ((132, 9, 33), (), 3), ((1, 4, 64), (), 0),
])  # fmt: skip
def test_chosen_for_every_layout(layout: str, sizes: tuple[int, int, int], batch: tuple[int, ...], pad: int) -> None:
    """Strides that TMA cannot read, too: those are copied."""
    a, b, out = arrays(layout, *sizes, batch, pad)
    done = gemmsmith.simulate(a, b, out=out, precision="tf32", seed=2)
    assert done.hazards == []
    judge(out, a, b)


@pytest.mark.parametrize(("m", "n", "k"), [(512, 4096, 1024), (4096, 512, 1024), (16, 4096, 4096), (4096, 4096, 4096)])
def test_what_is_copied(m: int, n: int, k: int) -> None:
    """Nothing, unless both are MN-major: then the smaller one."""
    for layout in ("nt", "nn", "tt"):
        plan = gemmsmith.plan(*specs(layout, m, n, k), precision="tf32")
        assert plan.workspace_bytes == 0 or plan.config.splits != 1, layout
        assert "before each run" not in plan.why
    found = gemmsmith.plan(*specs("tn", m, n, k), precision="tf32").why
    smaller = "a" if m < n else "b"
    copied = (
        f"is transposed before each run, since with tf32 only one operand may be MN-major: {8e-6 * k * min(m, n):.1f} "
        "MB"
    )
    assert found.count("before each run") == 1
    assert f"{smaller} {copied}" in found or (m == n and copied in found)


def test_what_tma_cannot_read_is_copied() -> None:
    ragged = gemmsmith.plan(Spec((512, 4096), "fp32", (4097, 1)), specs("nt", 512, 8192, 4096)[1], precision="tf32")
    assert "a is copied before each run, since TMA cannot read its rows" in ragged.why
    assert ragged._planned.spec.majors == ("K", "K")


def test_an_orientation_that_copies_is_taken_if_given() -> None:
    a, b = specs("nn", 256, 256, 256)
    plan = gemmsmith.plan(a, b, precision="tf32", config=COOPERATIVE)
    assert plan.workspace_bytes == 256 * 256 * 4
    assert plan._planned.spec.majors == ("K", "K")
    assert "b is transposed before each run" in plan.why


def test_other_instructions_copy() -> None:
    """mma.sync reads TF32 K-major only; low parts are read from memory."""
    a, b = specs("tt", 256, 256, 256)
    config = Config("mma_multistage", (128, 128, 32), (1, 1), 3, 2)
    assert gemmsmith.plan(a, b, precision="tf32", config=config).workspace_bytes == 256 * 256 * 4
    plan = gemmsmith.plan(a, b, precision="3xtf32")
    assert plan.workspace_bytes >= 3 * 256 * 256 * 4
    assert "a is transposed before each run, since tf32 is read K-major only" in plan.why


def test_one_plan_serves_every_size() -> None:
    a, b, out = arrays("nn", 40, 72, 64)
    plan = gemmsmith.plan(a, b, out=out, precision="tf32", config=COOPERATIVE.replace(swap_ab=True), backend="sim")
    for sizes in ((1, 8, 0), (300, 4, 36), (3, 132, 132)):
        a, b, out = arrays("nn", *sizes)
        judge(plan.run(a, b, out), a, b)


@pytest.mark.parametrize("tile", [(128, 64, 32), (256, 32, 64), (128, 64, 16)])
def test_no_two_lanes_meet_in_a_bank(tile: tuple[int, int, int]) -> None:
    a, b, out = arrays("tt", 256, 64, 64)
    config, counters = COOPERATIVE.replace(tile=tile, stages=2), Counters()
    plan = gemmsmith.plan(a, b, out=out, precision="tf32", config=config)
    plan.simulate(a, b, out, counters=counters)
    (loads,) = (x for x in counters.lines(plan._planned.kernel) if x.access == "load_shared A")
    elements = 256 * 64 * 64 // tile[1]  # for each tile
    assert loads.wavefronts == loads.ideal_wavefronts == loads.instructions == elements // 32


def test_peers_learn_that_ld_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared along a cluster is read by ld, whose reads only an arrival of the scope .cluster hands back."""
    config = COOPERATIVE.replace(tile=(64, 32, 32), cluster=(1, 2), consumers=1, stages=2)
    a, b, out = arrays("tt", 256, 64, 192)

    def kinds() -> set[str]:
        done = gemmsmith.plan(a, b, out=out, precision="tf32", config=config).simulate(a, b, out, seed=1)
        return {hazard.kind for hazard in done.hazards}

    assert kinds() == set()
    monkeypatch.setattr(KernelSpec, "releases_stages_to_peers", False)
    gemmsmith.kernels.build.build.cache_clear()
    assert kinds() == {"race"}
    gemmsmith.kernels.build.build.cache_clear()


def test_registers_for_the_fragments() -> None:
    a, b = specs("tt", 512, 512, 512)
    with pytest.raises(
        ConfigError, match="accumulator of 128x192 and A's fragments need 224 per thread, 24 more than fit"
    ):
        gemmsmith.plan(a, b, precision="tf32", config=COOPERATIVE.replace(tile=(256, 192, 32), stages=2))


@pytest.mark.parametrize(
    "config",
    [
        COOPERATIVE.replace(tile=(128, 256, 32)), COOPERATIVE.replace(tile=(256, 128, 32)),
        COOPERATIVE.replace(tile=(256, 160, 32), stages=3, cluster=(2, 1)),
        COOPERATIVE.replace(tile=(128, 128, 32), splits=0), COOPERATIVE.replace(tile=(192, 160, 32), consumers=3),
        COOPERATIVE.replace(tile=(128, 160, 32), cluster_splits=2),
        COOPERATIVE.replace(tile=(64, 256, 32), consumers=1),
        Config("pingpong", (64, 256, 32), (1, 1), 4, 2), Config("pingpong", (128, 160, 32), (1, 1), 4, 2),
        Config("tma", (64, 256, 32), (1, 1), 4, 1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.parametrize("swap_ab", [False, True])
def test_nothing_spills_and_no_wgmma_is_serialized(config: Config, swap_ab: bool) -> None:
    given = specs("nn" if swap_ab else "tt", 4096, 4096, 4096)
    r = gemmsmith.plan(*given, precision="tf32", config=config.replace(swap_ab=swap_ab)).resources
    assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
