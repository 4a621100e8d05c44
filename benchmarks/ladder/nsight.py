"""Nsight Compute (`ncu`): runs programs and returns the metrics of each kernel that they launch."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

UNLISTED = ("launch__", "memory_", "sass__", "sm__maximum")
"""Prefixes of metrics that ncu supports but does not list (Kernel Profiling Guide, "Metrics Reference")."""
INSTANCES = 1 << 28
"""Characters that a field may have: a metric's values for all instructions are in one field."""


def known(metrics: Iterable[str], chip: str = "gh100") -> list[str]:
    """Return the metrics that this ncu has for a chip.

    Those from instrumented code are by SM, if not by its quarter (smsp).
    """
    asked = subprocess.run(["ncu", "--query-metrics", "--chips", chip], capture_output=True, text=True)
    names = set(re.findall(r'^"?(\w+)', asked.stdout, re.MULTILINE))
    launches = []
    for metric in metrics:
        others = [metric, metric.replace("smsp__sass_", "sm__sass_")]
        has = [m for m in others if m.startswith(UNLISTED) or m.partition(".")[0] in names]
        launches += has[:1]
        if not has:
            print(f"left out, for this ncu has it not: {metric}", flush=True)
    return launches


def profiled(program: Sequence[str], kernels: str, metrics: Sequence[str]) -> str:
    """Return what ncu, and a Python program given as the arguments of `python`, print.

    `kernels` is a regular expression of the kernels to profile. Metrics that ncu rejects are left out. Raises
    SystemExit if it reports none.
    """
    while metrics:
        command = ["ncu", "--csv", "--print-units", "base", "--print-metric-instances", "details",
                   "--clock-control", "none", "-k", f"regex:{kernels}", "--metrics", ",".join(metrics),
                   sys.executable, *program]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if '"Metric Value"' in done.stdout:
            return done.stdout
        print(said := done.stdout + done.stderr, flush=True)
        errors = "\n".join(line for line in said.splitlines() if line.startswith("==ERROR=="))
        wrong = [m for m in metrics if re.search(rf"\b{m.partition('.')[0]}\b", errors)]
        metrics = [m for m in metrics if m not in wrong] if wrong else []
    raise SystemExit("ncu: no metrics")


def parsed(said: str) -> list[dict[str, Any]]:
    """Return the launches in order: `kernel`, its name, and values by metric.

    Metrics with instances are also listed by metric and instance, as in "sass__inst_executed_per_opcode FFMA".
    """
    csv.field_size_limit(INSTANCES)
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(line for line in said.splitlines() if line.startswith('"')):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
        name = row["Metric Name"].replace("sm__sass_", "smsp__sass_")
        value, _, instances = row["Metric Value"].replace(",", "").partition(" (")
        if re.fullmatch(r"\d+(\.\d+)?", value):
            launch[name] = float(value)
        launch |= {f"{name} {word}": float(n) for word, n in re.findall(r"(?<![\w.])([A-Z][\w.]*): (\d+)", instances)}
    return list(launches.values())
