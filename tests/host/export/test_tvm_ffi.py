"""A header's function of TVM-FFI launches what Python launches for the same arrays, or raises a clear error.

It is compiled with the stand-in for libcuda; the arrays are no memory, but the structs of DLPack that describe it.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tests.host.export.test_headers import PLANS, STAND_IN, expected, kinds_of, plan, pythons

from gemmsmith import Config, Spec
from gemmsmith.host.export.signature import Array, Signature

tvm_ffi = pytest.importorskip("tvm_ffi")
CALLER = Path(__file__).parent / "call_tvm_ffi.py"
DEVICE, STREAM = [2, 3], 77
CODES = {
    "int8": [0, 8, 1], "int32": [0, 32, 1], "int64": [0, 64, 1], "ue8m0": [1, 8, 1], "fp16": [2, 16, 1],
    "fp32": [2, 32, 1], "bf16": [4, 16, 1], "bool": [6, 8, 1], "fp8_e4m3": [10, 8, 1], "fp8_e5m2": [12, 8, 1],
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")]


def includes() -> list[str]:
    return [f"-I{STAND_IN}", *(f"-I{x}" for x in tvm_ffi.libinfo.include_paths())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tvm_ffi")
    command = ["gcc", "-shared", "-fPIC", f"-I{STAND_IN}", STAND_IN / "libcuda.c", "-o", folder / "libcuda.so.1"]
    subprocess.run(command, check=True)
    return folder


@lru_cache
def exported(name: str, folder: Path) -> tuple[Signature, dict[str, Any]]:
    """A plan's signature, and the description of its header; its library is name.so."""
    made, prefix = PLANS[name](), identifier(name)
    about = json.loads(made.export(folder, prefix, tvm_ffi=True).with_suffix(".json").read_text())
    library = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    options = ["-std=c++17", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter", *includes()]
    command = ["g++", *options, folder / f"{prefix}_tvm_ffi.cc", "-o", folder / f"{prefix}.so", library, "-ldl"]
    subprocess.run(command, check=True)
    return Signature.of(made._planned), about


def identifier(name: str) -> str:
    return "x_" + name.replace(" ", "_").replace("-", "_")


def run(name: str, folder: Path, calls: list[dict[str, Any]], allocates: bool = True) -> tuple[int, list[str]]:
    """The scratch memory's address, and for each call what was launched, " # ", and "ok" or the error."""
    _, about = exported(name, folder)
    prefix = identifier(name)
    library = str(folder / f"{prefix}.so")
    given = json.dumps({"library": library, "name": prefix, "calls": calls, "allocates": allocates})
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "STAND_IN_KINDS": " ".join(kinds_of(about))}
    command = [sys.executable, CALLER]
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    address, *lines = done.stdout.splitlines()
    return int(address), lines


def in_order(signature: Signature) -> list[Array]:
    """a, b, operands, results."""
    return sorted(signature.arrays, key=lambda x: x.info.writable)


def call_of(signature: Signature, values: dict[str, int], numbers: dict[str, float]) -> dict[str, Any]:
    arrays = [(values[x.name], *x.layout(values), CODES[f"{x.info.dtype}"], DEVICE) for x in in_order(signature)]
    return {"arrays": [[*map(_listed, x)] for x in arrays], "numbers": [*numbers.values()]}


def _listed(x: Any) -> Any:
    return [*x] if isinstance(x, tuple) else x


def as_read(signature: Signature, values: dict[str, int]) -> dict[str, int]:
    """The values that the function reads: a stride along a single element may be any."""
    read = dict(values)
    for x in signature.arrays:
        shape, _ = x.layout(values)
        count = 1
        for size in shape:
            count *= size
        read |= {
            s: (count // 16 + 1) * 16
            for s, n in zip(x.strides or (), shape, strict=False)
            if isinstance(s, str) and n < 2
        }
        if not count:
            read[x.name] = 256
    return read


@pytest.mark.parametrize(
    "name",
    ["split", "stream-K", "batch", "epilogue", "column", "scales", "gated", "block scales", "reductions", "quantize",
     "packed", "grouped", "grouped sizes", "masked", "gather and scatter"],
)  # fmt: skip
def test_launches_are_pythons(name: str, folder: Path) -> None:
    signature, about = exported(name, folder)
    dice = random.Random()
    drawn = [signature.draw(dice) for _ in range(200)]
    numbers = [{x: dice.randrange(-80, 80) / 8 for x in signature.numbers} for _ in drawn]
    scratch, lines = run(name, folder, [call_of(signature, *x) for x in zip(drawn, numbers, strict=True)])
    counts = [0, 0]
    for values, given, line in zip(drawn, numbers, lines, strict=True):
        launched, outcome = line.split(" # ")
        read = as_read(signature, values)
        is_empty = 0 in [values[x] for x in signature.shape] and not signature.has_reductions
        python = None if is_empty else pythons(signature, read)
        if outcome != "ok":
            assert launched == ""
            assert outcome.startswith("ValueError: ")
        else:
            counts[1] += 1
            assert python
            workspace = (scratch + 255) // 256 * 256
            flags = workspace + (python.workspace_bytes + 255) // 256 * 256
            _, want = expected(signature, python, {**read, "workspace": workspace, "flags": flags}, given)
            if python.flag_bytes:
                memset, launched = re.fullmatch(r"( \| memset [\d ]*)(.*)", launched).groups()  # type: ignore[union-attr]
                assert memset == f" | memset 0 {python.flag_bytes} {STREAM} "
            found = [x.split(" stream ") for x in launched.split("|")[1:]]
            rows = ([int(y) for y in x.split()] for x, _ in found)
            assert [[about["kernels"][i]["name"], *x] for i, *x in rows] == want, values
            assert {int(x) for _, x in found} == {STREAM}
        counts[0] += python is not None
    assert counts[1] > 50
    assert counts[0] - counts[1] <= 2


def changed_call(name: str, folder: Path, array: int, field: int, value: Any) -> dict[str, Any]:
    signature, _ = exported(name, folder)
    call = call_of(signature, signature.own_values(), dict.fromkeys(signature.numbers, 1.0))
    call["arrays"][array][field] = value
    return call


REFUSED: dict[str, tuple[str, int, int, Any, str]] = {
    "dtype": ("epilogue", 0, 3, [2, 16, 1], "TypeError: a.dtype: got float16; use bfloat16"),
    "dtype of bias": ("epilogue", 2, 3, [2, 32, 1], "TypeError: bias.dtype: got float32; use bfloat16"),
    "k": ("epilogue", 1, 1, [641, 384], "ValueError: b.shape[0]: got 641; use 640"),
    "n of bias": ("epilogue", 2, 1, [383], "ValueError: bias.shape[0]: got 383; use 384"),
    "m of the result": ("epilogue", 4, 1, [511, 384], "ValueError: out.shape[0]: got 511; use 512"),
    "layout": ("epilogue", 1, 2, [384, 1], "ValueError: b.strides[0]: got 384; use 1"),
    "device": ("epilogue", 1, 4, [2, 1], "ValueError: b.device id: got 1; use 3"),
    "host": ("epilogue", 0, 4, [1, 0], "ValueError: a.device type (1: CPU, 2: CUDA): got 1; use 2"),
    "address": ("epilogue", 0, 0, (1 << 40) + 2, "ValueError: a pointer or a row is not aligned to 16 bytes"),
    "stride": ("epilogue", 0, 2, [644, 1], "ValueError: a pointer or a row is not aligned to 16 bytes"),
    "overlap": ("epilogue", 4, 0, 1 << 40, "ValueError: a result overlaps itself or another array"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_function_refuses(what: str, folder: Path) -> None:
    name, *change, error = REFUSED[what]
    _, (line,) = run(name, folder, [changed_call(name, folder, *change)])  # type: ignore[arg-type]
    launched, outcome = line.split(" # ")
    assert launched == ""
    assert outcome.startswith(error)


def test_wrong_dimensions_and_counts(folder: Path) -> None:
    call = changed_call("split", folder, 0, 1, [512, 640, 1])
    call["arrays"][0][2] = [640, 1, 1]
    fewer = changed_call("split", folder, 0, 1, [512, 640])
    del fewer["arrays"][2]
    _, lines = run("split", folder, [call, fewer])
    assert lines[0] == " # ValueError: a.ndim: got 3; use 2"
    assert "Expected 3 but got 2 arguments" in lines[1]


def test_no_allocator(folder: Path) -> None:
    call = changed_call("split", folder, 0, 1, [512, 640])
    _, (line,) = run("split", folder, [call], allocates=False)
    assert line.startswith(" # RuntimeError: TVMFFIEnvTensorAlloc: allocator is nullptr")


def test_its_own_words_compile_it(tmp_path: Path) -> None:
    """The lines of its comment."""
    words = shutil.which("tvm-ffi-config")
    if not words:
        pytest.skip("needs tvm-ffi-config")
    config = Config("cooperative", (128, 128, 64), (1, 1), 4)
    plan(config=config, epilogue=lambda acc, x: acc * x, x=Spec((384,), "bf16")).export(tmp_path, tvm_ffi=True)
    (tmp_path / "include").symlink_to(STAND_IN)
    text = (tmp_path / "gemm_tvm_ffi.cc").read_text()
    assert text.startswith("/* gemm(a, b, x, out) as a function of TVM-FFI.")
    command = "".join(x.strip(" *\\") + " " for x in text.splitlines()[2:4])
    assert shlex.split(command)[0] == "g++"
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=environment)
    code = "import tvm_ffi; tvm_ffi.load_module('./gemm.so').gemm"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
