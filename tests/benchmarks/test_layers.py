"""A training step's GEMMs and fused ones: their plans, configs and checks. Their times need a GPU."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
from tests.benchmarks.stubs import on_the_cpu  # noqa: E402

from benchmarks import contest  # noqa: E402
from benchmarks.speed import fused, kinds, layers  # noqa: E402
from benchmarks.suite import OBLONG, SQUARES, TRAINED  # noqa: E402

pytestmark = pytest.mark.torch

FUSED_TINY = [fused.Job(epilogue, layout, 128, 192, 64) for epilogue in (*fused.EPILOGUES, "random 19")
              for layout in ("nn", "tn")]  # fmt: skip


def test_products_of_a_step_are_sixty_and_none_is_tuned() -> None:
    jobs = layers.products(TRAINED)
    assert len(set(jobs)) == 60
    assert [sum(job.layout == layout for job in jobs) for layout in layers.ROLES] == [20, 20, 20]
    assert {kinds.planned(job).origin for job in jobs} == {"chosen by the model"}


def test_layouts_are_eight_of_each_shape() -> None:
    jobs = layers.layouts(SQUARES + OBLONG)
    assert len(set(jobs)) == 160
    assert all(kinds.planned(job).spec for job in jobs)


def test_fused_products_are_forty_with_configs_that_can_be_built() -> None:
    jobs = fused.jobs()
    assert len(set(jobs)) == 40
    for job in jobs[:8]:
        configs = fused.contenders(job, 20)
        assert configs[0] == fused.planned(job).config
        assert len(set(configs)) == len(configs) == 20
        assert sum(c.tile[1] % 64 == 0 and not c.swap_ab for c in configs) >= 4, job


@pytest.mark.parametrize("job", FUSED_TINY, ids=lambda job: f"{job.epilogue}-{job.layout}")
def test_fused_products_are_swept_and_checked(job: fused.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch, fused)
    configs = fused.contenders(job, 6)
    row = fused.swept(job, configs, contest.Pace(1e-5, 2, 1e-5), "cpu")
    assert not row["wrong"]
    assert len(row["configs"]) == len(configs)
    assert fused.job_of(row) == job
    assert row["best_ratio"] == 1
    json.dumps(row)
    assert job.name in fused.told(row)
    case = fused.Case(job, "cpu")
    assert fused.check_of(case, job)(case), "poisoned"


def test_the_summary_of_fused_products_has_the_worst() -> None:
    rows = [{**fused.Job("bare", "nn", 1, 2, k)._asdict(), "best_ratio": ratio} for k, ratio in ((3, 0.5), (4, 1.0))]
    assert fused.summary([*rows, {"error": "it fell"}]) == [
        "bare nn          2 GEMMs   chosen / fastest   geometric mean 1.414   maximum 2.000 at bare 1x2x3 nn",
        "all              2 GEMMs   chosen / fastest   geometric mean 1.414   maximum 2.000 at bare 1x2x3 nn",
    ]
