"""The accumulator of one consumer warpgroup: issue and wait of its instructions, promotion, and its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gemmsmith import hw
from gemmsmith.core.dtypes import FP16, FP32, INT32, DType
from gemmsmith.core.mma import N8_COLUMNS, Mma
from gemmsmith.core.product import Role
from gemmsmith.core.scalars import ceil_div
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import F32, I32, PRED, U32
from gemmsmith.lang.values import RegisterArray, Value, ValueLike, as_value

RegisterIndex = int | Value
"""An index known at build time, or the index of an unrolled loop."""
ScaleFactor = Value | None
"""The factor of an element; None: 1."""
ColumnScales = tuple[int, int, Callable[[Value, Value, RegisterIndex], ScaleFactor]]
"""(first 8-column group, number of groups, scale(n8, row_half, i) -> that of the thread's i-th of two elements)."""
MAX_WIDTHS = 8
"""Numbers of columns for which a kernel has a mainloop, if its tiles may have fewer than all. Chosen; not measured."""
_REGISTER_TYPE = {FP32: F32, FP16: U32, INT32: I32}
"""The register type of an accumulator's elements; fp16 elements are packed in pairs."""


class Accumulator:
    """The rows x n accumulator of a consumer warpgroup, in fp32, int32 or fp16.

    `fragments[mma_m]` holds a thread's elements of the `mma_m`-th 64 rows (CuTe: the MMA_M mode). `D_FRAGMENT` says
    which element a register holds: in each group of 8 columns (`n8`) a thread has a pair of adjacent columns in each
    half of its warp's 16 rows (`row_half` 0 and 1). Registers are ordered by n8, then row_half, then element.
    """

    def __init__(self, mma: Mma, rows: int, n: int, name: str = "accumulator") -> None:
        """Declare the registers. Call it inside the consumer warpgroups' branch.

        Args:
            mma: The instruction, which gives the dtype: `KernelSpec.mma`, or what `select_mma` returns.
            rows: Rows of the warpgroup, a multiple of 64.
            n: Columns, as many as the instruction may have.
            name: Name of the registers in the printed CUDA.
        """
        self.mma, self.n, self.dtype = mma, n, mma.d
        register_type, count = _REGISTER_TYPE[mma.d], mma.accumulator_registers(n)
        self.fragments = current_builder().registers_2d(register_type, rows // mma.m, count, name)

    def clear(self) -> None:
        """Set all elements to zero."""
        k = current_builder()
        with k.unroll(len(self.fragments), name="mma_m") as mma_m, k.unroll(self.fragments.count) as i:
            self.fragments[mma_m][i] = 0

    def clear_outside(self, rows: int, n: int) -> None:
        """Set the elements outside of the first `rows` rows and `n` columns to zero."""
        k, registers = current_builder(), self.mma.accumulator_registers(n)
        for mma_m, fragment in enumerate(self.fragments):
            first = registers if mma_m * self.mma.m < rows else 0
            if first < fragment.count:
                with k.unroll(first, fragment.count) as i:
                    fragment[i] = 0

    def shift(self, mma_m: ValueLike, columns: int) -> None:
        """Move the elements of fragment `mma_m` to the left by `columns` columns, over the first `columns` columns."""
        fragment, registers = self.fragments[mma_m], self.mma.accumulator_registers(columns)
        with current_builder().unroll(fragment.count - registers) as i:
            fragment[i] = fragment[i + registers]

    @property
    def widths(self) -> list[int]:
        """The values of `n` for which a kernel records a `multiply`, ascending; the last is all columns.

        A tile that has fewer columns than the accumulator is multiplied with the smallest value that covers them. There
        are at most MAX_WIDTHS values, since each is code of its own.
        """
        step = max(8, ceil_div(self.n, MAX_WIDTHS * 8) * 8)
        return [n for n in range(step, self.n, step) if self.mma.supports_n(n)] + [self.n]

    def multiply(self, a: SharedView, b: SharedView, accumulate: ValueLike, n: int | None = None) -> None:
        """Issue acc = a @ b^T (+ acc if `accumulate`) over the tile's whole K as one wgmma group, without waiting.

        If `a` has fewer rows than the accumulator, only the accumulator's first rows are computed. Only the first `n`
        rows of `b` (columns of the accumulator) are multiplied; None: all.
        """
        n = self.n if n is None else n
        assert a.tile is not None
        assert b.tile is not None
        hw.wgmma_fence()
        m, majors = self.mma.m, (a.tile.major, b.tile.major)
        with current_builder().unroll(b.tile.k // self.mma.k, name="k_step") as k_step:
            scale_d = (as_value(accumulate, PRED) | (k_step > 0)).named("accumulate")
            b_descriptor = hw.descriptor(b, k_step).named("b_descriptor")
            for mma_m, fragment in zip(range(a.tile.mn // m), self.fragments, strict=False):
                a_descriptor = hw.descriptor(a.rows(mma_m * m, m), k_step).named("a_descriptor")
                d = fragment if n == self.n else fragment.slice(0, self.mma.accumulator_registers(n))
                hw.wgmma_mma(d, a_descriptor, b_descriptor, scale_d, n, self.mma, *majors)
        hw.wgmma_commit()

    def wait(self, pending: int) -> None:
        """Wait until at most `pending` wgmma groups are in flight. With 0 the accumulator can be read."""
        hw.wgmma_wait(pending) if pending else self.wait_complete()

    def wait_complete(self, pending: int = 0) -> None:
        """Wait for this accumulator's last wgmma group, after which it can be read.

        Up to `pending` later groups, of other accumulators, may stay in flight. The fence keeps the compiler from
        moving reads of the registers above the wait.
        """
        hw.wgmma_wait(pending)
        for fragment in self.fragments:
            hw.fence_operand(fragment)

    def promote_into(self, registers: RegisterArray, offset: int, scales: Iterable[ColumnScales]) -> None:
        """Add this accumulator's elements, times their scales, to `registers`, from register `offset` on.

        This accumulator has 64 rows. `registers`: a fragment of an fp32 accumulator. `scales`: the scales of the
        elements, by ranges of columns.
        """
        k = current_builder()

        def add(n8: Value, row_half: Value, i: RegisterIndex, scale: ScaleFactor) -> None:
            """Add element `i` of the pair in 8 columns `n8` and half `row_half`, times `scale`."""
            pair = as_value(n8 * 2 + row_half, I32).with_name_hint("pair_idx")
            acc_idx, addend = (pair * 2 + i + offset).with_name_hint("acc_idx"), self.element(0, pair, i)
            total = registers[acc_idx]
            registers[acc_idx] = total + addend if scale is None else hw.fma(addend, scale, total)

        for first, count, scale_of in scales:
            with k.unroll(first, first + count, name="n8") as n8, k.unroll(2, name="row_half") as row_half:
                if self.dtype == FP16:  # packed in pairs
                    for high in range(2):
                        add(n8, row_half, high, scale_of(n8, row_half, high))
                else:
                    with k.unroll(2) as i:
                        add(n8, row_half, i, scale_of(n8, row_half, i))

    def add_into_and_clear(self, target: Accumulator) -> None:
        """Add the elements to `target`'s, and set them to zero."""
        k = current_builder()
        with k.unroll(len(self.fragments), name="mma_m") as mma_m, k.unroll(self.fragments.count) as i:
            fragment = self.fragments[mma_m]
            self.add(target.fragments[mma_m], i, fragment[i])
            fragment[i] = 0

    def add(self, fragment: RegisterArray, index: RegisterIndex, addend: Value) -> None:
        """Add `addend`, a register of an accumulator of the same dtype, to register `index` of a fragment."""
        if self.dtype == FP16:
            (lo, hi), (addend_lo, addend_hi) = hw.unpack_pair(fragment[index], FP16), hw.unpack_pair(addend, FP16)
            fragment[index] = hw.pack(lo + addend_lo, hi + addend_hi, FP16)
        elif self.dtype == INT32:  # modulo 2^32
            fragment[index] = (fragment[index].to(U32) + addend.to(U32)).to(I32)
        else:
            fragment[index] = fragment[index] + addend

    def packed_pair(self, mma_m: ValueLike, pair: RegisterIndex, output: DType) -> Value:
        """Return elements 2 * pair and 2 * pair + 1 of fragment `mma_m`, rounded to `output` (16 bits) and packed."""
        fragment = self.fragments[mma_m]
        if self.dtype == FP16:
            return fragment[pair] if output == FP16 else hw.pack(*hw.unpack_pair(fragment[pair], FP16), output)
        return hw.pack(self.element(mma_m, pair, 0), self.element(mma_m, pair, 1), output)

    def element(self, mma_m: ValueLike, pair: RegisterIndex, i: RegisterIndex) -> Value:
        """Return element 2 * pair + i of fragment `mma_m`, as fp32. `i`: 0 or 1, an int if the elements are fp16."""
        fragment = self.fragments[mma_m]
        if self.dtype == FP16:
            assert isinstance(i, int)
            return hw.unpack(fragment[pair], i, FP16)
        return fragment[2 * pair + i].to(F32)


class InterleaveOrder:
    """The order of two arrays between which the rows of an operand alternate, in groups of 8.

    TMA loads the groups of the array at the lower address first, since a tensor map cannot have a negative stride. If
    that is the second array, `restore` exchanges the sums. Kernel argument: second_array_is_first.
    """

    def __init__(self, role: Role) -> None:
        """Declare the kernel argument. `role`: which operand alternates between two arrays."""
        self._role = role
        self._is_reversed = current_builder().parameter(
            "second_array_is_first", compute=lambda p: int(p.bound_operands[role][0].interleave_stride < 0)
        )

    def restore(self, accumulator: Accumulator) -> None:
        """Exchange the sums of the two arrays if the second one was loaded first.

        A thread has both sums that it exchanges: those of rows r and r + 8 if A alternates, else those of one column
        in two consecutive groups of 8.
        """
        k = current_builder()
        registers = accumulator.mma.accumulator_registers(N8_COLUMNS)
        width = registers // 2 if self._role == "a" else registers
        with k.when(self._is_reversed != 0):
            for fragment in accumulator.fragments:
                for first in range(0, fragment.count, 2 * width):
                    for i in range(first, first + width):
                        x, y = fragment[i].named("first"), fragment[i + width].named("second")
                        fragment[i], fragment[i + width] = y, x
