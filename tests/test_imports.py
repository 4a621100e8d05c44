"""What `import gemmsmith` and `gemmsmith --version` import, and that names imported when used are like others."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import gemmsmith


def imported(code: str, *names: str) -> set[str]:
    """Return which of the modules `names` a fresh Python has imported after `code`."""
    code = f"import sys\ntry:\n    {code}\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {*done.stderr.split()} & {*names}


def test_the_version_needs_neither_numpy_nor_rich() -> None:
    code = "sys.argv[1:] = ['--version']; from gemmsmith.cli import main; main()"
    assert imported(code, "click", "gemmsmith", "numpy", "rich") == {"click", "gemmsmith"}


@pytest.mark.parametrize("code", ["import gemmsmith", "from gemmsmith import gemm", "from gemmsmith import *"])
def test_the_library_needs_only_numpy(code: str) -> None:
    found = imported(code, "click", "cuda.bindings", "gemmsmith.api", "matplotlib", "rich", "torch")
    assert found == (set() if code == "import gemmsmith" else {"gemmsmith.api"})


def test_public_names() -> None:
    assert {*gemmsmith.__all__} <= {*dir(gemmsmith)}
    assert all(getattr(gemmsmith, x) is vars(gemmsmith)[x] for x in gemmsmith.__all__)
    assert pickle.loads(pickle.dumps(gemmsmith.gemm)) is gemmsmith.gemm
    assert not hasattr(gemmsmith, "gem")


@pytest.mark.parametrize("module", ["gemmsmith.core.config", "gemmsmith"])
def test_designs_are_registered_whatever_is_imported_first(module: str) -> None:
    code = f"from {module} import Config; assert Config(design='pingpong').design == 'pingpong'"
    assert imported(code, "gemmsmith.kernels.pingpong")
