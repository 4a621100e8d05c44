"""What is chosen fits shared memory, in every layout and with every epilogue."""

from __future__ import annotations

from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.make_spec import make_spec
from gemmsmith.epilogue.epilogue_plan import plan_epilogue
from gemmsmith.tuning.candidates import fit_stages
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.config_table import configs_for_epilogue


def relu_sums(acc: Any) -> Any:
    y = acc.maximum(0.0)
    return y, y.sum(-1)


@pytest.mark.parametrize("epilogue", [None, relu_sums, lambda acc, c: acc + c])
@pytest.mark.parametrize("strides", ["nn", "nt", "tn", "tt", "spread", "windows"])
@pytest.mark.parametrize(("m", "n", "k"), [(300, 1000, 520), (300, 1104, 520), (300, 40, 520), (392, 630, 1160)])
def test_what_is_chosen_fits_in_every_layout(epilogue: Any, strides: str, m: int, n: int, k: int) -> None:
    """MN-major tiles are padded: 300 x 520 x 1000 by tiles of 64 x 40 had a stage too many."""
    a = Spec((m, k), "fp16", (1, m) if strides[0] == "t" else (k, 1))
    b = {"n": (n, 1), "t": (1, k), "d": (2 * n, 2), "s": (1, 1)}[strides[-1]]
    operands = {"c": Spec((m, n), "fp16")} if epilogue is not None and epilogue is not relu_sums else None
    assert gemmsmith.plan(a, Spec((k, n), "fp16", b), epilogue=epilogue, operands=operands).source


def test_what_is_chosen_fits_a_turned_epilogue() -> None:
    """Transposed, a column-major residual comes by TMA, and takes shared memory."""
    a, b, c = Spec((1, 4096), "bf16"), Spec((4096, 16384), "bf16"), Spec((1, 16384), "fp32", (1, 16))
    assert gemmsmith.plan(a, b, epilogue=lambda acc, c: (acc + c, (acc + c).sum(-1)), operands={"c": c}).source


@pytest.mark.parametrize("m", [16, 32, 48])
def test_what_is_chosen_suits_columns_of_8_bits(m: int) -> None:
    """Which TMA stores where D^T is computed, in rows of 16 elements at least."""
    a, b = Spec((m, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    out = {"out": Spec((m, 4096), "bf16"), "out1": Spec((m, 4096), "fp8_e4m3", (1, m))}

    def twice(acc: Any) -> Any:
        return acc, acc.to("fp8_e4m3")

    p = bind(Request(a, b, out, epilogue=twice))
    found = rank_configs(p.problem, p.spec, limit=20)
    assert {c.swap_ab for c in found} == {True, False}
    for config in found:
        assert gemmsmith.plan(a, b, epilogue=twice, out=out, config=config).source
    assert gemmsmith.plan(a, b, epilogue=twice, out=out).source


@pytest.mark.parametrize("n", [8, 40, 176, 256])
@pytest.mark.parametrize("strides", ["nn", "tn", "tt"])
def test_stages_that_fit_stay(n: int, strides: str) -> None:
    """What is kept is what was measured."""
    a = Spec((304, 520), "fp16", (520, 1) if strides[0] == "n" else (1, 304))
    b = Spec((520, 1000), "fp16", (1000, 1) if strides[1] == "n" else (1, 520))
    p = bind(Request(a, b)).problem
    config = Config(tile=(64, n, 64), cluster=(1, 1), consumers=1, stages=16)
    once = fit_stages(make_spec(p, config))
    assert fit_stages(make_spec(p, once)) == once
    assert gemmsmith.plan(a, b, config=once).source
    if n == 8:
        assert once.stages == 16


@pytest.mark.parametrize(("matrices", "expected"), [
    (1, {("cooperative", 128, 256): (3, 3), ("cooperative", 256, 128): (3, 3), ("pingpong", 128, 128): (5, 2)}),
    (2, {("cooperative", 128, 256): (3, 2), ("cooperative", 256, 128): (3, 2), ("pingpong", 128, 128): (5, 2)}),
])  # fmt: skip
def test_stages_come_before_wide_subtiles(matrices: int, expected: dict[tuple[str, int, int], tuple[int, int]]) -> None:
    """Of one matrix and one result, and of two and three: stages of large tiles, and subtiles loaded at once."""
    a, b, c = (
        Spec((4096, 4096), "bf16"),
        Spec((4096, 4096), "bf16", (1, 4096)),
        Spec((4096, 4096), "bf16"),
    )
    if matrices == 1:
        p = bind(Request(a, b, epilogue=lambda acc, c: acc + c, operands={"c": c}))
    else:
        p = bind(Request(a, b, epilogue=lambda acc, c, d: (acc * c, acc * d, c * d), operands={"c": c, "d": c}))
    found = {
        (x.design, *x.tile[:2]): (x.stages, plan_epilogue(make_spec(p.problem, x, p.spec)).load_stages)
        for x in configs_for_epilogue(p.spec).configs
        if x.tile[2] == 64 and x.splits == x.cluster_splits == 1 and not x.swap_ab and x.consumers == 2
    }
    assert {tile: found[tile] for tile in expected} == expected
