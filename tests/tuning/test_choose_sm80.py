"""What is chosen where there is no Hopper: configs that can be built, more and smaller tiles for small products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.arrays import ArrayInfo
from gemmsmith.backends.cuda import driver
from gemmsmith.backends.cuda.listing import build_listing
from gemmsmith.backends.reference import bounds
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.chip import CHIPS, HOPPER
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.host import planned_gemm
from gemmsmith.tuning.choose_sm80 import _kernel_cost, rank_sm80

OTHERS = [chip for chip in CHIPS.values() if chip != HOPPER]


def on(chip: Any, patch: pytest.MonkeyPatch) -> None:
    """Arrays lie on a GPU of that kind."""
    patch.setattr(planned_gemm, "chip_of", lambda a: chip)


@pytest.mark.parametrize("chip", OTHERS, ids=str)
def test_every_product_has_a_config(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(chip, monkeypatch)
    given: list[tuple[str, dict[str, Any]]] = [
        ("bf16", {}), ("fp16", {"accumulate": "fp16"}), ("int8", {}), ("fp32", {"precision": "tf32"}),
        ("bf16", {"epilogue": lambda acc, c: (acc + c).gelu(), "operands": {"c": Spec((1, 1), "bf16")}}),
    ]  # fmt: skip
    for m, n, k in ((1, 8, 0), (16, 4096, 4096), (333, 777, 555), (4096, 4096, 4096)):
        for dtype, options in given:
            if "operands" in options:
                options["operands"] = {"c": Spec((m, n), "bf16")}
            plan = gemmsmith.plan(Spec((m, k), dtype), Spec((k, n), dtype), **options)
            assert plan._planned.kernel.chip == chip
            assert plan._planned.kernel.shared_bytes <= chip.max_shared_bytes_per_cta
            assert plan.why.split("\n")[0] == f"{plan.config}: chosen for {chip}"


def test_tiles_follow_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    on(CHIPS["sm_80"], monkeypatch)

    def tile(m: int, n: int) -> int:
        rows, columns, _ = gemmsmith.plan(Spec((m, 4096), "bf16"), Spec((4096, n), "bf16")).config.tile
        return rows * columns

    assert tile(64, 1024) < tile(1024, 1024) <= tile(8192, 8192) == 256 * 128


@pytest.mark.parametrize(("sizes", "tile", "splits"), [
    ((4096, 4096, 4096), (256, 128, 8), 0), ((256, 4096, 4096), (128, 128, 16), 0),
    ((16, 4096, 4096), (256, 16, 8), 8), ((300, 500, 40), (64, 32, 8), 1),
])  # fmt: skip
def test_fp32_products_have_work_for_all_sms(sizes: Any, tile: Any, splits: int) -> None:
    """Large tiles, whose K is shared where they do not fill waves, and few rows along N."""
    m, n, k = sizes
    config = gemmsmith.plan(Spec((m, k), "fp32"), Spec((k, n), "fp32")).config
    assert (config.tile, config.splits) == (tile, splits)


def test_shares_of_tiles_whose_result_is_stored_turned() -> None:
    """With 128 sums a thread they would spill."""
    problem = gemmsmith.plan(Spec((128, 2048), "fp32"), Spec((2048, 8192), "fp32", (1, 2048))).problem
    first, *others = rank_sm80(problem, EpilogueSpec.identity(problem.d), HOPPER)
    turned = [c for c in (first, *others) if c.swap_ab and c.splits != 1 and c.tile == (256, 128, 8)]
    assert turned
    assert first not in turned


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(256, 128, 8), (256, 128, 16), (128, 64, 8), (64, 64, 8)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_instructions_of_fp32(tile: Any, turned: bool) -> None:
    """The estimate of what is issued for a k-tile against SASS."""
    a, b = Spec((4096, 4096), "fp32", (1, 4096)), Spec((4096, 4096), "fp32", (1, 4096) if turned else None)
    plan = gemmsmith.plan(a, b, config=Config("sgemm", tile, (1, 1), 4, tile[0] // 128 or 1))
    listing, warps = build_listing(plan._planned.kernel, "sass"), plan._planned.spec.threads // 32
    found = min(listing.count(x.unconditional).total() for x in listing.mainloops)
    assert found * warps / 4 == pytest.approx(_kernel_cost(plan._planned.spec, HOPPER).issue_cycles, rel=0.04)


def test_a_product(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    on(CHIPS["sm_89"], monkeypatch)
    a, b = (rng.standard_normal(shape, np.float32).astype(BF16.numpy) for shape in ((70, 90), (90, 130)))
    done = gemmsmith.simulate(a, b)
    assert done.hazards == []
    bounds.check(done.result, a, b, FP32, BF16).require()


@pytest.mark.parametrize(("dtype", "chip"), [(BF16, CHIPS["sm_80"]), (FP32, HOPPER)])
def test_rows_that_do_not_depend_on_m(dtype: Any, chip: Any, monkeypatch: pytest.MonkeyPatch, rng: Any) -> None:
    on(chip, monkeypatch)
    a, b = (rng.standard_normal(shape, np.float32).astype(dtype.numpy) for shape in ((70, 40), (40, 24)))
    plans_of = [gemmsmith.plan(a[:m], b, batch_invariant=True) for m in (3, 70)]
    assert plans_of[0].config == plans_of[1].config
    few, many = (plan.simulate(a[:m], b).result for plan, m in zip(plans_of, (3, 70), strict=True))
    np.testing.assert_array_equal(few, many[:3])


@pytest.mark.parametrize(("capability", "name"), [
    ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 3), "sm_100"),
    ((11, 0), "sm_100"), ((12, 1), "sm_120"), ((13, 0), "sm_120"),
])  # fmt: skip
def test_a_gpus_chip(capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "is_available", lambda: True)
    monkeypatch.setattr(
        driver, "device_attributes", lambda _: driver.DeviceAttributes("NVIDIA", capability, 100, 100 * 1024)
    )
    assert planned_gemm.chip_of(ArrayInfo(BF16, (8, 8), (8, 1), 0, "cuda", 0, True)) == CHIPS[name]


def test_only_rows_that_need_them_have_the_widest_tiles_of_fp32() -> None:
    """One warpgroup of 256 columns loads nothing ahead."""
    a, b = Spec((64, 4096), "fp32"), Spec((4096, 33792), "fp32")
    assert gemmsmith.plan(a, b).config.tile[1] <= 128
    b = Spec((4096, 256), "fp32")
    assert gemmsmith.plan(a, b, epilogue=lambda acc: gemmsmith.top_k_softmax(acc, 2)).config.tile == (64, 256, 8)


def of_every_tile(dtype: str, chip: Any) -> dict[tuple[int, int, int], set[int]]:
    """Return the depths of the tiles (M, N, consumers) that are considered for a large product."""
    binding = bind(Request(Spec((4096, 4096), dtype), Spec((4096, 4096), dtype)))
    found: dict[tuple[int, int, int], set[int]] = {}
    for c in rank_sm80(binding.problem, binding.spec, chip):
        assert c.stages == {64: 3, 32: 4, 16: 3, 8: 4}[c.tile[2]]
        found.setdefault((*c.tile[:2], c.consumers), set()).add(c.tile[2])
    return found


def test_tiles_of_mma() -> None:
    """Of an A100, whose 163 KB hold three stages of full lines of all tiles but 128 x 256, whose sums in shared memory
    take 128 KB more; one warpgroup where functions of rows want all columns."""
    both = [
        (256, 128, 2),
        (128, 128, 2),
        (128, 64, 2),
        (64, 128, 2),
        (64, 64, 2),
        (64, 32, 1),
        (64, 128, 1),
        (64, 256, 1),
    ]
    assert of_every_tile("bf16", CHIPS["sm_80"]) == {(128, 256, 2): {32}} | {tile: {32, 64} for tile in both}


def test_tiles_of_fp32() -> None:
    """Narrow ones too, for few columns: with swap_ab, few rows of A; tiles 16 deep only of two warpgroups."""
    flat = [
        (64, 32, 1),
        (64, 64, 1),
        (64, 128, 1),
        (128, 32, 1),
        (128, 64, 1),
        (256, 16, 1),
        (256, 32, 1),
        (256, 64, 1),
    ]
    deep = {tile: {8, 16} for tile in [(128, 64, 2), (128, 128, 2)]}
    assert of_every_tile("fp32", HOPPER) == {tile: {8} for tile in [*flat, (256, 128, 2)]} | deep


@pytest.mark.parametrize(("dtype", "chip", "sizes", "tile", "splits"), [
    ("bf16", "sm_80", (16, 4096, 4096), (64, 64, 64), 1), ("bf16", "sm_89", (16, 4096, 4096), (64, 32, 64), 1),
    ("bf16", "sm_80", (1024, 1024, 8192), (128, 128, 64), 1), ("bf16", "sm_89", (4096, 4096, 4096), (256, 128, 32), 1),
    ("int8", "sm_80", (4096, 4096, 4096), (256, 128, 64), 1), ("fp32", "sm_80", (16, 4096, 4096), (256, 16, 8), 0),
    ("fp32", "sm_90", (16, 4096, 4096), (256, 16, 8), 8), ("fp32", "sm_80", (512, 512, 512), (128, 64, 16), 3),
    ("fp32", "sm_86", (512, 512, 512), (128, 64, 16), 0), ("fp32", "sm_90", (512, 512, 512), (128, 64, 16), 4),
    ("fp32", "sm_86", (1024, 1024, 8192), (128, 128, 16), 0), ("fp32", "sm_100", (4096, 4096, 4096), (128, 128, 16), 0),
    ("fp32", "sm_100", (8192, 8192, 1024), (256, 128, 8), 0),
])  # fmt: skip
def test_every_sm_has_a_tile_or_a_share(dtype: str, chip: str, sizes: Any, tile: Any, splits: int) -> None:
    """The largest tile of which there are enough, and as many shares of K as bring a CTA to each SM, or two."""
    m, n, k = sizes
    binding = bind(Request(Spec((m, k), dtype), Spec((k, n), dtype, (1, k))))
    chosen = rank_sm80(binding.problem, binding.spec, CHIPS[chip])[0]
    assert (chosen.tile, chosen.splits) == (tile, splits)


@pytest.mark.parametrize(("dtype", "chip"), [("bf16", "sm_80"), ("fp32", "sm_90")])
def test_a_matrix_takes_registers_and_a_bias_none(dtype: str, chip: str) -> None:
    """A thread has 116 for its sums and for 32 elements of each matrix; three reductions are free, a fourth is not."""

    def sums(epilogue: Any = None, **operands: Spec) -> float:
        a, b = Spec((4096, 4096), dtype), Spec((4096, 4096), dtype)
        binding = bind(Request(a, b, epilogue=epilogue, operands=operands))
        chosen = rank_sm80(binding.problem, binding.spec, CHIPS[chip])[0]
        return chosen.tile[0] * chosen.tile[1] / chosen.consumers / 128

    bias, matrix = Spec((4096,), "fp32"), Spec((4096, 4096), "fp32", (9000, 2))
    assert sums() == sums(lambda acc, bias: acc + bias, bias=bias) == 128
    assert sums(lambda acc, c: acc + c, c=matrix) == 64
    assert sums(lambda acc, c, d: acc * c + d, c=matrix, d=matrix) < 116 - 64
    three = lambda acc: (acc, acc.sum(-1), acc.max(-1), acc.min(-1))  # noqa: E731
    assert sums(three) == 128
    assert sums(lambda acc: (*three(acc), acc.sum(-2))) == 64
