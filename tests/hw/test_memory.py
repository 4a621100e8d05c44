"""Ordinary loads and stores, atomics: their PTX in every width, what they refuse, and the narrow loads."""

from __future__ import annotations

import numpy as np
import pytest
from tests.conformance.case import words
from tests.hw.one import Forms, computed, ptx, registers
from tests.instructions import load_strong

from gemmsmith import hw
from gemmsmith.core.errors import KernelError
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, U16, U32, U64
from gemmsmith.lang.values import Value

PREDICATED = "{{ .reg .pred p; setp.ne.b32 p, %{}, 0; {} }}"


def p(k: Builder):
    return k.pointer("p")


def half(k: Builder):
    return k.smem.to(U16)


FORMS: Forms = {
    PREDICATED.format(2, "mov.b32 %0, 0; @p ld.global.b32 %0, [%1];"):
        lambda k: hw.load_global(registers(k, 1), p(k), True),
    PREDICATED.format(3, "mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.v2.b32 {%0, %1}, [%2];"):
        lambda k: hw.load_global(registers(k, 2), p(k), True),
    PREDICATED.format(2, "@p st.global.b32 [%1], %0;"): lambda k: hw.store_global(registers(k, 1), p(k), True),
    PREDICATED.format(5, "@p st.global.v4.b32 [%4], {%0, %1, %2, %3};"):
        lambda k: hw.store_global(registers(k, 4, F32), p(k), True),
    PREDICATED.format(2, "mov.b16 %0, 0; @p ld.global.u16 %0, [%1];"):
        lambda k: hw.load_global_u8_or_u16(p(k), True, 16),
    PREDICATED.format(2, "mov.b16 %0, 0; @p ld.global.u8 %0, [%1];"): lambda k: hw.load_global_u8_or_u16(p(k), True, 8),
    PREDICATED.format(2, "@p st.global.b16 [%0], %1;"): lambda k: hw.store_global_u8_or_u16(p(k), half(k), True, 16),
    PREDICATED.format(2, "@p st.global.b8 [%0], %1;"): lambda k: hw.store_global_u8_or_u16(p(k), half(k), True, 8),
    "ld.shared.v2.b32 {%0, %1}, [%2];": lambda k: hw.load_shared(registers(k, 2), k.smem),
    "st.shared.b32 [%1], %0;": lambda k: hw.store_shared(registers(k, 1), k.smem),
    "ld.shared.u8 %0, [%1];": lambda k: hw.load_shared_u8_or_u16(k.smem, 8),
    "ld.shared.u16 %0, [%1];": lambda k: hw.load_shared_u8_or_u16(k.smem, 16),
    "st.shared.b16 [%0], %1;": lambda k: hw.store_shared_u16(k.smem, half(k)),
    "ld.acquire.gpu.global.b32 %0, [%1];": lambda k: load_strong(p(k), "acquire", "gpu"),
    "ld.relaxed.cluster.global.b32 %0, [%1];": lambda k: load_strong(p(k), "relaxed", "cluster"),
    "st.release.gpu.global.b32 [%0], %1;": lambda k: hw.store_strong(p(k), 1, "release", "gpu"),
    "atom.relaxed.gpu.global.add.u32 %0, [%1], %2;": lambda k: hw.atom_add_u32(p(k), 1),
    "atom.acq_rel.cluster.global.add.u32 %0, [%1], %2;": lambda k: hw.atom_add_u32(p(k), 1, "acq_rel", "cluster"),
    "red.relaxed.gpu.global.add.f32 [%0], %1;": lambda k: hw.red_add_f32(p(k), 1.0),
    "red.relaxed.gpu.global.add.u32 [%0], %1;": lambda k: hw.red_add_u32(p(k), 1),
    "red.relaxed.gpu.global.add.v4.f32 [%4], {%0, %1, %2, %3};":
        lambda k: hw.red_add_vector(registers(k, 4, F32), p(k), "f32"),
    "red.relaxed.gpu.global.add.noftz.v2.bf16x2 [%2], {%0, %1};":
        lambda k: hw.red_add_vector(registers(k, 2), p(k), "bf16x2"),
    "red.relaxed.gpu.global.add.noftz.f16x2 [%1], %0;": lambda k: hw.red_add_vector(registers(k, 1), p(k), "f16x2"),
    "red.relaxed.gpu.global.add.noftz.bf16 [%0], %1;": lambda k: hw.red_add_16(p(k), half(k), "bf16"),
    "{ .reg .pred other; .reg .b32 word; WAIT: ld.acquire.gpu.global.b32 word, [%0]; "
    "setp.ne.b32 other, word, %1; @other bra WAIT; }": lambda k: hw.spin_until_equal(p(k), 1),
    "{ .reg .pred more; .reg .b32 word, left; mov.b32 left, %3; WAIT: ld.relaxed.gpu.global.b32 word, [%1]; "
    "sub.u32 left, left, 1; setp.lt.u32 more, word, %2; setp.ne.and.u32 more, left, 0, more; @more bra WAIT; "
    "mov.b32 %0, word; }": lambda k: hw.spin_until_at_least(p(k), 1, 2),
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


@pytest.mark.parametrize("count", [3, 8])
def test_a_vector_has_1_2_or_4_registers(count: int) -> None:
    message = rf"values: got {count} registers; loads and stores take 1, 2 or 4"
    with pytest.raises(KernelError, match=message):
        ptx(lambda k: hw.load_shared(registers(k, count), k.smem))
    with pytest.raises(KernelError, match=message):
        ptx(lambda k: hw.store_global(registers(k, count), p(k), True))


def test_narrow_loads_are_of_8_or_16_bits() -> None:
    with (
        Builder("k", threads=32) as k,
        pytest.raises(KernelError, match="got 32 bits; use 8 or 16, or the instruction"),
    ):
        hw.load_shared_u8_or_u16(k.smem, 32)


def test_values_need_a_register_array() -> None:
    with Builder("k", threads=32) as k:
        with pytest.raises(KernelError, match="load_shared, operand values: needs a register array, got"):
            hw.load_shared(k.smem, k.smem)
        with pytest.raises(KernelError, match="store_global, operand address: expected a u64 value, got u32"):
            hw.store_global(registers(k, 1), k.smem, True)


@pytest.mark.parametrize("bits", [8, 16])
def test_narrow_loads_are_extended_by_zeros(bits: int, rng: np.random.Generator) -> None:
    x, count = rng.integers(0, 1 << 32, 64, np.uint32), 4 * 64 // (bits // 8)

    def record(word: Value) -> Value:
        k = current_builder()
        buffer = k.shared(4 * 64)
        hw.store_shared(words(word), buffer[0].address + (k.thread * 4).to(U32))
        hw.sync_threads()
        index = count - 1 - k.thread
        return hw.load_shared_u8_or_u16(buffer[0].address + (index * (bits // 8)).to(U32), bits).to(U32)

    np.testing.assert_array_equal(computed(record, x), x.view(f"u{bits // 8}")[::-1][:64])


def test_what_a_false_predicate_loads_is_zero(rng: np.random.Generator) -> None:
    """Whatever was in the register, and wherever the address points."""
    x = rng.integers(1, 1 << 32, 96, np.uint32)

    def record(word: Value) -> Value:
        k = current_builder()
        held = words(word)
        hw.load_global(held, k.thread.to(U64), k.lane < 0)
        return held[0] + word * (k.thread % 2).to(U32)

    np.testing.assert_array_equal(computed(record, x), np.where(np.arange(96) % 2 == 1, x, 0))
