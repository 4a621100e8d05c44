"""Random problems on a GPU, each judged element by element: sizes, layouts, dtypes, configs, epilogues, ways to call.

    python tests/gpu/fuzz.py --count 5000 --processes 8 --json out.json
    python tests/gpu/fuzz.py --seed 123456 --count 1       # that problem again

A problem is its seed. Results go into NaN, between guards that must stay as they are; what lies around the operands is
NaN. Every problem is run twice and must give the same bits (atomic sums excepted). Exit code 1 where one failed.
With `--device cpu` problems are small and by the reference, with `--device sim` by the simulator.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # this is a program too

from tests.epilogues import CASES, Case, columns_of, fusion, judge, operands
from tests.gpu import judges
from tests.gpu.harness import BROKEN, Result, Watchdog, lasting, say, supervise, surroundings

import gemmsmith
from gemmsmith import ArgumentError, Config, ConfigError, Plan
from gemmsmith.arrays import as_numpy
from gemmsmith.backends.reference import bounds
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.binding.results import primary_result_name, result_shape
from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.graph.frontend.fusions import NAMED_FUSIONS

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn,
         "fp8_e5m2": torch.float8_e5m2}  # fmt: skip
DTYPES = [("bf16", "fp32", None), ("bf16", "fp32", "fp32"), ("bf16", "fp32", "fp16"), ("fp16", "fp32", None),
          ("fp16", "fp32", "bf16"), ("fp16", "fp32", "fp32"), ("fp16", "fp16", None),
          ("fp16", "fp16", "fp32")]  # fmt: skip
"""Operands, accumulation, output."""
PATTERNS = {1: (torch.uint8, 0x7F), 2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5)}
"""Guards, by bytes of an element: NaN in every dtype."""
TAIL = 64
"""Elements of guard behind an array."""


@dataclass(frozen=True)
class Limits:
    """What one problem may take: operations, elements of a matrix, and the longest extent."""

    flops: float
    elements: int
    extent: int


LIMITS = {"cuda": Limits(3e10, 2**22, 8192), "cpu": Limits(4e6, 2**15, 400), "sim": Limits(2e6, 2**14, 200)}


def every_case() -> dict[str, Case]:
    """The epilogues: one for each kind of node, and the ready-made ones."""
    cases = dict(CASES)
    for name in NAMED_FUSIONS:
        function, kinds = fusion(name)
        whole_rows = -1 if "TopK" in name else 128 * (name == "block_quantized")
        cases[name] = Case(function, kinds, gated="glu" in name, whole_rows=whole_rows)
    return cases


EPILOGUES = every_case()


# -- layouts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where an array lies: indices from outermost to innermost, padding of each, elements in front, the innermost
    stride, and an index along which one element stands for all (stride 0)."""

    order: tuple[int, ...] = (0, 1, 2)
    pads: tuple[int, ...] = (0, 0, 0)
    offset: int = 0
    step: int = 1
    repeated: int | None = None

    @staticmethod
    def random(rng: random.Random, *, written: bool = False) -> Layout:
        """Mostly row- or column-major; of a `written` one no element stands for two."""
        order = rng.choice([(0, 1, 2)] * 5 + [(0, 2, 1)] * 5 + [(1, 0, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
        pads = rng.choice([0, 0, 0, 8]), rng.choice([0, 0, 0, 8, 3, 1]), rng.choice([0, 0, 0, 8, 3, 1])
        step = rng.choice([1] * 19 + [2])
        repeated = None if written else rng.choice([None] * 17 + [0, 1, 2])
        return Layout(order, pads, rng.choice([0, 0, 0, 8, 4, 1]), step, repeated)

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(guards, as integers, with the array among them; the array). shape: up to three extents."""
        missing = 3 - len(shape)
        strides, stride = {}, self.step
        for index in (i for i in reversed(self.order) if i >= missing):
            extent = shape[index - missing]
            strides[index] = 0 if index == self.repeated else stride
            stride *= max(1, 1 if index == self.repeated else extent) + self.pads[index]
        integer, pattern = PATTERNS[dtype.itemsize]
        store = torch.full((self.offset + stride + TAIL,), pattern, dtype=integer, device=device)
        steps = [strides[i] for i in range(missing, 3)]
        return store, store.view(dtype).as_strided(shape, steps, self.offset)


def clear(store: torch.Tensor, view: torch.Tensor) -> bool:
    """Makes the array among its guards NaN again; whether the guards were as they should be."""
    pattern = PATTERNS[store.dtype.itemsize][1]
    store.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(pattern)
    return bool((store == pattern).all())


# -- problems ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What a seed stands for, but for the config, which is drawn until one suits the arrays."""

    seed: int
    m: int
    n: int
    k: int
    batch: int | None
    batches: tuple[bool, bool]
    """Whether A and B have one of their own, each; or none, or 1."""
    ones: bool
    dtype: str
    accumulate: str
    output: str | None
    data: str
    a: Layout
    b: Layout
    outs: str
    """Which results are given: none, first, all."""
    epilogue: str
    fast_math: bool
    deterministic: bool
    way: str

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.m, self.n) if self.batch is None else (self.batch, self.m, self.n)

    def operand_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of A and B."""
        shapes = []
        for own, matrix in zip(self.batches, ((self.m, self.k), (self.k, self.n)), strict=True):
            lead = () if self.batch is None else (self.batch,) if own else (1,) * self.ones
            shapes.append((*lead, *matrix))
        return shapes[0], shapes[1]


def extent(rng: random.Random, limits: Limits) -> int:
    """0 and 1 now and then, small, ragged, in eights, or log-uniform up to the longest."""
    kinds: list[Callable[[], int]] = [
        lambda: rng.randint(0, 1),
        lambda: rng.randint(2, 40),
        lambda: rng.randint(1, 700),
        lambda: 8 * rng.randint(1, 90),
        lambda: round(2 ** rng.uniform(0, math.log2(limits.extent))),
        lambda: 64 * rng.randint(1, 8) + rng.choice([-1, 0, 0, 1]),
    ]
    return min(rng.choices(kinds, [1, 4, 6, 6, 6, 4])[0](), limits.extent)


def problem(seed: int, limits: Limits) -> Problem:
    """The problem of a seed."""
    rng = random.Random(seed)
    dtype, accumulate, output = rng.choice(DTYPES)
    epilogue = rng.choice(["bare", rng.choice(list(EPILOGUES))])
    m, n, k = (extent(rng, limits) for _ in range(3))
    batch = rng.choice([None] * 5 + [0, 1, 2, 3, 7])
    if epilogue != "bare":
        accumulate = "fp32"
        n = columns_of(EPILOGUES[epilogue], n)
        n = min(max(n, 2), 256) if EPILOGUES[epilogue].whole_rows == -1 else n  # the best two
    group = 16 if epilogue != "bare" and EPILOGUES[epilogue].gated else 1

    most = limits.elements // (1 if epilogue == "bare" else 4)  # the others are judged on the CPU

    def too_large() -> bool:
        count = batch or 1
        return 2 * count * m * n * k > limits.flops or count * max(m * n, m * k, k * n) > most

    while too_large():
        m, n, k = (x // 2 if x == max(m, n, k) else x for x in (m, n, k))
        n = max(group, n // group * group) if n else n
    own = rng.choice([(True, True), (True, True), (True, False), (False, True)])
    return Problem(
        seed, m, n, k, batch, own, rng.random() < 0.5, dtype, accumulate, output,
        rng.choice(["normal"] * 6 + ["integers", "large", "tiny", "special"]) if epilogue == "bare" else "normal",
        Layout.random(rng), Layout.random(rng), rng.choice(["none", "first", "all"]), epilogue,
        rng.random() >= 0.2, epilogue == "bare" or rng.random() >= 0.2, rng.choice(["gemm", "plan", "prepare"]),
    )  # fmt: skip


def random_config(rng: random.Random) -> Config:
    """Every choice by chance; most do not suit one another, and `Plan` says so."""
    design = rng.choice(["cooperative"] * 3 + ["tma", "pingpong"])
    consumers = rng.choice([2, 2, 3] if design == "pingpong" else [1, 2, 2, 3])
    m = 64 * (1 if design == "pingpong" else consumers) * rng.choice([1, 1, 2])
    n = 8 * rng.choice([rng.randint(1, 32), 8, 16, 32])
    k = rng.choice([16, 32, 64, 64, 64, 128, 192, 256])
    most = max(2, min(10, 220_000 // (2 * k * (m + n))))
    return Config(
        design, (m, n, k), rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]), rng.randint(2, most),
        consumers, rng.choice(["m", "n"]), rng.choice([1, 2, 3, 8]), rng.choice([1] * 6 + [0, 0, 2, 3, 7]),
        rng.choice([1] * 6 + [2, 2, 3, 4]), rng.random() < 0.15,
        rng.choice([("normal", "normal")] * 3 + [("first", "last"), ("last", "first")]),
        *(rng.random() < 0.2 for _ in range(4)),
    )  # fmt: skip


# -- one trial -----------------------------------------------------------------------------------------------------


class Trial:
    """A problem's arrays on a device, its plan, and its two runs."""

    def __init__(self, p: Problem, device: str) -> None:
        self.p, self.rng, self.numbers = p, random.Random(p.seed + 1), np.random.default_rng(p.seed)
        self.device, self.backend = (
            ("cuda", "auto") if device == "cuda" else ("cpu", "sim" if device == "sim" else "auto")
        )
        shapes = p.operand_shapes()
        self.a, self.b = (
            self._filled(self._values(shape), as_dtype(p.dtype), layout)
            for shape, layout in zip(shapes, (p.a, p.b), strict=True)
        )
        self.case = EPILOGUES.get(p.epilogue)
        self.given: dict[str, Any] = {}
        if self.case:
            made = operands(self.case, self.numbers, p.m, p.n, as_dtype(p.dtype), p.batch)
            self.given = {name: self._operand(x) for name, x in made.items()}
        self.outs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._make_outs(self._plan(None))
        self.config, self.plan = self._with_config()

    def _values(self, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.from_numpy(self.numbers.standard_normal(shape, np.float32)).to(self.device)
        match self.p.data:
            case "integers":
                return (3 * made).round()
            case "large":
                return made * 300
            case "tiny":
                return made * 1e-6
            case "special" if made.numel():
                for special in (math.inf, -math.inf, math.nan):
                    made.view(-1)[int(self.numbers.integers(made.numel()))] = special
        return made

    def _filled(self, values: torch.Tensor, dtype: DType, layout: Layout) -> torch.Tensor:
        """The values in that layout, among NaN; where the layout repeats an index, its first ones."""
        _, view = layout.place(tuple(values.shape), TORCH[dtype.name], self.device)
        if layout.repeated is None or layout.repeated < 3 - values.ndim or 0 in values.shape:
            view.copy_(values)
        else:
            index = layout.repeated - (3 - values.ndim)
            view.narrow(index, 0, 1).copy_(values.narrow(index, 0, 1))
        return view

    def _operand(self, x: Any) -> Any:
        if isinstance(x, float):
            return x
        if np.asarray(x).dtype.kind in "ib":  # labels and masks
            return torch.from_numpy(np.array(x)).to(self.device)
        values = torch.from_numpy(np.asarray(x, np.float32)).to(self.device)
        return self._filled(values, as_dtype(x.dtype), Layout.random(self.rng))

    def _options(self) -> dict[str, Any]:
        p = self.p
        function = self.case and self.case.function
        return {"out_dtype": p.output, "accumulate": p.accumulate, "fast_math": p.fast_math,
                "deterministic": p.deterministic,
                "epilogue": function, "operands": self.given, "backend": self.backend}  # fmt: skip

    def _plan(self, config: Config | None) -> Plan:
        return gemmsmith.plan(self.a, self.b, out=self.out, config=config, **self._options())

    def _with_config(self) -> tuple[Config | None, Plan]:
        """A config that suits and its plan, or none and the plan that chooses."""
        for _ in range(60 if self.rng.random() < 0.6 else 0):
            config = random_config(self.rng)
            try:
                plan = self._plan(config)
                _ = plan._planned.kernel  # here too it may turn out not to suit
            except ConfigError:
                continue
            return config, plan
        return None, self._plan(None)

    def _make_outs(self, plan: Plan) -> None:
        graph, p = plan._planned.binding.graph, self.p
        expected_results = [
            (r.name, result_shape(graph, r, p.shape), r.dtype or plan._planned.binding.out_dtype, graph.is_reduction(r))
            for r in graph.results
        ]
        if p.outs == "first":
            expected_results = [w for w in expected_results if w[0] == primary_result_name(graph)]
        for name, shape, dtype, contiguous in expected_results if p.outs != "none" else []:
            layout = Layout.random(self.rng, written=True)
            layout = Layout(offset=layout.offset) if contiguous else layout
            self.outs[name] = layout.place(shape, TORCH[dtype.name], self.device)

    @property
    def out(self) -> Any:
        """The results that are given, as a call takes them."""
        views = {name: view for name, (_, view) in self.outs.items()}
        return views["out"] if self.case is None and views else views or None

    def run(self) -> dict[str, torch.Tensor]:
        """Copies of the results, by name. Raises AssertionError where a guard was written."""
        for store, view in self.outs.values():
            clear(store, view)
        way = self.p.way
        if way == "gemm":
            done = gemmsmith.gemm(self.a, self.b, out=self.out, config=self.config, **self._options())
        elif way == "plan":
            done = self.plan.run(self.a, self.b, self.out, operands=self.given)
        else:
            done = self.plan.prepare(self.a, self.b, self.out, operands=self.given)()
        names = self.plan._planned.binding.graph.result_names
        if not isinstance(done, dict):
            done = dict(zip(names, done if isinstance(done, tuple) else (done,), strict=True))
        results = {name: x.clone() for name, x in done.items()}
        for name, (store, view) in self.outs.items():
            assert clear(store, view), f"{name}: written outside"
        return results

    def check(self) -> None:
        """AssertionError where a result is wrong, or the second run's differs."""
        p = self.p
        first, second = self.run(), self.run()
        sums = set(self.plan._planned.binding.graph.result_names) if self.case and not p.deterministic else set()
        for name in first:
            assert name in sums or judges.same_bits(first[name], second[name]), f"{name}: other bits the second time"
        if self.case is None:
            return self.check_bare(first["out"])
        product = judges.exact(self.a, self.b)
        numbers = {n: x if isinstance(x, float) else x.double().cpu().numpy() for n, x in self.given.items()}
        binding = self.plan._planned.binding
        expected = execute(binding.source_graph, product.cpu().numpy(), numbers)
        for results in (first,) if p.deterministic else (first, second):
            actual = {name: x.float().cpu().numpy() for name, x in results.items()}
            judge(binding.graph, actual, expected, product.cpu().numpy())

    def check_bare(self, out: torch.Tensor) -> None:
        """By a bound on the device; the reference has the last word on what that refuses."""
        expected = judges.exact(self.a, self.b)
        if judges.wrong(out, expected, judges.product_bound(self.a, self.b, expected, self.p.accumulate, out.dtype)):
            there = (as_numpy(x.cpu()) for x in (out, self.a, self.b))
            bounds.check(*there, as_dtype(self.p.accumulate), as_dtype(out.dtype)).require()


def empty_has_no_value(p: Problem, error: ArgumentError) -> bool:
    """Whether it says rightly that nothing has no largest element."""
    return 0 in p.shape and "has no value" in str(error)


def attempt(seed: int, device: str) -> Result:
    """{"epilogue", "config"} of the problem, and "failed" with what was wrong."""
    p = problem(seed, LIMITS[device])
    about: Result = {"epilogue": p.epilogue, "config": "none"}
    trial = None
    try:
        trial = Trial(p, device)
        about["config"] = trial.config.design if trial.config else "chosen"
        trial.check()
    except Exception as error:
        if isinstance(error, ArgumentError) and empty_has_no_value(p, error):
            return about
        if lasting(error):
            raise
        config = trial.plan.config if trial else "no config"
        about["failed"] = f"{type(error).__name__}: {str(error)[:500]}; {p}; {config}"
    return about


# -- the program ---------------------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> int:
    """Every `stride`-th seed from the first, until there are `count` or the time is over."""
    with Watchdog(args.patience, "fuzz") as watchdog:
        for i in range(args.count):
            if time.time() > args.until:
                break
            seed = args.seed + i * args.stride
            say({"at": i})
            watchdog.at(0, f"seed {seed}: {problem(seed, LIMITS[args.device])}")
            try:
                say(attempt(seed, args.device))
            except Exception as error:
                watchdog.leave(BROKEN, f"seed {seed}: {str(error)[:300]}")
    return 0


def fuzz(args: argparse.Namespace) -> Result:
    """{"problems", "failed": [{"seed", "why"}], "epilogues", "configs"}, by as many processes as asked for."""
    actual_results: Result = {"problems": 0, "failed": [], "epilogues": Counter(), "configs": Counter()}
    lock, until = threading.Lock(), time.time() + args.seconds
    processes = min(args.processes, args.count)

    def part(number: int) -> None:
        count = len(range(number, args.count, processes))

        def command(first: int) -> list[str]:
            passed = ["--seed", args.seed + number + first * processes, "--stride", processes, "--count", count - first,
                      "--until", until, "--device", args.device, "--patience", args.patience]  # fmt: skip
            return [sys.executable, __file__, "--child", *map(str, passed)]

        def told(result: Result) -> None:
            seed = args.seed + number + result["item"] * processes
            why = result.get("failed") or result.get("died")
            with lock:
                actual_results["problems"] += 1
                actual_results["epilogues"][result.get("epilogue", "?")] += 1
                actual_results["configs"][result.get("config", "?")] += 1
                if why:
                    actual_results["failed"].append({"seed": seed, "why": why})
                    print(f"seed {seed}: {why}", flush=True)

        supervise(command, count, args.patience + 120, told)

    parts = [threading.Thread(target=part, args=(i,)) for i in range(processes)]
    for thread in parts:
        thread.start()
    for thread in parts:
        thread.join()
    return actual_results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10**9, help="problems; by default until the time is over")
    parser.add_argument("--seconds", type=float, default=None, help="60 where no count is given, else no end")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None, help="of the first problem; the others' follow")
    parser.add_argument("--patience", type=float, default=120, help="seconds for one problem after which it hangs")
    parser.add_argument("--device", choices=list(LIMITS), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.seconds is None:
        args.seconds = 60 if args.count == 10**9 else math.inf
    if args.child:
        return child(args)
    args.seed = random.SystemRandom().getrandbits(40) if args.seed is None else args.seed
    print(f"first seed {args.seed}", flush=True)
    actual_results = fuzz(args)
    print(
        f"{actual_results['problems']} problems, {len(actual_results['failed'])} failed; "
        f"configs {dict(actual_results['configs'])}"
    )
    if args.json:
        about = {**surroundings(args.device), "seed": args.seed}
        args.json.write_text(json.dumps({"where": about, **actual_results}, indent=1) + "\n")
    return int(bool(actual_results["failed"]) or not actual_results["problems"])


if __name__ == "__main__":
    sys.exit(main())
