"""What ptxas makes of the designs: no spills, no advisories (serialized wgmma, ignored setmaxnreg), the right code."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import gemmsmith
from gemmsmith import Config, ConfigError, Spec
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.chip import HOPPER
from gemmsmith.kernels.pack import strided_copy, transpose
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.config_table import configs_for_epilogue

CONFIGS = [
    Config(),
    Config(cluster=(1, 1)),
    Config(stages=3),
    Config(tile=(256, 128, 64), cluster=(1, 2), serpentine=True),
    Config(tile=(128, 128, 64), cluster=(2, 2), stages=5),
    Config(tile=(256, 192, 64), cluster=(1, 2), stages=2),
    Config(tile=(256, 192, 64), cluster=(1, 2), stages=2, serpentine=True, sync_clusters=True),
    Config(tile=(128, 128, 64), cluster=(1, 2), stages=7, alias_epilogue=True),
    Config(tile=(256, 176, 64), cluster=(2, 1), stages=3),
    Config(tile=(192, 128, 64), cluster=(1, 1), consumers=3),
    Config(tile=(192, 192, 64), cluster=(1, 1), stages=2, consumers=3),
    Config("pingpong", (128, 176, 64), (2, 1), 4, serpentine=True),
    Config(tile=(64, 256, 64), cluster=(2, 1), consumers=1, stages=3),
    Config(tile=(64, 8, 128), cluster=(1, 1), consumers=1),
    Config("tma"),
    Config("tma", (128, 128, 64), (1, 2)),
    Config("tma", (64, 96, 32), (1, 1), 5, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_spills_and_no_advisories(config: Config, ragged: bool, rng: np.random.Generator) -> None:
    output = str(rng.choice(["bf16", "fp32"]))
    n = 4095 if ragged else 4096
    a, b = Spec((4096, 4096), "bf16"), Spec((4096, n), "bf16", (1, 4096))
    out = Spec((4096, n), output)
    plan = gemmsmith.plan(a, b, out=out, config=config)
    r = plan.resources
    assert plan._planned.spec.epilogue.tma_eligible == (frozenset() if ragged else {"out"})
    assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
    if config.design == "cooperative" and config.consumers > 1:
        assert r.registers <= plan._planned.kernel.max_registers_per_thread


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "options", "instruction"), [
    ("fp8_e4m3", {"accumulate": "fast"}, "QGMMA"), ("fp8_e5m2", {}, "QGMMA"), ("int8", {}, "IGMMA"),
    ("fp32", {"precision": "tf32"}, "HGMMA.64x"), ("fp32", {"precision": "3xtf32"}, "HGMMA.64x"),
])  # fmt: skip
def test_other_dtypes(dtype: str, options: dict[str, str], instruction: str) -> None:
    """What is chosen for some shapes, ragged, column-major and fused ones too."""

    def dequantized(acc: Any, r: Any, c: Any) -> Any:
        return acc * r * c

    vectors = {"r": Spec((4096, 1), "fp32"), "c": Spec((4096,), "fp32")}
    plans = [
        gemmsmith.plan(Spec((m, 2048), dtype), Spec((2048, n), dtype, (1, 2048)), **options)  # type: ignore[arg-type]
        for m, n in ((16, 4096), (128, 4095), (4096, 4096), (4096, 1000))
    ]
    a, b = Spec((4096, 2048), dtype), Spec((2048, 4096), dtype)
    out = Spec((4096, 4096), plans[0]._planned.binding.out_dtype, (1, 4096))
    plans.append(gemmsmith.plan(a, b, out=out, **options))  # type: ignore[arg-type]
    plans.append(gemmsmith.plan(a, b, epilogue=dequantized, operands=vectors, **options))  # type: ignore[arg-type]
    for plan in plans:
        r = plan.resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ()), plan.config
    assert instruction in plans[0].sass


PROMOTED = [
    *(((m, n), c, of_b) for of_b in (128, 0) for (m, n), c in (
        ((128, 128), 2), ((128, 192), 2), ((128, 256), 2), ((256, 128), 2), ((256, 144), 2), ((192, 128), 3),
        ((192, 160), 3), ((64, 256), 1), ((128, 128), 1),
    )),
    *((tile, c, 1) for tile, c in (((128, 128), 2), ((128, 176), 2), ((256, 96), 2), ((64, 160), 1), ((192, 80), 3))),
]  # fmt: skip
"""(M, N), consumers, and of how many columns of b a scale is; 0: there are none."""


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "consumers", "of_b"), PROMOTED)
def test_promoted_sums(tile: tuple[int, int], consumers: int, of_b: int, rng: np.random.Generator) -> None:
    columns = int(rng.choice([4096, 4095]))
    a, b = Spec((4096, 4096), "fp8_e4m3"), Spec((4096, columns), "fp8_e4m3", (1, 4096))
    config = Config(tile=(*tile, 128), consumers=consumers, cluster=(1, 1), stages=2)
    scale_b = Spec((32, -(-columns // of_b)), "fp32") if of_b else None
    for scale_a in (Spec((4096, 32), "fp32"), Spec((32, 32), "fp32")) if of_b else (None,):
        r = gemmsmith.plan(a, b, scale_a=scale_a, scale_b=scale_b, config=config).resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ()), scale_a


def test_packing_does_not_spill() -> None:
    makers = strided_copy, transpose
    kernels = [make(bits, words, False, HOPPER) for make in makers for bits in (8, 16) for words in (False, True)]
    kernels += [make(32, True, low, HOPPER) for make in makers for low in (False, True)]
    for kernel in kernels:
        r = compile_source(kernel.source, kernel.name).resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ()), kernel.name


def test_the_machine_code_is_hoppers() -> None:
    code = gemmsmith.plan(Spec((4096, 4096), "fp16"), Spec((4096, 4096), "fp16"), config=Config()).sass
    for instruction in (
        "HGMMA.64x256x16.F32",
        "UTMALDG.3D.MULTICAST",
        "UTMASTG.3D",
        "SYNCS.PHASECHK",
        "USETMAXREG",
        "STSM",
    ):
        assert instruction in code
    for slow in ("HMMA", " LDL", " STL"):
        assert slow not in code


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile": (100, 256, 64)}, "tile M: got 100; use a multiple of 64 x 2 warpgroups"),
        ({"tile": (128, 260, 64)}, "tile N: got 260"),
        ({"tile": (128, 256, 48)}, "tile K: got 48"),
        ({"stages": 1}, "stages: got 1"),
        ({"stages": 5}, "shared memory: .* exceed the 232448 available per CTA by"),
        ({"tile": (256, 256, 64)}, "the accumulator of 128x256 needs 256 per thread, 56 more than fit"),
        ({"cluster": (3, 1)}, r"cluster: got \(3, 1\)"),
        ({"tile": (128, 8, 64), "cluster": (2, 1)}, "whose 8 rows do not split into multicast slices of 8"),
        ({"consumers": 4}, "consumers: got 4"),
        ({"design": "stream"}, "design: got 'stream'"),
        ({"raster": "x"}, "raster: got 'x'; use m or n"),
        ({"evict": ["first", "most"]}, r"evict: got \('first', 'most'\)"),
        ({"evict": None}, "evict: got None"),
        ({"evict": "first"}, "evict: got 'first'"),
        ({"serpentine": "no"}, "serpentine: got 'no'"),
        ({"alias_epilogue": None}, "alias_epilogue: got None"),
        ({"serpentine": 2}, "serpentine: got 2"),
        ({"sync_clusters": None}, "sync_clusters: got None"),
        ({"sync_clusters": True, "splits": 0}, "sync_clusters: got cooperative, splits 0"),
        ({"sync_clusters": True, "cluster_splits": 2}, "sync_clusters: got cooperative, splits 1 and 2"),
        ({"sync_clusters": True, "design": "tma"}, "sync_clusters: got tma"),
        (
            {"design": "pingpong", "tile": (64, 256, 64), "alias_epilogue": True},
            "alias_epilogue: got pingpong; it needs cooperative",
        ),
        (
            {"tile": (128, 248, 16), "cluster": (1, 1), "stages": 2, "alias_epilogue": True},
            "alias_epilogue: results need 63488 bytes, the stages have",
        ),
        ({"tile": (256, 192, 64)}, "shared memory: .* exceed the 232448 available per CTA by"),
    ],
)
def test_a_config_that_cannot_work_says_why(changes: dict, message: str) -> None:
    a, b = Spec((512, 512), "bf16"), Spec((512, 512), "bf16", (1, 512))
    with pytest.raises(ConfigError, match=message):
        gemmsmith.plan(a, b, config=Config().replace(**changes))._planned.kernel  # noqa: B018


def test_a_config_from_json() -> None:
    given = Config(tile=[128, 128, 64], cluster=[1, 2], evict=["last", "first"])  # type: ignore[arg-type]
    assert given == Config(tile=(128, 128, 64), cluster=(1, 2), evict=("last", "first"))
    assert hash(given)


def scaled(acc: Any, s: Any, r: Any, b: Any) -> Any:
    return acc * s * r + b


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu", "tanh", "expm1", "gelu", "scaled", "direct"])
def test_no_spills_beside_the_largest_accumulators(name: str) -> None:
    """Of the tiles that the tuner's space has for an epilogue."""

    def f(acc: Any, b: Any) -> Any:
        x = acc + b
        return {"gelu": lambda: 0.5 * x * (1.0 + (x * 0.5**0.5).erf()), "direct": x.relu}.get(
            name, getattr(x, name, None)
        )()

    n = 8191 if name == "direct" else 8192
    a, b = Spec((8192, 4096), "bf16"), Spec((4096, n), "bf16", (1, 4096))
    given = {"b": Spec((n,), "bf16")}
    if name == "scaled":
        given = {"s": Spec((8192, 1), "fp32"), "r": Spec((n,), "fp32"), "b": Spec((8192, 1), "fp32")}
    plan = partial(gemmsmith.plan, a, b, epilogue=scaled if name == "scaled" else f, operands=given)
    epilogue = plan(config=Config())._planned.spec.epilogue  # as written, where the chosen config may transpose it
    tiles = {(x.design, x.tile, x.consumers, x.tile[0] * x.tile[1]) for x in configs_for_epilogue(epilogue).configs}
    largest = sorted(tiles, key=lambda x: x[3])[-4:]
    assert (("cooperative", (256, 192, 64), 2) in {x[:3] for x in largest}) == (name in ("relu", "tanh"))
    for design, tile, consumers, _ in largest:
        r = plan(config=Config(design, tile, (1, 1), 2, consumers)).resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes) == (0, 0, 0), tile


@pytest.mark.parametrize("n", [192, 184, 176, 128])
def test_sums_of_rows_beside_the_largest_accumulators(n: int) -> None:
    """What is summed is not kept for later."""

    def sums(acc: Any, bias: Any) -> Any:
        x = (acc + bias).maximum(0.0)
        return x, x.sum(-1)

    a, b = Spec((8192, 4096), "bf16"), Spec((4096, 28672), "bf16", (1, 4096))
    config = Config(tile=(256, n, 64), cluster=(1, 2), stages=3, raster="n", serpentine=True, sync_clusters=True)
    plan = gemmsmith.plan(a, b, epilogue=sums, operands={"bias": Spec((28672,), "bf16")}, config=config)
    assert any(
        (x.tile, x.cluster) == (config.tile, config.cluster)
        for x in configs_for_epilogue(plan._planned.spec.epilogue).configs
    )
    assert plan.resources.spill_store_bytes == 0


@pytest.mark.parametrize("n", [128, 112, 64])
def test_no_spills_where_one_warpgroup_has_a_tile(n: int) -> None:
    """And one further matrix, or a reduction."""

    def sums(acc: Any, bias: Any) -> Any:
        x = (acc + bias).maximum(0.0)
        return x, x.sum(-1)

    a, b = Spec((512, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    row, matrix = Spec((4096,), "bf16"), Spec((512, 4096), "bf16")
    config = Config(tile=(128, n, 64), cluster=(1, 1), consumers=1)
    for epilogue, operands in ((sums, {"bias": row}), (lambda acc, c: acc + c, {"c": matrix})):
        found = configs_for_epilogue(
            gemmsmith.plan(a, b, epilogue=epilogue, operands=operands, config=config)._planned.spec.epilogue
        ).configs
        assert any((x.tile, x.consumers) == (config.tile, 1) for x in found)
        r = gemmsmith.plan(a, b, epilogue=epilogue, operands=operands, config=config.replace(stages=4)).resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes) == (0, 0, 0)


def five_matrices(acc: Any, c: Any, d: Any) -> Any:
    s = c.sigmoid()
    x = c * s
    return acc * d * (s + x * (1 - s)), acc * x, x * d


def seven_matrices(acc: Any, c: Any, d: Any, e: Any) -> Any:
    return acc + c, acc * d, acc - e, (acc * c * d * e).tanh()


def sums_and_maxima(acc: Any, c: Any) -> Any:
    x = (acc + c).silu()
    return x, x.sum(-1), x.amax(-2), x.square().sum()


@pytest.mark.slow
@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("epilogue", [five_matrices, seven_matrices, sums_and_maxima])
def test_no_spills_beside_many_matrices(epilogue: Any, swap_ab: bool, rng: np.random.Generator) -> None:
    """Where a warpgroup has 128 rows, which no tile is considered with if a matrix has 32-bit elements; of those that
    are, each design's widest, and two others by chance."""
    a, b = Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    names = epilogue.__code__.co_varnames[1 : epilogue.__code__.co_argcount]

    def tiles(dtype: str) -> set[Any]:
        plan = gemmsmith.plan(a, b, epilogue=epilogue, operands=operands(dtype), config=Config(stages=2))
        every = configs_for_epilogue(plan._planned.spec.epilogue).configs
        found = {(x.design, x.tile, x.consumers, 2) for x in every if x.swap_ab == swap_ab and x.tile[1] >= 112}
        return {x for x in found if x[1][0] // (1 if x[0] == "pingpong" else x[2]) == 128 and x[1][2] == 64}

    def operands(dtype: str) -> dict[str, Spec]:
        return {name: Spec((4096, 4096), dtype) for name in names}

    assert not tiles("fp32")
    found = tiles("bf16")
    assert ("pingpong", (128, 128, 64)) in {x[:2] for x in found}
    widest = {x[0]: x for x in sorted(found, key=lambda x: x[1][1])}
    others = sorted(found - set(widest.values()))
    others = [others[i] for i in rng.permutation(len(others))[:2]]
    for design, tile, consumers, stages in [*widest.values(), *others]:
        config = Config(design, tile, (1, 1), stages, consumers, swap_ab=swap_ab)
        r = gemmsmith.plan(a, b, epilogue=epilogue, operands=operands("bf16"), config=config).resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ()), tile


def relu(acc: Any) -> Any:
    return acc.relu()


def biased(acc: Any, bias: Any) -> Any:
    return (acc + bias).relu()


def added(acc: Any, c: Any) -> Any:
    return acc + c


def summed(acc: Any, bias: Any) -> Any:
    x = (acc + bias).relu()
    return {"out": x, "sums": x.sum(-1)}


def gelu_of_column(acc: Any, column: Any) -> Any:
    return (acc + column).gelu()


def doubled(acc: Any) -> Any:
    return {"out": acc, "relu": acc.relu()}


extents = some.one_of(
    some.sampled_from([1, 16, 64, 128, 512, 777, 1000, 1024, 2771, 4096, 5704, 8192]), some.integers(1, 10000)
)


@some.composite
def problems(draw: some.DrawFn) -> dict[str, Any]:
    """Arguments of `plan`: any sizes, dtypes and layouts, with an epilogue or without."""
    m, n, k, batch = draw(extents), draw(extents), draw(extents), draw(some.sampled_from([1, 1, 1, 2]))
    dtype = draw(some.sampled_from(["bf16", "fp16"]))
    output = draw(some.sampled_from(["bf16", "fp16", "fp32"]))
    epilogue = draw(some.sampled_from([None, None, None, relu, biased, gelu_of_column, added, summed, doubled]))

    def matrix(rows: int, columns: int, dtype: str) -> Spec:
        pitch = draw(some.sampled_from([0, 0, 8]))
        rows_, columns_ = (-(-x // pitch) * pitch if pitch else x for x in (rows, columns))
        strides = draw(some.sampled_from([(columns_, 1), (1, rows_)]))
        size = -(-max(strides[0] * rows, strides[1] * columns) // 8) * 8
        return (
            Spec((batch, rows, columns), dtype, (size, *strides))
            if batch > 1
            else Spec((rows, columns), dtype, strides)
        )

    out = matrix(m, n, output)
    found: dict[str, Any] = {"a": matrix(m, k, dtype), "b": matrix(k, n, dtype), "out_dtype": output}
    found["accumulate"] = draw(some.sampled_from(["fp32", "fp16"])) if dtype == "fp16" else "fp32"
    operands = {"added": {"c": matrix(m, n, "bf16")}}.get(getattr(epilogue, "__name__", ""), {})
    if epilogue in (biased, summed):
        operands = {"bias": Spec((n,), draw(some.sampled_from(["bf16", "fp32"])))}
    if epilogue is gelu_of_column:
        operands = {"column": Spec((m, 1), draw(some.sampled_from(["bf16", "fp32"])))}
    return {**found, "out": {"out": out} if epilogue in (summed, doubled) else out, "epilogue": epilogue,
            "operands": operands}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=12)
@given(problems())
def test_no_choice_spills(problem: dict[str, Any]) -> None:
    plan = gemmsmith.plan(**problem)
    r = plan.resources
    assert (r.spill_store_bytes, r.spill_load_bytes, r.advisories) == (0, 0, ()), plan.config


@pytest.mark.parametrize(
    ("a", "b", "out", "options"),
    [
        ((1000, 1024, (1, 1000)), (1024, 8192, (8192, 1)), (1000, 8192, (1, 1000)), {"out_dtype": "fp16"}),
        ((8192, 8192, (8192, 1)), (8192, 777, (777, 1)), (8192, 777, (777, 1)), {}),
        ((8192, 8192, (1, 8192)), (8192, 777, (777, 1)), (8192, 777, (777, 1)), {}),
        ((3072, 6061, (6061, 1)), (6061, 9574, (9574, 1)), (3072, 9574, (9574, 1)), {"out_dtype": "fp32"}),
        ((4096, 2302, (2304, 1)), (2302, 2771, (1, 2302)), (4096, 2771, (2776, 1)), {"c": (4096, 2771, (1, 4096))}),
        ((7393, 5704, (5704, 1)), (5704, 4096, (4096, 1)), (7393, 4096, (1, 7393)), {"out_dtype": "fp32"}),
        ((5455, 768, (768, 1)), (768, 3072, (3072, 1)), (5455, 3072, (1, 5455)), {"out_dtype": "fp32", "two": True}),
    ],
)  # fmt: skip
def test_problems_whose_choice_once_spilled(a: Any, b: Any, out: Any, options: dict[str, Any]) -> None:
    def spec(x: Any, dtype: str = "bf16") -> Spec:
        return Spec(x[:2], dtype, x[2])

    output = options.get("out_dtype", "bf16")
    more: dict[str, Any] = {"epilogue": doubled, "out": {"out": spec(out, output)}} if "two" in options else {}
    if "c" in options:
        more = {"epilogue": added, "operands": {"c": spec(options["c"])}}
    plan = gemmsmith.plan(spec(a), spec(b), **{"out": spec(out, output), "out_dtype": output, **more})
    assert (plan.resources.spill_store_bytes, plan.resources.spill_load_bytes) == (0, 0), plan.config


def block_scaled(m: int, n: int, k: int, columns: int, **options: Any) -> gemmsmith.Plan:
    """fp8 to fp32; one scale for 128 of k of each row of a, and of so many columns of b."""
    a, b = Spec((m, k), "fp8_e4m3"), Spec((k, n), "fp8_e4m3", (1, k))
    scale_a, scale_b = (
        Spec((m, k // 128), "fp32", (1, -(-m // 4) * 4)),
        Spec((k // 128, -(-n // columns)), "fp32"),
    )
    return gemmsmith.plan(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype="fp32", **options)


def quantized(acc: Any) -> Any:
    return gemmsmith.quantize(acc.relu(), "1x128")


def row_sums_of(acc: Any) -> Any:
    return acc, acc.sum(-1)


def gated(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gemmsmith.quantize(gate.silu() * up, "1x128")


@some.composite
def scaled_problems(draw: some.DrawFn) -> dict[str, Any]:
    """Arguments of `plan` with block scales in any layout."""
    epilogue = draw(some.sampled_from([None, None, relu, biased, added, summed, doubled, quantized, gated]))
    m, n, k = draw(extents), draw(extents), draw(extents)
    n = -(-n // 16) * 16 if epilogue is gated else n
    pitch = -(-k // 16) * 16
    output, blocks = draw(some.sampled_from(["bf16", "fp16", "fp32"])), -(-k // 128)
    a, b = Spec((m, k), "fp8_e4m3", (pitch, 1)), Spec((k, n), "fp8_e4m3", (1, pitch))
    found: dict[str, Any] = {"a": a, "b": b, "out_dtype": output}
    granularity = [1, 1, 128, None]
    for name, extent in (("scale_a", m), ("scale_b", n)):
        each = draw(some.sampled_from(granularity))
        granularity = [128, 128, None] if epilogue is gated else granularity  # no tile has registers for both
        if each:
            rows = -(-extent // each)
            row, column = draw(
                some.sampled_from([(blocks, 1), (-(-blocks // 4) * 4, 1), (1, rows), (1, rows + -rows % 4)])
            )
            shape, strides = ((rows, blocks), (row, column)) if name == "scale_a" else ((blocks, rows), (column, row))
            found[name] = Spec(shape, draw(some.sampled_from(["fp32", "fp32", "ue8m0"])), strides)
    operands = {added: {"c": Spec((m, n), output)}, biased: {"bias": Spec((n,), "bf16")},
                summed: {"bias": Spec((n,), "fp32")}}.get(epilogue, {})  # fmt: skip
    if epilogue is None and draw(some.booleans()):
        found["out"] = Spec((m, n), output, (1, m))  # computed transposed
    return {**found, "epilogue": epilogue, "operands": operands}


@pytest.mark.slow
@settings(max_examples=12)
@given(scaled_problems())
def test_no_choice_of_promoted_sums_spills(problem: dict[str, Any]) -> None:
    plan = gemmsmith.plan(**problem)
    r = plan.resources
    assert (r.spill_store_bytes, r.spill_load_bytes, r.advisories) == (0, 0, ()), plan.config


@pytest.mark.parametrize(
    ("m", "n", "k", "columns", "epilogue"),
    [(2931, 4064, 5120, 128, quantized), (1687, 18720, 7168, 128, gated), (128, 10816, 1024, 128, quantized),
     (16384, 13056, 7168, 1, relu), (23105, 5096, 512, 128, row_sums_of)],
)  # fmt: skip
def test_promoted_epilogues_that_once_spilled(m: int, n: int, k: int, columns: int, epilogue: Any) -> None:
    """What depends on the thread alone was computed before the loop over tiles, and held."""
    plan = block_scaled(m, n, k, columns, epilogue=epilogue)
    assert (plan.resources.spill_store_bytes, plan.resources.spill_load_bytes) == (0, 0), plan.config


def test_promoted_shares_that_once_spilled() -> None:
    """Two k-tiles in flight of 128x128, whose K a cluster shares."""
    a, b = Spec((777, 3713), "fp8_e4m3", (3728, 1)), Spec((3713, 1024), "fp8_e4m3", (1, 3728))
    plan = gemmsmith.plan(a, b, scale_a=Spec((777, 30), "fp32"), out_dtype="bf16", epilogue=relu)
    assert (plan.resources.spill_store_bytes, plan.resources.spill_load_bytes) == (0, 0), plan.config


def test_bytes_for_all_rows_and_columns_do_not_spill() -> None:
    """A warp of few registers copies them, from an address each."""
    a, b = Spec((4096, 4096), "fp8_e4m3"), Spec((4096, 4096), "fp8_e4m3", (1, 4096))
    scales = {"scale_a": Spec((4096, 32), "ue8m0"), "scale_b": Spec((32, 4096), "ue8m0")}
    for n in (112, 128, 144):
        config = Config(tile=(128, n, 128), cluster=(1, 1), consumers=2, stages=4)
        r = gemmsmith.plan(a, b, **scales, config=config).resources
        assert (r.spill_store_bytes, r.spill_load_bytes) == (0, 0), n


@pytest.mark.parametrize(("columns", "fused"), [(128, False), (1, True)])
def test_promoted_problems_whose_choice_once_spilled(columns: int, fused: bool) -> None:
    """Computed transposed, with 192x88: all the registers were the sums' and scales'."""
    more = {"epilogue": added, "operands": {"c": Spec((1024, 2112), "bf16")}} if fused else {}
    plan = block_scaled(1024, 2112, 7168, columns, **more)
    assert (plan.resources.spill_store_bytes, plan.resources.spill_load_bytes) == (0, 0), plan.config


@pytest.mark.slow
def test_promoted_sums_of_clusters_do_not_spill() -> None:
    """Of each tile that is ranked for a product one config whose CTAs share K."""
    plan = block_scaled(10, 7168, 2048, 128, config=Config(tile=(64, 64, 128), cluster=(1, 1), consumers=1))
    for c in {
        c.tile: c for c in rank_configs(plan.problem, plan._planned.spec.epilogue, 256) if c.cluster_splits > 1
    }.values():
        r = block_scaled(10, 7168, 2048, 128, config=c).resources
        assert (r.spill_store_bytes, r.spill_load_bytes) == (0, 0), c


def test_clusters_that_share_k_have_fewer_k_tiles_in_flight() -> None:
    """Where those of two would spill beside the sums that CTAs exchange, the tile is chosen with one."""
    plan = block_scaled(256, 4096, 7168, 128)
    shared = [
        c
        for c in rank_configs(plan.problem, plan._planned.spec.epilogue, 8)
        if c.tile == (128, 128, 128) and c.stages > 3
    ]
    assert [c.cluster_splits for c in shared[:1]] == [2]
    r = block_scaled(256, 4096, 7168, 128, config=shared[0]).resources
    assert (r.spill_store_bytes, r.spill_load_bytes) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["bf16", "fp32"])
def test_the_largest_swapped_tiles(output: str, rng: np.random.Generator) -> None:
    """Tiles of 152 and 168 columns would store fp32 elements in pieces as wide, and spill. Half of them, by chance."""
    a, b, d = (
        Spec((4096, 4096), "bf16"),
        Spec((4096, 4096), "bf16", (1, 4096)),
        Spec((4096, 4096), output),
    )
    every = configs_for_epilogue(bind(Request(a, b, d)).spec).configs
    tried = [c for c in every if c.swap_ab and c.cluster == (1, 2) and c.splits == c.cluster_splits == 1]
    largest = [c for c in tried if c.design == "pingpong" and c.tile[0] * c.tile[1] >= 128 * 136]
    largest += [c for c in tried if c.tile[0] * c.tile[1] >= 256 * 168]
    assert {c.tile[1] for c in largest} >= {144, 160, 176}
    for i in rng.permutation(len(largest))[::2]:
        config = largest[i]
        r = gemmsmith.plan(a, b, out=d, config=config).resources
        assert (r.spill_store_bytes, r.spill_load_bytes) == (0, 0), config


def row_sums(acc: Any) -> Any:
    y = acc.gelu()
    return y, y.sum(-1)


def gated_row_sums(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    y = gate.silu() * up
    return y, y.sum(-1)


def six_reductions(acc: Any) -> Any:
    return acc, acc.sum(-1), acc.max(-2), acc.min(-1), acc.mean(), acc.logsumexp(-2), acc.logsumexp(-1)


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", [row_sums, gated_row_sums, six_reductions])
@pytest.mark.parametrize("tile", [(128, 248, 64), (128, 200, 64), (256, 136, 64), (64, 240, 64)])
def test_reductions_beside_swapped_tiles(tile: tuple[int, int, int], epilogue: Any) -> None:
    """Sums of rows are sums of columns there, which pieces as wide as the tile would hold all at once."""
    a, b = Spec((512, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    config = Config(tile=tile, cluster=(1, 1), stages=3, consumers=1 + (tile[0] > 64), swap_ab=True)
    found = gemmsmith.plan(a, b, epilogue=epilogue, config=config).resources
    assert (found.spill_store_bytes, found.spill_load_bytes) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n"), [(152, 5120), (160, 13824), (400, 8192)])
def test_reductions_where_the_product_is_swapped(m: int, n: int) -> None:
    """With the best such config of the product without them."""
    a, b = Spec((m, 4096), "bf16"), Spec((4096, n), "bf16", (1, 4096))
    swapped = next(c for c in rank_configs(bind(Request(a, b)).problem) if c.swap_ab).replace(stages=3)
    for epilogue in (row_sums, six_reductions):
        reduced = gemmsmith.plan(a, b, epilogue=epilogue, config=swapped)
        assert (reduced.resources.spill_store_bytes, reduced.resources.spill_load_bytes) == (0, 0), reduced.config


def test_sums_beside_quantized_elements() -> None:
    """The product is read again after they are, so that they have registers of their own."""

    def quantized(acc: Any) -> Any:
        return *gemmsmith.quantize(acc), acc.sum(-1)

    plan = gemmsmith.plan(Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096)), epilogue=quantized)
    assert (plan.resources.spill_store_bytes, plan.resources.spill_load_bytes) == (0, 0), plan.config
