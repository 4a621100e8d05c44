"""The examples in C and C++ compile without a warning, and do what needs no GPU: with a stand-in for libcuda."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gemmsmith
from gemmsmith import Spec

ROOT, STAND_IN = Path(__file__).parents[3], Path(__file__).parent / "stand_in"
DEPLOY = ROOT / "examples/deploy"
INCLUDES = [
    STAND_IN,
    *(Path(x) for x in ("/usr/local/cuda/include", "/opt/cuda/include") if Path(x, "cuda.h").exists()),
]
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("g++")), reason="needs gcc and g++"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the stand-in for libcuda, and the headers of both examples."""
    folder = tmp_path_factory.mktemp("deploy")
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Wno-unused-function", f"-I{STAND_IN}", STAND_IN / "libcuda.c"]
    subprocess.run([*command, "-o", library], check=True)
    (folder / "libcuda.so").symlink_to(library)
    gemmsmith.plan(Spec((1024, 1024), "bf16"), Spec((1024, 1024), "bf16", (1, 1024))).export(folder)
    subprocess.run([sys.executable, DEPLOY / "engine/export.py", folder], check=True, capture_output=True)
    return folder


def run(program: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the stand-in."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent), **variables}
    return subprocess.run([program, *words], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("include", INCLUDES, ids=str)
def test_they_compile(include: Path, folder: Path) -> None:
    options = [*STRICT, f"-I{folder}", "-isystem", include, "-c", "-o", os.devnull]
    for compiler, source in (("gcc -std=c99", "gemm.c"), ("g++ -std=c++17", "engine/engine.cpp")):
        subprocess.run([*compiler.split(), *options, DEPLOY / source], check=True)


def test_the_example_in_c_launches_and_finds_wrong_results(folder: Path) -> None:
    program = folder / "gemm"
    command = ["gcc", f"-I{folder}", f"-I{STAND_IN}", DEPLOY / "gemm.c", "-o", program, f"-L{folder}", "-lcuda", "-ldl"]
    subprocess.run(command, check=True)
    done = run(program, "7")
    m, n, wrong, launches = 7, 768, 4 * 768, [" | 0 "]  # rows 1, 2, 4 and 5 are not zero, which the stand-in leaves
    assert done.returncode == 1
    assert done.stdout.endswith(f"{m} x {n}: {wrong} are wrong\n")
    assert re.findall(r" \| \d+ ", done.stdout) == launches
    assert run(program, STAND_IN_NO_GPU="1").stdout.startswith("cuInit(0): 100, ")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Path:
    program = folder / "engine"
    command: list[Any] = ["g++", "-std=c++17", "-O1", *STRICT, f"-I{folder}", f"-I{STAND_IN}"]
    subprocess.run([*command, DEPLOY / "engine/engine.cpp", "-o", program, "-ldl"], check=True)
    return program


def test_the_engine_needs_a_gpu(engine: Path) -> None:
    without = run(engine, STAND_IN_NO_GPU="1")
    assert (without.returncode, without.stdout) == (77, "no GPU: cuInit returned 100\n")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        done = run(engine, LD_LIBRARY_PATH="")
        assert done.returncode == 77
        assert done.stdout.startswith("no libcuda: libcuda.so.1")


def test_the_engine_chooses_by_rows_and_captures_what_it_launches(engine: Path, folder: Path) -> None:
    """Of the stand-in, whose kernels compute nothing, all results are wrong."""
    sizes = (1, 32, 33, 3000)
    done = run(engine, *map(str, sizes))
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (1, 4)
    for line, rows in zip(lines, sizes, strict=True):
        memset = rf" \| memset 255 {rows * 1024} 7"
        found = re.fullmatch(
            rf" \| capture(.*) \| captured{memset}(.*){memset} \| graph"
            rf"{rows} rows: largest error inf, as a graph inf",
            line,
        )
        assert found
        captured, eager = found.groups()
        assert captured == eager
        functions = [int(x.split()[0]) for x in eager.split("|")[1:]]
        loaded = [0]  # functions before each header's: two kernels, and a probe if one of them has clusters
        for name in ("up", "down"):
            loaded.append(loaded[-1] + 2 + ("probe_(" in (folder / f"{name}.h").read_text()))
        assert functions == [x + (rows > 32) for x in loaded]


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_cmake_builds_the_engine(tmp_path: Path) -> None:
    """The headers, too."""
    words = [f"-DCUDA_INCLUDE={STAND_IN}", f"-DPython3_EXECUTABLE={sys.executable}"]
    subprocess.run(["cmake", "-S", DEPLOY / "engine", "-B", tmp_path, *words], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path], check=True, capture_output=True)
    assert (tmp_path / "engine").exists()
    assert {x.name for x in tmp_path.glob("*.h")} == {"up.h", "down.h", "head.h"}
