"""Which of Nsight Compute's metrics equals which of the simulator's counters, for ladder_counters.py.

The hardware counts for l1tex__, and for smsp__sass_, memory_ and sass__ ncu instruments the kernel (Kernel Profiling
Guide, "Metrics Guide"). LDGSTS is cp.async: 16 bytes bypass the L1, fewer are cached there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from gemmsmith.backends.sim.counters import SECTOR, Count

GLOBAL, SHARED = "l1tex__t_sectors_pipe_lsu_mem_global_op_", "l1tex__data_pipe_lsu_wavefronts_mem_shared"
SASS_GLOBAL, SASS_SHARED = (x.replace("l1tex__", "smsp__sass_l1tex_") for x in (GLOBAL, SHARED))
FROM_L2, TO_L2 = (f"l1tex__m_{x}_bytes_mem_global_op_tma_" for x in ("xbar2l1tex_read", "l1tex2xbar_write"))
TENSOR, OPCODES = "sm__inst_executed_pipe_tensor_op_", "sass__inst_executed_per_opcode"
LIMIT, MOST_WARPS = "launch__occupancy_limit_", "sm__maximum_warps_per_active_cycle_pct"
WARPS = 64
"""That an SM holds at most."""
SECTORS, WAVEFRONTS, INSTRUCTIONS, PRODUCTS = map(
    attrgetter, ("sectors", "wavefronts", "instructions", "products")
)  # fmt: skip


def multiplications(x: Count) -> int:
    """Instructions of tensor cores: wmma's m16n16k16 is two."""
    return x.instructions * (1 + x.instruction.startswith("wmma")) if x.products else 0


def nbytes(x: Count) -> int:
    """Of all sectors."""
    return x.sectors * SECTOR


class Counter(NamedTuple):
    """A number of the simulator's, summed over the instructions whose names match, and the metrics that equal it."""

    name: str
    instructions: str
    number: Callable[[Count], int]
    metrics: tuple[str, ...]


COUNTERS = (
    Counter("sectors, loads", "load_global|wmma_load.*global", SECTORS, (f"{GLOBAL}ld.sum",)),
    Counter("sectors, stores", "store_global|wmma_store.*global", SECTORS, (f"{GLOBAL}st.sum",)),
    Counter("sectors, LDGSTS cached", "cp_async_[48]", SECTORS,
            (f"{GLOBAL}ldgsts_cache_access.sum", f"{SASS_GLOBAL}ldgsts_cache_access.sum")),
    Counter("sectors, LDGSTS bypassing", "cp_async_16", SECTORS,
            (f"{GLOBAL}ldgsts_cache_bypass.sum", f"{SASS_GLOBAL}ldgsts_cache_bypass.sum")),
    Counter("sectors, all of these", "(load|store)_global|cp_async|wmma.*global", SECTORS,
            ("memory_l2_theoretical_sectors_global",)),
    Counter("bytes, TMA loads", "tma_load", nbytes, (f"{FROM_L2}ld.sum",)),
    Counter("bytes, TMA stores", "tma_store", nbytes, (f"{TO_L2}st.sum",)),
    Counter("wavefronts, LDS + LDSM", "load_(shared|matrix)|wmma_load.*shared", WAVEFRONTS, (f"{SHARED}_op_ld.sum",)),
    Counter("wavefronts, LDS", "load_shared", WAVEFRONTS, (f"{SASS_SHARED}_op_ld.sum",)),
    Counter("wavefronts, LDSM", "load_matrix|wmma_load.*shared", WAVEFRONTS, (f"{SASS_SHARED}_op_ldsm.sum",)),
    Counter("wavefronts, STS", "store_(shared|matrix)|wmma_store.*shared", WAVEFRONTS,
            (f"{SHARED}_op_st.sum", f"{SASS_SHARED}_op_st.sum")),
    Counter("wavefronts, LDGSTS", "cp_async", WAVEFRONTS,
            (f"{SHARED}_op_ldgsts.sum", f"{SASS_SHARED}_op_ldgsts.sum")),
    Counter("wavefronts, all of these", "(load|store)_(shared|matrix)|cp_async|wmma.*shared", WAVEFRONTS,
            (f"{SHARED}.sum", f"{SASS_SHARED}.sum", "memory_l1_wavefronts_shared")),
    Counter("HMMA and HGMMA", "w?g?mma_.*(bf16|tf32)", multiplications, (f"{TENSOR}hmma.sum",)),
    Counter("HMMA", "w?mma_.*(bf16|tf32)", multiplications, (f"{OPCODES} HMMA",)),
    Counter("HGMMA", "wgmma", multiplications, (f"{TENSOR}gmma.sum", f"{OPCODES} HGMMA")),
    Counter("IMMA", "mma_.*s8", multiplications, (f"{TENSOR}imma.sum", f"{OPCODES} IMMA")),
    Counter("FFMA", "fused", INSTRUCTIONS, (f"{OPCODES} FFMA",)),
    Counter("FFMA of threads", "fused", PRODUCTS, ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",)),
    Counter("IDP", "dot_product", INSTRUCTIONS, (f"{OPCODES} IDP",)),
)  # fmt: skip
WAVEFRONT_METRICS = [m for x in COUNTERS if x.number is WAVEFRONTS for m in x.metrics]
METRICS = [*dict.fromkeys(m.split()[0] for x in COUNTERS for m in x.metrics), MOST_WARPS,
           *(LIMIT + name for name in ("blocks", "registers", "shared_mem", "warps"))]  # fmt: skip
INSTRUMENTED = [m for m in METRICS if m.startswith(("smsp__sass_", "memory_", "sass__"))]
HARDWARE = [m for m in METRICS if m not in INSTRUMENTED]


def counts(lines: Iterable[Count]) -> dict[str, int]:
    """A kernel's, by the names of COUNTERS."""
    lines = [*lines]
    return {x.name: sum(x.number(c) for c in lines if re.match(x.instructions, c.instruction)) for x in COUNTERS}


def compared(own: Mapping[str, Any], seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The simulator's numbers beside ncu's, where not both are zero. `own`: "counts", and "ctas" and "warps" that an SM
    holds. `seen`: by metric, also "driver", CTAs an SM."""
    metrics = [(x.name, m) for x in COUNTERS for m in x.metrics if m.split()[0] in seen]
    rows = [(name, own["counts"][name], m, seen.get(m, 0)) for name, m in metrics]  # 0: no such opcode was executed
    if "driver" in seen:
        rows.append(("CTAs an SM", own["ctas"], "driver", seen["driver"]))
    if MOST_WARPS in seen:
        rows.append(("CTAs an SM", own["ctas"], LIMIT, min(x for name, x in seen.items() if name.startswith(LIMIT))))
        rows.append(("warps an SM", own["warps"], MOST_WARPS, seen[MOST_WARPS] * WARPS / 100))
    return [dict(zip(("counter", "simulator", "metric", "ncu"), x, strict=True)) for x in rows if x[1] or x[3]]
