"""Writing a plan's kernel and its C header to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.core.errors import ArgumentError
from gemmsmith.host.export.header import make_header
from gemmsmith.host.export.program import Program
from gemmsmith.host.export.trace import Signature
from gemmsmith.host.planned_gemm import PlannedGemm


def export(planned: PlannedGemm, folder: str | Path, name: str) -> Path:
    """Write a plan's C header with its cubin, the CUDA source, the cubin, and a JSON of the arguments to a folder.

    See `Plan.export`. Return the header's path.
    """
    signature, folder = Signature.of(planned), Path(folder)
    try:
        program = Program(signature.explore())
    except NotImplementedError as error:
        raise ArgumentError(f"plan: got one whose arguments need {error}; it cannot be exported yet") from None
    header, kernel = make_header(name, signature, program), planned.kernel
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.cubin").write_bytes(compile_source(kernel.source, kernel.name, kernel.chip.target).cubin)
    (folder / f"{name}.cu").write_text(kernel.source, "utf-8")
    (folder / f"{name}.json").write_text(json.dumps(_description(signature, program), indent=1) + "\n", "utf-8")
    path = folder / f"{name}.h"
    path.write_text(header, "utf-8")
    return path


def _description(signature: Signature, program: Program) -> dict[str, Any]:
    """Return what the JSON says: the arguments, and the kernels."""
    planned = signature.planned
    return {
        "config": f"{planned.config}",
        "chip": planned.kernel.chip.target,
        "variables": [{"name": x.name, "least": x.least, "most": x.most} for x in signature.variables],
        "arrays": [
            {"name": x.name, "dtype": f"{x.info.dtype}", "is_result": x.info.writable, "strides": x.strides,
             "shape": [f"{size} / {by}" if by > 1 else size for size, by in x.sizes]}
            for x in signature.arrays
        ],
        "numbers": signature.numbers,
        "kernels": [
            {"name": x.name, "threads": x.threads, "cluster": x.cluster[0], "shared_bytes": x.shared_bytes,
             "parameters": dict(zip((p.name for p in x.parameters), x.parameter_kinds, strict=True))}
            for x in program.kernels
        ],
    }  # fmt: skip
