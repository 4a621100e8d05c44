"""Fused GEMMs of a training step: the chosen config against the fastest of a sweep of configs.

| epilogue | results |
| --- | --- |
| bare | the GEMM's |
| swiglu | silu(gate) up, (M, N / 2), and the GEMM's, whose columns interleave gate and up |
| dswiglu | from the GEMM and two matrices, gate and up: the gradients of both, and silu(gate) up |
| bias_gelu, residual | gelu(a @ b + bias), a @ b + a matrix |
| others | those of heavy.py |

The chosen config, the model's first configs and plain ones, with tiles in steps of 64, run in CUDA graphs that rotate
operands beyond the L2, in blocks that grow as slower configs are dropped. The last few and the chosen one then run in
rounds of blocks, timed as in contest.py. Each result is checked against float64. Kernels are compiled while others are
timed.

    python -m benchmarks.speed.fused --json benchmarks/results/fused-h100.json.xz --seconds 400 [--resume]
    python -m benchmarks.speed.fused --epilogue bare --layout nn --layout tn --shape 8192x4608x4544 --json ...
    python -m benchmarks.speed.fused --epilogue bce --layout nt --shape 4096x65536x1024 --json ...
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

import gemmsmith
from benchmarks import contest, random_epilogues
from benchmarks.fit.sweep import varied
from benchmarks.speed.epilogues import bce, bias_gelu, dgelu, softplus
from benchmarks.speed.kinds import matrix
from benchmarks.suite import SMALL, Shape, specs
from benchmarks.timing import captured, replayed
from gemmsmith import Config
from gemmsmith.backends.reference.tolerances import tolerances
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.torch.fallback import TORCH_DTYPES, evaluate_graph
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.search import steady_state_us, successive_halving

LAYERS: list[Shape] = [(8192, 14336, 4096), (4096, 11008, 4096), (2048, 28672, 4096), (8192, 5120, 5120),
                       (16384, 6144, 2048)]  # fmt: skip
ROUNDS = ((128, 4_000.0), (12, 20_000.0), (6, 60_000.0))
"""Rounds of `successive_halving`: configs, and microseconds of a block. Chosen; not measured."""
FINALISTS = 3
"""Configs that run in the rounds of blocks, in addition to the chosen one. Chosen; not measured."""
DEEPEST = 8
"""Stages that plain configs have at most; they get as many as fit."""


def plain(design: str, tiles: Sequence[tuple[int, int]], clusters: Sequence[tuple[int, int]]) -> list[Config]:
    """Return configs with tiles 64 deep, in clusters, without other options."""
    return [
        Config(design=design, tile=(*tile, 64), cluster=cluster, stages=DEEPEST, raster="n" if cluster[0] < 2 else "m")
        for tile, cluster in product(tiles, clusters)
    ]


PLAIN = [
    *plain("cooperative", [(128, 256), (256, 128)], [(2, 1), (1, 2)]),
    *plain("cooperative", [(128, 192), (256, 192), (128, 128)], [(2, 1)]),
    *plain("pingpong", [(64, 256), (64, 192), (64, 128), (128, 128)], [(2, 1)]),
    *plain("pingpong", [(128, 128)], [(1, 2)]),
]
"""Plain configs that work well for any layout: wide tiles in steps of 64."""


def swiglu(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return F.silu(gate) * up, acc


def dswiglu(acc: Any, gate: Any, up: Any) -> Any:
    s = torch.sigmoid(gate)
    hidden = gate * s
    return acc * up * (s + hidden * (1 - s)), acc * hidden, hidden * up


def residual(acc: Any, x: Any) -> Any:
    return acc + x


def swiglu_with_inputs(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return F.silu(gate) * up, gate, up


def dswiglu_without_hidden(acc: Any, gate: Any, up: Any) -> Any:
    return dswiglu(acc, gate, up)[:2]


def cross_entropy(acc: Any) -> Any:
    """Return each row's maximum and logsumexp, the loss's first pass over logits that are not stored."""
    return acc.amax(-1), acc.logsumexp(-1)


def dropout_residual(acc: Any, bias: Any, keep: Any, residual: Any) -> Any:
    return (acc + bias) * keep * (1 / 0.9) + residual


def rms_statistics(acc: Any) -> Any:
    return acc, acc.square().sum(-1)


def layer_norm_statistics(acc: Any) -> Any:
    return acc, acc.sum(-1), acc.square().sum(-1)


@dataclass(frozen=True)
class Epilogue:
    """A function or a graph, and what each operand is.

    row, column, matrix; labels: a matrix of 0 and 1; mask: one of bool; scalar: on the device; number: Python's.
    """

    function: Callable[..., Any] | EpilogueGraph | None
    operands: dict[str, str] = field(default_factory=dict)


EPILOGUES = {
    "bare": Epilogue(None),
    "swiglu": Epilogue(swiglu),
    "dswiglu": Epilogue(dswiglu, {"gate": "matrix", "up": "matrix"}),
    "bias_gelu": Epilogue(bias_gelu, {"bias": "row"}),
    "residual": Epilogue(residual, {"x": "matrix"}),
    "swiglu_with_inputs": Epilogue(swiglu_with_inputs),
    "dswiglu_without_hidden": Epilogue(dswiglu_without_hidden, {"gate": "matrix", "up": "matrix"}),
    "bce": Epilogue(bce, {"bias": "row", "labels": "labels"}),
    "cross_entropy": Epilogue(cross_entropy),
    "dgelu": Epilogue(dgelu, {"residual": "matrix"}),
    "softplus": Epilogue(softplus, {"bias": "row"}),
    "dropout_residual": Epilogue(dropout_residual, {"bias": "row", "keep": "mask", "residual": "matrix"}),
    "rms_statistics": Epilogue(rms_statistics),
    "layer_norm_statistics": Epilogue(layer_norm_statistics),
}
RANDOM_NODES = range(10, 41)
"""Nodes of random graphs."""
FEW_JUMPS = 1e-5
"""Part of a random graph's elements that may be off: floor and the like jump at values that no tolerance foresees."""
NUMBER = 0.7
"""Value of a Python number. Chosen."""
DTYPES = {"mask": "bool", "scalar": "fp32"}
"""Dtypes of operands, if not bf16."""


@lru_cache
def epilogue_of(name: str) -> Epilogue:
    """Return one of EPILOGUES, or the random graph "random SEED"."""
    if name in EPILOGUES:
        return EPILOGUES[name]
    seed = int(name.removeprefix("random "))
    graph = random_epilogues.of_size(RANDOM_NODES[seed % len(RANDOM_NODES)], seed)
    kinds = {"scalar": "number", "device_scalar": "scalar"}
    return Epilogue(graph, {o.name: kinds.get(o.name, o.name) for o in graph.operands})


OF_LAYOUTS = {"nt": ("bare", "swiglu", "dswiglu", "bias_gelu"), "nn": ("bare", "swiglu", "dswiglu", "residual")}


class Job(NamedTuple):
    epilogue: str
    layout: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.layout}"

    def shape(self, kind: str) -> tuple[int, ...]:
        """Return the shape of an operand."""
        return {"scalar": (), "row": (self.n,), "column": (self.m, 1)}.get(kind, (self.m, self.n))


def job_of(row: contest.Row) -> Job:
    return Job(*(row[name] for name in Job._fields))


def jobs(
    shapes: Sequence[tuple[int, ...]] = (), layouts: Sequence[str] = (), epilogues: Sequence[str] = ()
) -> list[Job]:
    """Return the jobs of these shapes, layouts and epilogues, or of LAYERS and OF_LAYOUTS."""
    return [
        Job(epilogue, layout, *shape)
        for shape in shapes or LAYERS
        for layout in layouts or OF_LAYOUTS
        for epilogue in epilogues or OF_LAYOUTS.get(layout, EPILOGUES)
    ]


def planned(job: Job, config: Config | None = None) -> gemmsmith.Plan:
    """Return the plan for stand-ins of a Case's arrays."""
    epilogue = epilogue_of(job.epilogue)
    operands = {
        name: NUMBER if kind == "number" else gemmsmith.Spec(job.shape(kind), DTYPES.get(kind, "bf16"))
        for name, kind in epilogue.operands.items()
    }
    a, b = specs((job.m, job.n, job.k), "bf16", job.layout)
    return gemmsmith.plan(a, b, epilogue=epilogue.function, operands=operands, config=config)


def contenders(job: Job, most: int) -> list[Config]:
    """Return at most `most` configs: the chosen one, those of PLAIN that can be built, and the model's first."""
    small = planned(job, SMALL)._planned.binding
    timings = [planned(job).config, *(c for c in (deepest(job, c) for c in PLAIN) if c)]
    timings += varied(rank_configs(small.problem, small.spec, limit=4 * most, any_splits=True), most)
    return list(dict.fromkeys(timings))[:most]


def deepest(job: Job, config: Config) -> Config | None:
    """Return a config with as many stages, up to its own, as a kernel can be built with; None if there is none.

    This may be more than `fit_stages` leaves.
    """
    for stages in range(config.stages, 1, -1):
        fewer = config.replace(stages=stages)
        try:
            planned(job, fewer)._planned.kernel  # noqa: B018
        except gemmsmith.GemmsmithError:
            continue
        return fewer
    return None


def drawn(kind: str, shape: tuple[int, ...], device: str) -> Any:
    """Return a random operand."""
    if kind == "number":
        return NUMBER
    x = torch.randn(shape, device=device)
    if kind == "mask":
        return x > -1.28  # of nine in ten
    return x if kind == "scalar" else ((x > 0) if kind == "labels" else x).bfloat16()


class Case:
    """Random A and B of a GEMM, its epilogue's operands, and its results, full of NaN.

    The elements of a @ b have about the size of one, where functions are not saturated.
    """

    def __init__(self, job: Job, device: str = "cuda") -> None:
        m, n, k = job[2:]
        self.a = matrix(1, m, k, torch.bfloat16, job.layout[0], device)
        self.b = matrix(1, k, n, torch.bfloat16, job.layout[1], device).mul_(k**-0.5)
        kinds = epilogue_of(job.epilogue).operands
        self.operands = {name: drawn(kind, job.shape(kind), device) for name, kind in kinds.items()}
        made = planned(job, SMALL)._planned.binding.unallocated_results
        self.results = {
            name: torch.empty(x.shape, device=device, dtype=TORCH_DTYPES[x.dtype]) for name, x in made.items()
        }
        self.poison()

    @property
    def out(self) -> Any:
        """The results as `run` takes them."""
        return self.results["out"] if list(self.results) == ["out"] else self.results

    @property
    def bytes(self) -> int:
        arrays = [self.a, self.b, *self.operands.values(), *self.results.values()]
        return sum(x.nbytes for x in arrays if isinstance(x, torch.Tensor))

    def poison(self) -> None:
        for x in self.results.values():
            x.fill_(float("nan"))


def check_of(case: Case, job: Job) -> Callable[[Case], str]:
    """Return a function that compares a case's results with float64 and then fills them with NaN.

    The tolerance allows for bf16's 8 bits and for the epilogues' approximate functions; that of an fp32 result, such as
    a sum of rows, is so small that a tile that is missing in it is noticed.
    """
    product = case.a.double() @ case.b.double()
    operands = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in case.operands.items()}
    function = epilogue_of(job.epilogue).function
    exact, allowed = dict[str, Any](), dict[str, Any]()
    if isinstance(function, EpilogueGraph):
        exact = evaluate_graph(function, product, operands)
        dtypes = {name: as_dtype(x.dtype) for name, x in case.results.items()}
        allowed = tolerances(
            function, exact, dtypes, 1, lambda graph: evaluate_graph(graph, product, operands),
            torch.maximum,
        )  # fmt: skip
    else:
        value = function(product, **operands) if function else product
        for (name, x), y in zip(case.results.items(), value if isinstance(value, tuple) else (value,), strict=True):
            epsilon = 2.0**-14 if x.dtype == torch.float32 else 2.0**-6
            exact[name], allowed[name] = y, (y.abs() + y.square().mean().sqrt()) * epsilon
    exact, allowed = ({name: x.float() for name, x in values.items()} for values in (exact, allowed))

    jumps = FEW_JUMPS if isinstance(function, EpilogueGraph) else 0

    def check(case: Case) -> str:
        off = {
            name: int((~((x.float() - exact[name]).abs_() <= allowed[name])).sum()) for name, x in case.results.items()
        }
        wrong = {name: count for name, count in off.items() if count > jumps * case.results[name].numel()}
        case.poison()
        return f"elements that are off: {wrong}" if wrong else ""

    return check


def compiled(job: Job, configs: Sequence[Config]) -> None:
    """Fills the cubin cache with the kernels of these configs."""
    from gemmsmith.backends.cuda.compiler import compile_source

    for config in configs:
        try:
            for source, name in contest.kernels([planned(job, config)]):
                compile_source(source, name)
        except gemmsmith.GemmsmithError:
            continue  # the same error is raised when it is measured


def graph_of(job: Job, config: Config, sets: list[Case], check: Callable[[Case], str]) -> tuple[Any, Any]:
    """Return the CUDA graph of a config, and what it reads. Raises WrongError if a result is wrong."""
    plan = planned(job, config)

    def call(case: Case) -> None:
        plan.run(case.a, case.b, case.out, operands=case.operands)

    if why := contest.refusal(call, sets[0], check):
        print(f"    {job} {config}: {why}", flush=True)
        raise contest.WrongError(why)
    return captured(call, [(s,) for s in sets]), plan


def swept(job: Job, configs: Sequence[Config], pace: contest.Pace, device: str = "cuda") -> contest.Row:
    """Return the row of a GEMM: microseconds of the first config, the chosen one, and of all others.

    Configs that ran correctly are listed fastest first. `rounds` are the blocks' times of the last few, `final` marks
    their medians.
    """
    first = Case(job, device)
    sets, check = contest.sets_of(first, lambda: Case(job, device), first.bytes), check_of(first, job)
    graphs: dict[Config, Any] = {}
    alive, wrong = [], {}

    def measure(config: Config, microseconds: float) -> float:
        if config not in graphs:
            try:
                graphs[config], plan = graph_of(job, config, sets, check)
            except contest.WrongError as error:
                wrong[str(config)] = str(error)
                raise
            alive.append(plan)
        return steady_state_us(partial(replayed, graphs[config]), microseconds, 1e12) / len(sets)

    timings = successive_halving(configs, measure, ROUNDS)
    selected = configs[0]
    if selected not in graphs:
        raise contest.WrongError(f"{selected}: {wrong.get(str(selected), 'did not run')}")
    last = list(dict.fromkeys([selected, *(x.config for x in timings[:FINALISTS])]))
    times, mhz = contest.timed({c: graphs[c] for c in last}, len(sets), pace)
    final = {c: statistics.median(t) for c, t in times.items()}
    us = {x.config: x.us for x in timings} | final
    ordered = sorted(us, key=lambda c: (c not in final, us[c]))
    best = ordered[0]
    return {
        **job._asdict(), "us": us[selected], "best_us": us[best],
        "best_ratio": statistics.median(b / c for b, c in zip(times[best], times[selected], strict=True)),
        "config": str(selected), "best": str(best), "sm_mhz": mhz, "sets": len(sets), "wrong": wrong,
        "configs": [{"config": str(c), "us": round(us[c], 3), "final": c in final} for c in ordered],
        "times": {str(c): [round(x, 3) for x in t] for c, t in times.items()},
    }  # fmt: skip


def summary(rows: Sequence[contest.Row]) -> list[str]:
    """Return a line per epilogue and layout, and one for all: the chosen config's time over the fastest's."""
    rows = [r for r in rows if "error" not in r]
    groups: dict[str, list[contest.Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['epilogue']} {row['layout']}", []).append(row)
    lines = []
    for title, members in {**groups, "all": rows}.items():
        if members:
            over = {job_of(r): 1 / r["best_ratio"] for r in members}
            worst = max(over, key=over.__getitem__)
            mean = statistics.geometric_mean(over.values())
            lines.append(f"{title:<14} {len(over):>3} GEMMs   chosen / fastest   geometric mean {mean:.3f}   "
                         f"maximum {over[worst]:.3f} at {worst.epilogue} {worst.name}")  # fmt: skip
    return lines


def told(row: contest.Row) -> str:
    job = job_of(row)
    return (f"{job.epilogue:<10} {job.name:<20} chosen {row['us']:8.1f} us   fastest {row['best_us']:8.1f} us   "
            f"{1 / row['best_ratio']:.3f}   {row['sm_mhz']} MHz   {row['config']} / {row['best']}")  # fmt: skip


def main() -> None:
    parser = contest.parser_for(__doc__)
    parser.add_argument("--layout", action="append", choices=["nn", "nt", "tn", "tt"], help="may be repeated")
    parser.add_argument("--epilogue", action="append", choices=list(EPILOGUES), help="may be repeated")
    parser.add_argument("--configs", type=int, default=24, help="a product, at most")
    arguments = parser.parse_args()
    pace, configs_of = contest.pace_of(arguments), dict[Job, list[Config]]()
    asked = jobs(contest.shapes_of(arguments), arguments.layout or (), arguments.epilogue or ())
    building: dict[Job, list[Future[None]]] = {}
    workers = max(1, (os.cpu_count() or 1) - 1)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))

    def prepare(left: list[Job]) -> None:
        """Starts compiling, in the order of the jobs."""
        for job, configs in [(job, pool.submit(contenders, job, arguments.configs)) for job in left]:
            configs_of[job] = configs.result()
            compiled_now = (
                configs_of[job][: 2 if arguments.dry else None] if job in left[:2] or not arguments.dry else []
            )
            building[job] = [pool.submit(compiled, job, [config]) for config in compiled_now]
            if arguments.dry:
                print(
                    f"{job.epilogue} {job.name}: {len(configs_of[job])} configs, chosen {configs_of[job][0]}",
                    flush=True,
                )

    def row(job: Job) -> contest.Row:
        begun = time.perf_counter()
        for future in building[job]:
            future.result()
        waited = time.perf_counter() - begun
        return swept(job, configs_of[job], pace) | {"waited_s": round(waited, 1)}

    try:
        rows = contest.measured(arguments, asked, job_of, prepare, row, told)
        if arguments.dry:
            wait([future for futures in building.values() for future in futures])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    contest.write_down(arguments.json, rows, summary(rows))


if __name__ == "__main__":
    main()
