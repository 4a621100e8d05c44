"""The examples: kernels and designs from outside the package do what theirs say."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from docs import generate
from examples.custom_design import SERIAL
from examples.custom_kernel import Transpose, hazards, transpose

import gemmsmith
from gemmsmith import Config, ConfigError, Design, Spec, register_design
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.kernel_loader import device_guard
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.backends.reference import bounds
from gemmsmith.core.dtypes import BF16, FP32

ROOT = Path(__file__).parents[1]
CONFIGS = [
    Config("serial", (64, 64, 64), (1, 1), 2, 1),
    Config("serial", (128, 128, 64), (1, 2), 2),
    Config("serial", (128, 64, 32), (2, 1), 4, raster="n", serpentine=True),
    Config("serial", (64, 64, 64), (1, 1), 3, 1, splits=0),
    Config("serial", (64, 64, 64), (1, 1), 2, 1, cluster_splits=2),
]


WITH_TORCH = ["fp8_mlp", "train_tiny_transformer", "train_tiny_transformer --compile --steps 6"]


def test_the_example_of_jax_runs() -> None:
    """On the CPU, by the reference."""
    pytest.importorskip("jax_tvm_ffi")
    line = [sys.executable, ROOT / "examples/jax_gemm.py"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.removeprefix("cpu: largest error ")) < 0.05


@pytest.mark.torch
@pytest.mark.parametrize(
    "command",
    [
        "custom_design",
        "custom_kernel",
        "own_grouped",
        "own_gather",
        "own_int4",
        "own_attention",
        "own_functions",
        "bce",
        "moe_layer",
        *WITH_TORCH,
    ],
)
def test_it_runs(command: str) -> None:
    if command in WITH_TORCH:
        pytest.importorskip("torch")
    name, *words = command.split()
    line = [sys.executable, ROOT / "examples" / f"{name}.py", *words]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def imports_and_uses(code: str) -> set[str]:
    """The full names of what code imports from gemmsmith, and of what it reads of gemmsmith's packages."""
    tree, packages, found = ast.parse(code), dict[str, str](), set[str]()
    for x in ast.walk(tree):
        if isinstance(x, ast.Import):
            packages |= {y.asname or y.name: y.name for y in x.names if y.name.startswith("gemmsmith")}
        elif isinstance(x, ast.ImportFrom) and str(x.module).startswith("gemmsmith"):
            names = {y.asname or y.name: f"{x.module}.{y.name}" for y in x.names}
            packages |= {alias: name for alias, name in names.items() if name in generate.PACKAGES}
            found |= {*names.values()}
    reads = (x for x in ast.walk(tree) if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name))
    return {*packages.values()} | found | {f"{packages[x.value.id]}.{x.attr}" for x in reads if x.value.id in packages}


PUBLIC = {*generate.PACKAGES}.union(*([f"{x}.{name}" for name in generate.public(x)] for x in generate.PACKAGES))
FILES = [x for kind in ("examples/**/*.py", "docs/**/*.md", "docs/**/*.ipynb") for x in sorted(ROOT.glob(kind))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_needs_only_public_names(path: Path) -> None:
    text = path.read_text()
    blocks = {
        ".py": lambda: [text],
        ".md": lambda: re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE),
        ".ipynb": lambda: ["".join(x["source"]) for x in json.loads(text)["cells"] if x["cell_type"] == "code"],
    }
    assert imports_and_uses("\n".join(blocks[path.suffix]())) <= PUBLIC


def test_a_private_name_is_found() -> None:
    code = "from gemmsmith import hw\nfrom gemmsmith.core import dtypes\nimport gemmsmith as g\nhw.lead(g.gem, g.gemm)"
    assert imports_and_uses(code) - PUBLIC == {"gemmsmith.core.dtypes", "gemmsmith.gem", "gemmsmith.hw.lead"}


@pytest.mark.parametrize("package", generate.PACKAGES)
def test_every_public_name_is_documented(package: str) -> None:
    """By a docstring and on a page; the pages know all names that the package has."""
    documented = generate.public(package)
    pages = "".join((ROOT / "docs/reference" / f"{name}.md").read_text() for name in ("python", "kernels"))
    assert all(documented.values())
    assert [x for x in documented if f"`{package}.{x}`" not in pages and f"`hw.{x}(" not in pages] == []
    if "torch" not in package:
        module = import_module(package)
        names = [x for x, y in vars(module).items() if x[0] != "_" and not isinstance(y, ModuleType)]
        assert sorted(documented) == sorted(getattr(module, "__all__", names))


def test_a_custom_design_is_short() -> None:
    assert len((ROOT / "examples" / "custom_design.py").read_text().splitlines()) < 100


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_custom_design_is_right(config: Config, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = (int(x) for x in rng.integers(1, 300, 3))
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    a, b = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
    done = gemmsmith.simulate(a, b, config=config, seed=seed)
    assert done.hazards == []
    bounds.check(done.result, a, b, FP32, BF16).require()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_compiles_without_spills(config: Config) -> None:
    r = gemmsmith.plan(Spec((512, 512), "bf16"), Spec((512, 512), "bf16"), config=config).resources
    assert (r.spill_store_bytes, r.advisories) == (0, ())


def test_what_a_design_does_not_take_is_refused() -> None:
    a = Spec((512, 512), "bf16")
    for config, message in (
        (Config("serial", (192, 64, 64), consumers=3), r"consumers: got 3; use 1 or 2 with serial"),
        (Config("serial", (128, 128, 64), alias_epilogue=True), r"alias_epilogue: got serial; it needs cooperative"),
        (Config("serial", (128, 128, 64), sync_clusters=True), r"sync_clusters: got serial, .* it needs cooperative"),
    ):
        with pytest.raises(ConfigError, match=message):
            gemmsmith.plan(a, a, config=config)
    with pytest.raises(ConfigError, match="'serial', which is registered already"):
        register_design(Design("serial", print, {1: 200}))
    assert register_design(SERIAL) is SERIAL


@pytest.mark.parametrize("shape", [(70, 45), (1, 1), (32, 64), (33, 1)])
def test_a_custom_kernel(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    kernel, results = transpose(), np.full(x.shape[::-1], np.nan, np.float32)
    gemmsmith.launch(kernel, Transpose(*shape), source=x, target=results)  # raises HazardError for a hazard
    np.testing.assert_array_equal(results, x.T)
    assert compile_source(kernel.source, kernel.name).resources.spill_store_bytes == 0


def test_its_planted_race_is_reported() -> None:
    assert any("custom_kernel.py" in hazard for hazard in hazards(transpose(barrier=False)))
    assert hazards(transpose()) == []


def test_launch_checks_its_arguments() -> None:
    x = np.ones((32, 32), np.float32)
    for arguments, message in (
        ({"source": x}, "got source; transpose takes source, target"),
        ({"source": x, "target": x, "sauce": x}, "got source, target, sauce; transpose takes source, target"),
        ({"source": 0, "target": 0}, "got arrays on no device"),
        ({"source": x, "target": gemmsmith.Spec((32, 32), "fp32")}, "got arrays on cpu and spec"),
    ):
        with pytest.raises(gemmsmith.ArgumentError, match=message):
            gemmsmith.launch(transpose(), Transpose(32, 32), **arguments)
    with pytest.raises(gemmsmith.ArgumentError, match="kernel: got function; use what Builder.finish returns"):
        gemmsmith.launch(transpose, Transpose(32, 32), source=x, target=x)


def test_a_simulated_launch_returns_what_it_finds(tmp_path: Path) -> None:
    x = np.random.default_rng().standard_normal((32, 64), np.float32)
    arrays = {"source": x, "target": np.full((64, 32), np.nan, np.float32)}
    broken = gemmsmith.simulate_launch(transpose(barrier=False), Transpose(32, 64), arrays)
    assert broken.hazards[0].kind == "uninitialized read"
    assert broken.record is None
    done = gemmsmith.simulate_launch(transpose(), Transpose(32, 64), arrays, seed=3, record=True)
    assert (done.hazards, done.verdict.scope, done.result) == ([], "every schedule", arrays)
    np.testing.assert_array_equal(arrays["target"], x.T)
    done.to_html(tmp_path / "page.html")
    assert "transpose" in (tmp_path / "page.html").read_text()
    early = gemmsmith.simulate_launch(transpose(), Transpose(32, 64), arrays, dependent=True)
    assert "griddepcontrol.wait must come first" in str(early.hazards[0])
    with pytest.raises(gemmsmith.ArgumentError, match="got source; transpose takes source, target"):
        gemmsmith.simulate_launch(transpose(), Transpose(32, 64), {"source": x})
    with pytest.raises(gemmsmith.ArgumentError, match="seed: got 'a'"):
        gemmsmith.simulate_launch(transpose(), Transpose(32, 64), arrays, seed="a")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(700, 451), (3000, 2000)])
def test_a_custom_kernel_on_a_gpu(shape: tuple[int, int]) -> None:
    """The larger has more CTAs than are resident at a time."""
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    with device_guard(0):
        source, target = DeviceArray.from_numpy(x), DeviceArray.from_numpy(np.full(shape[::-1], np.nan, np.float32))
        gemmsmith.launch(transpose(), Transpose(*shape), source=source, target=target)
        np.testing.assert_array_equal(target.numpy(), x.T)


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_custom_design_on_a_gpu(config: Config) -> None:
    torch = pytest.importorskip("torch")
    a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((519, 328), (328, 264)))
    out = torch.full((519, 264), float("nan"), device="cuda").bfloat16()
    gemmsmith.gemm(a, b, out=out, config=config)
    want = a.double() @ b.double()
    assert ((out.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-2).all()


@pytest.mark.torch
def test_fp8_layers_in_the_simulator_are_those_of_the_reference() -> None:
    """Two kernels, and what the reference's float64 sums give, but for the rounding of what lies between."""
    torch = pytest.importorskip("torch")
    from examples import fp8_mlp

    tokens, width, hidden = 70, 200, 256
    x = torch.randn(tokens, width).bfloat16()
    weights = [torch.randn(shape).bfloat16() / 16 for shape in ((width, hidden), (width, hidden), (hidden, width))]
    quantized = gemmsmith.quantize(x)
    results, want = (fp8_mlp.Layers(*weights, backend=backend)(*quantized).float() for backend in ("sim", "reference"))
    assert (results - want).norm() < 2e-2 * want.norm()
    assert fp8_mlp.workspaces(fp8_mlp.Layers(*weights), *quantized) == [0, 0]
    assert (want - fp8_mlp.exact(x, *weights)).norm() < 0.1 * want.norm()
