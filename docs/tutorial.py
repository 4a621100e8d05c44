"""What docs/learn takes from the simulator: timelines, their numbers, and the reports of kernels with an error.

    python docs/tutorial.py FOLDER

draws the timelines to FOLDER; docs/generate.py writes the tables and the reports.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
sys.path.insert(0, str(ROOT))

from docs import figures  # noqa: E402

import gemmsmith  # noqa: E402
from gemmsmith import Config  # noqa: E402
from gemmsmith.backends.sim.execute.counters import Counters  # noqa: E402
from gemmsmith.backends.sim.report.timeline import Timeline, plot_timelines  # noqa: E402


class Case(NamedTuple):
    """A kernel of a picture.

    Attributes:
        title: Its title.
        sizes: M, N, K. Four CTAs of a persistent kernel are resident, as in all simulations.
        config: Its config.
    """

    title: str
    sizes: tuple[int, int, int]
    config: Config


MULTISTAGE = Config("mma_multistage", (256, 128, 64), (1, 1), 3)
TMA = Config("tma", (128, 256, 64), (1, 1), 4)
COOPERATIVE = replace(TMA, design="cooperative")
NARROW = replace(COOPERATIVE, tile=(64, 256, 64), consumers=1)
CASES = {
    "tma": (
        Case("mma_multistage: all threads copy and multiply", (256, 256, 1024), MULTISTAGE),
        Case("tma: one thread issues the copies", (256, 256, 1024), TMA),
    ),
    "wgmma": (
        Case("mma_multistage: mma.sync of fragments in registers", (256, 256, 256), MULTISTAGE),
        Case("tma: wgmma of tiles in shared memory", (256, 256, 256), TMA),
    ),
    "pipelines": (
        Case("two stages", (256, 256, 1024), replace(TMA, stages=2)),
        Case("four stages", (256, 256, 1024), TMA),
    ),
    "warp-specialization": (
        Case("tma: a consumer issues the copies between two wgmma groups", (256, 1024, 512), TMA),
        Case("cooperative: a producer warp issues them", (256, 1024, 512), COOPERATIVE),
    ),
    "clusters": (
        Case("no cluster: each CTA loads both tiles", (256, 512, 1024), NARROW),
        Case("cluster 2x1: each of two CTAs loads half of B and multicasts it", (256, 512, 1024),
             replace(NARROW, cluster=(2, 1))),
    ),
    "schedules": (
        Case("cooperative: two warpgroups share tiles of 128x256", (512, 1024, 256), COOPERATIVE),
        Case("pingpong: each has its own tiles of 128x128", (512, 1024, 256),
             Config("pingpong", (128, 128, 64), (1, 1), 6)),
    ),
    "epilogue-overlap": (
        Case("alias_epilogue: stages are loaded when the stores have read them", (512, 1024, 256),
             replace(COOPERATIVE, alias_epilogue=True)),
        Case("cooperative: stages are loaded during the epilogue", (512, 1024, 256), COOPERATIVE),
    ),
}  # fmt: skip
"""The kernels of each page's picture."""


COLUMNS = "kernel | cycles | tensor core busy | MMAs | wavefronts | sectors"


def run(case: Case, counters: Counters | None = None) -> gemmsmith.Simulation:
    """Simulate a case."""
    m, n, k = case.sizes
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(x).astype(ml_dtypes.bfloat16) for x in ((m, k), (n, k)))
    return gemmsmith.plan(a, b.T, config=case.config, backend="sim").simulate(a, b.T, counters=counters, record=True)


@cache
def simulate(case: Case) -> tuple[Timeline, str]:
    """Return a case's timeline, and its row of the table."""
    counters = Counters()
    timeline = run(case, counters).timeline
    spans = [x for x in timeline.spans if x.cta == 0 and x.row == "tensor core"]
    busy = len({cycle for x in spans for cycle in range(x.start, x.end)})  # those of mma.sync overlap
    lines = counters.lines(*counters.kernels)
    counts = (sum(x.instructions for x in lines if x.macs), sum(x.wavefronts for x in lines),
              sum(x.sectors for x in lines))  # fmt: skip
    cells = case.title.partition(":")[0], timeline.cycles, f"{busy / timeline.cycles:.0%}", *counts
    return timeline, " | ".join(map(str, cells))


TABLE = re.compile(r"(?<=<!-- generated: timeline -->\n).*?(?=<!-- end -->)", re.DOTALL)
REPORT = re.compile(
    r"(In\s\[[\w./]+\]\(([^)]*)\),\s(?:delete\s`([^`]+)`|replace\s`([^`]+)`\sby\s`([^`]+)`)\.\sThen\s"
    r"`gemmsmith\s([^`]+)`\sreports:\n\n```\n)(.*?)(?=\n```)",
    re.DOTALL,
)
"""A change of a file, a command, and the beginning of what it prints then."""


def refreshed(page: Path) -> str:
    """Return a page's text with the numbers of its picture and its reports as they are today."""

    def report(x: re.Match[str]) -> str:
        return x.group(1) + broken(*change_of(x, page))

    text = TABLE.sub(lambda _: f"\n{table(page.stem)}\n\n", page.read_text())
    return REPORT.sub(report, text)


def change_of(report: re.Match[str], page: Path) -> tuple[Path, str | None, str, str, str]:
    """Return the arguments of `broken` for a match of REPORT in a page."""
    _, file, deleted, old, new, command, _ = report.groups()
    return (page.parent / file).resolve(), deleted, old, new, command


def table(page: str) -> str:
    """Return the numbers of a page's picture."""
    return figures.table(COLUMNS, (simulate(case)[1] for case in CASES[page]))


def run_changed(
    file: Path, deleted: str | None, old: str, new: str, *arguments: str
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `gemmsmith` with these arguments and a changed file of its source.

    `deleted`: a line that is deleted, without its indentation; None: `old` is replaced by `new`. Either is in the file
    once.
    """
    lines = file.read_text().splitlines(keepends=True)
    changed = [i for i, x in enumerate(lines) if (x.strip() == deleted if deleted else old in x)]
    assert len(changed) == 1, (file, deleted or old, changed)
    lines[changed[0]] = "" if deleted else lines[changed[0]].replace(old, new)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
        (folder / file.relative_to(SOURCE)).write_text("".join(lines))
        command = [sys.executable, "-m", "gemmsmith", *arguments]
        env = os.environ | {"PYTHONPATH": name}
        return subprocess.run(command, cwd=folder, text=True, capture_output=True, env=env)


def broken(file: Path, deleted: str | None, old: str, new: str, command: str) -> str:
    """Return the first sentence that a command prints if a file has been changed: see `run_changed`."""
    done = run_changed(file, deleted, old, new, *command.split(), "--json")
    outcome = json.loads(done.stdout)
    if done.returncode == 1:
        first = outcome["hazards"][0]
        text = f"{first['kind']} at {first['location']}: {first['message']}"
    else:
        text = f"Error: {outcome['error']['message']}"
    sentence, rest, _ = text.partition("; ")
    return textwrap.fill(sentence + "; ..." * bool(rest), 88, subsequent_indent="    ")


def draw(folder: Path) -> None:
    """Draw the pictures."""
    for page, cases in CASES.items():
        plot_timelines(folder / f"learn-{page}.png", {case.title: simulate(case)[0] for case in cases})


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
