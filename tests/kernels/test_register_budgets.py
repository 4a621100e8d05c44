"""Each threshold of registers: what is taken at it and refused beyond, as literals, and that ptxas spills beyond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, ConfigError, Spec
from gemmsmith.core.dtypes import BF16, E4M3, FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.mma import FMA, MMA_SYNC, select_mma
from gemmsmith.core.register_budgets import plan_promotion
from gemmsmith.core.spec import KernelSpec
from gemmsmith.kernels.build import build
from gemmsmith.tuning.candidates import candidates, promotion_leaves_registers
from gemmsmith.tuning.choose_sm80 import _spills

COLUMN, UNALIGNED = Spec((4096,), "fp32"), Spec((4096, 4095), "bf16")
D = EpilogueSpec(identity_graph(BF16), frozenset({"out"}))


def epilogue_of(
    function: Callable[..., Any], *, n: int = 4096, out: str = "bf16", **operands: Spec
) -> EpilogueSpec:  # fmt: skip
    config = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1)
    a, b = Spec((4096, 4096), "bf16"), Spec((4096, n), "bf16", (1, 4096))
    return gemmsmith.plan(
        a, b, epilogue=function, operands=operands, config=config, out_dtype=out
    )._planned.spec.epilogue


def tiles(epilogue: EpilogueSpec, m: int, *, design: str = "cooperative", swap_ab: bool = False) -> set[int]:
    """Return the columns of the candidates' tiles of `m` rows for two warpgroups."""
    found = [
        c for c in candidates(epilogue) if (c.design, c.tile[0], c.consumers, c.swap_ab) == (design, m, 2, swap_ab)
    ]
    return {c.tile[1] for c in found}


@pytest.mark.parametrize(("function", "operands", "m", "widest"), [
    (lambda acc: acc.exp(), {}, 256, 192),
    (lambda acc: acc.gelu(), {}, 256, 160),
    (lambda acc: acc.erf(), {}, 256, 160),
    (lambda acc: acc.expm1(), {}, 256, 160),
    (lambda acc: acc.elu(), {}, 256, 160),
    (lambda acc, x, y: acc * x + y, {"x": COLUMN, "y": COLUMN}, 256, 160),
    (lambda acc: (acc, acc.sum(0), acc.amax(0)), {}, 256, 128),
    (lambda acc, c: acc + c, {"c": UNALIGNED}, 128, 176),
])  # fmt: skip
def test_widest_tiles(function: Callable[..., Any], operands: dict[str, Spec], m: int, widest: int) -> None:
    epilogue = epilogue_of(function, n=4095 if UNALIGNED in operands.values() else 4096, **operands)
    assert max(tiles(epilogue, m)) == widest


ROWS = epilogue_of(lambda acc: gemmsmith.top_k_softmax(acc, 4), n=64)


def test_columns_of_an_exchange() -> None:
    widths = {c.cluster_splits > 1: c.tile[1] for c in sorted(candidates(ROWS), key=lambda c: c.tile[1])}
    assert widths == {True: 192, False: 256}


def test_odd_columns_of_transposed_results() -> None:
    epilogue = EpilogueSpec(identity_graph(FP32), frozenset({"out"}))
    assert tiles(epilogue, 128, design="pingpong", swap_ab=True) >= {136, 144, 160, 176, 192}
    assert not tiles(epilogue, 128, design="pingpong", swap_ab=True) & {152, 168, 184}


def test_columns_of_transposed_results_with_operands() -> None:
    epilogue = epilogue_of(lambda acc, x: acc + x, out="fp32", x=COLUMN)
    assert max(tiles(epilogue, 128, design="pingpong", swap_ab=True)) == 176
    assert max(tiles(epilogue, 128, design="pingpong")) == 192


def test_registers_for_the_cluster_reduction() -> None:
    """Two k-tiles in flight take 1.5 registers per column of 192."""
    k_tiles = [
        plan_promotion(Config(tile=(128, n, 128), consumers=2, stages=4, cluster_splits=splits)).k_tiles_in_flight
        for n, splits in ((120, 2), (128, 2), (128, 1))
    ]
    assert k_tiles == [2, 1, 2]


def promoted(epilogue: EpilogueSpec, n: int, splits: int = 1, cluster_splits: int = 1) -> KernelSpec:
    config = Config(tile=(128, n, 128), cluster=(1, 1), consumers=2, splits=splits, cluster_splits=cluster_splits)
    return KernelSpec(config, select_mma(E4M3, E4M3, FP32), ("K", "K"), epilogue, promoted=True)


@pytest.mark.parametrize(("epilogue", "splits", "refused"), [
    (D, (1, 2), {168, 176, 184, 192, 224, 240, 256}),
    (ROWS, (2, 1), {168, 176, 184, 192, 224, 240, 256}),
    (ROWS, (1, 1), set()),
    (epilogue_of(lambda acc: gemmsmith.quantize(acc, "1x16")), (2, 1), {192, 208, 224, 240, 256}),
    (epilogue_of(lambda acc, c: acc + c, n=4095, c=UNALIGNED), (1, 1), {120, 128, 184, 192, 240, 256}),
])  # fmt: skip
def test_registers_left_by_promotion(epilogue: EpilogueSpec, splits: tuple[int, int], refused: set[int]) -> None:
    columns = {*range(64, 200, 8), 208, 224, 240, 256}  # wider ones are summed in two passes, which take half as many
    assert {n for n in columns if not promotion_leaves_registers(promoted(epilogue, n, *splits))} == refused


def before_hopper(design: str, m: int, n: int, epilogue: EpilogueSpec = D) -> KernelSpec:
    config = Config(design, (m, n, 32 if design == "mma_multistage" else 8), (1, 1), 3, 1, chip="sm_80")
    dtype, op = (BF16, MMA_SYNC) if design == "mma_multistage" else (FP32, FMA)
    return KernelSpec(config, select_mma(dtype, dtype, FP32, op), ("K", "K"), epilogue)


@pytest.mark.parametrize(("count", "widest"), [(1, 160), (2, 96), (3, 32)])
def test_matrices_before_hopper(count: int, widest: int) -> None:
    def added(acc: Any, **matrices: Any) -> Any:
        return sum(matrices.values(), acc)

    epilogue = epilogue_of(added, n=4095, **{f"c{i}": UNALIGNED for i in range(count)})
    assert [_spills(before_hopper("mma_multistage", 64, n, epilogue)) for n in (widest, widest + 16)] == [False, True]


def test_reductions_before_hopper() -> None:
    def reduced(acc: Any, count: int) -> Any:
        sums = (acc.sum(0), acc.amax(0), acc.sum(1), acc.amax(1))
        return acc, *sums[:count]

    three, four = (epilogue_of(lambda acc, count=count: reduced(acc, count)) for count in (3, 4))
    assert [_spills(before_hopper("mma_multistage", 64, 256, x)) for x in (three, four)] == [False, True]


def test_fragments_before_hopper() -> None:
    """With more columns B's fragments are loaded 16 at a time, or sgemm's once instead of twice."""
    by_columns = ["mma_group" in build(before_hopper("mma_multistage", 128, n)).source for n in (128, 144)]
    assert by_columns == [False, True]
    double_buffered = ["next_kk" in build(before_hopper("sgemm", 64, n)).source for n in (128, 256)]
    assert double_buffered == [True, False]


@pytest.mark.parametrize(("gathers", "scatters", "out", "widest"), [
    (True, False, "bf16", 192), (True, False, "fp32", 160), (False, True, "bf16", 160), (True, True, "bf16", 160),
])  # fmt: skip
def test_accumulators_with_row_indices(gathers: bool, scatters: bool, out: str, widest: int) -> None:
    indices = {"out": Spec((4096, 4096), out)} | ({"gather": Spec((4096,), "int32")} if gathers else {})
    if scatters:
        indices["scatter"] = Spec((4096,), "int32")

    def plan(n: int) -> gemmsmith.Plan:
        return gemmsmith.plan(
            Spec((4096, 4096), "bf16"), Spec((8, 4096, 4096), "bf16", (1 << 24, 1, 4096)), sizes=Spec((8,), "int32"),
            grouping=gemmsmith.Grouping("sizes", gathers=gathers, scatters=scatters),
            config=Config(tile=(256, n, 64), cluster=(1, 1), stages=3), **indices,
        )  # fmt: skip

    assert plan(widest).resources.spill_store_bytes == 0
    with pytest.raises(ConfigError, match=f"needs {widest + 8} per thread, 8 more than fit"):
        plan(widest + 8)


A, B = Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
A8, B8 = Spec((4096, 4096), "fp8_e4m3"), Spec((4096, 4096), "fp8_e4m3", (1, 4096))
BIASED = {"epilogue": lambda acc, x: acc + x, "operands": {"x": COLUMN}, "out_dtype": "fp32"}
TRANSPOSED = Config("pingpong", (128, 144, 64), (1, 1), 3, swap_ab=True)
WIDE = Config(tile=(256, 160, 64), cluster=(1, 1), stages=3)
SPLIT = Config(tile=(128, 160, 128), cluster=(1, 1), stages=3, cluster_splits=2)


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b", "options", "config", "n", "spills"), [
    (B, A, {"out": Spec((4096, 4096), "fp32")}, TRANSPOSED, 144, False),
    (B, A, {"out": Spec((4096, 4096), "fp32")}, TRANSPOSED, 152, True),
    (B, A, {"out": Spec((4096, 4096), "fp32")}, TRANSPOSED, 160, False),
    (B, A, BIASED, TRANSPOSED, 176, False),
    (B, A, BIASED, TRANSPOSED, 192, True),
    (A, B, {"epilogue": lambda acc, x, y: ((acc + x) * y).gelu(), "operands": {"x": COLUMN, "y": COLUMN}}, WIDE,
     160, False),
    (A, B, {"epilogue": lambda acc, x, y: ((acc + x) * y).gelu(), "operands": {"x": COLUMN, "y": COLUMN}}, WIDE,
     192, True),
    (A8, B8, {}, SPLIT, 160, False),
    (A8, B8, {}, SPLIT, 192, True),
])  # fmt: skip
def test_refused_tiles_spill(a: Spec, b: Spec, options: dict[str, Any], config: Config, n: int, spills: bool) -> None:
    m, _, k = config.tile
    resources = gemmsmith.plan(a, b, config=config.replace(tile=(m, n, k)), **options).resources
    assert (resources.spill_store_bytes > 0) == spills
