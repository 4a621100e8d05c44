"""`b` as a tuple of two arrays, which are multiplied as interleave(*b) is, without the copy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Grouping, Spec, deinterleave

BF16 = np.dtype(ml_dtypes.bfloat16)
CONFIGS = [
    None,
    Config("cooperative", (128, 64, 64), cluster=(2, 1), consumers=2, stages=4),
    Config("cooperative", (64, 176, 64), cluster=(1, 2), consumers=1, stages=3),
    Config("cooperative", (128, 32, 64), cluster=(1, 2), consumers=1, stages=4, swap_ab=True),
    Config("cooperative", (128, 48, 64), cluster=(1, 1), consumers=2, stages=4, swap_ab=True),
    Config("cooperative", (128, 64, 64), cluster=(1, 1), consumers=2, stages=4, splits=2),
    Config("cooperative", (128, 64, 64), cluster=(1, 1), consumers=2, stages=4, cluster_splits=2),
    Config("pingpong", (64, 128, 64), cluster=(1, 2), consumers=2, stages=4),
    Config("pingpong", (64, 96, 64), cluster=(1, 1), consumers=2, stages=4, swap_ab=True),
]


def random(rng: np.random.Generator, *shape: int, dtype: Any = BF16) -> Any:
    if np.dtype(dtype) == np.int8:
        return rng.integers(-9, 9, shape).astype(np.int8)
    return rng.standard_normal(shape).astype(dtype)


def weights(rng: np.random.Generator, k: int, n: int, *, dtype: Any = BF16) -> tuple[Any, Any]:
    """Return two K-major weights; either may be at the lower address."""
    low, high = random(rng, 3, n, k, dtype=dtype).swapaxes(-1, -2)[::2]
    return (high, low) if rng.integers(2) else (low, high)


def swiglu(acc: Any) -> Any:
    gate, up = deinterleave(acc)
    return gate * gate.sigmoid() * up


def expected(a: Any, gate: Any, up: Any) -> Any:
    g, u = (a.astype(np.float64) @ x.astype(np.float64) for x in (gate, up))
    return g / (1 + np.exp(-g)) * u


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_two_weights_are_multiplied_at_once(rng: Any, config: Any) -> None:
    a, b = random(rng, 160, 200), weights(rng, 200, 136)
    out = np.full((160, 136), np.nan, BF16)
    simulation = gemmsmith.simulate(a, b, epilogue=swiglu, config=config, out=out)
    assert not simulation.hazards
    want = expected(a, *b)
    np.testing.assert_allclose(out.astype(float), want, rtol=0.01, atol=0.02)
    reference = gemmsmith.gemm(a, b, epilogue=swiglu)
    np.testing.assert_allclose(reference.astype(float), want, rtol=0.005, atol=0.01)


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.int8, ml_dtypes.float8_e4m3fn], ids=str)
def test_the_product_is_that_of_the_interleaved_arrays(rng: Any, dtype: Any, swap_ab: bool) -> None:
    """Also without an epilogue, and in every kind of accumulator."""
    a, b = random(rng, 96, 256, dtype=dtype), weights(rng, 256, 72, dtype=dtype)
    tile_k = 128 // np.dtype(dtype).itemsize
    tile = (64, 96, tile_k) if swap_ab else (64, 32, tile_k)
    config = Config("cooperative", tile, cluster=(1, 1), consumers=1, stages=3, swap_ab=swap_ab)
    kwargs = {"accumulate": "fp16"} if dtype == np.float16 else {}
    simulation = gemmsmith.simulate(a, b, config=config, **kwargs)
    assert not simulation.hazards
    interleaved = gemmsmith.interleave(*map(np.ascontiguousarray, b))
    want = a.astype(np.float64) @ interleaved.astype(np.float64)
    np.testing.assert_allclose(simulation.result.astype(float), want, rtol=0.02, atol=0.3)


def test_halves_of_one_array_and_batches(rng: Any) -> None:
    stacked, a = random(rng, 3, 2 * 40, 64), random(rng, 3, 48, 64)
    b = stacked[:, :40].swapaxes(1, 2), stacked[:, 40:].swapaxes(1, 2)
    simulation = gemmsmith.simulate(a, b, epilogue=swiglu)
    assert not simulation.hazards
    np.testing.assert_allclose(simulation.result.astype(float), expected(a, *b), rtol=0.01, atol=0.02)


@pytest.mark.parametrize(
    "config",
    [
        None,
        Config("cooperative", (128, 64, 64), cluster=(2, 1), consumers=2, stages=3),
        Config("pingpong", (64, 64, 64), cluster=(1, 1), consumers=2, stages=3),
        Config("cooperative", (128, 64, 64), cluster=(1, 1), consumers=2, stages=3, swap_ab=True),
        Config("cooperative", (64, 32, 64), cluster=(1, 1), consumers=1, stages=3, swap_ab=True),
    ],
    ids=str,
)
def test_two_weights_of_each_group(rng: Any, config: Any) -> None:
    groups, n, k, tokens = 4, 48, 128, 70
    x, w = random(rng, tokens, k), random(rng, groups, 2 * n, k)
    offsets, gather = np.array([0, 63, 64, 190], np.int32), rng.integers(0, tokens, 200).astype(np.int32)
    gate, up = w[:, :n].swapaxes(1, 2), w[:, n:].swapaxes(1, 2)
    b = (up, gate) if rng.integers(2) else (gate, up)
    out = np.full((200, n), np.nan, BF16)
    arrays = {"offsets": offsets, "gather": gather}
    simulation = gemmsmith.simulate(
        x, b, grouping=Grouping("offsets", gathers=True), epilogue=swiglu, config=config, out=out, **arrays
    )
    assert not simulation.hazards
    want, begin = np.zeros((200, n)), 0
    for g, end in enumerate(offsets):
        want[begin:end] = expected(x[gather[begin:end]], b[0][g], b[1][g])
        begin = end
    np.testing.assert_allclose(out.astype(float), want, rtol=0.01, atol=0.02)
    reference = gemmsmith.grouped_gemm(x, b, epilogue=swiglu, **arrays)
    np.testing.assert_allclose(reference.astype(float), want, rtol=0.005, atol=0.01)


FP8_CONFIGS = [
    None,
    Config("cooperative", (128, 128, 128), cluster=(1, 1), consumers=2, stages=3),
    Config("cooperative", (64, 176, 128), cluster=(1, 1), consumers=1, stages=3),
    Config("cooperative", (128, 256, 128), cluster=(2, 1), consumers=2, stages=3),
    Config("cooperative", (128, 112, 128), cluster=(1, 1), consumers=2, stages=3, splits=2),
    Config("cooperative", (128, 48, 128), cluster=(1, 1), consumers=2, stages=3, swap_ab=True),
    Config("pingpong", (64, 96, 128), cluster=(1, 1), consumers=2, stages=4),
]


def scaled(rng: Any, *shape: int) -> tuple[Any, Any]:
    """Return e4m3 values, whose last dimension is K, and scales of 128 x 128."""
    scales = rng.uniform(0.5, 2, (*shape[:-2], *(-(-extent // 128) for extent in shape[-2:]))).astype(np.float32)
    return random(rng, *shape, dtype=ml_dtypes.float8_e4m3fn), scales


def dequantized(values: Any, scales: Any, rows: int = 128) -> Any:
    factors = np.repeat(np.repeat(scales, rows, -2), 128, -1)[..., : values.shape[-2], : values.shape[-1]]
    return values.astype(np.float64) * factors


@pytest.mark.parametrize("rows_per_scale", [1, 128])
@pytest.mark.parametrize("config", FP8_CONFIGS, ids=str)
def test_block_scales_of_each(rng: Any, config: Any, rows_per_scale: int) -> None:
    """The arrays, and their scales, in either order in memory; the last blocks are not whole."""
    m, n, k = 150, 312, 400
    for order in rng.permutation(4)[:1]:
        (a, _), (b, scales_b) = scaled(rng, m, k), scaled(rng, 3, n, k)
        scale_a = rng.uniform(0.5, 2, (-(-m // rows_per_scale), 4)).astype(np.float32)
        b, scale_b = b[::2][:: 1 - 2 * (order % 2)], scales_b[::2][:: 1 - 2 * (order // 2)]
        arguments = {
            "b": tuple(x.T for x in b), "scale_a": scale_a, "scale_b": tuple(x.T for x in scale_b), "epilogue": swiglu
        }  # fmt: skip
        out = np.full((m, n), np.nan, BF16)
        simulation = gemmsmith.simulate(a, config=config, out=out, **arguments)
        assert not simulation.hazards
        wide = dequantized(a, scale_a, rows_per_scale)
        weights = [dequantized(*x).T for x in zip(b, scale_b, strict=True)]
        want, (gate, up) = expected(wide, *weights), (wide @ w for w in weights)
        of_gate, of_up = (2.0**-11 * np.abs(wide) @ np.abs(w) for w in weights)  # steps of the tensor core
        allowed = 0.005 * np.abs(want) + 1.1 * of_gate * (np.abs(up) + of_up) + np.abs(gate) * of_up
        for got in (out, gemmsmith.gemm(a, **arguments)):
            assert (np.abs(got - want) <= allowed).all()


def test_block_scales_of_each_in_reverse(rng: Any) -> None:
    """Strides that are negative."""
    (a, scale_a), (b, scale_b) = scaled(rng, 64, 400), scaled(rng, 2, 136, 400)
    reversed_scales = np.ascontiguousarray(scale_b[..., ::-1, ::-1])[..., ::-1, ::-1]
    scale_a = rng.uniform(0.5, 2, (64, 4)).astype(np.float32)
    results = [
        gemmsmith.simulate(
            a, tuple(x.T for x in b), scale_a=scale_a, scale_b=tuple(x.T for x in scales), epilogue=swiglu
        ) for scales in (scale_b, reversed_scales)
    ]  # fmt: skip
    assert not [hazard for x in results for hazard in x.hazards]
    assert np.array_equal(*(x.result for x in results))


@pytest.mark.parametrize("scale_dtype", ["fp32", "ue8m0"])
def test_block_scales_of_each_group(rng: Any, scale_dtype: str) -> None:
    """Gate and up of experts are halves of one array, as are their scales; the results are quantized."""
    groups, n, k, tokens = 3, 128, 256, 60
    x, w = random(rng, tokens, k), rng.standard_normal((groups, 2 * n, k)).astype(np.float32)
    a, scale_a = gemmsmith.quantize(x)
    values, scales = gemmsmith.quantize(w, "128x128", scale_dtype=scale_dtype)
    wide = dequantized(values, scales.astype(float))
    offsets, gather = np.array([0, 63, 150], np.int32), rng.integers(0, tokens, 150).astype(np.int32)
    arrays = {"offsets": offsets, "gather": gather}
    b = values[:, :n].swapaxes(1, 2), values[:, n:].swapaxes(1, 2)
    scale_b = tuple(scales[:, i : i + 1].swapaxes(1, 2) for i in range(2))

    def epilogue(acc: Any) -> Any:
        return gemmsmith.quantize(swiglu(acc))

    simulation = gemmsmith.simulate(
        a, b, scale_a=scale_a, scale_b=scale_b, grouping=Grouping("offsets", gathers=True), epilogue=epilogue, **arrays
    )
    assert not simulation.hazards
    rows, want, begin = dequantized(a, scale_a, 1)[gather], np.zeros((150, n)), 0
    for g, end in enumerate(offsets):
        want[begin:end] = expected(rows[begin:end], wide[g, :n].T, wide[g, n:].T)
        begin = end
    reference = gemmsmith.grouped_gemm(a, b, scale_a=scale_a, scale_b=scale_b, epilogue=epilogue, **arrays)
    for h, h_scale in (simulation.result, reference):
        allowed = 2.0**-4 * np.abs(want) + np.abs(want).max(1, keepdims=True) * 2.0**-9 / 448 * 2
        assert (np.abs(h.astype(float) * h_scale - want) <= allowed + 1e-4 * np.abs(want).max()).all()


def test_scales_that_do_not_match_are_refused(rng: Any) -> None:
    (a, scale_a), (b, scale_b) = scaled(rng, 64, 256), scaled(rng, 2, 136, 256)
    both, scales = tuple(x.T for x in b), tuple(x.T for x in scale_b)

    def refuse(b: Any, scale_b: Any, match: str) -> None:
        with pytest.raises(ArgumentError, match=match):
            gemmsmith.simulate(a, b, scale_a=scale_a, scale_b=scale_b)

    refuse(both[0], scales, "scale_b: got a tuple with one array b; use one array")
    refuse(both, (scales[0],), "scale_b: got a tuple of 1 arrays")
    refuse(both, (scales[0], scales[0]), "scale_b: got the same array twice")
    refuse(both, tuple(x[:1] for x in scales), r"scale_b: got two arrays of shape \(1, 2\); for two .* \(2, 2\) each")
    columns = rng.uniform(0.5, 2, (2, 1, 136)).astype(np.float32)
    refuse(both, tuple(columns), r"scale_b: got two arrays of shape \(1, 136\); .* multiply by any other scale in the")
    refuse(both, tuple(x.astype(np.float16) for x in scales), "scale_b: got dtype fp16; use fp32, or ue8m0")
    bf16, halves = random(rng, 64, 256), tuple(x.T for x in random(rng, 2, 136, 256))
    with pytest.raises(ArgumentError, match="scale_b: got block scales, .* they need fp8 operands"):
        gemmsmith.simulate(bf16, halves, scale_b=scales)
    with pytest.raises(ArgumentError, match="scale_a: got builtins.tuple"):
        gemmsmith.simulate(a, both, scale_a=scales, scale_b=scales)


def test_results_of_both(rng: Any) -> None:
    """As a layer that is trained stores them, with an operand of one half's shape."""
    a, b, bias = random(rng, 64, 64), weights(rng, 64, 32), random(rng, 32)

    def epilogue(acc: Any, bias: Any) -> Any:
        gate, up = deinterleave(acc)
        return {"h": (gate + bias).relu() * up, "gate": gate, "up": up}

    simulation = gemmsmith.simulate(a, b, epilogue=epilogue, bias=bias)
    assert not simulation.hazards
    gate, up = (a.astype(float) @ x.astype(float) for x in b)
    wants = {"h": np.maximum(gate + bias.astype(float), 0) * up, "gate": gate, "up": up}
    for name, want in wants.items():
        np.testing.assert_allclose(simulation.result[name].astype(float), want, rtol=0.01, atol=0.02)


def test_a_plan_serves_pairs_at_any_distance(rng: Any) -> None:
    spec = Spec((64, 40), "bf16", (1, 64))
    plan = gemmsmith.plan(Spec((64, 64), "bf16"), (spec, spec), epilogue=swiglu, backend="sim")
    assert "cp.async.bulk.tensor.5d" in plan.source
    a = random(rng, 64, 64)
    for b in (pair := weights(rng, 64, 40), pair[::-1]):
        np.testing.assert_allclose(plan.run(a, b).astype(float), expected(a, *b), rtol=0.01, atol=0.02)


def test_kernels_load_both_with_one_instruction() -> None:
    spec = Spec((64, 128), "bf16", (1, 64))
    source = gemmsmith.plan(Spec((256, 64), "bf16"), (spec, spec), epilogue=swiglu).source
    assert "cp.async.bulk.tensor.5d" in source


def test_what_cannot_be_read_is_refused(rng: Any) -> None:
    a, (gate, up) = random(rng, 64, 64), weights(rng, 64, 40)

    def refuse(b: Any, match: str, error: type[Exception] = ArgumentError, **kwargs: Any) -> None:
        with pytest.raises(error, match=match):
            gemmsmith.simulate(kwargs.pop("a", a), b, **kwargs)

    refuse((gate,), "b: got a tuple of 1 arrays; use one array, or a tuple of two")
    refuse((gate, up, up), "b: got a tuple of 3 arrays")
    refuse((), "b: got a tuple of 0 arrays")
    refuse((gate, 1.0), "b: got builtins.float; use a torch tensor")
    refuse((np.float32(1) * np.ones(()), np.ones((), np.float32)), "b: got ")
    refuse((gate, up[:, :32]), r"b: got two arrays of shape \(64, 40\) and \(64, 32\); use the same")
    refuse((gate, up.astype(np.float16)), "b: got two arrays of dtype bf16 and fp16")
    refuse((gate, np.ascontiguousarray(up)), "b: got two arrays of strides")
    refuse((gate, gate), "b: got the same array twice")
    refuse((gate[:, :36], up[:, :36]), "b: got two arrays of 36 columns, which alternate in groups of 8")
    rows = tuple(map(np.ascontiguousarray, (gate, up)))
    refuse(rows, r"b: got a tuple of two arrays that TMA cannot read together; .* or interleave\(\*b\)")
    odd = tuple(x[:63] for x in (np.zeros((2, 40, 63), BF16).swapaxes(1, 2)))
    refuse(odd, "b: got a tuple of two arrays that TMA cannot read", a=a[:, :63])
    fp32 = tuple(x.astype(np.float32).T.copy().T for x in (gate, up))
    refuse(fp32, 'b: got a tuple with precision="3xtf32"', ConfigError, a=a.astype(np.float32), precision="3xtf32")
    refuse(fp32, r"b: got a tuple with sgemm; use interleave", ConfigError, a=a.astype(np.float32))
    with pytest.raises(ArgumentError, match="a: got builtins.tuple"):
        gemmsmith.gemm((gate, up), gate)  # type: ignore[arg-type]
    out = random(rng, 2, 40, 64)
    inside = out[0].T, out[1].T
    refuse(inside, "out: overlaps b", out=out[1, :40, :].reshape(-1)[: 64 * 40].reshape(64, 40), epilogue=swiglu)


def test_an_array_between_both_is_not_theirs(rng: Any) -> None:
    """The range of addresses from the first to the second has others' elements, too."""
    memory = random(rng, 3, 64, 64)
    a, b = random(rng, 64, 64), (memory[2].T, memory[0].T)
    want = expected(a, *b)
    out = memory[1]
    gemmsmith.gemm(a, b, epilogue=swiglu, out=out)
    np.testing.assert_allclose(out.astype(float), want, rtol=0.005, atol=0.01)
