"""Everything at once on a GPU, in processes of its own; and, on the CPU, that the program counts what it should."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.gpu import grouped_products, harness, judges, stress  # noqa: E402

import gemmsmith  # noqa: E402

SECONDS = float(os.environ.get("GEMMSMITH_STRESS_SECONDS", "60"))


def program(tmp_path: Path, *arguments: object) -> tuple[int, dict, str]:
    """The program's exit code, its JSON and what it printed."""
    saved = tmp_path / "stress.json"
    command = [sys.executable, stress.__file__, "--json", str(saved), *map(str, arguments)]
    done = subprocess.run(command, cwd=harness.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    return done.returncode, json.loads(saved.read_text()), done.stdout


@pytest.mark.gpu
def test_everything_at_once(tmp_path: Path) -> None:
    code, saved, _ = program(tmp_path, "--seconds", SECONDS)
    assert {name for name, result in saved["modes"].items() if stress.bad(result)} == set()
    assert set(saved["modes"]) == set(stress.MODES)
    assert code == 0


def test_the_program_without_a_gpu(tmp_path: Path) -> None:
    modes = [
        "epilogues_mixed",
        "atomic",
        "ragged",
        "prepared",
        "graphs",
        "grouped_k",
        "grouped_masked",
        "loss_heads",
        "processes",
    ]
    code, saved, printed = program(
        tmp_path, "--device", "cpu", "--seconds", 1, "--threads", 2, "--only", ",".join(modes), "--seed", 5
    )
    assert code == 0
    assert list(saved["modes"]) == modes
    assert all(result["runs"] for result in saved["modes"].values())
    assert saved["where"]["seed"] == 5
    assert "seed 5" in printed


@pytest.mark.parametrize("name", stress.SCHEDULES)
def test_every_schedule_is_one_of_a_kernel(name: str) -> None:
    """None is left out for a ConfigError where products are bare, and FEW has one of each."""
    a, b = gemmsmith.Spec((1000, 4096), "bf16"), gemmsmith.Spec((4096, 2112), "bf16")
    for config in stress.SCHEDULES[name]:
        assert gemmsmith.plan(a, b, config=config)._planned.kernel
    assert stress.SCHEDULES[name][0] in stress.FEW


@pytest.mark.parametrize("config", stress.GROUPED, ids=str)
def test_every_config_is_one_of_a_grouped_kernel(config: gemmsmith.Config | None) -> None:
    a, b, table = (gemmsmith.Spec(*x) for x in (((1000, 520), "bf16"), ((32, 520, 1024), "bf16"), ((32,), "int32")))
    assert gemmsmith.plan(a, b, offsets=table, grouping=gemmsmith.Grouping("offsets"), config=config)._planned.kernel


@pytest.mark.parametrize("form", stress.FORMS)
def test_a_table_of_the_last_replay_is_counted(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a graph had not read the new one."""
    same = stress.run_mode(f"grouped_{form}_graphs", device="cpu", seconds=0.5, seed=1, threads=2)
    assert not stress.bad(same)
    renew = grouped_products.GroupedProduct.renew

    def stale(self: grouped_products.GroupedProduct, rng: random.Random) -> None:
        before = {name: x.clone() for name, x in self.tables.items()}
        renew(self, rng)
        self.stale, self.tables = before, dict(self.tables)  # type: ignore[attr-defined]

    def call(self: grouped_products.GroupedProduct, outs=None):
        return once(dataclasses.replace(self, tables=getattr(self, "stale", self.tables)), outs)

    once = grouped_products.GroupedProduct.__call__
    monkeypatch.setattr(grouped_products.GroupedProduct, "renew", stale)
    monkeypatch.setattr(grouped_products.GroupedProduct, "__call__", call)
    actual = stress.run_mode(f"grouped_{form}_graphs", device="cpu", seconds=0.5, seed=1, threads=2)
    assert actual["wrong"] > 0
    assert stress.bad(actual)


@pytest.mark.parametrize("name", ["auto", "prepared", "graphs"])
def test_a_wrong_element_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of every tenth run is off by what no rounding explains."""
    runs = [0]

    def off(self: stress.Product, outs=None):
        results = once(self, outs)
        runs[0] += 1
        if runs[0] > 20 and runs[0] % 10 == 0:
            results[0][-1, -1] += 1
        return results

    once = stress.Product.__call__
    monkeypatch.setattr(stress.Product, "__call__", off)
    monkeypatch.setattr(stress.Product, "prepare", lambda self, outs: lambda: self(outs))
    actual = stress.run_mode(name, device="cpu", seconds=0.5, seed=1, threads=2)
    assert actual["wrong"] > 0
    assert actual["different"] >= actual["wrong"]
    assert actual["runs"] > actual["different"]
    assert stress.bad(actual)


def test_an_exception_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress.Worker, "judge", lambda self, made: 1 / 0)
    actual = stress.run_mode("auto", device="cpu", seconds=0.2, seed=1, threads=2)
    assert actual["errors"] > 0
    assert "ZeroDivisionError" in actual["first_errors"][0]
    assert stress.bad(actual)


def test_a_child_that_dies_ends_one_item() -> None:
    body = """
import os, sys
from tests.gpu.harness import say
for i in range(int(sys.argv[1]), 4):
    say({"at": i - int(sys.argv[1])})
    if i in (1, 2):
        print("item", i, "ends", flush=True)
        os._exit(2 + i)
    say({"runs": i})
"""
    told: list[dict] = []
    harness.supervise(lambda first: [sys.executable, "-c", body, str(first)], 4, 60, told.append)
    assert told == [{"item": 0, "runs": 0}, {"item": 1, "died": "CUDA error"}, {"item": 2, "died": "hang"},
                    {"item": 3, "runs": 3}]  # fmt: skip


def test_a_child_that_says_nothing_is_killed() -> None:
    told: list[dict] = []
    command = [sys.executable, "-c", "import time; print('{\"at\": 0}', flush=True); time.sleep(60)"]
    harness.supervise(lambda first: command, 1, 1, told.append)
    assert told == [{"item": 0, "died": "exit code -9"}]


def test_a_hang_says_what_all_were_doing() -> None:
    body = """
import time
from tests.gpu.harness import Watchdog
with Watchdog(0.5, "mode streams, seed 7") as dog:
    dog.at(0, "calls of 64x64x64")
    dog.at(1, "replays")
    dog.gone(1)
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", body], cwd=harness.ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == harness.HANG
    assert "HANG: mode streams, seed 7" in done.stdout
    assert "calls of 64x64x64" in done.stdout
    assert "replays" not in done.stdout
    assert "File" in done.stderr


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_the_bounds_are_those_of_the_reference(rng, accumulate: str) -> None:
    """Twice what is just allowed is refused, half of it is not, and so it is by bounds.check."""
    from gemmsmith.arrays import as_numpy
    from gemmsmith.backends.reference import bounds
    from gemmsmith.core.dtypes import as_dtype

    a, b = (torch.from_numpy(rng.standard_normal(shape)).half() for shape in ((33, 70), (70, 24)))
    expected = judges.exact(a, b)
    bound = judges.product_bound(a, b, expected, accumulate, torch.float32)
    for factor, right in ((0.5, True), (2, False)):
        out = (expected + factor * bound).float()
        assert (judges.wrong(out, expected, bound) == 0) == right
        report = bounds.check(as_numpy(out), as_numpy(a), as_numpy(b), as_dtype(accumulate), as_dtype("fp32"))
        assert (report.num_out_of_bound == 0) == right
    out = gemmsmith.gemm(a, b)
    out[3, 4] = float("nan")
    assert judges.wrong(out, expected, judges.product_bound(a, b, expected, "fp32", out.dtype)) == 1
