"""The printed kernel, as a file to keep: what compiles it, and how it reads."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, Spec, hw
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.core.errors import KernelError
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, I64, U32, U64
from gemmsmith.lang.values import Constant, Value

CSTDINT = """typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t; typedef long int64_t;
"""
"""As glibc has them: 64 bits are long there, not long long."""


@lru_cache(maxsize=1)
def flagship() -> Kernel:
    return gemmsmith.plan(
        Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096)), config=Config()
    )._planned.kernel


@lru_cache(maxsize=1)
def largest_tile() -> str:
    """The source of what is chosen for a large product: two blocks of rows, six rounds of stores."""
    return gemmsmith.plan(Spec((8192, 8192), "bf16"), Spec((8192, 8192), "bf16", (1, 8192))).source


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


def test_lines_of_the_python_file() -> None:
    """They are all that is added, one before each line of the body that a statement made."""
    kernel = flagship()
    line = r'#line (\d+) ".*/(?:cooperative|wgmma_mainloop)\.py"\n'
    assert re.sub(line, "", kernel.source_with_line_directives) == kernel.source
    found = re.findall(line + r"\s*(\w+)\(", kernel.source_with_line_directives)
    design = (Path(gemmsmith.__file__).parent / "kernels" / "wgmma_mainloop.py").read_text().split("\n")
    (waited,) = {number for number, called in found if called == "wgmma_wait_1"}
    assert "accumulator.wait(pending=1)" in design[int(waited) - 1]


def test_roles_and_sections_have_a_comment() -> None:
    source = flagship().source
    comments = [
        "prologue: prefetch tensor maps, initialize barriers, load the first k-tiles",
        "producer warp",
        "consumer warpgroups",
        "mainloop",
        "epilogue",
    ]
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


def test_ifs_of_one_condition_share_a_scope_and_what_is_read_between_them_keeps_them_apart() -> None:
    with Builder("k", threads=32) as k:
        out, first = k.pointer("out"), (k.lane == 0).named("first")
        count = k.var(U32, 1, "count")
        for merges in (True, True, False):
            read = None if merges else count.get()
            with k.when(first):
                word = k.registers(U32, 1, "word")
                word[0] = k.lane.to(U32) + 1
                hw.store_global(word, out, True)
                if read is not None:
                    count.set(2)
                    word[0] = read
                    hw.store_global(word, out, True)
    source = k.finish().source
    assert source.count("if (first) {") == 2
    assert source.index("const uint32_t count_now = count;") < source.rindex("if (first) {")
    assert "uint32_t word = lane + 1u;" in source
    assert "uint32_t word_2 = lane + 1u;" in source
    compile_source(source, "k", cache=False)


def test_offsets_descriptors_and_policies_are_named_constants() -> None:
    source = flagship().source
    body = source[source.index("\n{\n") :]
    constants = dict(re.findall(r"constexpr \w+ (\w+) = (\w+);", body))
    buffers = {str(b.offset_constant.name).replace(" ", "_"): f"{b.offset}u" for b in flagship().buffers}
    assert buffers.items() <= constants.items()
    assert constants["EVICT_NORMAL"] == "0x1000000000000000ull"
    assert constants["DESCRIPTOR_SBO_1024_SWIZZLE_128B"] == "0x4000004000000000ull"
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


def test_values_have_their_names_and_temporaries_are_numbered() -> None:
    body = flagship().source[flagship().source.index("\n{\n") :]
    assert len(re.findall(r" t\d+ = ", body)) < 5
    assert "const int consumer_warpgroup = warpgroup - 1;" in body
    with Builder("k", threads=32) as k:
        twice = k.lane * 3
        hw.mbarrier_init(k.smem, (twice * twice).to(U32))
        source = k.finish().source
    assert "const int t0 = lane * 3;" in source
    assert "mbarrier_init(smem, t0 * t0);" in source


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


def test_a_large_products_kernel_is_short_narrow_and_says_everything_once() -> None:
    source = largest_tile()
    assert source.count("\n") < 500
    assert max(map(len, source[source.index("\n{\n") :].splitlines())) <= 120
    assert len(re.findall(r"const int m_offset = \(", source)) == 1
    assert source.count("= tile_coordinates(") == 3
    assert source.count("float accumulator[2][96];") == 1
    for once in ("store_matrix(packed, ", "tma_store(&", "= pack_bf16("):
        assert source.count(once) == 1


@pytest.mark.parametrize(
    "epilogue", [None, lambda acc, bias: (acc + bias).relu(), lambda acc, c: (acc + c, acc.sum(-1))]
)
def test_pieces_of_an_epilogue_are_printed_once(epilogue) -> None:
    operands = {"bias": Spec((1024,), "bf16"), "c": Spec((512, 1024), "bf16")}
    taken = [name for name in operands if epilogue and name in epilogue.__code__.co_varnames]
    for config in (Config(tile=(256, 192, 64), cluster=(1, 1), stages=2), Config("pingpong", (64, 256, 64))):
        plan = gemmsmith.plan(
            Spec((512, 512), "bf16"), Spec((512, 1024), "bf16", (1, 512)), config=config,
            epilogue=epilogue, operands={name: operands[name] for name in taken} or None,
        )  # fmt: skip
        assert plan.source.count("tma_store(&") == 1
        assert plan.resources.spill_store_bytes == plan.resources.spill_load_bytes == 0
        assert max(map(len, plan.source.splitlines())) <= 120


def test_a_device_function_is_printed_once_and_called_with_what_it_takes_from_the_kernel() -> None:
    calls = []

    def compute(x: Value, y: Value) -> list[Value]:
        calls.append(x)
        total = (x + y * width).named("total")
        return [total, (total * 2).named("twice")]

    with Builder("k", threads=32) as k:
        out, width = k.pointer("out"), k.parameter("width")
        for i in range(2):
            total, twice = k.call("both", compute, k.lane, k.lane + i, parameter_names=["x", "y"])
            (half,) = k.call("half", lambda x: [x >> 1], twice, parameter_names=["x"])
            word = k.registers(U32, 2, "word")
            word[0], word[1] = total.to(U32), half.to(U32)
            hw.store_global(word, out + (k.lane * 8 + i * 256).to(U64), True)
        kernel = k.finish()
    assert len(calls) == 1
    assert "struct Both { int total; int twice; };\n" in kernel.source
    function = kernel.source[kernel.source.index("Both both(") : kernel.source.index("extern")]
    assert " ".join(function.split()).startswith(
        "Both both(int x, int y, int width) { const int total = x + y * width; const int twice = total * 2; "
        "return {total, twice}; }"
    )
    assert kernel.source.count("const auto [total, twice] = both(lane, lane, width);") == 1
    assert kernel.source.count("const auto [total_2, twice_2] = both(lane, lane + 1, width);") == 1
    assert "word[1] = (uint32_t)half(twice);" in kernel.source
    assert compile_source(kernel.source, "k", cache=False).cubin
    memory, data = GlobalMemory(), np.full((2, 32, 2), 0xDEADBEEF, np.uint32)
    assert simulate(kernel, 1, {"out": memory.add_buffer(data, "out"), "width": 3}, memory).hazards == []
    want = np.arange(32)[None] + (np.arange(32)[None] + np.arange(2)[:, None]) * 3
    assert np.array_equal(data, np.stack([want, want], -1))


def test_a_device_function_only_computes() -> None:
    def effect(x: Value) -> list[Value]:
        hw.mbarrier_arrive(x)
        return [x]

    with (
        Builder("k", threads=32) as k,
        pytest.raises(KernelError, match="device function f must not have side effects"),
    ):
        k.call("f", effect, k.smem, parameter_names=["x"])


def test_a_row_of_a_register_array_by_an_unrolled_index(rng: np.random.Generator) -> None:
    with Builder("k", threads=32) as k:
        out, source = k.pointer("out"), k.pointer("source")
        held = k.registers_2d(U32, 2, 4, "held")
        for row in held:
            hw.load_global(row, source + (k.lane * 16).to(U64), True)
        with k.unroll(2, name="row") as row, k.unroll(4) as i:
            held[row][i] = held[row][i] + (row * 4 + i).to(U32)
        with pytest.raises(KernelError, match="needs a register array"), k.unroll(2) as row:
            hw.store_global(held[row], out, True)
        with pytest.raises(KernelError, match=r"held\[2\]: it has 2 elements"):
            held[2]
        with k.range(2, name="i") as i, pytest.raises(KernelError, match="run-time value"):
            held[i]
        for n, row in enumerate(held):
            hw.store_global(row, out + (k.lane * 16 + n * 512).to(U64), True)
        kernel = k.finish()
    assert "uint32_t held[2][4];" in kernel.source
    assert "held[row][i] = held[row][i] + (row * 4 + i);" in kernel.source
    assert compile_source(kernel.source, "k", cache=False).cubin
    memory, data = GlobalMemory(), np.full((2, 32, 4), 0xDEADBEEF, np.uint32)
    given = rng.integers(0, 1 << 16, (32, 4)).astype(np.uint32)
    arguments = {"out": memory.add_buffer(data, "out"), "source": memory.add_buffer(given, "source")}
    assert simulate(kernel, 1, arguments, memory).hazards == []
    assert np.array_equal(data, given[None] + np.arange(8).reshape(2, 1, 4))


def test_names_are_per_scope_and_a_loop_of_one_step_is_its_body() -> None:
    with Builder("k", threads=32) as k:
        x = k.var(I32, 0, "x")
        for _ in range(2):
            with k.range(3, name="i") as i:
                square = (i * i).named("square")
                x.set(x.get() + square * square)
        with k.unroll(1, name="i") as i:
            x.set(i + 7)
        source = k.finish().source
    body = " ".join(source[source.index("int x = 0;") :].split())
    loop = "#pragma unroll 1 for (int i = 0; i < 3; ++i) { const int square = i * i; x += square * square; } "
    assert body == f"int x = 0; {loop * 2}x = 7; }}"


@pytest.mark.parametrize("seed", range(20))
def test_conversions_that_are_left_out_change_nothing(seed: int) -> None:
    """C++ computes with the types that the kernel says: the compiler's own evaluation of constants tells."""
    random = Random(seed)
    numbers = [random.choice([0, 1, 7, 2**31 - 1, random.randrange(2**31)]) for _ in range(4)]
    with Builder("k", threads=32) as k:
        names = [k.parameter(f"p{i}") for i in range(4)]
        wide = [names[0].to(U32), names[1].to(U64), names[2].to(U32).to(U64), names[3].to(I64)]
        out = k.pointer("out")
        value = wide[1]
        for _ in range(6):
            a = random.choice([names[random.randrange(4)].to(U32), wide[0] + names[3].to(U32)])
            other = random.choice([a.to(U64), wide[2], wide[3].to(U64), (names[0] // 3 - names[1] // 2).to(U64)])
            op = random.choice(["__add__", "__sub__", "__mul__"])
            value = getattr(*random.choice([(value, op), (other, op)]))(other)
        word = k.registers(U32, 2, "word")
        word[0], word[1] = value.to(U32), (value >> 32).to(U32)
        hw.store_global(word, out + (k.lane * 8).to(U64), True)
        kernel = k.finish()
    memory, data = GlobalMemory(), np.zeros((32, 2), np.uint32)
    arguments = {"out": memory.add_buffer(data, "out")} | {f"p{i}": x for i, x in enumerate(numbers)}
    assert simulate(kernel, 1, arguments, memory).hazards == []
    lines = kernel.source[kernel.source.index("extern") :].splitlines()
    first = next(i for i, line in enumerate(lines) if "lane = " in line) + 1
    # The body up to the store, as a constexpr function.
    stop = next(i for i, line in enumerate(lines) if "word[1] =" in line) + 1
    while not lines[stop - 1].endswith(";"):
        stop += 1
    body = "\n".join(lines[first:stop]).replace("uint32_t word[2];", "uint32_t word[2] = {};")
    head = kernel.source[kernel.source.index("#ifdef") : kernel.source.index("#endif") + 7]
    text = (
        f"{head}__device__ constexpr uint64_t f(int p0, int p1, int p2, int p3) {{\n{body}\n"
        f"return (uint64_t)word[1] << 32 | word[0]; }}"
        f"\nconstexpr uint64_t found = f({', '.join(map(str, numbers))});"
        f'\nstatic_assert(found == {int(data[0, 0]) | int(data[0, 1]) << 32}ull, "");\n'
        f'extern "C" __global__ void k() {{}}\n'
    )
    assert compile_source(text, "k", cache=False).cubin


def test_a_register_is_declared_with_its_first_value_only() -> None:
    """The second assignment reads the first."""
    with Builder("twice", threads=32) as k:
        out, x = k.pointer("out"), k.registers(F32, 1, "x")
        x[0] = 1.5
        x[0] = x[0] + k.lane.to(F32)
        hw.store_global(x, out + (k.lane * 4).to(U64), True)
        kernel = k.finish()
    assert "float x = 1.5f;" in kernel.source
    assert compile_source(kernel.source, kernel.name).resources.spill_store_bytes == 0
    memory, found = GlobalMemory(), np.zeros(32, np.float32)
    assert simulate(kernel, 1, {"out": memory.add_buffer(found, "out")}, memory).hazards == []
    np.testing.assert_array_equal(found, np.arange(32) + 1.5)
