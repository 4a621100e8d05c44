"""Warps that access shared memory at addresses chosen by the host, to measure the wavefronts that this takes.

Which lanes of 16-byte loads share a wavefront is undocumented. benchmarks/ladder/counters.py compares the simulator
with Nsight Compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from gemmsmith import hw
from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.core.arguments import Pointer
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launch, Launches
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import RegisterArray, Value

WARP = 32
"""Lanes of a warp."""
CHUNK = 16
"""Bytes of a lane's access, at most."""
BYTES = 4096
"""Bytes of the buffer."""
LANE = np.arange(WARP)
ANYWHERE = {
    "side by side": LANE, "all different, 2 apart": LANE * 2, "all in one bank": LANE * 8,
    "another order": LANE[::-1], "halves the same": LANE % 16, "quarters the same": LANE % 8,
}  # fmt: skip
SHARED = ANYWHERE | {
    "all the same": LANE * 0, "pairs": LANE // 2, "fours (A of sgemm)": LANE // 4, "eights": LANE // 8,
    "halves (A of vectorized)": LANE // 16, "by 4 (B of sgemm)": LANE % 4, "by 2": LANE % 2,
    "neighbors by 2": LANE % 2 + LANE // 4 * 2, "neighbors by 3": np.minimum(LANE, LANE ^ 3),
    "neighbors by 4": LANE % 4 + LANE // 8 * 4, "pairs but for the last": np.where(LANE == 31, 31, LANE // 2),
    "pairs, then neighbors by 2": np.where(LANE < 16, LANE // 2, LANE % 2 + LANE // 4 * 2),
    "pairs in one bank": LANE // 2 * 8, "fours in one bank": LANE // 4 * 8, "fours, backwards": LANE[::-1] // 4,
}  # fmt: skip
"""Index of the 16 bytes that each lane accesses."""
ROWS = {"rows of 16 bytes": LANE, "rows of 32": LANE * 2, "rows of 128": LANE * 8,
        "rows of 128, swizzled": LANE * 8 + LANE % 8, "a row 8 times": LANE // 8}  # fmt: skip
COPIED = ANYWHERE | {
    "a chunk further": LANE + 1, "rows of 80 bytes": LANE // 4 * 5 + LANE % 4,
    "a line in one bank": np.where(LANE < 8, LANE * 8, LANE + 64),
}  # fmt: skip
"""Adjacent sources, so that 8 lanes access one line of 128 bytes."""
Access = Callable[[RegisterArray, Value, Value], None]


def copy(width: int, _: RegisterArray, address: Value, source: Value) -> None:
    hw.cp_async_copy(address, source, width, width)
    hw.cp_async_commit()
    hw.cp_async_wait(0)


def load(values: RegisterArray, address: Value, _: Value) -> None:
    hw.load_shared(values, address)


ACCESSES: dict[str, tuple[int, Access, Mapping[str, np.ndarray]]] = {
    "load_16": (4, load, SHARED),
    "load_8": (2, load, SHARED),
    "store_16": (4, lambda values, address, _: hw.store_shared(values, address), ANYWHERE),
    "ldmatrix": (4, lambda values, address, _: hw.load_matrix(values, address), ROWS),
    "copy_16": (4, partial(copy, CHUNK), COPIED),
    "copy_4": (4, partial(copy, 4), COPIED),
}
"""Registers per lane for its access, how it accesses, and the offsets."""


class Bound(NamedTuple):
    """A probe's launch arguments: each lane's offset in bytes, and its results."""

    offsets: Pointer = Pointer("offsets")
    out: Pointer = Pointer("out")
    ctas: int = 1


class Probe(NamedTuple):
    """A warp's access, and the offsets of its lanes in the buffer, in bytes."""

    access: str
    pattern: str

    @property
    def kernel(self) -> Kernel:
        registers, access, _ = ACCESSES[self.access]
        with Builder(f"probe_{self.access}", threads=WARP) as k:
            k.work_clusters = attrgetter("ctas")
            offsets, out = (k.pointer(name, compute=attrgetter(name)) for name in Bound._fields[:2])
            buffer = k.shared(BYTES, alignment=128, allow_uninitialized_reads=True)
            place, values = k.registers(U32, 1, "place"), k.registers(U32, registers, "values")
            for i in range(registers):
                values[i] = 0
            hw.grid_dependency_wait()
            hw.load_global(place, offsets + (k.thread * 4).to(U64), k.thread >= 0)
            own = out + (k.thread * CHUNK).to(U64)
            access(values, buffer[0].address + place[0], own)
            hw.store_global(values, own, k.thread >= 0)
            return k.finish()

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets, and the buffer of the results."""
        registers, _, patterns = ACCESSES[self.access]
        width = 4 * registers if self.access.startswith("load") else CHUNK
        return (patterns[self.pattern] * width).astype(np.int32), np.zeros(WARP * 4, np.float32)

    def launches(self, offsets: object, out: object) -> tuple[Launches, dict[str, ArrayInfo]]:
        """Return the launches for these arrays, with their arguments by name."""
        arguments = {"offsets": describe(offsets), "out": describe(out)}
        return Launches(None, False, (Launch.from_kernel(self.kernel, Bound()),)), arguments


def probes() -> Iterator[Probe]:
    """Return all probes."""
    for access, (_, _, patterns) in ACCESSES.items():
        for pattern in patterns:
            yield Probe(access, pattern)
