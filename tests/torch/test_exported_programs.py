"""Programs of torch.export run without gemmsmith: decomposed to PyTorch's operations, and from C++ by AOTInductor."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.export import Dim, ExportedProgram

import gemmsmith
import gemmsmith.torch as gt
from gemmsmith import ArgumentError, DeviceError

EXAMPLE = Path(__file__).parents[2] / "examples/deploy/run_program.cpp"
TORCH = Path(torch.__file__).parent
ROWS = {0: Dim("rows", min=2, max=4096)}


class Called(torch.nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Any) -> Any:
        return self.function(*x)


def decomposed(model: Any, inputs: tuple[Any, ...], dynamic: bool = True) -> ExportedProgram:
    """The exported program of a model (for any rows of its first input), without gemmsmith's operators."""
    model = model if isinstance(model, torch.nn.Module) else Called(model)
    rows = (ROWS, *[None] * (len(inputs) - 1)) if dynamic else None
    rows = (rows,) if dynamic and isinstance(model, Called) else rows
    program = torch.export.export(model, inputs, dynamic_shapes=rows)
    program = program.run_decompositions(gt.decompositions())
    assert not [x for x in program.graph.nodes if "gemmsmith" in f"{x.target}"]
    return program


def results(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def bias_gelu(acc: Any, bias: Any, alpha: Any) -> Any:
    x = (acc * alpha + bias).gelu()
    return x, (x * 0.25 + 1.5).sum(-1), acc.abs().max(), acc > 0


def gated(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gate.silu() * up


ENDS = torch.tensor([4, 4, 9], dtype=torch.int32)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "epilogue": (lambda a, b, bias: gt.gemm(a, b, epilogue=bias_gelu, bias=bias, alpha=0.5), ((24, 40), (1,))),
    "transposed": (lambda a, b, _: gt.gemm(a, b.mT), ((40, 24), (1,))),
    "gate": (lambda a, b, _: gt.gemm(a, b, epilogue=gated), ((24, 32), (1,))),
    "two weights": (lambda a, b, c: gt.gemm(a, (b, c), epilogue=gated), ((24, 32), (24, 32))),
    "batch": (lambda a, b, _: gt.gemm(a.unsqueeze(0).expand(3, -1, -1), b), ((3, 24, 40), (1,))),
    "groups": (lambda a, b, _: gt.grouped_gemm(a, b, offsets=ENDS, epilogue=lambda acc: acc + 1), ((3, 24, 40), (1,))),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_decomposed(name: str, dtype: Any) -> None:
    """For other rows than at export; the operators on the CPU are the reference, in float64."""
    function, (of_b, of_c) = FUNCTIONS[name]
    others = torch.randn(of_b, dtype=dtype), torch.randn(of_c, dtype=dtype)
    program = decomposed(function, (torch.randn(16, 24, dtype=dtype), *others)).module()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
    for rows in (9, random.randrange(10, 200)):
        a = torch.randn(rows, 24, dtype=dtype)
        for x, y in zip(results(program(a, *others)), results(function(a, *others)), strict=True):
            assert (x.dtype, x.stride()) == (y.dtype, y.stride())
            is_close = torch.isclose(x.double(), y.double(), rtol=tolerance, atol=tolerance)
            assert is_close.float().mean() > (
                0.98 if x.dtype == torch.bool else 0.9999
            )  # a product near 0 has any sign


def test_decomposed_int8() -> None:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((16, 24), (24, 40)))
    assert torch.equal(decomposed(gt.gemm, (a, b)).module()(a, b), gt.gemm(a, b))


def test_wrong_groups() -> None:
    """A program checks the groups' ends when it runs."""
    inputs = torch.randn(16, 24), torch.randn(3, 24, 40), ENDS
    program = decomposed(lambda a, b, ends: gt.grouped_gemm(a, b, offsets=ends), inputs).module()
    for ends in ([4, 3, 9], [4, 4, 17]):
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            program(*inputs[:2], torch.tensor(ends, dtype=torch.int32))


def test_refused() -> None:
    x = torch.randn(8, 128)
    with pytest.raises(DeviceError, match="quantize: not supported"):
        decomposed(lambda a: gt.gemm(a, a.mT, epilogue=gemmsmith.quantize), (torch.randn(128, 128),), dynamic=False)
    with pytest.raises(ArgumentError, match="program: got experts with multiply_in_fp8=True"):
        decomposed(gt.FusedMoE(128, 128, 4, 2, multiply_in_fp8=True), (x,))
    with torch.no_grad(), pytest.raises(ArgumentError, match="program: got gemmsmith::fp8_experts, which cannot be"):
        decomposed(gt.FusedMoE(128, 128, 4, 2, experts_dtype=torch.float8_e4m3fn), (x,))


# -- from C++ --------------------------------------------------------------------------------------------------------
Run = Callable[[ExportedProgram, list[Any]], list[Any]]


@pytest.fixture(scope="module")
def run_in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Compiles a program and runs it from C++, in a process without Python."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("cpp")
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    command = ["g++", "-std=c++20", f"-I{TORCH}/include", EXAMPLE, "-o", "run_program", f"-L{TORCH}/lib"]
    subprocess.run([*command, f"-Wl,-rpath,{TORCH}/lib", *libraries], check=True, cwd=folder)
    loaded = subprocess.run(["ldd", "run_program"], check=True, cwd=folder, capture_output=True, text=True).stdout
    assert not any(x in loaded for x in ("libpython", "libtorch_python", "not found"))

    def run(program: ExportedProgram, inputs: list[Any]) -> list[Any]:
        """Return the results of each input, one after the other."""
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        outputs = []
        for x in inputs:
            torch.save([x], folder / "inputs.pt")
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
            command = ["./run_program", "model.pt2", "inputs.pt", "outputs.pt"]
            subprocess.run(command, check=True, cwd=folder, env=environment)
            outputs += torch.load(folder / "outputs.pt")
        return outputs

    return run


class Gemm(torch.nn.Module):
    """A product with an epilogue that reads a bias, and one by two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((48, 64), (48,)))

    def forward(self, x: Any) -> Any:
        y, sums, most, _ = gt.gemm(x, self.weight.mT, epilogue=bias_gelu, bias=self.bias, alpha=0.5)
        return y, sums, most, gt.gemm(x, (self.weight.mT, self.weight.mT), epilogue=gated)


def reference_of_gemm(model: Gemm, x: Any) -> tuple[Any, ...]:
    product = x @ model.weight.mT
    y = F.gelu(product * 0.5 + model.bias)
    return y, (y * 0.25 + 1.5).sum(-1), product.abs().max(), F.silu(product) * product


def reference_of_mlp(mlp: Any, x: Any) -> Any:
    return (F.silu(x @ mlp.gate.weight.mT) * (x @ mlp.up.weight.mT)) @ mlp.down.weight.mT


def reference_of_moe(moe: gt.FusedMoE, x: Any) -> Any:
    """Every expert computes all tokens, and those of other experts get the weight 0."""
    weights, experts = (x @ moe.gate.weight.mT).softmax(-1).topk(moe.gate.top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    y = reference_of_mlp(moe.shared_experts, x)
    for i, (gate_up, down) in enumerate(zip(moe.experts.gate_up_proj, moe.experts.down_proj, strict=True)):
        gate, up = (x @ gate_up.mT).chunk(2, -1)
        y += torch.where(experts == i, weights, 0).sum(-1, keepdim=True) * ((F.silu(gate) * up) @ down.mT)
    return y


MODELS: dict[str, tuple[Callable[[], Any], Callable[..., Any], Any, float]] = {
    "gemm": (Gemm, reference_of_gemm, torch.float32, 1e-4),
    "mlp": (lambda: gt.FusedMLP(64, 96, activation="swiglu"), reference_of_mlp, torch.bfloat16, 0.03),
    "moe": (lambda: gt.FusedMoE(64, 96, 8, 2, shared_hidden=32), reference_of_moe, torch.float32, 1e-4),
    "moe, bf16": (lambda: gt.FusedMoE(64, 96, 4, 4, shared_hidden=32), reference_of_moe, torch.bfloat16, 0.03),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_in_cpp(name: str, run_in_cpp: Run) -> None:
    make, reference, dtype, tolerance = MODELS[name]
    model = make().to(dtype)
    inputs = [torch.randn(rows, 64, dtype=dtype) for rows in (2, random.randrange(3, 100), random.randrange(100, 999))]
    with torch.no_grad():
        outputs = run_in_cpp(decomposed(model, (torch.randn(16, 64, dtype=dtype),)), inputs)
        expected = [y for x in inputs for y in results(reference(model.double(), x.double()))]
    for x, y in zip(outputs, expected, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=tolerance, atol=tolerance * y.abs().max().item())
