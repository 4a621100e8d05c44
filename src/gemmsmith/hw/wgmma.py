"""WGMMA: a warpgroup multiplies tiles in shared memory into its registers. PTX ISA, "wgmma"."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.core.tile import Tile, swizzled
from gemmsmith.lang.instruction import Instruction, pred, registers_in, registers_inout, u64
from gemmsmith.lang.machine import Access, AsyncOperation, Blocking, Machine
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Constant, Value, ValueLike

K = 16
"""Depth of one wgmma of 16-bit elements: 32 bytes."""
_LAYOUT = {0: 0, 128: 1, 64: 2, 32: 3}
_SWIZZLE = {code: swizzle for swizzle, code in _LAYOUT.items()}
_ELEMENT = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}


def descriptor(view: SharedView, step: ValueLike) -> Value:
    """The matrix descriptor (u64) of k-step `step` (16 deep) of a tile. PTX ISA, "Matrix descriptor format".

    K-major: SBO is the 8-row stride, LBO unused. MN-major: LBO is the stride between boxes along M or N,
    SBO between groups of 8 along K.
    """
    tile = view.tile
    if tile is None or not tile.swizzle:
        raise KernelError("wgmma reads swizzled tiles")
    stride = 8 * tile.swizzle
    leading = tile.box_bytes if tile.major == "MN" else 16
    # The low word varies, the high word is constant: a step costs one 32-bit addition.
    low_constant = Constant(U32, (leading >> 4) << 16, f"DESCRIPTOR_LBO_{leading}")
    high_constant = Constant(
        U64, (stride >> 4) << 32 | _LAYOUT[tile.swizzle] << 62, f"DESCRIPTOR_SWIZZLE_{tile.swizzle}B"
    )
    return (view.at(step_chunks(tile, step), 16).chunk + low_constant).to(U64) | high_constant


def step_chunks(tile: Tile, step: ValueLike) -> ValueLike:
    """16-byte chunks from a tile's start to its k-step `step`, known at build time or unrolled."""
    if tile.major == "MN":
        return step * (K * tile.swizzle // 16)
    chunk, per_row = step * (K * tile.dtype.bytes // 16), tile.swizzle // 16
    return chunk if tile.boxes == 1 else chunk // per_row * (tile.box_bytes // 16) + chunk % per_row


@lru_cache(maxsize=64)
def _chunks(rows: int, leading: int, stride: int, swizzle: int, mn_major: bool) -> np.ndarray:
    """Offsets of the operand's 16-byte chunks before swizzling: (rows, 2) K-major, (16, rows/8) MN-major."""
    if not mn_major:
        row = np.arange(rows, dtype=np.int64)[:, None]
        return np.asarray(row // 8 * stride + row % 8 * swizzle + np.array([0, 16]))
    k, mn = np.arange(K, dtype=np.int64)[:, None], np.arange(0, rows, 8, dtype=np.int64)[None, :]
    block = swizzle // 2
    return np.asarray(mn // block * leading + k // 8 * stride + k % 8 * swizzle + mn % block * 2)


def operand_access(descriptor: int, rows: int, mn_major: bool) -> Access:
    """The chunks a descriptor names, decoded as the hardware does: swizzled by absolute address."""
    start, leading = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4
    stride, swizzle = (descriptor >> 32 & 0x3FFF) << 4, _SWIZZLE[descriptor >> 62]
    return Access(
        "shared", swizzled(start + _chunks(rows, leading, stride, swizzle, mn_major).reshape(-1), swizzle), 16
    )


def operand_matrix(m: Machine, access: Access, rows: int, mn_major: bool, dtype: np.dtype) -> np.ndarray:
    """(rows, 16) float32."""
    data = np.ascontiguousarray(m.peek(access)).view(dtype)
    matrix = data.reshape(K, rows).T if mn_major else data.reshape(rows, K)
    return matrix.astype(np.float32)


@lru_cache(maxsize=64)
def fragment_index(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, each (128, n/2), of every element thread t holds of a 64 x n accumulator.

    PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16".
    """
    t, i = np.arange(128)[:, None], np.arange(n // 2)[None, :]
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
    return np.broadcast_to(row, (128, n // 2)), 8 * (i // 4) + 2 * (t % 4) + i % 2


@lru_cache(maxsize=8)
def fragment_a_index() -> tuple[np.ndarray, np.ndarray]:
    """Row and k, each (128, 8), of the A elements in a thread's four packed registers."""
    t, i = np.arange(128)[:, None], np.arange(8)[None, :]
    return 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2


def _packed(registers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """(T, count) 32-bit registers as (T, 2 count) 16-bit elements."""
    return np.ascontiguousarray(registers).astype(np.uint32).view(dtype)


def _multiply(m: Machine, op: Any, a: np.ndarray, b: np.ndarray, keep: bool) -> None:
    """D = A B^T (+ D): a (64, 16), b (n, 16), both float32."""
    registers = m.fragment(op.d)
    row, column = fragment_index(op.n)
    with np.errstate(invalid="ignore", over="ignore"):
        product = a @ b.T
    if op.accumulator == "f32":
        old = registers if keep else np.float32(0)
        registers[:] = old + product[row, column]
    else:
        half = np.dtype(np.float16)
        old = _packed(registers, half).astype(np.float32) if keep else np.float32(0)
        with np.errstate(over="ignore"):
            registers[:] = np.ascontiguousarray((old + product[row, column]).astype(half)).view(np.uint32)


class _Wgmma(Instruction):
    """What both forms share: the modifiers and what they allow."""

    def _check(self, op: Any) -> None:
        if op.n % 8 or not 8 <= op.n <= 256:
            raise KernelError(f"wgmma n: got {op.n}; use a multiple of 8 from 8 to 256")
        if op.dtype not in _ELEMENT:
            raise KernelError(f"wgmma dtype: got {op.dtype}; use bf16 or f16")
        if op.accumulator == "f16" and op.dtype != "f16":
            raise KernelError("wgmma: bf16 with f16 accumulators does not exist; use f32")
        need = op.n // 2 if op.accumulator == "f32" else op.n // 4
        if op.d.count != need:
            raise KernelError(f"wgmma d: {op.d.count} registers given, {need} needed")

    @property
    def wrapper_name(self) -> str:
        op: Any = self
        majors = "".join(f"_{x}_mn" for x in "ab" if getattr(op, f"{x}_major", "K") == "MN")
        source = "_rs" if isinstance(self, WgmmaRegisterA) else ""
        return f"wgmma_m64n{op.n}k16_{op.accumulator}_{op.dtype}{majors}{source}"

    def _start(self, m: Machine, op: Any, reads: list[Access], perform: Any, registers: list[Any]) -> None:
        m.start(
            AsyncOperation(
                f"wgmma m64n{op.n}k16", "tensor", perform, reads=reads, group="wgmma", owns=registers, work=op.n / 2
            )
        )


class Wgmma(_Wgmma):
    """D (64 x n) = A (64 x 16) B (16 x n) + (accumulate ? D : 0), A and B by descriptors; MN-major is transposed."""

    d: registers_inout
    a: u64
    b: u64
    accumulate: pred
    n: int
    dtype: str
    accumulator: str = "f32"
    a_major: str = "K"
    b_major: str = "K"

    def check(self) -> None:
        self._check(self)

    def text(self) -> str:
        transposed = f"{int(self.a_major == 'MN')}, {int(self.b_major == 'MN')}"
        return f"""{{
        .reg .pred p;
        setp.ne.b32 p, {{accumulate}}, 0;
        wgmma.mma_async.sync.aligned.m64n{self.n}k16.{self.accumulator}.{self.dtype}.{self.dtype}
        {{d}},
        {{a}}, {{b}}, p, 1, 1, {transposed};
        }}"""

    def simulate(self, m: Machine) -> None:
        a = operand_access(m.uniform(self.a), 64, self.a_major == "MN")
        b = operand_access(m.uniform(self.b), self.n, self.b_major == "MN")
        keep, dtype = bool(m.uniform(self.accumulate)), _ELEMENT[self.dtype]

        def perform() -> None:
            left = operand_matrix(m, a, 64, self.a_major == "MN", dtype)
            _multiply(m, self, left, operand_matrix(m, b, self.n, self.b_major == "MN", dtype), keep)

        self._start(m, self, [a, b], perform, [self.d])


class WgmmaRegisterA(_Wgmma):
    """The same with A (K-major) in registers: four packed pairs a thread."""

    d: registers_inout
    a: registers_in
    b: u64
    accumulate: pred
    n: int
    dtype: str
    accumulator: str = "f32"
    b_major: str = "K"

    def check(self) -> None:
        self._check(self)
        if self.a.count != 4:
            raise KernelError(f"wgmma a: {self.a.count} registers given, 4 needed")

    def text(self) -> str:
        return f"""{{
        .reg .pred p;
        setp.ne.b32 p, {{accumulate}}, 0;
        wgmma.mma_async.sync.aligned.m64n{self.n}k16.{self.accumulator}.{self.dtype}.{self.dtype}
        {{d}},
        {{a}}, {{b}}, p, 1, 1, {int(self.b_major == "MN")};
        }}"""

    def simulate(self, m: Machine) -> None:
        b = operand_access(m.uniform(self.b), self.n, self.b_major == "MN")
        keep, dtype = bool(m.uniform(self.accumulate)), _ELEMENT[self.dtype]

        def perform() -> None:
            left = np.zeros((64, K), np.float32)
            left[fragment_a_index()] = _packed(m.fragment(self.a), dtype).astype(np.float32)
            _multiply(m, self, left, operand_matrix(m, b, self.n, self.b_major == "MN", dtype), keep)

        self._start(m, self, [b], perform, [self.d, self.a])


class WgmmaFence(Instruction):
    """Orders this warpgroup's register accesses before the wgmmas that follow."""

    ptx = "wgmma.fence.sync.aligned;"

    def simulate(self, m: Machine) -> None:
        m.fence("wgmma")


class WgmmaCommit(Instruction):
    """Closes a group of wgmmas."""

    ptx = "wgmma.commit_group.sync.aligned;"

    def simulate(self, m: Machine) -> None:
        m.commit_group("wgmma")


class WgmmaWait(Instruction):
    """Until at most `pending` groups are in flight."""

    pending: int
    ptx = "wgmma.wait_group.sync.aligned {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.wait_group("wgmma", self.pending)


class CompilerFence(Instruction):
    """No instruction: keeps the compiler from moving uses of `d` above this point (above a wait)."""

    d: registers_inout
    ptx = ""

    def simulate(self, m: Machine) -> None:
        m.compiler_fence(self.d)
