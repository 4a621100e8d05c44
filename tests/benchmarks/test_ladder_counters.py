"""Nsight Compute's output as the ladder's counters are read from it, and beside the simulator's. ncu needs a GPU."""

from __future__ import annotations

import ladder_counters
import nsight
import pytest
from ladder_metrics import COUNTERS, METRICS, OPCODES, compared
from probe_shared import Probe

from gemmsmith.ladder import STEPS

SAID = """==PROF== Connected to process 7
naive: 8 CTAs an SM
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","naive(unsigned long)","Command line profiler metrics","sm__sass_l1tex_x.sum","","1,024"
"0","7","naive(unsigned long)","Command line profiler metrics","sass__inst_executed_per_opcode","inst","9,216 (FFMA: 8,192; IDP.x: 1,024)"
"0","7","naive(unsigned long)","Command line profiler metrics","memory_l1_wavefronts_shared","","5 (0x7FA3: 5)"
"0","7","naive(unsigned long)","Command line profiler metrics","absent.sum","","n/a"
"1","7","pingpong","Command line profiler metrics","sm__maximum_warps_per_active_cycle_pct","%","12.50"
"""  # noqa: E501


def test_what_ncu_prints() -> None:
    """Launches in order; numbers of any form; instances whose names are words; what is no number is left out."""
    naive, pingpong = nsight.parsed(SAID)
    assert naive == {"kernel": "naive", "smsp__sass_l1tex_x.sum": 1024, OPCODES: 9216, f"{OPCODES} FFMA": 8192,
                     f"{OPCODES} IDP.x": 1024, "memory_l1_wavefronts_shared": 5}  # fmt: skip
    assert pingpong == {"kernel": "pingpong", "sm__maximum_warps_per_active_cycle_pct": 12.5}


def test_rows() -> None:
    """What ncu has, beside the simulator's; an opcode without a number is 0; what is 0 on both sides is left out."""
    own = {"counts": dict.fromkeys((x.name for x in COUNTERS), 0) | {"FFMA": 8, "IDP": 4}, "ctas": 2, "warps": 16}
    limits = {f"launch__occupancy_limit_{name}": n for name, n in (("blocks", 32), ("registers", 2), ("warps", 8))}
    seen = {OPCODES: 9, f"{OPCODES} FFMA": 8, "driver": 2, "sm__maximum_warps_per_active_cycle_pct": 25.0} | limits
    rows = [tuple(x.values()) for x in compared(own, seen)]
    assert rows == [("FFMA", 8, f"{OPCODES} FFMA", 8), ("IDP", 4, f"{OPCODES} IDP", 0), ("CTAs an SM", 2, "driver", 2),
                    ("CTAs an SM", 2, "launch__occupancy_limit_", 2),
                    ("warps an SM", 16, "sm__maximum_warps_per_active_cycle_pct", 16.0)]  # fmt: skip


def test_simulated() -> None:
    """A rung, of which every CTA does the same, and a probe."""
    (naive,) = [x for x in STEPS if x.name == "naive"]
    counts = ladder_counters.simulated(naive)["counts"]
    flops = 512**3
    assert (counts["FFMA of threads"], counts["FFMA"], counts["sectors, stores"]) == (
        flops,
        flops // 32,
        512 * 512 // 8,
    )
    assert ladder_counters.simulated(Probe("load_16", "by 4 (B of sgemm)"))["counts"]["wavefronts, LDS"] == 4
    assert all(m.startswith(nsight.UNLISTED) or m.endswith(".sum") for m in METRICS)


@pytest.mark.parametrize("complaint", ["==ERROR== Failed to find metric b__y.sum", "==ERROR== no GPU"])
def test_what_ncu_complains_of_is_left_out(complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it complains of no metric, the run ends."""
    asked = []

    class Done:
        stderr = ""

        def __init__(self, command: list[str], **_: object) -> None:
            asked.append(command[command.index("--metrics") + 1])
            self.stdout = SAID if "b__y" not in asked[-1] else complaint

    monkeypatch.setattr(nsight.subprocess, "run", Done)
    if "b__y" in complaint:
        assert nsight.profiled(["program.py"], "naive", ["a__x.sum", "b__y.sum"]) == SAID
        assert asked == ["a__x.sum,b__y.sum", "a__x.sum"]
    else:
        with pytest.raises(SystemExit, match="no metrics"):
            nsight.profiled(["program.py"], "naive", ["b__y.sum"])
