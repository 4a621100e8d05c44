"""Writing a plan's kernel and its C header to a folder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.core.errors import ArgumentError
from gemmsmith.host.export.header import make_header, with_identifiers
from gemmsmith.host.export.program import Program
from gemmsmith.host.export.trace import Signature
from gemmsmith.host.planned_gemm import PlannedGemm


def export(planned: PlannedGemm, folder: str | Path, name: str) -> Path:
    """Write the files that `Plan.export` documents, and return the header's path."""
    signature, folder = Signature.of(planned), Path(folder)
    try:
        program = Program(signature.explore(), {x.name: x.second for x in signature.arrays if x.second})
    except NotImplementedError as error:
        raise ArgumentError(f"plan: got one whose arguments need {error}; it cannot be exported yet") from None
    if not program.slots:
        raise ArgumentError("plan: got one whose arrays no header can bind; align their rows to 16 bytes")
    check(signature, program)
    header, kernel = make_header(name, signature, program), planned.kernel
    description = json.dumps(_description(signature, program), indent=1) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.cubin").write_bytes(compile_source(kernel.source, kernel.name, kernel.chip.target).cubin)
    (folder / f"{name}.cu").write_text(kernel.source, "utf-8")
    (folder / f"{name}.json").write_text(with_identifiers(description), "utf-8")
    path = folder / f"{name}.h"
    path.write_text(header, "utf-8")
    return path


CHECKS = 16
"""Problems of which the launches are compared with Python's before a header is written. Chosen."""


def check(signature: Signature, program: Program) -> None:
    """Compare the launches of random problems with those that Python binds anew.

    Raises ArgumentError if they differ, as they do if an epilogue reads the sizes of what it gets.
    """
    dice = random.Random(0)
    for _ in range(CHECKS):
        values = signature.draw(dice)
        numbers = program.evaluate({**values, "workspace": 0, "flags": 0})
        if numbers["error"] or signature.has_single(values):
            continue
        try:
            differs = program.differences(numbers, signature.rebound(values), signature.addresses(values))
        except ArgumentError as error:
            differs = f"{error}"
        if differs:
            sizes = {x: values[x] for x in signature.sizes}
            raise ArgumentError(f"plan: got one that no header serves, since with {sizes} {differs}")


def _description(signature: Signature, program: Program) -> dict[str, Any]:
    """Return what the JSON says: the arguments, and the kernels."""
    planned = signature.planned
    return {
        "config": f"{planned.config}",
        "chip": planned.kernel.chip.target,
        "variables": [{"name": x.name, "least": x.least, "most": x.most} for x in signature.variables],
        "arrays": [
            {"name": x.name, "dtype": f"{x.info.dtype}", "is_result": x.info.writable, "strides": x.strides,
             "shape": [f"ceil({size} / {by})" if by > 1 else size for size, by in x.sizes], "second": x.second}
            for x in signature.arrays
        ],
        "numbers": signature.numbers,
        "kernels": [
            {"name": x.name, "threads": x.threads, "cluster": x.cluster[0], "shared_bytes": x.shared_bytes,
             "parameters": dict(zip((p.name for p in x.parameters), x.parameter_kinds, strict=True))}
            for x in program.kernels
        ],
    }  # fmt: skip
