"""Warps of one warpgroup give back registers down to different numbers.

Source: TIRx-kernels #53. All warps of a warpgroup must execute the same setmaxnreg, or the behavior is undefined (PTX
ISA, "setmaxnreg"). Mended: one number for all roles of a warpgroup.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.values import Value


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budgets", [(40, 40, 40, 40), (40, 24, 40, 40), (24, 24, 40, 40)])
def test_one_budget_for_each_role(budgets: tuple[int, ...], seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        with k.warpgroup(0):
            for warp, registers in enumerate(budgets):
                with k.warp(warp):
                    hw.set_registers(registers)

    done = run(record, threads=256, seed=seed)
    assert kinds(done) == (set() if len(set(budgets)) == 1 else {"registers"})
    assert all("setmaxnreg executed by only some warps of warpgroup 0" in h.message for h in done.hazards)
