"""A user's program, which type checkers read: what must pass, and lines that must fail, each with `error`."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

import gemmsmith
import gemmsmith.torch as gt
from gemmsmith import Config, Spec, hw
from gemmsmith.graph import EVT, AccFetch, Compute
from gemmsmith.kernels import KernelSpec, TmaStages, make_tile_scheduler
from gemmsmith.lang import U32, U64, Builder, Kernel, Value

Matrix = npt.NDArray[np.float32]


def with_numpy(a: Matrix, b: Matrix, bias: Matrix) -> Matrix:
    """A result without an epilogue is an array of a's type."""
    plan = gemmsmith.plan(Spec((64, 64), "bf16"), Spec((64, 64), "bf16"), config=Config())
    print(plan.why, plan.estimated_us + 1, plan.source.upper())
    d = gemmsmith.gemm(a, b, precision="tf32", backend="sim")
    e: Matrix = gemmsmith.gemm(a, b, epilogue=lambda acc, bias: acc + bias, bias=bias, beta=2.0, precision="tf32")
    simulation = gemmsmith.simulate(a, b, precision="tf32")
    print(len(simulation.hazards) + simulation.cycles)
    values, scales, *_ = gemmsmith.quantize(a, "1x128")
    print(values.shape, scales.shape)
    print(gemmsmith.simulate(a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)).cycles)
    f = gemmsmith.grouped_gemm(a, b, offsets=np.zeros(1, np.int32), along="m", precision="3xtf32")
    return gemmsmith.pack(d + e + f)


def with_kernels(k: Builder, spec: KernelSpec) -> Kernel:
    """What a kernel is recorded with has types."""
    mainloop = TmaStages(spec, make_tile_scheduler(spec)).prologue(prefetch=())
    k.when((k.warp_index == 0) & hw.elect_one())
    address = k.pointer("x") + (k.thread * 4).to(U64)
    word: Value = hw.load_global_word(address, True, U32, "word")
    hw.store_global_word(address, word, mainloop.prologue_k_tiles.get() == 0, "copied")
    print(EVT(Compute("relu"), AccFetch()).graph())
    return k.finish()


def with_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A tensor in is a tensor out."""
    d = gemmsmith.gemm(a, b).relu() + gt.gemm(a, b).relu() + gt.gemm(a, (b, b)).relu()
    e: torch.Tensor = gt.gemm(a, b, epilogue=lambda acc, x, alpha: acc * alpha + x, x=d, alpha=0.5)
    ends = torch.zeros(1, dtype=torch.int32)
    return gt.grouped_gemm(a, b, offsets=ends) + gt.FusedLinear(64, 64).forward(e)


def wrong(a: Matrix, t: torch.Tensor) -> None:
    """Each line has a mistake."""
    gemmsmith.gemm(a, a, out_dytpe="fp32")  # error
    gemmsmith.gemm(a, a, precision="tf23")  # error
    gemmsmith.gemm(a, a, backend="gpu")  # error
    hw.sync_thread()  # error
    gemmsmith.gemm(a, a, accumulate="fp64")  # error
    gemmsmith.gemm(a, "b")  # error
    gemmsmith.gemm(a, a, epilog=lambda acc: acc)  # error
    gemmsmith.grouped_gemm(a, a, offsets=a, along="n")  # error
    gemmsmith.plan(a, a, confg=Config())  # error
    gemmsmith.plan(a, a).run(a, a, outs=(a, a))  # error
    gemmsmith.gemm(a, a).relu()  # error
    print(gemmsmith.simulate(a, a).hazard)  # error
    gt.gemm(a, a)  # error
    gt.gemm(t, t, recomputed="tf32")  # error
    gt.grouped_gemm(t, t)  # error
    gt.gemm(t, t).nosuch()  # error
