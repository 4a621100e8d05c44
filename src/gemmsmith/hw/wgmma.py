"""WGMMA: a warpgroup multiplies tiles in shared memory and accumulates in registers. PTX ISA, "wgmma"."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.core.mma import A_FRAGMENT, D_FRAGMENT, MMA_K_BITS, THREADS_PER_WARPGROUP, WGMMA, Fragment, Mma
from gemmsmith.core.tile import Tile, swizzled
from gemmsmith.hw.mma import decode_elements, multiply, pack_accumulator, unpack_accumulator
from gemmsmith.lang.instruction import Instruction, InstructionFamily, pred, registers_in, registers_inout, u64
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Builtin, Constant, Value, ValueLike
from gemmsmith.machine import Access, AsyncOperation, Blocking, Machine

K_STEP_BYTES = MMA_K_BITS // 8
"""Bytes along K of one instruction."""
_LAYOUT_TYPES = {0: 0, 128: 1, 64: 2, 32: 3}
"""Layout type of a matrix descriptor by swizzle in bytes (PTX ISA, "Matrix descriptor format")."""
_SWIZZLE = {code: swizzle for swizzle, code in _LAYOUT_TYPES.items()}
# Shared addresses hold the cluster rank of the CTA above the 18 address bits of a matrix descriptor.
_SMEM_DESCRIPTOR_BASE = Builtin(
    U32, "smem_descriptor_base", "((uint32_t)__cvta_generic_to_shared(shared_memory) & 0x3ffff) >> 4"
)


def descriptor(view: SharedView, step: ValueLike) -> Value:
    """Return the matrix descriptor (u64) of k-step `step` (32 bytes along K) of a tile.

    PTX ISA, "Matrix descriptor format".

    K-major: SBO is the 8-row stride, LBO unused. MN-major: LBO is the stride between boxes along M or N,
    SBO between groups of 8 along K.
    """
    tile = view.tile
    if tile is None or not tile.swizzle:
        raise KernelError("wgmma reads swizzled tiles")
    stride = 8 * tile.swizzle
    leading = tile.box_bytes if tile.major == "MN" else 16
    # Only the low word depends on the step: a step costs one 32-bit addition.
    low_constant = Constant(U32, (leading >> 4) << 16, f"DESCRIPTOR_LBO_{leading}")
    high_constant = Constant(
        U64, (stride >> 4) << 32 | _LAYOUT_TYPES[tile.swizzle] << 62, f"DESCRIPTOR_SBO_{stride}_SWIZZLE_{tile.swizzle}B"
    )
    address = view.at(k_step_descriptor_offset(tile, step), 16).sum(_SMEM_DESCRIPTOR_BASE, unit=16)
    return (address + low_constant).to(U64) | high_constant


def k_step_descriptor_offset(tile: Tile, step: ValueLike) -> ValueLike:
    """Return the offset of k-step `step` in a tile, in units of 16 bytes. `step` is constant or an unrolled index."""
    if tile.major == "MN":
        return step * (K_STEP_BYTES // tile.dtype.bytes * tile.swizzle // 16)
    offset, swizzle_row_units = step * (K_STEP_BYTES // 16), tile.swizzle // 16
    if isinstance(offset, Value):
        offset.with_name_hint("k_step_descriptor_offset")
    return (
        offset if tile.boxes == 1 else offset // swizzle_row_units * (tile.box_bytes // 16) + offset % swizzle_row_units
    )


@lru_cache(maxsize=64)
def _vector_offsets(rows: int, leading: int, stride: int, swizzle: int, mn_major: bool) -> np.ndarray:
    """Return the offsets of the operand's 16-byte vectors before swizzling: (rows, 2) K-major, (16, rows/8) MN-major.

    `leading`, `stride`: the descriptor's LBO and SBO in bytes. Only 16-bit elements may be MN-major.
    """
    if not mn_major:
        row = np.arange(rows, dtype=np.int64)[:, None]
        return np.asarray(row // 8 * stride + row % 8 * swizzle + np.array([0, 16]))
    k, mn = np.arange(K_STEP_BYTES // 2, dtype=np.int64)[:, None], np.arange(0, rows, 8, dtype=np.int64)[None, :]
    block = swizzle // 2
    return np.asarray(mn // block * leading + k // 8 * stride + k % 8 * swizzle + mn % block * 2)


@lru_cache(maxsize=256)
def operand_access(descriptor: int, rows: int, mn_major: bool) -> Access:
    """Decode a descriptor to the access to its 16-byte vectors, which are swizzled by absolute address."""
    start, leading = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4
    stride, swizzle = (descriptor >> 32 & 0x3FFF) << 4, _SWIZZLE[descriptor >> 62]
    offsets = _vector_offsets(rows, leading, stride, swizzle, mn_major).reshape(-1)
    return Access("shared", swizzled(start + offsets, swizzle), 16)


@lru_cache(maxsize=64)
def _fragment_maps(fragment: Fragment, elements: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (128, elements): the matrix element held by each thread and register; and the inverse permutation.

    `columns` are those of the matrix.
    """
    row, column = fragment.element(np.arange(THREADS_PER_WARPGROUP)[:, None], np.arange(elements)[None, :])
    matrix_elements = np.asarray(row * columns + column)
    return matrix_elements, np.argsort(matrix_elements, axis=None).reshape(-1, columns)


class _Wgmma(InstructionFamily):
    """Common base of the SS and RS forms."""

    warpgroup_wide = True

    @property
    def required_arch(self) -> str:  # type: ignore[override]
        """That of its dtypes."""
        return str(self.mma.required_arch)

    @property
    def majors(self) -> dict[str, str]:
        """The major of each operand in shared memory, by name."""
        return {name: getattr(self, f"{name}_major") for name in "ab" if hasattr(self, f"{name}_major")}

    def check(self) -> None:
        if self.mma not in WGMMA.instructions:
            raise KernelError(f"wgmma: got {self.mma}; use one of {', '.join(map(str, WGMMA.instructions))}")
        if not self.mma.supports_n(self.n):
            raise KernelError(f"wgmma n: got {self.n}; use {self.mma.supported_n_text}")
        expected = self.mma.accumulator_registers(self.n)
        if self.d.count != expected:
            raise KernelError(f"wgmma d: got {self.d.count} registers; use {expected}")
        for name, major in self.majors.items():
            if major not in self.mma.majors:
                raise KernelError(f"wgmma {name}: got {major}-major elements of {self.mma.a}; use K-major ones")

    @property
    def macs_per_thread(self) -> int:
        return int(self.mma.m * self.n * self.mma.k) // THREADS_PER_WARPGROUP

    @property
    def shape(self) -> str:
        return f"m64n{self.n}k{self.mma.k}"

    @property
    def wrapper_name(self) -> str:
        majors = "".join(f"_{name}_mn" for name, major in self.majors.items() if major == "MN")
        types = "_".join([self.mma.d.ptx, self.mma.a.ptx, *[self.mma.b.ptx] * (self.mma.a != self.mma.b)])
        source = "_rs" if isinstance(self, WgmmaRS) else ""
        return f"wgmma_{self.shape}_{types}{majors}{source}"

    def text(self) -> str:
        """Return the PTX.

        The scale-a and scale-b immediates exist for floating point only, the transpose immediates for 16-bit types
        only.
        """
        scales = "" if self.mma.a.is_integer else ", 1, 1"
        transposed = (
            "".join(f", {int(major == 'MN')}" for major in self.majors.values()) if "MN" in self.mma.majors else ""
        )
        return f"""{{
        .reg .pred p;
        setp.ne.b32 p, {{scale_d}}, 0;
        wgmma.mma_async.sync.aligned.{self.shape}.{self.mma}
        {{d}},
        {{a}}, {{b}}, p{scales}{transposed};
        }}"""

    def simulate(self, m: Machine) -> None:
        accesses = {
            name: operand_access(m.uniform(getattr(self, name)), self._rows(name), major == "MN")
            for name, major in self.majors.items()
        }
        scale_d = bool(m.uniform(self.scale_d))

        def operand(name: str) -> np.ndarray:
            """Return an operand (rows, k) as it is multiplied; see `decode_elements`."""
            rows, dtype = self._rows(name), getattr(self.mma, name)
            if name in accesses:
                elements = decode_elements(np.ascontiguousarray(m.memory.peek(accesses[name])).view(np.uint32), dtype)
                return elements.reshape(-1, rows).T if self.majors[name] == "MN" else elements.reshape(rows, -1)
            registers = np.ascontiguousarray(m.registers.view_unchecked(self.a)).astype(np.uint32)
            words = np.take(registers, _fragment_maps(A_FRAGMENT, A_FRAGMENT.registers, K_STEP_BYTES // 4)[1])
            return decode_elements(words, dtype)

        def perform() -> None:
            """Compute D = A B^T + (scale_d ? D : 0): a (64, k), b (n, k)."""
            a, b, registers = operand("a"), operand("b"), m.registers.view_unchecked(self.d)
            elements, positions = _fragment_maps(D_FRAGMENT, self.n // 2, self.n)
            c = np.zeros((self.mma.m, self.n), a.dtype)
            if scale_d:
                c = np.take(unpack_accumulator(registers, self.mma.d), positions)
            registers[:] = pack_accumulator(np.take(multiply(a, b, c, self.mma), elements), self.mma.d)

        m.async_operations.start(
            AsyncOperation(f"wgmma {self.shape}", "tensor", perform, [*accesses.values()], group="wgmma",
                           register_operands=[self.d, *[self.a] * ("a" not in accesses)], tensor_cycles=self.n / 2)
        )  # fmt: skip

    def _rows(self, operand: str) -> int:
        """Return the rows of A, or the columns of B."""
        return int(self.mma.m if operand == "a" else self.n)


class Wgmma(_Wgmma):
    """wgmma (SS): D (64 x n) = A (64 x k) B (k x n) + (scale_d ? D : 0), with A and B by descriptors.

    An MN-major operand is transposed.
    """

    d: registers_inout
    a: u64
    b: u64
    scale_d: pred
    n: int
    mma: Mma
    a_major: str = "K"
    b_major: str = "K"


class WgmmaRS(_Wgmma):
    """wgmma with A in registers (RS): four 32-bit registers per thread, K-major."""

    d: registers_inout
    a: registers_in
    b: u64
    scale_d: pred
    n: int
    mma: Mma
    b_major: str = "K"

    def check(self) -> None:
        super().check()
        if self.a.count != A_FRAGMENT.registers:
            raise KernelError(f"wgmma a: got {self.a.count} registers; use {A_FRAGMENT.registers}")


class WgmmaFence(Instruction):
    """wgmma.fence: orders the warpgroup's register accesses before subsequent wgmmas."""

    required_arch = "sm_90a"
    ptx = "wgmma.fence.sync.aligned;"

    def simulate(self, m: Machine) -> None:
        m.fence("wgmma")


class WgmmaCommit(Instruction):
    """Commits the warpgroup's prior wgmmas as one group."""

    required_arch = "sm_90a"
    ptx = "wgmma.commit_group.sync.aligned;"

    def simulate(self, m: Machine) -> None:
        m.async_operations.commit("wgmma")


class WgmmaWait(Instruction):
    """Waits until at most `pending` of the warpgroup's wgmma-groups are pending."""

    required_arch = "sm_90a"
    pending: int
    ptx = "wgmma.wait_group.sync.aligned {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.async_operations.wait("wgmma", self.pending)


class FenceOperand(Instruction):
    """Emits no instruction: keeps the compiler from moving uses of `d` above this point (above a wait).

    CuTe: warpgroup_fence_operand.
    """

    d: registers_inout
    ptx = ""

    def simulate(self, m: Machine) -> None:
        m.registers.fence_operand(self.d)
