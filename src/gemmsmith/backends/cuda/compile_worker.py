"""A process that compiles kernels into the cubin cache: `python -m gemmsmith.backends.cuda.compile_worker`.

It reads a JSON list of [source, name, architecture] from stdin, and prints a line after each.
"""

from __future__ import annotations

import json
import sys

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.core.errors import CompileError

if __name__ == "__main__":
    for source, name, target in json.load(sys.stdin):
        try:
            compile_source(source, name, target)
        except CompileError:  # the same error is raised when the kernel is loaded
            pass
        print(name, flush=True)
