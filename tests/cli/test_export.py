"""Headers by the command line, and bundles of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import gemmsmith
from gemmsmith import Spec
from gemmsmith.backends.cuda import cache
from gemmsmith.cli import main

STAND_IN = Path(__file__).parents[1] / "host/export/stand_in"
PROBLEMS = [
    {"name": "up", "shape": "40x128x256", "epilogue": "LinCombPerColBiasEltAct", "rows": "300", "swap-ab": False},
    {"name": "down", "m": 40, "n": 256, "k": 128, "operand": ["bias=row"], "epilogue": "functions.py:biased"},
]
USES = """
#include <stdio.h>
#include "bundle.hpp"
#include "driver.h"
int main() {
    bundle all;
    int status = all.load(find, nullptr);
    up_args x{};
    x.m = x.n = x.k = -1;
    printf("%d %d\\n", status, up_supports(&x));
    all.unload();
    return all.load([](void *, const char *) -> void * { return nullptr; }, nullptr) != -1;
}
"""
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text("def biased(acc, bias):\n    return acc + bias\n")
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def bundled(problems: Any) -> Result:
    Path("problems.json").write_text(json.dumps(problems))
    return call("bundle", "problems.json", "--output", "out", "--json")


def test_a_header_for_several_rows(folder: Path) -> None:
    result = call("export", "40x128x256", "--rows", "500,40", "--name", "mine", "--output", "out", "--json")
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert len(outcome["configs"]) == 2
    assert [folder / x for x in outcome["files"].values()] == [
        folder / "out" / f"mine.{x}" for x in ("h", "cu", "cubin", "json")
    ]
    about = json.loads(Path("out/mine.json").read_text())
    assert [x for _, x in about["configs"]] == outcome["configs"]
    assert about["configs"][0][0] == 40


def test_a_bundle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels load in C++, and Python finds those that it compiled."""
    result = bundled(PROBLEMS)
    assert result.exit_code == 0, result.output
    assert [*json.loads(result.stdout)] == ["up", "down"]
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(folder / "out/cache"))
    plan = gemmsmith.plan(Spec((40, 128), "bf16"), Spec((128, 256), "bf16", (1, 128)), bias=Spec((256,), "bf16"),
                          epilogue=lambda acc, bias: acc + bias)  # fmt: skip
    monkeypatch.setattr(cache, "store", None)
    assert plan._planned.compiled.cubin == Path("out/down.cubin").read_bytes()
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    Path("uses.cpp").write_text(USES)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", f"-I{STAND_IN}", "-Iout"]
    subprocess.run(["g++", *flags, "uses.cpp", "-o", "uses"], check=True)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(["./uses"], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "0 1\n"


@pytest.mark.parametrize(("problems", "error"), [
    ([], "problems.json: use a list of objects such as"),
    ([{"shape": "64x64x64"}], "problems.json: use a list of objects such as"),
    ([{"name": "x", "shape": "64x64"}], "x: Invalid value for '[MxNxK]': '64x64' is not 3 integers"),
    ([{"name": "x", "tiles": 3}], "x: No such option"),
    ([{"name": "x"}, {"name": "x"}], "problems.json: got the name 'x' twice; use a name for each"),
    ([{"name": "2x", "shape": "64x64x64"}], "x: name: got '2x'; use a C identifier"),
])  # fmt: skip
def test_what_no_bundle_can_have(folder: Path, problems: Any, error: str) -> None:
    result = bundled(problems)
    assert result.exit_code == 2
    assert error in json.loads(result.stdout)["error"]["message"]


def test_a_file_that_is_no_json(folder: Path) -> None:
    Path("problems.json").write_text("up: 64x64x64")
    assert "problems.json: got no JSON" in call("bundle", "problems.json").stderr


def test_a_function_for_tvm_ffi(folder: Path) -> None:
    result = call("export", "40x128x256", "--tvm-ffi", "--name", "mine", "--output", "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["files"]["cc"] == "out/mine_tvm_ffi.cc"
    assert (folder / "out/mine_tvm_ffi.cc").read_text().startswith("/* mine(a, b, out) as a function of TVM-FFI.")
