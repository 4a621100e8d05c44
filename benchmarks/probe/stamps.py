"""Where a kernel's time goes: cycles of a CTA from its start to the end of each step, in single-wave shapes.

The generated source gets a few stores of clock64; the kernel is otherwise the same, and about 0.1 us slower.

    python -m benchmarks.probe.stamps --json rows.json
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

import gemmsmith
from benchmarks.timing import captured, edited, options, replayed, rotated, save
from gemmsmith import Config
from gemmsmith.backends.cuda import kernel_loader
from gemmsmith.backends.cuda.driver import check

STEPS = ["barriers", "first copies", "cluster met", "first k-tile there", "mainloop", "epilogue", "store read"]
STAMPS = """__device__ long long stamps[132 * 8];
#define STAMP(i) stamps[blockIdx.x % 132 * 8 + i] = clock64()
"""
PLACES = [
    (r"    const int thread = threadIdx.x;\n", " if (thread == 0) STAMP(0);\n"),
    (r"        grid_dependency_wait\(\);\n", " STAMP(1);\n"),
    (r"(?=    (cluster_arrive_relaxed|__syncthreads)\(\);\n)", " if (thread == 0) STAMP(2);\n"),
    (r"\n    grid_dependency_wait\(\);\n", " if (thread == 0) STAMP(3);\n"),
    (r"mbarrier_wait\(mainloop_full_barrier\[\w*read_stage\][^;]*;", " if (thread == 128 && k_tile == 0) STAMP(4);"),
    (r"wgmma_wait_0\(\);", " if (thread == 128) STAMP(5);"),
    (r"bulk_commit\(\);", " if (thread == 128) STAMP(6);"),
    (r"bulk_wait_read_0\(\);(?!.*bulk_wait_read_0)", " if (thread == 128) STAMP(7);"),
]
"""Patterns in the plain, warp-specialized kernel; a stamp follows the first match of each (of the last: the last)."""


def config(tile: tuple[int, int, int], cluster: tuple[int, int], stages: int) -> Config:
    return Config(tile=tile, cluster=cluster, stages=stages, consumers=2 if tile[0] > 64 else 1,
                  raster="n" if cluster[1] > cluster[0] else "m")  # fmt: skip


CASES = [
    ((256, 256, 256), config((64, 16, 64), (1, 1), 16)),
    ((1024, 1024, 1024), config((64, 128, 64), (1, 1), 8)),
    ((16, 8192, 8192), config((64, 64, 64), (1, 1), 12)),
    ((128, 7168, 2048), config((64, 112, 64), (2, 1), 8)),
    ((256, 2112, 7168), config((64, 64, 64), (2, 1), 12)),
    ((256, 2112, 7168), config((64, 96, 64), (1, 2), 10)),
    ((256, 6144, 4096), config((128, 96, 64), (2, 1), 7)),
    ((512, 2112, 7168), config((128, 64, 64), (1, 1), 8)),
    ((512, 4096, 4096), config((128, 128, 64), (2, 1), 6)),
]


def timed(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Return microseconds per call: the minimum of three blocks of 50 replays, before the chip slows down."""
    replayed(graph, 20)
    return min(replayed(graph, 50) / 50 / calls for _ in range(3))


def stamped(source: str) -> str:
    for pattern, stamp in PLACES:
        source, stamps_ = re.subn(pattern, lambda m, s=stamp: m[0] + s, source, count=1, flags=re.DOTALL)
        assert stamps_, pattern
    return source.replace('extern "C" __global__', STAMPS + 'extern "C" __global__')


def measure(m: int, n: int, k: int, config_: Config) -> dict[str, Any]:
    """Return one row: both times, and the steps' mean cycles over the CTAs."""
    sets = rotated(m, n, k, torch.bfloat16, "nt")
    plan = gemmsmith.plan(*sets[0][:2], out=sets[0][2], config=config_)
    us = timed(captured(lambda a, b, d: plan.run(a, b, d), sets), len(sets))
    torch_us = timed(captured(lambda a, b, d: torch.mm(a, b, out=d), sets), len(sets))
    source = stamped(plan.kernel.source)
    with edited(plan.kernel, source):
        again = gemmsmith.plan(*sets[0][:2], out=sets[0][2], config=config_)
        timed(captured(lambda a, b, d: again.run(a, b, d), sets), len(sets))
    loaded = next(x for key, x in kernel_loader._LOADED.items() if key[0] == source)
    module = check(driver.cuFuncGetModule(loaded.function), "cuFuncGetModule")
    address, size = check(driver.cuModuleGetGlobal(module, b"stamps"), "cuModuleGetGlobal")
    stamps_ = np.zeros(size // 8, np.int64)
    check(driver.cuMemcpyDtoH(stamps_.ctypes.data, address, size), "cuMemcpyDtoH")
    stamps = stamps_.reshape(-1, 8)
    stamps = stamps[stamps[:, 7] > 0]
    steps = np.diff(stamps, axis=1).mean(0).round().astype(int).tolist()
    return {
        "m": m, "n": n, "k": k, "config": str(config_), "us": us, "torch_us": torch_us, "ctas": len(stamps),
        "cycles": dict(zip(STEPS, steps, strict=True)),
        "ideal_mainloop": 2 * config_.tile[0] * config_.tile[1] * config_.tile[2] // 4096 * -(-k // config_.tile[2]),
    }  # fmt: skip


def main() -> None:
    arguments = options(__doc__).parse_args()
    rows = []
    for shape, config_ in CASES:
        rows.append(measure(*shape, config_))
        r = rows[-1]
        steps = "  ".join(f"{name} {cycles}" for name, cycles in r["cycles"].items())
        print(f"{r['m']:>5} {r['n']:>5} {r['k']:>5}  {r['us']:6.2f} us  torch {r['torch_us']:6.2f} us   {steps} "
              f"(at best {r['ideal_mainloop']})", flush=True)  # fmt: skip
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
