"""The simulator's counters against Nsight Compute's, for every kernel of the ladder and for single accesses to shared
memory (shared.py).

Nsight Compute (`ncu`) runs this file again, which launches each kernel once; ladder_metrics.py lists what is compared.

    python -m benchmarks.ladder.counters --json benchmarks/results/ladder-counters-h200.json.xz

On any machine, the measured counters against what the simulator counts now:

    python -m benchmarks.ladder.counters --read benchmarks/results/ladder-counters-h200.json.xz
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import rows as results
from benchmarks.ladder.metrics import HARDWARE, INSTRUMENTED, PROBED, compared, counts, differ
from benchmarks.ladder.nsight import known, parsed, profiled
from benchmarks.ladder.shared import Probe, probes
from gemmsmith.backends.cuda import kernel_loader
from gemmsmith.backends.cuda.driver import device_attributes
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.backends.cuda.run import BoundLaunches, pointer_values
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.backends.sim.run import run
from gemmsmith.cli.tables import KernelCounts
from gemmsmith.ladder.rungs import RUNG_CASES, RungCase, Sizes, simulate_rung

Case = RungCase | Probe
PARTS: dict[str, tuple[list[Case], list[str]]] = {
    "rungs": ([*RUNG_CASES], HARDWARE),
    "probes": ([*probes()], PROBED),
    "instrumented": ([*RUNG_CASES], INSTRUMENTED),
}
"""The kernels to launch, and their metrics."""
SIZES: Sizes = (512, 512, 512)
"""Multiples of all tiles, so that all CTAs do the same."""


def simulated(case: Case) -> dict[str, Any]:
    """Return what the simulator counts. Leaves the kernel in the cubin cache."""
    if isinstance(case, RungCase):
        title, (kernel, lines) = f"{case.name} {case.dtype}", simulate_rung(case, SIZES)
    else:
        counters, arrays = Counters(), case.arrays()
        run(*case.launches(*arrays), 0, None, counters)
        (kernel,) = counters.kernels
        title, lines = f"{case.access}: {case.pattern}", counters.lines(kernel)
    o = KernelCounts.from_kernel(kernel, lines).occupancy
    return {
        "case": title,
        "kernel": kernel.name,
        "ctas": o.ctas_per_sm,
        "warps": o.warps_per_sm,
        "counts": counts(lines),
    }


def launch(part: str) -> None:
    """Runs each kernel once, and prints how many of its CTAs an SM holds, as the driver says."""
    with kernel_loader.device_guard(0):
        for case in PARTS[part][0]:
            arrays = case.arrays(SIZES, SIZES) if isinstance(case, RungCase) else case.arrays()
            on_gpu = [DeviceArray.from_numpy(x) for x in arrays]
            launches, arguments = case.launches(*on_gpu)
            call = BoundLaunches(launches, arguments, on_gpu[0], {})
            call.launch(pointer_values(arguments), on_gpu[0], None)
            on_gpu[-1].numpy()  # it has ended
            kernel = call.launches[0].kernel
            if kernel.cluster == (1, 1, 1):
                print(f"{kernel.name}: {kernel.max_active_clusters() // device_attributes(0).sm_count} CTAs an SM")


def measured(part: str, simulation: list[dict[str, Any]], raw: Path | None) -> list[dict[str, Any]]:
    """Return what the simulator counts, with ncu's metrics."""
    kernels = dict.fromkeys(x["kernel"] for x in simulation)
    said = profiled(["-m", __spec__.name, "--profiled", part], f"^({'|'.join(kernels)})$", known(PARTS[part][1]))
    if raw:
        raw.with_suffix(f".{part}.csv").write_text(said)
    ctas = {name: int(n) for name, n in re.findall(r"(?m)^(\w+): (\d+) CTAs an SM$", said)}
    measured_rows, rows = parsed(said), []
    for kernel in kernels:
        launched, seen = ([x for x in launches if x["kernel"] == kernel] for launches in (simulation, measured_rows))
        if len(launched) != len(seen):
            print(f"left out: {kernel}, launched {len(launched)} times; ncu tells of {len(seen)}", flush=True)
            continue
        for own, metrics in zip(launched, seen, strict=True):
            if kernel in ctas:
                metrics["driver"] = ctas[kernel]
            rows.append({"part": part, **own, "metrics": metrics})
    return rows


def read(rows: list[dict[str, Any]], part: str, simulation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an earlier run's rows with today's simulator counters, except for kernels that have changed."""
    now = {x["case"]: x for x in simulation}
    same = [x for x in rows if x["part"] == part and x["kernel"] == now[x["case"]]["kernel"]]
    return [{"part": part, **now[x["case"]], "metrics": x["metrics"]} for x in same]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints what is compared, and at the end what differs."""
    off: list[str] = []
    for row in rows:
        for x in row["compared"]:
            ratio = x["ncu"] / x["simulator"] if x["simulator"] else float("inf")
            line = (f"{row['case']:<40}{x['counter']:<26}{x['simulator']:>12}{x['ncu']:>12.0f}{ratio:9.4f}  "
                    f"{x['metric']}")  # fmt: skip
            print(line, flush=True)
            off += [f"{line}: {x['why'] or 'unknown'}"] if differ(x) else []
    print(f"differing: {len(off)}", *off, sep="\n")


def main() -> None:
    if sys.argv[1:2] == ["--profiled"]:
        return launch(sys.argv[2])
    from benchmarks.timing import machine, options  # imports torch, which ncu's program does without

    parser = options(__doc__)
    parser.add_argument("--raw", type=Path, help="where what ncu prints goes: .rungs.csv and the like are appended")
    parser.add_argument("--read", type=Path, help="an earlier run's --json, whose metrics are taken: ncu does not run")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        simulations = {part: [*pool.map(simulated, PARTS[part][0])] for part in ("rungs", "probes")}
    earlier = results.read(arguments.read) if arguments.read else None
    result = {"machine": earlier["machine"] if earlier else machine(), "rows": []}
    for part in PARTS:
        simulation = simulations["probes" if part == "probes" else "rungs"]
        measured_rows = (
            read(earlier["rows"], part, simulation) if earlier else measured(part, simulation, arguments.raw)
        )
        result["rows"] += [{**x, "compared": compared(x, x["metrics"])} for x in measured_rows]
        if arguments.json:
            results.write(arguments.json, result)
    show(result["rows"])


if __name__ == "__main__":
    main()
