"""Random problems on a GPU, by several processes; and, on the CPU, that the fuzzer finds what is wrong."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.gpu import fuzz, harness  # noqa: E402

import gemmsmith  # noqa: E402
from gemmsmith.host.plans import Plan  # noqa: E402

PROBLEMS = int(os.environ.get("GEMMSMITH_FUZZ_PROBLEMS", "200"))
CPU = fuzz.LIMITS["cpu"]


def program(tmp_path: Path, *arguments: object) -> tuple[int, dict, str]:
    """The program's exit code, its JSON and what it printed."""
    report = tmp_path / "fuzz.json"
    command = [sys.executable, fuzz.__file__, "--json", str(report), *map(str, arguments)]
    done = subprocess.run(command, cwd=harness.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    return done.returncode, json.loads(report.read_text()), done.stdout


@pytest.mark.gpu
def test_random_problems_on_a_gpu(tmp_path: Path) -> None:
    code, report, _ = program(tmp_path, "--count", PROBLEMS, "--processes", min(8, os.cpu_count() or 1))
    assert report["failed"] == []
    assert report["problems"] == PROBLEMS
    assert code == 0


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_random_problems(device: str, rng: np.random.Generator) -> None:
    first = int(rng.integers(2**40))
    results = {seed: fuzz.attempt(seed, device) for seed in range(first, first + (30 if device == "cpu" else 4))}
    assert {seed: r["failed"] for seed, r in results.items() if "failed" in r} == {}


def test_the_program_counts_by_processes(tmp_path: Path) -> None:
    code, report, printed = program(tmp_path, "--count", 7, "--processes", 2, "--device", "cpu", "--seed", 40)
    assert code == 0
    assert report["problems"] == 7
    assert sum(report["epilogues"].values()) == sum(report["configs"].values()) == 7
    assert "first seed 40" in printed


def test_a_seed_is_a_problem() -> None:
    assert [fuzz.problem(seed, CPU) for seed in range(50)] == [fuzz.problem(seed, CPU) for seed in range(50)]
    trials = [fuzz.Trial(fuzz.problem(3, CPU), "cpu") for _ in range(2)]
    assert trials[0].plan.config == trials[1].plan.config
    assert torch.equal(trials[0].a, trials[1].a)


def test_problems_are_of_every_kind() -> None:
    there = [fuzz.problem(seed, fuzz.LIMITS["cuda"]) for seed in range(3000)]
    assert {p.epilogue for p in there} == {"bare", *fuzz.EPILOGUES}
    assert {(p.dtype, p.accumulate, p.output) for p in there} >= set(fuzz.DTYPES)
    assert {p.batch for p in there} == {None, 0, 1, 2, 3, 7}
    for of in (lambda p: p.m, lambda p: p.n, lambda p: p.k):
        sizes = [of(p) for p in there]
        assert min(sizes) == 0
        assert 1 in sizes
        assert max(sizes) > 4096
    limits = fuzz.LIMITS["cuda"]
    assert all(2 * (p.batch or 1) * p.m * p.n * p.k <= limits.flops for p in there)
    orders = {layout.order for p in there for layout in (p.a, p.b)}
    assert len(orders) == 6
    assert {layout.repeated for p in there for layout in (p.a, p.b)} == {None, 0, 1, 2}


def test_configs_suit_and_are_of_every_kind(rng: np.random.Generator) -> None:
    """By chance, but with every choice, and no small part of them possible."""
    dice = random.Random(int(rng.integers(2**32)))
    a, b = gemmsmith.Spec((300, 200), "bf16"), gemmsmith.Spec((200, 400), "bf16")
    good = []
    for _ in range(400):
        config = fuzz.random_config(dice)
        try:
            gemmsmith.plan(a, b, config=config)
        except gemmsmith.ConfigError:
            continue
        good.append(config)
    assert len(good) > 60
    assert {c.design for c in good} == {"cooperative", "tma", "pingpong"}
    for of in ("swap_ab", "streaming_stores", "alias_epilogue", "serpentine", "sync_clusters"):
        assert {getattr(c, of) for c in good} == {False, True}
    assert {c.splits for c in good} >= {0, 1, 2}
    assert {c.cluster_splits for c in good} >= {1, 2}


def test_layouts_place_arrays_among_guards(rng: np.random.Generator) -> None:
    dice = random.Random(int(rng.integers(2**32)))
    for dtype in fuzz.TORCH.values():
        for shape in ((3, 5, 7), (5, 7), (7,), (), (0, 5), (2, 5, 1)):
            layout = fuzz.Layout.random(dice, written=True)
            store, view = layout.place(shape, dtype, "cpu")
            assert view.shape == shape
            assert view.float().isnan().all()
            values = torch.rand(shape)
            view.copy_(values)
            assert torch.equal(view.float(), values.to(dtype).float())  # no element twice
            assert fuzz.clear(store, view)
            assert view.float().isnan().all()
            store[-1] = 0
            assert not fuzz.clear(store, view)


def first_with(like, most: int = 2000) -> int:
    """The first seed whose problem is so, and has elements."""
    there = (fuzz.problem(seed, CPU) for seed in range(most))
    return next(p.seed for p in there if like(p) and 0 not in (*p.shape, p.k) and p.data == "normal")


def broken(monkeypatch: pytest.MonkeyPatch, harm) -> None:
    """Every run does `harm` to the first matrix that it gives."""
    once = Plan.run

    def run(self, *args, **more):
        done = once(self, *args, **more)
        harm(done[0] if isinstance(done, tuple) else next(iter(done.values())) if isinstance(done, dict) else done)
        return done

    monkeypatch.setattr(Plan, "run", run)


@pytest.mark.parametrize("epilogue", ["bare", "row"])
def test_a_wrong_element_is_found(epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = first_with(lambda p: p.epilogue == epilogue and p.way == "plan")
    assert "failed" not in fuzz.attempt(seed, "cpu")
    broken(monkeypatch, lambda out: out.view(-1)[-1].add_(50) if out.is_contiguous() else out[..., -1, -1].add_(50))
    assert "AssertionError" in fuzz.attempt(seed, "cpu")["failed"]


def test_a_write_beside_the_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = first_with(lambda p: p.epilogue == "bare" and p.way == "plan" and p.outs == "first")

    def write_outside(out: torch.Tensor) -> None:
        end = out.storage_offset() + sum((n - 1) * s for n, s in zip(out.shape, out.stride(), strict=True))
        out.as_strided((1,), (1,), end + 1).fill_(1)

    broken(monkeypatch, write_outside)
    assert "written outside" in fuzz.attempt(seed, "cpu")["failed"]


def test_other_bits_the_second_time_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = first_with(lambda p: p.epilogue == "bare" and p.way == "plan" and (p.output or p.dtype) == "fp32")
    scale = iter([1.0, 1 + 2**-20])
    broken(monkeypatch, lambda out: out.mul_(next(scale)))
    assert "other bits" in fuzz.attempt(seed, "cpu")["failed"]
