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
from gemmsmith import Config, Spec, hw
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant

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


def test_roles_and_sections_have_a_comment() -> None:
    source = flagship().source
    comments = ["prologue: barriers", "producer warp", "math warpgroups", "mainloop", "epilogue"]
    places = [source.index(f"// {text}\n") for text in comments]
    assert places == sorted(places)


def test_adjacent_ifs_of_one_condition_are_one() -> None:
    with Builder("k", threads=32) as k:
        first, other = (k.lane == 0).named("first"), (k.lane == 1).named("other")
        x = k.var(I32, 0, "x")
        for i, condition in enumerate((first, first, other, first)):
            with k.when(condition):
                x.set(i)
        with k.otherwise():
            x.set(4)
        with k.when(first):  # behind an else
            x.set(5)
        x.set(6)
        with k.when(first):
            x.set(7)
        source = k.finish().source
    body = " ".join(source[source.index("int x = 0;") :].split())
    assert body == (
        "int x = 0; if (first) { x = 0; x = 1; } if (other) { x = 2; } if (first) { x = 3; } else { x = 4; } "
        "if (first) { x = 5; } x = 6; if (first) { x = 7; } }"
    )


def test_offsets_descriptors_and_policies_are_named_constants() -> None:
    source = flagship().source
    body = source[source.index("\n{\n") :]
    constants = dict(re.findall(r"constexpr \w+ (\w+) = (\w+);", body))
    buffers = {str(b.start.name).replace(" ", "_"): f"{b.offset}u" for b in flagship().buffers}
    assert buffers.items() <= constants.items()
    assert constants["EVICT_NORMAL"] == "0x1000000000000000ull"
    assert constants["DESCRIPTOR_SWIZZLE_128B"] == "0x4000004000000000ull"
    assert all(len(re.findall(rf"\b{name}\b", body)) > 1 for name in constants)
    assert not re.search(r"0x\w+ull|\d{5}u", body[body.index("const int thread") :])


def test_constants_of_one_name_and_different_numbers() -> None:
    with Builder("k", threads=32) as k:
        for number in (1, 2, 1):
            hw.mbarrier_init(k.smem, Constant(U32, number, "COUNT"))
        source = k.finish().source
    assert re.findall(r"constexpr .*;", source) == [
        "constexpr uint32_t COUNT = 1u;",
        "constexpr uint32_t COUNT_2 = 2u;",
    ]
    assert re.findall(r"mbarrier_init\(smem, (\w+)\);", source) == ["COUNT", "COUNT_2", "COUNT"]


def test_values_are_called_by_what_they_are() -> None:
    body = flagship().source[flagship().source.index("\n{\n") :]
    assert not re.search(r"\bt(_\d+)?\b", body)
    assert "const int math_warpgroup = warpgroup - 1;" in body
    with Builder("k", threads=32) as k:
        twice = k.lane * 3
        hw.mbarrier_init(k.smem, (twice * twice).to(U32))
        source = k.finish().source
    assert "const int product = lane * 3;" in source
    assert "mbarrier_init(smem, product * product);" in source


def test_a_variable_is_read_by_its_name_until_it_changes() -> None:
    with Builder("k", threads=32) as k:
        x = k.var(U32, 0, "x")
        before = x.get()
        hw.mbarrier_init(k.smem + before, before)
        x.set(before + 1)
        hw.mbarrier_init(k.smem + before, x.get())
        source = k.finish().source
    body = " ".join(source[source.index("uint32_t x = 0u;") :].split())
    assert body == (
        "uint32_t x = 0u; mbarrier_init(smem + x, x); const uint32_t x_now = x; x += 1u; "
        "mbarrier_init(smem + x_now, x); }"
    )
