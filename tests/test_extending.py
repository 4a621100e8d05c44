"""One of each kind that `docs/internals/extending.md` says can be added in two files at most, added from outside.

A tile scheduler, a loader and a whole kernel are in `test_own_designs.py`. The page prints the functions' records, from
`examples/own_functions.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from examples.own_functions import ATAN, LENGTH, SOFTMAX, length_of_rows, row_softmax, softmax_reference

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Design, EpilogueError, RetraceWarning, Spec, graph, hw
from gemmsmith.backends.reference import bounds
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import PipelineTmaAsync, init_barriers
from gemmsmith.collective.tma_mainloop import TmaStages
from gemmsmith.collective.tma_operand import TmaOperand
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dicts import Records
from gemmsmith.core.dtypes import BF16, E4M3, FP32, INT32, DType
from gemmsmith.core.graph import OPERATIONS
from gemmsmith.core.mma import MMA_SYNC, WGMMA, Mma, select_mma
from gemmsmith.core.problem import Matrix, operand_getter
from gemmsmith.core.spec import KernelSpec, MmaOperand
from gemmsmith.core.tile import Tile
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.graph.frontend.op_table import EPILOGUE_FUNCTIONS
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.frontend.visitors import EVT, AccFetch, Compute
from gemmsmith.graph.precision import epilogue_cost
from gemmsmith.graph.reductions import REDUCTIONS
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
        _ = plan._planned.launches


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
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("along", ["m", "k"])
def test_groups_of_a_dtype_that_is_added(accumulate: str, along: Any, rng: np.random.Generator) -> None:
    ends = np.array([128, 128, 384], np.int32)
    rows = np.split(np.arange(384), ends[:-1])
    a, b = (
        (fp8(rng, 384, 96), fp8(rng, 3, 72, 96).swapaxes(1, 2))
        if along == "m"
        else (fp8(rng, 70, 384), fp8(rng, 384, 72))
    )
    options: dict[str, Any] = {"config": FP8_CONFIG, "accumulate": accumulate, "out_dtype": "fp32", "backend": "sim"}
    found = gemmsmith.grouped_gemm(a, b, offsets=ends, along=along, **options)
    for group, i in enumerate(rows):
        if along == "m":
            bounds.check(found[i], a[i], b[group], FP32, FP32, promoted=accumulate == "promoted").require()
        else:
            bounds.check(found[group], a[:, i], b[i], FP32, FP32, promoted=accumulate == "promoted").require()


@pytest.mark.usefixtures("fp8_by_mma_sync")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_a": Spec((128, 2), "fp32")}, "scale_a, scale_b: got block scales with mma_multistage; use the design"),
        ({"config": FP8_CONFIG.replace(chip="sm_80")}, "chip: got sm_80 for fp8_e4m3 x fp8_e4m3; mma needs sm_89"),
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


def scaled_softmax(acc: Any) -> Any:
    return row_softmax(acc * 0.5)


FUNCTIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "method": (lambda acc: (acc * 2).atan(), lambda x: np.arctan(2 * x)),
    "numpy": (lambda acc: np.arctan(acc) + 1, lambda x: np.arctan(x) + 1),
    "math": (lambda acc: math.atan(acc), np.arctan),
    "tree": (EVT(Compute("atan"), AccFetch()), np.arctan),
    "row": (scaled_softmax, lambda x: softmax_reference(0.5 * x)),
    "reduction": (length_of_rows, lambda x: np.linalg.norm(x, axis=-1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_in_the_simulator_and_the_reference(name: str) -> None:
    epilogue, function = FUNCTIONS[name]
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((72, 40), (40, 56)))
    expected = function(a.astype(float) @ b.astype(float))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RetraceWarning)
        for config in (None, Config("mma_multistage", (64, 64, 32), (1, 1), 3, 1)):
            out = np.full(expected.shape, np.nan, np.float32)
            assert gemmsmith.simulate(a, b, epilogue=epilogue, out=out, out_dtype="fp32", config=config).hazards == []
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
        out = gemmsmith.gemm(a, b, epilogue=epilogue, backend="reference", out_dtype="fp32")
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)


def test_their_costs_count() -> None:
    for epilogue, cost in ((lambda acc: acc.atan(), 22), (lambda acc: row_softmax(acc), 6)):
        assert epilogue_cost(trace(epilogue, (64, 64), {}), True).instructions == cost


@pytest.mark.torch
def test_functions_of_tensors_and_the_gradient() -> None:
    torch = pytest.importorskip("torch")
    from gemmsmith.torch import gemm
    from gemmsmith.torch.fallback import evaluate_graph

    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((8, 16), (16, 24)))
    for epilogue, function in (
        (lambda acc: torch.atan(acc * 2), lambda x: torch.atan(2 * x)), (scaled_softmax, lambda x: (x / 2).softmax(-1)),
        (length_of_rows, lambda x: x.norm(dim=-1)),
    ):  # fmt: skip
        x = (a @ b).detach()
        out = evaluate_graph(trace(epilogue, (8, 24), {}), x, {})["out"]
        torch.testing.assert_close(out, function(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RetraceWarning)
        for gemm_ in (gemm, torch.compile(gemm, fullgraph=True)):
            inputs, wanted = ([x.detach().clone().requires_grad_() for x in (a, b)] for _ in range(2))
            y, lengths = gemm_(*inputs, epilogue=lambda acc: (torch.atan(acc * 2), acc.length(-1)))
            (y.square().sum() + lengths.sum()).backward()
            product = wanted[0] @ wanted[1]
            (torch.atan(product * 2).square().sum() + product.norm(dim=-1).sum()).backward()
            for x, expected in zip(inputs, wanted, strict=True):
                torch.testing.assert_close(x.grad, expected.grad)
        for gemm_ in (gemm, torch.compile(gemm)):
            with torch.no_grad():
                torch.testing.assert_close(gemm_(a, b, epilogue=scaled_softmax), (a @ b / 2).softmax(-1))
            with pytest.raises(EpilogueError, match="row_softmax: it has no gradient; call it under"):
                gemm_(a, b, epilogue=scaled_softmax)


@pytest.mark.parametrize("record", [ATAN, SOFTMAX], ids=lambda x: x.name)
@pytest.mark.parametrize(("missing", "message"), [
    ("cost", "cost: got None; give the instructions|cost: got none; give the instructions"),
    ("gradient", "gradient: got None; give a function"),
    ("torch", "torch: got none; give"),
])  # fmt: skip
def test_what_is_missing_is_refused_when_the_record_is_made(record: Any, missing: str, message: str) -> None:
    changes: dict[str, Any] = {missing: None}
    if missing == "torch" and record is ATAN:
        changes["names"] = ""
    with pytest.raises(ArgumentError, match=f"{record.name}: ({message})"):
        replace(record, **changes)


def test_a_reduction_without_a_gradient_is_refused() -> None:
    with pytest.raises(ArgumentError, match="length: gradient: got None; give a function"):
        replace(LENGTH, gradient=None)


@pytest.mark.parametrize(("register", "message"), [
    (graph.register_operation, r"got ReductionKind as an operation; use Operation\(...\)"),
    (graph.register_reduction, r"got float as a reduction; use ReductionKind\(...\)"),
])  # fmt: skip
def test_what_is_no_record_is_refused(register: Any, message: str) -> None:
    with pytest.raises(EpilogueError, match=message):
        register(LENGTH if register is graph.register_operation else 3.0)


CELLS = {
    "an operation": """
from gemmsmith.core.graph import register_operation
register_operation(replace(
    ATAN, name="scaled", names="scaled", reference=lambda x: {factor} * x, lower=lambda x: x * {factor}
))
""",
    "a reduction": """
from gemmsmith.graph.reductions import register_reduction
register_reduction(replace(
    LENGTH, name="scaled_length", reference=lambda x, axes: {factor} * LENGTH.reference(x, axes),
    monoid=replace(LENGTH.monoid, finish=lambda state: LENGTH.monoid.finish(state) * {factor}),
))
""",
    "a function of epilogues": """
from gemmsmith.graph.frontend.values import epilogue_function
@epilogue_function()
def scaled_product(x):
    return x * {factor}
""",
}


def test_a_cell_that_is_run_again_replaces_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in kernels of epilogues that were traced before; another module's record of the same name is refused."""
    monkeypatch.setattr(Records, "replaced", 0)
    a, b = np.eye(64, dtype=ml_dtypes.bfloat16), np.ones((64, 64), ml_dtypes.bfloat16)
    notebook, elsewhere = ({**globals(), "__name__": name} for name in ("__main__", "elsewhere"))

    def epilogue(acc: Any) -> Any:
        return acc.scaled(), acc.scaled_length(-1)

    for factor in (2.0, 3.0):
        for cell in CELLS.values():
            exec(cell.format(factor=factor), notebook)
        for backend in ("reference", "sim"):
            d, lengths = gemmsmith.gemm(a, b, epilogue=epilogue, backend=backend)
            assert (d == factor).all()
            np.testing.assert_allclose(lengths, 8 * factor, rtol=1e-6)
            product = gemmsmith.gemm(a, b, epilogue=notebook["scaled_product"], backend=backend)
            np.testing.assert_array_equal(product, np.full((64, 64), factor))
    for kind, cell in CELLS.items():
        with pytest.raises(EpilogueError, match=f"there is {kind} of this name in __main__.*; use another"):
            exec(cell.format(factor=1.0), elsewhere)
    del OPERATIONS["scaled"], REDUCTIONS["scaled_length"], EPILOGUE_FUNCTIONS["scaled_product"]
