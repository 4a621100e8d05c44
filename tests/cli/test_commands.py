"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gemmsmith.cli import main

SMALL = ["--m", "200", "--n", "136", "--k", "96", "--tile", "64x64x32", "--stages", "3"]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(main, list(words))


def good(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("design", ["warp_specialized", "multistage"])
def test_run_prints_a_table_and_writes_the_files(call, tmp_path: Path, design: str) -> None:
    text = good(call("run", *SMALL, "--backend", "sim", "--design", design, "--cluster", "2x1"))
    for word in ("200x136x96 bf16", design, "cluster 2x1", "right", "registers", "0 bytes spilled", "simulated cycles"):
        assert word in " ".join(text.split())
    source = next(tmp_path.glob("gemmsmith-output/*.cu")).read_text()
    assert f"{design}_64x64x32" in source
    assert (tmp_path / "gemmsmith-output/timeline.png").stat().st_size > 5000


def test_hints_and_programmatic_launch(call) -> None:
    source = good(call("show", *SMALL, "--evict", "first", "last", "--pdl"))
    assert "griddepcontrol.launch_dependents" in source
    assert "griddepcontrol.launch_dependents" not in good(call("show", *SMALL))
    assert "0x12f0000000000000" in source
    assert "0x14f0000000000000" in source


@pytest.mark.parametrize("options", [("--splits", "0"), ("--design", "pingpong"), ("--design", "multistage")])
def test_options_over_a_config_in_lockstep(call, options: tuple[str, str]) -> None:
    sizes = ("--m", "8192", "--n", "8192", "--k", "8192")
    assert "wait_reached" in good(call("show", *sizes))
    assert "wait_reached" not in good(call("show", *sizes, *options))
    assert "it takes warp_specialized" in call("show", *sizes, *options, "--lockstep").output


def test_results_that_leave_through_the_stages(call) -> None:
    assert "shared memory      0: out" in good(call("show", *SMALL, "--reuse"))
    assert "shared memory      0: out" not in good(call("show", *SMALL))


def test_json(call) -> None:
    rows = json.loads(good(call("run", *SMALL, "--backend", "sim", "--json")))
    assert rows["result"] == "right"
    assert rows["hazards"] == "none"


def test_reference(call) -> None:
    assert "float64" in good(call("run", *SMALL, "--backend", "reference", "--dtype", "fp16", "--layout", "tn"))


def test_simulate_with_another_seed(call) -> None:
    out = good(call("simulate", *SMALL, "--seed", "7", "--dtype", "fp16", "--accumulate", "fp16", "--json"))
    assert json.loads(out)["result"] == "right"


def test_show(call) -> None:
    assert "__global__" in good(call("show", *SMALL))
    assert ".target sm_90a" in good(call("show", *SMALL, "--ptx"))
    assert "HGMMA" in good(call("show", *SMALL, "--sass"))
    assert "spill stores 0" in good(call("show", *SMALL, "--resources"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--tile", "100x64x64"], "tile M: got 100; use a multiple of 64"),
        (["run", "--tile", "64x64"], "is not 3 integers joined by x"),
        (
            ["show", "--tile", "256x256x64"],
            "registers: the accumulator of 128x256 takes 256 a thread, 56 more than fit",
        ),
        (["show", "--tile", "128x256x64", "--stages", "9"], "shared memory:"),
        (["show", "--dtype", "bf16", "--accumulate", "fp16"], "no such instruction exists"),
        (["show", "--dtype", "fp8"], "use one of bf16, fp16, fp32"),
    ],
)
def test_errors_are_one_clear_line(call, words: list[str], message: str) -> None:
    result = call(*words)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.gpu
def test_run_on_the_gpu(call) -> None:
    rows = json.loads(good(call("run", "--m", "1000", "--n", "1000", "--k", "1000", "--json")))
    assert rows["backend"] == "cuda"
    assert rows["result"] == "right"
    assert "TFLOP/s" in rows["speed"]
