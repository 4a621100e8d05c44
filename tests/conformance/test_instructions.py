"""Every instruction and operand layout, in a tiny kernel: numpy, the simulator and the GPU agree bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from tests.conformance.case import Case
from tests.conformance.cases import CASES

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.lang.kernel import Kernel

each_case = pytest.mark.parametrize("case", CASES, ids=str)


def in_simulator(case: Case, kernel: Kernel, seed: int) -> np.ndarray:
    """What `out` holds after the case's kernel ran in the simulator, which must find nothing wrong with it."""
    memory, out = GlobalMemory(), case.fresh_output()
    addresses = {name: memory.add_buffer(x, name, writable=False) for name, x in case.inputs.items()}
    addresses["out"] = memory.add_buffer(out, "out")
    result = simulate(kernel, case.grid, case.arguments(addresses), memory, seed=seed)
    assert not result.hazards, "\n".join(map(str, result.hazards))
    return out


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.reshape(-1).view(np.uint8), want.reshape(-1).view(np.uint8))


def test_names_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.slow
@each_case
def test_simulator(case: Case, rng: np.random.Generator) -> None:
    """In the schedule of the cost model, and in a fresh one."""
    kernel = case.kernel()
    for seed in (0, int(rng.integers(1, 1 << 30))):
        same_bits(in_simulator(case, kernel, seed), case.expected)


@pytest.mark.slow
@each_case
def test_compiles(case: Case) -> None:
    kernel = case.kernel()
    assert not compile_source(kernel.source, kernel.name).resources.advisories


@pytest.mark.gpu
@each_case
def test_gpu(case: Case) -> None:
    from tests.conformance import gpu

    got = gpu.run(case)
    same_bits(got, in_simulator(case, case.kernel(), 0))
    same_bits(got, case.expected)
