"""Every kind of GEMM: their plans, the detection of wrong results, rows and summaries.

Tiny GEMMs run on the CPU, by the reference; their times need a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.benchmarks.stubs import on_the_cpu  # noqa: E402

from benchmarks import contest  # noqa: E402
from benchmarks.speed import kinds, layers  # noqa: E402
from benchmarks.speed.kinds import KINDS, Case, Job  # noqa: E402

pytestmark = pytest.mark.torch

PACE = contest.Pace(1e-5, 3, 1e-5)
ON_THE_CPU = [name for name in KINDS if name != "fp8_blocks"]  # whose operands are fp8.py's, on the GPU
TINY = [Job(name, layout, 3 if name == "bmm" else 1, 64, 48, 96)
        for name in ON_THE_CPU for layout in dict.fromkeys(layout for layout, _ in KINDS[name].products)]  # fmt: skip


def test_every_product_has_a_plan_for_its_operands() -> None:
    jobs_ = kinds.jobs()
    assert len(set(jobs_)) == len(jobs_) == sum(len(kind.products) for kind in KINDS.values())
    for job in jobs_:
        plan = kinds.planned(job)
        problem = plan.binding.problem.T if plan.config.swap_ab else plan.binding.problem
        assert problem.m * problem.batch == job.batch * job.m, job  # a batch may be folded into M
        assert (problem.n, problem.k) == job[4:], job
        assert plan.spec.promoted == (job.kind in ("fp8", "fp8_blocks", "3xtf32")), job


def test_kinds_have_the_shapes_that_are_asked_for() -> None:
    jobs_ = {name: {job[2:] for job in kinds.jobs([name])} for name in KINDS}
    assert all(len(jobs_[name]) >= 10 for name in ("bmm", "fp8_fast", "fp8", "fp8_rows", "fp8_blocks", "fp32"))
    assert (1, 512, 4096, 14336) in jobs_["fp8_fast"]
    assert {(1, 256, 4096, 4096), (1, 1000, 5120, 5120)} <= jobs_["fp32"]
    assert kinds.jobs(["tf32"], [(1, 2, 3)]) == [Job("tf32", layout, 1, 1, 2, 3) for layout in kinds.ALL_LAYOUTS]


@pytest.mark.parametrize("job", TINY, ids=lambda job: f"{job.kind}-{job.layout}")
def test_a_row_is_measured_and_checked(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt's algorithms are two stand-ins: a correct one, and one that computes something else."""
    on_the_cpu(monkeypatch)

    def right(a: Any, b: Any, d: Any, *scales: Any) -> None:
        case = Case.__new__(Case)
        case.a, case.b, case.scales = a, b, dict(zip("ab", scales, strict=False))
        d.copy_(torch.matmul(*case.dequantized()))

    def wrong(a: Any, b: Any, d: Any, *scales: Any) -> None:
        d.zero_()

    monkeypatch.setattr(kinds.cublaslt, "algorithms", lambda a, b, d, scales=None, **_: [wrong, right])
    row = kinds.measure(job, PACE, "cpu")
    assert kinds.job_of(row) == job
    assert row["lt_algorithms"] == 1
    assert row["lt_ratio"] == 1
    assert any(name.startswith("lt: ") and "over its bound" in why for name, why in row["refused"].items())
    assert [len(times) for times in row["times"].values()] == [3] * len(row["times"])
    assert row["sets"] == contest.MIN_SETS
    json.dumps(row)
    assert job.name in kinds.told(row)


@pytest.mark.parametrize("job", TINY, ids=lambda job: f"{job.kind}-{job.layout}")
def test_what_is_off_is_told(job: Job) -> None:
    case = Case(job, "cpu")
    check = kinds.check_of(case, KINDS[job.kind])
    product = torch.matmul(*case.dequantized())
    assert check(case), "poisoned"
    case.d.copy_(product)
    assert not check(case)
    assert check(case), "poisoned again"
    case.d.copy_(product)
    case.d[..., -1, -1] = 4 * case.d.abs().max() + 1
    assert check(case)


def test_our_wrong_result_is_an_error() -> None:
    with pytest.raises(contest.WrongError, match="ours: off"):
        contest.compared(lambda c: None, {}, dict, [None], lambda c: "off", PACE)


def test_the_summary_has_a_line_for_each_group_and_peer() -> None:
    sizes = {"kind": "bf16", "batch": 1, "m": 2, "n": 3}
    rows = [{**sizes, "layout": "nt", "k": 4, "torch_ratio": 2.0, "lt_ratio": 0.5},
            {**sizes, "layout": "nt", "k": 5, "torch_ratio": 0.5},
            {**sizes, "layout": "nn", "k": 4, "torch_ratio": 1.0},
            {**sizes, "layout": "nn", "k": 5, "error": "it fell"}]  # fmt: skip
    assert contest.summary(rows, kinds.group, kinds.name) == [
        "bf16 nt    2 GEMMs   torch / ours   geometric mean 1.000   minimum 0.500 at 2x3x5 nt",
        "bf16 nt    1 GEMMs   lt    / ours   geometric mean 0.500   minimum 0.500 at 2x3x4 nt",
        "bf16 nn    1 GEMMs   torch / ours   geometric mean 1.000   minimum 1.000 at 2x3x4 nn",
        "bf16 nn FAILED 2x3x5 nn: it fell",
    ]
    assert contest.summary([], kinds.group, kinds.name) == []


def test_rows_are_written_one_by_one_and_failures_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(contest, "machine", lambda: {"gpu": "a chip"})
    monkeypatch.setattr(contest, "known_us", lambda: 207.0)
    monkeypatch.setattr(contest.torch.cuda, "empty_cache", lambda: None)
    file, tried = tmp_path / "rows.json", []
    all_jobs = kinds.jobs(["fp32"])[:3]

    def measure(job: Job) -> contest.Row:
        tried.append(job)
        if len(tried) == 2:
            raise RuntimeError("it fell")
        return {**job._asdict(), "torch_ratio": 1.0}

    def rows() -> list[contest.Row]:
        words = ["--json", str(file), "--resume", "--commit", "abc"]
        arguments = contest.parser_for("about").parse_args(words)
        assert isinstance(arguments, argparse.Namespace)
        return contest.measured(arguments, all_jobs, kinds.job_of, lambda left: None, measure, str)

    assert [row.get("error") for row in rows()] == [None, "RuntimeError: it fell", None]
    assert json.loads(file.read_text())["machine"]["commit"] == "abc"
    assert [row.get("error") for row in rows()] == [None] * 3
    assert tried == [*all_jobs, all_jobs[1]]


@pytest.mark.parametrize(("script", "words"), [(kinds, ["--kind", "fp32"]), (layers, []), (layers, ["--layouts"])])
def test_scripts_run_dry(
    script: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(contest, "compile_all", compiled.extend)
    monkeypatch.setattr(sys, "argv", ["script", "--dry", "--shape", "64x48x96", *words])
    script.main()
    assert "ready after" in capsys.readouterr().out
    assert compiled
