"""WGMMA: a warpgroup multiplies tiles in shared memory into its registers. PTX ISA, "wgmma"."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmsmith.core.dtypes import FP16, TF32, TF32_BITS, DType
from gemmsmith.core.errors import KernelError
from gemmsmith.core.mma import K_BITS, WARPGROUP, WGMMA, Mma, fragment_element
from gemmsmith.core.tile import Tile, swizzled
from gemmsmith.hw.fused_sum import fused_product
from gemmsmith.lang.instruction import Instruction, pred, registers_in, registers_inout, u64
from gemmsmith.lang.machine import Access, AsyncOperation, Blocking, Machine
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Constant, Registers, Value, ValueLike

K_BYTES = K_BITS // 8
_LAYOUT = {0: 0, 128: 1, 64: 2, 32: 3}
_SWIZZLE = {code: swizzle for swizzle, code in _LAYOUT.items()}


def descriptor(view: SharedView, step: ValueLike) -> Value:
    """The matrix descriptor (u64) of k-step `step` (32 bytes deep) of a tile. PTX ISA, "Matrix descriptor format".

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
        return step * (K_BYTES // tile.dtype.bytes * tile.swizzle // 16)
    chunk, per_row = step * (K_BYTES // 16), tile.swizzle // 16
    return chunk if tile.boxes == 1 else chunk // per_row * (tile.box_bytes // 16) + chunk % per_row


@lru_cache(maxsize=64)
def _chunks(rows: int, leading: int, stride: int, swizzle: int, mn_major: bool) -> np.ndarray:
    """Offsets of the operand's 16-byte chunks before swizzling: (rows, 2) K-major, (16, rows/8) MN-major, which only
    16-bit elements may be."""
    if not mn_major:
        row = np.arange(rows, dtype=np.int64)[:, None]
        return np.asarray(row // 8 * stride + row % 8 * swizzle + np.array([0, 16]))
    k, mn = np.arange(K_BYTES // 2, dtype=np.int64)[:, None], np.arange(0, rows, 8, dtype=np.int64)[None, :]
    block = swizzle // 2
    return np.asarray(mn // block * leading + k // 8 * stride + k % 8 * swizzle + mn % block * 2)


@lru_cache(maxsize=256)
def operand_access(descriptor: int, rows: int, mn_major: bool) -> Access:
    """The chunks a descriptor names, decoded as the hardware does: swizzled by absolute address."""
    start, leading = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4
    stride, swizzle = (descriptor >> 32 & 0x3FFF) << 4, _SWIZZLE[descriptor >> 62]
    return Access(
        "shared", swizzled(start + _chunks(rows, leading, stride, swizzle, mn_major).reshape(-1), swizzle), 16
    )


def operand_matrix(m: Machine, access: Access, rows: int, mn_major: bool, dtype: DType) -> np.ndarray:
    """(rows, k), as what is multiplied: float64, in which their products are exact; int64 for integers."""
    return _numbers(np.ascontiguousarray(m.peek(access)), rows, mn_major, dtype)


def _numbers(data: np.ndarray, rows: int, mn_major: bool, dtype: DType) -> np.ndarray:
    elements = data.view(dtype.numpy)
    if dtype == TF32:
        elements = (elements.view(np.uint32) & TF32_BITS).view(np.float32)
    matrix = elements.reshape(-1, rows).T if mn_major else elements.reshape(rows, -1)
    return matrix.astype(np.int64 if dtype.is_integer else np.float64)


@lru_cache(maxsize=64)
def _fragment(elements: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(128, elements): which element of a matrix with so many columns each thread of a warpgroup holds; and where in
    this array each element of the matrix is."""
    row, column = fragment_element(np.arange(WARPGROUP)[:, None], np.arange(elements)[None, :])
    held = np.asarray(row * columns + column)
    return held, np.argsort(held, axis=None).reshape(-1, columns)


class _Wgmma(Instruction):
    """What both forms share: the row of the table, and what it allows."""

    architecture = "sm_90a"
    if TYPE_CHECKING:  # each form lists them among its own, in its wrapper's order
        d: Registers
        n: int
        mma: Mma

    @property
    def majors(self) -> dict[str, str]:
        """How each operand in shared memory lies, by its name."""
        return {name: getattr(self, f"{name}_major") for name in "ab" if hasattr(self, f"{name}_major")}

    def check(self) -> None:
        if self.mma not in WGMMA:
            raise KernelError(f"wgmma: got {self.mma}; use one of {', '.join(map(str, WGMMA))}")
        if not self.mma.has_n(self.n):
            raise KernelError(f"wgmma n: got {self.n}; use {self.mma.n_listed}")
        need = self.mma.registers(self.n)
        if self.d.count != need:
            raise KernelError(f"wgmma d: {self.d.count} registers given, {need} needed")
        for name, major in self.majors.items():
            if major not in self.mma.majors:
                raise KernelError(f"wgmma {name}: got {major}-major elements of {self.mma.a}; use K-major ones")

    @property
    def products(self) -> int:
        return self.mma.m * self.n * self.mma.k // WARPGROUP

    @property
    def shape(self) -> str:
        return f"m64n{self.n}k{self.mma.k}"

    @property
    def wrapper_name(self) -> str:
        majors = "".join(f"_{name}_mn" for name, major in self.majors.items() if major == "MN")
        types = "_".join([self.mma.d.ptx, self.mma.a.ptx, *[self.mma.b.ptx] * (self.mma.a != self.mma.b)])
        source = "_rs" if isinstance(self, WgmmaRegisterA) else ""
        return f"wgmma_{self.shape}_{types}{majors}{source}"

    def text(self) -> str:
        """Integers have no sign to change, and only 16-bit elements a layout to choose."""
        signs = "" if self.mma.a.is_integer else ", 1, 1"
        transposed = (
            "".join(f", {int(major == 'MN')}" for major in self.majors.values()) if "MN" in self.mma.majors else ""
        )
        return f"""{{
        .reg .pred p;
        setp.ne.b32 p, {{accumulate}}, 0;
        wgmma.mma_async.sync.aligned.{self.shape}.{self.mma}
        {{d}},
        {{a}}, {{b}}, p{signs}{transposed};
        }}"""

    def _multiply(self, m: Machine, a: np.ndarray, b: np.ndarray, keep: bool) -> None:
        """D = A B^T (+ D): a (64, k), b (n, k)."""
        registers, (elements, places) = m.fragment(self.d), _fragment(self.n // 2, self.n)
        if self.mma.d.is_integer:  # they wrap
            product = np.take(a @ b.T, elements)
            registers[:] = (registers + product if keep else product).astype(np.int32)
            return
        c, half = np.zeros((self.mma.m, self.n)), self.mma.d == FP16  # in pairs
        if keep:
            held = np.ascontiguousarray(registers).astype(np.uint32).view(np.float16) if half else registers
            c = np.take(held, places).astype(np.float64)
        d = np.take(fused_product(a, b, c, self.mma), elements)
        registers[:] = d.view(np.uint32) if half else d

    def _start(self, m: Machine, reads: list[Access], perform: Any, registers: list[Any]) -> None:
        m.start(
            AsyncOperation(
                f"wgmma {self.shape}", "tensor", perform, reads=reads, group="wgmma", owns=registers, work=self.n / 2
            )
        )


class Wgmma(_Wgmma):
    """D (64 x n) = A (64 x k) B (k x n) + (accumulate ? D : 0), A and B by descriptors; MN-major is transposed."""

    d: registers_inout
    a: u64
    b: u64
    accumulate: pred
    n: int
    mma: Mma
    a_major: str = "K"
    b_major: str = "K"

    def simulate(self, m: Machine) -> None:
        a_mn, b_mn = self.a_major == "MN", self.b_major == "MN"
        a, b = operand_access(m.uniform(self.a), 64, a_mn), operand_access(m.uniform(self.b), self.n, b_mn)
        keep = bool(m.uniform(self.accumulate))

        def perform() -> None:
            left = operand_matrix(m, a, 64, a_mn, self.mma.a)
            self._multiply(m, left, operand_matrix(m, b, self.n, b_mn, self.mma.b), keep)

        self._start(m, [a, b], perform, [self.d])


class WgmmaRegisterA(_Wgmma):
    """The same with A (K-major) in registers: four packed ones a thread."""

    d: registers_inout
    a: registers_in
    b: u64
    accumulate: pred
    n: int
    mma: Mma
    b_major: str = "K"

    def check(self) -> None:
        super().check()
        if self.a.count != 4:
            raise KernelError(f"wgmma a: {self.a.count} registers given, 4 needed")

    def simulate(self, m: Machine) -> None:
        mn_major = self.b_major == "MN"
        b = operand_access(m.uniform(self.b), self.n, mn_major)
        keep = bool(m.uniform(self.accumulate))

        def perform() -> None:
            held = np.ascontiguousarray(m.fragment(self.a)).astype(np.uint32).view(np.uint16)  # as 64 x 16 of 16 bits
            left = _numbers(np.take(held, _fragment(8, K_BYTES // 2)[1]), 64, False, self.mma.a)
            self._multiply(m, left, operand_matrix(m, b, self.n, mn_major, self.mma.b), keep)

        self._start(m, [b], perform, [self.d, self.a])


class WgmmaFence(Instruction):
    """Orders this warpgroup's register accesses before the wgmmas that follow."""

    architecture = "sm_90a"
    ptx = "wgmma.fence.sync.aligned;"

    def simulate(self, m: Machine) -> None:
        m.fence("wgmma")


class WgmmaCommit(Instruction):
    """Closes a group of wgmmas."""

    architecture = "sm_90a"
    ptx = "wgmma.commit_group.sync.aligned;"

    def simulate(self, m: Machine) -> None:
        m.commit_group("wgmma")


class WgmmaWait(Instruction):
    """Until at most `pending` groups are in flight."""

    architecture = "sm_90a"
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
