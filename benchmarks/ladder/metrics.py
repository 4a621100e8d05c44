"""Nsight Compute's metrics and the simulator's counters that they equal, for ladder_counters.py.

The hardware counts for l1tex__, and for smsp__sass_, memory_ and sass__ ncu instruments the kernel (Kernel Profiling
Guide, "Metrics Guide"). LDGSTS is cp.async: 16 bytes bypass the L1, fewer are cached there. Seen on an H200:

- Hardware counts the sectors of LDGSTS with those of loads, and has no counter of its wavefronts.
- Hardware counts STSM (stmatrix) with STS. Of the metrics of instrumented code only memory_l1_wavefronts_shared has it.
- memory_l1_wavefronts_shared also has what wgmma reads, 128 bytes of A or B each, but not what TMA writes and reads.
- Bytes of TMA loads are those that arrive: of a multicast, in each CTA.
- l1tex__data_pipe_lsu_wavefronts_mem_shared.sum is not 0 in kernels without shared memory, and so is left out; as is
  sm__inst_executed_pipe_tensor_op_hmma.sum, in which are HFMA2, by which ptxas moves constants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from gemmsmith.backends.sim.execute.counters import WAVEFRONT_BYTES, Count
from gemmsmith.core.tile import SECTOR_BYTES

GLOBAL, SHARED = "l1tex__t_sectors_pipe_lsu_mem_global_op_", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_"
SASS_GLOBAL, SASS_SHARED = (x.replace("l1tex__", "smsp__sass_l1tex_") for x in (GLOBAL, SHARED))
FROM_L2, TO_L2 = (f"l1tex__m_{x}_bytes_mem_global_op_tma_" for x in ("xbar2l1tex_read", "l1tex2xbar_write"))
TENSOR, OPCODES = "sm__inst_executed_pipe_tensor_op_", "sass__inst_executed_per_opcode"
LIMIT, MAX_WARPS = "launch__occupancy_limit_", "sm__maximum_warps_per_active_cycle_pct"
WARPS = 64
"""Warps per SM, at most."""
SECTORS, WAVEFRONTS, INSTRUCTIONS, PRODUCTS = map(
    attrgetter, ("sectors", "wavefronts", "instructions", "macs")
)  # fmt: skip


def multiplications(x: Count) -> int:
    """Return the number of tensor-core instructions: wmma's m16n16k16 is two."""
    return x.instructions * (1 + x.instruction.startswith("wmma")) if x.macs else 0


def nbytes(x: Count) -> int:
    """Return the bytes of all sectors."""
    return x.sectors * SECTOR_BYTES


def arriving(x: Count) -> int:
    """Return the bytes that are written to shared memory, in full wavefronts."""
    return x.wavefronts * WAVEFRONT_BYTES


class Counter(NamedTuple):
    """A number of the simulator's, summed over the instructions whose names match, and the metrics that equal it."""

    name: str
    instructions: str
    number: Callable[[Count], int]
    metrics: tuple[str, ...]


COUNTERS = (
    Counter("sectors, loads", "load_global|cp_async|wmma_load.*global", SECTORS, (f"{GLOBAL}ld.sum",)),
    Counter("sectors, stores", "store_global|wmma_store.*global", SECTORS, (f"{GLOBAL}st.sum",)),
    Counter("sectors, LDGSTS cached", "cp_async_[48]", SECTORS,
            (f"{GLOBAL}ldgsts_cache_access.sum", f"{SASS_GLOBAL}ldgsts_cache_access.sum")),
    Counter("sectors, LDGSTS bypassing", "cp_async_16", SECTORS, (f"{SASS_GLOBAL}ldgsts_cache_bypass.sum",)),
    Counter("sectors, all of these", "(load|store)_global|cp_async|wmma.*global", SECTORS,
            ("memory_l2_theoretical_sectors_global",)),
    Counter("bytes, TMA loads", "tma_load", arriving, (f"{FROM_L2}ld.sum",)),
    Counter("bytes, TMA stores", "tma_store", nbytes, (f"{TO_L2}st.sum",)),
    Counter("wavefronts, LDS + LDSM", "load_(shared|matrix)|wmma_load.*shared", WAVEFRONTS, (f"{SHARED}ld.sum",)),
    Counter("wavefronts, LDS", "load_shared", WAVEFRONTS, (f"{SASS_SHARED}ld.sum",)),
    Counter("wavefronts, LDSM", "load_matrix|wmma_load.*shared", WAVEFRONTS, (f"{SASS_SHARED}ldsm.sum",)),
    Counter("wavefronts, STS + STSM", "store_(shared|matrix)|wmma_store.*shared", WAVEFRONTS, (f"{SHARED}st.sum",)),
    Counter("wavefronts, STS", "store_shared|wmma_store.*shared", WAVEFRONTS, (f"{SASS_SHARED}st.sum",)),
    Counter("wavefronts, LDGSTS", "cp_async", WAVEFRONTS, (f"{SASS_SHARED}ldgsts.sum",)),
    Counter("wavefronts, all", "(load|store)_(shared|matrix)|cp_async|wmma.*shared|wgmma", WAVEFRONTS,
            ("memory_l1_wavefronts_shared",)),
    Counter("HMMA", "w?mma_.*(bf16|tf32)", multiplications, (f"{OPCODES} HMMA",)),
    Counter("HGMMA", "wgmma", multiplications, (f"{TENSOR}gmma.sum", f"{OPCODES} HGMMA")),
    Counter("IMMA", "mma_.*s8", multiplications, (f"{TENSOR}imma.sum", f"{OPCODES} IMMA")),
    Counter("FFMA", "fused", INSTRUCTIONS, (f"{OPCODES} FFMA",)),
    Counter("FFMA of threads", "fused", PRODUCTS, ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",)),
    Counter("IDP", "dot_product", INSTRUCTIONS, (f"{OPCODES} IDP",)),
)  # fmt: skip
PROBED = [m for x in COUNTERS if x.number in (WAVEFRONTS, SECTORS) for m in x.metrics]
METRICS = [*dict.fromkeys(m.split()[0] for x in COUNTERS for m in x.metrics), MAX_WARPS,
           *(LIMIT + name for name in ("blocks", "registers", "shared_mem", "warps"))]  # fmt: skip
INSTRUMENTED = [m for m in METRICS if m.startswith(("smsp__sass_", "memory_", "sass__"))]
HARDWARE = [m for m in METRICS if m not in INSTRUMENTED]


class Reason(NamedTuple):
    """Why the rows of some cases and counters, or metrics, differ."""

    cases: str
    rows: str
    why: str


REASONS = (
    Reason("(block|thread)_tile fp32", "wavefronts, (LDS|all)",
           "ptxas joins loads of neighbors to LDS.128; the simulator counts the program as it is written"),
    Reason("(block_tile|vectorized|mma_naive|tma|cooperative) ", f"{SHARED}st.sum",
           "hardware also counts conflicts with data that return to the L1; memory_l1_wavefronts_shared agrees"),
    Reason("(wmma bf16|copy_16)", "sectors, (LDGSTS|all)",
           "instrumented code counts pairs of a sector that is read and one of shared memory that is filled; the "
           "hardware, and the simulator, those that are filled, line by line of global memory"),
    Reason("(wmma bf16|copy_16)", "wavefronts, (LDGSTS|all)",
           "halves of a sector go to two of shared memory; no kernel but wmma has that"),
    Reason("copy_4", "wavefronts, (LDGSTS|all)",
           "not known: copies of 4 bytes from 4 lines, some to one place or bank; no kernel has that"),
    Reason("load_16: pairs(, then| but)", "smsp__sass|memory_l1",
           "instrumented code looks for equal neighbors in each half of a warp; the hardware, in the whole"),
)  # fmt: skip
TOLERANCE = 0.02
"""Relative tolerance of wavefronts. All else is equal, except for a percentage of an SM's warps, which ncu rounds."""


def counts(lines: Iterable[Count]) -> dict[str, int]:
    """Return a kernel's counts, by the names of COUNTERS."""
    lines = [*lines]
    return {x.name: sum(x.number(c) for c in lines if re.match(x.instructions, c.instruction)) for x in COUNTERS}


def differ(row: Mapping[str, Any]) -> bool:
    """Return whether a row's numbers differ by more than they may."""
    tolerance = TOLERANCE if row["counter"].startswith("wavefronts") else 0
    return bool(abs(row["ncu"] - row["simulator"]) > tolerance * row["simulator"])


def reason(case: str, row: Mapping[str, Any]) -> str:
    """Return why a row differs; "" if that is not known."""
    compared_counters = [x.why for x in REASONS if re.match(x.cases, case) and (
        re.match(x.rows, row["counter"]) or re.match(x.rows, row["metric"]))]  # fmt: skip
    return "".join(compared_counters[:1])


def compared(own: Mapping[str, Any], seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows of the simulator's and ncu's numbers where they are not both zero, and why they differ, if so.

    `own` has "case", "counts", and "ctas" and "warps" per SM. `seen` has ncu's numbers by metric, and "driver", the
    driver's CTAs per SM.
    """
    metrics = [(x.name, m) for x in COUNTERS for m in x.metrics if m.split()[0] in seen]
    compared_counters = [
        (name, own["counts"][name], m, seen.get(m, 0)) for name, m in metrics
    ]  # 0: no such opcode was executed
    if "driver" in seen:
        compared_counters.append(("CTAs an SM", own["ctas"], "driver", seen["driver"]))
    if MAX_WARPS in seen:
        limit = min(x for name, x in seen.items() if name.startswith(LIMIT))
        compared_counters.append(("CTAs an SM", own["ctas"], LIMIT, limit))
        compared_counters.append(("warps an SM", own["warps"], MAX_WARPS, seen[MAX_WARPS] * WARPS / 100))
    rows = [
        dict(zip(("counter", "simulator", "metric", "ncu"), x, strict=True)) for x in compared_counters if x[1] or x[3]
    ]
    return [x | {"why": reason(own["case"], x)} if differ(x) else x for x in rows]
