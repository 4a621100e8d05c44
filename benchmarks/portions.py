"""Benchmarks in parts: a run measures as many of its jobs as there is time for, and adds them to earlier rows.

`--part i/n` takes every n-th job from the i-th on, so that each part covers all kinds. `--resume` keeps the rows of
`--json` and skips their jobs. `--seconds` starts no job after this time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

from benchmarks.rows import read

Job = TypeVar("Job", bound=Hashable)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", default="0/1", help="i/n: every n-th job, from the i-th on")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --json, and add the missing jobs'")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no job after so many")


def load_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of earlier runs with --resume, otherwise none."""
    if arguments.resume and arguments.json and arguments.json.exists():
        rows: list[dict[str, Any]] = read(arguments.json)["rows"]
        return rows
    return []


def missing(
    jobs: Sequence[Job], rows: Sequence[dict[str, Any]], job_of: Callable[[dict[str, Any]], Job], part: str
) -> list[Job]:
    """Return the part's jobs that have no row."""
    first, step = map(int, part.split("/"))
    done = {job_of(row) for row in rows}
    return [job for job in jobs[first::step] if job not in done]


def in_time(jobs: Sequence[Job], seconds: float, now: Callable[[], float] = time.perf_counter) -> Iterator[Job]:
    """Yield the jobs until `seconds` have passed; print how many are left."""
    begun = now()
    for i, job in enumerate(jobs):
        if now() - begun > seconds:
            print(f"{len(jobs) - i} of {len(jobs)} are left, for --resume", flush=True)
            return
        yield job
