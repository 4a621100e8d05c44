"""Which configs are considered."""

from __future__ import annotations

from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.make_spec import make_spec
from gemmsmith.core.spec import KernelSpec
from gemmsmith.tuning.candidates import candidates, fit_stages, promotion_leaves_registers, spec_for

MATRIX, STRIDED = Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (9000, 2))
STRIDED_SMALL = Spec((2048, 2048), "bf16", (5000, 2))


def of(epilogue: Any = None, **operands: Spec) -> EpilogueSpec:
    """Return the spec of an epilogue of a large product in bf16."""
    b = Spec((4096, 4096), "bf16", (1, 4096))
    return bind(Request(Spec((4096, 4096), "bf16"), b, epilogue=epilogue, operands=operands)).spec


def whole_k(configs: list[Config]) -> list[Config]:
    return [c for c in configs if c.splits == c.cluster_splits == 1 and not c.swap_ab]


def swiglu(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gate.silu() * up


def test_clusters_along_n_walk_along_n() -> None:
    """The tiles of a cluster share the operand that the next ones use again."""
    configs = list(candidates(of()))
    assert {(c.cluster, c.raster) for c in configs} == {((1, 2), "n"), ((2, 1), "m"), ((1, 1), "m")}
    assert all((c.raster == "n") == (c.cluster[1] > c.cluster[0]) for c in configs)
    assert max(c.stages for c in configs) == 16
    assert min(c.stages for c in configs) >= 3


def test_tiles() -> None:
    """Columns in steps of 8, where two pingpong warpgroups of 64 rows alternate of 16, as far as the accumulator of a
    warpgroup fits; one warpgroup for 128 rows as long as it has registers, then two."""
    every = [8 * i for i in range(1, 33)]
    found: dict[tuple[str, int, int], set[int]] = {}
    for c in candidates(of()):
        found.setdefault((c.design, c.tile[0], c.consumers), set()).add(c.tile[1])
    assert {tile: sorted(columns) for tile, columns in found.items()} == {
        ("cooperative", 64, 1): every,
        ("cooperative", 128, 1): [8, 16, 32, 48, *every[7:16]],
        ("cooperative", 128, 2): every[16:],
        ("cooperative", 192, 3): every[7:24],
        ("cooperative", 256, 2): every[7:24],
        ("pingpong", 64, 2): [96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256],
        ("pingpong", 128, 2): every[7:24],
    }


WIDEST = ("cooperative", 256, 2), ("cooperative", 192, 3), ("pingpong", 128, 2), ("cooperative", 128, 2)


@pytest.mark.parametrize(("epilogue", "widest", "count"), [
    (of(), (192, 192, 192, 256), 468),
    (of(lambda acc, x: (acc + x).relu(), x=Spec((4096,), "bf16")), (192, 192, 192, 256), 468),
    (of(lambda acc, x: (acc + x).gelu(), x=Spec((4096,), "bf16")), (160, 160, 160, 256), 438),
    (of(lambda acc, c: acc + c, c=MATRIX), (160, 160, 160, 256), 410),
    (of(lambda acc, c: acc + c, c=STRIDED), (None, 88, None, 176), 242),
    (of(lambda acc, c, d: (acc * c, acc * d), c=MATRIX, d=MATRIX), (128, 160, 128, 256), 406),
    (of(lambda acc: (acc.relu(), acc.sum(-1))), (192, 192, 192, 256), 468),
    (of(lambda acc: (acc.relu(), acc.sum(-1), acc.max(-2))), (128, 160, 128, 256), 486),
    (of(lambda acc: gemmsmith.top_k_softmax(acc, 2)), (192, 192, 192, 256), 456),
    (of(swiglu), (192, 192, 192, 256), 321),
], ids=["plain", "relu", "gelu", "residual", "strided", "two", "sums", "maxima", "rows", "swiglu"])  # fmt: skip
def test_an_epilogues_tiles_leave_it_registers(epilogue: EpilogueSpec, widest: tuple[Any, ...], count: int) -> None:
    """The widest that do not spill (tests/kernels/test_compiled.py), and how many configs there are in all."""
    configs = whole_k(list(candidates(epilogue)))
    assert len(configs) == count
    assert all(c.tile[1] % 8 == 0 for c in configs)
    found = {(c.design, c.tile[0], c.consumers): 0 for c in configs}
    for c in configs:
        key = c.design, c.tile[0], c.consumers
        found[key] = max(found[key], c.tile[1])
    assert tuple(map(found.get, WIDEST)) == widest


def test_columns_of_32_bits_take_registers_too() -> None:
    """Of D^T: pingpong tiles of 128 rows and uneven widths beyond 144 columns spill."""
    b = Spec((4096, 4096), "bf16", (1, 4096))
    widths = {}
    for dtype in ("fp32", "bf16"):
        epilogue = bind(Request(MATRIX, b, out_dtype=dtype)).spec
        tiles = {c.tile for c in candidates(epilogue) if c.design == "pingpong" and c.swap_ab and c.tile[0] == 128}
        widths[dtype] = {n for _, n, _ in tiles}
    assert widths["bf16"] - widths["fp32"] == {152, 168, 184}
    assert max(widths["fp32"]) == 192


def test_promoted_sums_leave_a_second_accumulator() -> None:
    configs = whole_k(list(candidates(of(), promoted=True)))
    assert {c.design for c in configs} == {"cooperative"}
    assert {n: max(c.tile[1] for c in configs if c.consumers == n) for n in (1, 2, 3)} == {1: 256, 2: 256, 3: 160}
    assert len(configs) == 229


def test_shares_of_k() -> None:
    """By one warpgroup or two; of narrow tiles only swapped, which have few rows of A and much of B to read."""
    shared = [c for c in candidates(of()) if c.splits != 1 or c.cluster_splits != 1]
    assert {c.splits for c in shared} == {0, 1, 2, 3, 4, 5, 6, 8, 12, 16}
    assert {c.cluster_splits for c in shared} == {1, 2, 4}
    assert {c.consumers for c in shared} == {1, 2}
    assert min(c.tile[1] for c in shared if not c.swap_ab) == 48
    assert min(c.tile[1] for c in shared if c.swap_ab) == 8
    rows = [c for c in candidates(of(lambda acc: gemmsmith.top_k_softmax(acc, 2))) if c.cluster_splits > 1]
    assert max(c.tile[1] for c in rows) == 192


def test_deep_tiles() -> None:
    """Of 128 where two operands' k-tiles are small, of 256 for few rows of A, which are columns of D^T."""
    configs = list(candidates(of()))
    assert {c.tile[2] for c in configs} == {64, 128, 256}
    assert all(c.tile[0] == 64 or sum(c.tile[:2]) <= 256 for c in configs if c.tile[2] == 128)
    assert max(c.tile[0] for c in configs if c.tile[2] == 128) == 192
    assert {(c.swap_ab, c.tile[1]) for c in configs if c.tile[2] == 256} == {(True, n) for n in (8, 16, 24, 32)}


@pytest.mark.parametrize("epilogue", [of(), of(lambda acc, c: acc + c, c=MATRIX), of(swiglu)])
def test_stages_are_those_that_fit_the_kernel(epilogue: EpilogueSpec) -> None:
    """Next to what a cluster's CTAs exchange, too."""
    problem = bind(Request(MATRIX, Spec((4096, 4096), "bf16", (1, 4096)))).problem
    for config in list(candidates(epilogue))[::11]:
        most = config.replace(stages=16)
        assert fit_stages(spec_for(most, problem, epilogue)) == config


def promoted_spec(tile_n: int, splits: int, cluster_splits: int, epilogue: Any = None, **operands: Spec) -> KernelSpec:
    """Return the spec of FP8 with a scale per block of 128, summed by one warpgroup."""
    scales = {"scale_a": Spec((2048, 16), "fp32", (1, 2048)), "scale_b": Spec((16, 16), "fp32", (1, 16))}
    a, b = Spec((2048, 2048), "fp8_e4m3"), Spec((2048, 2048), "fp8_e4m3", (1, 2048))
    config = Config(tile=(64, 16, 128), cluster=(1, 1), stages=3, consumers=1)
    plan = gemmsmith.plan(
        a,
        b,
        **scales,
        epilogue=epilogue,
        operands=operands,
        config=config,
        out_dtype=None if epilogue is quantized else "bf16",
    )
    config = config.replace(tile=(64, tile_n, 128), splits=splits, cluster_splits=cluster_splits)
    return make_spec(plan.problem, config, plan._planned.spec.epilogue)


def quantized(acc: Any) -> Any:
    return gemmsmith.quantize(acc, "1x16")


@pytest.mark.parametrize(("epilogue", "operands", "splits", "cluster_splits", "widest"), [
    (None, {}, 1, 1, 208), (None, {}, 2, 1, 208), (None, {}, 1, 2, 176), (quantized, {}, 1, 1, 208),
    (quantized, {}, 2, 1, 192), (lambda acc, c: acc + c, {"c": STRIDED_SMALL}, 1, 1, 192),
])  # fmt: skip
def test_promoted_sums_leave_registers(
    epilogue: Any, operands: dict[str, Spec], splits: int, cluster_splits: int, widest: int
) -> None:
    """Of the 208 that one warpgroup has, of which a tile of 64 rows takes one per column: none to a plain epilogue, 4
    to a quantizing one that follows shares of K, 16 to one that loads a matrix without TMA, 32 to a cluster's."""
    specs = [promoted_spec(n, splits, cluster_splits, epilogue, **operands) for n in range(16, 209, 16)]
    assert max(spec.config.tile[1] for spec in specs if promotion_leaves_registers(spec)) == widest
