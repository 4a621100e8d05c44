"""How C++ is laid out: lines that are too long, asm statements, device functions."""

from __future__ import annotations

import re
from random import Random

import pytest

from gemmsmith import hw
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.mma import select_mma
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.cpp import WIDTH, comment_lines, instruction_wrapper, join_definitions, wrap_line
from gemmsmith.lang.statements import IssueInstruction
from gemmsmith.lang.types import F32, U32, U64


@pytest.mark.parametrize("seed", range(50))
def test_a_long_line_is_broken_and_says_the_same(seed: int) -> None:
    random = Random(seed)

    def expression(depth: int) -> str:
        names = ["a", "stage_index", "0x1000000000000000ull", "-1"]
        if not depth:
            return random.choice(names)
        parts = [expression(depth - 1) for _ in range(random.randrange(2, 4))]
        return random.choice([f"f({', '.join(parts)})", f"({' + '.join(parts)})", f"x[{' - '.join(parts)}]"])

    text, indent = f"const int value = {expression(random.randrange(2, 6))};", " " * random.choice([0, 4, 16])
    lines = wrap_line(text, indent).split("\n")
    assert "".join(" ".join(lines).split()) == "".join(text.split())
    assert all(len(line) <= WIDTH and line == line.rstrip() for line in lines)
    assert lines[0].startswith(indent + "const")
    assert all(line.startswith(indent + "    ") for line in lines[1:])


def test_a_line_is_broken_where_it_is_nested_least_and_at_a_comma_first() -> None:
    inner = "g(" + ", ".join(["argument"] * 6) + ") + offset_of_the_stage"
    lines = wrap_line(f"call(a_name, {inner}, another_argument_of_the_call, {inner});", "").split("\n")
    assert lines == [f"call(a_name, {inner},", f"    another_argument_of_the_call, {inner});"]


def test_comments_are_wrapped() -> None:
    text = " ".join(["word"] * 60)
    lines = comment_lines(text).split("\n")
    assert all(line.startswith("// ") and len(line) <= WIDTH for line in lines)
    assert " ".join(line[3:].strip() for line in lines) == text


def test_one_line_functions_stand_together_and_others_apart() -> None:
    long = "int f() {\n    return 1;\n}"
    assert join_definitions(["int a();", "int b();", long, long, "int c();"]) == (
        f"int a();\nint b();\n\n{long}\n\n{long}\n\nint c();\n"
    )


def _wrapper(record) -> str:  # type: ignore[no-untyped-def]
    with Builder("k", threads=128) as k:
        record(k)
        last = k.body.statements[-1]
    assert isinstance(last, IssueInstruction)
    return instruction_wrapper(last.instruction)


def test_a_short_asm_statement_is_one_line() -> None:
    assert _wrapper(lambda k: hw.wgmma_commit()) == (
        '__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" '
        '::: "memory"); }'
    )


def test_a_wide_asm_statement_has_all_its_text_and_operands() -> None:
    def record(k: Builder) -> None:
        zero = k.smem.to(U64)
        hw.wgmma_mma(k.registers(F32, 128, "d"), zero, zero, True, n=256, mma=select_mma(BF16, BF16, FP32))

    text = _wrapper(record)
    assert all(len(line) <= WIDTH for line in text.split("\n"))
    assert re.findall(r'"\+f"\(d\[(\d+)\]\)', text) == [str(i) for i in range(128)]
    ptx = "".join(re.findall(r'"([^"]*)"(?![:(])', text.split(": ", 1)[0])).split("\\n")
    assert "{" + ", ".join(f"%{i}" for i in range(128)) + "}," in ptx


def test_a_word_of_ptx_that_is_too_long_is_cut_at_a_dot() -> None:
    def record(k: Builder) -> None:
        barrier = k.smem
        hw.tma_load_multicast(k.tensor_map("a"), 0, 0, 0, k.smem, barrier, 3, k.smem.to(U64))

    text = _wrapper(record)
    assert all(len(line) <= WIDTH for line in text.split("\n"))
    ptx = "".join(re.findall(r'^ +"(.*)"$', text, re.MULTILINE))
    assert ptx.startswith("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes")
    assert ".multicast::cluster.L2::cache_hint [%4], [%0, {%1, %2, %3}], [%5], %6, %7;" in ptx


def test_an_array_of_registers_is_passed_by_reference() -> None:
    def record(k: Builder) -> None:
        hw.store_shared(k.registers(U32, 2, "pair"), k.smem)

    assert "store_shared(const uint32_t (&values)[2], uint32_t address) {" in _wrapper(record)
