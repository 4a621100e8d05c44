"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import base64
import gzip
import inspect
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.backends.cuda import compiler
from gemmsmith.backends.reference.bounds import Report
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.cli import commands, main
from gemmsmith.cli import ladder as ladder_picture
from gemmsmith.cli.execute import Outcome
from gemmsmith.cli.group import COMMANDS, find_command
from gemmsmith.cli.options import Integers
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.graph.frontend.fusions import NAMED_FUSIONS
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.measured_configs import Entry, key_of
from gemmsmith.tuning.search import Measured
from gemmsmith.tuning.tuned_table import builtin_table

FAULT = "internal error in gemmsmith"

SMALL = ["--m", "200", "--n", "136", "--k", "96", "--tile", "64x64x32", "--stages", "3"]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(main, list(words))


def good(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("design", ["cooperative", "tma"])
def test_run_prints_a_table_and_writes_the_files(call, tmp_path: Path, design: str) -> None:
    text = good(call("run", *SMALL, "--backend", "sim", "--design", design, "--cluster", "2x1"))
    for word in ("200x136x96 bf16", design, "cluster 2x1", "pass", "registers", "0 bytes spilled", "simulated cycles"):
        assert word in " ".join(text.split())
    source = next(tmp_path.glob("gemmsmith-output/*.cu")).read_text()
    assert f"{design}_64x64x32" in source
    assert (tmp_path / "gemmsmith-output/timeline.png").stat().st_size > 5000


def test_rows_that_do_not_depend_on_m(call) -> None:
    """K is summed by one CTA, which otherwise several share; splits are refused."""
    words = ["show", "--m", "128", "--n", "512", "--k", "16384"]
    assert "split" in good(call(*words)).splitlines()[3]
    assert "split" not in good(call(*words, "--batch-invariant")).splitlines()[3]
    refused = call(*words, "--batch-invariant", "--splits", "4")
    assert refused.exit_code != 0
    assert "splits: got 4 with batch_invariant" in refused.output


def test_hints(call) -> None:
    source = good(call("show", *SMALL, "--evict", "first", "last"))
    assert "0x12f0000000000000" in source
    assert "0x14f0000000000000" in source


@pytest.mark.parametrize("options", [("--splits", "0"), ("--design", "pingpong"), ("--design", "tma")])
def test_options_over_a_config_in_lockstep(call, options: tuple[str, str]) -> None:
    sizes = ("--m", "8192", "--n", "8192", "--k", "8192")
    assert "spin_until_at_least" in good(call("show", *sizes))
    assert "spin_until_at_least" not in good(call("show", *sizes, *options))
    assert "it needs cooperative" in call("show", *sizes, *options, "--sync-clusters").output


def test_results_that_leave_through_the_stages(call) -> None:
    assert "OUT_OFFSET = 0u;" in good(call("show", *SMALL, "--alias-epilogue"))
    assert "OUT_OFFSET = 0u;" not in good(call("show", *SMALL))


def test_json(call) -> None:
    rows = json.loads(good(call("run", *SMALL, "--backend", "sim", "--json")))
    assert rows["problem"] == {"m": 200, "n": 136, "k": 96, "operands": "bf16", "output": "bf16", "accumulate": "fp32"}
    assert rows["config"]["tile"] == [64, 64, 32]
    assert (rows["backend"], rows["result"], rows["hazards"]) == ("sim", "pass", [])
    assert 0 < rows["error"]["max_over_bound"] <= 1
    assert 0 < rows["error"]["frobenius"] <= rows["error"]["frobenius_bound"]
    assert rows["error"]["elements_beyond_bound"] == 0
    assert rows["cycles"] > 1000
    assert rows["spill_bytes"] == 0
    assert all(Path(file).is_file() for file in rows["files"].values())
    taken = json.loads(good(call("show", *SMALL, "--resources", "--json")))
    assert {name: rows[name] for name in ("registers", "spill_bytes", "shared_bytes")} == {
        name: taken[name] for name in ("registers", "spill_bytes", "shared_bytes")
    }
    assert json.loads(good(call("show", *SMALL, "--json"))) == {"source": good(call("show", *SMALL)).removesuffix("\n")}


@pytest.mark.parametrize(
    ("words", "code", "kind", "message"),
    [
        (["run", "--stages", "0"], 2, "ConfigError", "stages: got 0; use at least 2"),
        (["raster", "--m", "0"], 2, "BadParameter", "0 is not in the range x>=1"),
        (["tune", "1x2"], 2, "BadParameter", "such as 512x4096x4096"),
        (["simulate", "--nosuch"], 2, "NoSuchOption", "gemmsmith simulate --help"),
        (["show", "--m", "-1"], 2, "BadParameter", "--m"),
        (["explain"], 2, "MissingParameter", "--epilogue"),
    ],
)
def test_errors_as_json(call, words: list[str], code: int, kind: str, message: str) -> None:
    result = call(*words, "--json")
    assert (result.exit_code, result.stderr) == (code, "")
    error = json.loads(result.stdout)["error"]
    assert error["type"] == kind
    assert message in error["message"]


def test_lines_are_never_folded(call, tmp_path: Path) -> None:
    """Paths can be copied, however narrow the terminal is."""
    folder = tmp_path / ("long" * 40)
    rows = good(call("simulate", *SMALL, "--output", str(folder))).splitlines()
    assert f"timeline  {folder / 'timeline.png'}" in rows
    assert any(row.startswith("source") and Path(row.split()[1]).is_file() for row in rows)
    picture = folder / "a [b].svg"
    assert f"picture: {picture}" in good(call("raster", "--m", "256", "--picture", str(picture))).splitlines()


def test_tiles_of_groups(call) -> None:
    rows = json.loads(good(call("raster", "--groups", "1000,0,2300", "--n", "1024", "--json")))
    assert [(x["group"], x["first_row"], x["rows"]) for x in rows] == [(0, 0, 1000), (1, 1000, 0), (2, 1000, 2300)]
    assert all((x["tiles"] == 0) == (x["rows"] == 0) for x in rows)
    assert "rows of a tile" in good(call("raster", "--groups", "100,0,257", "--m", "400", "--n", "64"))


PROBLEMS = [
    (m, n, k, *options)
    for m, n, k in ((1, 512, 256), (64, 192, 128), (130, 96, 200), (512, 64, 1024), (300, 300, 64))
    for options in (
        (), ("--dtype", "fp8_e4m3"), ("--dtype", "fp16", "--layout", "tn"), ("--dtype", "fp32", "--precision", "tf32"),
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_command_takes_the_config_of_gemm(
    call, problem: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k, *words = problem
    options = dict(zip(words[::2], words[1::2], strict=True))
    dtype, layout = options.get("--dtype", "bf16"), options.get("--layout", "nt")
    a = np.zeros((m, k) if layout[0] == "n" else (k, m), as_dtype(dtype).numpy)
    b = np.zeros((n, k) if layout[1] == "t" else (k, n), a.dtype)
    a, b = a if layout[0] == "n" else a.T, b.T if layout[1] == "t" else b
    precision = {"precision": options["--precision"]} if "--precision" in options else {}
    want = gemmsmith.plan(a, b, **precision).config
    sizes, planned = f"{m}x{n}x{k}", []
    init = PlannedGemm.__init__
    monkeypatch.setattr(
        PlannedGemm, "__init__", lambda self, request: (init(self, request), planned.append(self.config))[0]
    )
    gemmsmith.gemm(a, b, backend="reference", **precision)
    assert {*planned} <= {want}
    for command in (["run", "--backend", "reference"], ["simulate"]):
        found = json.loads(good(call(*command, sizes, *words, "--json")))
        assert found["config"] == json.loads(json.dumps(vars(want)))
    assert good(call("show", sizes, *words, "--why")).startswith(f"{want}:")


def test_help_has_sections(call) -> None:
    """Each option is in one of them."""
    for name in ("run", "simulate", "show"):
        text = good(call(name, "--help"))
        problem, rest = text.split("\nProblem:\n")[1].split("\nConfig (see gemmsmith.Config):\n")
        config, others = rest.split("\nOptions:\n")
        assert "--dtype " in problem
        assert "--tile " in config
        assert "--json" in others
        for option in find_command(name).params:
            if isinstance(option, click.Option):
                assert text.count(f"\n  {option.opts[0]} ") == 1, option.opts[0]


def test_sizes_are_one_word_or_three_options(call) -> None:
    source = good(call("show", "200x136x96"))
    assert source == good(call("show", "--m", "200", "--n", "136", "--k", "96"))
    assert source != good(call("show", "200x136x96", "--config", "default"))
    assert "128x256x64" in good(call("show", "200x136x96", "--config", "default"))


@pytest.mark.parametrize("sizes", ["0x128x64", "128x0x64", "0x0x0"])
def test_an_empty_result(call, sizes: str) -> None:
    rows = good(call("run", sizes, "--backend", "sim")).splitlines()
    assert rows[0].split() == ["problem", sizes, "bf16", "->", "bf16"]
    assert "result    pass" in rows


def test_an_empty_result_has_no_page(call, tmp_path: Path) -> None:
    result = call("simulate", "0x128x64", "--html", str(tmp_path / "a.html"), "--counters")
    assert "there is no page, and nothing is counted" in result.output
    assert not (tmp_path / "a.html").exists()


def test_a_swapped_problem_is_printed_as_it_was_given(call) -> None:
    assert "100x128x64 bf16" in good(call("run", "100x128x64", "--swap-ab", "--backend", "sim")).splitlines()[0]


@pytest.mark.parametrize("words", [["run", "--backend", "sim"], ["simulate"], ["show", "--why"], ["doctor"]])
def test_lines_have_100_columns(call, words: list[str]) -> None:
    lines = good(call(*words, *(["100x128x64"] if words[0] != "doctor" else []))).splitlines()
    paths = ("source", "timeline", "trace", "ok")
    assert all(len(x) <= 100 for x in lines if x.split()[0] not in paths)
    assert all(len(x) <= 100 for x in good(call(words[0], "--help")).splitlines())


def test_doctor(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is found; a folder that cannot be written, and a compiler that is not there, are broken."""
    found = {x["what"]: x for x in json.loads(good(call("doctor", "--json")))}
    assert {found[x]["state"] for x in ("gemmsmith", "compiler", "nvdisasm", "cache", "tables")} == {"ok"}
    assert found["tables"]["detail"].startswith(f"{len(builtin_table())} configs shipped")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "file"))

    def broken(*args: object, **options: object) -> None:
        raise gemmsmith.CompileError("NVRTC was not found")

    monkeypatch.setattr(compiler, "compile_source", broken)
    result = call("doctor")
    assert result.exit_code == 1
    assert [x.split()[1] for x in result.stdout.splitlines() if x.startswith("broken")] == ["compiler", "cache"]
    assert "set GEMMSMITH_CACHE_DIR to a folder that can be written" in result.stdout


def test_doctor_reads_the_tables(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of GEMMSMITH_TABLE; one that is absent or no table is named."""
    measured_configs.write_table(tmp_path / "table.json", [])
    (tmp_path / "other.json").write_text("[]")
    for name, state in (("table.json", "ok"), ("other.json", "broken"), ("absent.json", "broken")):
        files = [str(tmp_path / x) for x in ("table.json", name)]
        monkeypatch.setenv("GEMMSMITH_TABLE", os.pathsep.join(files))
        result = call("doctor", "--json")
        assert result.exit_code == (state == "broken")
        found = next(x for x in json.loads(result.stdout) if x["what"] == "tables")
        assert found["state"] == state
        assert state == "ok" or files[1] in found["detail"]


def test_cache(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled ahead is not compiled again."""
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    assert good(call("cache")) == f"0 kernels, 0 bytes, in {tmp_path / 'cache'}\n"
    (tmp_path / "problems.txt").write_text("# two\n64x64x64 --tile 64x64x64 # small\n\n64x64x64 --tile 64x32x64\n")
    assert good(call("cache", "--warm", str(tmp_path / "problems.txt"))).startswith("2 kernels, ")
    monkeypatch.setattr(compiler, "_compile", None)
    assert "registers" in good(call("show", "64x64x64", "--tile", "64x64x64", "--resources"))
    rows = good(call("cache", "--list")).splitlines()
    assert [x.endswith(".cubin") for x in rows] == [True, True, False]
    listed = json.loads(good(call("cache", "--list", "--json")))
    assert listed["bytes"] == sum(Path(x["file"]).stat().st_size for x in listed["entries"])
    assert good(call("cache", "--clear")).startswith("0 kernels")
    assert not [*(tmp_path / "cache").glob("**/*.cubin")]


def test_reference(call) -> None:
    assert "float64" in good(call("run", *SMALL, "--backend", "reference", "--dtype", "fp16", "--layout", "tn"))


def test_an_estimate_names_the_gpu_of_its_model(call, tmp_path: Path) -> None:
    """That of CUDA cores is of an H100; mma.sync has none."""
    words = ["run", "64x64x64", "--backend", "sim", "--output", str(tmp_path)]
    for more, gpu in ((["--dtype", "bf16"], "H200"), (["--dtype", "fp32"], "H100")):
        text = good(call(*words, *more))
        assert re.search(rf"^estimate +[\d.]+ us on an {gpu}, by the model", text, re.MULTILINE)
        assert json.loads(good(call(*words, *more, "--json")))["estimated_us"] > 0
    plain = [*words, "--design", "mma_multistage", "--tile", "64x64x64", "--stages", "3"]
    assert "estimate " not in good(call(*plain))
    assert "estimated_us" not in json.loads(good(call(*plain, "--json")))


def test_a_gpus_time_is_a_number_with_its_unit() -> None:
    plan = PlannedGemm(Request(Spec((64, 64), "bf16"), Spec((64, 64), "bf16")))
    report = Report(float("inf"), float("inf"), 3, 0.5, 0.25, "none")
    outcome = Outcome((64, 64, 64), "cuda", None, report, [], {"time_us": 10.04, "tflops": 105.2}, {"source": "a.cu"})
    assert outcome.to_rows(plan)["speed"] == "10.0 us, 105 TFLOP/s (one buffer, back to back)"
    facts = json.loads(json.dumps(outcome.to_json(plan), allow_nan=False))
    assert (facts["time_us"], facts["tflops"], facts["result"]) == (10.04, 105.2, "fail")
    assert (facts["error"]["max"], facts["error"]["elements_beyond_bound"]) == (None, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        ("--dtype fp8_e4m3 --scale-a 1x128 --scale-b 128x128", "promoted"),
        ("--dtype fp8_e5m2 --dtype-b fp8_e4m3 --scale-a rows --swap-ab --out-dtype fp32", "promoted"),
        ("--dtype fp8_e4m3 --accumulate fast --layout tn --scale-a rows --scale-b tensor", "fast"),
        ("--dtype fp8_e4m3 --tile 64x64x128 --splits 2 --scale-a 128x128 --scale-b 1x128", "promoted"),
        ("--dtype int8", "int32"),
        ("--dtype int8 --scale-a rows --scale-b rows --layout nn", "int32"),
        ("--dtype fp32 --precision tf32", "fp32"),
        ("--dtype fp32 --precision 3xtf32 --layout tn", "promoted"),
        ("--dtype fp32 --precision 3xtf32 --design mma_multistage", "promoted"),
        ("--dtype fp32 --precision tf32 --design tma", "fp32"),
    ],
)
def test_other_operands(call, options: str, accumulate: str) -> None:
    sizes = ["--m", "70", "--n", "72", "--k", "140"]
    for command in (["simulate"], ["run", "--backend", "reference"]):
        found = json.loads(good(call(*command, *sizes, *options.split(), "--json")))
        assert (found["result"], found.get("hazards", [])) == ("pass", [])
        assert found["problem"]["accumulate"] == {"fast": "fp32"}.get(accumulate, accumulate)
        assert ("scale_a" in found["problem"]) == ("--scale-a" in options)
    assert "__global__" in good(call("show", *sizes, *options.split()))


def test_why(call) -> None:
    words = ["show", "--m", "64", "--n", "512", "--k", "512", "--dtype", "fp8_e4m3", "--why"]
    assert "chosen by the model" in good(call(*words))
    assert "b is transposed before each run" in good(call(*words, "--layout", "nn"))


def test_an_epilogue_of_other_operands(call) -> None:
    for options in (["--dtype", "fp8_e4m3"], ["--dtype", "int8"], ["--dtype", "fp32", "--precision", "tf32"]):
        text = good(call("explain", "--epilogue", "LinCombPerColBias", *options))
        assert "RowBroadcast(bias)" in text
        assert "\nconfig:\n" in text
        assert re.search(r"bound[^\n]*: estimated", text)


def test_nothing_to_sum(call) -> None:
    found = json.loads(good(call("run", "--m", "70", "--n", "72", "--k", "0", "--backend", "reference", "--json")))
    assert (found["result"], found["error"]["max"], found["files"]) == ("pass", 0, {})


def test_simulate_with_another_seed(call) -> None:
    out = good(call("simulate", *SMALL, "--seed", "7", "--dtype", "fp16", "--accumulate", "fp16", "--json"))
    assert json.loads(out)["result"] == "pass"


def test_simulate_writes_a_page(call, tmp_path: Path) -> None:
    page = tmp_path / "new" / "steps.html"
    assert json.loads(good(call("simulate", *SMALL, "--html", str(page), "--json")))["files"]["page"] == str(page)
    assert "<title>cooperative_" in page.read_text()
    assert len(data_of(page)) == 1


def test_simulate_writes_a_page_of_several_schedules_from_a_step_on(call, tmp_path: Path) -> None:
    words = ["simulate", *SMALL, "--html", str(tmp_path / "page.html"), "--schedules", "3", "--seed", "4"]
    found = json.loads(good(call(*words, "--first-step", "100", "--json")))
    assert (found["result"], found["schedules"]) == ("pass", 3)
    first, *others = data_of(tmp_path / "page.html")
    assert first["schedules"] == [{"seed": seed, "hazards": 0} for seed in (4, 5, 6)]
    assert [x["seed"] for x in (first, *others)] == [4, 5, 6]
    assert first["first"] == 100
    assert first["before"]
    for step in ("999999", "-1", "x"):
        assert call(*words, "--first-step", step).exit_code
    assert "first_step: got 999999; use 0 to " in call(*words, "--first-step", "999999").output
    assert "--first-step: got 5 without --html" in call("simulate", *SMALL, "--first-step", "5").output


def data_of(page: Path) -> list[Any]:
    text = page.read_text().split('<script id="data" type="text/plain">')[1].partition("<")[0]
    return [json.loads(gzip.decompress(base64.b64decode(x))) for x in text.split()]


def test_simulate_with_counters(call) -> None:
    """A row for each line and access; its counts, summed, are what the tile's bytes are."""
    words = ["simulate", *SMALL, "--m", "64", "--n", "64", "--k", "64", "--counters"]
    text = good(call(*words)).split("\n\n")[-1].splitlines()
    assert re.match(r"cooperative_64x64x32_\w+: \d+ registers, \d+ CTAs? per SM, \d+ of 64 warps, limited by ", text[0])
    assert text[1].split() == [
        "line", "access", "instructions", "wavefronts", "ideal", "sectors", "ideal", "lines", "ideal",
    ]  # fmt: skip
    (found,) = json.loads(good(call(*words, "--json")))["counters"]
    assert found["occupancy"]["ctas"] == min(found["occupancy"]["limits"].values())
    assert len(found["lines"]) == len(text) - 2
    loads = [x for x in found["lines"] if x["instruction"] == "tma_load"]
    assert sum(x["sectors"] for x in loads) == sum(x["ideal_sectors"] for x in loads) == 2 * 64 * 64 * 2 // 32
    assert sum(x["lines"] for x in loads) == 2 * 64 * 2  # rows of 64 bytes
    assert sum(x["macs"] for x in found["lines"]) == 64**3
    assert "counters" not in json.loads(good(call(*words[:-1], "--json")))


def test_ladder(call, tmp_path: Path) -> None:
    """A row a rung; measured rows beside, where they are of the same sizes."""
    words = ["ladder", "--rung", "naive", "--rung", "wmma_naive", "--m", "64", "--n", "64", "--k", "512"]
    counts, bounds = good(call(*words, "--picture", "ladder.png")).split("\n\n")
    titles, naive, wmma = counts.splitlines()
    assert titles.split()[:6] == ["rung", "dtype", "CTAs", "warps", "registers", "wavefronts"]
    assert naive.split()[:2] == ["naive", "fp32"]
    _, naive, *_ = bounds.splitlines()
    assert " L1 " in naive
    assert re.search(r"naive\.py:\d+ load_global A", naive)
    assert wmma.split()[:2] == ["wmma_naive", "bf16"]
    assert (tmp_path / "ladder.png").stat().st_size > 5000
    measured = {"rung": "naive", "m": 64, "n": 64, "k": 512, "dtype": "fp32", "us": 10.0, "tflops": 0.4,
                "of_cublas": 0.5, "of_roofline": 0.25}  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [measured]}))
    first, second = json.loads(good(call(*words, "--measured", "rows.json", "--json")))
    assert (first["us"], first["of_roofline"]) == (10.0, 0.25)
    assert "us" not in second
    assert first["bound_us"] == max(first["resources_us"].values()) == first["resources_us"][first["limit"]]
    (tmp_path / "kept.json").write_text(json.dumps([first, second]))
    assert json.loads(good(call(*words, "--from-json", "kept.json", "--json"))) == [first, second]
    beside = good(call(*words, "--measured", "rows.json", "--picture", "ladder.svg")).split("\n\n")[-1].splitlines()
    assert beside[1].split()[-4:] == ["10", "0.4", "50%", "25%"]
    refused = call("ladder", "--rung", "naive", "--measured", "rows.json")
    assert refused.exit_code == 2
    assert "rows.json has no rows of 4096x4096x4096; use --m, --n, --k of one of 64x64x512" in refused.output


def test_the_picture_of_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bound is a mark and each measurement a dot, where they are; a logarithmic axis has no bars."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    rows = [{"rung": f"rung {i}", "dtype": "fp32", "m": 8, "n": 8, "k": 8, "limit": limit, "bound_tflops": bound}
            for i, (limit, bound) in enumerate([("L1", 2.0), ("math", 30.0), ("issue", 4.0)])]  # fmt: skip
    for row, speed in zip(rows[:2], (3.0, 20.0), strict=True):  # one is above its bound
        row |= {"us": 1.0, "tflops": speed}
    ladder_picture.plot(rows, Path("ladder.png"))
    (axes,) = drawn[0].axes
    found = {marker: [x.get_xdata()[0] for x in axes.lines if x.get_marker() == marker] for marker in "|o"}
    assert found == {"|": [2.0, 30.0, 4.0], "o": [3.0, 20.0]}
    assert not axes.patches
    assert axes.get_xscale() == "log"


def test_all_rungs_of_the_ladder(call) -> None:
    rungs = good(call("ladder", "--m", "16", "--n", "16", "--k", "16")).splitlines()[1:]
    assert {"naive", "dp4a", "wmma", "sgemm", "cooperative"} <= {line.split()[0] for line in rungs if line}


@pytest.mark.parametrize("text", ["no JSON", "{}", "[1]", '[{"m": 16, "n": 16, "k": 16}]'])
@pytest.mark.parametrize("option", ["--measured", "--from-json"])
def test_ladder_refuses_other_files(call, option: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    refused = call("ladder", "--rung", "naive", "--m", "16", "--n", "16", "--k", "16", option, "other.json")
    assert refused.exit_code == 2
    assert f"{option}: other.json is not a results file: " in refused.output


def test_show(call) -> None:
    assert "__global__" in good(call("show", *SMALL))
    assert ".target sm_90a" in good(call("show", *SMALL, "--ptx"))
    assert "HGMMA" in good(call("show", *SMALL, "--sass"))
    assert "spill stores 0" in good(call("show", *SMALL, "--resources"))


@pytest.mark.parametrize(("code", "tensor"), [
    ("sass", r"0x\w+ +tensor +each +HGMMA\.64x64x16\.F32"), ("ptx", r"\d+ +tensor +each +wgmma\.mma_async\.sync"),
])  # fmt: skip
def test_an_annotated_listing(call, code: str, tensor: str) -> None:
    words = ["show", *SMALL, f"--{code}", "--annotate"]
    text = good(call(*words))
    assert len(re.findall(rf"^{tensor}.* wgmma_mainloop\.py:\d+$", text, re.MULTILINE)) == 2
    assert re.search(r"^class +whole kernel +each k-tile +some k-tiles\ntensor +2 +2 +0$", text, re.MULTILINE)
    found = json.loads(good(call(*words, "--json")))
    assert found["mainloops"][0]["each_k_tile"]["tensor"] == 2
    assert sum(found["whole_kernel"].values()) == len(found["instructions"])
    loads = [x for x in found["instructions"] if x["class"] == "async load"]
    assert len(loads) == found["whole_kernel"]["async load"] > 0
    assert loads[0].keys() == {"address", "class", "text", "line"}
    assert loads[0]["line"].startswith("cooperative.py:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--tile", "100x64x64"], "tile M: got 100; use a multiple of 64"),
        (["run", "--tile", "64x64"], "is not 3 integers joined by x"),
        (
            ["show", "--tile", "256x256x64"],
            "registers: the accumulator of 128x256 needs 256 per thread, 56 more than fit",
        ),
        (["show", "--tile", "128x256x64", "--stages", "9"], "shared memory:"),
        (["show", "--annotate"], "--annotate: got --source; use --ptx or --sass"),
        (["show", "--dtype", "bf16", "--accumulate", "fp16"], "accumulate: got 'fp16' for operands of bf16; use fp32"),
        (["show", "--dtype", "fp8"], "'fp8' is not one of 'bf16', 'fp16'"),
        (["show", "--cluster-splits", "5"], "cluster_splits: got 5; use"),
        (
            ["show", "--dtype", "fp32", "--design", "tma"],
            "design: got tma for operands of fp32 accumulated in fp32; use the design sgemm, or precision",
        ),
        (["show", "--precision", "tf32"], "precision: got 'tf32' for operands of bf16; it is for fp32 operands"),
        (["show", "--dtype-b", "int8"], "b: got dtype int8 with a of bf16; use the same for both"),
        (["show", "--scale-b", "1x128"], "scale_b: got block scales, of shape (64, 8192); they need fp8 operands"),
        (["show", "--dtype", "fp8_e4m3", "--accumulate", "fp32"], "operands of fp8_e4m3; use promoted or fast"),
        (
            ["show", "--dtype", "fp8_e4m3", "--design", "tma"],
            'use the design cooperative or pingpong, or accumulate="fast"',
        ),
        (["show", "--dtype", "fp8_e4m3", "--tile", "128x128x64"], 'tile K: got 64 with accumulate="promoted"; use 128'),
        (["show", "--dtype", "int8", "--out-dtype", "int32", "--scale-a", "tensor"], "out_dtype: got 'int32'; use one"),
        (["tune", "--dtype", "int8", "--accumulate", "fast", "64x64x64"], "operands of int8; use int32"),
        (["show", "512x512x512", "--m", "4"], "MxNxK: got it beside --m, --n or --k; use either"),
        (["show", "512x512"], "'512x512' is not 3 integers joined by x, at least 0 each, such as 512x4096x4096"),
        (["cache", "--list", "--clear"], "--list, --clear, --warm: got several; use one"),
        (["cache", "--warm", "quoted.txt"], "--warm: quoted.txt, line 1: No closing quotation"),
        (["cache", "--warm", "problems.txt"], "problems.txt, line 2: Invalid value for '--dtype': 'fp7' is not one of"),
        (["explain", "--epilogue", "amax", "--operand", "x=row", "--operand", "x=column"], "x is given twice; use one"),
        (["run", "--m", "-1"], "'--m': -1 is not in the range x>=0"),
        (["run", "--seed", "-1"], "'--seed': -1 is not in the range x>=0"),
        (["run", "--output", "file"], "'file' is a file"),
        (["run", "--output", "file/below"], "file/below: Not a directory"),
        (["run", "--output", "/proc/nosuch"], "/proc/nosuch: No such file or directory"),
        (["run", "--m", "1000000000", "--backend", "reference"], "takes 10240 GB of memory, and this machine has"),
        (["raster", "--k", "-2"], "'--k': -2 is not in the range x>=1"),
        (["raster", "--m", "2000000000"], "too large for the L2 model; use smaller ones"),
        (["raster", "--groups", "5,x"], "'5,x' is not integers joined by commas, not all 0, such as 100,0,257"),
        (["raster", "--groups", "5,6", "--m", "10"], "--groups: got 11 rows in all, and --m 10; use a larger --m"),
        (["raster", "--picture", "a.doc"], "use a file that ends in .png, .svg, .pdf"),
        (["raster", "--picture", "a"], "use a file that ends in .png, .svg, .pdf"),
        (["explain", "--epilogue", "amax", "--picture", "nosuch/a.png"], "there is no folder 'nosuch'"),
        (["tune", "--", "-1x2x3"], "is not 3 integers joined by x, at least 1 each, such as 512x4096x4096"),
        (["tune", "0x2x3"], "is not 3 integers joined by x, at least 1 each, such as 512x4096x4096"),
        (["tune", "--max-configs", "0", "1x2x3"], "'--max-configs': 0 is not in the range x>=1"),
        (["nosuch"], "No such command 'nosuch'; see gemmsmith --help"),
        (["explain", "--epilogue", "nosuch"], "use module:function, file.py:function, or one of ScaledAcc"),
        (["explain", "--epilogue", "nosuch:f"], "No module named 'nosuch'"),
        (["explain", "--epilogue", "nosuch.py:f"], "No such file"),
        (["explain", "--epilogue", "wrong.py:f"], "SyntaxError: '(' was never closed (wrong.py, line 1)"),
        (["explain", "--epilogue", "raises.py:f"], "ZeroDivisionError: division by zero at raises.py:1: 1 / 0"),
        (["explain", "--epilogue", "exits.py:f"], "SystemExit: 3 at exits.py:2: sys.exit(3)"),
        (["explain", "--epilogue", "good.py:nosuch"], "has no attribute 'nosuch'"),
        (["explain", "--epilogue", "good.py:late"], "IndexError: list index out of range at good.py:2: return [][3]"),
        (["explain", "--epilogue", "good.py:number"], "epilogue: got int; use a function"),
        (["explain", "--epilogue", "amax", "--operand", "x=y"], "use name=kind with a kind of number, scalar"),
    ],
)
def test_errors_are_one_clear_line(call, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "problems.txt").write_text("64x64x64\n64x64x64 --dtype fp7\n")
    (tmp_path / "quoted.txt").write_text('64x64x64 "a\n')
    (tmp_path / "wrong.py").write_text("def f(")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "good.py").write_text("def late(acc):\n    return [][3]\nnumber = 7\n")
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert FAULT not in result.stderr
    assert result.stdout == ""


def test_a_folder_that_cannot_be_written(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, text: str) -> int:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refused)
    result = call("run", *SMALL, "--backend", "sim")
    assert result.exit_code == 2
    assert ".cu: Permission denied; use a writable file or folder" in result.stderr


def test_a_fault_of_the_library_is_one_line_too(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **named: object) -> None:
        raise KeyError("nothing there")

    monkeypatch.setattr(commands, "execute", broken)
    result = call("run", *SMALL)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "KeyError: 'nothing there' at " in result.stderr
    assert FAULT in result.stderr
    monkeypatch.setattr(commands, "execute", lambda *args: (_ for _ in ()).throw(MemoryError("1 TB")))
    assert call("run", *SMALL).stderr == "Error: out of memory; use smaller sizes (1 TB)\n"
    monkeypatch.setattr(commands, "execute", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert call("run", *SMALL).stderr.strip() == "Error: interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["show", *SMALL], ["run", "--nosuch", "--json"], ["raster", "--m", "64"], ["--help"]]
)
def test_a_closed_pipe(words: list[str], tmp_path: Path) -> None:
    """As by | head: nothing is said."""
    reads, writes = os.pipe()
    os.close(reads)
    start = [sys.executable, "-c", "from gemmsmith.cli import main; main()"]
    done = subprocess.run([*start, *words], stdout=writes, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(writes)
    assert done.returncode in (1, 2)
    assert done.stderr == b""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "what"),
    [(["simulate", *SMALL], "simulating"), (["run", *SMALL, "--backend", "sim"], "simulating"),
     (["raster", "--m", "512"], "simulating the L2")],
)  # fmt: skip
def test_progress_is_shown_on_a_terminal_only(words: list[str], what: str, tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    start = [sys.executable, "-c", "from gemmsmith.cli import main; main()"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([*start, *words], stdout=subprocess.PIPE, stderr=end, cwd=tmp_path, env=environment) as run:
        os.close(end)
        shown = b""
        try:
            while read := os.read(terminal, 1 << 16):
                shown += read
        except OSError:  # its other end is closed
            pass
        assert run.stdout
        printed = run.stdout.read()
    os.close(terminal)
    assert run.returncode == 0
    assert re.search(rf"{what}.*100%", shown.decode())
    assert what.encode() not in printed
    result = CliRunner().invoke(main, words + ["--output", str(tmp_path)] * (words[0] != "raster"))
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.slow
def test_every_ready_made_epilogue_is_explained(call) -> None:
    """With its operands, and what else it is made with."""
    for name, fusion in NAMED_FUSIONS.items():
        text = good(call("explain", "--epilogue", name))
        assert text.startswith("as written:\n")
        for operand, kind in fusion.operands.items():
            label = {"row": "RowBroadcast", "column": "ColBroadcast", "matrix": "AuxLoad", "half": "AuxLoad"}
            assert f"{label.get(kind, 'ScalarBroadcast')}({operand})" in text
        if "activation" in inspect.signature(fusion.make).parameters:  # gelu, or its derivative
            assert "Compute(gelu)" in text or "Compute(erf)" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *sorted(COMMANDS)])
def test_help_says_what_and_gives_an_example_that_works(call, name: str | None) -> None:
    text = good(call(*filter(None, [name]), "--help"))
    example = re.search(r"Example: gemmsmith (.*)", text)
    assert example
    words = example[1].split()
    assert name in (None, words[0])
    Path("problems.json").write_text('[{"name": "up", "shape": "64x128x256"}]')  # of bundle
    result = call(*words)
    needs = {"tune": "Error: tune: this machine has no GPU", "bench": "Error: bench: torch "}
    assert result.exit_code == 0 or result.stderr.startswith(needs.get(name or "", "nothing"))


def test_tune_prints_the_fastest_or_all(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = Config(), Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1)
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("gemmsmith.cli.tune.require_gpu", lambda: HOPPER)
    monkeypatch.setattr("gemmsmith.api.tune", lambda a, b, **options: [Measured(fast, 10.0), Measured(slow, 20.0)])
    assert good(call("tune", "512x1000x1024")) == f"512x1000x1024: 10.0 us, 105 TFLOP/s, {fast}\n"
    row, other = map(json.loads, good(call("tune", "512x1000x1024", "64x64x64", "--json")).splitlines())
    assert (row["m"], row["n"], row["k"], row["operands"], row["tuned_before"]) == (512, 1000, 1024, "bf16", False)
    assert [x["time_us"] for x in row["configs"]] == [10, 20]
    assert row["configs"][1]["tflops"] == pytest.approx(2 * 512 * 1000 * 1024 / 20e6)
    assert row["configs"][1]["config"]["tile"] == [64, 64, 64]
    assert other["m"] == 64
    binding = bind(Request(Spec((512, 1024), "bf16"), Spec((1024, 1000), "bf16", (1, 1024))))
    monkeypatch.setattr(measured_configs, "folder", lambda device=0: tmp_path / "tuned")
    monkeypatch.setattr(measured_configs, "_about", lambda device: {})
    measured_configs.save([Entry(key_of(binding.problem, binding.spec), 512, slow, 20.0, "none")])
    assert "tuned before" in good(call("tune", "512x1000x1024"))
    before = json.loads(good(call("tune", "512x1000x1024", "--json")))
    assert before["tuned_before"]
    assert before["configs"][0]["config"]["tile"] == [64, 64, 64]
    assert "10.0 us" in good(call("tune", "512x1000x1024", "--force"))


def test_without_a_command_there_is_help(call) -> None:
    assert good(call()) == good(call("--help"))


NUMBERS = st.one_of(
    st.integers(-3, 200), st.sampled_from([2**31 - 4096, 2**31, 2**63, 10**30]), st.sampled_from(["", "x", "1.5", "٣"])
).map(str)
SIZES = st.one_of(NUMBERS, st.lists(NUMBERS, min_size=1, max_size=4).map("x".join), st.just("64x64x32"))


def values(option: click.Parameter) -> st.SearchStrategy[list[str]]:
    """Words for an option: right ones and others."""
    if isinstance(option, click.Argument):
        return st.lists(SIZES, max_size=2)
    word = st.sampled_from(
        ["", "x", "amax", "swiglu", "LinCombEltAct", "os:nosuch", "x=row", "c=matrix", "a/b", "a.png"]
    )
    if isinstance(option.type, click.Choice):
        word = st.sampled_from([*option.type.choices, "fp8"])
    elif isinstance(option.type, Integers):
        word = SIZES
    elif option.type.name.startswith("integer"):
        word = NUMBERS
    if option.is_flag:
        return st.sampled_from([*option.opts, *option.secondary_opts]).map(lambda flag: [flag])
    return st.lists(word, min_size=option.nargs, max_size=option.nargs).map(lambda words: [option.opts[0], *words])


@st.composite
def commands_with_options(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(sorted(COMMANDS)))
    parameters = find_command(name).params
    options = [p for p in parameters if p.name not in ("shape", "m", "n", "k")]
    words = [name]
    if len(options) < len(parameters):
        for size in "mnk":  # or a run would take long
            words += [f"--{size}", draw(NUMBERS if name in ("show", "explain") else st.integers(-1, 130).map(str))]
    for option in draw(st.lists(st.sampled_from(options), max_size=5)):
        words += draw(values(option))
    return words


@pytest.mark.slow
@given(words=commands_with_options())
@settings(max_examples=60)
def test_any_words_end_in_a_result_or_in_one_line(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert FAULT not in result.output
    if result.exit_code and "--json" in words:
        assert json.loads(result.stdout)["error"]["message"]
    elif result.exit_code:
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "others"), [
    ("--layout nn", {"torch.matmul", "cuBLASLt"}), ("--dtype int8 --layout nt", {"torch._int_mm", "cuBLASLt"}),
    ("--epilogue LinCombPerColBiasEltAct", {"torch eager", "torch.compile"}),
    ("--groups 100,0,924", {"torch._grouped_mm"}),
    ("--dtype fp8_e4m3 --scale-a rows --scale-b rows", {"torch._scaled_mm"}),
    ("--batch 2", {"torch.matmul", "cuBLASLt"}),
    ("--dtype fp32 --precision tf32", {"torch.matmul", "cuBLASLt"}),
])  # fmt: skip
def test_bench_on_the_gpu(call, options: str, others: set[str]) -> None:
    pytest.importorskip("torch")
    result = call("bench", "1024x1024x1024", "--seconds", "0.003", "--json", *options.split())
    rows = json.loads(good(result))
    names = {row["name"].partition(",")[0] for row in rows["contenders"]}
    assert names == {"gemmsmith", *others}, result.stderr
    assert all(row["us"] > 1 for row in rows["contenders"])


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["", "--epilogue LinCombPerColBiasEltAct", "--batch 3", "--groups 300,0,700",
                                     "--dtype fp8_e4m3 --scale-a 1x128 --scale-b 128x128", "--dtype int8",
                                     "--dtype fp32 --precision 3xtf32 --scale-a rows --scale-b tensor"])  # fmt: skip
def test_run_on_the_gpu(call, options: str) -> None:
    rows = json.loads(good(call("run", "--m", "1000", "--n", "1000", "--k", "1000", "--json", *options.split())))
    assert rows["backend"] == "cuda"
    assert rows["result"] == "pass"
    assert rows["time_us"] > 1
    products = rows["problem"].get("batch", 1)
    assert rows["tflops"] == pytest.approx(2e-6 * products * 1000**3 / rows["time_us"])
