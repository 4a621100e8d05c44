"""A benchmark in portions: some of its jobs in each run, as many as there is time for, added to earlier runs' rows.

`--part i/n` takes every n-th job from the i-th on, so each part has some of all kinds; `--resume` keeps the rows of
`--json` and leaves their jobs out; `--seconds` starts no job after so many.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

Job = TypeVar("Job", bound=Hashable)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", default="0/1", help="i/n: every n-th job, from the i-th on")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --json, and add the missing jobs'")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no job after so many")


def kept(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of earlier runs, if they are to be kept."""
    if arguments.resume and arguments.json and arguments.json.exists():
        rows: list[dict[str, Any]] = json.loads(arguments.json.read_text())["rows"]
        return rows
    return []


def missing(
    jobs: Sequence[Job], rows: Sequence[dict[str, Any]], job_of: Callable[[dict[str, Any]], Job], part: str
) -> list[Job]:
    """The part's jobs that have no row."""
    first, step = map(int, part.split("/"))
    done = {job_of(row) for row in rows}
    return [job for job in jobs[first::step] if job not in done]


def in_time(jobs: Sequence[Job], seconds: float, now: Callable[[], float] = time.perf_counter) -> Iterator[Job]:
    """The jobs, until so many seconds have passed; says how many are left."""
    begun = now()
    for i, job in enumerate(jobs):
        if now() - begun > seconds:
            print(f"{len(jobs) - i} of {len(jobs)} are left, for --resume", flush=True)
            return
        yield job
