"""Threads, streams, CUDA graphs and processes at once on one GPU: right, the same bits as alone, and no hang.

    python tests/gpu/stress.py --seconds 600 --json out.json
    python tests/gpu/stress.py --seconds 60 --only stream_k,split_k --graphs 0.3
    python tests/gpu/stress.py --seconds 60 --control      # torch.mm in gemmsmith's place

Each mode draws products, computes them once alone, and holds every result of the threads against those bits, and
where they differ against float64. Exit code 0: all right; 1: something was not. Without a GPU (`--device cpu`) products
are small, by the reference, and without streams and graphs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # this is a program too

from tests.gpu import judges
from tests.gpu.grouped_products import Form, drawn_groups
from tests.gpu.harness import BROKEN, Result, Watchdog, lasting, say, supervise, surroundings
from tests.gpu.loss_products import drawn_heads
from tests.gpu.products import Product, Results, drawn, expected

from gemmsmith import Config

SCHEDULES: dict[str, tuple[Config, ...]] = {
    "stream_k": (Config(splits=0), Config(tile=(128, 64, 64), cluster=(1, 1), splits=0)),
    "split_k": (Config(tile=(128, 128, 64), cluster=(1, 1), splits=4), Config(tile=(128, 64, 64), splits=2)),
    "cluster_splits_2": (Config(tile=(128, 64, 64), cluster=(1, 2), cluster_splits=2, raster="n"),),
    "cluster_splits_4": (Config(tile=(64, 128, 64), cluster=(1, 1), consumers=1, cluster_splits=4),),
    "cluster_2d": (Config(tile=(128, 64, 64), cluster=(2, 2)), Config("pingpong", (64, 64, 64), (4, 2)),
                   Config(tile=(64, 64, 64), cluster=(2, 4), consumers=1, alias_epilogue=True)),
    "sync_clusters": (Config(sync_clusters=True), Config(tile=(128, 64, 64), consumers=1, sync_clusters=True)),
    "serpentine": (Config(sync_clusters=True, serpentine=True, raster_group=4),),
    "pingpong": (Config("pingpong", (64, 256, 64)), Config("pingpong", (64, 64, 64), (1, 1)),
                 Config("pingpong", (64, 192, 64), (2, 1), 4, 3)),
    "tma": (Config("tma", (128, 128, 64), (1, 2)), Config("tma", (64, 64, 64), (1, 1), 4, 1)),
    "alias_epilogue": (Config(tile=(256, 192, 64), cluster=(1, 2), alias_epilogue=True),
              Config(tile=(64, 96, 64), consumers=1, cluster_splits=2, alias_epilogue=True)),
    "swap_ab": (Config(tile=(128, 16, 64), cluster=(1, 1), stages=8, swap_ab=True),
             Config(tile=(64, 8, 128), cluster=(1, 1), consumers=1, stages=8, splits=2, swap_ab=True)),
}  # fmt: skip
GROUPED = (None, Config(tile=(256, 128, 64), cluster=(2, 1)), Config("pingpong", (64, 256, 64), (1, 1)),
           Config(tile=(128, 16, 64), cluster=(1, 1), stages=6, swap_ab=True))  # fmt: skip
"""Of grouped products."""
FORMS: tuple[Form, ...] = ("rows", "scattered", "k", "masked")
FEW = (None, *(configs[0] for configs in SCHEDULES.values()))


@dataclass(frozen=True)
class Mode:
    """What is run, and how: calls, prepared runs that several threads replay, or graphs in flight on several streams.

    `form`: of grouped products, whose tables change between a graph's replays. `ragged`: TMA cannot read the operands'
    rows, which are packed first. `priorities`: half the streams have a high one. `heads`: loss heads with gradients.
    """

    configs: tuple[Config | None, ...] = (None,)
    epilogues: tuple[str, ...] = ("bare",)
    ragged: bool = False
    way: Literal["calls", "prepared", "graphs"] = "calls"
    priorities: bool = False
    processes: int = 1
    form: Form | None = None
    heads: bool = False


FUSED = ("row_sums", "amax", "swiglu", "residual")
MODES: dict[str, Mode] = {
    "auto": Mode(),
    **{name: Mode(configs) for name, configs in SCHEDULES.items()},
    "mixed": Mode(FEW),
    "epilogues": Mode((None,), FUSED),
    "epilogues_mixed": Mode(FEW, FUSED),
    "atomic": Mode((None, *SCHEDULES["stream_k"]), ("atomic",)),
    "ragged": Mode((None, *SCHEDULES["stream_k"], *SCHEDULES["sync_clusters"]), ("bare", "row_sums"), ragged=True),
    "prepared": Mode(FEW, ("bare", "row_sums"), way="prepared"),
    "graphs": Mode(FEW, ("bare", "row_sums"), way="graphs"),
    "graphs_ragged": Mode((None, *SCHEDULES["stream_k"]), ("bare", "amax"), ragged=True, way="graphs"),
    "priorities": Mode(FEW, priorities=True),
    "processes": Mode(FEW, ("bare", "row_sums"), processes=2),
    "grouped": Mode(GROUPED, form="rows"),
    "grouped_scattered": Mode(GROUPED, form="scattered"),
    "grouped_k": Mode((None, GROUPED[1]), form="k"),
    "grouped_masked": Mode(GROUPED, form="masked"),
    "loss_heads": Mode(heads=True),
    "loss_heads_graphs": Mode(heads=True, way="graphs"),
    **{f"grouped_{form}_graphs": Mode((None, *GROUPED[-2:]), way="graphs", form=form) for form in FORMS},
}
CAPTURES = threading.Lock()
"""torch captures one graph at a time, and forgets graphs while none is captured."""


# -- threads -------------------------------------------------------------------------------------------------------


class Streams:
    """A mode's streams: two for each thread, and one for all. On the CPU there are none, and nothing to wait for."""

    def __init__(self, device: str, threads: int, priorities: bool) -> None:
        self.there = device == "cuda"
        count = 2 * threads + 1 if self.there else 0
        self._all = [torch.cuda.Stream(priority=-(i % 2) if priorities else 0) for i in range(count)]
        self._threads = threads

    def of(self, thread: int) -> list[Any]:
        """Its own, another of its own, and the shared one."""
        return [self._all[thread], self._all[self._threads + thread], self._all[-1]] if self.there else [None]

    @staticmethod
    def on(stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if stream is not None else nullcontext()

    @staticmethod
    def wait(streams: Iterable[Any]) -> None:
        for stream in streams:
            if stream is not None:
                stream.synchronize()


@dataclass
class Captured:
    """A graph of some products, and their results, which each replay writes anew."""

    graph: Any
    made: list[tuple[Product, Results]]
    rng: random.Random

    def replay(self) -> None:
        for p, results in self.made:
            p.renew(self.rng)
            for x in results:
                x.fill_(float("nan"))
        if self.graph is not None:
            self.graph.replay()
        else:
            for p, results in self.made:
                p(results)


def captured(selected: list[Product], stream: Any, rng: random.Random) -> Captured:
    """The products as one graph, with results of its own or in memory that was there."""
    made = [(p.for_graph(), p.empty() if i % 2 else None) for i, p in enumerate(selected)]
    if stream is None:
        return Captured(None, [(p, outs or p.empty()) for p, outs in made], rng)
    stream.synchronize()
    with CAPTURES:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = [(p, p(outs)) for p, outs in made]
    return Captured(graph, results, rng)


class Worker:
    """One thread: does one step after another until the time is over, and counts what it gave."""

    def __init__(self, number: int, mode: Mode, there: list[Product], shared: list[Any], graphs: float, seed: int,
                 streams: Streams, watchdog: Watchdog) -> None:  # fmt: skip
        self.number, self.mode, self.products, self.shared = number, mode, there, shared
        self.share_of_graphs, self.rng, self.streams = graphs, random.Random(seed), streams.of(number)
        self.watchdog, self.counts, self.errors = watchdog, Counter[str](), list[str]()
        self.own: list[Any] = []

    def run(self, until: float) -> None:
        step = {"calls": self.calls, "prepared": self.prepared, "graphs": self.graphs}[self.mode.way]
        with Streams.on(self.streams[0]):
            while time.monotonic() < until:
                try:
                    step()
                except Exception as error:
                    text = f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
                    doing = self.watchdog.now.get(self.number, (0.0, "nothing"))[1]
                    if lasting(error):
                        self.watchdog.leave(BROKEN, f"{text}; worker {self.number}: {doing}")
                    self.counts["errors"] += 1
                    self.errors.append(f"{text} ({doing})")
            with CAPTURES:  # graphs go while none is captured
                self.own.clear()
        self.watchdog.gone(self.number)

    def at(self, what: str, *which: Product) -> None:
        self.watchdog.at(self.number, f"{what} of {' and '.join(map(str, which))}")

    def judge(self, made: Iterable[tuple[Product, Results]]) -> None:
        for p, results in made:
            self.counts += p.judge(results)

    def calls(self) -> None:
        """Four of one product, one behind the other, half of them into NaN; and now and then a graph of its own."""
        p = self.rng.choice(self.products)
        self.at("calls", p)
        outs = [p.empty() if self.rng.random() < 0.5 else None for _ in range(4)]
        made = [(p, p(out)) for out in outs]
        if self.streams[0] is not None and self.rng.random() < self.share_of_graphs:
            self.at("a capture", p)
            one = captured([p], self.streams[0], self.rng)
            one.replay()
            one.replay()
            made += one.made
            self.at("calls and replays", p)
            self.streams[0].synchronize()
            self.judge(made)
            with CAPTURES:
                made.clear()
                del one
            return
        self.at("the end of calls", p)
        Streams.wait(self.streams[:1])
        self.judge(made)

    def prepared(self) -> None:
        """A few runs in flight: this thread's own into NaN, on any stream, and everybody's, all into the same array."""
        if len(self.own) < 4:
            p = self.rng.choice(self.products)
            self.at("preparing", p)
            outs = p.empty()
            self.own.append((p, p.prepare(outs), outs))
            Streams.wait(self.streams[:1])
        made = []
        self.at("prepared runs", *(p for p, *_ in self.own))
        for p, run, outs in self.own:
            with Streams.on(self.rng.choice(self.streams)):
                for x in outs:
                    x.fill_(float("nan"))
                run()
                made.append((p, [x.clone() for x in outs]))
        p, run, outs = self.rng.choice(self.shared)
        self.at("everybody's prepared run", p)
        for _ in range(3):
            run()
        made.append((p, [x.clone() for x in outs]))
        self.at("the end of prepared runs", *(p for p, *_ in self.own), p)
        Streams.wait(self.streams)
        self.judge(made)
        if self.rng.random() < 0.1:
            with CAPTURES:
                self.own.pop(self.rng.randrange(len(self.own)))

    def graphs(self) -> None:
        """Graphs of one to three products, captured on one stream, in flight at once on others."""
        if len(self.own) == 4 and self.rng.random() < 0.2:
            with CAPTURES:
                self.own.pop(self.rng.randrange(4))
        if len(self.own) < 4:
            selected = self.rng.choices(self.products, k=self.rng.randint(1, 3))
            self.at("a capture", *selected)
            self.own.append(captured(selected, self.streams[0], self.rng))
        made = []
        self.at("replays", *(p for one in self.own for p, _ in one.made))
        for one in self.own:
            with Streams.on(self.rng.choice(self.streams)):
                one.replay()
                made += [(p, [x.clone() for x in results]) for p, results in one.made]
        Streams.wait(self.streams)
        self.judge(made)


# -- modes ---------------------------------------------------------------------------------------------------------


def run_mode(
    name: str, *, device: str, seconds: float, seed: int, threads: int = 8, count: int = 12, graphs: float = 0.1,
    control: bool = False, patience: float = 60,
) -> Result:  # fmt: skip
    """{"runs", "wrong", "different", "errors"}: how many of a mode's runs within `seconds`; and up to three errors."""
    mode, rng = MODES[name], random.Random(f"{name} {seed}")
    some: Iterable[Product]
    if mode.heads and not control:
        some = drawn_heads(device, count, rng)
    elif mode.form and not control:
        some = drawn_groups(mode.form, mode.configs, device, count, rng)
    else:
        some = drawn(mode.configs, mode.epilogues, mode.ragged, device, count, rng, control)
    counts = Counter[str](runs=0, wrong=0, different=0, errors=0)
    with Watchdog(patience, f"mode {name}, seed {seed}, {threads} threads") as watchdog:
        there = expected(some, lambda what: watchdog.at(-1, what))
        for p in there:  # what is wrong alone is wrong at once, with the same bits
            counts["wrong"] += any(map(judges.wrong, p.isolated_results, p.wants, p.bounds))
        shared = []
        if mode.way == "prepared":
            shared = [(p, p.prepare(outs), outs) for p in there[:4] for outs in [p.empty()]]
        if device == "cuda":
            torch.cuda.synchronize()
        watchdog.gone(-1)
        streams, until = Streams(device, threads, mode.priorities), time.monotonic() + seconds
        workers = [
            Worker(i, mode, there, shared, graphs, rng.getrandbits(32), streams, watchdog) for i in range(threads)
        ]
        running = [threading.Thread(target=worker.run, args=(until,)) for worker in workers]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    counts = sum((worker.counts for worker in workers), counts) + Counter()
    result: Result = {key: counts[key] for key in ("runs", "wrong", "different", "errors")}
    errors = [text for worker in workers for text in worker.errors]
    return {**result, "first_errors": errors[:3]} if errors else result


def keep(actual_results: dict[str, Result], args: argparse.Namespace) -> None:
    """Into the file of --json."""
    if args.json:
        about = {**surroundings(args.device), "seed": args.seed}
        args.json.write_text(json.dumps({"where": about, "modes": actual_results}, indent=1) + "\n")


def run_all(names: list[str], args: argparse.Namespace) -> dict[str, Result]:
    """Every mode for its share of the time, in child processes."""
    actual_results: dict[str, Result] = {}
    share = args.seconds / len(names)
    lock = threading.Lock()

    def told(group: list[str], result: Result) -> None:
        name = group[result.pop("item")]
        with lock:
            before = actual_results.setdefault(name, {"runs": 0, "wrong": 0, "different": 0, "errors": 0})
            actual_results[name] = {**before, **result, **{key: before[key] + result.get(key, 0) for key in
                                                  ("runs", "wrong", "different", "errors")}}  # fmt: skip
            keep(actual_results, args)  # a run that is cut off leaves what it has counted
        print(name, actual_results[name], flush=True)

    def child(group: list[str], process: int) -> None:
        def command(first: int) -> list[str]:
            passed = ["--only", ",".join(group[first:]), "--seconds", share, "--seed", args.seed + process,
                      "--device", args.device, "--threads", args.threads, "--count", args.count,
                      "--graphs", args.graphs, "--patience", args.patience]  # fmt: skip
            return [sys.executable, __file__, "--child", *map(str, passed), *["--control"] * args.control]

        supervise(command, len(group), share + args.patience + 300, lambda result: told(group, result))

    for processes in (1, 2):
        if group := [name for name in names if MODES[name].processes == processes]:
            count = processes * args.processes
            children = [threading.Thread(target=child, args=(group, i)) for i in range(count)]
            for thread in children:
                thread.start()
            for thread in children:
                thread.join()
    return {name: actual_results[name] for name in names if name in actual_results}


def bad(result: Result) -> bool:
    """Whether a mode's result is anything but right."""
    return bool(result["wrong"] or result["different"] or result["errors"] or "died" in result or not result["runs"])


def table(actual_results: dict[str, Result]) -> str:
    """One line a mode."""
    lines = [f"{'mode':26}{'runs':>9}{'wrong':>7}{'different':>11}{'errors':>8}"]
    for name, r in actual_results.items():
        numbers = f"{name:26}{r['runs']:9}{r['wrong']:7}{r['different']:11}{r['errors']:8}"
        lines.append(numbers + "".join(f"  {x}" for x in (r.get("died"), *r.get("first_errors", ())) if x))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="in all, beside compilation")
    parser.add_argument("--only", default="", help=f"modes, by commas: {', '.join(MODES)}")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1, help="that run every mode at once")
    parser.add_argument("--count", type=int, default=12, help="products of a mode")
    parser.add_argument("--graphs", type=float, default=0.1, help="share of steps with a capture, where modes call")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--patience", type=float, default=60, help="seconds without a step after which it hangs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--control", action="store_true", help="torch.mm in gemmsmith's place")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(MODES)
    if unknown := set(names) - set(MODES):
        parser.error(f"--only: got {', '.join(sorted(unknown))}; use some of {', '.join(MODES)}")
    args.seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    if args.child:
        for i, name in enumerate(names):
            say({"at": i})
            same = ("device", "seconds", "seed", "threads", "count", "graphs", "control", "patience")
            say(run_mode(name, **{key: getattr(args, key) for key in same}))
        return 0
    print(f"seed {args.seed}", flush=True)
    actual_results = run_all(names, args)
    print(table(actual_results))
    return int(len(actual_results) < len(names) or any(map(bad, actual_results.values())))


if __name__ == "__main__":
    sys.exit(main())
