"""fp8, int8 and TF32 in the simulator: any shape, layout, tile and schedule, judged element by element."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as some
from tests.simulated.test_gemm import configs

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Spec
from gemmsmith.backends.reference import bounds
from gemmsmith.core.dtypes import FP32, as_dtype
from gemmsmith.tuning.dtype_equivalence import config_for_dtype

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
INT8, FLOAT = np.dtype(np.int8), np.dtype(np.float32)
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (INT8, INT8), (FLOAT, FLOAT)]
OPTIONS: dict[Any, dict[str, str]] = {
    E4M3: {"accumulate": "fast"}, E5M2: {"accumulate": "fast"}, INT8: {}, FLOAT: {"precision": "tf32"},
}  # fmt: skip
OUTPUTS = {E4M3: ["bf16", "fp16", "fp32"], E5M2: ["bf16", "fp32"], INT8: ["int32"], FLOAT: ["fp32", "bf16"]}
SMALL = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1)


def matrix(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, column_major: bool, pad: int, offset: int,
    step: int = 1,
) -> Any:  # fmt: skip
    """Random data, with NaN (or the largest integer) wherever the matrix has no element."""
    *batch, rows, columns = shape
    outer, inner = (columns, rows) if column_major else (rows, columns)
    whole = (int(np.prod(batch)) * outer, (inner + pad) * step)
    store = np.full(whole[0] * whole[1] + offset, 127 if dtype == INT8 else np.nan).astype(dtype)
    x = store[offset:].reshape(*batch, outer, (inner + pad) * step)[..., : inner * step : step]
    x = x.swapaxes(-1, -2) if column_major else x
    x[...] = rng.integers(-128, 128, shape) if dtype == INT8 else rng.standard_normal(shape, np.float32)
    return x


def poisoned(shape: tuple[int, ...], dtype: str, column_major: bool) -> Any:
    """An array to be written to, in which no element is right."""
    shape = (*shape[:-2], shape[-1], shape[-2]) if column_major else shape
    x = np.full(shape, -(2**30) - 12345 if dtype == "int32" else np.nan).astype(
        as_dtype(dtype, allow_integers=True).numpy
    )
    return x.swapaxes(-1, -2) if column_major else x


def judge(out: Any, a: Any, b: Any, *, promoted: bool = False) -> None:
    if out.dtype == np.int32:
        want = np.matmul(a.astype(np.int64), b.astype(np.int64)).astype(np.int32)  # modulo 2^32
        np.testing.assert_array_equal(out, want)
    else:
        bounds.check(out, a, b, FP32, as_dtype(out.dtype), promoted=promoted).require()


@pytest.mark.slow
@settings(max_examples=20)
@given(
    config=some.one_of(some.none(), configs()), m=some.integers(1, 300), n=some.integers(1, 300),
    k=some.integers(0, 400),
    batch=some.sampled_from([None, None, None, 1, 2]), shared=some.booleans(), dtypes=some.sampled_from(PAIRS),
    turned=some.tuples(*[some.booleans()] * 3), pad=some.sampled_from([0, 0, 16, 3]),
    offset=some.sampled_from([0, 0, 16, 1]), step=some.sampled_from([1, 1, 1, 2]), seed=some.integers(0, 10_000),
    data=some.data(),
)  # fmt: skip
def test_any_product(
    config: Config | None, m: int, n: int, k: int, batch: int | None, shared: bool, dtypes: Any, turned: Any, pad: int,
    offset: int, step: int, seed: int, data: some.DataObject,
) -> None:  # fmt: skip
    rng, (dtype_a, dtype_b) = np.random.default_rng(seed), dtypes
    lead = () if batch is None else (batch,)
    a = matrix(rng, (*lead, m, k), dtype_a, turned[0], pad, offset, step)
    b = matrix(rng, (k, n) if shared else (*lead, k, n), dtype_b, turned[1], pad, 0)
    out = poisoned((*lead, m, n), data.draw(some.sampled_from(OUTPUTS[dtype_a]), label="output"), turned[2])
    try:
        config = config and config_for_dtype(config, as_dtype(dtype_a, allow_integers=True))
        done = gemmsmith.simulate(a, b, out=out, config=config, seed=seed, **OPTIONS[dtype_a])
    except ConfigError:
        assert config is not None
        reject()  # it does not fit, and says so; another is drawn in its place
    assert done.hazards == []
    assert done.result is out
    judge(out, a, b)


@settings(max_examples=15)
@given(
    dtype=some.sampled_from([E4M3, INT8, FLOAT]), m=some.sampled_from([0, 1, 1, 2, 16, 65]),
    n=some.sampled_from([0, 8, 16, 64]), k=some.sampled_from([0, 1, 1, 2, 16, 33, 64]),
    planned_k=some.sampled_from([64, 63]), turned=some.tuples(some.booleans(), some.booleans()),
    swap_ab=some.booleans(),
)  # fmt: skip
def test_a_plan_serves_every_size(
    dtype: Any, m: int, n: int, k: int, planned_k: int, turned: Any, swap_ab: bool
) -> None:
    """Operands are packed, or not, as each size needs; the rows of D are aligned alike."""
    rng = np.random.default_rng()

    def arrays(m: int, n: int, k: int) -> list[Any]:
        given = [matrix(rng, s, dtype, t, 0, 0) for s, t in zip(((m, k), (k, n)), turned, strict=True)]
        return [*given, poisoned((m, n), OUTPUTS[dtype][-1], False)]

    config = config_for_dtype(SMALL.replace(swap_ab=swap_ab), as_dtype(dtype, allow_integers=True))
    a, b, out = arrays(48, 32, planned_k)
    plan = gemmsmith.plan(a, b, out=out, config=config, backend="sim", **OPTIONS[dtype])
    a, b, out = arrays(m, n, k)
    assert plan.run(a, b, out) is out
    judge(out, a, b)


@pytest.mark.parametrize("dtype", [E4M3, INT8, FLOAT])
@pytest.mark.parametrize("sizes", [(0, 5, 8), (5, 0, 8), (5, 3, 0), (0, 0, 0), (1, 1, 1), (1, 7, 129), (129, 1, 127)])
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_few_elements_and_none(rng: np.random.Generator, dtype: Any, sizes: Any, layout: str) -> None:
    m, n, k = sizes
    a, b = (matrix(rng, s, dtype, x == "t", 0, 0) for s, x in zip(((m, k), (k, n)), layout, strict=True))
    for backend in ("sim", "reference"):
        out = poisoned((m, n), OUTPUTS[dtype][-1], False)
        assert gemmsmith.gemm(a, b, out=out, backend=backend, **OPTIONS[dtype]) is out
        judge(out, a, b)


@pytest.mark.parametrize(("dtype", "default"), [(E4M3, "bf16"), (INT8, "int32"), (FLOAT, "fp32")])
def test_what_is_stored_by_default(dtype: Any, default: str) -> None:
    a, b = np.zeros((3, 5), dtype), np.zeros((5, 4), dtype)
    options = {**OPTIONS[dtype], "backend": "reference"}
    assert gemmsmith.gemm(a, b, **options).dtype == as_dtype(default, allow_integers=True).numpy
    fused = gemmsmith.gemm(a, b, epilogue=lambda acc: acc * 2, **options)
    assert fused.dtype == as_dtype("fp32" if dtype == FLOAT else "bf16").numpy


def test_integers_wrap() -> None:
    """(-128)^2 * (2^17 + 512) is more than 2^31; shares are added modulo 2^32, too."""
    k = (1 << 17) + 512
    a, b = np.full((3, k), -128, np.int8), np.full((8, k), -128, np.int8).T
    b[:, 3] = np.arange(k) % 256 - 128
    out = poisoned((3, 8), "int32", False)
    assert gemmsmith.simulate(a, b, out=out, config=SMALL.replace(tile=(64, 8, 512), splits=2)).hazards == []
    judge(out, a, b)
    judge(gemmsmith.gemm(a, b, backend="reference"), a, b)
    assert out[0, 0] == -(1 << 31) + 512 * 128 * 128


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("n", [72, 71])
def test_an_epilogue_dequantizes(rng: np.random.Generator, n: int, swap_ab: bool) -> None:
    """The product enters it as fp32, exactly as long as it has 24 bits."""
    a, b = matrix(rng, (70, 160), INT8, False, 0, 0), matrix(rng, (160, n), INT8, True, 0, 0)
    rows, columns = (rng.uniform(0.5, 2, shape).astype(np.float32) for shape in ((70, 1), (n,)))
    out = {"out": poisoned((70, n), "fp32", False), "out1": np.full((70, 1), np.nan, np.float32)}

    def dequantized(acc: Any, rows: Any, columns: Any) -> Any:
        return acc * rows * columns, acc.abs().amax(-1, keepdim=True)

    config = SMALL.replace(swap_ab=swap_ab)
    gemmsmith.simulate(
        a, b, out=out, epilogue=dequantized, operands={"rows": rows, "columns": columns}, out_dtype="fp32",
        config=config,
    )  # fmt: skip
    want = np.matmul(a.astype(np.int64), b.astype(np.int64))
    np.testing.assert_array_equal(out["out"], want.astype(np.float32) * rows * columns)
    np.testing.assert_array_equal(out["out1"], np.abs(want).max(-1, keepdims=True))


def test_tf32_reads_the_upper_19_bits() -> None:
    """Bits below are as good as zeros: of A, of B, in the simulator and in the reference."""
    ones = np.full((64, 64), np.uint32(0x3F801FFF)).view(np.float32)  # 1 and all bits that are not read
    for backend in ("sim", "reference"):
        assert (gemmsmith.gemm(ones, ones, precision="tf32", backend=backend) == 64).all()


@pytest.mark.slow
@settings(max_examples=8)
@given(
    config=some.one_of(some.none(), configs()), m=some.integers(1, 200), n=some.integers(1, 200),
    k=some.integers(0, 300), batch=some.sampled_from([None, None, 2]), turned=some.tuples(*[some.booleans()] * 3),
    pad=some.sampled_from([0, 4, 3]), offset=some.sampled_from([0, 1]), seed=some.integers(0, 10_000),
)  # fmt: skip
def test_3xtf32(
    config: Config | None, m: int, n: int, k: int, batch: int | None, turned: Any, pad: int, offset: int, seed: int
) -> None:
    rng, lead = np.random.default_rng(seed), () if batch is None else (batch,)
    a = matrix(rng, (*lead, m, k), FLOAT, turned[0], pad, offset)
    b = matrix(rng, (k, n), FLOAT, turned[1], pad, 0)
    out = poisoned((*lead, m, n), "fp32", turned[2])
    config = config and config.replace(tile=(*config.tile[:2], 32))
    try:
        done = gemmsmith.simulate(a, b, out=out, precision="3xtf32", config=config, seed=seed)
    except ConfigError:
        assert config is not None
        reject()
    assert done.hazards == []
    judge(out, a, b, promoted=True)


def test_3xtf32_adds_all_three_products() -> None:
    """Of elements whose low parts are powers of two, each product has bits of its own."""
    x, y = np.float32(1 + 2.0**-11), np.float32(1 + 2.0**-13)
    a, b = np.full((70, 40), x), np.full((40, 72), y)
    results = gemmsmith.gemm(a, b, precision="3xtf32", backend="sim")
    assert (results == np.float32(40 * (1 + 2.0**-11 + 2.0**-13))).all()
    assert (gemmsmith.gemm(a, b, precision="tf32", backend="sim") == 40).all()
    exact = np.float64(x) * np.float64(y) * 40
    assert (gemmsmith.gemm(a, b, precision="3xtf32", backend="reference") == np.float32(exact)).all()


@pytest.mark.slow
def test_3xtf32_is_about_as_exact_as_fp32(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((64, 2000), np.float32), rng.standard_normal((2000, 64), np.float32)
    want = a.astype(np.float64) @ b
    one, other = (np.linalg.norm(x - want) for x in (gemmsmith.gemm(a, b, precision="3xtf32", backend="sim"), a @ b))
    assert one < 4 * other
    assert np.linalg.norm(gemmsmith.gemm(a, b, precision="tf32", backend="sim") - want) > 100 * one


def test_3xtf32_of_what_is_not_finite(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((9, 40), np.float32), rng.standard_normal((40, 16), np.float32)
    a[3, 5], b[7, 2] = np.inf, np.nan
    out = gemmsmith.gemm(a, b, precision="3xtf32", backend="sim")
    wrong = np.isnan(out)
    assert wrong[3].all()
    assert wrong[:, 2].all()
    assert wrong.sum() == 9 + 16 - 1


def test_3xtf32_packs_low_parts() -> None:
    a, b = Spec((512, 1024), "fp32"), Spec((1024, 768), "fp32")
    plan, single = (gemmsmith.plan(a, b, precision=x) for x in ("3xtf32", "tf32"))
    assert plan.workspace_bytes == 4 * (512 * 1024 + 2 * 1024 * 768)  # b is transposed, too
    assert "the TF32 residual of a is computed before each run: 4.2 MB" in plan.why
    assert "low part" not in single.why
    assert plan._planned.kernel.name != single._planned.kernel.name
    config = SMALL.replace(tile=(64, 64, 64))
    with pytest.raises(ConfigError, match='tile K: got 64 with precision="3xtf32"; use 32'):
        gemmsmith.plan(a, b, precision="3xtf32", config=config)
    with pytest.raises(
        ConfigError, match='precision: got "3xtf32" with tma; use the design cooperative, mma_multistage or pingpong$'
    ):
        gemmsmith.plan(a, b, precision="3xtf32", config=Config("tma", (64, 64, 32), (1, 1), 3, 1))


def test_fp8_values_that_are_not_finite(rng: np.random.Generator) -> None:
    a, b = matrix(rng, (70, 130), E5M2, False, 0, 0), matrix(rng, (130, 72), E4M3, True, 0, 0)
    a[3, 5], a[60, 1], b[9, 9] = np.inf, -np.inf, np.nan
    out = poisoned((70, 72), "fp32", False)
    gemmsmith.gemm(a, b, out=out, accumulate="fast", backend="sim")
    judge(out, a, b)


@pytest.mark.parametrize(("n", "swap_ab", "fits"), [(24, False, True), (40, False, False), (48, False, True),
                                                    (40, True, False), (48, True, True)])  # fmt: skip
def test_int8_tiles_are_multiples_of_16(n: int, swap_ab: bool, fits: bool) -> None:
    a, b = Spec((64, 256), "int8"), Spec((256, 96), "int8", (1, 256))
    config = SMALL.replace(tile=(64, n, 128), swap_ab=swap_ab)
    if fits:
        assert gemmsmith.plan(a, b, config=config).config.tile[1] == n
    else:
        with pytest.raises(
            ConfigError, match="tile N: got 40; s32.s8.s8 supports a multiple of 16 from 16 to 256 or 8 or 24"
        ):
            gemmsmith.plan(a, b, config=config)


@pytest.mark.parametrize(
    ("dtype", "k", "message"),
    [
        ("fp8_e4m3", 16, "tile K: got 16 with operands of fp8_e4m3; use 32, 64, or a multiple of 128 up to 512"),
        ("int8", 192, "tile K: got 192 with operands of int8; use 32, 64, or a multiple of 128"),
        ("fp32", 256, "tile K: got 256 with operands of tf32; use 8, 16, or a multiple of 32 up to 128"),
        ("bf16", 8, "tile K: got 8 with operands of bf16; use 16, 32, or a multiple of 64 up to 256"),
        ("bf16", 40, "tile K: got 40; use rows of 32, 64, or a multiple of 128 bytes up to 512"),
    ],
)
def test_depths_of_a_tile(dtype: str, k: int, message: str) -> None:
    options = {"fp8_e4m3": {"accumulate": "fast"}, "fp32": {"precision": "tf32"}}.get(dtype, {})
    with pytest.raises(ConfigError, match=message):
        gemmsmith.plan(
            Spec((64, 256), dtype), Spec((256, 64), dtype), config=SMALL.replace(tile=(64, 64, k)), **options
        )


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        ("fp16", "fp16", {"precision": "3xtf32"}, "precision: got '3xtf32' for operands of fp16; it is for fp32"),
        ("fp32", "fp32", {"precision": "bf16"}, "precision: got 'bf16'; use 'tf32' or '3xtf32', or None for"),
        ("bf16", "bf16", {"precision": "tf32"}, "precision: got 'tf32' for operands of bf16; it is for fp32 operands"),
        ("fp8_e4m3", "bf16", {}, "b: got dtype bf16 with a of fp8_e4m3; use the same for both"),
        ("int8", "fp8_e4m3", {}, "b: got dtype fp8_e4m3 with a of int8"),
        ("int32", "int32", {}, "a: got dtype int32; operands are bf16, fp16, fp32, int8, fp8_e4m3 or fp8_e5m2"),
        ("fp8_e4m3", "fp8_e4m3", {"accumulate": "fp16"}, "accumulate: got 'fp16' for operands of fp8_e4m3; use"),
        ("fp8_e5m2", "fp8_e4m3", {"accumulate": "fp32"}, "use promoted or fast"),
        ("int8", "int8", {"accumulate": "fp32"}, "accumulate: got 'fp32' for operands of int8; use int32"),
        ("bf16", "bf16", {"accumulate": "fast"}, "accumulate: got 'fast' for operands of bf16; use fp32"),
        ("int8", "int8", {"out_dtype": "int64"}, "out_dtype: got dtype int64; use bf16, fp16, fp32 or int32"),
        ("bf16", "bf16", {"out_dtype": "int32"}, "out_dtype: got 'int32'; use one of bf16"),
    ],
)
def test_what_is_refused(a: str, b: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        gemmsmith.plan(Spec((64, 64), a), Spec((64, 64), b), **options)


def test_a_fused_product_stores_no_integers() -> None:
    a = Spec((64, 64), "int8")
    with pytest.raises(ArgumentError, match="out_dtype: got 'int32'; use one of bf16"):
        gemmsmith.plan(a, a, epilogue=lambda acc: acc, out_dtype="int32")
    with pytest.raises(ArgumentError, match="x: got dtype int8; operands are fp32, fp16, bf16, int32, int64 or bool"):
        gemmsmith.plan(a, a, epilogue=lambda acc, x: acc + x, x=Spec((64,), "int8"))


@pytest.mark.slow
def test_batch_invariant_rows_have_the_same_bits(rng: np.random.Generator) -> None:
    for dtype in (E4M3, INT8, FLOAT):
        a, b = matrix(rng, (150, 300), dtype, False, 0, 0), matrix(rng, (300, 72), dtype, True, 0, 0)
        whole, part = (
            gemmsmith.gemm(x, b, batch_invariant=True, backend="sim", **OPTIONS[dtype]) for x in (a, a[:9].copy())
        )
        assert whole[:9].tobytes() == part.tobytes()


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_why_says_what_packing_costs(dtype: str) -> None:
    """Of TF32 see collective/test_register_a.py."""
    options = {"fp8_e4m3": {"accumulate": "fast"}}.get(dtype, {})
    size = as_dtype(dtype, allow_integers=True).bytes
    a, b = Spec((512, 4096), dtype), Spec((4096, 8192), dtype)
    results = gemmsmith.plan(a, b, **options)
    moved = 2 * 4096 * 8192 * size
    assert f"b is transposed before each run, since {dtype} is read K-major only: {moved / 1e6:.1f} MB" in results.why
    assert "a is" not in results.why
    assert results.workspace_bytes >= moved // 2
    assert "before each run" not in gemmsmith.plan(a, Spec((4096, 8192), dtype, (1, 4096)), **options).why
    ragged = gemmsmith.plan(Spec((512, 4096), dtype, (4097, 1)), Spec((4096, 8192), dtype, (1, 4096)), **options)
    assert "a is copied before each run, since TMA cannot read its rows" in ragged.why
