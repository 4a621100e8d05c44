"""Long GPU tests in processes of their own: a hang, a crash or a lasting CUDA error ends one item, and the rest go on.

A child runs numbered items. It prints a line of JSON before each, {"at": i}, and one after it, its result; all else
that it prints is passed on. A child that dies is started again behind the item at which it died.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gemmsmith

ROOT = Path(__file__).parents[2]
BROKEN, HANG = 3, 4
"""Exit codes: the GPU's context is of no use any more; something has not moved for too long."""
DEATHS = {BROKEN: "CUDA error", HANG: "hang"}

Result = dict[str, Any]


class Watchdog:
    """Ends the process with HANG once a worker has not moved for `patience` seconds, and says what all were doing."""

    def __init__(self, patience: float, title: str) -> None:
        self.patience, self.title = patience, title
        self.now: dict[int, tuple[float, str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def at(self, worker: int, what: str) -> None:
        """Worker number `worker` begins this."""
        self.now[worker] = (time.monotonic(), what)

    def gone(self, worker: int) -> None:
        """It has ended."""
        self.now.pop(worker, None)

    def leave(self, code: int, why: str) -> None:
        """Ends the process."""
        print(f"{DEATHS[code]}: {self.title}: {why}", flush=True)
        os._exit(code)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._stop.wait(1):
            # this thread needs the GIL, which may be held by a call that hangs; that one does not
            faulthandler.dump_traceback_later(self.patience + 15, exit=True)
            since = time.monotonic() - self.patience
            if any(began < since for began, _ in list(self.now.values())):
                self._bark()

    def _bark(self) -> None:
        print(f"HANG: {self.title}", flush=True)
        for worker, (began, what) in sorted(self.now.items()):
            print(f"  worker {worker}, {time.monotonic() - began:.0f} s: {what}", flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(HANG)


def lasting(error: BaseException) -> bool:
    """Whether it leaves no use of the GPU in this process."""
    return any(word in str(error) for word in ("CUDA error", "CUDA_ERROR", "illegal", "launch failure"))


def say(line: Result) -> None:
    """A child's line to its parent."""
    print(json.dumps(line), flush=True)


def supervise(command: Callable[[int], list[str]], count: int, silence: float, told: Callable[[Result], None]) -> None:
    """Runs `command(first)`, a child that does the items from `first` to `count`, until all are done.

    `told` gets every result; where a child died, {"item": i, "died": why}. A child that prints nothing for `silence`
    seconds is killed.
    """
    first, environment = 0, {"OMP_NUM_THREADS": "2", **os.environ}  # there are several
    while first < count:
        done, at = first, first
        child = subprocess.Popen(command(first), stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        assert child.stdout
        timer = _killer(child, silence)
        for line in child.stdout:
            timer.cancel()
            if not line.startswith("{"):
                print(line, end="", flush=True)
            elif (said := json.loads(line)).keys() == {"at"}:
                at = first + said["at"]
            else:
                told({"item": at, **said})
                done = at + 1
            timer = _killer(child, silence)
        timer.cancel()
        code = child.wait()
        if code == 0:
            return
        told({"item": at, "died": DEATHS.get(code, f"exit code {code}")})
        first = max(at, done) + 1


def _killer(child: subprocess.Popen[str], silence: float) -> threading.Timer:
    timer = threading.Timer(silence, child.kill)
    timer.daemon = True
    timer.start()
    return timer


def surroundings(device: str) -> Result:
    """Chip, driver, versions and command: what a kept result says of where it is from."""
    about: Result = {"command": " ".join(sys.argv), "python": platform.python_version(), "torch": torch.__version__,
                     "gemmsmith": gemmsmith.__version__, "device": device}  # fmt: skip
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        about["chip"], about["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
        about["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return about
