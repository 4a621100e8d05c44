"""Attention from outside the package, softmax(Q K^T) V: a warp loads by TMA, two warpgroups multiply 64 queries each.

python examples/own_attention.py
"""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np

from gemmsmith import hw, launch
from gemmsmith.graph import fast_exp
from gemmsmith.kernels import (
    D_FRAGMENT,
    Accumulator,
    Matrix,
    MmaOperand,
    OperandCoord,
    PipelineTmaAsync,
    TmaOperand,
    init_barriers,
    select_mma,
)
from gemmsmith.lang import BF16, F32, FP32, I32, U32, U64, Builder, Constant, Kernel, Pointer, Tile

QUERIES, KEYS, DIM, STAGES = 128, 64, 64, 4  # per CTA; per step; elements per head, as many as KEYS; steps in flight
MMA, MASKED = select_mma(BF16, BF16, FP32), -1e30


def task(heads: int, queries: int, keys: int) -> SimpleNamespace:
    """Return what a launch is for: `heads` contiguous bf16 matrices of `queries` or `keys` rows by DIM."""
    q, k = (Matrix(BF16, rows, DIM, DIM, 1, heads, rows * DIM) for rows in (queries, keys))
    operands = {"q": (q, Pointer("q")), "k": (k, Pointer("k")), "v": (k.T, Pointer("v"))}  # arguments of the launch
    return SimpleNamespace(heads=heads, queries=queries, keys=keys, k=DIM, operands=operands)


def attention() -> Kernel:
    """Build the kernel; for its brevity the queries are loaded again with each step."""
    with Builder("attention", threads=384) as k:
        k.work_clusters = lambda p: p.heads * -(-p.queries // QUERIES)
        tiles = {"q": Tile(BF16, QUERIES, DIM, "K"), "k": Tile(BF16, KEYS, DIM, "K"), "v": Tile(BF16, DIM, KEYS, "MN")}
        loads = [TmaOperand(MmaOperand(x, "b", t, lambda p, x=x: p.operands[x]), STAGES) for x, t in tiles.items()]
        stage_bytes = k.parameter("stage_bytes", U32, lambda p: sum(x.stage_bytes(p) for x in loads))
        queries, keys = (k.parameter(x, compute=lambda p, x=x: getattr(p, x)) for x in ("queries", "keys"))
        pipeline, out = PipelineTmaAsync(STAGES, transaction_bytes=stage_bytes), k.pointer("out")
        init_barriers(pipeline, prefetch=[x.map for x in loads])
        tiles_per_head, steps = (queries + QUERIES - 1) // QUERIES, (keys + KEYS - 1) // KEYS
        head, first = hw.block_index() // tiles_per_head, hw.block_index() % tiles_per_head * QUERIES
        with k.warpgroup(0), k.warp(0, "producer"), k.when(hw.elect_one()):
            write, zero = pipeline.producer_start_state(), Constant(I32, 0)
            with k.range(steps, name="step") as step:
                pipeline.producer_acquire(write)
                for x, mn, column in zip(loads, (first, step * KEYS, zero), (zero, zero, step * KEYS), strict=True):
                    x.load(write.index, pipeline.full_barrier(write), OperandCoord(mn, head), column)
                write.advance()
        with k.warpgroups(1, 3, "consumer") as warpgroup:
            read, p = pipeline.consumer_start_state(), k.registers_2d(U32, KEYS // MMA.k, 4, "p")
            scores, output = Accumulator(MMA, 64, KEYS, "scores"), Accumulator(MMA, 64, DIM, "output")
            (s,), (o,) = scores.fragments, output.fragments
            rows = [(k.var(F32, MASKED, f"max_{i}"), k.var(F32, 0.0, f"sum_{i}")) for i in range(2)]
            first_row, column = D_FRAGMENT.element(k.thread % 128, 0)  # of this thread's pairs
            output.clear()
            with k.range(steps, name="step") as step:
                pipeline.consumer_wait(read)
                q_tile, k_tile, v_tile = (x.stages[read.index] for x in loads)
                scores.multiply(q_tile.rows(warpgroup * 64, 64), k_tile, accumulate=False)
                scores.wait(0)
                for half, (row_max, row_sum) in enumerate(rows):
                    old_max = row_max.get()
                    with k.unroll(KEYS // 8, name="n8") as n8, k.unroll(2) as i:
                        e, key = n8 * 4 + half * 2 + i, step * KEYS + n8 * 8 + column + i
                        s[e] = k.select(key < keys, s[e] * DIM**-0.5, MASKED)
                        row_max.set(k.maximum(row_max.get(), s[e]))
                    for mask in (1, 2):  # the four lanes of a row
                        row_max.set(k.maximum(row_max.get(), hw.shuffle_xor_fp32(row_max.get(), mask)))
                    alpha = fast_exp(old_max - row_max.get()).named("alpha")
                    row_sum.set(row_sum.get() * alpha)
                    with k.unroll(DIM // 8, name="n8") as n8, k.unroll(2) as i:
                        e = n8 * 4 + half * 2 + i
                        s[e], o[e] = fast_exp(s[e] - row_max.get()), o[e] * alpha
                        row_sum.set(row_sum.get() + s[e])
                for k_step, fragment in enumerate(p):
                    hw.fence_operand(fragment)
                    for i in range(4):
                        fragment[i] = hw.pack(s[k_step * 8 + i * 2], s[k_step * 8 + i * 2 + 1], BF16)
                    hw.wgmma_fence()
                    hw.wgmma_mma_rs(o, fragment, hw.descriptor(v_tile, k_step), True, DIM, MMA, "MN")
                hw.wgmma_commit()
                output.wait(0)
                pipeline.consumer_release(read)
                read.advance()
            for half, (_, row_sum) in enumerate(rows):
                for mask in (1, 2):  # the four lanes of a row
                    row_sum.set(row_sum.get() + hw.shuffle_xor_fp32(row_sum.get(), mask))
                row = first + warpgroup * 64 + first_row + half * 8
                with k.unroll(DIM // 8, name="n8") as n8:
                    pair = hw.pack(*(o[n8 * 4 + half * 2 + i] / row_sum.get() for i in range(2)), BF16)
                    element = (head * queries + row).to(U64) * DIM + (n8 * 8 + column).to(U64)
                    hw.store_global_word(out + element * 2, pair, row < queries, "pair")
        return k.finish()


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v, out = (rng.standard_normal((2, n, DIM)).astype(ml_dtypes.bfloat16) for n in (200, 300, 300, 200))
    launch(attention(), task(2, 200, 300), q=q, k=k, v=v, out=out)  # arrays on a GPU: it runs there
    weights = np.exp(q.astype(float) @ k.astype(float).swapaxes(1, 2) * DIM**-0.5)
    error = np.abs(weights @ v.astype(float) / weights.sum(2, keepdims=True) - out.astype(float)).max()
    print(f"2 heads, 200 queries, 300 keys: maximum error {error:.4f}, no hazard")


if __name__ == "__main__":
    main()
