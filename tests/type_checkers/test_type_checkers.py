"""What type checkers find in a user's program, tests/type_checkers/program.py: its marked lines, and no others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "program.py"
SOURCE = Path(__file__).parents[2] / "src"
WRONG_LINES = {n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# error")}

pytest.importorskip("torch")


@pytest.mark.slow
def test_mypy_strict(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent",
               f"--cache-dir={tmp_path}", PROGRAM]  # fmt: skip
    environment = os.environ | {"MYPYPATH": str(SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert {int(n) for n in re.findall(r"program\.py:(\d+): error", done.stdout)} == WRONG_LINES, done.stdout


@pytest.mark.slow
def test_pyright(tmp_path: Path) -> None:
    if not shutil.which("pyright"):
        pytest.skip("needs pyright")
    shutil.copy(PROGRAM, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(SOURCE)]}))
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "-p", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = {x["range"]["start"]["line"] + 1 for x in found if x["severity"] == "error"}
    assert lines == WRONG_LINES, found
