"""A warp's register fragments of A and B for mma.sync, loaded by ldmatrix while others are multiplied."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.swizzle import swizzled_vector_offset
from gemmsmith.core.mma import FRAGMENT_ROWS_PER_WARP, N8_COLUMNS, WGMMA_M
from gemmsmith.core.register_budgets import MAX_LIVE_REGISTERS
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tile import Tile
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, RegisterArray, Value

N_PER_LDMATRIX_X4 = 2 * N8_COLUMNS
"""Columns of B that one ldmatrix.x4 loads."""


class Fragments:
    """The fragments of a warp, which computes 16 of every 64 rows and all columns of its warpgroup's tile.

    ldmatrix.x4 loads four 8x8 matrices at a time: of A both halves of the warp's 16 rows, of B two groups of 8 columns,
    and of both the two halves of a k-step's 32 bytes. MN-major operands are loaded with .trans.

    A k-tile is multiplied in `mma_groups` groups of MMAs. A group has all columns of a k-step (the K of one mma.sync),
    or 16 columns of it if registers are scarce. B's fragments are double-buffered, A's are reloaded in place.

    In the methods, `stage` is [A's tile, B's tile] in shared memory, `group` the number of a group in its k-tile,
    `mma_m` the number of 64 rows, `n16` and `n8` the numbers of 16 columns in the group and of 8 columns in those.
    """

    def __init__(self, spec: KernelSpec, warpgroup_column: Value) -> None:
        """Declare the fragments. `warpgroup_column`: the warpgroup's first column in the CTA's tile."""
        k, (self._a_tile, self._b_tile) = current_builder(), spec.tiles
        self._mma, num_mma_m = spec.mma, spec.warpgroup_rows // WGMMA_M
        n16s = spec.warpgroup_columns // N_PER_LDMATRIX_X4
        live_registers = 4 * num_mma_m + 8 * n16s + spec.accumulator_registers
        if spec.promoted:
            live_registers += spec.accumulator_registers
        if spec.is_3xtf32:
            live_registers += 4 * (num_mma_m + n16s)
        self._n16_per_group = n16s if live_registers <= MAX_LIVE_REGISTERS else 1
        self._a = k.registers_2d(U32, num_mma_m, 4, "a_frag")
        self._b = k.registers_2d(U32, 2 * self._n16_per_group, 4, "b_frag")
        self._groups_per_k_step = n16s // self._n16_per_group
        self.k_steps = self._a_tile.k // spec.mma.k
        self.mma_groups = self._groups_per_k_step * self.k_steps
        self.group_name = "k_step" if self._groups_per_k_step == 1 else "mma_group"
        """The name of an MMA group in the printed kernel."""
        # ldmatrix.x4: lane l holds the address of row l % 8 of matrix l // 8. The matrices' rows and vectors run
        # (rows first, then vectors) for A if K-major and for B if MN-major, else (vectors first, then rows).
        row_of_16, matrix_pair = k.lane % 16, (k.lane // 16).with_name_hint("matrix_pair")
        row_of_8_8, matrix_of_pair = k.lane % 8 + matrix_pair * 8, k.lane // 8 % 2
        warp_row = k.warp_index % 4 * FRAGMENT_ROWS_PER_WARP
        if self._a_tile.major == "K":
            self._a_smem_row, self._a_smem_vector = (warp_row + row_of_16).named("a_smem_row"), matrix_pair
        else:
            self._a_smem_row = row_of_8_8
            self._a_smem_vector = (warp_row // N8_COLUMNS + matrix_of_pair).named("a_smem_vector")
        if self._b_tile.major == "K":
            self._b_smem_row, self._b_smem_vector = (warpgroup_column + row_of_8_8).named("b_smem_row"), matrix_of_pair
        else:
            self._b_smem_row = row_of_16
            self._b_smem_vector = (warpgroup_column // N8_COLUMNS + matrix_pair).named("b_smem_vector")
        # The others, which A and B may share, are not named after one of them.
        for row, vector in (self._a_smem_row, self._a_smem_vector), (self._b_smem_row, self._b_smem_vector):
            row.named("ldmatrix_row")
            vector.named("ldmatrix_vector")

    def load_first_group(self, stage: list[SharedView]) -> None:
        """Load the fragments of a k-tile's first MMA group."""
        first = Constant(I32, 0)
        with current_builder().unroll(len(self._a), name="mma_m") as mma_m:
            self._load_a(stage, first, mma_m)
        self._load_b(stage, first)

    def multiply(self, accumulator: Accumulator, group: Value, stage: list[SharedView]) -> None:
        """Issue the MMAs of a group into the accumulator, and load the next group's fragments from `stage`.

        The last group is followed by the first of the next k-tile. A's fragments replace those just multiplied.
        """
        k, next_group = current_builder(), ((group + 1) % self.mma_groups).named(f"next_{self.group_name}")
        registers = self._mma.accumulator_registers(N8_COLUMNS)
        self._load_b(stage, next_group)
        self._split_tf32(group)
        with k.unroll(len(self._a), name="mma_m") as mma_m:
            with k.unroll(self._n16_per_group, name="n16") as n16, k.unroll(2, name="n8") as n8:
                first = ((group % self._groups_per_k_step * self._n16_per_group + n16) * 2 + n8) * registers
                self._multiply(accumulator.fragments[mma_m].slice(first, registers), mma_m, group, n16, n8)
            with k.when(next_group % self._groups_per_k_step == 0):
                self._load_a(stage, next_group, mma_m)

    def _split_tf32(self, group: Value) -> None:
        """Do nothing. It is called before a group is multiplied; Tf32x3Fragments computes the residuals here."""

    def _b_fragment(self, group: Value, n16: Value) -> RegisterArray:
        return self._b[group % 2 * self._n16_per_group + n16]

    def _multiply(self, d: RegisterArray, mma_m: Value, group: Value, n16: Value, n8: Value) -> None:
        """Issue the MMA of 64 rows and 8 columns into `d`, the accumulator's registers of these."""
        b = self._b_fragment(group, n16).slice(n8 * 2, 2)
        hw.mma_sync(d, self._a[mma_m].slice(0, 4), b, self._mma)

    def _load_a(self, stage: list[SharedView], group: Value, mma_m: Value) -> None:
        """Load A's fragment of the k-step of an MMA group and of the `mma_m`-th 64 rows."""
        tile, k_step = self._a_tile, group // self._groups_per_k_step
        offset = _ldmatrix_offset(tile, self._a_smem_row, self._a_smem_vector, k_step, mma_m * WGMMA_M)
        hw.load_matrix(self._a[mma_m].slice(0, 4), stage[0].address + offset, tile.major == "MN")

    def _load_b(self, stage: list[SharedView], group: Value) -> None:
        """Load B's fragments of an MMA group from a stage (A's and B's tile in shared memory).

        Groups are numbered through all k-steps of the stage; even and odd ones have the two halves of a double buffer.
        """
        tile, k_step = self._b_tile, group // self._groups_per_k_step
        with current_builder().unroll(self._n16_per_group, name="n16") as n16:
            column = (group % self._groups_per_k_step * self._n16_per_group + n16) * N_PER_LDMATRIX_X4
            offset = _ldmatrix_offset(tile, self._b_smem_row, self._b_smem_vector, k_step, column)
            hw.load_matrix(self._b_fragment(group, n16).slice(0, 4), stage[1].address + offset, tile.major == "MN")


class Tf32x3Fragments(Fragments):
    """The fragments of 3xTF32: the residuals of A and B (fp32 minus TF32; CUTLASS: small) are in extra registers.

    Accumulates residual * b + a * residual + a * b; the product of the residuals is dropped.
    """

    def __init__(self, spec: KernelSpec, warpgroup_column: Value) -> None:
        super().__init__(spec, warpgroup_column)
        self._a_residual = current_builder().registers_2d(U32, len(self._a), 4, "a_residual")
        self._b_residual = current_builder().registers_2d(U32, self._n16_per_group, 4, "b_residual")

    def _split_tf32(self, group: Value) -> None:
        """Compute the TF32 residuals of a group's fragments before it is multiplied."""
        k = current_builder()
        with (
            k.when(group % self._groups_per_k_step == 0),
            k.unroll(len(self._a), name="mma_m") as mma_m,
            k.unroll(4) as i,
        ):
            self._a_residual[mma_m][i] = hw.tf32_residual(self._a[mma_m][i])
        with k.unroll(self._n16_per_group, name="n16") as n16, k.unroll(4) as i:
            self._b_residual[n16][i] = hw.tf32_residual(self._b_fragment(group, n16)[i])

    def _multiply(self, d: RegisterArray, mma_m: Value, group: Value, n16: Value, n8: Value) -> None:
        """Issue the three MMAs of 64 rows and 8 columns into `d`, the products with residuals first."""
        a, b = self._a[mma_m].slice(0, 4), self._b_fragment(group, n16).slice(n8 * 2, 2)
        hw.mma_sync(d, self._a_residual[mma_m].slice(0, 4), b, self._mma)
        hw.mma_sync(d, a, self._b_residual[n16].slice(n8 * 2, 2), self._mma)
        hw.mma_sync(d, a, b, self._mma)


def _ldmatrix_offset(tile: Tile, row: Value, vector_idx: Value, k_step: Value, mn: Value) -> Value:
    """Return the byte offset in a tile of the 16 bytes whose address this lane passes to ldmatrix.

    `row`, `vector_idx`: the lane's row of a box and its vector in that row, for k-step 0 and row 0 of M or N. `mn`:
    first row of the matrices that are loaded.
    """
    if tile.major == "K":  # `mn` is a multiple of 8 rows, after which the swizzle repeats
        return swizzled_vector_offset(tile, row, k_step * 2 + vector_idx) + (mn * tile.pitch).to(U32)
    k_row = (k_step * (32 // tile.dtype.bytes) + row).with_name_hint("smem_row")
    return swizzled_vector_offset(tile, k_row, (mn // N8_COLUMNS + vector_idx).with_name_hint("smem_vector"))
