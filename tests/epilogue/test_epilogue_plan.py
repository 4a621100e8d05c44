"""How epilogue subtiles go through shared memory: all of them, in store groups that fit next to the stages."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, ConfigError, EpilogueError, Spec
from gemmsmith.backends.reference import bounds
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.mma import select_mma
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.epilogue_plan import plan_epilogue
from gemmsmith.tuning.candidates import stages_that_fit, transposed_epilogue
from gemmsmith.tuning.config_table import configs_for_epilogue

EPILOGUE = EpilogueSpec(identity_graph(BF16), frozenset({"out"}))


def spec(config: Config) -> KernelSpec:
    return KernelSpec(config, select_mma(BF16, BF16, FP32), ("K", "K"), EPILOGUE)


def test_every_tile_is_stored_in_groups_that_fit() -> None:
    uneven = 0
    for config in configs_for_epilogue(EPILOGUE).configs:
        if config.swap_ab:
            continue
        s = spec(config)
        plan = plan_epilogue(s)
        sizes = [
            min(plan.subtiles_per_store, plan.subtiles - i * plan.subtiles_per_store) for i in range(plan.store_groups)
        ]
        assert sum(sizes) == plan.subtiles
        assert min(sizes) > 0
        uneven += len(set(sizes)) > 1
        buffers = (
            config.consumers * plan.store_stages * plan.subtiles_per_store * sum(tile.bytes for _, tile in plan.stores)
        )
        assert config.stages * s.stage_bytes + buffers + s.cluster_reduction_bytes <= HOPPER.max_shared_bytes_per_cta
    assert uneven > 0


@pytest.mark.parametrize(("operands", "results"), [
    ((), ("fp32",)), ((), ("fp32", "fp32")), ((), ("bf16", "bf16", "bf16")), (("bf16",), ("bf16",)),
    (("bf16", "bf16"), ("bf16", "bf16", "bf16")), (("fp32", "bool"), ("fp32", "fp32")),
])  # fmt: skip
def test_a_buffer_of_each_matrix_fits_beside_the_stages(operands: tuple[str, ...], results: tuple[str, ...]) -> None:
    def function(acc, **matrices):
        return tuple((acc * (i + 2) + sum(matrices.values())).to(dtype) for i, dtype in enumerate(results))

    a, b = Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    matrices = {f"x{i}": Spec((4096, 4096), dtype) for i, dtype in enumerate(operands)}
    epilogue = bind(Request(a, b, epilogue=function, operands=matrices)).spec
    configs = configs_for_epilogue(epilogue).configs
    assert len(configs) > 100
    for config in configs:
        oriented = transposed_epilogue(epilogue) if config.swap_ab else epilogue
        s = KernelSpec(config, select_mma(BF16, BF16, FP32), ("K", "K"), oriented)
        plan = plan_epilogue(s)
        loads, stores = (sum(tile.bytes for _, tile in tiles) for tiles in (plan.loads, plan.stores))
        buffers = plan.load_stages * (loads + 8) + plan.subtiles_per_store * plan.store_stages * stores
        taken = s.mainloop_bytes(config.stages) + config.consumers * buffers
        assert taken <= HOPPER.max_shared_bytes_per_cta, config
        assert plan.load_stages >= min(len(operands), 1)


def test_the_largest_tiles_leave_a_quarter_to_the_epilogue() -> None:
    """One stage less and a few store groups are faster than 11 groups and one stage more."""
    stages = {
        c.tile: (c.stages, plan_epilogue(spec(c)).store_groups)
        for c in configs_for_epilogue(EPILOGUE).configs
        if c.cluster_splits == 1
    }
    assert stages[256, 176, 64] == (3, 3)
    assert stages[256, 160, 64] == (3, 3)
    assert stages[128, 248, 64] == (3, 1)  # one subtile per warpgroup needs one buffer, not two


def test_results_in_the_stages_leave_at_once_and_make_room() -> None:
    config = Config(tile=(256, 192, 64), cluster=(1, 2), stages=4, alias_epilogue=True)
    assert plan_epilogue(spec(config)).store_groups == 1
    assert stages_that_fit(spec(config.replace(stages=9))) == 4
    assert stages_that_fit(spec(config.replace(stages=9, alias_epilogue=False))) == 3


@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_boxes_are_multiples_of_16_bytes(gated: bool) -> None:
    def narrow(acc):
        return ((gemmsmith.deinterleave(acc)[0] if gated else acc) * 0.5).to("fp8_e4m3")

    least = 32 if gated else 16
    a, b = Spec((64, 64), "bf16"), Spec((64, 3072), "bf16", (1, 64))
    for n in range(least // 2, 257, least // 2):
        config = Config(tile=(64, n, 64), cluster=(1, 1), consumers=1, stages=2)
        if n % least == 0:
            assert gemmsmith.plan(a, b, epilogue=narrow, config=config).source
        else:
            with pytest.raises(ConfigError, match=f"got {n}; this epilogue needs a multiple of {least}"):
                _ = gemmsmith.plan(a, b, epilogue=narrow, config=config).source
    configs = configs_for_epilogue(bind(Request(a, b, epilogue=narrow)).spec).configs
    assert all(c.tile[1] % (16 if c.swap_ab else least) == 0 for c in configs)  # D^T pairs rows, not columns


def test_boxes_of_a_column_major_mask_are_of_any_width() -> None:
    a, b, mask = Spec((64, 64), "bf16"), Spec((64, 3072), "bf16", (1, 64)), Spec((64, 3072), "bool")
    for n, swap_ab in product((8, 16, 24, 64, 72), (False, True)):
        config = Config(tile=(64, n, 64), cluster=(1, 1), consumers=1, stages=2, swap_ab=swap_ab)
        plan = gemmsmith.plan(a, b, epilogue=lambda acc, mask: acc * mask, mask=mask, config=config)
        if n % 16 == 0 or swap_ab:
            assert "in_mask" in plan.source
        else:
            with pytest.raises(ConfigError, match=f"got {n}; this epilogue needs a multiple of 16"):
                _ = plan.source


def test_uneven_store_groups_store_every_column() -> None:
    """Eleven subtiles of 16 columns, four per store group."""
    config = Config(tile=(64, 176, 64), cluster=(1, 1), stages=7, consumers=1)
    plan = plan_epilogue(spec(config))
    assert (plan.subtiles, plan.subtiles_per_store) == (11, 4)
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for shape in ((100, 70), (70, 400)))
    out = np.full((100, 400), np.nan, ml_dtypes.bfloat16)
    done = gemmsmith.simulate(a, b, out=out, config=config)
    assert done.hazards == []
    bounds.check(out, a, b, FP32, BF16).require()


def test_load_stages_that_do_not_divide_the_subtiles() -> None:
    """Two load stages load three and two of five subtiles per tile: their phases differ in a CTA's later tiles."""
    rng = np.random.default_rng()
    a, b, c, d = (
        rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        for shape in ((120, 70), (70, 800), (120, 800), (120, 800))
    )
    b = np.asfortranarray(b)
    plan = gemmsmith.plan(
        a, b, epilogue=lambda acc, c, d: acc + c * d, operands={"c": c, "d": d}, out_dtype="fp32",
        config=Config(tile=(64, 160, 64), cluster=(1, 1), stages=7, consumers=1),
    )  # fmt: skip
    found = plan_epilogue(plan._planned.spec)
    assert (found.subtiles, found.load_stages) == (5, 2)
    out = np.full((120, 800), np.nan, np.float32)
    done = plan.simulate(a, b, out, operands={"c": c, "d": d})
    assert done.hazards == []
    wide = [x.astype(np.float64) for x in (a, b, c, d)]
    np.testing.assert_allclose(out, wide[0] @ wide[1] + wide[2] * wide[3], rtol=1e-5, atol=1e-4)


def test_a_clusters_ctas_finish_a_part_of_the_columns_each() -> None:
    """Where that makes parts of 16 bytes, and no function wants a tile's columns together."""

    def columns(tile: int, splits: int, epilogue: EpilogueSpec = EPILOGUE) -> int:
        config = Config(tile=(64, tile, 64), cluster=(1, 1), stages=3, consumers=1, cluster_splits=splits)
        return KernelSpec(config, select_mma(BF16, BF16, FP32), ("K", "K"), epilogue).slice_columns

    assert [columns(64, 2), columns(64, 4), columns(16, 2), columns(80, 2)] == [32, 16, 8, 40]
    assert [columns(24, 2), columns(64, 3)] == [24, 64]
    a, b = Spec((64, 64), "bf16"), Spec((64, 3072), "bf16", (1, 64))
    gated = bind(
        Request(a, b, epilogue=lambda acc: gemmsmith.deinterleave(acc)[0] * gemmsmith.deinterleave(acc)[1])
    ).spec
    small = bind(Request(a, b, epilogue=lambda acc: acc.to("fp8_e4m3"))).spec
    assert columns(64, 2, gated) == 64
    assert [columns(32, 2, small), columns(16, 2, small)] == [16, 16]


@pytest.mark.parametrize("block", [1, 2, 4, 8, 12, 24, 40, 100, 272])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_that_no_subtile_can_be(block: int, gated: bool) -> None:
    """Whether TMA can store D or not."""

    def quantized(acc):
        return gemmsmith.quantize(gemmsmith.deinterleave(acc)[0] if gated else acc, f"1x{block}")

    message = f"block: got {block}; use a multiple of 16, at most {128 if gated else 256}"
    for n in (96, 80 if gated else 83):
        with pytest.raises(EpilogueError, match=message):
            gemmsmith.plan(Spec((70, 32), "bf16"), Spec((32, n), "bf16"), epilogue=quantized)


def test_blocks_of_two_sizes() -> None:
    """A subtile is one block; with functions of whole rows, a block must be as wide as the tile."""

    def two(acc):
        q, s = gemmsmith.quantize(acc, "1x32")
        return q, s, *gemmsmith.quantize(gemmsmith.deinterleave(acc)[0], "1x32")

    a, b = Spec((70, 32), "bf16"), Spec((32, 96), "bf16")
    with pytest.raises(EpilogueError, match="got blocks of 32 and 64 accumulator columns; use one block size"):
        gemmsmith.plan(a, b, epilogue=two)
    with pytest.raises(ConfigError, match="top_k_softmax and quantize: got rows of 96 columns, .*; use up to 32"):
        gemmsmith.plan(a, b, epilogue=lambda acc: gemmsmith.quantize(gemmsmith.top_k_softmax(acc, 2), "1x32"))
    b, odd = Spec((32, 32), "bf16"), Config(tile=(64, 40, 64), cluster=(1, 1), stages=2, consumers=1)
    plan = gemmsmith.plan(
        a, b, epilogue=lambda acc: gemmsmith.top_k_softmax(gemmsmith.deinterleave(acc)[0], 2), config=odd
    )
    with pytest.raises(ConfigError, match="got 40; this epilogue needs a multiple of 16"):
        _ = plan.source


@pytest.mark.parametrize(("design", "tile", "stages", "residual", "want"), [
    ("cooperative", (128, 256, 64), 4, False, (1, 2, 0)), ("pingpong", (64, 256, 64), 4, False, (4, 1, 0)),
    ("cooperative", (128, 256, 64), 3, True, (1, 2, 3)), ("cooperative", (128, 240, 64), 4, True, (1, 2, 8)),
])  # fmt: skip
def test_a_bias_takes_a_word_per_column(
    design: str, tile: tuple[int, int, int], stages: int, residual: bool, want: tuple[int, int, int]
) -> None:
    """Of 232,448 bytes the stages and barriers leave 35,776, 68,544, 84,944 and 43,968, two biases take 2,048 of them;
    subtiles of 64 columns have 8,192, of 16, of which at most 8 are loaded at once, 2,048: subtiles per store, buffers
    of stores, and of loads, with a barrier each."""
    a, b, bias = Spec((512, 512), "bf16"), Spec((512, 512), "bf16", (1, 512)), Spec((512,), "fp32")
    config = Config(design, tile, (1, 1), stages)
    operands = {"bias": bias, "c": Spec((512, 512), "bf16")} if residual else {"bias": bias}
    add = (lambda acc, bias, c: acc + bias + c) if residual else (lambda acc, bias: acc + bias)
    found = plan_epilogue(gemmsmith.plan(a, b, epilogue=add, operands=operands, config=config)._planned.spec)
    assert (found.subtiles_per_store, found.store_stages, found.load_stages) == want


def test_block_scales_take_room_beside_each_stage() -> None:
    """Of 232,448 bytes six stages of 128 x 128 with barriers and scales leave 32,576: three of four subtiles fit."""
    a, b = Spec((2048, 2048), "fp8_e4m3"), Spec((2048, 2048), "fp8_e4m3", (1, 2048))
    scales = {"scale_a": Spec((2048, 16), "fp32", (1, 2048)), "scale_b": Spec((16, 16), "fp32", (1, 16))}
    config = Config(tile=(128, 128, 128), cluster=(1, 1), stages=6, consumers=1)
    plan = gemmsmith.plan(a, b, **scales, config=config, out_dtype="bf16")
    assert plan._planned.spec.scale_bytes(6) == 6 * (512 + 16)
    found = plan_epilogue(plan._planned.spec)
    assert (found.subtiles, found.subtiles_per_store, found.store_stages) == (4, 1, 2)
    assert plan._planned.kernel.shared_bytes <= 232_448
