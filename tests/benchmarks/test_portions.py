"""Benchmarks in parts: which jobs are left, and when they stop; the jobs of those that have several kinds."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import gemmsmith
from benchmarks import portions, timing
from benchmarks.ladder import speed as ladder
from benchmarks.speed import epilogues, fp8_epilogues, invariant, quantize
from benchmarks.suite import block_scaled

pytestmark = pytest.mark.torch


def test_parts_have_every_job_once() -> None:
    jobs = list(range(10))
    parts = [portions.missing(jobs, [], lambda row: row["job"], f"{i}/3") for i in range(3)]
    assert sorted(job for part in parts for job in part) == jobs
    assert portions.missing(jobs, [{"job": 3}, {"job": 99}], lambda row: row["job"], "0/1") == [0, 1, 2, *range(4, 10)]


def test_no_job_begins_late(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(100))
    assert list(portions.in_time("abcdef", 3, lambda: next(clock))) == ["a", "b", "c"]
    assert capsys.readouterr().out == "3 of 6 are left, for --resume\n"
    assert list(portions.in_time("abc", float("inf"))) == ["a", "b", "c"]


def test_rows_are_kept_if_asked(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    portions.add_options(parser)
    resumed = parser.parse_args(["--json", str(file), "--resume"])
    assert portions.load_rows(resumed) == []
    file.write_text(json.dumps({"rows": [{"m": 1}]}))
    assert portions.load_rows(resumed) == [{"m": 1}]
    assert portions.load_rows(parser.parse_args(["--json", str(file)])) == []


@pytest.mark.parametrize(
    ("script", "ended", "rows"),
    [(epilogues, 6, len(epilogues.SHAPES) * len(epilogues.CASES)),
     (invariant, 10, len(invariant.LAYERS) * len(invariant.ROWS)), (ladder, 2, len(ladder.SHAPES))],
)  # fmt: skip
def test_a_run_goes_on_where_one_was_ended(
    script: Any, ended: int, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In its n-th measurement, which may be amid a job's."""
    begun: list[Any] = []

    def measure(*job: Any) -> Any:
        begun.append(job)
        if len(begun) == ended:
            raise KeyboardInterrupt
        if script is ladder:
            return [defaultdict(lambda: 1.0, zip("mnk", job[1], strict=True))]
        return defaultdict(lambda: 1.0, zip(("m", "n", "k", "epilogue"), job, strict=False))

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(invariant, "require_same_rows", lambda n, k: None)
    monkeypatch.setattr(timing, "machine", dict)  # there is no GPU to name
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["script", "--json", str(file), "--resume"])
    with pytest.raises(KeyboardInterrupt):
        script.main()
    loaded = json.loads(file.read_text())["rows"]
    script.main()
    rows_ = json.loads(file.read_text())["rows"]
    assert 0 < len(loaded) < ended
    assert rows_[: len(loaded)] == loaded
    assert len({(r["m"], r["n"], r["k"], r.get("epilogue")) for r in rows_}) == len(rows_) == rows


def test_jobs_are_mixed() -> None:
    jobs = fp8_epilogues.jobs()
    assert len(jobs) == len(set(jobs)) == sum(map(len, fp8_epilogues.SUITE.values()))
    assert {what for what, *_ in jobs[: len(fp8_epilogues.SUITE)]} == set(fp8_epilogues.SUITE)


def test_a_summary_of_what_was_measured() -> None:
    row = {"m": 1, "n": 1, "k": 1, "us": 1.0}
    rows = [{**row, "what": "along_k", "along_m_ratio": 0.99}]
    rows += [{**row, "what": "gelu", "bare_ratio": x} for x in (2.0, 0.5)]
    assert fp8_epilogues.summary(rows) == [
        "along_k      1 shapes   along_m / ours 0.990, least 0.990",
        "gelu         2 shapes   bare / ours 1.000, least 0.500",
    ]


def test_quantizing_is_measured_each_way_once() -> None:
    jobs = quantize.jobs([(1, 2)], [*quantize.RECIPES, ""], quantize.LAYOUTS)
    assert len(jobs) == len(set(jobs)) == 3 * (3 * 2 + 1) + 1
    assert (1, 2, "", "row-major", True) in jobs


@pytest.mark.parametrize("what", ["along_k", *fp8_epilogues.EPILOGUES])
def test_epilogues_have_kernels(what: str) -> None:
    """For stand-ins of the arrays that a GPU would have."""
    (a, b), scales = block_scaled((300, 512, 384))
    bias, c = gemmsmith.Spec((512,), "bf16"), gemmsmith.Spec((300, 512), "bf16")
    given = {"gelu": {"bias": bias}, "added": {"c": c}}.get(what, {})
    plan = gemmsmith.plan(a, b, **scales, epilogue=fp8_epilogues.EPILOGUES.get(what), operands=given)
    assert plan.spec.promoted
    assert plan.source
