"""Every way of breaking a kernel's synchronization is reported, as the right kind; the unbroken ones never are."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.mutants.mutate import CLASSES, MAX_HAZARDS, changes_of, first_kinds, kind_of, mutants

from gemmsmith.backends.reference.matmul import blockwise_scaled_matmul
from gemmsmith.backends.sim import GlobalMemory, Hazard, SimulationResult, simulate
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import BF16, E4M3, FP32, TF32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.mma import select_mma
from gemmsmith.core.problem import SCALE_BLOCK, SCALE_NAMES
from gemmsmith.core.scale_spec import ScaleSpec
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.host.launch_sequence import build_launches
from gemmsmith.kernels.build import build
from gemmsmith.lang.kernel import Kernel

CONFIGS = [
    Config(design, (128, 64, 64), cluster, 3, 2)  # type: ignore[arg-type]
    for design in ("cooperative", "tma", "pingpong")
    for cluster in ((1, 1), (2, 1))
]
CONFIGS += [CONFIGS[0].replace(tile=(128, 80, 64), cluster=x, alias_epilogue=True) for x in ((1, 1), (1, 2))]
CONFIGS += [
    CONFIGS[0].replace(sync_clusters=True),
    CONFIGS[0].replace(splits=0),
    CONFIGS[1].replace(splits=3),
    CONFIGS[0].replace(cluster_splits=2),
    CONFIGS[0].replace(cluster_splits=2, tile=(128, 40, 64)),
]
CONFIGS += [CONFIGS[i].replace(swap_ab=True) for i in (1, 4, 9, 11)]
PROMOTED = [CONFIGS[0].replace(tile=(128, 64, 128)), CONFIGS[1].replace(tile=(256, 32, 128))]
PROMOTED += [CONFIGS[4].replace(tile=(128, 64, 128)), CONFIGS[5].replace(tile=(128, 32, 128))]
BOXED = [PROMOTED[i].replace(serpentine=True, stages=stages) for i, stages in ((0, 3), (2, 5))]
"""Those whose scales of A lie along K and come in boxes; of other promoted ones a warp copies them."""
A_IN_REGISTERS = [CONFIGS[i].replace(tile=(128, 64, 32)) for i in (0, 4)]
"""Those of TF32 with an MN-major A."""
CONFIGS += PROMOTED + BOXED + A_IN_REGISTERS
WHOLE, SHARED, IN_CLUSTER, UNEVEN = (512, 64, 256, 2), (256, 192, 320, 4), (256, 64, 320, 2), (640, 64, 256, 3)
FLAT, WAVES = (40, 1024, 320, 2), (256, 128, 256, 2)
"""M, N, K and CTAs: several tiles a CTA, tiles that CTAs share, a last wave that is not whole, several tiles with rows
that no TMA store reads, whole waves; and more k-tiles than stages."""
Sizes = tuple[int, int, int, int]
SHORT = (512, 64, 192, 2)
"""The first of these with fewer k-tiles."""
SEEDS = 4
"""Schedules of a mutant, at most."""

LOST_DATA = {"race", "uninitialized read", "phase aliasing", "over-arrival"}
EXPECTED = {
    ("delete", "mbarrier_wait"): LOST_DATA | {"access to exited CTA"},
    ("delete", "mbarrier_arrive"): {"deadlock"},
    ("delete", "mbarrier_arrive_remote"): {"deadlock"},
    ("delete", "mbarrier_arrive_expect_tx"): {"deadlock"},
    ("delete", "fence_mbarrier_init"): {"barrier"},
    ("delete", "sync_threads"): {"barrier"},
    ("delete", "cluster_arrive_relaxed"): {"barrier"},
    ("delete", "cluster_wait"): {"barrier"},
    ("delete", "fence_proxy_async"): {"missing proxy fence"},
    ("delete", "barrier_sync"): {"race", "phase aliasing"},
    ("delete", "wgmma_fence"): {"wgmma register hazard"},
    ("delete", "wgmma_commit"): {"race", "wgmma register hazard"},
    ("delete", "wgmma_wait"): {"race", "wgmma register hazard"},
    ("delete", "bulk_commit"): {"race", "missing wait_group"},
    ("delete", "bulk_wait_read"): {"race", "missing wait_group"},
    ("+1 pending of", "wgmma_wait"): {"race", "wgmma register hazard"},
    ("+1 pending of", "bulk_wait_read"): {"race", "missing wait_group"},
    ("+1 arrivals of", "mbarrier_init"): {"deadlock"},
    ("-1 arrivals of", "mbarrier_init"): LOST_DATA | {"deadlock", "barrier"},
    ("delete", "barrier_arrive"): {"deadlock"},
    ("delete", "spin_until_equal"): {"race", "uninitialized read"},
    ("delete", "store_strong"): {"deadlock", "flags not reset"},
    ("move", "spin_until_equal"): {"deadlock", "flags not reset"},
    ("move", "store_strong"): {"deadlock", "flags not reset", "race"},
    ("+16 bytes of", "mbarrier_arrive_expect_tx"): {"deadlock"},
    ("-16 bytes of", "mbarrier_arrive_expect_tx"): {"deadlock"},
    ("+1 stages of", "advance"): {"barrier", "out of bounds", "race", "phase aliasing", "deadlock"},
    ("-1 stages of", "advance"): {"deadlock", "barrier", "race"},
    ("-32 threads of", "barrier_sync"): {"deadlock", "race", "barrier"},
    **{("flip start of", f"{name}_write_phase"): {"deadlock"} for name in ("mainloop", "scale_a")},
    ("flip start of", "epilogue_smem_phase"): {"race"},
    **{("flip start of", f"{name}_read_phase"): LOST_DATA for name in ("mainloop", "scale_a")},
    ("delete", "cp_async_mbarrier_arrive"): {"deadlock"},
    ("move", "cp_async_mbarrier_arrive"): {"race", "deadlock", "uninitialized read"},
    ("move", "barrier_sync"): {"race", "missing proxy fence"},
    ("move", "fence_proxy_async"): {"missing proxy fence"},
    ("move", "fence_mbarrier_init"): {"barrier"},
    ("move", "sync_threads"): {"barrier"},
    ("move", "cluster_arrive_relaxed"): {"barrier"},
    ("move", "cluster_wait"): {"barrier"},
    ("move", "wgmma_wait"): {"race", "wgmma register hazard"},
    ("move", "wgmma_commit"): {"race", "wgmma register hazard"},
    ("move", "wgmma_fence"): {"wgmma register hazard"},
    ("move", "bulk_commit"): {"race", "missing wait_group"},
    ("delete", "fence_acq_rel"): {"race"},
    ("delete", "grid_dependency_wait"): {"race"},
    ("delete", "fence_operand"): {"wgmma register hazard"},
    ("delete", "sync_warp"): {"race"},
    ("delete", "set_max_nreg"): {"deadlock"},
    ("swap inc and dec of", "set_max_nreg"): {"registers"},
    ("narrow scope of", "mbarrier_arrive_remote"): {"race"},
    ("narrow scope of", "mbarrier_wait"): {"race"},
    ("narrow scope of", "store_strong"): {"race"},
    ("narrow scope of", "spin_until_equal"): {"race"},
    ("narrow scope of", "relaxed store_strong"): {"race"},
    ("narrow scope of", "fence_acq_rel"): {"race"},
    ("relax", "store_strong"): {"race"},
    ("other space of", "fence_proxy_async"): {"missing proxy fence"},
    ("arrive before the wait", "mbarrier_arrive"): {"race"},
    ("arrive before the wait", "mbarrier_arrive_remote"): {"race", "phase aliasing"},
    ("arrive before the wait", "mbarrier_arrive_expect_tx"): {"over-arrival", "barrier"},
    ("arrive after the wait", "mbarrier_arrive_expect_tx"): {"deadlock"},
    **{("late start of", name): {"deadlock", "race", "barrier", "wrong"} for name in ("cluster_tile", "k_tile")},
    **{("late start of", name): {"deadlock"} for name in ("sender", "tile_ordinal")},
    ("late start of", "peer"): {"flags not reset"},
    ("late start of", "stage"): {"access to exited CTA"},
    **{("by one lane", name): {"divergence"} for name in (
        "set_max_nreg", "sync_threads", "sync_warp", "cluster_arrive_relaxed", "cluster_wait", "barrier_sync",
        "wgmma_fence", "wgmma_commit", "wgmma_wait", "store_matrix",
    )},
}  # fmt: skip

EQUIVALENT = {
    ("move later (past grid_dependency_wait)", "sync_threads"): "it touches no barrier and no memory",
    ("move later (past grid_dependency_wait)", "fence_mbarrier_init"): "the same",
    ("move later (past grid_dependency_wait)", "cluster_wait"): "it touches no barrier and no memory",
    ("delete", "grid_dependency_wait"): "others hear through barriers that the lane of the first copies has waited",
    ("delete", "set_max_nreg"): "of inc: ptxas then keeps to the registers of the launch",
    ("narrow scope of", "relaxed store_strong"): "who makes a word zero again has synchronized with all that use it",
    ("move later (past store_strong)", "store_strong"): "of two words that nobody uses any more",
    ("move earlier (past store_strong)", "store_strong"): "the same",
    ("move later (past wgmma_wait)", "barrier_arrive"): "the other warpgroup only starts later",
    ("move earlier (past barrier_arrive)", "wgmma_wait"): "the same",
    ("move earlier (past sync_warp)", "wgmma_wait"): "the lanes meet for what they have loaded before",
    ("move earlier (past if)", "wgmma_wait"): "the index of the next stage wraps: no instruction lies between",
    ("move earlier (past if)", "wgmma_fence"): "the same",
    ("move later (past sync_warp)", "wgmma_commit"): "the lanes meet for what they have loaded before",
    ("move later (past fence_operand)", "wgmma_wait"): "no instruction lies between; ptxas itself keeps reads behind",
    (
        "move earlier (past load_shared)",
        "fence_proxy_async",
    ): "cp.async, not TMA, writes the scales loaded last",
    ("move later (past sync_warp)", "fence_proxy_async"): "the lanes meet once more before TMA writes what they have "
    "read: at a named barrier, or for the stage of a later k-tile, for which the producer has waited, too",
    ("move earlier (past wgmma_commit)", "fence_proxy_async"): "a commit reads no memory",
    ("move later (past fence_proxy_async)", "wgmma_commit"): "the same",
    (
        "arrive before the wait",
        "mbarrier_arrive_expect_tx",
    ): "where who arrives knows that all have seen the phase before "
    "(as a consumer, or by the stage of a later k-tile): the bytes, which come after the wait, complete the phase",
    ("arrive after the wait", "mbarrier_arrive"): "the producer only has the stage later",
}
EQUIVALENT_ALONE = {
    ("move earlier (past mbarrier_init)", "fence_mbarrier_init"): "the last init is of an empty barrier, "
    "which without a cluster no peer and no TMA uses",
    ("delete", "mbarrier_wait"): "producer_tail: without a cluster no peer arrives at a CTA that has ended",
    ("late start of", "stage"): "the same",
}
"""Only where the cluster is one CTA."""


def execute(spec: KernelSpec, kernel: Kernel, seed: int, whole: Sizes = WHOLE, limit: int = MAX_HAZARDS) -> set[str]:
    """The kinds of hazard reported, on fresh random data, or "wrong" if the result is and there are none."""
    return {h.kind for h in simulated(spec, kernel, seed, whole, limit).hazards}


def simulated(
    spec: KernelSpec, kernel: Kernel, seed: int, whole: Sizes = WHOLE, limit: int = MAX_HAZARDS
) -> SimulationResult:
    """The execution, whose hazards have one more if the result is wrong and there are none."""
    rng = np.random.default_rng(seed)
    m, n, k, grid = SHARED if spec.config.splits != 1 and whole in (WHOLE, SHORT) else whole
    n *= 2 if spec.config.design == "pingpong" else 1  # as many tiles for each warpgroup
    if spec.config.cluster_splits > 1:
        m, n, k, grid = IN_CLUSTER
    if spec.config.alias_epilogue:
        m, n, k, grid = FLAT
    if spec.config.sync_clusters:
        m, n, k, grid = whole if whole == WAVES else UNEVEN
        m, grid = m * spec.cluster_size, grid * spec.cluster_size
    in_blocks_of_k, boxed = spec.promoted and not spec.is_3xtf32, spec.config in BOXED
    deeper = 4 if boxed else 2 if in_blocks_of_k else 1  # as many k-tiles, or two boxes of them
    k = (whole[2] if whole == SHORT else k) * deeper // (2 if spec.a_in_registers else 1)
    m, n = (n, m) if spec.config.swap_ab else (m, n)
    a, b = (rng.integers(-4, 5, shape).astype(spec.mma.a.numpy) for shape in ((m, k), (n, k)))
    a, b = (np.asfortranarray(x) if major == "MN" else x for x, major in zip((a, b), spec.majors, strict=True))
    scales = {}
    if in_blocks_of_k:
        blocks = -(-k // SCALE_BLOCK)
        shapes = (m, blocks + -blocks % 4 + (not boxed)), (blocks, -(-n // SCALE_BLOCK))
        powers = (2.0 ** rng.integers(-3, 4, shape) for shape in shapes)
        scales = {f"scale_{role}": x.astype(np.float32) for role, x in zip("ab", powers, strict=True)}
        scales["scale_a"] = scales["scale_a"][:, :blocks]
    d = np.full((m, n), np.nan, ml_dtypes.bfloat16)
    memory = GlobalMemory()
    operands = (b, a) if spec.config.swap_ab else (a, b)
    lines = [x if x.flags.c_contiguous else x.T for x in operands]
    addresses = {name: memory.add_buffer(x, name.upper(), writable=False) for x, name in zip(lines, "ab", strict=True)}
    for name, x in scales.items():
        whole_rows = x if x.base is None else x.base
        addresses[operand_argument(SCALE_NAMES[name[-1]])] = memory.add_buffer(whole_rows, name, writable=False)
    precision = "3xtf32" if spec.is_3xtf32 else "tf32" if spec.a_in_registers else None
    product = bind(Request(a, b.T, d, precision=precision, **scales))
    product = product.transposed() if spec.config.swap_ab else product
    assert product.kernel_spec(spec.config) == spec
    found = build_launches(product, spec)
    space = np.zeros(max(found.workspace_bytes, 4), np.uint8)
    addresses["workspace"] = memory.add_buffer(space, "workspace", uninitialized=True)
    words = np.zeros(max(found.flag_bytes // 4, 1), np.uint32)
    addresses["flags"] = memory.add_buffer(words, "flags")
    addresses["out"] = memory.add_buffer(d, "D", uninitialized=True)
    arguments = found.all[-1].resolve(addresses)
    if "stage_bytes" in arguments:
        arguments |= {f"stage_bytes{change:+d}": arguments["stage_bytes"] + change for change in (-16, 16)}
    dependent = spec.chip.supports("sm_90")
    result = simulate(kernel, grid, arguments, memory, seed=seed, is_dependent_launch=dependent, max_hazards=limit)
    if len(result.hazards) == limit:
        return result  # the kernel has not ended
    here = kernel.body.statements[0].location
    if words.any():
        result.hazards.insert(0, Hazard("flags not reset", "a flag word is nonzero", here))
    if not result.hazards:
        exact = (
            blockwise_scaled_matmul(a, b.T, *scales.values())
            if scales
            else a.astype(np.float64) @ b.T.astype(np.float64)
        )
        if not np.array_equal(d, exact.astype(d.dtype)):
            result.hazards.append(Hazard("wrong", "the result is wrong", here))
    return result


def reported(spec: KernelSpec, kernel: Kernel, expected: set[str], whole: Sizes = WHOLE) -> set[str]:
    """The kinds of hazard that some schedule reports, those expected first."""

    def executed(seed: int, limit: int) -> tuple[set[str], str]:
        result = simulated(spec, kernel, seed, whole, limit)
        return {h.kind for h in result.hazards}, result.verdict.scope

    return first_kinds(executed, expected, SEEDS)


def spec_of(config: Config) -> KernelSpec:
    out = frozenset({"out"})
    epilogue = EpilogueSpec(identity_graph(BF16), out, out if config.swap_ab else frozenset())
    if config in PROMOTED + BOXED:
        scales = ScaleSpec(1, FP32, "K" if config in BOXED else None), ScaleSpec(SCALE_BLOCK, FP32)
        return KernelSpec(config, select_mma(E4M3, E4M3, FP32), ("K", "K"), epilogue, promoted=True, scales=scales)
    if config in A_IN_REGISTERS:
        return KernelSpec(config, select_mma(TF32, TF32, FP32), ("MN", "K"), epilogue)
    return KernelSpec(config, select_mma(BF16, BF16, FP32), ("K", "K"), epilogue)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_mutant_is_reported(config: Config) -> None:
    spec, cluster = spec_of(config), config.cluster
    count, equivalents = 0, 0
    for mutant in mutants(spec):
        count += 1
        what = "move" if mutant.what.startswith("move") else mutant.what
        expected, key = EXPECTED.get((what, mutant.target), set()), (mutant.what, mutant.target)
        equivalent = key in EQUIVALENT or (cluster == (1, 1) and key in EQUIVALENT_ALONE)
        kinds = reported(spec, mutant.kernel, expected)
        if not kinds:
            assert equivalent, f"unreported: {mutant}"
            equivalents += 1
            continue
        assert kinds & expected, f"{mutant}: reported as {kinds}"
    assert count >= 40
    assert equivalents <= 14


def test_a_fence_that_only_counts_where_a_wait_gives_up() -> None:
    """All waves whole: who has waited has seen all arrivals. Who gave up, and ends last, has not."""
    config = next(c for c in CONFIGS if c.sync_clusters)
    spec = spec_of(config)
    deleted = [m for m in mutants(spec) if (m.what, m.target) == ("delete", "fence_acq_rel")]
    assert len(deleted) == 2
    for mutant in deleted:
        assert any("race" in execute(spec, mutant.kernel, seed, WAVES, limit=1) for seed in range(1, 200))
    kernel = build(spec)
    assert not any(execute(spec, kernel, seed, WAVES) for seed in range(20))


def test_the_page_says_how_many() -> None:
    """The table of docs/internals/simulator.md."""
    changes = [kind_of(what) for config in CONFIGS for what in changes_of(spec_of(config))]
    rows = "".join(f"| {text} | {changes.count(kind)} |\n" for kind, text in CLASSES.items())
    table = f"| mutants of {len(CONFIGS)} kernels | count |\n| --- | --- |\n{rows}| all | {len(changes)} |\n"
    page = Path(__file__).parents[2] / "docs" / "internals" / "simulator.md"
    assert table in page.read_text(), table


@pytest.mark.slow
@pytest.mark.parametrize("config", [*CONFIGS, CONFIGS[1].replace(sync_clusters=True)], ids=str)
def test_the_unbroken_designs_are_never_reported(config: Config, rng: np.random.Generator) -> None:
    """In fresh schedules; more where a poll lets them differ, for else each is like any other (test_verdict.py)."""
    spec, first = spec_of(config), int(rng.integers(1 << 30))
    kernel = build(spec)
    for seed in range(first, first + (40 if config.sync_clusters else 8)):
        assert execute(spec, kernel, seed, SHORT) == set(), seed
