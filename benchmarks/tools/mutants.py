"""Mutants of the library itself: one operator or constant changed at a time, and the share that the tests notice.

    python -m benchmarks.tools.mutants --count 300 --seed 1 --json mutants.json [--only tuning/model.py] [--jobs 1]

Mutants are drawn by seed from tuning/, tile_scheduler/, core/ and epilogue/; each runs in a copy of the sources. The
fast tests that may notice it (covering_tests.py) run until one fails, up to `--budget` seconds. `--map FOLDER` keeps
which test executes which line.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tools.covering_tests import FOLDERS, SOURCES, CoveringTests

PAIRS = [("Add", "Sub"), ("Lt", "LtE"), ("Gt", "GtE"), ("Eq", "NotEq"), ("And", "Or"), ("Mult", "FloorDiv")]
SWAPS = {x: getattr(ast, y) for a, b in PAIRS for x, y in [(a, b), (b, a)]} | {"Div": ast.Mult}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}


class Mutant(NamedTuple):
    """`before`, from `first` to `last` (line, byte) of a file of the package, becomes `after`."""

    path: str
    first: tuple[int, int]
    last: tuple[int, int]
    before: str
    after: str

    def source(self) -> bytes:
        """Return the file with the mutant in place, on as many lines as before."""
        lines = (SOURCES / self.path).read_bytes().splitlines(keepends=True)
        (top, left), (bottom, right) = self.first, self.last
        new = b"(" + self.after.encode() + b"\n" * (bottom - top) + b")"
        lines[top - 1 : bottom] = [lines[top - 1][:left] + new + lines[bottom - 1][right:]]
        return b"".join(lines)


def expressions(node: ast.AST) -> Iterator[Any]:
    """Yield the nodes to mutate: not annotations, decorators (which size caches), messages and representations."""
    yield node
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            is_text = isinstance(child, ast.Raise | ast.JoinedStr) or getattr(child, "name", "") == "__repr__"
            if isinstance(child, ast.AST) and not is_text and name not in ("annotation", "returns", "decorator_list"):
                yield from expressions(child)


def changes(node: Any) -> list[dict[str, Any]]:
    """Return the fields of a node that change, for each of its mutants."""
    match node:
        case ast.BinOp() | ast.BoolOp() if op := SWAPS.get(type(node.op).__name__):
            return [{"op": op()}]
        case ast.Compare(ops=ops):
            swapped = [(i, SWAPS.get(type(op).__name__)) for i, op in enumerate(ops)]
            return [{"ops": [*ops[:i], op(), *ops[i + 1 :]]} for i, op in swapped if op]
        case ast.UnaryOp(op=ast.Not()):
            return [{"op": ast.Not(), "operand": ast.UnaryOp(ast.Not(), node.operand)}]
        case ast.Name(id=name) if name in NAMES:
            return [{"id": NAMES[name]}]
        case ast.Attribute(attr=name) if name in NAMES:
            return [{"attr": NAMES[name]}]
        case ast.Constant(value=bool(x)):
            return [{"value": not x}]
        case ast.Constant(value=int(x)):
            return [{"value": y} for y in sorted({x + 1, 2 * x} - {x})]
        case ast.Constant(value=float(x)):
            return [{"value": 1.5 * x or 1.0}]
    return []


def mutants_of(path: Path) -> Iterator[Mutant]:
    for x in expressions(ast.parse(path.read_text())):
        for fields in changes(x):
            new = copy.copy(x)
            vars(new).update(fields)
            place = (x.lineno, x.col_offset), (x.end_lineno, x.end_col_offset)
            yield Mutant(str(path.relative_to(SOURCES)), *place, ast.unparse(x), ast.unparse(new))


def tried(m: Mutant, tests: CoveringTests, budget: float) -> dict[str, Any]:
    """Run the tests that may notice a mutant; return its row."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        package = shutil.copytree(SOURCES, Path(folder) / "gemmsmith")
        (package / m.path).write_bytes(m.source())
        for stale in (package / m.path).parent.glob(f"__pycache__/{Path(m.path).stem}.*"):
            stale.unlink()
        failed = tests.run(package, m.path, m.first[0], budget)
    return {**m._asdict(), "killed_by": failed[0] if failed else None, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="mutants of the files whose path contains this")
    parser.add_argument("--budget", type=float, default=40, help="seconds of tests per mutant")
    parser.add_argument("--map", type=Path, help="folder of a map, which is made if it is empty")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    paths = sorted(path for folder in FOLDERS for path in (SOURCES / folder).rglob("*.py"))
    everything = [m for path in paths for m in mutants_of(path)]
    drawn = random.Random(arguments.seed).sample(everything, min(arguments.count, len(everything)))
    drawn = [m for m in drawn if arguments.only in m.path]
    tests = CoveringTests(arguments.map or Path(tempfile.mkdtemp()))
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(lambda m: tried(m, tests, arguments.budget), drawn):
            rows.append(row)
            arguments.json.write_text(json.dumps(rows, indent=1))
            text = f"{row['path']}:{row['first'][0]}: {row['before']} -> {row['after']}"
            print(f"{len(rows):4} {row['seconds']:6} s  {text:80.80} {row['killed_by'] or 'SURVIVED'}", flush=True)
    killed = sum(row["killed_by"] is not None for row in rows)
    print(f"{killed} of {len(rows)} killed: {killed / max(len(rows), 1):.3f}")


if __name__ == "__main__":
    main()
