"""Programs of AOTInductor run gemmsmith's kernels from C++, by a library of exported operators."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmsmith

torch = pytest.importorskip("torch")
gt = pytest.importorskip("gemmsmith.torch")
ROOT, TORCH = Path(__file__).parents[2], Path(torch.__file__).parent
HOME = next((x for x in ("/usr/local/cuda", "/opt/cuda") if Path(x, "include/cuda.h").exists()), None)
pytestmark = [
    pytest.mark.gpu, pytest.mark.slow,
    pytest.mark.skipif(not (HOME and shutil.which("g++")), reason="needs g++ and cuda.h"),
]  # fmt: skip


def scaled(acc: Any, bias: Any, alpha: Any) -> Any:
    x = ((acc + bias) * alpha).gelu()
    return x, x.square().sum(-1)


class Gemm(torch.nn.Module):
    """A product whose epilogue has an operand, a number and a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.randn(*x)) for x in ((384, 256), (384,)))

    def forward(self, x: Any) -> Any:
        return gt.gemm(x, self.weight.mT, epilogue=scaled, bias=self.bias, alpha=0.5)


MODELS: dict[str, Callable[[], Any]] = {
    "gemm": Gemm,
    "mlp": lambda: gt.FusedMLP(256, 512, activation="swiglu"),
    "moe": lambda: gt.FusedMoE(256, 512, 4, 4, shared_hidden=128),  # all experts: none is chosen by rounding
}


@pytest.mark.parametrize("name", MODELS)
def test_in_cpp(name: str, tmp_path: Path) -> None:
    model = MODELS[name]().bfloat16().cuda()
    x = torch.randn(512, 256, device="cuda").bfloat16()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "gemm of")  # that PyTorch's operations compute
        warnings.simplefilter("ignore", gemmsmith.RetraceWarning)
        rows = {0: torch.export.Dim("rows", min=2, max=4096)}
        program = torch.export.export(model, (x,), dynamic_shapes=(rows,))
        (program,) = gt.export_operators([program], tmp_path, rows=(64,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    options = ["-std=c++20", f"-I{TORCH}/include", f"-I{HOME}/include"]
    libraries = [f"-L{TORCH}/lib", f"-Wl,-rpath,{TORCH}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    for command in (
        ["-O2", "-shared", "-fPIC", "operators.cpp", "-o", "operators.so", "-ldl"],
        [str(ROOT / "examples/deploy/run_program.cpp"), "-o", "run_program", *libraries, "-ldl"],
    ):
        subprocess.run(["g++", *options, *command], check=True, cwd=tmp_path)
    for m in (2, 33, 512, 1000):
        x = torch.randn(m, 256, device="cuda").bfloat16()
        torch.save([x], tmp_path / "inputs.pt")
        command = ["./run_program", package, "inputs.pt", "outputs.pt", "./operators.so"]
        subprocess.run(command, check=True, cwd=tmp_path)
        with torch.no_grad():
            expected = model.double().cpu()(x.double().cpu())
        model.bfloat16().cuda()
        expected = expected if isinstance(expected, tuple) else (expected,)
        for actual, y in zip(torch.load(tmp_path / "outputs.pt"), expected, strict=True):
            torch.testing.assert_close(actual.double().cpu(), y, rtol=0.03, atol=0.03 * y.abs().max().item())
