"""An exported header computes what Python does, bit for bit, and the example in C is right."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.host.export.test_headers import PLANS

import gemmsmith
from gemmsmith import Config, Plan
from gemmsmith.core.problem import SCALE_NAMES
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.host.export.signature import MAX_ADDRESS, Signature

torch = pytest.importorskip("torch")
HOME = next((x for x in ("/usr/local/cuda", "/opt/cuda") if Path(x, "include/cuda.h").exists()), None)
pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not (HOME and shutil.which("gcc")), reason="needs gcc and cuda.h"),
]  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "examples/deploy/gemm.c"

LIBRARY = """
#include <dlfcn.h>
#include "gemm.h"
static gemm_driver driver;
static gemm_kernels kernels;
static void *find(void *library, const char *name) { return dlsym(library, name); }
int load(void) {
    return gemm_find_driver(&driver, find, dlopen("libcuda.so.1", RTLD_NOW)) ? gemm_load(&kernels, &driver) : -1;
}
int launch(const gemm_args *x, void *stream) { return gemm_launch(&kernels, x, (CUstream)stream); }
int64_t workspace_bytes(const gemm_args *x) { return gemm_workspace_bytes(x); }
int64_t flag_bytes(const gemm_args *x) { return gemm_flag_bytes(x); }
"""


def random_matrix(rows: int, columns: int, layout: str = "n", dtype: Any = torch.bfloat16) -> torch.Tensor:
    """With rows (columns, of layout t) that are aligned to 16 bytes, and further apart than they are long."""
    outer, inner = (rows, columns) if layout == "n" else (columns, rows)
    x = torch.randn(outer, (inner + 7) // 8 * 8 + 8, device="cuda").to(dtype)[:, :inner]
    return x if layout == "n" else x.t()


def plain(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    """A header's arguments for out = a @ b, of a row-major out."""
    arrays = {"a": a, "b": b, "out": out}
    sizes = {"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
    strides = {f"{name}_stride": max(x.stride()) for name, x in arrays.items()}
    return sizes | strides | {name: x.data_ptr() for name, x in arrays.items()}


def scaled(acc: Any, bias: Any, alpha: Any) -> Any:
    return ((acc + bias) * alpha).relu()


class Header:
    """The functions of a plan's header, in a library. `signature`: its arguments."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        about = json.loads(plan.export(folder).with_suffix(".json").read_text())
        (folder / "library.c").write_text(LIBRARY)
        command = ["gcc", "-shared", "-fPIC", f"-I{HOME}/include", "library.c", "-o", "library.so", "-ldl"]
        subprocess.run(command, check=True, cwd=folder)
        self.library = ctypes.CDLL(str(folder / "library.so"))
        self.library.workspace_bytes.restype = self.library.flag_bytes.restype = ctypes.c_int64
        self.signature = Signature.of(plan._planned)
        fields: list[Any] = [
            (x["name"].replace(" ", "_"), ctypes.c_void_p if x["most"] == MAX_ADDRESS else ctypes.c_int64)
            for x in about["variables"]
        ]
        fields += [(name, ctypes.c_float) for name in about["numbers"]]
        fields += [("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_int64)]
        fields += [("flags", ctypes.c_void_p), ("flag_bytes", ctypes.c_int64)]
        self.arguments = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
        self.flags = torch.zeros(1 << 22, device="cuda", dtype=torch.uint8)
        torch.cuda.current_stream().synchronize()
        assert self.library.load() == 0

    def launch(self, values: Mapping[str, Any], flags: torch.Tensor | None = None) -> int:
        """Launch on the current stream, and return the status. `flags`: zeros in place of the header's own."""
        x = self.arguments(**{name.replace(" ", "_"): value for name, value in values.items()})
        x.workspace_bytes = self.library.workspace_bytes(ctypes.byref(x))
        x.flag_bytes = self.library.flag_bytes(ctypes.byref(x))
        workspace = torch.full((x.workspace_bytes + 1,), 255, device="cuda", dtype=torch.uint8)
        flags = self.flags if flags is None else flags
        x.workspace, x.flags = workspace.data_ptr(), flags.data_ptr()
        assert x.flag_bytes <= self.flags.numel()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status: int = self.library.launch(ctypes.byref(x), stream)
        return status


CONFIGS = {
    "chosen": ("nt", None, False),
    "fused": ("nn", None, True),
    "pingpong": ("tn", Config("pingpong", (128, 128, 64), (1, 2), 4), True),
    "split-K": ("nt", Config("cooperative", (128, 128, 64), (2, 1), 4, splits=3), False),
    "stream-K": ("tt", Config("cooperative", (128, 64, 64), (1, 1), 4, splits=0), False),
    "swapped": ("nt", Config("cooperative", (128, 64, 64), (1, 1), 4, cluster_splits=2, swap_ab=True), True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_pythons(name: str, tmp_path: Path) -> None:
    layout, config, is_fused = CONFIGS[name]
    a, b = random_matrix(512, 1024, layout[0]), random_matrix(1024, 768, layout[1])
    operands = {"bias": torch.randn(768, device="cuda"), "alpha": 0.5} if is_fused else {}
    plan = gemmsmith.plan(a, b, epilogue=scaled if is_fused else None, config=config, **operands)
    header = Header(plan, tmp_path)
    for _ in range(12):
        m, n, k = random.randrange(1, 3000), 8 * random.randrange(1, 300), random.randrange(1, 3000)
        a, b = random_matrix(m, k, layout[0]), random_matrix(k, n, layout[1])
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        x = plain(a, b, out)
        operands = {"bias": torch.randn(n, device="cuda"), "alpha": random.randrange(1, 9) / 8} if is_fused else {}
        if is_fused:
            x |= {"in_bias": operands["bias"].data_ptr(), "in_alpha": operands["alpha"]}
        assert header.launch(x) == 0, (m, n, k)
        python = gemmsmith.gemm(a, b, epilogue=scaled if is_fused else None, config=plan.config, **operands)
        assert torch.equal(out, python), (m, n, k)
    assert not header.flags.any()


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8, "bool": torch.bool,
          "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int32": torch.int32}  # fmt: skip


def indices_of(name: str, count: int, values: Mapping[str, int], along: str, dice: random.Random) -> list[int]:
    """Random values of an array of a grouped GEMM, of `count` elements; each row is scattered once."""
    extent, groups = values[along], values["groups"]
    draw: dict[str, Callable[[], list[int]]] = {
        "in_offsets": lambda: sorted(dice.randint(0, extent) for _ in range(count)),
        "in_sizes": lambda: [dice.randint(0, extent // groups) for _ in range(count)],
        "in_counts": lambda: [dice.randint(0, extent) for _ in range(count)],
        "in_gather": lambda: [dice.randrange(values["a_rows"]) for _ in range(count)],
        "in_scatter": lambda: dice.sample(range(values["out_rows"]), count),
    }
    return draw[name]()


def memory_of(x: Any, indices: list[int] | None = None) -> torch.Tensor:
    """Random values for an array, or indices, a flat tensor; of a result bytes that are NaN in most dtypes."""
    if indices is not None:
        return torch.tensor(indices, device="cuda", dtype=torch.int32)
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.strides, strict=True))
    if x.writable:
        return torch.full((span * x.itemsize,), 255, device="cuda", dtype=torch.uint8)
    values = torch.randn(span, device="cuda")
    return (values > 0 if f"{x.dtype}" == "bool" else values).to(DTYPES[f"{x.dtype}"])


def view_of(memory: torch.Tensor, x: Any) -> torch.Tensor:
    return memory.view(DTYPES[f"{x.dtype}"]).as_strided(x.shape, x.strides)


@pytest.mark.parametrize("kind", PLANS)
def test_bits_of_all_kinds(kind: str, tmp_path: Path) -> None:
    """For random sizes and strides; what is between a result's rows stays as it was."""
    plan = PLANS[kind]()
    header, dice, launched = Header(plan, tmp_path), random.Random(), 0
    signature, grouping = header.signature, plan._planned.binding.grouping
    for _ in range(400):
        if launched == 10:
            break
        values: dict[str, Any] = dict(signature.draw(dice))
        parts = {x.name: x.parts(values) for x in signature.arrays}
        if 0 in [size for x in parts.values() for part in x for size in part.shape]:
            continue
        if "in_scatter" in parts and values["m"] > values["out_rows"]:
            continue
        memory = {name: [memory_of(x) for x in both] for name, both in parts.items()}
        for name, both in parts.items():
            if grouping and f"{both[0].dtype}" == "int32" and not both[0].writable:
                indices = indices_of(name, both[0].shape[0], values, grouping.along, dice)
                memory[name] = [memory_of(both[0], indices)]
        for x in signature.arrays:
            values |= zip(filter(None, (x.name, x.second)), (y.data_ptr() for y in memory[x.name]), strict=True)
        numbers = {x: dice.randrange(-8, 8) / 8 for x in signature.numbers}
        if header.launch(values | numbers):
            continue
        results = {x.name: memory[x.name][0].clone() for x in signature.arrays if x.info.writable}
        for x in results:
            memory[x][0].fill_(255)
        views = {x: [*map(view_of, memory[x], both)] for x, both in parts.items()}
        given = {x: tuple(y) if len(y) > 1 else y[0] for x, y in views.items()}
        operands = {x[3:]: y for x, y in given.items() if x.startswith("in_")} | {x[3:]: y for x, y in numbers.items()}
        scale_a, scale_b = (operands.pop(x, None) for x in SCALE_NAMES.values())
        out = {x: given[result_argument(x)] for x in plan._planned.binding.graph.result_names}
        only = next(iter(out.values())) if len(out) == 1 else out
        try:
            plan.run(given["a"], given["b"], only, scale_a=scale_a, scale_b=scale_b, operands=operands)
        except gemmsmith.ArgumentError:  # one row, column or group, for which a plan would be another
            continue
        for x, got in results.items():
            if kind == "added" and x != "out":  # sums in any order
                got, want = got.view(torch.float32), memory[x][0].view(torch.float32)
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * values["k"] ** 0.5, equal_nan=True)
            else:
                assert torch.equal(got, memory[x][0]), (x, values)
        launched += 1
    assert launched == 10


@pytest.mark.parametrize("splits", [1, 3, 0])
def test_four_threads_and_a_graph(splits: int, tmp_path: Path) -> None:
    """Of one loaded kernel, each thread on a stream of its own and with flags of its own."""
    config = Config("cooperative", (128, 128, 64), (2, 1), 4, splits=splits)
    header = Header(gemmsmith.plan(random_matrix(512, 1024), random_matrix(1024, 768, "t"), config=config), tmp_path)

    def compute(seed: int) -> None:
        dice = random.Random(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            flags = torch.zeros_like(header.flags)
            for _ in range(25):
                m, n, k = dice.randrange(1, 2000), 8 * dice.randrange(1, 200), dice.randrange(1, 3000)
                a, b = random_matrix(m, k), random_matrix(k, n, "t")
                out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
                assert header.launch(plain(a, b, out), flags) == 0
                assert torch.equal(out, gemmsmith.gemm(a, b, config=config)), (m, n, k)
            assert not flags.any()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compute, [random.randrange(1 << 30) for _ in range(4)]))
    a, b = random_matrix(700, 900), random_matrix(900, 512, "t")
    out, graph = torch.full((700, 512), float("nan"), device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert header.launch(plain(a, b, out)) == 0
    for _ in range(3):
        a.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, gemmsmith.gemm(a, b, config=config))


def test_the_example(tmp_path: Path) -> None:
    gemmsmith.plan(random_matrix(1024, 1024), random_matrix(1024, 1024, "t")).export(tmp_path)
    libraries = [f"-L{x}" for x in ("/usr/local/nvidia/lib64", f"{HOME}/lib64/stubs") if Path(x).exists()]
    command = ["gcc", "-I.", f"-I{HOME}/include", EXAMPLE, "-o", "gemm", *libraries, "-lcuda", "-ldl"]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert subprocess.run([tmp_path / "gemm", "1000"], capture_output=True, text=True, check=True).stdout.endswith(
        "768: 0 are wrong\n"
    )


def test_the_engine(tmp_path: Path) -> None:
    """Of C++, for few and for many rows, eagerly and as a graph, against loops on the host."""
    engine = EXAMPLE.parent / "engine"
    subprocess.run([sys.executable, engine / "export.py", tmp_path], check=True)
    command = ["g++", "-std=c++17", "-O2", "-I.", f"-I{HOME}/include", engine / "engine.cpp", "-o", "engine", "-ldl"]
    subprocess.run(command, check=True, cwd=tmp_path)
    done = subprocess.run([tmp_path / "engine", "1", "48", "1000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("largest error") == 3


@pytest.mark.parametrize("splits", [1, 3, 0])
def test_tvm_ffi_on_torch_tensors(splits: int, tmp_path: Path) -> None:
    """Bit for bit as Python, on another stream, too, and in a graph; stream-K (0) has flags."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    config = Config("cooperative", (128, 128, 64), (1, 1), 4, splits=splits)
    plan = gemmsmith.plan(random_matrix(512, 1024), random_matrix(1024, 768, "t"), config=config)
    plan.export(tmp_path, tvm_ffi=True)
    flags = [f"-I{x}" for x in tvm_ffi.libinfo.include_paths()]
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{HOME}/include", *flags, "gemm_tvm_ffi.cc", "-o", "gemm.so"]
    subprocess.run([*command, tvm_ffi.libinfo.find_libtvm_ffi(), "-ldl"], check=True, cwd=tmp_path)
    function = tvm_ffi.load_module(str(tmp_path / "gemm.so")).gemm
    for _ in range(6):
        m, n, k = random.randrange(1, 3000), 8 * random.randrange(1, 300), random.randrange(1, 3000)
        a, b = random_matrix(m, k), random_matrix(k, n, "t")
        outs = [torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        want = gemmsmith.gemm(a, b, config=config)
        function(a, b, outs[0])
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(a, b, outs[1])
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            function(a, b, outs[2])
        graph.replay()
        assert all(torch.equal(out, want) for out in outs), (m, n, k)
    with pytest.raises(TypeError, match="a.dtype: got float32; use bfloat16"):
        function(a.float(), b, outs[0])


def test_the_example_of_jax() -> None:
    """By the kernel where JAX has the GPU, by the reference elsewhere."""
    pytest.importorskip("jax_tvm_ffi")
    example, environment = EXAMPLE.parents[1] / "jax_gemm.py", {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("largest error ")[1]) < 0.05
