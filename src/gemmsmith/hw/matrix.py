"""ldmatrix and stmatrix: 8x8 matrices of 16-bit elements between shared memory and a warp.

PTX ISA, "ldmatrix", "stmatrix".
"""

from __future__ import annotations

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.instruction import InstructionFamily, registers_in, registers_out, u32
from gemmsmith.machine import Machine


class _MatrixInstruction(InstructionFamily):
    """Common base of ldmatrix and stmatrix.

    `values`: one register per matrix (1, 2 or 4), with two 16-bit elements of it. `transposed`: rows in memory are
    columns of the matrix.
    """

    def check(self) -> None:
        if self.values.count not in (1, 2, 4):
            raise KernelError(f"ldmatrix/stmatrix: got {self.values.count} matrices; use 1, 2 or 4")

    @property
    def shape(self) -> str:
        """The modifiers for the number of matrices, and for transposed ones."""
        return f"m8n8.x{self.values.count}{'.trans' if self.transposed else ''}"

    @property
    def vector(self) -> str:
        """The registers' placeholder, in braces even if it is one."""
        return "{{values}}" if self.values.count == 1 else "{values}"


def registers_to_matrices(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """Return registers (threads, count) as matrices (warps, count, 8, 8) of 16-bit elements.

    Lane l has elements 2 (l % 4) and the next of row l / 4 or, if `transposed`, of that column.
    """
    count = registers.shape[1]
    pairs = np.ascontiguousarray(registers.astype(np.uint32)).view(np.uint16).reshape(-1, 32, count, 2)
    matrices = pairs.transpose(0, 2, 1, 3).reshape(-1, count, 8, 8)
    return matrices.transpose(0, 1, 3, 2) if transposed else matrices


def _matrices_to_registers(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """Return matrices (warps, count, 8, 8) as registers (threads, count): the inverse of `registers_to_matrices`."""
    matrices = matrices.transpose(0, 1, 3, 2) if transposed else matrices
    warps, count = matrices.shape[:2]
    pairs = np.ascontiguousarray(matrices.reshape(warps, count, 32, 2).transpose(0, 2, 1, 3))
    return pairs.view(np.uint32).reshape(warps * 32, count)


class StoreMatrix(_MatrixInstruction):
    """stmatrix: stores 1, 2 or 4 matrices of 8 x 8 16-bit elements to shared memory.

    Lane 8 j + r supplies the `address` of row r (16 bytes) of matrix j.
    """

    required_arch = "sm_90"
    values: registers_in
    address: u32
    transposed: bool = False
    ptx = "stmatrix.sync.aligned.{shape}.shared.b16 [{address}], {vector};"

    def simulate(self, m: Machine) -> None:
        """Store 16 bytes, one row, at the address of each of the first 8 * count lanes of a warp."""
        m.require_converged("stmatrix")
        rows = registers_to_matrices(np.asarray(m.registers.view(self.values)), self.transposed)
        warps, count = rows.shape[:2]
        data = np.zeros((warps, 32, 16), np.uint8)
        data[:, : 8 * count] = np.ascontiguousarray(rows).view(np.uint8).reshape(warps, 8 * count, 16)
        mask = m.active & (m.threads % 32 < 8 * count)
        m.memory.store("shared", m.per_thread(self.address), data.reshape(-1, 16), mask=mask)


class LoadMatrix(_MatrixInstruction):
    """ldmatrix: loads 1, 2 or 4 matrices of 8 x 8 16-bit elements.

    Each lane receives a pair of elements of each matrix. Lane 8 j + r supplies the `address` of row r (16 bytes) of
    matrix j.
    """

    values: registers_out
    address: u32
    transposed: bool = False
    ptx = "ldmatrix.sync.aligned.{shape}.shared.b16 {vector}, [{address}];"

    def simulate(self, m: Machine) -> None:
        """Load a row of 16 bytes at the address of each of a warp's first 8 * count lanes; distribute the elements."""
        m.require_converged("ldmatrix")
        count = self.values.count
        mask = m.active & (m.threads % 32 < 8 * count)
        data = np.ascontiguousarray(m.memory.load("shared", m.per_thread(self.address), 16, mask=mask))
        rows = data.view(np.uint16).reshape(-1, 32, 8)[:, : 8 * count].reshape(-1, count, 8, 8)
        m.registers.view(self.values, write=True)[m.active] = _matrices_to_registers(rows, self.transposed)[m.active]
