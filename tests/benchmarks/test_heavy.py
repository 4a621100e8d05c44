"""Heavy epilogues against their bounds: plans, costs, checks and rows. Their times need a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.benchmarks.stubs import on_the_cpu  # noqa: E402

import gemmsmith  # noqa: E402
from benchmarks import contest, random_epilogues, suite  # noqa: E402
from benchmarks.rows import read  # noqa: E402
from benchmarks.speed import epilogues, fused, heavy  # noqa: E402
from benchmarks.speed.fused import Case, Job, planned  # noqa: E402

pytestmark = pytest.mark.torch

PACE = contest.Pace(1e-5, 2, 1e-5)


def test_jobs_are_every_case_by_layout_and_depth_and_thirty_graphs() -> None:
    jobs = heavy.jobs(30)
    assert len(set(jobs)) == len(heavy.CASES) * 8 + 30
    assert Job("bce", "nn", 4096, 65536, 1024) in jobs
    assert {job.n for job in jobs if job.epilogue == "bce" and job.k > 1024} == {16384}
    assert heavy.jobs(2, [(1, 2, 3)])[:2] == [Job("bce", "nt", 1, 2, 3), Job("cross_entropy", "nt", 1, 2, 3)]


def test_shapes_of_random_graphs_occur_nowhere_else() -> None:
    of_suite = {*suite.SUITE, *suite.UNALIGNED, *suite.UNSEEN, *suite.TRAINING, *suite.SQUARES, *suite.OBLONG,
                *(x for layer in (*suite.SWEPT, *suite.TRAINED) for x in suite.roles(layer).values())}  # fmt: skip
    others = {*of_suite, *epilogues.SHAPES, *epilogues.FUNCTION_SHAPES, *fused.LAYERS}
    assert not {shape[1:] for shape in heavy.RANDOM_SHAPES} & {shape[1:] for shape in others}


def test_random_graphs_have_all_sizes() -> None:
    sizes = [len(fused.epilogue_of(f"random {seed}").function.nodes) for seed in range(31)]
    assert sizes == list(range(10, 41))
    assert random_epilogues.of_size(20, 3) == random_epilogues.of_size(20, 3) != random_epilogues.of_size(20, 4)


def test_every_kernel_can_be_built() -> None:
    for job in heavy.jobs(10):
        assert planned(job).kernel
        configs = heavy.bare_configs(heavy.bare_of(job))
        assert configs[0] == planned(heavy.bare_of(job)).config
        assert heavy.FIRST <= len(configs) <= heavy.FIRST + 1


@pytest.mark.parametrize(
    ("name", "special", "nbytes"),
    [("bce", 2, 4), ("cross_entropy", 1, 0), ("dgelu", 2, 4), ("dropout_residual", 0, 5), ("rms_statistics", 0, 2),
     ("layer_norm_statistics", 0, 2), ("dswiglu", 2, 10), ("dswiglu_without_hidden", 2, 8),
     ("swiglu_with_inputs", 0.5, 3)],
)  # fmt: skip
def test_costs_of_an_element(name: str, special: float, nbytes: float) -> None:
    floors = heavy.floors(Job(name, "nt", 4096, 14336, 1024), 1500)
    assert (floors["special_per_element"], floors["bytes_per_element"]) == (special, nbytes)
    assert floors["special_us"] == pytest.approx(special * 4096 * 14336 / (16 * 132 * 1500))
    assert floors["floor_us"] == max(floors["bytes_us"], floors["special_us"], floors["issue_us"])


def test_reductions_and_rare_paths_count() -> None:
    def instructions(name: str) -> float:
        return heavy.floors(Job(name, "nt", 256, 256, 64), 1500)["instructions_per_element"]

    assert instructions("rms_statistics") == 2
    assert instructions("layer_norm_statistics") == 3
    assert instructions("cross_entropy") == 5
    spec = gemmsmith.plan(*suite.specs((8, 8, 8)), epilogue=lambda acc: acc.sin()).binding.spec
    assert 20 < heavy.cost_of(spec).instructions < 30


def test_bounds() -> None:
    assert heavy.bound_us(Job("bce", "nt", 1, 2, 3), 100, 90) == pytest.approx(105)
    assert heavy.bound_us(Job("bce", "nt", 1, 2, 3), 100, 100) == pytest.approx(110)
    assert heavy.bound_us(Job("swiglu_with_inputs", "nt", 1, 2, 3), 100, 90) == pytest.approx(112)
    assert heavy.bound_us(Job("random 1", "nt", 1, 2, 3), 100, 90) == pytest.approx(110)


@pytest.mark.parametrize("name", ["bce", "cross_entropy", "swiglu_with_inputs", "random 5", "random 19"])
def test_a_row_is_measured_and_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch, fused)
    job = Job(name, "nn", 128, 192, 64)
    row = heavy.measure(job, PACE, "cpu")
    assert fused.job_of(row) == job
    assert (row["us"], row["bare_us"], row["refused"], row["sets"]) == (10, 10, {}, contest.MIN_SETS)
    assert row["of_bound"] == pytest.approx(10 / row["bound_us"])
    json.dumps(row)
    assert job.name in heavy.told(row)
    assert contest.summary([row], lambda r: heavy.kind_of(fused.job_of(r)), lambda r: "")


@pytest.mark.parametrize("name", ["layer_norm_statistics", "cross_entropy", "random 12"])
def test_columns_that_are_missing_are_noticed(name: str) -> None:
    job = Job(name, "nt", 64, 4096, 64)
    case = Case(job, "cpu")
    check, plan = fused.check_of(case, job), planned(job)
    plan.run(case.a, case.b, case.out, operands=case.operands)
    assert not check(case)
    assert check(case), "poisoned"
    case.b[:, -64:] = 0
    plan.run(case.a, case.b, case.out, operands=case.operands)
    assert check(case)


def test_rows_are_written_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_the_cpu(monkeypatch, fused)
    measure = heavy.measure
    monkeypatch.setattr(heavy, "measure", lambda job, pace: measure(job, PACE, "cpu"))
    monkeypatch.setattr(contest, "compile_all", lambda kernels: None)
    monkeypatch.setattr(contest, "machine", lambda: {"gpu": "a chip"})
    monkeypatch.setattr(contest, "known_us", lambda: 207.0)
    monkeypatch.setattr(contest.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(heavy, "RANDOM_SHAPES", [(128, 192, 64)])
    words = ["script", "--json", str(tmp_path / "rows.json.xz"), "--resume", "--random", "2", "--shape", "128x192x64"]
    for of_layout, left in ((["--layout", "nn"], "11 of 11"), ([], "11 of 22"), ([], "0 of 22")):
        monkeypatch.setattr(sys, "argv", [*words, *of_layout])
        heavy.main()
        assert f"{left} GEMMs\n" in capsys.readouterr().out
    kept = read(tmp_path / "rows.json.xz")["rows"]
    assert len({fused.job_of(row) for row in kept}) == 22
    assert not any("error" in row for row in kept)


def test_the_script_runs_dry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(contest, "compile_all", compiled.extend)
    monkeypatch.setattr(sys, "argv", ["script", "--dry", "--random", "2", "--epilogue", "random", "--layout", "nt"])
    heavy.main()
    assert "1 of 1 GEMMs" in capsys.readouterr().out
    assert compiled
