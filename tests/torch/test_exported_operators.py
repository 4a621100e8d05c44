"""A library of exported operators launches what Python does, called by a program of AOTInductor, from C++.

It runs on the CPU, with a stand-in for libcuda that prints the launches, and computes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.host.export.test_headers import expected, kinds_of
from torch.export import Dim

import gemmsmith
import gemmsmith.torch as gt
from gemmsmith import ArgumentError, RetraceWarning, Spec
from gemmsmith.host.export.signature import Signature

ROOT = Path(__file__).parents[2]
STAND_IN, TORCH = ROOT / "tests/host/export/stand_in", Path(torch.__file__).parent
HOME = next((x for x in ("/usr/local/cuda", "/opt/cuda") if Path(x, "include/cuda.h").exists()), None)
STREAM = """
#include <dlfcn.h>
#include <stdint.h>
extern "C" {
int aoti_torch_get_current_cuda_stream(int32_t, void **stream) { return *stream = (void *)7, 0; }
int aoti_torch_create_device_guard(int32_t, void **guard) { return *guard = nullptr, 0; }
int aoti_torch_delete_device_guard(void *) { return 0; }
__attribute__((constructor)) static void start() {
    ((int (*)(unsigned))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuInit"))(0);
}
}
"""
N, K = 128, 64
BF16 = torch.bfloat16


def scaled(acc: Any, bias: Any, c: Any, alpha: Any) -> Any:
    return ((acc + bias) * alpha).gelu() + c, acc > 0


def squares(acc: Any) -> Any:
    return acc.square().sum(-1)


class Model(torch.nn.Module):
    """A product with an epilogue, one without of what it returns, and one in float64, which no header computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.second = (torch.nn.Parameter(torch.randn(*x, dtype=BF16)) for x in ((N, K), (K, N)))
        self.bias = torch.nn.Parameter(torch.randn(N))

    def forward(self, x: Any, c: Any) -> Any:
        y, sign = gt.gemm(x, self.weight.mT, epilogue=scaled, bias=self.bias, c=c, alpha=0.375)
        return gt.gemm(y, self.second.mT), sign, gt.gemm(x.double(), self.weight.mT.double(), epilogue=squares)


def exported(model: Any, inputs: tuple[Any, ...], folder: Path, rows: tuple[int, ...] = ()) -> tuple[Any, list[str]]:
    """The program for AOTInductor, and warnings."""
    dims = {0: Dim("rows", min=2, max=4096)}
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", RetraceWarning)
        program = torch.export.export(model, inputs, dynamic_shapes=tuple(dims for _ in inputs))
        (program,) = gt.export_operators([program], folder, rows)
    return program, [f"{x.message}" for x in caught if x.category is UserWarning]


def operators_of(program: Any) -> list[str]:
    return [f"{x.target}" for x in program.graph.nodes if "gemmsmith" in f"{x.target}"]


def compile_cpp(folder: Path, *words: Any) -> None:
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-isystem", TORCH / "include", *words]
    subprocess.run(list(map(str, command)), check=True, cwd=folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str], Path]:
    """The program, warnings, and the folder of the library."""
    folder = tmp_path_factory.mktemp("operators")
    inputs = torch.randn(256, K, dtype=BF16), torch.randn(256, N, dtype=BF16)
    return *exported(Model(), inputs, folder, (16, 256)), folder


@pytest.mark.slow
def test_what_no_header_binds_is_decomposed(made: tuple[Any, list[str], Path]) -> None:
    program, messages, folder = made
    assert operators_of(program) == ["gemmsmith.gemm_2.default", "gemmsmith.gemm_1.default"]
    (message,) = messages
    assert message.startswith("gemm of (")
    assert "fp64" in message or "float64" in message
    assert message.endswith("PyTorch's operations compute it")
    assert {x.name for x in folder.glob("*.h")} == {"gemm_0.h", "gemm_1.h"}
    inputs = torch.randn(9, K, dtype=BF16), torch.randn(9, N, dtype=BF16)
    with torch.no_grad():
        results = program.module()(*inputs)  # in Python, by the operators on the CPU
    (y, sums), weight = (results[0], results[2]), program.state_dict["weight"].mT.double()
    product = inputs[0].double() @ weight
    torch.testing.assert_close(sums.double(), product.square().sum(-1), rtol=1e-9, atol=1e-9)
    h = torch.nn.functional.gelu((product + program.state_dict["bias"]) * 0.375) + inputs[1]
    torch.testing.assert_close(y.double(), h @ program.state_dict["second"].mT.double(), rtol=0.05, atol=1)


def test_refused(tmp_path: Path) -> None:
    moe = gt.FusedMoE(128, 128, 4, 2, dtype=BF16, experts_dtype=torch.float8_e4m3fn)
    with pytest.raises(ArgumentError, match="program: got gemmsmith::fp8_experts"):
        exported(moe, (torch.randn(8, 128, dtype=BF16),), tmp_path)


def built(program: Any, folder: Path) -> tuple[Path, dict[str, str]]:
    """Compile the package, the library and the program that runs both; returns the package, and the environment."""
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    compile_cpp(folder, "-isystem", STAND_IN, "-shared", "-fPIC", "operators.cpp", "-o", "gpu.so", "-ldl")
    if HOME:
        compile_cpp(folder, "-isystem", f"{HOME}/include", "-fsyntax-only", "operators.cpp")
    (folder / "stream.cpp").write_text(STREAM)
    command = ["gcc", "-shared", "-fPIC", f"-I{STAND_IN}", STAND_IN / "libcuda.c", "-o", "libcuda.so.1"]
    subprocess.run(command, check=True, cwd=folder)
    sources = ["-isystem", STAND_IN, "-DDISPATCH_KEY=CPU", "operators.cpp", "stream.cpp"]
    compile_cpp(folder, "-shared", "-fPIC", *sources, "-o", "operators.so", "-Wl,-Bsymbolic", "-ldl")
    libraries = [f"-L{TORCH}/lib", f"-Wl,-rpath,{TORCH}/lib", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    compile_cpp(folder, ROOT / "examples/deploy/run_program.cpp", "-o", "run_program", *libraries)
    kinds = [x for header in sorted(folder.glob("gemm_*.json")) for x in kinds_of(json.loads(header.read_text()))]
    return package, {**os.environ, "LD_LIBRARY_PATH": str(folder), "STAND_IN_KINDS": " ".join(kinds)}


def run(folder: Path, package: Any, environment: dict[str, str], inputs: list[Any]) -> tuple[Any, list[list[int]]]:
    """The results, and the launches."""
    torch.save(inputs, folder / "inputs.pt")
    command = ["./run_program", package, "inputs.pt", "outputs.pt", "./operators.so"]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    lines = done.stdout.replace("stream", "").split("|")[1:]
    return torch.load(folder / "outputs.pt"), [[int(x) for x in part.split()] for part in lines]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_experts(tmp_path: Path) -> None:
    """Those of groups with two arrays as b, too, are kernels; the library has one for each kind of call."""
    moe = gt.FusedMoE(K, N, 4, 2, shared_hidden=N, dtype=BF16)
    program, messages = exported(moe, (torch.randn(64, K, dtype=BF16),), tmp_path)
    assert operators_of(program) == ["gemmsmith.gemm_3.default", *["gemmsmith.gemm_1.default"] * 4]
    assert messages == []
    package, environment = built(program, tmp_path)
    for rows in (2, 300):
        (result,), launches = run(tmp_path, package, environment, [torch.randn(rows, K, dtype=BF16)])
        assert result.shape == (rows, K)
        assert len(launches) == 5
        assert launches[0][-1] == launches[1][-1] == 7  # the stream


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_launches_are_pythons(made: tuple[Any, list[str], Path]) -> None:
    program, _, folder = made
    package, environment = built(program, folder)
    plans: list[Callable[[int], gemmsmith.Plan]] = [
        lambda m: gemmsmith.plan(
            Spec((m, K), "bf16"), Spec((K, N), "bf16", (1, K)), epilogue=scaled, bias=Spec((N,), "fp32"),
            c=Spec((m, N), "bf16"), alpha=0.375,
        ),
        lambda m: gemmsmith.plan(Spec((m, N), "bf16"), Spec((N, K), "bf16", (1, N))),
    ]  # fmt: skip
    abouts = [json.loads((folder / f"gemm_{i}.json").read_text()) for i in range(2)]
    for rows in (7, 16, 200, 256, 1000):
        inputs = [torch.randn(rows, K, dtype=BF16), torch.randn(rows, N, dtype=BF16)]
        results, launches = run(folder, package, environment, inputs)
        assert [tuple(x.shape) for x in results] == [(rows, K), (rows, N), (rows,)]
        product = inputs[0].double() @ program.state_dict["weight"].mT.double()
        torch.testing.assert_close(results[2].double(), product.square().sum(-1), rtol=1e-9, atol=1e-9)
        assert len(launches) == 2
        for i, (make, launch) in enumerate(zip(plans, launches, strict=True)):
            planned = make(16 if rows <= 16 else 256)._planned
            of_two = [launches_of(planned, rows, seed) for seed in (1, 2)]
            first = 0 if i == 0 else len(abouts[0]["kernels"])
            assert first <= launch[0] < first + len(abouts[i]["kernels"])
            *numbers, stream = launch[1:]
            assert stream == 7
            python, others = (x[1:] for x in of_two)
            addresses = {at for at, (x, y) in enumerate(zip(python, others, strict=True)) if x != y}
            assert [x for at, x in enumerate(numbers) if at not in addresses] == [
                x for at, x in enumerate(python) if at not in addresses
            ]
            pairs = {(python[at], numbers[at]) for at in addresses}  # an operand has two tensor maps
            assert len(pairs) == len({x for _, x in pairs}) == len(Signature.of(planned).arrays)


def launches_of(planned: Any, rows: int, seed: int) -> list[int]:
    """What Python launches for contiguous arrays with some addresses."""
    signature = Signature.of(planned)
    values = {**signature.own_values(), "m": rows}
    for i, x in enumerate(signature.arrays):
        values[x.name] = (i + 3) << (30 + seed)
    (_, (launch,)) = expected(signature, signature.rebound(values), values, dict.fromkeys(signature.numbers, 0.375))
    return launch  # type: ignore[no-any-return]
