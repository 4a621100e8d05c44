"""One plan, problems of any size; and what a plan says of its kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as some

import gemmsmith
from gemmsmith import ArgumentError, Config
from gemmsmith.backends.reference import bounds
from gemmsmith.cli import main
from gemmsmith.core.dtypes import BF16, FP16, FP32

SMALL = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, stages=2)
extents = some.sampled_from([0, 1, 1, 2, 7, 8, 64, 65])
ALIGNED, ODD = some.sampled_from([0, 8, 64, 72]), some.sampled_from([0, 1, 7, 63])


def matrix(rows: int, columns: int, column_major: bool, fill: Any = None) -> Any:
    """fp16, random normal where not given."""
    shape = (columns, rows) if column_major else (rows, columns)
    random = np.random.default_rng().standard_normal(shape) if fill is None else np.full(shape, fill)
    return random.astype(np.float16).T if column_major else random.astype(np.float16)


def add(acc: Any, c: Any) -> Any:
    return acc + c


def test_a_plan_has_what_users_need() -> None:
    plan = gemmsmith.plan(matrix(64, 64, False), matrix(64, 64, False), config=SMALL)
    facts = {"config", "origin", "problem", "why", "estimated_us", "epilogue", "workspace_bytes"}
    code = {"source", "ptx", "sass", "resources"}
    calls = {"run", "prepare", "simulate", "export"}
    assert {name for name in dir(plan) if not name.startswith("_")} == facts | code | calls


@settings(max_examples=80)
@given(
    m=extents, k=extents, planned_k=some.sampled_from([64, 63]), aligned=some.booleans(), data=some.data(),
    majors=some.tuples(some.booleans(), some.booleans(), some.booleans()), fused=some.booleans(),
    swap_ab=some.booleans(),
)  # fmt: skip
def test_a_plan_serves_every_size(
    m: int, k: int, planned_k: int, aligned: bool, data: Any, majors: Any, fused: bool, swap_ab: bool
) -> None:
    """With rows of D that are aligned as those planned for, which are its columns where it is column-major."""
    n = data.draw(ALIGNED if aligned else ODD, label="n")
    planned = (96, 64 if aligned else 63)
    if majors[2]:
        (m, n), planned = (n, m), planned[::-1]

    def arrays(m: int, n: int, k: int) -> dict[str, Any]:
        found = {"a": matrix(m, k, majors[0]), "b": matrix(k, n, majors[1]), "out": matrix(m, n, majors[2], np.nan)}
        return {**found, "operands": {"c": matrix(m, n, majors[2])}} if fused else found

    options = {"epilogue": add if fused else None, "config": SMALL.replace(swap_ab=swap_ab), "backend": "sim"}
    plan = gemmsmith.plan(**arrays(*planned, planned_k), **options)
    given = arrays(m, n, k)
    assert plan.run(**given) is given["out"]
    product = given["a"].astype(float) @ given["b"].astype(float)
    if fused:
        assert np.allclose(given["out"], product + given["operands"]["c"], rtol=2e-3, atol=2e-3)
    else:
        assert bounds.check(given["out"], given["a"], given["b"], FP32, FP16).is_ok


def test_other_alignment_is_another_kernel() -> None:
    plan = gemmsmith.plan(matrix(64, 64, False), matrix(64, 64, False), config=SMALL)
    for n in (63, 1):
        with pytest.raises(ArgumentError, match="a, b, out: their layouts need the kernel .* make a plan from arrays"):
            plan.run(matrix(64, 64, False), matrix(64, n, False))
    with pytest.raises(ArgumentError, match="a, b, out: their layouts need"):
        plan.run(matrix(64, 64, True), matrix(64, 64, False))


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_the_command_takes_hardly_any_k(k: int, layout: str, tmp_path: Any) -> None:
    options = ["--m", "128", "--n", "128", "--k", str(k), "--layout", layout, "--output", str(tmp_path)]
    done = CliRunner().invoke(main, ["run", *options, "--backend", "sim", "--json"])
    assert done.exit_code == 0, done.output
    assert '"result": "pass"' in done.output


@pytest.mark.parametrize("config", [SMALL, SMALL.replace(stages=4), Config()])
def test_resources_count_the_shared_memory_of_a_launch(config: Config) -> None:
    plan = gemmsmith.plan(gemmsmith.Spec((512, 512), "bf16"), gemmsmith.Spec((512, 512), "bf16"), config=config)
    planned = plan._planned
    assert plan.resources.shared_bytes == planned.kernel.shared_bytes + planned.compiled.resources.shared_bytes
    assert plan.resources.shared_bytes >= config.stages * (config.tile[0] + config.tile[1]) * config.tile[2] * 2


@pytest.mark.parametrize("x", [np.array(3, np.float32), np.ones(40, np.float32), np.ones((30, 40), np.float32)])
def test_an_operand_of_another_kind_is_refused(x: np.ndarray) -> None:
    a, b = np.ones((30, 64), BF16.numpy), np.ones((64, 40), BF16.numpy)
    plan = gemmsmith.plan(a, b, epilogue=lambda acc, x: acc * x, x=2.0, backend="sim")
    assert (plan.run(a, b, x=3.0) == 192).all()
    with pytest.raises(ArgumentError, match="epilogue: for these operands.* make a plan from arrays like these"):
        plan.run(a, b, x=x)


@pytest.mark.parametrize("backend", [["cuda"], {}, 3, None, "gpu"])
@pytest.mark.parametrize(
    "function", [gemmsmith.gemm, gemmsmith.plan, lambda a, b, backend: gemmsmith.pack(b, backend=backend)]
)
def test_a_backend_that_does_not_exist(function: Any, backend: Any) -> None:
    a, b = np.zeros((8, 16), np.float16), np.zeros((16, 8), np.float16)
    with pytest.raises(ArgumentError, match=r"backend: got .*; use one of auto, cuda, sim, reference"):
        function(a, b, backend=backend)
