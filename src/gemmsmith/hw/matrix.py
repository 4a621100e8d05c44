"""ldmatrix and stmatrix: 8x8 matrices of 16-bit elements between shared memory and a warp. PTX ISA, "stmatrix"."""

from __future__ import annotations

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.instruction import Instruction, registers_in, registers_out, u32
from gemmsmith.lang.machine import Machine
from gemmsmith.lang.values import Registers


def _check(values: Registers) -> None:
    if values.count not in (1, 2, 4):
        raise KernelError(f"ldmatrix/stmatrix move 1, 2 or 4 matrices, not {values.count}")


def _vector(values: Registers) -> str:
    """Their operand in the text; these instructions want a vector also of one."""
    return "{{values}}" if values.count == 1 else "{values}"


def _rows_of(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """(T, count) registers as the rows (T/32, count, 8, 8) of the matrices, as 16-bit elements."""
    count = registers.shape[1]
    pairs = np.ascontiguousarray(registers.astype(np.uint32)).view(np.uint16).reshape(-1, 32, count, 2)
    rows = pairs.transpose(0, 2, 1, 3).reshape(-1, count, 8, 8)
    return rows.transpose(0, 1, 3, 2) if transposed else rows


def _registers_of(rows: np.ndarray, transposed: bool) -> np.ndarray:
    rows = rows.transpose(0, 1, 3, 2) if transposed else rows
    warps, count = rows.shape[:2]
    pairs = np.ascontiguousarray(rows.reshape(warps, count, 32, 2).transpose(0, 2, 1, 3))
    return pairs.view(np.uint32).reshape(warps * 32, count)


class StoreMatrix(Instruction):
    """Lane 8 j + r gives the address of row r (16 bytes) of matrix j; element pairs come from the lanes' registers."""

    architecture = "sm_90"
    values: registers_in
    address: u32
    transposed: bool = False

    def check(self) -> None:
        _check(self.values)

    def text(self) -> str:
        trans = ".trans" if self.transposed else ""
        vector = _vector(self.values)
        return f"stmatrix.sync.aligned.m8n8.x{self.values.count}{trans}.shared.b16 [{{address}}], {vector};"

    def simulate(self, m: Machine) -> None:
        m.converged("stmatrix")
        rows = _rows_of(np.asarray(m.registers(self.values)), self.transposed)
        warps, count = rows.shape[:2]
        data = np.zeros((warps, 32, 16), np.uint8)
        data[:, : 8 * count] = np.ascontiguousarray(rows).view(np.uint8).reshape(warps, 8 * count, 16)
        mask = m.active & (m.threads % 32 < 8 * count)
        m.store("shared", m.column(self.address), data.reshape(-1, 16), mask=mask)


class LoadMatrix(Instruction):
    """The reverse: each lane receives its pair of every matrix."""

    values: registers_out
    address: u32
    transposed: bool = False

    def check(self) -> None:
        _check(self.values)

    def text(self) -> str:
        trans = ".trans" if self.transposed else ""
        vector = _vector(self.values)
        return f"ldmatrix.sync.aligned.m8n8.x{self.values.count}{trans}.shared.b16 {vector}, [{{address}}];"

    def simulate(self, m: Machine) -> None:
        m.converged("ldmatrix")
        count = self.values.count
        mask = m.active & (m.threads % 32 < 8 * count)
        data = np.ascontiguousarray(m.load("shared", m.column(self.address), 16, mask=mask))
        rows = data.view(np.uint16).reshape(-1, 32, 8)[:, : 8 * count].reshape(-1, count, 8, 8)
        m.registers(self.values, write=True)[m.active] = _registers_of(rows, self.transposed)[m.active]
