"""Nsight Compute's output as the ladder's counters are parsed from it, against the simulator's. ncu needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ladder import counters as ladder_counters
from benchmarks.ladder import nsight
from benchmarks.ladder.metrics import COUNTERS, METRICS, OPCODES, REASONS, compared, differ, reason
from benchmarks.ladder.shared import Probe, probes
from benchmarks.rows import load
from gemmsmith.backends.cuda.listing import build_listing
from gemmsmith.ladder.rungs import RUNG_CASES

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
    """ncu's numbers and the simulator's; an opcode without a number is 0; what is 0 on both sides is left out."""
    own = {
        "case": "x",
        "counts": dict.fromkeys((x.name for x in COUNTERS), 0) | {"FFMA": 8, "IDP": 4},
        "ctas": 2,
        "warps": 16,
    }
    limits = {f"launch__occupancy_limit_{name}": n for name, n in (("blocks", 32), ("registers", 2), ("warps", 8))}
    seen = {OPCODES: 9, f"{OPCODES} FFMA": 8, "driver": 2, "sm__maximum_warps_per_active_cycle_pct": 25.0} | limits
    rows = [tuple(x.values()) for x in compared(own, seen)]
    assert rows == [("FFMA", 8, f"{OPCODES} FFMA", 8), ("IDP", 4, f"{OPCODES} IDP", 0, ""),
                    ("CTAs an SM", 2, "driver", 2),
                    ("CTAs an SM", 2, "launch__occupancy_limit_", 2),
                    ("warps an SM", 16, "sm__maximum_warps_per_active_cycle_pct", 16.0)]  # fmt: skip


def test_simulated() -> None:
    """A kernel of the ladder, of which every CTA does the same, and a probe."""
    (naive,) = [x for x in RUNG_CASES if x.name == "naive"]
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
    """If ncu names no metric, the run ends."""
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


@pytest.fixture(scope="module")
def stored() -> list[dict[str, Any]]:
    """What was measured on an H200, and counted."""
    return list(load("ladder-counters-h200")["rows"])


def test_stored_rows_agree(stored: list[dict[str, Any]]) -> None:
    """Wavefronts within 2 %, all else equal, except for REASONS, each of which is needed."""
    rows = [(row["case"], x) for row in stored for x in row["compared"]]
    assert len(rows) > 400
    off = [(case, x) for case, x in rows if differ(x)]
    assert [(case, x) for case, x in off if not reason(case, x)] == []
    assert {reason(case, x) for case, x in off} == {x.why for x in REASONS}
    assert [row["compared"] for row in stored] == [compared(row, row["metrics"]) for row in stored]


def test_probes_are_counted_as_stored(stored: list[dict[str, Any]]) -> None:
    """By the simulator as it is now; a rung is in `test_simulated`."""
    now = [ladder_counters.simulated(probe) for probe in probes()]
    assert ladder_counters.read(stored, "probes", now) == [
        {name: x for name, x in row.items() if name != "compared"} for row in stored if row["part"] == "probes"
    ]
    assert len(now) == 71


@pytest.mark.parametrize(("name", "joined"), [("block_tile", 8), ("thread_tile", 32)])
def test_ptxas_joins_loads(name: str, joined: int) -> None:
    """Loads of 4 bytes become LDS.128, as ncu's counts have it."""
    (step,) = [x for x in RUNG_CASES if x.name == name]
    kernel = step.launches(*step.arrays((128, 128, 128), (128, 128, 128)))[0].all[0].kernel
    assert "ld.shared.b32" in kernel.source
    assert "ld.shared.v" not in kernel.source
    assert sum(line.text.startswith("LDS.128") for line in build_listing(kernel, "sass").instructions) == joined
