"""The command of the tool."""

from __future__ import annotations

import argparse
from pathlib import Path

import gemmsmith
from benchmarks.export.files import export
from benchmarks.suite import specs
from gemmsmith import Config


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a C header for a GEMM of bf16, whose config suits these sizes.")
    parser.add_argument("sizes", type=lambda text: tuple(map(int, text.split("x"))), help="MxNxK")
    parser.add_argument("--layout", default="nt", help="A's and B's: row-major (n) or column-major (t)")
    parser.add_argument("--config", type=Config.parse, help="instead of the chosen one")
    parser.add_argument("--out", type=Path, required=True, help="the folder")
    parser.add_argument("--name", default="gemm", help="the prefix of the functions")
    given = parser.parse_args()
    plan = gemmsmith.plan(*specs(given.sizes, layout=given.layout), config=given.config)
    print(export(plan, given.out, given.name))


if __name__ == "__main__":
    main()
