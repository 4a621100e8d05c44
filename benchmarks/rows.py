"""Read and write files of measured rows; those in benchmarks/results by name, without suffixes.

A file is JSON with `machine` (the environment) and `rows`, or numpy arrays (.npz); large ones are compressed (.xz).
All sweeps of configs are in one file, whose `machine` is by name, with a row for each config that was timed.
"""

from __future__ import annotations

import io
import json
import lzma
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
SWEEPS = RESULTS / "sweeps.json.xz"
Row = dict[str, Any]


def names() -> list[str]:
    """Return the names of all results, sorted."""
    files = {path.name.partition(".")[0] for path in RESULTS.iterdir() if path.suffix != ".md" and path != SWEEPS}
    return sorted(files | read(SWEEPS)["machine"].keys())


def find(name: str) -> Path:
    """Return the path of the file in benchmarks/results that has these results."""
    return SWEEPS if name.startswith("sweep-") else next(RESULTS.glob(f"{name}.*"))


def load(name: str) -> dict[str, Any]:
    """Return results by name."""
    content = read(find(name))
    if find(name) == SWEEPS:
        rows = [row for row in content["rows"] if row["sweep"] == name]
        return {"machine": content["machine"][name], "rows": rows}
    return content


def read(path: Path) -> dict[str, Any]:
    """Return a file of rows."""
    content: dict[str, Any] = json.loads(_read_bytes(path))
    return content


def read_arrays(path: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return a file of arrays."""
    arrays: Mapping[str, np.ndarray[Any, Any]] = np.load(io.BytesIO(_read_bytes(path)))
    return arrays


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file of rows, a line each."""
    head = json.dumps({name: x for name, x in content.items() if name != "rows"})
    lines = ",\n".join(map(json.dumps, content["rows"]))
    _write_bytes(path, f'{head[:-1]}, "rows": [\n{lines}\n]}}\n'.encode())


def write_builtin_table(file: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """Write the table of configs that the package ships, sorted by operands and sizes, a line for each layer."""
    table: dict[str, dict[str, dict[int, str]]] = {}
    for r in sorted(rows, key=lambda r: (r.get("operands", "16 bits"), r["n"], r["k"], r["m"])):
        layers = table.setdefault(r.get("operands", "16 bits"), {})
        layers.setdefault(f"{r['n']}x{r['k']}", {})[r["m"]] = r["config"]
    text = json.dumps({"machine": machine, "configs": table}, separators=(",", ":"))
    file.write_text(re.sub(r'("\w+x\w+":\{)', r"\n\1", text) + "\n")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a file of arrays."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    _write_bytes(path, file.getvalue())


def by_shape(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of a sweep in groups that were timed together, against the same time of torch."""
    return [
        list(group) for _, group in groupby(rows, lambda r: (r["m"], r["n"], r["k"], r.get("layout"), r["torch_us"]))
    ]


def _read_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME) if path.suffix == ".xz" else data)
