"""Nothing is left to load: is a copy in flight?

python examples/races/copies_after_the_loop.py

A loop has three stages. Each iteration waits for its tile with one group of cp.async pending, starts the copy of the
tile after the next, and adds up its tile. Beyond the last tile the copies have 0 bytes of source: they fill a stage
with zeros, and the loop needs no special case. After the loop the threads exchange their sums through a stage. About
ten results in a million are wrong. Why?

Answer: When the loop ends, two copies beyond the last tile may be in flight. They read nothing, but they write: their
zeros may overwrite the sums.

Mend: Wait for all copies (cp.async.wait_group 0) before the stages are used for something else.

Source: https://github.com/NVIDIA/Fuser/issues/2000, mended in https://github.com/NVIDIA/Fuser/pull/2001.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import F32, U32, U64, Builder, Kernel

THREADS, TILES, STAGES = 64, 5, 3


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (THREADS,) = the sum of source (TILES, THREADS) over its tiles, backwards, fp32."""
    with Builder("reversed_sums", threads=THREADS) as k:
        source, target = k.pointer("source"), k.pointer("target")
        stages, own = k.shared(4 * THREADS, stages=STAGES, name="stage"), (k.thread * 4).to(U32)
        total = k.var(F32, 0.0, "total")

        def copy(tile: int) -> None:
            address = source + (own + min(tile, TILES - 1) * 4 * THREADS).to(U64)
            hw.cp_async_copy(stages[tile % STAGES].address + own, address, 4 if tile < TILES else 0, 4)
            hw.cp_async_commit()

        for tile in range(STAGES - 1):
            copy(tile)
        for tile in range(TILES):
            hw.cp_async_wait(STAGES - 2)
            hw.sync_threads()
            copy(tile + STAGES - 1)
            total.set(total.get() + hw.load_shared_word(stages[tile % STAGES].address + own, F32, "element"))
        if mended:
            hw.cp_async_wait(0)
        hw.sync_threads()
        result = stages[(TILES + 1) % STAGES].address
        hw.store_shared_word(result + own, total.get(), "sum")
        hw.sync_threads()
        other = hw.load_shared_word(result + ((THREADS - 1 - k.thread) * 4).to(U32), F32, "other")
        hw.store_global_word(target + own.to(U64), other, True, "result")
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal((TILES, THREADS), np.float32)
    arrays = {"source": x, "target": np.full(THREADS, np.nan, np.float32)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    return source.sum(0, dtype=float)[::-1]


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_allclose(done.result["target"], expected(done.result["source"]), rtol=1e-5, atol=1e-5)
    print(f"mended: {done.verdict}")
