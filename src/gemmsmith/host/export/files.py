"""Writing a plan's kernel and its C header to a folder."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.scalars import round_up
from gemmsmith.host.export.header import check_name, cubin_name, make_header, make_tvm_ffi, with_identifiers
from gemmsmith.host.export.program import Program
from gemmsmith.host.export.search import explore_choice
from gemmsmith.host.export.signature import MAX_DRAWN, Signature, check_alike, served_rows
from gemmsmith.host.planned_gemm import PlannedGemm


def export(plans: Sequence[PlannedGemm], folder: str | Path, name: str, tvm_ffi: bool = False) -> Path:
    """Write the files that `Plan.export` documents, and return the header's path.

    `plans`: each serves M up to its own, the last every larger M.
    """
    check_name(name)
    signatures, folder = sorted(map(Signature.of, plans), key=lambda x: x.rows), Path(folder)
    check_alike(signatures)
    try:
        seconds = {x.name: x.second for x in signatures[0].arrays if x.second}
        program = Program(explore_choice(signatures), seconds)
    except NotImplementedError as error:
        raise ArgumentError(f"plan: got one whose arguments need {error}; it cannot be exported yet") from None
    if not program.slots:
        raise ArgumentError("plan: got one whose arrays no header can bind; align their rows to 16 bytes")
    for signature, rows in zip(signatures, served_rows(signatures), strict=True):
        check(signature, program, rows)
    kernels = dict.fromkeys((*(x.planned.kernel for x in signatures), *program.kernels))
    cubins = {x: compile_source(x.source, x.name, x.chip.target).cubin for x in kernels}
    texts = {f"{name}.h": make_header(name, signatures, program, cubins)}
    texts[f"{name}.json"] = with_identifiers(json.dumps(_description(signatures, program), indent=1) + "\n")
    if tvm_ffi:
        texts[f"{name}_tvm_ffi.cc"] = make_tvm_ffi(name, signatures[0])
    folder.mkdir(parents=True, exist_ok=True)
    for i, (kernel, cubin) in enumerate(cubins.items()):
        path = folder / cubin_name(name, i)
        path.write_bytes(cubin)
        texts[path.with_suffix(".cu").name] = kernel.source
    for file, text in texts.items():
        (folder / file).write_text(text, "utf-8")
    return folder / f"{name}.h"


CHECKS = 16
"""Problems of which the launches are compared with Python's before a header is written, for each plan. Chosen."""


def check(signature: Signature, program: Program, rows: range) -> None:
    """Compare the launches of random problems, of `rows` rows, with those that Python binds anew.

    Raises ArgumentError if they differ, as they do if an epilogue reads the sizes of what it gets.
    """
    dice, step = random.Random(0), next(x.multiple for x in signature.variables if x.name == "m")
    own = range(round_up(max(rows.start, 1), step), min(rows.stop, rows.start + MAX_DRAWN), step)
    for _ in range(CHECKS):
        values = signature.draw(dice)
        if values["m"] not in rows and own:
            values = signature.draw(dice, m=dice.choice(own))
        numbers = program.evaluate({**values, "workspace": 0, "flags": 0})
        if values["m"] not in rows or numbers["error"] or signature.has_single(values):
            continue
        try:
            differs = program.differences(numbers, signature.rebound(values), signature.addresses(values))
        except ArgumentError as error:
            differs = f"{error}"
        if differs:
            sizes = {x: values[x] for x in signature.sizes}
            raise ArgumentError(
                f"plan: got one whose kernel depends on its sizes, as with {sizes} {differs}. No header can serve it; "
                "pass sizes that an epilogue reads as numbers"
            )


def _description(signatures: Sequence[Signature], program: Program) -> dict[str, Any]:
    """Return what the JSON says: the configs and the most rows that each serves, the arguments, and the kernels."""
    signature = signatures[0]
    return {
        "configs": [[x[-1], f"{y.planned.config}"] for x, y in zip(served_rows(signatures), signatures, strict=True)],
        "chip": signature.planned.kernel.chip.target,
        "variables": [
            {"name": x.name, "least": 0 if x.name in signature.empties else x.least, "most": x.most}
            for x in signature.variables
        ],
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
