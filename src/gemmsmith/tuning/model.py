"""The estimated time of configs for a problem, in SM cycles, for any number of configs at once.

It is the largest of three bounds: waves of tiles, each as long as the slower of copies and math; the bytes over the
memory bandwidth; the energy over the power limit. The constants were fitted to benchmarks/sweep.py on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.schedule.stream import LEAST_IDLE, MOST_PARTS
from gemmsmith.tuning.space import SMS, Column, Space

FLOPS_PER_CYCLE = 4096
"""Dense 16-bit FLOPs of one SM's tensor cores a cycle: m64n256k16 takes 128."""
SM_BYTES_PER_CYCLE, FILL_BYTES_PER_CYCLE, DRAM_BYTES_PER_CYCLE = 78, 100, 2125
"""Bytes a cycle: from the L2 to an SM; into an SM, with what other CTAs of its cluster multicast; from memory to all
SMs, 3.7 TB/s at 1.75 GHz over a whole kernel, 4.3 in its middle."""
SHORT_ROWS, IDLE, MEMORY_BOUND_ROWS = 0.04, 0.2, 64
"""Memory is by so much slower where k-tiles of 64 ask for 128 bytes of a row at a time, by a quarter of it where they
are twice as deep; and by so much of the share of SMs that ask for nothing; felt where nothing else limits, as with so
few rows of A."""
MANY_WAVES = 4
"""With more waves, SMs that are idle in the last one save power that the others use: half a wave is counted half."""
FILL_CYCLES, MEET_CYCLES = 5000, 290
"""Starting a kernel and filling the pipeline, and more for each peer in a cluster."""
STORE_BYTES_PER_CYCLE, ELEMENT_CYCLES, NODE_CYCLES = 32, 14, 1.5
"""An epilogue that overlaps no mainloop: bytes of matrices a cycle; cycles for each element of a thread, and node."""
SWAPPED_STORE_BYTES_PER_CYCLE = 0.7
"""Bytes a cycle of a transposed tile that threads, not TMA, store along D's contiguous index."""
SHARE_CYCLES, CLUSTER_SHARE_CYCLES, BYTES_OF_SHARE_PER_CYCLE = 5500, 250, 24
"""Adding up a tile's partial sums: cycles for flags, cycles for barriers, bytes read a cycle."""
LATENCY_CYCLES, SHARPNESS = 850, 4
"""The latency of a copy from DRAM; and the exponent of the norm that combines work, memory and power."""
LOOP_CYCLES = 117
"""Cycles of an iteration of the mainloop, beside one for each column of K: a barrier's and a wgmma's latency."""
ENERGY_FLOPS, ENERGY_L2, ENERGY_FILL, ENERGY_READ, ENERGY_DRAM = 456_000, 48_800, 142_000, 400_000, 7_000
"""At 700 W the chip gives a cycle (of 1/1755 us) so many FLOPs, bytes read from the L2, bytes written to shared memory,
bytes that wgmma reads there, bytes from DRAM: one or the other."""
OUT_OF_STEP = 0.03
"""Additional energy, as a fraction, of stream-K, which cannot have `sync_clusters`. Without it the model chose
stream-K for three shapes, with 0.81, 0.96 and 0.97 of the tuned speed (benchmarks/results/untuned-h200.json)."""


class Estimate(NamedTuple):
    """What the model says, in SM cycles: of a k-tile's math and copies, how long a k-tile takes, how many a CTA works
    on one after the other, what stores and bringing shares together add, the time that the bytes and the energy take at
    all, and what a kernel costs before and after."""

    math: Column
    copies: Column
    step: Column
    k_steps: Column
    stores: Column
    share: Column
    memory: Column
    power: Column
    fill: Column

    @property
    def work(self) -> Column:
        return np.asarray(self.k_steps * self.step + self.stores)

    @property
    def cycles(self) -> Column:
        longest = (self.work**SHARPNESS + self.memory**SHARPNESS + self.power**SHARPNESS) ** (1 / SHARPNESS)
        return np.asarray(longest + self.share + self.fill)


class Extra(NamedTuple):
    """An epilogue's cost for an element of the product: bytes of matrices, and nodes that compute."""

    nbytes: float
    nodes: int

    @staticmethod
    def of(epilogue: EpilogueSpec) -> Extra:
        graph = epilogue.graph
        extents = graph.extents()
        places = [(o.extent, o.dtype) for o in graph.operands] + [(extents[r.node], r.dtype) for r in graph.results]
        nbytes = sum(dtype.bytes / extent.width for extent, dtype in places if extent.is_matrix and dtype)
        return Extra(nbytes, sum(node.op not in ("accumulator", "operand", "constant") for node in graph.nodes))


def estimate(problem: Problem, s: Space, epilogue: EpilogueSpec | None = None) -> Estimate:
    """The estimate for every config of a space; for the bare product if no epilogue is given."""
    extra = Extra.of(epilogue or EpilogueSpec.bare(problem.d))
    tiles, resident = s.tiles(problem), s.resident
    k_tiles = np.maximum(1, -(-problem.k // s.k))
    # wgmma reads A and B from shared memory, 128 bytes a cycle
    operands = 128 * (16 + s.n / 4) * (s.m / 64) * (s.k / 16)
    math = np.maximum(2 * s.m * s.n * s.k / FLOPS_PER_CYCLE, operands / 128)
    stream = s.splits == 0
    clusters = np.maximum(1, np.minimum(resident, tiles * np.where(stream, k_tiles, s.splits)))
    box_m, box_n = (np.minimum(t, size) for t, size in zip((s.m, s.n), s.sizes(problem), strict=True))
    read, filled = 2 * s.k * (box_m / s.columns + box_n / s.rows), 2 * s.k * (box_m + box_n)
    copies = np.maximum(read / SM_BYTES_PER_CYCLE, filled / FILL_BYTES_PER_CYCLE)
    step = np.maximum(np.maximum(math, copies), np.maximum(LATENCY_CYCLES / s.stages * (s.k / 64), LOOP_CYCLES + s.k))
    store = s.m * s.n * extra.nbytes / STORE_BYTES_PER_CYCLE
    by_threads = s.m * np.minimum(s.n, problem.m) * extra.nbytes / SWAPPED_STORE_BYTES_PER_CYCLE
    threads = 128 * np.where(s.own_tiles, 1, s.consumers)
    store = np.where(s.swap_ab & (not problem.d.stores_by_tma), by_threads, store)
    store = store + s.m * s.n / threads * (ELEMENT_CYCLES + NODE_CYCLES * extra.nodes)
    store = store / s.slices
    full = -(-tiles // resident)
    waves = np.where((full > MANY_WAVES) & (s.cluster_splits == 1), (full + tiles / resident) / 2, full)
    hidden = np.where(s.own_tiles, k_tiles * step, 0.0)
    k_steps = waves * -(-k_tiles // s.cluster_splits)
    stores = store + (waves - 1) * np.maximum(0.0, store - hidden)
    shared = s.splits != 1
    k_steps = np.where(shared, -(-tiles * k_tiles // clusters), k_steps)
    remaining = np.where(stream & (tiles > resident), tiles % resident, 0)
    parts = np.minimum(np.minimum(resident // np.maximum(remaining, 1), k_tiles), MOST_PARTS)
    idle = (resident - remaining * parts) * LEAST_IDLE > resident * parts * (tiles // resident)
    alike = (remaining > 0) & (parts > 1) & ~idle
    k_steps = np.where(alike, tiles // resident * k_tiles + -(-k_tiles // parts), k_steps)
    stores = np.where(shared, np.maximum(1, tiles // clusters) * store, stores)
    partial = 4 * s.m * s.n / BYTES_OF_SHARE_PER_CYCLE
    others = np.where(stream, np.where(alike, parts - 1, 1), -(-clusters // np.maximum(tiles, 1)) - 1)
    share = np.where(shared, SHARE_CYCLES + others * partial, 0.0)
    share = np.where(s.cluster_splits > 1, CLUSTER_SHARE_CYCLES + (s.cluster_splits - 1) * partial / s.slices, share)
    p = problem
    nbytes = p.batch * (2 * (p.m * p.k + p.k * p.n) + extra.nbytes * p.m * p.n)
    k_steps_of_all = tiles * s.rows * s.columns * k_tiles
    energy = 2 * s.m * s.n * s.k / ENERGY_FLOPS + read / ENERGY_L2 + filled / ENERGY_FILL + operands / ENERGY_READ
    power = k_steps_of_all * energy * (1 + OUT_OF_STEP * stream)
    slower = SHORT_ROWS * (64 / s.k) ** 2 + IDLE * (1 - clusters * s.cluster_size / SMS)
    memory = nbytes / DRAM_BYTES_PER_CYCLE * (1 + slower * (p.m <= MEMORY_BOUND_ROWS))
    fill = FILL_CYCLES + MEET_CYCLES * (s.cluster_size - 1)
    return Estimate(math, copies, step, k_steps, stores, share, memory, power + nbytes / ENERGY_DRAM, fill)
