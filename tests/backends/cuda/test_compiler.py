"""NVRTC without a GPU: cubins, PTX, resources, and errors that say what is wrong and where."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from gemmsmith.backends.cuda import compiler
from gemmsmith.backends.cuda.compiler import Compiled, compile_ptx, compile_source
from gemmsmith.core.errors import CompileError

SCALE = 'extern "C" __global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }'

SPILLING = """extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* p, int n) {
    float x[60];
#pragma unroll
    for (int i = 0; i < 60; i++) x[i] = p[i * n];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 60; i++) p[i * n + 1] = x[i] * x[59 - i];
}"""

TWO = """extern "C" __global__ void small(float* p) { p[0] = 1; }
extern "C" __global__ void shared(float* p) {
    __shared__ float s[1000];
    s[threadIdx.x] = p[0];
    __syncthreads();
    p[1] = s[5];
}"""

SERIALIZED = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : (C7508) Ignoring setmaxnreg to maintain compatibility into other kernels
ptxas info    : Compiling entry function 'gemm' for 'sm_90a'
ptxas info    : Function properties for gemm
ptxas         .     16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size, 1024 bytes smem
gemm.cu(3): warning #177-D: variable "x" was declared but never referenced
Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"
"""


def test_products_and_sums_are_fused_only_where_the_source_says_so() -> None:
    ptx = compile_ptx('extern "C" __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; }', "f")
    assert "fma" not in ptx
    assert "mul.rn.f32" in ptx
    assert "add.rn.f32" in ptx


def test_a_cubin_its_symbol_and_its_resources() -> None:
    compiled = compile_source(SCALE, "scale", cache=False)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert b"scale" in compiled.cubin
    resources = compiled.resources
    assert 0 < resources.registers <= 32
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes, resources.shared_bytes) == (
        0,
        0,
        0,
        0,
    )
    assert resources.advisories == ()


def test_spills_are_counted() -> None:
    resources = compile_source(SPILLING, "spilling", cache=False).resources
    assert resources.registers <= 32
    assert min(resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) > 0


def test_resources_are_those_of_the_named_kernel() -> None:
    assert compile_source(TWO, "small", cache=False).resources.shared_bytes == 0
    assert compile_source(TWO, "shared", cache=False).resources.shared_bytes == 4000


def test_every_number_and_advisory_of_a_log() -> None:
    resources = Compiled(b"", SERIALIZED, "gemm").resources
    assert (resources.registers, resources.stack_bytes, resources.shared_bytes) == (168, 16, 1024)
    assert (resources.spill_store_bytes, resources.spill_load_bytes) == (24, 32)
    assert len(resources.advisories) == 3
    for said, advisory in zip(("C7510", "C7508", "#177-D"), resources.advisories, strict=True):
        assert said in advisory


def test_ptx() -> None:
    ptx = compile_ptx(SCALE, "scale")
    assert ".target sm_90a" in ptx
    assert ".entry scale" in ptx
    assert "\0" not in ptx


def test_an_empty_log_leaves_pythons_own_bytes_alone() -> None:
    compile_ptx(SCALE, "scale")  # a log of one byte, NUL: b" " * 1 would be every b" " of the process
    assert bytes([32])[0] == 32
    assert b"a b"[1:2][0] == 32


@pytest.mark.parametrize(
    ("body", "said", "line"),
    [
        ("\n  int x = y;", 'identifier "y" is undefined', "    2    int x = y;"),
        ("\n#error stop", "stop", "    2  #error stop"),
        ('\n  asm volatile("nonsense.op;");', "nonsense", "nonsense.op;"),
    ],
)
def test_an_error_holds_the_log_and_the_lines(body: str, said: str, line: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile_source(f'extern "C" __global__ void broken() {{{body}\n}}', "broken")
    message = str(caught.value)
    assert message.startswith("broken: NVRTC_ERROR_COMPILATION")
    log, _, lines = message.rpartition("\n")
    assert said in log
    assert line in lines


def test_a_ptx_error() -> None:
    with pytest.raises(CompileError, match="undefined"):
        compile_ptx('extern "C" __global__ void broken() { nothing(); }', "broken")


@pytest.fixture
def forgotten() -> Iterator[None]:
    """NVRTC is looked for again, in the test and after it."""
    found = (compiler._nvrtc, compiler.nvrtc_version)
    for each in found:
        each.cache_clear()
    yield
    for each in found:
        each.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_no_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    with pytest.raises(CompileError, match="libnvrtc.so.13.*pip install .*nvidia-cuda-nvrtc"):
        compile_source(SCALE, "scale")


def test_importing_the_backend_imports_no_bindings() -> None:
    code = (
        "import sys, gemmsmith; "
        "from gemmsmith.backends.cuda import cache, compiler, driver, kernel_loader, listing; "
        "print([m for m in sys.modules if m.startswith('cuda.') or m == 'platformdirs'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
