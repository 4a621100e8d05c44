"""Which tests execute which lines of the library, and runs of chosen tests on another copy of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Container, Sequence
from multiprocessing import get_context
from pathlib import Path

import ml_dtypes  # noqa: F401 # imported once, with numpy and pytest, before the forks
import pytest
from coverage import Coverage, CoverageData

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/gemmsmith"
FAST_TESTS = ["-q", "-n0", "-pno:cacheprovider", "--hypothesis-seed=0", "-mnot slow and not torch and not gpu"]
FOLDERS = ("tuning", "tile_scheduler", "core", "epilogue")
"""Folders of the library whose lines are looked at."""


class Run:
    """A plugin of pytest: runs tests in an order; notes their times, failures and, with coverage, executed lines.

    Tests of which neither `order` nor `skipped` knows run last.
    """

    def __init__(
        self, order: Sequence[str] = (), skipped: Container[str] = (), coverage: Coverage | None = None
    ) -> None:
        self.order, self.skipped, self.coverage = order, skipped, coverage
        self.times, self.failed = defaultdict[str, float](float), list[str]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        rank = {x: i for i, x in enumerate(self.order)}
        items[:] = sorted(
            (x for x in items if x.nodeid not in self.skipped), key=lambda x: rank.get(x.nodeid, len(rank))
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.coverage:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.times[report.nodeid] += report.duration
        self.failed += [report.nodeid] * report.failed

    def of(self, tree: Path, arguments: list[str], seconds: float) -> tuple[dict[str, float], list[str]]:
        """Run tests on the package in `tree` in a fork; return times and failures."""
        process = get_context("fork").Process(target=self._run, args=(tree, arguments))
        process.start()
        process.join(seconds)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
        result = tree / "tests.json"
        return json.loads(result.read_text()) if result.exists() else ({}, ["none: no end, or no import"])

    def _run(self, tree: Path, arguments: list[str]) -> None:
        os.setsid()
        log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = f"{tree}:{ROOT}"
        if self.coverage:
            self.coverage.start()
        if pytest.main([*FAST_TESTS, *arguments], plugins=[self]) in (0, 1):
            (tree / "tests.json").write_text(json.dumps([self.times, self.failed]))
        if self.coverage:
            self.coverage.save()


class CoveringTests:
    """Which test executes which line, and how long it takes, of a run of the fast tests that is kept in a folder."""

    def __init__(self, folder: Path) -> None:
        package, lines = folder / "gemmsmith", folder / "lines"
        if not lines.exists():
            shutil.copytree(SOURCES, package)
            coverage = Coverage(lines, source=[str(package / x) for x in FOLDERS])
            Run(coverage=coverage).of(folder, ["tests"], 3600)
        self.times, failed = json.loads((folder / "tests.json").read_text())
        self.passed = self.times.keys() - set(failed)
        self.by_line, data = dict[tuple[str, int], set[str]](), CoverageData(str(lines))
        data.read()
        for path in data.measured_files():
            for line, tests in data.contexts_by_lineno(path).items():
                self.by_line[str(Path(path).relative_to(package)), line] = self.passed & set(tests)

    def run(self, package: Path, path: str, line: int, budget: float) -> list[str]:
        """Return the test that fails, if any, of those that may notice a change of this line.

        They are those that execute it, or if it runs at import all of its folder and those that execute the file's
        other lines. First come those of the folder, then the others, the fastest first, while `budget` seconds last.
        """
        near, order = f"tests/{Path(path).parent}/", list[str]()
        tests = self.by_line.get((path, line), set())
        if not tests:
            of_file = (x for at, x in self.by_line.items() if at[0] == path)
            tests = {test for test in self.passed if test.startswith(near)}.union(*of_file)
        for test in sorted(tests, key=lambda test: (not test.startswith(near), self.times[test])):
            budget -= self.times[test]
            order += [test] * (budget >= 0)
        files = {test.partition("::")[0] for test in order if not test.startswith(near)}
        run = Run(order, self.times.keys() - order)
        return run.of(package.parent, ["-x", near, *files], 60 + 5 * sum(map(self.times.__getitem__, order)))[1]
