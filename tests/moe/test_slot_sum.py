"""The sum of each token's rows in the simulator, rounded once; its kernels do not spill."""

from __future__ import annotations

import numpy as np
import pytest

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.core.dtypes import BF16, FP16, DType
from gemmsmith.moe.launch import slot_sum
from gemmsmith.moe.slot_sum import MAX_ROWS, BoundSlotSum, SlotSumSpec
from gemmsmith.moe.slot_sum import slot_sum as slot_sum_kernel


def in_order(slots: np.ndarray, addend: np.ndarray | None) -> np.ndarray:
    """Return the sums of slots (tokens, rows, n), added in fp32."""
    total = np.zeros_like(slots[:, 0], np.float32)
    for row in (*slots.swapaxes(0, 1), *([] if addend is None else [addend])):
        total = total + row.astype(np.float32)
    return total.astype(slots.dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("tokens", "rows", "n"), [(1, 1, 8), (1, 8, 2816), (3, 2, 1024), (37, 6, 72), (9, MAX_ROWS, 128)]
)
def test_against_numpy(rng: np.random.Generator, tokens: int, rows: int, n: int, dtype: DType) -> None:
    """The simulator reports no hazard; it would raise."""
    slots, addend = (rng.standard_normal((tokens, x, n)).astype(dtype.numpy) for x in (rows, 1))
    slots[0, 0, :3] = np.inf, -np.inf, np.nan
    for added in (None, addend[:, 0]):
        got = slot_sum(slots.reshape(-1, n), rows, added, "sim")
        np.testing.assert_array_equal(got.astype(np.float32), in_order(slots, added).astype(np.float32))


@pytest.mark.parametrize(("tokens", "rows", "n"), [(1, 8, 64), (5, 3, 1032), (37, MAX_ROWS, 16)])
def test_rows_by_index(rng: np.random.Generator, tokens: int, rows: int, n: int) -> None:
    x, row_of_slot = rng.standard_normal((2 * tokens * rows, n)).astype(BF16.numpy), rng.permutation(2 * tokens * rows)
    row_of_slot = row_of_slot[: tokens * rows].astype(np.int32)
    got = slot_sum(x[: tokens * rows], rows, None, "sim", row_of_slot % (tokens * rows))
    want = in_order(x[row_of_slot % (tokens * rows)].reshape(tokens, rows, n), None)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("waits", [True, False])
def test_it_waits_for_the_grid_before(rng: np.random.Generator, waits: bool) -> None:
    kernel, memory = slot_sum_kernel.__wrapped__(SlotSumSpec(BF16, 3, False)), GlobalMemory()
    slots = rng.standard_normal((5, 3, 64)).astype(BF16.numpy)
    got = np.full((5, 64), -7, BF16.numpy)
    if not waits:
        body = kernel.body.statements
        body[:] = [x for x in body if "GridDependencyWait" not in str(getattr(x, "instruction", ""))]
    places = {"slots": memory.add_buffer(slots.reshape(-1, 64), "slots", writable=False)}
    places["sums"] = memory.add_buffer(got, "sums")
    bound = BoundSlotSum(5, 8)
    arguments = kernel.arguments(bound) | places
    found = simulate(kernel, kernel.work_clusters(bound), arguments, memory, seed=1, is_dependent_launch=True).hazards
    assert bool(found) != waits
    if waits:
        np.testing.assert_array_equal(got.astype(np.float32), in_order(slots, None).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 6, 8, MAX_ROWS])
def test_no_spills(rows: int) -> None:
    for dtype, has_addend, gathers in ((BF16, False, False), (FP16, True, False), (BF16, False, True)):
        kernel = slot_sum_kernel(SlotSumSpec(dtype, rows, has_addend, gathers))
        r = compile_source(kernel.source, kernel.name).resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
