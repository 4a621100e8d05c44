"""Ordinary loads and stores, atomics, acquire and release. PTX ISA, "ld", "st", "atom"."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.builder import current
from gemmsmith.lang.instruction import Instruction, f32, pred, registers_in, registers_out, u16, u32, u64
from gemmsmith.lang.machine import Blocking, Machine, Scope
from gemmsmith.lang.types import F32, I32, U16, U32, Type
from gemmsmith.lang.values import Registers, Value, ValueLike


def _vector(registers: Registers) -> str:
    if registers.count not in (1, 2, 4):
        raise KernelError(f"{registers.name}: {registers.count} registers; loads and stores move 1, 2 or 4")
    return "" if registers.count == 1 else f".v{registers.count}"


def _where(m: Machine, predicate: Any) -> np.ndarray:
    return np.asarray(m.active & m.column(predicate).astype(bool))


def _load(m: Machine, values: Registers, space: Any, address: Any, mask: Any) -> None:
    data = m.load(space, m.column(address), 4 * values.count, mask=mask)
    m.registers(values, write=True)[m.active] = np.ascontiguousarray(data).view(number_type(values))[m.active]


def bytes_of(m: Machine, values: Registers) -> np.ndarray:
    """Registers as they lie in memory."""
    return np.ascontiguousarray(np.asarray(m.registers(values)).astype(number_type(values))).view(np.uint8)


def number_type(values: Registers) -> Any:
    """numpy's type of a 32-bit register."""
    return {F32: np.float32, I32: np.int32}.get(values.type, np.uint32)


class LoadGlobal(Instruction):
    """4, 8 or 16 bytes where `predicate` holds, zeros elsewhere."""

    values: registers_out
    address: u64
    predicate: pred

    def text(self) -> str:
        count = self.values.count
        zeros = "\n".join(f"mov.b32 %{i}, 0;" for i in range(count))
        return f"""{{
        .reg .pred p;
        setp.ne.b32 p, {{predicate}}, 0;
        {zeros}
        @p ld.global{_vector(self.values)}.b32 {{values}}, [{{address}}];
        }}"""

    def simulate(self, m: Machine) -> None:
        _load(m, self.values, "global", self.address, _where(m, self.predicate))


class StoreGlobal(Instruction):
    """4, 8 or 16 bytes where `predicate` holds."""

    values: registers_in
    address: u64
    predicate: pred

    def text(self) -> str:
        return f"""{{
        .reg .pred p;
        setp.ne.b32 p, {{predicate}}, 0;
        @p st.global{_vector(self.values)}.b32 [{{address}}], {{values}};
        }}"""

    def simulate(self, m: Machine) -> None:
        m.store("global", m.column(self.address), bytes_of(m, self.values), mask=_where(m, self.predicate))


def _check_narrow(instruction: Instruction, bits: int) -> None:
    if bits not in (8, 16):
        raise KernelError(f"{instruction.mnemonic}: got {bits} bits; use 8 or 16, or registers of 32")


class LoadGlobalNarrow(Instruction):
    """1 or 2 bytes, `bits` wide, where `predicate` holds, zero elsewhere."""

    address: u64
    predicate: pred
    bits: int
    result = U16
    ptx = """{
    .reg .pred p;
    setp.ne.b32 p, {predicate}, 0;
    mov.b16 {result}, 0;
    @p ld.global.u{bits} {result}, [{address}];
    }"""

    def check(self) -> None:
        _check_narrow(self, self.bits)

    def simulate(self, m: Machine) -> np.ndarray:
        data = m.load("global", m.column(self.address), self.bits // 8, mask=_where(m, self.predicate))
        return np.ascontiguousarray(data).view(f"u{self.bits // 8}")[:, 0].astype(np.int64)


class StoreGlobalNarrow(Instruction):
    """The low `bits`, 8 or 16, of `value` where `predicate` holds."""

    address: u64
    value: u16
    predicate: pred
    bits: int
    ptx = """{
    .reg .pred p;
    setp.ne.b32 p, {predicate}, 0;
    @p st.global.b{bits} [{address}], {value};
    }"""

    def check(self) -> None:
        _check_narrow(self, self.bits)

    def simulate(self, m: Machine) -> None:
        data = m.column(self.value).astype(f"u{self.bits // 8}")[:, None].view(np.uint8)
        m.store("global", m.column(self.address), data, mask=_where(m, self.predicate))


class LoadShared(Instruction):
    """4, 8 or 16 bytes of the CTA's shared memory."""

    values: registers_out
    address: u32

    def text(self) -> str:
        return f"ld.shared{_vector(self.values)}.b32 {{values}}, [{{address}}];"

    def simulate(self, m: Machine) -> None:
        _load(m, self.values, "shared", self.address, None)


class StoreShared(Instruction):
    """4, 8 or 16 bytes to the CTA's shared memory."""

    values: registers_in
    address: u32

    def text(self) -> str:
        return f"st.shared{_vector(self.values)}.b32 [{{address}}], {{values}};"

    def simulate(self, m: Machine) -> None:
        m.store("shared", m.column(self.address), bytes_of(m, self.values))


class LoadSharedNarrow(Instruction):
    """1 or 2 bytes of the CTA's shared memory, zero-extended."""

    address: u32
    bits: int
    result = U16
    ptx = "ld.shared.u{bits} {result}, [{address}];"

    def check(self) -> None:
        _check_narrow(self, self.bits)

    def simulate(self, m: Machine) -> np.ndarray:
        data = m.load("shared", m.column(self.address), self.bits // 8)
        return np.ascontiguousarray(data).view(f"u{self.bits // 8}")[:, 0].astype(np.int64)


class StoreShared16(Instruction):
    """2 bytes to the CTA's shared memory."""

    address: u32
    value: u16
    ptx = "st.shared.b16 [{address}], {value};"

    def simulate(self, m: Machine) -> None:
        m.store("shared", m.column(self.address), m.column(self.value).astype(np.uint16)[:, None].view(np.uint8))


class LoadStrong(Instruction):
    """A word that other threads write at the same time, as a semaphore is: `order` relaxed, or acquire, which makes
    known what its writer released, as far as `scope`."""

    address: u64
    order: Literal["relaxed", "acquire"]
    scope: Scope
    result = U32
    ptx = "ld.{order}.{scope}.global.b32 {result}, [{address}];"

    def simulate(self, m: Machine) -> np.ndarray:
        data = m.load("global", m.column(self.address), 4, order=self.order, scope=self.scope)
        return np.ascontiguousarray(data).view(np.uint32)[:, 0].astype(np.int64)


class StoreStrong(Instruction):
    """Writes such a word: `order` relaxed, or release, which publishes what came before it, as far as `scope`."""

    address: u64
    value: u32
    order: Literal["relaxed", "release"]
    scope: Scope
    ptx = "st.{order}.{scope}.global.b32 [{address}], {value};"

    def simulate(self, m: Machine) -> None:
        data = m.column(self.value).astype(np.uint32)[:, None].view(np.uint8)
        m.store("global", m.column(self.address), data, order=self.order, scope=self.scope)


class WaitAcquire(Instruction):
    """Until a word that another CTA releases is `value`."""

    address: u64
    value: u32
    scope: Scope = "gpu"
    ptx = """{
    .reg .pred other;
    .reg .b32 word;
    WAIT:
    ld.acquire.{scope}.global.b32 word, [{address}];
    setp.ne.b32 other, word, {value};
    @other bra WAIT;
    }"""

    def simulate(self, m: Machine) -> Blocking:
        value, address = m.uniform(self.value), m.uniform(self.address)
        yield from m.wait_word(address, lambda word: word == value, f"not {value}", "acquire", self.scope)


class WaitReached(Instruction):
    """Until a word is at least `value`, or has been read `reads` times, relaxed; gives the word as it was last."""

    address: u64
    value: u32
    reads: u32
    result = U32
    ptx = """{
    .reg .pred more;
    .reg .b32 word, left;
    mov.b32 left, {reads};
    WAIT:
    ld.relaxed.gpu.global.b32 word, [{address}];
    sub.u32 left, left, 1;
    setp.lt.u32 more, word, {value};
    setp.ne.and.u32 more, left, 0, more;
    @more bra WAIT;
    mov.b32 {result}, word;
    }"""

    def simulate(self, m: Machine) -> Blocking:
        value, address = m.uniform(self.value), m.uniform(self.address)
        what, reads = f"less than {value}", m.uniform(self.reads)
        return (yield from m.wait_word(address, lambda word: word >= value, what, "relaxed", reads=reads))


class AtomicAdd(Instruction):
    """memory += value; gives what was there."""

    address: u64
    value: u32
    order: Literal["relaxed", "acquire", "release", "acq_rel"] = "relaxed"
    scope: Scope = "gpu"
    result = U32
    ptx = "atom.{order}.{scope}.global.add.u32 {result}, [{address}], {value};"

    def simulate(self, m: Machine) -> np.ndarray:
        address, value = m.column(self.address), m.column(self.value)
        return m.atomic("global", address, np.uint32, lambda a, b: a + b, value, order=self.order, scope=self.scope)


class ReduceAdd(Instruction):
    """memory += value of fp32, relaxed, in no fixed order."""

    address: u64
    value: f32
    ptx = "red.relaxed.gpu.global.add.f32 [{address}], {value};"

    def simulate(self, m: Machine) -> None:
        address, value = m.column(self.address), m.column(self.value)
        m.atomic("global", address, np.float32, lambda a, b: a + b, value, returns=False)


class ReduceAddU32(Instruction):
    """memory += value, relaxed: the atomic that does not give what was there, and so tells nothing of others."""

    address: u64
    value: u32
    ptx = "red.relaxed.gpu.global.add.u32 [{address}], {value};"

    def simulate(self, m: Machine) -> None:
        address, value = m.column(self.address), m.column(self.value)
        m.atomic("global", address, np.uint32, lambda a, b: a + b, value, returns=False)


def load_global_word(address: Value, predicate: ValueLike, type: Type, name: str) -> Value:
    """4 bytes by LoadGlobal, as one value; `name`: of the register."""
    word = current().registers(type, 1, name)
    LoadGlobal.emit(word, address, predicate)
    return word[0]


def store_global_word(address: Value, value: Value, predicate: ValueLike, name: str) -> None:
    """The reverse, by StoreGlobal."""
    word = current().registers(value.type, 1, name)
    word[0] = value
    StoreGlobal.emit(word, address, predicate)


def load_shared_word(address: Value, type: Type, name: str) -> Value:
    """4 bytes by LoadShared, likewise."""
    word = current().registers(type, 1, name)
    LoadShared.emit(word, address)
    return word[0]


def store_shared_word(address: Value, value: Value, name: str) -> None:
    """The reverse, by StoreShared."""
    word = current().registers(value.type, 1, name)
    word[0] = value
    StoreShared.emit(word, address)
