"""Machine code as text, by NVIDIA's nvdisasm."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from gemmsmith.core.errors import CompileError

PACKAGE = "nvidia-cuda-nvdisasm"


@lru_cache(maxsize=1)
def nvdisasm() -> str:
    """The program's path: the one of the pip package, else the one on PATH. Raises CompileError."""
    try:
        for file in metadata.files(PACKAGE) or []:
            if file.stem == "nvdisasm" and file.suffix in ("", ".exe") and Path(str(file.locate())).is_file():
                return str(file.locate())
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which("nvdisasm")
    if found is None:
        raise CompileError(f"nvdisasm was not found: pip install {PACKAGE}")
    return found


def sass(cubin: bytes, *, lines: bool = False) -> str:
    """The cubin's code sections, disassembled; `lines`: with the lines that its line information names. Raises
    CompileError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [nvdisasm(), "-c", *["--print-line-info-inline"] * lines, str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise CompileError(f"nvdisasm: {done.stderr.strip()}")
    return done.stdout
