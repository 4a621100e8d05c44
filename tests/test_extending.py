"""One of each kind that `docs/internals/extending.md` says can be added in two files at most, added from outside.

A tile scheduler, a loader and a whole kernel are in `test_own_designs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Design, Spec, hw
from gemmsmith.backends.reference import bounds
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import PipelineTmaAsync, init_barriers
from gemmsmith.collective.tma_mainloop import TmaStages
from gemmsmith.collective.tma_operand import TmaOperand
from gemmsmith.core.dtypes import BF16, E4M3, FP32, INT32, DType
from gemmsmith.core.mma import MMA_SYNC, WGMMA, Mma, select_mma
from gemmsmith.core.operand import MmaOperand
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import Matrix, operand_getter
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tile import Tile
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U64
from gemmsmith.lang.values import Constant
from gemmsmith.tile_scheduler.tiles import OperandCoord, TileScheduler


def sum_of_two(k: Builder, spec: KernelSpec) -> None:
    """Compute D = A @ (B + B2): tiles of B and B2 lie side by side in a stage."""
    scheduler, (a, b), of_b2 = TileScheduler(spec), spec.operands, operand_getter("b2")
    b2 = replace(b, name="b2", source=lambda p: (of_b2(p)[0].T, of_b2(p)[1]))
    stages = TmaStages(spec, scheduler, [TmaOperand(x, spec.config.stages) for x in (a, b, b2)])
    epilogue = Epilogue(spec, scheduler)
    mainloop = stages.prologue(*epilogue.pipelines, prefetch=epilogue.maps)
    with k.warpgroup(0), k.warp(0, "producer"), k.when(hw.elect_one()):
        producer = mainloop.start_producer()
        with producer.k_tile_loop() as (tile, k_tile):
            producer.load(tile, k_tile)
            producer.advance()
        producer.tail()
    with k.warpgroups(1, 1 + spec.config.consumers, "consumer") as warpgroup:
        row, read = warpgroup * spec.warpgroup_rows, mainloop.pipeline.consumer_start_state()
        accumulator = Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)
        warpgroup_epilogue = epilogue.start(warpgroup, row)
        with scheduler.tile_loop() as tile:
            tile_epilogue = warpgroup_epilogue.load(tile)
            accumulator.clear()
            with k.range(tile.k_tiles, name="k_tile"):
                mainloop.consumer_wait(read)
                a_tile, *b_tiles = mainloop.stage(read)
                for b_tile in b_tiles:
                    accumulator.multiply(a_tile.rows(row, spec.warpgroup_rows), b_tile, accumulate=True)
                accumulator.wait(0)
                mainloop.pipeline.consumer_release(read)
                read.advance()
            tile_epilogue.store(accumulator)
        warpgroup_epilogue.finish()


SUM_OF_TWO = gemmsmith.register_design(Design(
    "sum_of_two", sum_of_two, producer_warpgroups=1, max_accumulator_registers={1: 200, 2: 200}, arrays={"b2": BF16},
    shapes="mk,kn,kn->mn", dtypes={(BF16, BF16): BF16},
))  # fmt: skip
UINT8 = DType("uint8", 8, 8, np.dtype(np.uint8), "u8")
CONFIG = Config("sum_of_two", (128, 64, 64), (2, 1), 3)


@pytest.mark.parametrize("seed", range(3))
def test_a_third_operand_in_a_stage(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = 200, 136, 8 * int(rng.integers(1, 40))
    a, b, b2 = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((m, k), (k, n), (k, n)))
    out = np.full((m, n), np.nan, np.float32)
    done = gemmsmith.simulate(a, b, b2=b2, out=out, out_dtype="fp32", config=CONFIG, seed=seed)
    assert done.hazards == []
    want = a.astype(float) @ (b.astype(float) + b2.astype(float))
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)


def test_an_operand_in_a_layout_that_its_tiles_do_not_have_is_refused() -> None:
    plan = gemmsmith.plan(
        Spec((128, 64), "bf16"), Spec((64, 64), "bf16", (1, 64)), b2=Spec((64, 64), "bf16"), config=CONFIG
    )
    with pytest.raises(ArgumentError, match="in_b2: got a stride of 64; its tiles are K-major"):
        _ = plan.launches


@pytest.fixture
def unsigned_bytes() -> Iterator[Mma]:
    """A row of the table of wgmma for unsigned bytes."""
    row, rows = Mma(UINT8, UINT8, INT32, n=range(16, 257, 16), more_n=(8, 24)), WGMMA.instructions
    object.__setattr__(WGMMA, "instructions", (*rows, row))
    yield row
    object.__setattr__(WGMMA, "instructions", rows)


def test_a_row_of_the_table_is_an_instruction(unsigned_bytes: Mma) -> None:
    """It is chosen by its dtypes, prints as PTX, and multiplies in the simulator."""
    assert select_mma(UINT8, UINT8, INT32) is unsigned_bytes
    rows, columns, depth = 64, 16, 64
    tiles = {"x": Tile(UINT8, rows, depth, "K"), "y": Tile(UINT8, columns, depth, "K")}
    with Builder("bytes", threads=128) as k:
        operands = [
            TmaOperand(MmaOperand(name, "a", tile, lambda p, name=name: p[name]), 1) for name, tile in tiles.items()
        ]
        out, zero = k.pointer("out", lambda p: p["out"]), Constant(I32, 0)
        pipeline = PipelineTmaAsync(1, transaction_bytes=sum(tile.bytes for tile in tiles.values()))
        init_barriers(pipeline)
        with k.warpgroups(0, 1):
            write, read = pipeline.producer_start_state(), pipeline.consumer_start_state()
            with k.when((k.warp_index == 0) & hw.elect_one()):
                pipeline.producer_acquire(write)
                for x in operands:
                    x.load(zero, pipeline.full_barrier(write), OperandCoord(zero, zero), zero)
            pipeline.consumer_wait(read)
            accumulator = Accumulator(unsigned_bytes, rows, columns)
            accumulator.multiply(operands[0].stages[zero], operands[1].stages[zero], accumulate=False)
            accumulator.wait(0)
            pipeline.consumer_release(read)
            with k.unroll(columns // 2) as i:
                place = (k.thread * (columns // 2) + i).to(U64) * 4
                hw.store_global_word(out + place, accumulator.fragments[0][i], True, "sum")
        kernel = k.finish()
    assert "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.u8" in kernel.source
    rng, memory = np.random.default_rng(0), GlobalMemory()
    x, y = (rng.integers(0, 256, (n, depth), dtype=np.uint8) for n in (rows, columns))
    sums = np.full((128, columns // 2), -1, np.int32)
    bound: dict[str, Any] = {
        name: (Matrix(UINT8, len(z), depth, depth, 1), memory.add_buffer(z, name, writable=False))
        for name, z in (("x", x), ("y", y))
    }
    arguments = kernel.arguments(_Bound(bound | {"out": memory.add_buffer(sums, "out")}))
    assert simulate(kernel, 1, arguments, memory).hazards == []
    np.testing.assert_array_equal(np.sort(sums.ravel()), np.sort((x.astype(np.int32) @ y.astype(np.int32).T).ravel()))


@pytest.fixture
def fp8_by_mma_sync() -> Iterator[Mma]:
    """A row of the table of mma.sync, which the design mma_multistage then takes."""
    row = Mma(E4M3, E4M3, FP32, n=range(16, 257, 16), aligned_fraction_bits=13, required_arch="sm_89")
    rows = MMA_SYNC.instructions
    object.__setattr__(MMA_SYNC, "instructions", (*rows, row))
    yield row
    object.__setattr__(MMA_SYNC, "instructions", rows)


FP8_CONFIG = Config("mma_multistage", (64, 64, 64), (1, 1), 3, 1, chip="sm_89")


def fp8(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.usefixtures("fp8_by_mma_sync")
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("layout", ["KK", "MN"])
def test_a_dtype_of_a_design_is_a_row_of_its_instructions(
    accumulate: str, layout: str, rng: np.random.Generator
) -> None:
    """Right with promoted sums and scales of rows; other layouts are copied."""
    m, n, k = (int(x) for x in rng.integers(1, 200, 3))
    a, b = (fp8(rng, m, k), fp8(rng, n, k).T) if layout == "KK" else (fp8(rng, k, m).T, fp8(rng, k, n))
    scale_a, out = rng.uniform(0.5, 2, (m, 1)).astype(np.float32), np.full((m, n), np.nan, np.float32)
    done = gemmsmith.simulate(
        a, b, scale_a=scale_a, out=out, out_dtype="fp32", accumulate=accumulate, config=FP8_CONFIG
    )
    assert done.hazards == []
    bounds.check(out, a, b, FP32, FP32, promoted=accumulate == "promoted", scale_a=scale_a).require()
    resources = gemmsmith.plan(a, b, accumulate=accumulate, config=FP8_CONFIG).resources
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)


@pytest.mark.usefixtures("fp8_by_mma_sync")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_a": Spec((128, 2), "fp32")}, "scale_a, scale_b: got block scales with mma_multistage; use the design"),
        ({"config": FP8_CONFIG.replace(chip="sm_80")}, "chip: got sm_80 for fp8_e4m3 x fp8_e4m3, .* needs sm_89"),
        ({"config": FP8_CONFIG.replace(tile=(64, 64, 128))}, 'tile K: got 128 with accumulate="promoted"; use 64'),
        ({"b": (Spec((256, 64), "fp8_e4m3", (1, 256)),) * 2}, "b: got a tuple with mma_multistage; use interleave"),
        ({"b": Spec((256, 64), "fp8_e5m2")}, "design: got mma_multistage for operands of fp8_e4m3 x fp8_e5m2"),
    ],
)
def test_what_a_design_does_not_declare_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"a": Spec((128, 256), "fp8_e4m3"), "b": Spec((256, 64), "fp8_e4m3"), "config": FP8_CONFIG}
    with pytest.raises(ConfigError, match=message):
        gemmsmith.plan(**{**given, **changes})


def test_dtypes_that_a_design_does_not_take_are_refused() -> None:
    a, b = Spec((128, 64), "fp16"), Spec((64, 64), "fp16")
    with pytest.raises(ConfigError, match="design: got sum_of_two for operands of fp16 accumulated in fp32; use the"):
        gemmsmith.plan(a, b, b2=Spec((64, 64), "bf16"), config=CONFIG)


class _Bound(dict[str, tuple[Matrix, Pointer] | Pointer]):
    """What the kernel's arguments are computed from."""

    k = 64
