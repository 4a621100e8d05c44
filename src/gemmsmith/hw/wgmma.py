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
    """Return the matrix descriptor (u64) with which wgmma reads k-step `step` (32 bytes along K) of a swizzled tile.

    It holds the address, and what `descriptor_fields` returns. `view`: the tile in shared memory. `step`: a constant or
    an index of an unrolled loop.
    """
    tile = view.tile
    if tile is None or not tile.swizzle:
        raise KernelError("wgmma reads swizzled tiles")
    leading, stride, layout_type = descriptor_fields(tile)
    # Only the low word depends on the step: a step costs one 32-bit addition.
    low_constant = Constant(U32, (leading >> 4) << 16, f"DESCRIPTOR_LBO_{leading}")
    high_constant = Constant(
        U64, (stride >> 4) << 32 | layout_type << 62, f"DESCRIPTOR_SBO_{stride}_SWIZZLE_{tile.swizzle}B"
    )
    address = view.at(k_step_descriptor_offset(tile, step), 16).sum(_SMEM_DESCRIPTOR_BASE, unit=16)
    return (address + low_constant).to(U64) | high_constant


def descriptor_fields(tile: Tile) -> tuple[int, int, int]:
    """Return (LBO, SBO, layout type) of the matrix descriptors of a swizzled tile: two strides in bytes, and a code.

    K-major: SBO is the 8-row stride, LBO unused. MN-major: LBO is the stride between boxes along M or N, SBO between
    groups of 8 along K. Source: PTX ISA, "Matrix descriptor format".
    """
    return tile.box_bytes if tile.major == "MN" else 16, 8 * tile.swizzle, _LAYOUT_TYPES[tile.swizzle]


def k_step_descriptor_offset(tile: Tile, step: ValueLike) -> ValueLike:
    """Return the offset of k-step `step` (32 bytes along K) in a swizzled tile, in units of 16 bytes.

    MN-major: each index of K is a row of a box. K-major: a k-step is part of a row, and a row may continue in the next
    box. `step`: a constant or an index of an unrolled loop.
    """
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
    """Return the byte offsets of the 16-byte vectors of an operand with `rows` rows, before swizzling.

    They are (rows, 2) if it is K-major, (16, rows / 8) if MN-major, for which elements have 16 bits. `leading`,
    `stride`: the descriptor's LBO and SBO in bytes.
    """
    if not mn_major:
        row = np.arange(rows, dtype=np.int64)[:, None]
        return np.asarray(row // 8 * stride + row % 8 * swizzle + np.array([0, 16]))
    k, mn = np.arange(K_STEP_BYTES // 2, dtype=np.int64)[:, None], np.arange(0, rows, 8, dtype=np.int64)[None, :]
    block = swizzle // 2  # 16-bit elements of a swizzled row
    return np.asarray(mn // block * leading + k // 8 * stride + k % 8 * swizzle + mn % block * 2)


@lru_cache(maxsize=256)
def operand_access(descriptor: int, rows: int, mn_major: bool) -> Access:
    """Return the shared-memory access that a matrix descriptor means: to the operand's 16-byte vectors.

    They are swizzled by their absolute addresses. `rows`: of A, or columns of B.
    """
    start, leading = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4
    stride, swizzle = (descriptor >> 32 & 0x3FFF) << 4, _SWIZZLE[descriptor >> 62]
    offsets = _vector_offsets(rows, leading, stride, swizzle, mn_major).reshape(-1)
    return Access("shared", swizzled(start + offsets, swizzle), 16)


@lru_cache(maxsize=64)
def _fragment_maps(fragment: Fragment, elements: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (128, elements): the index in the matrix, row by row, of each register of each thread; and the inverse.

    The inverse has, for each element of the matrix, its index among all registers. `fragment`: the layout. `columns`:
    of the matrix.
    """
    row, column = fragment.element(np.arange(THREADS_PER_WARPGROUP)[:, None], np.arange(elements)[None, :])
    matrix_elements = np.asarray(row * columns + column)
    return matrix_elements, np.argsort(matrix_elements, axis=None).reshape(-1, columns)


class _Wgmma(InstructionFamily):
    """Common base of wgmma with A by a descriptor of shared memory (SS), and with A in registers (RS).

    Fields: `d`, the accumulator's registers; `a`, `b`, the operands; `scale_d`, whether D is added to; `n`, columns of
    D; `mma`, the dtypes; `a_major`, `b_major`, "K" or "MN" for operands in shared memory.
    """

    warpgroup_wide = True

    @property
    def required_arch(self) -> str:  # type: ignore[override]
        """That of its dtypes."""
        return str(self.mma.required_arch)

    @property
    def majors(self) -> dict[str, str]:
        """The layout, "K" or "MN", of each operand that is in shared memory, by name ("a", "b")."""
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
        """The name of the C++ function: shape, dtypes, "mn" for operands that are MN-major, "rs" for A in registers."""
        majors = "".join(f"_{name}_mn" for name, major in self.majors.items() if major == "MN")
        types = "_".join([self.mma.d.ptx, self.mma.a.ptx, *[self.mma.b.ptx] * (self.mma.a != self.mma.b)])
        source = "_rs" if isinstance(self, WgmmaRS) else ""
        return f"wgmma_{self.shape}_{types}{majors}{source}"

    def text(self) -> str:
        """Return the PTX.

        It has immediates by which A and B may be negated only for floating point, and those that transpose A and B only
        for 16-bit types.
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
        """Start the wgmma: it reads its operands, multiplies and writes D when it completes."""
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
    """wgmma (SS): D (64 x n) = A (64 x k) B (k x n) + (scale_d ? D : 0), with A and B in shared memory by descriptors.

    An operand whose major is "MN" is contiguous along M or N; the hardware transposes it.
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
    """wgmma (RS): as `Wgmma`, with A in four 32-bit registers of each thread, K-major."""

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
    """wgmma.commit_group: commits the warpgroup's earlier wgmmas as one group."""

    required_arch = "sm_90a"
    ptx = "wgmma.commit_group.sync.aligned;"

    def simulate(self, m: Machine) -> None:
        m.async_operations.commit("wgmma")


class WgmmaWait(Instruction):
    """wgmma.wait_group: waits until all but the `pending` latest of the warpgroup's wgmma-groups have completed."""

    required_arch = "sm_90a"
    pending: int
    ptx = "wgmma.wait_group.sync.aligned {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.async_operations.wait("wgmma", self.pending)


class FenceOperand(Instruction):
    """Keeps the compiler from moving uses of the registers `d` above this point, after a wait. Emits no instruction.

    CuTe: warpgroup_fence_operand.
    """

    d: registers_inout
    ptx = ""

    def simulate(self, m: Machine) -> None:
        m.registers.fence_operand(self.d)
