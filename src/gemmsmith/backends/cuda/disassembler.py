"""Disassembly of cubins by NVIDIA's nvdisasm."""

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
def find_nvdisasm() -> str:
    """Return the program's path: from the pip package, or else from PATH. Raises CompileError."""
    try:
        for file in metadata.files(PACKAGE) or []:
            if file.stem == "nvdisasm" and file.suffix in ("", ".exe") and Path(str(file.locate())).is_file():
                return str(file.locate())
    except metadata.PackageNotFoundError:
        pass
    path = shutil.which("nvdisasm")
    if path is None:
        raise CompileError(f"nvdisasm was not found: pip install {PACKAGE}")
    return path


def disassemble(cubin: bytes, *, line_info: bool = False) -> str:
    """Return the disassembly of the cubin's code sections; `line_info`: with source lines. Raises CompileError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        process = subprocess.run(
            [find_nvdisasm(), "-c", *(["--print-line-info-inline"] if line_info else []), str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode:
        raise CompileError(f"nvdisasm: {process.stderr.strip()}")
    return process.stdout
