"""Measure configs for the layers of public models, and enter the fastest into the table that the package ships.

Of each layer and number of rows the model's best 16 configs are measured as `autotune` does, a row for each: the
fastest, and the one that is chosen without the table. --compile only fills the cubin cache, which needs no GPU.

    python -m benchmarks.fit.public_models --compile
    python -m benchmarks.fit.public_models --json benchmarks/results/public-models-h200.json --resume --seconds 500
    python -m benchmarks.fit.public_models --enter benchmarks/results/public-models-h200.json
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from benchmarks import portions
from benchmarks.models import PUBLIC_LAYERS
from benchmarks.rows import Row, read, write_builtin_table
from benchmarks.suite import specs
from benchmarks.timing import options, save
from gemmsmith.backends.cuda import kernel_loader
from gemmsmith.binding.bind import bind
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.request import Request
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import BF16
from gemmsmith.host.autotune import ROUNDS, winner
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.tuning.choice import candidates
from gemmsmith.tuning.choose import choose, sustained_us
from gemmsmith.tuning.gpus import H200
from gemmsmith.tuning.search import compile_all, measure, random_sets
from gemmsmith.tuning.tuned_table import builtin_rows

Job = tuple[int, int, int]
ROWS = (256, 128, 512, 64, 1024, 4096)
"""Numbers of tokens; first those at which the model errs most."""
MOST_N = 65536
"""Wider layers are output layers, of which only the last token of each sequence is computed: few rows."""
CONFIGS = 16
TABLE = Path("src/gemmsmith/tuning/tuned.json")


def jobs() -> list[Job]:
    """Return (M, N, K) of the layers."""
    return [(m, n, k) for m in ROWS for n, k in PUBLIC_LAYERS if m <= 256 or n < MOST_N]


def contenders(job: Job) -> tuple[Request, Binding, list[Config]]:
    """Return a job's request, bound, and its configs, the model's choice first."""
    a, b = specs(job)
    request = Request(a, b)
    binding = bind(request)
    return request, binding, candidates(binding, HOPPER, H200, choose(binding.problem), CONFIGS, any_order=True)


def compile_kernels(some: list[Job]) -> None:
    """Compile the kernels of the jobs into the cubin cache."""
    plans = (PlannedGemm(request._replace(config=c)) for request, _, cs in map(contenders, some) for c in cs)
    kernels = {(p.kernel.source, p.kernel.name) for p in plans}
    print(f"{len(kernels)} kernels of {len(some)} GEMMs", flush=True)
    compile_all(kernels)


def measured(job: Job) -> Row:
    """Return a job's row."""
    request, binding, configs = contenders(job)
    make_sets = partial(random_sets, request.a, request.b, BF16)
    with kernel_loader.device_guard(0):
        ranking = measure(request, configs, PlannedGemm, make_sets, ROUNDS, kept=configs[0])
    best, untuned_us = winner(ranking, configs[0], partial(sustained_us, binding.problem, binding.spec))
    sizes = dict(zip("mnk", job, strict=True))
    return {**sizes, "config": str(best.config), "us": round(best.us, 2), "untuned": str(configs[0]),
            "untuned_us": round(untuned_us, 2)}  # fmt: skip


def enter(file: Path) -> None:
    """Enter the rows into the table; a GEMM that it has keeps its config."""
    rows = builtin_rows()
    known = {(r["m"], r["n"], r["k"]) for r in rows}
    new = [r for r in read(file)["rows"] if (r["m"], r["n"], r["k"]) not in known]
    write_builtin_table(TABLE, json.loads(TABLE.read_text())["machine"], [*rows, *new])


def main() -> None:
    parser = options(__doc__)
    portions.add_options(parser)
    parser.add_argument("--compile", action="store_true", help="compile the kernels, and measure nothing")
    parser.add_argument("--enter", type=Path, help="measured rows, which are entered into the table")
    arguments = parser.parse_args()
    if arguments.enter:
        return enter(arguments.enter)
    rows = portions.load_rows(arguments)
    left = portions.missing(jobs(), rows, lambda r: (r["m"], r["n"], r["k"]), arguments.part)
    if arguments.compile:
        return compile_kernels(left)
    for i, job in enumerate(portions.in_time(left, arguments.seconds)):
        rows.append(measured(job))
        if i % 20 == 19:
            save(arguments.json, rows)
    save(arguments.json, rows)
    gain = sum(r["untuned_us"] for r in rows) / sum(r["us"] for r in rows)
    print(f"{len(rows)} GEMMs, together {gain:.3f} of the model's speed")


if __name__ == "__main__":
    main()
