"""The printed kernel, as a file to keep: what compiles it, and how it reads."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.lang.kernel import Kernel

CSTDINT = """typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t; typedef long int64_t;
"""
"""As glibc has them: 64 bits are long there, not long long."""


@lru_cache(maxsize=1)
def flagship() -> Kernel:
    return gemmsmith.plan(Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096)), config=Config()).kernel


def test_it_compiles_with_the_headers_of_a_host_compiler() -> None:
    source = flagship().source.replace("__CUDACC_RTC__", "IS_NVRTC").replace("#include <cstdint>", CSTDINT)
    assert CSTDINT in source
    assert compile_source(source, flagship().name, cache=False).cubin


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_the_command_in_its_header_compiles_it(tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text(flagship().source)
    command = re.search(r"compile: (nvcc .*),", flagship().source)
    assert command
    subprocess.run([*shlex.split(command[1]), "kernel.cu"], cwd=tmp_path, check=True)
    assert (tmp_path / "kernel.cubin").stat().st_size
