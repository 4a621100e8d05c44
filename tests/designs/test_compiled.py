"""What ptxas makes of the designs: no spills, no advisories (serialised wgmma, ignored setmaxnreg), the right code."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, ConfigError, Spec
from gemmsmith.tuning.space import space

CONFIGS = [
    Config(),
    Config(cluster=(1, 1)),
    Config(stages=3),
    Config(tile=(256, 128, 64), cluster=(1, 2), serpentine=True),
    Config(tile=(128, 128, 64), cluster=(2, 2), stages=5),
    Config(tile=(256, 192, 64), cluster=(1, 2), stages=2),
    Config(tile=(256, 192, 64), cluster=(1, 2), stages=2, serpentine=True, lockstep=True),
    Config(tile=(128, 128, 64), cluster=(1, 2), stages=7, reuse=True),
    Config(tile=(256, 176, 64), cluster=(2, 1), stages=3),
    Config(tile=(192, 128, 64), cluster=(1, 1), consumers=3),
    Config(tile=(192, 192, 64), cluster=(1, 1), stages=2, consumers=3),
    Config("pingpong", (128, 176, 64), (2, 1), 4, serpentine=True),
    Config(tile=(64, 256, 64), cluster=(2, 1), consumers=1, stages=3),
    Config(tile=(64, 8, 128), cluster=(1, 1), consumers=1),
    Config("multistage"),
    Config("multistage", (128, 128, 64), (1, 2)),
    Config("multistage", (64, 96, 32), (1, 1), 5, 1),
]


@pytest.mark.parametrize("output", ["bf16", "fp32"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_spills_and_no_advisories(config: Config, ragged: bool, output: str) -> None:
    n = 4095 if ragged else 4096
    a, b = Spec((4096, 4096), "bf16"), Spec((4096, n), "bf16", (1, 4096))
    out = Spec((4096, n), output)
    plan = gemmsmith.plan(a, b, out=out, config=config)
    r = plan.resources
    assert plan.spec.epilogue.tma == (frozenset() if ragged else {"out"})
    assert (r.spill_stores, r.spill_loads, r.stack, r.advisories) == (0, 0, 0, ())
    if config.design == "warp_specialized" and config.consumers > 1:
        assert r.registers <= plan.kernel.register_cap


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
        ({"stages": 5}, "shared memory: .* exceed the 232448 of a CTA by"),
        ({"tile": (256, 256, 64)}, "the accumulator of 128x256 takes 256 a thread, 56 more than fit"),
        ({"cluster": (3, 1)}, r"cluster: got \(3, 1\)"),
        ({"tile": (128, 8, 64), "cluster": (2, 1)}, "whose 8 rows do not split into parts of 8"),
        ({"consumers": 4}, "consumers: got 4"),
        ({"design": "stream"}, "design: got 'stream'"),
        ({"raster": "x"}, "raster: got 'x'; use m or n"),
        ({"evict": ["first", "most"]}, r"evict: got \('first', 'most'\)"),
        ({"evict": None}, "evict: got None"),
        ({"evict": "first"}, "evict: got 'first'"),
        ({"pdl": "no"}, "pdl: got 'no'"),
        ({"reuse": None}, "reuse: got None"),
        ({"serpentine": 2}, "serpentine: got 2"),
        ({"lockstep": None}, "lockstep: got None"),
        ({"lockstep": True, "splits": 0}, "lockstep: got warp_specialized, splits 0"),
        ({"lockstep": True, "cluster_splits": 2}, "lockstep: got warp_specialized, splits 1 and 2"),
        ({"lockstep": True, "design": "multistage"}, "lockstep: got multistage"),
        (
            {"design": "pingpong", "tile": (64, 256, 64), "reuse": True},
            "reuse: got pingpong; it takes warp_specialized",
        ),
        ({"tile": (128, 248, 16), "cluster": (1, 1), "stages": 2, "reuse": True}, "reuse: results need 63488 bytes of"),
        ({"tile": (256, 192, 64)}, "shared memory: .* exceed the 232448 of a CTA by"),
    ],
)
def test_a_config_that_cannot_work_says_why(changes: dict, message: str) -> None:
    a, b = Spec((512, 512), "bf16"), Spec((512, 512), "bf16", (1, 512))
    with pytest.raises(ConfigError, match=message):
        gemmsmith.plan(a, b, config=Config().replace(**changes)).kernel  # noqa: B018


def test_a_config_from_json() -> None:
    given = Config(tile=[128, 128, 64], cluster=[1, 2], evict=["last", "first"])  # type: ignore[arg-type]
    assert given == Config(tile=(128, 128, 64), cluster=(1, 2), evict=("last", "first"))
    assert hash(given)


def scaled(acc: Any, s: Any, r: Any, b: Any) -> Any:
    return acc * s * r + b


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
    tiles = {(x.design, x.tile, x.consumers, x.tile[0] * x.tile[1]) for x in space(plan().spec.epilogue).configs}
    largest = sorted(tiles, key=lambda x: x[3])[-4:]
    assert (("warp_specialized", (256, 192, 64), 2) in {x[:3] for x in largest}) == (name in ("relu", "tanh"))
    for design, tile, consumers, _ in largest:
        r = plan(config=Config(design, tile, (1, 1), 2, consumers)).resources
        assert (r.spill_stores, r.spill_loads, r.stack) == (0, 0, 0), tile


@pytest.mark.parametrize(("n", "words"), [(192, 2), (184, 0), (176, 2), (128, 0)])
def test_sums_of_rows_beside_the_largest_accumulators(n: int, words: int) -> None:
    """What is summed is not kept for later; at most a few words that all tiles share are, once a tile."""

    def sums(acc: Any, bias: Any) -> Any:
        x = (acc + bias).maximum(0.0)
        return x, x.sum(-1)

    a, b = Spec((8192, 4096), "bf16"), Spec((4096, 28672), "bf16", (1, 4096))
    config = Config(tile=(256, n, 64), cluster=(1, 2), stages=3, raster="n", serpentine=True, lockstep=True)
    plan = gemmsmith.plan(a, b, epilogue=sums, operands={"bias": Spec((28672,), "bf16")}, config=config)
    assert any((x.tile, x.cluster) == (config.tile, config.cluster) for x in space(plan.spec.epilogue).configs)
    assert plan.resources.spill_stores <= 4 * words


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
        found = space(gemmsmith.plan(a, b, epilogue=epilogue, operands=operands, config=config).spec.epilogue).configs
        assert any((x.tile, x.consumers) == (config.tile, 1) for x in found)
        r = gemmsmith.plan(a, b, epilogue=epilogue, operands=operands, config=config.replace(stages=4)).resources
        assert (r.spill_stores, r.spill_loads, r.stack) == (0, 0, 0)
