"""Loads and stores, atomics, acquire and release. PTX ISA, "ld", "st", "atom", "red"."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from gemmsmith.core.dtypes import BF16, FP16, FP32
from gemmsmith.core.errors import KernelError
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.instruction import (
    Instruction,
    InstructionFamily,
    f32,
    pred,
    registers_in,
    registers_out,
    u16,
    u32,
    u64,
)
from gemmsmith.lang.types import F32, I32, U16, U32, ScalarType
from gemmsmith.lang.values import RegisterArray, Value, ValueLike
from gemmsmith.machine import Blocking, Machine, Scope, Space


class MemoryInstruction(InstructionFamily):
    """Common base of loads and stores in `space`.

    Some have a `predicate`: a thread for which it does not hold accesses nothing.
    """

    space: ClassVar[Space] = "shared"

    def mask(self, m: Machine) -> np.ndarray | None:
        """Return which threads access memory, a bool per thread; None, for all active ones, without a predicate."""
        has_predicate = "predicate" in self.operand_types
        return np.asarray(m.active & m.per_thread(self.predicate).astype(bool)) if has_predicate else None


class VectorInstruction(MemoryInstruction):
    """Common base of loads and stores of 1, 2 or 4 registers of 32 bits, `values`, by each thread."""

    @property
    def vector(self) -> str:
        """The modifier, such as ".v4", that names the number of registers."""
        if self.values.count not in (1, 2, 4):
            raise KernelError(f"{self.values.name}: got {self.values.count} registers; loads and stores take 1, 2 or 4")
        return "" if self.values.count == 1 else f".v{self.values.count}"


def register_bytes(m: Machine, values: RegisterArray) -> np.ndarray:
    """Return the bytes (threads, 4 * count) of registers, in the order in which a store writes them."""
    return np.ascontiguousarray(np.asarray(m.registers.view(values)).astype(numpy_dtype(values))).view(np.uint8)


def numpy_dtype(registers: RegisterArray) -> Any:
    """Return the numpy dtype of 32-bit registers."""
    return {F32: np.float32, I32: np.int32}.get(registers.type, np.uint32)


class LoadShared(VectorInstruction):
    """Loads 4, 8 or 16 bytes from the CTA's shared memory."""

    values: registers_out
    address: u32
    ptx = "ld.shared{vector}.b32 {values}, [{address}];"

    def simulate(self, m: Machine) -> None:
        data = m.memory.load(self.space, m.per_thread(self.address), 4 * self.values.count, mask=self.mask(m))
        loaded = np.ascontiguousarray(data).view(numpy_dtype(self.values))
        m.registers.view(self.values, write=True)[m.active] = loaded[m.active]


class LoadGlobal(LoadShared):
    """Loads 4, 8 or 16 bytes of global memory if `predicate` holds; otherwise the registers `values` become zero."""

    address: u64
    predicate: pred
    space = "global"
    ptx = """{
    .reg .pred p;
    setp.ne.b32 p, {predicate}, 0;
    {zeros}
    @p ld.global{vector}.b32 {values}, [{address}];
    }"""

    @property
    def zeros(self) -> str:
        """PTX that sets the registers to zero."""
        return "\n".join(f"mov.b32 %{i}, 0;" for i in range(self.values.count))


class StoreShared(VectorInstruction):
    """Stores 4, 8 or 16 bytes to the CTA's shared memory."""

    values: registers_in
    address: u32
    ptx = "st.shared{vector}.b32 [{address}], {values};"

    def simulate(self, m: Machine) -> None:
        m.memory.store(self.space, m.per_thread(self.address), register_bytes(m, self.values), mask=self.mask(m))


class StoreGlobal(StoreShared):
    """Stores 4, 8 or 16 bytes to global memory if `predicate` holds."""

    address: u64
    predicate: pred
    space = "global"
    ptx = """{
    .reg .pred p;
    setp.ne.b32 p, {predicate}, 0;
    @p st.global{vector}.b32 [{address}], {values};
    }"""


def _check_bits(self: Any) -> None:
    """Raise KernelError unless `self.bits` is 8 or 16; a `check` of several instructions."""
    if self.bits not in (8, 16):
        raise KernelError(
            f"{self.mnemonic}: got {self.bits} bits; use 8 or 16, or the instruction for 32-bit registers"
        )


class _LoadBits(MemoryInstruction):
    """Common base of loads of `bits`, 8 or 16, which are extended by zeros to 16 bits."""

    result = U16
    result_name = "loaded"
    wrapper = "load_{space}_u{bits}"
    check = _check_bits

    def simulate(self, m: Machine) -> np.ndarray:
        data = m.memory.load(self.space, m.per_thread(self.address), self.bits // 8, mask=self.mask(m))
        return np.ascontiguousarray(data).view(f"u{self.bits // 8}")[:, 0].astype(np.int64)


class LoadGlobalU8OrU16(_LoadBits):
    """Loads `bits` (8 or 16) of global memory if `predicate` holds, zero-extended to 16 bits; otherwise returns 0."""

    address: u64
    predicate: pred
    bits: int
    space = "global"
    ptx = """{
    .reg .pred p;
    setp.ne.b32 p, {predicate}, 0;
    mov.b16 {result}, 0;
    @p ld.global.u{bits} {result}, [{address}];
    }"""


class LoadSharedU8OrU16(_LoadBits):
    """Loads `bits` (8 or 16) from the CTA's shared memory, zero-extended to 16 bits."""

    address: u32
    bits: int
    ptx = "ld.shared.u{bits} {result}, [{address}];"


class StoreGlobalU8OrU16(MemoryInstruction):
    """Stores the low `bits` (8 or 16) of `value` to global memory if `predicate` holds."""

    address: u64
    value: u16
    predicate: pred
    bits: int
    ptx = """{
    .reg .pred p;
    setp.ne.b32 p, {predicate}, 0;
    @p st.global.b{bits} [{address}], {value};
    }"""
    wrapper = "store_global_u{bits}"
    check = _check_bits

    def simulate(self, m: Machine) -> None:
        data = m.per_thread(self.value).astype(f"u{self.bits // 8}")[:, None].view(np.uint8)
        m.memory.store("global", m.per_thread(self.address), data, mask=self.mask(m))


class StoreSharedU16(Instruction):
    """Stores 16 bits to the CTA's shared memory."""

    address: u32
    value: u16
    ptx = "st.shared.b16 [{address}], {value};"

    def simulate(self, m: Machine) -> None:
        data = m.per_thread(self.value).astype(np.uint16)[:, None].view(np.uint8)
        m.memory.store("shared", m.per_thread(self.address), data)


class StoreStrong(Instruction):
    """Strong store (st.relaxed or st.release at `scope`) of a word that other threads access concurrently."""

    address: u64
    value: u32
    order: Literal["relaxed", "release"]
    scope: Scope
    ptx = "st.{order}.{scope}.global.b32 [{address}], {value};"

    def simulate(self, m: Machine) -> None:
        data = m.per_thread(self.value).astype(np.uint32)[:, None].view(np.uint8)
        m.memory.store("global", m.per_thread(self.address), data, order=self.order, scope=self.scope)


class SpinUntilEqual(Instruction):
    """Spins until the word of global memory at `address` equals `value`.

    The load that sees it is an acquire at `scope`.
    """

    waits_for_threads = True
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
        yield from m.memory.spin_wait(address, lambda word: word == value, f"not {value}", "acquire", self.scope)


class SpinUntilAtLeast(Instruction):
    """Spins on ld.relaxed until the word of global memory at `address` is at least `value`; returns the last word.

    It gives up after `max_polls` loads.
    """

    waits_for_threads = True
    address: u64
    value: u32
    max_polls: u32
    result = U32
    result_name = "last_value"
    ptx = """{
    .reg .pred more;
    .reg .b32 word, left;
    mov.b32 left, {max_polls};
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
        result = yield from m.memory.spin_wait(
            address, lambda word: word >= value, f"less than {value}", "relaxed", max_polls=m.uniform(self.max_polls)
        )
        return result


class AtomAddU32(Instruction):
    """atom.add.u32: memory += value; returns the old value."""

    address: u64
    value: u32
    order: Literal["relaxed", "acquire", "release", "acq_rel"] = "relaxed"
    scope: Scope = "gpu"
    result = U32
    result_name = "previous"
    ptx = "atom.{order}.{scope}.global.add.u32 {result}, [{address}], {value};"

    def simulate(self, m: Machine) -> np.ndarray:
        address, value = m.per_thread(self.address), m.per_thread(self.value)
        return m.memory.atomic(address, np.uint32, lambda a, b: a + b, value, order=self.order, scope=self.scope)


class RedAddF32(Instruction):
    """red.add.f32 (relaxed): memory += value. The order of additions is not deterministic."""

    address: u64
    value: f32
    ptx = "red.relaxed.gpu.global.add.f32 [{address}], {value};"

    def simulate(self, m: Machine) -> None:
        address, value = m.per_thread(self.address), m.per_thread(self.value)
        m.memory.atomic(address, np.float32, lambda a, b: a + b, value, returns=False, rounds=True)


class RedAddVector(VectorInstruction):
    """red.add (relaxed): memory += values, without returning the old ones. Each element is added atomically by itself.

    `values`: 1, 2 or 4 registers of `dtype`: f32, or packed pairs of f16 or bf16.
    """

    values: registers_in
    address: u64
    dtype: Literal["f32", "f16x2", "bf16x2"]

    @property
    def required_arch(self) -> str:  # type: ignore[override]
        """Vectors, and bf16, need sm_90."""
        return "sm_80" if self.values.count == 1 and self.dtype != "bf16x2" else "sm_90"

    def text(self) -> str:
        no_ftz = "" if self.dtype == "f32" else ".noftz"
        return f"red.relaxed.gpu.global.add{no_ftz}{self.vector}.{self.dtype} [{{address}}], {{values}};"

    def simulate(self, m: Machine) -> None:
        """Add the elements of each thread one after the other, since only each by itself is atomic."""
        data, address = register_bytes(m, self.values), m.per_thread(self.address)
        element = _PTX_DTYPES[self.dtype.removesuffix("x2")]
        for i, column in enumerate(np.ascontiguousarray(data).view(f"u{element.itemsize}").T):
            _add_atomically(m, address + i * element.itemsize, column, element)


class RedAdd16(Instruction):
    """red.add.noftz (relaxed): memory += value, of an f16 or bf16. ptxas implements it as a loop around atom.cas."""

    address: u64
    value: u16
    dtype: Literal["f16", "bf16"]
    ptx = "red.relaxed.gpu.global.add.noftz.{dtype} [{address}], {value};"

    @property
    def required_arch(self) -> str:  # type: ignore[override]
        """bf16 needs sm_90."""
        return "sm_90" if self.dtype == "bf16" else "sm_80"

    def simulate(self, m: Machine) -> None:
        value = np.asarray(m.per_thread(self.value)).astype(np.uint16)
        _add_atomically(m, m.per_thread(self.address), value, _PTX_DTYPES[self.dtype])


_PTX_DTYPES: dict[str, Any] = {name: x.numpy for name, x in (("f32", FP32), ("f16", FP16), ("bf16", BF16))}


def _add_atomically(m: Machine, address: np.ndarray, bits: np.ndarray, dtype: Any) -> None:
    """Add an element of `dtype` per thread to memory at its address; `bits`: the elements' bits, as unsigned integers.

    Memory is accessed as these integers, since numpy itself has no bf16.
    """

    def add(a: Any, b: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.add(a.view(dtype), b.view(dtype)).view(bits.dtype)

    m.memory.atomic(address, bits.dtype, add, bits, returns=False, rounds=True)


class RedAddU32(Instruction):
    """red.add.u32 (relaxed): memory += value. Returns nothing, so it observes no other thread's write."""

    address: u64
    value: u32
    ptx = "red.relaxed.gpu.global.add.u32 [{address}], {value};"

    def simulate(self, m: Machine) -> None:
        address, value = m.per_thread(self.address), m.per_thread(self.value)
        m.memory.atomic(address, np.uint32, lambda a, b: a + b, value, returns=False)


def load_global_word(address: Value, predicate: ValueLike, scalar_type: ScalarType, name: str) -> Value:
    """Load 4 bytes with LoadGlobal and return them as a value of `scalar_type`; zero where `predicate` does not hold.

    `name`: of the register in the generated code.
    """
    word = current_builder().registers(scalar_type, 1, name)
    LoadGlobal(word, address, predicate).issue()
    return word[0]


def _word(value: ValueLike, name: str) -> RegisterArray:
    """Return a register `name` that holds `value`. Raises KernelError for a Python number, which has no type."""
    if isinstance(value, int | float):
        raise KernelError(
            f"value of {name}: got {value!r}, which has no type; use Constant(F32, {value!r}), for example"
        )
    word = current_builder().registers(value.type, 1, name)
    word[0] = value
    return word


def store_global_word(address: Value, value: Value, predicate: ValueLike, name: str) -> None:
    """Store a 4-byte value with StoreGlobal where `predicate` holds. `name`: of the register in the generated code."""
    word = _word(value, name)
    StoreGlobal(word, address, predicate).issue()


def load_shared_word(address: Value, scalar_type: ScalarType, name: str) -> Value:
    """Load 4 bytes with LoadShared and return them as a value of `scalar_type`.

    `name`: of the register in the generated code.
    """
    word = current_builder().registers(scalar_type, 1, name)
    LoadShared(word, address).issue()
    return word[0]


def store_shared_word(address: Value, value: Value, name: str) -> None:
    """Store a 4-byte value with StoreShared. `name`: of the register in the generated code."""
    word = _word(value, name)
    StoreShared(word, address).issue()
