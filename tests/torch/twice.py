"""Programs that run twice, each time in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TELLS = """
found = counters["inductor"]
print("hits", found["fxgraph_cache_hit"], "misses", found["fxgraph_cache_miss"], a.grad.sum().item())
"""


def assert_the_second_finds_both_graphs(program: str, cache: Path) -> None:
    """Of a program that compiles a forward and a backward graph, by Inductor, and leaves a gradient of `a`."""
    program = f"from torch._dynamo.utils import counters\n{program}{TELLS}"
    places = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    first, second = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=places).stdout
        for _ in range(2)
    )
    assert first.startswith("hits 0 misses 2")
    assert second.startswith("hits 2 misses 0")
    assert first.split()[-1] == second.split()[-1]
