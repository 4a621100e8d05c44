"""Reductions in the epilogues of grouped GEMMs, in the simulator and by the reference, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.groups import NUMPY, fp32, random
from tests.simulated.test_grouped import COOPERATIVE, PINGPONG, SM80, poisoned
from tests.simulated.test_grouped_gather import gathered, random_rows

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Grouping, Spec

CONFIGS = [
    None, COOPERATIVE.replace(cluster=(2, 1)), COOPERATIVE.replace(cluster=(1, 2), raster="n"),
    COOPERATIVE.replace(swap_ab=True), COOPERATIVE.replace(cluster=(1, 2), swap_ab=True, raster_group=1),
    COOPERATIVE.replace(alias_epilogue=True), PINGPONG, PINGPONG.replace(cluster=(1, 2), swap_ab=True), SM80,
]  # fmt: skip
SIZES = np.array([0, 65, 0, 130, 1, 63, 64, 0], np.int32)
G = len(SIZES)
FORMS = ["offsets", "sizes", "counts"]


def operands(rng: np.random.Generator, form: str, n: int, k: int, sizes: Any = SIZES) -> tuple[Any, Any, Any, Any]:
    """Return (a, b, the table by name, the rows of each group); rows of no group are NaN."""
    ends, b = sizes.cumsum().astype(np.int32), random(rng, "bf16", len(sizes), k, n)
    if form == "counts":
        a = random(rng, "bf16", len(sizes), int(sizes.max()) + 20, k)
        for x, size in zip(a, sizes, strict=True):
            x[size:] = np.nan
        return a, b, {"counts": sizes}, [(g, slice(size)) for g, size in enumerate(sizes)]
    a = random(rng, "bf16", int(ends[-1]) + 40, k)
    a[ends[-1] :] = np.nan
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return a, b, {form: ends if form == "offsets" else sizes}, parts


def all_sums(acc: Any, bias: Any) -> Any:
    y = acc + bias
    return {"d": y, "columns": y.sum(-2), "rows": y.square().sum(-1), "both": y.abs().sum((-2, -1))}


def want_of(form: str, x: Any, parts: Any, bias: Any, b: Any) -> dict[str, Any]:
    """Return the results of `all_sums` in float64."""
    y = [x[part].astype(float) @ b[g].astype(float) + bias[g] for g, part in enumerate(parts)]
    rows = np.zeros(x.shape[:-1])
    for part, values in zip(parts, y, strict=True):
        rows[part] = np.square(values).sum(1)
    return {
        "columns": np.stack([z.sum(0) for z in y]), "rows": rows, "both": np.array([np.abs(z).sum() for z in y]), "d": y
    }  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_sums_by_atomics(config: Config | None, form: str, rng: np.random.Generator) -> None:
    """Beside a matrix, which TMA stores or not, or alone."""
    out_dtype, n, k = rng.choice(["fp32", "bf16", None]), 72, 64
    a, b, table, parts = operands(rng, form, n, k)
    bias = fp32(rng, G, 1, n)
    shapes = {"columns": (G, n), "rows": a.shape[:-1], "both": (G,)}
    out = {name: poisoned("fp32", *shape) for name, shape in shapes.items()}
    if out_dtype:
        out["d"] = poisoned(out_dtype, *a.shape[:-1], n)
    epilogue = all_sums if out_dtype else lambda acc, bias: {name: all_sums(acc, bias)[name] for name in shapes}
    options: dict[str, Any] = {"epilogue": epilogue, "bias": bias, "deterministic": False, "out_dtype": out_dtype}
    done = gemmsmith.simulate(a, b, **table, **options, grouping=Grouping(form), out=out, config=config, seed=1)  # type: ignore[arg-type]
    assert done.hazards == []
    by_reference = gemmsmith.grouped_gemm(a, b, **table, **options, backend="reference")
    want = want_of(form, a, parts, bias, b)
    for found in (out, by_reference):
        for name in shapes:
            np.testing.assert_allclose(found[name], want[name], rtol=1e-4, atol=5e-3)
    if out_dtype:
        for g, part in enumerate(parts):
            np.testing.assert_allclose(out["d"][part].astype(float), want["d"][g], rtol=2.0**-8, atol=1e-3)


KINDS = {
    "sum": lambda y: y.sum(-1), "mean": lambda y: y.mean(-1), "max": lambda y: y.max(-1).values,
    "min": lambda y: y.amin(-1), "logsumexp": lambda y: y.logsumexp(-1),
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("form", ["sizes", "counts"])
def test_rows_are_reduced_in_a_fixed_order(config: Config | None, form: str) -> None:
    """Those of no group are 0, and -inf for logsumexp, which is that of nothing."""
    rng, n, k = np.random.default_rng(2), 200, 64
    a, b, table, parts = operands(rng, form, n, k, SIZES[:7])
    out, of_reference = ({name: poisoned("fp32", *a.shape[:-1]) for name in KINDS} for _ in range(2))

    def epilogue(acc: Any) -> Any:
        return {name: reduce(acc) for name, reduce in KINDS.items()}

    grouping: Any = Grouping(form)  # type: ignore[arg-type]
    done = gemmsmith.simulate(a, b, **table, grouping=grouping, out=out, config=config, seed=1, epilogue=epilogue)
    assert done.hazards == []
    gemmsmith.grouped_gemm(a, b, **table, out=of_reference, epilogue=epilogue, backend="reference")
    is_row = np.zeros(a.shape[:-1], bool)
    for g, part in enumerate(parts):
        y = a[part].astype(float) @ b[g].astype(float)
        is_row[part] = True
        want = {"sum": y.sum(1), "mean": y.mean(1), "max": y.max(1), "min": y.min(1)}
        want["logsumexp"] = np.log(np.exp(y - y.max(1, keepdims=True)).sum(1)) + y.max(1)
        for name in KINDS:
            np.testing.assert_allclose(out[name][part], want[name], rtol=1e-4, atol=2e-3)
    for name in KINDS:
        for results in (out, of_reference):
            assert (results[name][~is_row] == (-np.inf if name == "logsumexp" else 0)).all()


def over_rows(acc: Any, bias: Any) -> Any:
    y = acc + bias
    results = {"sum": y.sum(-2), "max": y.amax(-2), "min": y.amin(-2), "logsumexp": y.logsumexp(-2)}
    return {**results, "total": y.sum((-2, -1), dtype="bf16"), "largest": y.amax((-2, -1))}


@pytest.mark.parametrize("config", [x for x in CONFIGS if not (x and x.swap_ab)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_groups_are_reduced_in_a_fixed_order(
    config: Config | None, form: str, rng: np.random.Generator
) -> None:
    """Beside a matrix, or alone. An empty group has the reduction of nothing."""
    has_matrix, n, k = bool(rng.integers(2)), 72, 64
    a, b, table, parts = operands(rng, form, n, k)
    bias, names = fp32(rng, G, 1, n), ["sum", "max", "min", "logsumexp"]
    out = {name: poisoned("fp32", G, n) for name in names} | {
        "total": poisoned("bf16", G),
        "largest": poisoned("fp32", G),
    }
    if has_matrix:
        out["d"] = poisoned("bf16", *a.shape[:-1], n)

    def epilogue(acc: Any, bias: Any) -> Any:
        return over_rows(acc, bias) | ({"d": acc + bias} if has_matrix else {})

    options: dict[str, Any] = {"epilogue": epilogue, "bias": bias}
    done = gemmsmith.simulate(a, b, **table, **options, grouping=Grouping(form), out=out, config=config, seed=1)  # type: ignore[arg-type]
    assert done.hazards == []
    by_reference = gemmsmith.grouped_gemm(a, b, **table, **options, backend="reference")
    for g, part in enumerate(parts):
        y = a[part].astype(float) @ b[g].astype(float) + bias[g]
        want = {"sum": y.sum(0), "max": y.max(0, initial=-np.inf), "min": y.min(0, initial=np.inf)}
        want |= {"largest": y.max(initial=-np.inf), "total": y.sum()}
        with np.errstate(divide="ignore"):
            want["logsumexp"] = np.log(np.exp(y).sum(0))
        for name, x in want.items():
            tolerance = (2.0**-8, 0.01) if name == "total" else (1e-4, 2e-3)
            for found in (out, by_reference):
                np.testing.assert_allclose(found[name][g].astype(float), x, *tolerance)
        if has_matrix:
            np.testing.assert_allclose(out["d"][part].astype(float), y, rtol=2.0**-8, atol=1e-3)


def test_a_chosen_config_for_reductions_of_small_groups() -> None:
    """It computes D itself, not D^T, whose tiles have as few columns as a group has rows."""
    for m in (32, 256, 8192):
        plan = gemmsmith.plan(
            Spec((m, 512), "bf16"), Spec((32, 512, 1024), "bf16"), sizes=Spec((32,), "int32"),
            grouping=Grouping("sizes"), epilogue=lambda acc: (acc, acc.sum(0)),
        )  # fmt: skip
        assert not plan.config.swap_ab


@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_beside_a_column_major_matrix(deterministic: bool) -> None:
    """D^T is computed then, unless a fixed order needs D."""
    rng, sizes = np.random.default_rng(8), np.array([70, 0, 65], np.int32)
    a, b = random(rng, "bf16", 140, 64), random(rng, "bf16", 3, 64, 80)
    out = np.asfortranarray(poisoned("fp32", 140, 80)), poisoned("fp32", 3, 80), poisoned("fp32", 140)
    gemmsmith.grouped_gemm(
        a, b, sizes=sizes, epilogue=lambda acc: (acc, acc.sum(0), acc.sum(1)), out=out, out_dtype="fp32",
        deterministic=deterministic, backend="sim",
    )  # fmt: skip
    y = np.concatenate([a[:70].astype(float) @ b[0].astype(float), a[70:135].astype(float) @ b[2].astype(float)])
    np.testing.assert_allclose(out[0][:135], y, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(out[1], [y[:70].sum(0), np.zeros(80), y[70:].sum(0)], rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(out[2][:135], y.sum(1), rtol=1e-4, atol=2e-3)


def gated(acc: Any, weight: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    y = gate.sigmoid() * up * weight
    return y, y.sum(0, keepdim=True), y.sum(1, keepdim=True), y.sum((0, 1), keepdim=True)


@pytest.mark.parametrize("config", [None, *CONFIGS[1:4], PINGPONG, SM80], ids=str)
def test_sums_of_halves_and_of_gathered_rows(config: Config | None) -> None:
    """Reduced dimensions are kept, and a group has one of its own."""
    if config and config.swap_ab:
        config = config.replace(cluster=(1, 1))
    elif config:
        config = config.replace(cluster=(config.cluster[0], 1))
    rng, n, k, t, sizes = np.random.default_rng(3), 64, 64, 50, SIZES[:6]
    m, b = int(sizes.sum()) + 9, random(rng, "bf16", len(sizes), k, n)
    a, rows, weight = random(rng, "bf16", t, k), random_rows(rng, m, t), fp32(rng, m, 1)
    shapes = (m, n // 2), (len(sizes), 1, n // 2), (m, 1), (len(sizes), 1, 1)
    out = tuple(poisoned("fp32", *shape) for shape in shapes)
    options: dict[str, Any] = {
        "sizes": sizes, "gather": rows, "epilogue": gated, "weight": weight, "deterministic": False, "out_dtype": "fp32"
    }  # fmt: skip
    done = gemmsmith.simulate(a, b, **options, grouping=Grouping("sizes", gathers=True), out=out, config=config)
    assert done.hazards == []
    by_reference = gemmsmith.grouped_gemm(a, b, **options, backend="reference")
    of_row, total = np.repeat(np.arange(len(sizes)), sizes), int(sizes.sum())
    z = np.einsum("mk,mkn->mn", gathered(a, rows)[:total], b.astype(float)[of_row]).reshape(total, n // 16, 2, 8)
    gate, up = (z[:, :, i].reshape(total, n // 2) for i in range(2))
    y = up / (1 + np.exp(-gate)) * weight[:total]
    of_group = np.stack([y[of_row == g].sum(0, keepdims=True) for g in range(len(sizes))])
    want = np.zeros((m, n // 2)), of_group, np.zeros((m, 1)), of_group.sum(2, keepdims=True)
    want[0][:total], want[2][:total] = y, y.sum(1, keepdims=True)
    for found in (out, by_reference):
        for x, w in zip(found, want, strict=True):
            np.testing.assert_allclose(x, w, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["sim", "reference"])
def test_an_invalid_table_yields_nan(deterministic: bool, form: str, backend: Any) -> None:
    a, b = np.ones((*((2,) if form == "counts" else ()), 64, 64), NUMPY["bf16"]), np.ones((2, 64, 80), NUMPY["bf16"])

    def epilogue(acc: Any) -> Any:
        others = (acc.amax(-1), acc.amin(-2), acc.logsumexp((-1, -2))) if deterministic else ()
        return acc.sum(-1), acc.sum(-2), acc.sum((-1, -2)), *others

    results = gemmsmith.grouped_gemm(
        a, b, **{form: np.array([70, 66], np.int32)}, epilogue=epilogue, deterministic=deterministic, backend=backend
    )  # fmt: skip
    assert all(np.isnan(x).all() for x in results)


ALONG_K = [None, *(x for x in CONFIGS[1:] if x and x.design != "pingpong" and not x.alias_epilogue)]


def of_slices(acc: Any) -> Any:
    y = acc + 1
    return {"d": y, "columns": y.sum(-2), "rows": y.mean(-1), "both": y.max((1, 2)), "groups": y.sum(0), "all": y.sum()}


@pytest.mark.parametrize("config", ALONG_K, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("is_valid", [True, False])
def test_slices_of_k(config: Config | None, deterministic: bool, is_valid: bool) -> None:
    """Reductions are those of a batch; a group without K has elements 1."""
    if config and config.swap_ab:
        return  # a sum over the groups is not transposable
    rng, m, n, sizes = np.random.default_rng(4), 80, 72, SIZES[:6] if is_valid else np.array([1, -1, 5], np.int32)
    a, b = random(rng, "bf16", int(sizes.sum()) + 10, m).T, random(rng, "bf16", int(sizes.sum()) + 10, n)
    shapes = {"d": (len(sizes), m, n), "columns": (len(sizes), n), "rows": (len(sizes), m), "both": (len(sizes),)}
    shapes |= {"groups": (m, n), "all": ()}
    out = {name: poisoned("fp32", *shape) for name, shape in shapes.items()}
    options: dict[str, Any] = {"epilogue": of_slices, "out_dtype": "fp32", "deterministic": deterministic}
    done = gemmsmith.simulate(a, b, sizes=sizes, **options, grouping=Grouping("sizes", "k"), out=out, config=config)
    assert done.hazards == []
    by_reference = gemmsmith.grouped_gemm(a, b, sizes=sizes, **options, along="k", backend="reference")
    if not is_valid:
        assert all(np.isnan(x).all() for found in (out, by_reference) for x in found.values())
        return
    parts = [slice(end - size, end) for end, size in zip(sizes.cumsum(), sizes, strict=True)]
    y = np.stack([a[:, part].astype(float) @ b[part].astype(float) + 1 for part in parts])
    want = {"d": y, "columns": y.sum(1), "rows": y.mean(2), "both": y.max((1, 2)), "groups": y.sum(0), "all": y.sum()}
    for found in (out, by_reference):
        for name, x in want.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=5e-2)


def test_a_plan_takes_other_tables_and_shapes() -> None:
    plan = gemmsmith.plan(
        Spec((128, 64), "bf16"), Spec((3, 64, 64), "bf16"), sizes=Spec((3,), "int32"), grouping=Grouping("sizes"),
        epilogue=lambda acc: (acc, acc.sum(0), acc.sum(1)), deterministic=False, backend="sim",
    )  # fmt: skip
    rng = np.random.default_rng(5)
    for m, sizes in ((128, [60, 0, 50]), (300, [1, 0, 130, 0, 65, 64, 2]), (128, [0, 0, 128])):
        a, b = random(rng, "bf16", m, 64), random(rng, "bf16", len(sizes), 64, 64)
        _, columns, rows = plan.run(a, b, sizes=np.array(sizes, np.int32))
        of_row = np.repeat(np.arange(len(sizes)), sizes)
        y = np.einsum("mk,mkn->mn", a[: len(of_row)].astype(float), b.astype(float)[of_row])
        np.testing.assert_allclose(rows[: len(y)], y.sum(1), rtol=1e-3, atol=1e-3)
        assert (rows[len(y) :] == 0).all()
        np.testing.assert_allclose(columns, [y[of_row == g].sum(0) for g in range(len(sizes))], rtol=1e-3, atol=1e-3)


def test_empty_extents() -> None:
    for m, n, k in ((0, 64, 64), (30, 0, 64), (30, 64, 0)):
        a, b, sizes = np.zeros((m, k), NUMPY["bf16"]), np.zeros((3, k, n), NUMPY["bf16"]), np.array([0, m, 0], np.int32)
        results = gemmsmith.grouped_gemm(
            a, b, sizes=sizes, epilogue=lambda acc: (acc.sum(0), acc.sum(1), acc.sum()), deterministic=False,
            backend="sim",
        )  # fmt: skip
        assert [x.shape for x in results] == [(3, n), (m,), (3,)]
        assert all((x == 0).all() for x in results)


def test_the_reference_computes_every_reduction_of_a_group() -> None:
    rng, sizes = np.random.default_rng(6), np.array([40, 20, 30], np.int32)
    a, b = random(rng, "bf16", 100, 32), random(rng, "bf16", 3, 32, 16)
    largest, mean, lse = gemmsmith.grouped_gemm(
        a, b, sizes=sizes, epilogue=lambda acc: (acc.max(0).values, acc.mean(), acc.logsumexp(0))
    )
    for g, part in enumerate((slice(40), slice(40, 60), slice(60, 90))):
        y = a[part].astype(float) @ b[g].astype(float)
        np.testing.assert_allclose(largest[g], y.max(0), rtol=1e-5)
        np.testing.assert_allclose(mean[g], y.mean(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[g], np.log(np.exp(y).sum(0)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("epilogue", "options", "message"),
    [
        (lambda acc: acc.sum(0), {"deterministic": True, "config": CONFIGS[3]}, "out: got a sum over rows of groups"),
        (lambda acc: acc.max(0).values, {"config": CONFIGS[3]}, "out: got a max over rows of groups"),
        (lambda acc: acc.mean(), {}, "out: got a mean over rows that are divided into groups; use a sum"),
        (lambda acc: acc.mean(0), {}, "out: got a mean over rows"),
        (lambda acc: (acc, acc.sum(0)), {"scatter": np.zeros(64, np.int32)}, "out1: got a reduction with scatter"),
        (lambda acc: acc.sum(0), {"a": np.zeros((2, 64, 64), NUMPY["bf16"]), "counts": True}, "over the groups; use"),
        (lambda acc: acc.sum(), {"a": np.zeros((2, 64, 64), NUMPY["bf16"]), "counts": True}, "over the groups; use"),
    ],
)  # fmt: skip
def test_what_is_refused(epilogue: Any, options: dict[str, Any], message: str) -> None:
    given = {"a": np.zeros((64, 64), NUMPY["bf16"]), "deterministic": False, **options}
    given["counts" if given.pop("counts", False) else "sizes"] = np.array([30, 30], np.int32)
    out = {"out": (np.zeros((64, 64), NUMPY["bf16"]), np.zeros((2, 64), np.float32))} if "scatter" in options else {}
    with pytest.raises((ArgumentError, ConfigError), match=message):
        gemmsmith.grouped_gemm(**given, **out, b=np.zeros((2, 64, 64), NUMPY["bf16"]), epilogue=epilogue, backend="sim")
