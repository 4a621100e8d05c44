"""The seconds of starting: imports and a command, each in processes of their own, alternating; needs no GPU.

python -m benchmarks.speed.startup --json benchmarks/results/startup-cpu.json
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version

from benchmarks.timing import options, save

COMMANDS = {
    "python": ["-c", ""],
    "import numpy": ["-c", "import numpy"],
    "import gemmsmith": ["-c", "import gemmsmith"],
    "import gemmsmith, gemm": ["-c", "from gemmsmith import gemm"],
    "gemmsmith --version": ["-m", "gemmsmith", "--version"],
    "import torch": ["-c", "import torch"],
    "import gemmsmith.torch": ["-c", "import gemmsmith.torch"],
}
"""Arguments of Python, by what they are called."""
ROUNDS = 15


def seconds(arguments: list[str]) -> float:
    """Return the wall-clock seconds of one process."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def measured(rounds: int = ROUNDS) -> list[dict[str, object]]:
    """Return a row a command: the least seconds of alternating rounds, after one that reads the files from disk."""
    times = [{name: seconds(x) for name, x in COMMANDS.items()} for _ in range(1 + rounds)]
    return [{"what": name, "seconds": min(t[name] for t in times[1:]), "rounds": rounds} for name in COMMANDS]


def cpu() -> str:
    """Return the processor's name."""
    with open("/proc/cpuinfo") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "an unnamed CPU")


def main() -> None:
    arguments = options(__doc__).parse_args()
    rows = measured()
    for row in rows:
        print(f"{row['what']:24} {row['seconds']:.2f} s")
    packages = {name: version(name) for name in ("numpy", "torch")}
    cores = f"{os.cpu_count()} cores of {cpu()}"
    save(arguments.json, rows, {"gpu": "none", "cpu": cores, "python": platform.python_version(), **packages})


if __name__ == "__main__":
    main()
