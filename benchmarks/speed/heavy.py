"""Heavy epilogues: the fused kernel's time against the plain GEMM's and against the epilogue's own lower bound.

`bare_us` is the plain GEMM's time, of the fastest of a few configs. `floor_us` is the largest of three times that the
epilogue needs whatever the GEMM does: of the bytes of its matrices at the copy speed of the chip, of its special
functions, and of the instructions of all its functions, both at the SMs' clock under this load. Conversions, loads and
stores are not counted. The bound that a fused kernel is to meet is the larger of 1.05 times the first and 1.1 times the
second; `of_bound` is the fused kernel's time over it.

The epilogues are those of fused.py with CASES' N, for two layouts and four K, and with --random so many random graphs
of 10 to 40 nodes, on shapes of their own. Timed as in contest.py, checked against float64. --dry prints what the model
expects, without a GPU too.

    python -m benchmarks.speed.heavy --random 30 --json benchmarks/results/heavy-h100.json.xz --seconds 500 [--resume]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import gemmsmith
from benchmarks import contest
from benchmarks.speed.fused import Case, Job, check_of, graph_of, job_of, planned
from benchmarks.speed.grouped import COPY_SPEED
from benchmarks.suite import SMALL, Shape
from gemmsmith import Config
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.graph.function_costs import Cost
from gemmsmith.graph.precision import epilogue_cost
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.config_table import NUM_SMS
from gemmsmith.tuning.costs import SM_CLOCK_MHZ, EpilogueCost
from gemmsmith.tuning.gpus import gpu_at
from gemmsmith.tuning.roofline import SCHEDULERS_PER_SM

M = 4096
DEPTHS = (1024, 2048, 4096, 8192)
LAYOUTS = ("nt", "nn")
CASES = {
    "bce": 16384, "cross_entropy": 32768, "dgelu": 16384, "dswiglu_without_hidden": 14336, "dswiglu": 14336,
    "softplus": 16384, "dropout_residual": 8192, "rms_statistics": 8192, "layer_norm_statistics": 8192,
    "swiglu_with_inputs": 28672,
}  # fmt: skip
"""N: classes, features of a layer's inside, or a hidden size."""
MANY_CLASSES = 65536
"""N of BCE where K is smallest, as in epilogues.py."""
RANDOM_SHAPES: list[Shape] = [(4608, 9344, 1152), (2816, 13056, 1664), (6400, 6784, 2688), (3840, 11648, 3392),
                              (5376, 7872, 5504)]  # fmt: skip
"""Shapes of random graphs, which occur nowhere else."""
FIRST = 4
"""The model's first configs of the plain GEMM, tried beside the chosen one."""
SELECTION = ((3, 0.02), (1, 0.06))
"""Rounds that select one of them: how many are left after one block each of this many seconds. Chosen; not measured."""
OVER_BARE, OVER_FLOOR, OVER_EITHER = 1.05, 1.10, 1.10
"""What a fused kernel may take over the plain GEMM and over the floor; over either, with a random graph."""
OVER_BARE_WITH_STORES = {"swiglu_with_inputs": 1.12}
"""The same over the plain GEMM, for what stores half as much again."""
SPECIAL_PER_CYCLE = 16
"""Special functions per cycle of an SM (CUDA C++ Programming Guide, "Arithmetic Instructions")."""
LEAST_REDUCTION_COSTS = {"logsumexp": Cost(4, 1)}
"""Per element: max, fma, exp2 and add; other reductions take one instruction."""
RARE_PATHS = {"sin": Cost(-86), "cos": Cost(-86)}
"""What the table's costs lose without the path for arguments beyond 1e5, counted in SASS."""


def kind_of(job: Job) -> str:
    return job.epilogue.partition(" ")[0]


def jobs(random_graphs: int = 0, shapes: Sequence[tuple[int, ...]] = ()) -> list[Job]:
    """Return the GEMMs of CASES, of these shapes or of their own, and of random graphs."""

    def shapes_of(name: str, k: int) -> Sequence[tuple[int, ...]]:
        return shapes or [(M, MANY_CLASSES if name == "bce" and k == DEPTHS[0] else CASES[name], k)]

    listed = [Job(name, layout, *shape) for k in DEPTHS for layout in LAYOUTS for name in CASES
              for shape in shapes_of(name, k)]  # fmt: skip
    listed += [Job(f"random {seed}", LAYOUTS[seed % len(LAYOUTS)], *RANDOM_SHAPES[seed % len(RANDOM_SHAPES)])
               for seed in range(random_graphs)]  # fmt: skip
    return list(dict.fromkeys(listed))


def bare_of(job: Job) -> Job:
    return job._replace(epilogue="bare")


def bare_configs(bare: Job) -> list[Config]:
    """Return the chosen config of a plain GEMM, and the model's first ones."""
    small = planned(bare, SMALL)._planned.binding
    first = rank_configs(small.problem, small.spec, FIRST, gpu=gpu_at(0))
    return list(dict.fromkeys([planned(bare).config, *first]))


def cost_of(spec: EpilogueSpec) -> Cost:
    """Return an epilogue's least cost per element: of its functions and its reductions."""
    cost, dims = epilogue_cost(spec.graph, spec.fast_math), spec.graph.broadcast_dims
    for i, node in enumerate(spec.graph.nodes):
        more = RARE_PATHS.get(node.op, Cost())
        if node.op == "reduce":
            more, i = LEAST_REDUCTION_COSTS.get(node.attribute[0], Cost(1)), node.inputs[0]
        if dims[i].is_matrix:
            cost = Cost(*(x + y for x, y in zip(cost, more, strict=True)))
    return cost


def floors(job: Job, mhz: float) -> dict[str, float]:
    """Return the epilogue's cost per element, and the microseconds of its bytes, special functions and instructions."""
    spec, elements, cycles_per_us = planned(job)._planned.binding.spec, job.m * job.n, NUM_SMS * (mhz or SM_CLOCK_MHZ)
    cost = cost_of(spec)
    nbytes = EpilogueCost.from_epilogue(spec).bytes_per_element
    us = {
        "bytes_us": nbytes * elements / COPY_SPEED[gpu_at(0).name] / 1e6,
        "special_us": cost.special * elements / (SPECIAL_PER_CYCLE * cycles_per_us),
        "issue_us": cost.instructions * elements / (32 * SCHEDULERS_PER_SM * cycles_per_us),
    }
    return {
        "bytes_per_element": nbytes, "special_per_element": cost.special,
        "instructions_per_element": cost.instructions, **us, "floor_us": max(us.values()),
    }  # fmt: skip


def bound_us(job: Job, bare_us: float, floor_us: float) -> float:
    if kind_of(job) == "random":
        return OVER_EITHER * max(bare_us, floor_us)
    return max(OVER_BARE_WITH_STORES.get(job.epilogue, OVER_BARE) * bare_us, OVER_FLOOR * floor_us)


def measure(job: Job, pace: contest.Pace, device: str = "cuda") -> contest.Row:
    """Return the row of a GEMM."""
    bare, plan = bare_of(job), planned(job)
    first = {x: Case(x, device) for x in (job, bare)}
    size = min(case.bytes for case in first.values())
    sets = {x: contest.sets_of(case, lambda x=x: Case(x, device), size) for x, case in first.items()}
    ours, alive = graph_of(job, plan.config, sets[job], check_of(first[job], job))
    check, others, kept, refused = check_of(first[bare], bare), {}, [alive], {}
    for config in bare_configs(bare):
        try:
            others[config], alive = graph_of(bare, config, sets[bare], check)
        except (contest.WrongError, gemmsmith.GemmsmithError) as error:
            refused[str(config)] = str(error)
        else:
            kept.append(alive)
    count = len(sets[job])
    fastest = contest.fastest(others, count, SELECTION)
    if fastest is None:
        raise contest.WrongError(f"no plain GEMM: {refused}")
    times, mhz = contest.timed({"ours": ours, "bare": others[fastest]}, count, pace)
    us = {name: statistics.median(t) for name, t in times.items()}
    about = floors(job, mhz)
    bound = bound_us(job, us["bare"], about["floor_us"])
    return {
        **job._asdict(), "us": us["ours"], "bare_us": us["bare"], **about, "bound_us": bound,
        "of_bound": us["ours"] / bound, "bound_ratio": bound / us["ours"],
        "bare_ratio": statistics.median(b / o for o, b in zip(times["ours"], times["bare"], strict=True)),
        "estimated_us": plan.estimated_us, "nodes": len(plan._planned.binding.graph.nodes), "config": str(plan.config),
        "bare_config": str(fastest), "refused": refused, "sm_mhz": mhz, "sets": count,
        "times": {name: [round(x, 4) for x in t] for name, t in times.items()},
    }  # fmt: skip


def told(row: contest.Row) -> str:
    job, parts = job_of(row), " ".join(f"{row[f'{name}_us']:.1f}" for name in ("bytes", "special", "issue"))
    return (f"{job.epilogue:<22} {job.name:<19} {row['us']:7.1f} us   bare {row['bare_us']:7.1f}   floor "
            f"{row['floor_us']:6.1f} ({parts})   of bound {row['of_bound']:.3f}   {row['sm_mhz']} MHz   "
            f"{row['config']}")  # fmt: skip


def expected(job: Job) -> contest.Row:
    """Return what a row has by the model's estimates, at its clock."""
    about, plan = floors(job, SM_CLOCK_MHZ), planned(job)
    bare_us = min(planned(bare_of(job), config).estimated_us for config in bare_configs(bare_of(job)))
    bound = bound_us(job, bare_us, about["floor_us"])
    return {**job._asdict(), **about, "us": plan.estimated_us, "bare_us": bare_us, "sm_mhz": SM_CLOCK_MHZ,
            "of_bound": plan.estimated_us / bound, "config": str(plan.config)}  # fmt: skip


def prepare(left: Sequence[Job], dry: bool) -> None:
    """Compile the kernels; if `dry` only a few, and print what the model expects."""
    if dry:
        print("\n".join(told(expected(job)) for job in left), flush=True)
    plain = [planned(bare, config) for bare in dict.fromkeys(map(bare_of, left)) for config in bare_configs(bare)]
    contest.built([*map(planned, left), *plain], dry)


def main() -> None:
    parser = contest.parser_for(__doc__)
    parser.set_defaults(block=0.06, rounds=5, warm_up=0.3)
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="so many random graphs, too")
    parser.add_argument("--epilogue", action="append", choices=[*CASES, "random"], help="may be repeated")
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="may be repeated")
    arguments = parser.parse_args()
    pace = contest.pace_of(arguments)
    listed = [
        job
        for job in jobs(arguments.random, contest.shapes_of(arguments))
        if kind_of(job) in (arguments.epilogue or [kind_of(job)]) and job.layout in (arguments.layout or LAYOUTS)
    ]
    rows = contest.measured(
        arguments, listed, job_of, lambda left: prepare(left, arguments.dry), lambda job: measure(job, pace), told
    )
    contest.write_down(
        arguments.json, rows, contest.summary(rows, lambda r: kind_of(job_of(r)), lambda r: job_of(r).name)
    )


if __name__ == "__main__":
    main()
