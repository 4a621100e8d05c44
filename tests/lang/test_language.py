"""The language: what it refuses while a kernel is built, and how it prints."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from tests.pipelines import PipelineAsync

import gemmsmith
from gemmsmith import hw, lang
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.collective.pipeline import Peers, PipelineTmaAsync, init_barriers
from gemmsmith.core.dtypes import BF16, E4M3, FP16, FP32, INT8, INT32
from gemmsmith.core.errors import ConfigError, KernelError
from gemmsmith.core.mma import Mma, select_mma
from gemmsmith.core.tile import Tile
from gemmsmith.hw.mbarrier import MbarrierInit
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.statements import instructions
from gemmsmith.lang.types import F32, I32, PRED, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, evaluate


def test_values_have_no_truth_value() -> None:
    with Builder("k", threads=32) as k, pytest.raises(KernelError, match=r"k\.when"):
        bool(k.lane == 0)


def test_types_do_not_mix() -> None:
    with Builder("k", threads=32) as k:
        with pytest.raises(KernelError, match="expected a u32 value, got i32"):
            k.smem + k.lane
        with pytest.raises(KernelError, match="mbarrier_arrive, operand barrier"):
            hw.mbarrier_arrive(k.lane)
        with pytest.raises(KernelError, match="out of range for u32"):
            k.smem + -1
        with pytest.raises(KernelError, match=r"read it with \.get"):
            k.lane + k.var(I32, 0, "x")  # type: ignore[operator]


def test_an_error_names_the_kernels_line() -> None:
    def collective() -> None:
        hw.mbarrier_arrive(current_builder().lane)

    message = r"^test_language\.py:\d+: mbarrier_arrive, operand barrier: expected a u32 value, got i32"
    with pytest.raises(KernelError, match=message), Builder("k", threads=32):
        collective()


def test_registers_take_build_time_indices_only() -> None:
    with Builder("k", threads=32) as k:
        r = k.registers(F32, 4, "r")
        with pytest.raises(KernelError, match="run-time value"):
            r[k.lane]
        with pytest.raises(KernelError, match="it has 4 elements"):
            r[4] = 0
        with k.unroll(2, name="i") as i:
            r[i * 2] = 1.0
        with k.range(2, name="i") as i, pytest.raises(KernelError, match="run-time value"):
            r[i] = 1.0


def test_nothing_is_recorded_outside_a_builder() -> None:
    with pytest.raises(KernelError, match="Builder"):
        hw.sync_warp()


def test_each_thread_has_its_own_builder() -> None:
    seen = []

    def build(name: str) -> None:
        with Builder(name, threads=32) as k:
            seen.append(current_builder() is k)

    threads = [threading.Thread(target=build, args=(f"k{i}",)) for i in range(8)]
    with Builder("outer", threads=32) as k:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert current_builder() is k
    assert seen == [True] * 8


def test_shared_memory_is_laid_out_by_alignment() -> None:
    """Tiles keep their order; vectors and barriers follow; results over the stages begin where these do."""
    with Builder("k", threads=128) as k:
        barrier, vector = k.shared(8, alignment=8, name="barrier"), k.shared(40, name="vector")
        a = k.shared(384, stages=2, alignment=128, name="a")
        b = k.shared(Tile(BF16, 64, 64, "K"), name="b")
        results = [k.shared(512, alignment=512, name=name, over=(a, b)) for name in ("d", "e")]
        kernel = k.finish()
    assert [x.offset for x in (a, b, vector, barrier)] == [0, 1024, 1024 + 8192, 1024 + 8192 + 40]
    assert [x.offset for x in results] == [0, 512]
    assert kernel.shared_bytes == 1024 + 8192 + 48


def test_shared_memory_limit_names_the_excess() -> None:
    with Builder("k", threads=128) as k:
        k.shared(1024, stages=300, name="big")
        with pytest.raises(ConfigError, match=r"exceed the 232448 available per CTA by 74752"):
            k.finish()


@pytest.mark.parametrize("count", [0, 20, 30, 257, 264])
def test_setmaxnreg_values(count: int) -> None:
    with Builder("k", threads=384), pytest.raises(KernelError, match="multiple of 8 from 24 to 256"):
        hw.set_registers(count)


def test_register_budgets_must_fit_the_pool_and_name_the_line() -> None:
    with Builder("k", threads=384) as k:
        with k.warpgroup(0):
            hw.set_registers(48)
        with k.warpgroups(1, 3):
            hw.set_registers(240)
        with pytest.raises(KernelError, match=r"setmaxnreg at test_language\.py:\d+: .* 24 more than the pool"):
            k.finish()


def test_the_language_names_no_instruction() -> None:
    family = re.compile(r"wgmma|\bw?mma|\btma\b|mbarrier|cp.async|setmaxnreg|swizzle", re.IGNORECASE)
    for path in Path(lang.__path__[0]).glob("*.py"):
        assert not family.findall(path.read_text()), path


def test_a_barrier_nobody_arrives_on() -> None:
    with Builder("k", threads=128) as k:
        pipe = PipelineAsync(2, "p")
        init_barriers(pipe)
        with k.warpgroup(0):
            pipe.producer_commit(pipe.producer_start_state())
        with pytest.raises(KernelError, match="no thread arrives at barrier p empty"):
            k.finish()


@pytest.mark.parametrize(("cluster_size", "warpgroups"), [(1, 1), (1, 2), (2, 2), (2, 3)])
def test_arrival_counts_come_from_the_roles(cluster_size: int, warpgroups: int) -> None:
    with Builder("k", threads=128 * (warpgroups + 1), cluster=(cluster_size, 1, 1)) as k:
        pipe = PipelineTmaAsync(2, transaction_bytes=128, peers=Peers(cluster_size))
        init_barriers(pipe)
        with k.warpgroup(0), k.warp(0):
            pipe.producer_acquire(pipe.producer_start_state())
        with k.warpgroups(1, 1 + warpgroups):
            pipe.consumer_release(pipe.consumer_start_state())
        assert [x.count.value for x, _ in instructions(k.finish().body) if isinstance(x, MbarrierInit)] == [
            1,
            4 * warpgroups * cluster_size,
        ]


def test_roles_must_exist() -> None:
    with Builder("k", threads=256) as k:
        with pytest.raises(KernelError, match="there are 2 in the kernel"), k.warpgroups(1, 3):
            pass
        with k.warpgroup(0), pytest.raises(KernelError, match="there are 4 in a warpgroup"), k.warp(4):
            pass


def test_only_roles_in_a_row_are_one_chain() -> None:
    with Builder("k", threads=384) as k:
        out = k.pointer("out")
        for i in range(3):
            with k.warpgroup(i):
                word = k.registers(U32, 1, "word")
                word[0] = k.smem * 0 + i
                hw.store_global(word, out + (k.thread * 4).to(U64), True)
            if i == 0:
                hw.sync_threads()
        source = k.finish().source
    assert "else {" not in source  # warpgroup 0 would run what is left
    assert source.count("else if (warpgroup == 2)") == 1


def test_wgmma_shapes_and_dtypes() -> None:
    with Builder("k", threads=128) as k:
        d = k.registers(F32, 4, "d")
        zero = k.smem.to(U64)
        with pytest.raises(KernelError, match="got f16.bf16.bf16; use one of f32.bf16.bf16, f32.f16.f16"):
            hw.wgmma_mma(d, zero, zero, True, 8, Mma(BF16, BF16, FP16))
        with pytest.raises(KernelError, match="multiple of 8 from 8 to 256"):
            hw.wgmma_mma(d, zero, zero, True, 12, select_mma(BF16, BF16, FP32))
        with pytest.raises(KernelError, match="multiple of 16 from 16 to 256 or 8 or 24"):
            hw.wgmma_mma(d, zero, zero, True, 40, select_mma(INT8, INT8, INT32))
        with pytest.raises(KernelError, match="wgmma d: got 4 registers; use 8"):
            hw.wgmma_mma(d, zero, zero, True, 16, select_mma(BF16, BF16, FP32))
        with pytest.raises(KernelError, match="b: got MN-major elements of fp8_e4m3; use K-major ones"):
            hw.wgmma_mma(d, zero, zero, True, 8, select_mma(E4M3, E4M3, FP32), "K", "MN")


def test_integers_wrap_or_are_refused() -> None:
    assert evaluate("+", U32, 2**32 - 1, 2) == 1
    assert evaluate("-", U32, 0, 1) == 2**32 - 1
    with pytest.raises(KernelError, match="overflow"):
        evaluate("*", I32, 2**30, 2)
    with pytest.raises(KernelError, match="needs a >= 0 and b > 0"):
        evaluate("/", I32, -1, 2)


def _program(seed: int):
    """A random straight-line program with a variable, printed and executed: (kernel, what it should store)."""
    rng = np.random.default_rng(seed)
    with Builder("k", threads=32) as k:
        out = k.pointer("out")
        x = k.var(I32, 3, "x")
        values: list = [(k.lane, np.arange(32)), (x.get(), np.full(32, 3))]
        held = np.full(32, 3)
        for _ in range(20):
            (a, va), (b, vb) = (values[rng.integers(len(values))] for _ in range(2))
            op = rng.integers(4)
            if op == 0:
                values.append(((a + b) & 1023, (va + vb) & 1023))
            elif op == 1:
                values.append((k.select(a < b, a, b), np.where(va < vb, va, vb)))
            elif op == 2:
                values.append((a ^ (b + 1), va ^ (vb + 1)))
            else:
                x.set(a)
                held = va
                values.append((x.get(), held))
        total, want = values[-1]
        for v, w in values[:-1]:
            total, want = (total + v) & 0xFFFF, (want + w) & 0xFFFF
        word = k.registers(U32, 1, "word")
        word[0] = total.to(U32)
        hw.store_global(word, out + (k.lane * 4).to(U64), True)
        return k.finish(), want


@pytest.mark.parametrize("seed", range(20))
def test_values_never_change_behind_their_users_back(seed: int) -> None:
    kernel, want = _program(seed)
    out = np.zeros(32, np.uint32)
    memory = GlobalMemory()
    assert simulate(kernel, 1, {"out": memory.add_buffer(out, "out")}, memory).hazards == []
    assert np.array_equal(out, want)
    # The printed text, as far as it is Python too: constants, and assignments to x.
    text = kernel.source[kernel.source.index("{\n", kernel.source.index("k(\n")) :]
    got = []
    for lane in range(32):
        names: dict = {"lane": lane}
        for line in re.split(r"[;{}]\n", text):
            line = re.sub(r"^x (\S)= (.*)", r"x = x \1 (\2)", " ".join(line.split()))
            if "word =" in line:
                got.append(eval(_python(line.split("=", 1)[1]), {}, names))
            elif line.startswith(("const int ", "int x", "x =", "const bool")) and "threadIdx" not in line:
                name, expression = line.split("=", 1)
                names[name.split()[-1]] = eval(_python(expression), {}, names)
    assert np.array_equal(got, want)


def _python(expression: str) -> str:
    import re

    expression = expression.replace("(uint32_t)", "")
    while m := re.search(r"\(([^()]*(?:\([^()]*\)[^()]*)*)\? ([^:()]*) : ([^()]*)\)", expression):
        expression = expression[: m.start()] + f"(({m[2]}) if ({m[1]}) else ({m[3]}))" + expression[m.end() :]
    if "?" in expression:
        c, rest = expression.split("?", 1)
        a, b = rest.split(":", 1)
        expression = f"({a}) if ({c}) else ({b})"
    return expression


def test_names_in_the_source_are_ascii_and_of_one_thing_each() -> None:
    with Builder("k", threads=32) as k:
        hw.store_global(_filled(k, "x"), k.pointer("größe"), k.lane == 0)
        for name in ("x", "x_2", "x", "x_2", "größe"):
            hw.store_global(_filled(k, name), k.pointer("out"), k.lane == 0)
    source = k.finish().source
    arrays = re.findall(r"float (\w+) =", source)
    assert arrays == ["x", "x_2", "x_2_2", "x_3", "x_2_3", "gr_e_2"]
    assert source.isascii()


def _filled(k: Builder, name: str) -> RegisterArray:
    array = k.registers(F32, 1, name)
    array[0] = 1.0
    return array


BLOCKS: dict[str, Callable[[Builder], AbstractContextManager[object]]] = {
    "loop": lambda k: k.range(4),
    "branch": lambda k: k.when(k.thread < 4),
    "role": lambda k: k.warpgroup(0),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_value_ends_with_the_block_that_defines_it(block: str) -> None:
    """The error is at the use, and shows the line of the definition."""
    message = rf"^test_language\.py:\d+: tripled was defined inside a {block} that has ended, at test_language\.py:\d+ "
    message += rf"\(tripled = .*\); to carry a value out, declare a k\.var before the {block}$"

    def record() -> None:
        with Builder("k", threads=128) as k:
            with BLOCKS[block](k):
                tripled = (k.thread * 3).named("tripled")
                tripled + 1
            tripled + 2

    with pytest.raises(KernelError, match=message):
        record()


def test_a_rebound_sum_is_refused_after_its_loop() -> None:
    """In the loop itself, Python's `total` is the one before the loop in each iteration."""
    with Builder("k", threads=32) as k:
        source = k.pointer("source")
        total = hw.load_global_word(source, True, F32, "first")
        with k.range(4) as i:
            total = total + hw.load_global_word(source + i.to(U64) * 4, True, F32, "word")
        with pytest.raises(KernelError, match=r"inside a loop .*\(total = total \+ hw\.load.*k\.var"):
            hw.store_global_word(source, total, True, "result")


@pytest.mark.parametrize("block", BLOCKS)
def test_variables_and_registers_end_with_their_block(block: str) -> None:
    with Builder("k", threads=128) as k:
        with BLOCKS[block](k):
            inner, word, rows = k.var(I32, 0, "inner"), k.registers(F32, 1, "word"), k.registers_2d(F32, 2, 2, "rows")
        for name, use in {
            "inner": (inner.get, lambda: inner.set(1)),
            "word": (lambda: word[0], lambda: word.__setitem__(0, 1.0), lambda: hw.load_shared(word, k.smem)),
            "rows": (lambda: rows[1][0], lambda: hw.load_shared(rows[0], k.smem)),
        }.items():
            for x in use:
                with pytest.raises(KernelError, match=rf"{name} was defined inside a {block} that has ended"):
                    x()


def test_loop_indices_and_dead_branches_end() -> None:
    with Builder("k", threads=32) as k:
        for loop in (k.range, k.unroll):
            with loop(4, name="step") as i:
                pass
            with pytest.raises(KernelError, match=r"step was defined inside a loop .*\(with loop\(4"):
                i + 1
        with k.when(k.lane < 4):
            x = k.lane * 5
        with k.otherwise(), pytest.raises(KernelError, match="inside a branch that has ended"):
            x + 1
        with k.when(Constant(PRED, False)):
            x = k.lane * 5
        with pytest.raises(KernelError, match="inside a branch that has ended"):
            k.select(k.lane < 2, x, 0)


def test_a_variable_carries_a_value_out_of_a_loop() -> None:
    with Builder("k", threads=32) as k:
        out = k.pointer("out")
        total = k.var(I32, 0, "total")
        with k.range(5) as i:
            total.set(total.get() + i * k.lane)
        with k.when(k.lane > 2):
            total.set(total.get() + 1)
        hw.store_global_word(out + (k.lane * 4).to(U64), total.get(), True, "result")
        kernel = k.finish()
    found = np.zeros(32, np.int32)
    gemmsmith.launch(kernel, out=found)
    assert np.array_equal(found, 10 * np.arange(32) + (np.arange(32) > 2))


def test_what_no_operand_can_be_is_refused() -> None:
    with Builder("k", threads=32) as k:
        address, block = k.pointer("address"), k.shared(512, name="block")
        with pytest.raises(KernelError, match=r"got 1\.0, which has no type; use Constant\(F32, 1\.0\)"):
            hw.store_global_word(address, 1.0, True, "word")  # type: ignore[arg-type]
        with pytest.raises(KernelError, match=r"got 7, which has no type"):
            hw.store_shared_word(block[0].address, 7, "word")  # type: ignore[arg-type]
        with pytest.raises(KernelError, match=r"hw\.load_global_word\(address \+ offset"):
            address[k.lane]
        with pytest.raises(KernelError, match=r"store with hw\.store_global_word"):
            address[k.lane] = 1
        with pytest.raises(KernelError, match=r"shared buffer block: .* use \[0\]\.address"):
            block.address  # noqa: B018
        with pytest.raises(KernelError, match=r"load_shared, operand address: .* use \[0\]\.address"):
            hw.load_shared_word(block, F32, "word")  # type: ignore[arg-type]
        with pytest.raises(KernelError, match="operand address: expected a u64 value or a number, got 'source'"):
            hw.load_global_word("source", True, F32, "word")  # type: ignore[arg-type]


def test_the_narrower_side_is_to_be_converted() -> None:
    with Builder("k", threads=32) as k:
        address = k.pointer("address")
        for mixed in (lambda: k.lane * 4 + address, lambda: address + k.lane * 4, lambda: k.lane < address):
            with pytest.raises(KernelError, match=r"expected a u64 value, got i32; convert the i32 with \.to\(U64\)$"):
                mixed()
        assert (k.lane << address.to(U32)).type is I32  # a shift count has a type of its own
