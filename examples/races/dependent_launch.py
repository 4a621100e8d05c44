"""When may a kernel begin?

python examples/races/dependent_launch.py

A warp transforms 32 numbers by five exchanges between its lanes (a Walsh-Hadamard transform). It uses no shared memory
and no barrier, and each lane writes its own word. The program launches all kernels with programmatic dependent launch,
so that the start of one overlaps the end of the one before. A language model answers with garbled text. Why?

Answer: The kernel before this one may still be writing `source`. A kernel that is launched in this way must itself wait
for the writes of earlier kernels, by griddepcontrol.wait (cudaGridDependencySynchronize in CUDA).

Mend: griddepcontrol.wait before the first access to global memory.

Source: https://github.com/ggml-org/llama.cpp/pull/23690.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import F32, U64, Builder, Kernel

MASKS = (1, 2, 4, 8, 16)


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (32,) = the Walsh-Hadamard transform of source (32,), fp32."""
    with Builder("transform", threads=32) as k:
        source, target, own = k.pointer("source"), k.pointer("target"), (k.lane * 4).to(U64)
        if mended:
            hw.grid_dependency_wait()
        x = hw.load_global_word(source + own, True, F32, "x")
        for mask in MASKS:
            other = hw.shuffle_xor_fp32(x, mask)
            x = k.select((k.lane & mask) == 0, x + other, other - x)
        hw.store_global_word(target + own, x, True, "result")
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal(32, np.float32)
    arrays = {"source": x, "target": np.full_like(x, np.nan)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True, dependent=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    matrix = np.ones((1, 1))
    for _ in MASKS:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix @ source


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_allclose(done.result["target"], expected(done.result["source"]), rtol=1e-4, atol=1e-4)
    print(f"mended: {done.verdict}")
