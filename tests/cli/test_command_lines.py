"""Command lines as users type them: each command with each of its options, and wrong input of each kind.

None ends in a traceback. An error is one line and exit code 2; a result has at most 100 columns.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import gemmsmith
from gemmsmith.cli import main
from gemmsmith.cli.group import COMMANDS, find_command

OWN_EPILOGUE = "def scaled(acc, factor, bias):\n    z = acc * factor + bias\n    return z.relu(), z.sum(-1)\n"
GOOD = {
    "show": ["", "512x4096x4096", "--m 100 --n 200 --k 300", "64x64x64 --source", "64x64x64 --ptx", "64x64x64 --sass",
             "64x64x64 --resources", "64x64x64 --why", "64x64x64 --ptx --annotate", "64x64x64 --json",
             "128x128x64 --design pingpong --tile 128x128x64", "64x64x64 --stages 3",
             "256x256x256 --tile 128x128x64 --consumers 1",
             "256x256x256 --cluster 2x1", "256x256x256 --raster n", "256x256x256 --raster-group 4",
             "64x64x4096 --splits 2 --cluster-splits 1", "64x64x4096 --cluster-splits 2", "16x256x256 --no-swap-ab",
             "64x64x64 --evict last first", "64x64x64 --streaming-stores", "64x64x64 --no-alias-epilogue",
             "512x512x512 --serpentine", "512x512x512 --sync-clusters", "64x64x64 --chip sm_80",
             "64x64x64 --config default", "64x64x64 --batch-invariant", "64x64x64 --batch 3", "--groups 5,0,70",
             "64x64x64 --dtype fp8_e5m2 --dtype-b fp8_e4m3", "64x64x64 --epilogue amax",
             "64x64x64 --epilogue own.py:scaled --operand factor=number --operand bias=row --why"],
    "run": ["64x72x80 --backend reference", "64x72x80 --backend sim", "64x72x80 --backend sim --output there",
            "64x72x80 --backend reference --seed 3", "64x72x80 --backend reference --json",
            "64x72x80 --backend reference --layout tn", "64x72x80 --backend reference --dtype fp16 --accumulate fp16",
            "64x72x80 --backend reference --out-dtype fp32", "64x72x80 --backend reference --dtype int8",
            "64x72x80 --backend reference --dtype fp32 --precision 3xtf32", "0x72x80 --backend reference",
            "64x72x80 --backend sim --out-dtype fp8_e4m3",
            "64x256x256 --backend reference --dtype fp8_e4m3 --scale-a 1x128 --scale-b 128x128",
            "64x72x80 --backend reference --dtype int8 --scale-a rows --scale-b tensor",
            "64x72x80 --backend reference --batch 2", "100x72x80 --backend reference --groups 30,0,50",
            "--n 72 --k 80 --backend sim --groups 30,0,50 --epilogue own.py:scaled --operand factor=number "
            "--operand bias=column", "64x72x80 --backend sim --epilogue LinCombPerColBiasEltAct"],
    "simulate": ["64x72x80", "64x72x80 --counters", "64x72x80 --schedules 2", "64x72x80 --seed 5 --json",
                 "64x72x80 --html a.html --schedules 2 --first-step 9", "64x72x80 --batch 2",
                 "64x256x128 --epilogue block_quantized", "--groups 64,3 --n 64 --k 64"],
    "explain": ["--epilogue amax", "64x64x64 --epilogue own.py:scaled --operand factor=scalar --operand bias=matrix",
                "--epilogue LinCombEltAct --json", "--epilogue swiglu --picture a.png",
                "--epilogue amax --dtype fp32 --precision tf32", "--epilogue amax --batch 2",
                "--epilogue amax --groups 5,6"],
    "export": ["64x72x80", "64x72x80 --rows 8,300 --name x --output there --json",
               "64x72x80 --epilogue amax --tvm-ffi"],
    "bundle": ["bundle.json", "bundle.json --output there --json"],
    "raster": ["512x512x512", "512x512x512 --picture a.svg", "512x512x512 --json", "--groups 100,0,300 --n 256"],
    "layout": ["64x64", "64x256 --swizzle 0", "48x64 --major MN --swizzle 32", "64x128 --dtype int8 --access column",
               "64x64 --fragment wgmma-d --access fragment", "64x64 --html a.html", "64x64 --fragment mma-b --json"],
    "ladder": ["64x64x64 --rung naive", "64x64x64 --rung naive --json"],
    "doctor": ["", "--json"],
    "cache": ["", "--list", "--json", "--clear"],
    "table": ["list", "list --json", "export there.json", "merge table.json table.json there.json"],
    "tune": [], "bench": [],  # need a GPU
}  # fmt: skip
NUMBER_OF_GOOD = sum(map(len, GOOD.values()))
WRONG = [
    "nosuch", "show 64x64", "show 64xyx64", "show 64x64x-1", "show 64x64x64 --m 3", "show --m x", "show --m -1",
    "show 64x64x64 extra", "show --nosuch", "show 64x64x64 --dtype fp7", "show 64x64x64 --layout xx",
    "show 64x64x64 --out-dtype int8", "show 64x64x64 --accumulate fp8", "show 64x64x64 --accumulate fp16",
    "show 64x64x64 --precision tf32", "show 64x256x256 --scale-a 1x128", "show 64x64x64 --scale-b half",
    "show 64x64x64 --dtype-b fp16", "show 64x64x64 --config none", "show 64x64x64 --design nosuch",
    "show 64x64x64 --tile 64x64", "show 64x64x64 --tile 63x64x64", "show 64x64x64 --tile 100000x64x64",
    "show 64x64x64 --stages 0", "show 64x64x64 --stages 99", "show 64x64x64 --consumers 9",
    "show 64x64x64 --cluster 3", "show 64x64x64 --cluster 99x1", "show 64x64x64 --raster q",
    "show 64x64x64 --raster-group -1", "show 64x64x64 --splits -1", "show 64x64x64 --cluster-splits 99",
    "show 64x64x64 --evict one", "show 64x64x64 --evict a b", "show 64x64x64 --chip sm_20",
    "show 64x64x64 --ptx --annotate --source", "show 64x64x64 --annotate", "show 64x64x64 --batch 0",
    "show 64x64x64 --batch 2 --groups 3,4", "show 5x64x64 --groups 3,4", "show --groups 3,x", "show --groups 0,0",
    "show --groups -1,4", "show 64x64x64 --batch-invariant --splits 2", "show 64x64x64 --epilogue nosuch",
    "show 64x64x64 --epilogue nosuch.py:f", "show 64x64x64 --epilogue own.py:nosuch",
    "show 64x64x64 --epilogue own.py", "show 64x64x64 --epilogue own.py:scaled", "show 64x64x64 --operand x=row",
    "show 64x64x64 --epilogue amax --operand x", "show 64x64x64 --epilogue amax --operand x=rows",
    "show 64x64x64 --epilogue amax --operand y=row",
    "show 64x64x64 --epilogue own.py:scaled --operand factor=row --operand factor=row", "run 64x64x64 --backend gpu",
    "run 64x64x64 --seed -1", "run 64x64x64 --output own.py", "run 64x64x64 --output own.py/below",
    "run 1000000000x512x512 --backend reference", "run 64x64x64 x", "simulate 64x64x64 --schedules 0",
    "simulate 64x64x64 --counters yes", "simulate 64x64x64 --seed x", "simulate 64x64x64 --backend sim",
    "simulate 64x64x64 --first-step 3", "simulate 64x64x64 --html a.html --first-step 99999", "explain",
    "explain --epilogue wrong.py:f", "explain --epilogue raises.py:f", "explain --epilogue own.py:late",
    "explain --epilogue own.py:number", "explain --epilogue amax --picture a.doc",
    "explain --epilogue amax --picture nosuch/a.png", "explain --epilogue amax --tile 64x64x64",
    "explain --epilogue LinCombTopKSoftmaxCol --m x", "export 64x64x64 --name 2x",
    "export 64x64x64 --rows x", "export 64x64x64 --rows 0,5", "export 64x64x64 --output own.py",
    "export 64x64x64 --epilogue own.py:late", "export 64x64x64 --batch 1", "bundle", "bundle nosuch.json",
    "bundle problems.txt", "bundle table.json", "bundle bundle.json extra", "bundle bundle.json --output own.py",
    "raster 0x1x1", "raster 64x64", "raster --groups 5,6 --m 10",
    "raster --picture a", "raster 2000000000x4096x4096", "raster --dtype fp16", "layout",
    "layout 64", "layout 60x64", "layout 64x64 --swizzle 16", "layout 64x64 --html nosuch/a.html",
    "layout 64x64 --fragment wmma", "layout 64x64 --access fragment", "ladder 0x0x0",
    "ladder 64x64x64 --rung 99", "ladder --rung x", "ladder 64x64x64 --measured nosuch.json",
    "ladder --from-json nosuch.json", "doctor extra", "doctor --nosuch", "cache --warm nosuch.txt",
    "cache --warm problems.txt", "cache extra", "tune", "tune 0x2x3", "tune 64x64", "tune 64x64x64 --max-configs 0",
    "tune 64x64x64 --model problems.txt", "tune --model problems.txt", "tune --model nosuch.json",
    "tune --model problems.txt --tokens 0", "tune --model problems.txt --training yes", "table", "table nosuch",
    "table list extra", "table export", "table merge table.json", "table load problems.txt", "table load nosuch",
    "tune 64x64x64 --dtype fp7", "tune 64x64x64 --force yes", "bench 64x64", "bench 64x64x64 --seconds 0",
    "bench 64x64x64 --dtype fp7", "--nosuch", "run --nosuch", "show 64x64x64 --m",
]  # fmt: skip
WIDE = ("--ptx", "--sass", "--annotate", "--source", "--counters", "--json", "show")
"""Listings, files and tables may be wider."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "own.py").write_text(OWN_EPILOGUE + "def late(acc):\n    return [][3]\nnumber = 7\n")
    (tmp_path / "wrong.py").write_text("def f(")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "problems.txt").write_text("64x64x64\n64x64x64 --dtype fp7\n")
    (tmp_path / "table.json").write_text('{"entries": []}')
    (tmp_path / "bundle.json").write_text('[{"name": "up", "shape": "64x72x80"}]')


@pytest.mark.slow
@pytest.mark.parametrize("line", [f"{name} {line}".strip() for name, lines in GOOD.items() for line in lines])
def test_good_lines(line: str) -> None:
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.output
    assert result.stdout
    if "--json" in line:
        json.loads(result.stdout)
    elif not any(word in line for word in WIDE):
        assert all(len(text) <= 100 or "/" in text for text in result.stdout.splitlines())  # or a path


@pytest.mark.parametrize("line", WRONG)
def test_wrong_lines(line: str) -> None:
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert "internal error" not in result.stderr


def test_they_are_many_and_have_every_option() -> None:
    assert NUMBER_OF_GOOD + len(WRONG) >= 160
    for name in COMMANDS:
        of_command = [*GOOD[name], *(line for line in WRONG if line.startswith(f"{name} "))]
        lines = of_command if name == "raster" else [*GOOD["show"], *WRONG, *of_command]  # which all share options
        words = {word for line in lines for word in line.split()} | {"--m", "--n", "--k"}
        for option in find_command(name).params:
            if isinstance(option, click.Option):
                assert words & {*option.opts, *option.secondary_opts}, (name, option.name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_commands_and_calls_take_one_config(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = (int(2 ** rng.uniform(3, 8)) for _ in range(3))
    layout, dtype = rng.choice(["nn", "nt", "tn", "tt"]), rng.choice(["bf16", "fp16"])
    words = [f"{m}x{n}x{k}", "--layout", layout, "--dtype", dtype]
    shown = {}
    for command in (["run", "--backend", "reference"], ["simulate"]):
        result = CliRunner().invoke(main, [*command, *words, "--json"])
        assert result.exit_code == 0, result.output
        shown[" ".join(command)] = json.loads(result.stdout)["config"]
    dtypes = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
    a = np.zeros((m, k) if layout[0] == "n" else (k, m), dtypes[dtype])
    b = np.zeros((k, n) if layout[1] == "n" else (n, k), dtypes[dtype])
    plan = gemmsmith.plan(a if layout[0] == "n" else a.T, b if layout[1] == "n" else b.T)
    wanted = json.loads(json.dumps(vars(plan.config)))
    assert all(config == wanted for config in shown.values())
    source = CliRunner().invoke(main, ["show", *words]).stdout
    assert source.strip() == plan.source.strip()
