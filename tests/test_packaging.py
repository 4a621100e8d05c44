"""What works without the optional packages, and the size of the wheel."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gemmsmith.backends.sim.report.timeline import Span, Timeline
from gemmsmith.core.errors import MissingPackageError

SOURCES = Path(__file__).parents[1] / "src/gemmsmith"
WITHOUT = """
import sys
for name in ("cuda", "nvidia", "matplotlib", "torch"):
    sys.modules[name] = None  # an import raises ImportError
"""


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)


def test_a_picture_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match="pip install matplotlib"):
        Timeline([Span(0, "row", "load", 0, 9, "a")]).plot(tmp_path / "timeline.png")


def test_the_command_simulates_without_cuda_and_matplotlib(tmp_path: Path) -> None:
    code = f"{WITHOUT}\nfrom gemmsmith.cli import main\nmain()"
    done = run_python(code, "run", "64x64x64", "--backend", "sim", "--output", str(tmp_path))
    assert "result    pass" in done.stdout.splitlines()
    assert done.stderr == "no picture of the timeline: pictures need matplotlib: pip install matplotlib\n"
    assert {x.suffix for x in tmp_path.iterdir()} == {".cu", ".json"}


def test_a_product_of_numpy_arrays_without_cuda() -> None:
    lines = "import numpy, gemmsmith", "x = numpy.ones((64, 64), numpy.float16)", "print(gemmsmith.gemm(x, x)[3, 5])"
    assert run_python("\n".join((WITHOUT, *lines))).stdout == "64.0\n"


def test_the_wheel_is_smaller_than_1_mb() -> None:
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in SOURCES.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                packed.write(path, path.relative_to(SOURCES.parent))
    assert wheel.tell() < 10**6
