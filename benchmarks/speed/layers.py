"""The three GEMMs of a training step, for layers that nothing is tuned for or fitted to, against torch and cuBLASLt.

A layer with M tokens, N outputs and K inputs has the forward GEMM (M x N x K, nt), the input's gradient (M x K x N, nn)
and the weight's (N x K x M, tn), all in bf16. The letters say whether A, and B, is row-major (n) or column-major (t).
With --layouts, square and oblong shapes in bf16 and fp16, in all four layouts. Timed as in contest.py.

    python -m benchmarks.speed.layers --json benchmarks/results/layers-h100.json.xz --seconds 240 [--resume]
    python -m benchmarks.speed.layers --layouts --json benchmarks/results/layouts-h100.json.xz --seconds 500 [--resume]
"""

from __future__ import annotations

from benchmarks import contest
from benchmarks.speed.kinds import ALL_LAYOUTS, Job, job_of, measure, name, planned, told
from benchmarks.suite import OBLONG, SQUARES, TRAINED, Shape, roles

ROLES = {"nt": "forward", "nn": "input gradient", "tn": "weight gradient"}
"""GEMMs of a training step by layout."""


def products(layers: list[Shape]) -> list[Job]:
    """Return each layer's three GEMMs."""
    return [Job("bf16", layout, 1, *shape) for layer in layers for layout, shape in roles(layer).items()]


def layouts(shapes: list[Shape]) -> list[Job]:
    """Return each shape's eight GEMMs."""
    return [Job(kind, layout, 1, *shape) for shape in shapes for kind in ("bf16", "fp16") for layout in ALL_LAYOUTS]


def main() -> None:
    parser = contest.parser_for(__doc__)
    parser.add_argument("--layouts", action="store_true", help="squares and oblong shapes in all layouts")
    arguments = parser.parse_args()
    given, pace = [(m, n, k) for m, n, k in contest.shapes_of(arguments)], contest.pace_of(arguments)
    jobs = layouts(given or SQUARES + OBLONG) if arguments.layouts else products(given or TRAINED)

    def row(job: Job) -> contest.Row:
        role = {} if arguments.layouts else {"role": ROLES[job.layout]}
        return measure(job, pace) | role

    def group(row: contest.Row) -> str:
        return f"{row['kind']} {row['layout']}" + ("" if arguments.layouts else f" {ROLES[row['layout']]}")

    rows = contest.measured(
        arguments, jobs, job_of, lambda left: contest.built([planned(job) for job in left], arguments.dry), row, told
    )
    contest.write_down(arguments.json, rows, contest.summary(rows, group, name))


if __name__ == "__main__":
    main()
