"""Loops of one instruction: what they multiply in the simulator, and that ptxas leaves nothing else in them."""

from __future__ import annotations

import re

import pytest
from tests.conformance.case import poisoned

from benchmarks.ladder.peak_throughput import MICROBENCHMARKS, THREADS, LoopLaunch, microbenchmark
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.listing import disassemble
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.core.chip import CHIPS, HOPPER
from gemmsmith.lang.launch import Launch

MULTIPLY = {"fma": ("FFMA", 64), "dp4a": ("IDP", 64), "mma_bf16": ("HMMA", 8), "mma_tf32": ("HMMA", 8),
            "mma_int8": ("IMMA", 8), "wgmma_bf16": ("HGMMA", 4)}  # fmt: skip


@pytest.mark.parametrize("name", MICROBENCHMARKS)
def test_a_loop(name: str) -> None:
    launch, memory, counters = (
        Launch.from_kernel(microbenchmark(name, HOPPER), LoopLaunch(3, 2)),
        GlobalMemory(),
        Counters(),
    )
    out = poisoned((2 * THREADS,), "uint32")
    before = out.copy()
    arguments = launch.resolve({"out": memory.add_buffer(out, "out")})
    assert simulate(launch.kernel, launch.work_clusters, arguments, memory, counters=counters).hazards == []
    assert (out != before).all()
    products = sum(x.macs for x in counters.lines(launch.kernel))
    assert products == 3 * 2 * THREADS * MICROBENCHMARKS[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", MICROBENCHMARKS)
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_compiled(name: str, chip: str) -> None:
    if name == "wgmma_bf16" and chip == "sm_80":
        pytest.skip("wgmma is Hopper's")
    kernel = microbenchmark(name, CHIPS[chip])
    compiled = compile_source(kernel.source, kernel.name, kernel.chip.target)
    r = compiled.resources
    assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
    opcode, count = MULTIPLY[name]
    found = len(re.findall(rf"\b{opcode}\.?[\w.]* ", disassemble(compiled.cubin)))
    assert found in (count, 7 * count)  # in a loop that ptxas unrolls by 4, what is left of it by 2 and by 1
