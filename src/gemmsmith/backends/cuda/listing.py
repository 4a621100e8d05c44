"""PTX, and SASS by NVIDIA's nvdisasm, as lists of instructions, with classes, Python source lines, and mainloops."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from importlib import metadata
from operator import and_
from pathlib import Path
from typing import Literal, NamedTuple

from gemmsmith.backends.cuda.compiler import compile_ptx, compile_source
from gemmsmith.core.errors import CompileError
from gemmsmith.core.frozen import cached_property
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.location import SourceLocation

Code = Literal["ptx", "sass"]


class InstructionClass(NamedTuple):
    """A class of instructions, and the regular expressions of their mnemonics in PTX and in SASS."""

    name: str
    ptx: str
    sass: str


INSTRUCTION_CLASSES = (
    InstructionClass("tensor", r"wgmma\.mma_async|mma\.sync|wmma\.mma", r"[BDHIQ]G?MMA"),
    # HFMA2 of zeros is a move of a constant.
    InstructionClass("multiply-add", r"fma\.|dp4a", r"(?!HFMA2\S* \w+, -RZ, RZ)(FFMA2?|HFMA2|IDP)"),
    InstructionClass("async load", r"cp\.async\.(c[ag]|bulk\S*shared::\w+\.global)", r"LDGSTS|UTMALDG|UBLKCP"),
    InstructionClass("async store", r"cp\.async\.bulk\S*global\.shared", r"UTMASTG"),
    InstructionClass("global load", r"(ld|wmma\.load)\S*\.global", r"LDG|LD\b"),
    InstructionClass("global store", r"(st|wmma\.store|red|atom)\S*\.global", r"STG|ST\b|REDG?|ATOMG?"),
    InstructionClass("shared load", r"(ld|ldmatrix|wmma\.load)\S*\.shared", r"LDSM?"),
    InstructionClass("shared store", r"(st|stmatrix|wmma\.store|red|atom)\S*\.shared", r"STSM?|STAS|ATOMS"),
    InstructionClass("spill", r"(ld|st)\S*\.local", r"LDL|STL"),
    InstructionClass(
        "barrier",
        r"bar(rier)?\.|mbarrier\.|fence\.|membar|griddepcontrol|wgmma\.(fence|commit|wait)|"
        r"cp\.async\.(bulk\.)?(commit|wait|mbarrier)",
        r"U?BAR|SYNCS|(LDG)?DEPBAR|WARPGROUP|WARPSYNC|MEMBAR|FENCE|ARRIVES|UCGABAR\w*|UTMACMDFLUSH|ACQBULK",
    ),
    InstructionClass("branch", r"bra|ret|exit|call", r"BRA|BRX|EXIT|RET|CALL|BSSY|BSYNC|BREAK"),
    InstructionClass(
        "integer",
        r"(?!cvt\S*\.f\d)\S+\.(pred|[usb]\d+)\b(?!\.f\d)",
        r"U?(I(ADD3?|MAD|SETP|ABS|MNMX)|V(IADD|IMNMX)\w*|LEA|LOP3|SHF|PRMT|MOV|SEL|PLOP3|FLO|POPC|BREV|SGXT|BMSK)|"
        r"S2U?R|CS2R|R2UR|[RP]2[RP]",
    ),
    InstructionClass("other", r"", r""),
)
"""The first class whose pattern matches. Integer includes address arithmetic, predicates and register moves."""
UNANNOTATED_CLASSES = "branch", "integer", "other"
"""Classes that a listing does not annotate."""

_PATTERNS = {
    "ptx": [(x.name, re.compile(rf"(?:{x.ptx})")) for x in INSTRUCTION_CLASSES],
    "sass": [(x.name, re.compile(rf"(?:{x.sass})(?![A-Z0-9_])" if x.sass else "(?:)")) for x in INSTRUCTION_CLASSES],
}


def classify(code: Code, instruction: str) -> str:
    """Return the name of an instruction's class. `instruction`: its text without a predicate such as "@P0"."""
    return next(name for name, pattern in _PATTERNS[code] if pattern.match(instruction))


PACKAGE = "nvidia-cuda-nvdisasm"


@lru_cache(maxsize=1)
def find_nvdisasm() -> str:
    """Return the program's path: from the pip package, or else from PATH. Raises CompileError."""
    try:
        for file in metadata.files(PACKAGE) or []:
            if file.stem == "nvdisasm" and file.suffix in ("", ".exe") and Path(str(file.locate())).is_file():
                return str(file.locate())
    except metadata.PackageNotFoundError:
        pass
    path = shutil.which("nvdisasm")
    if path is None:
        raise CompileError(f"nvdisasm was not found: pip install {PACKAGE}")
    return path


def disassemble(cubin: bytes, *, line_info: bool = False) -> str:
    """Return the disassembly of the cubin's code sections; `line_info`: with source lines. Raises CompileError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        process = subprocess.run(
            [find_nvdisasm(), "-c", *(["--print-line-info-inline"] if line_info else []), str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode:
        raise CompileError(f"nvdisasm: {process.stderr.strip()}")
    return process.stdout


@dataclass(frozen=True)
class Loop:
    """A natural loop of the control flow: its instructions, by their indices in the listing.

    `body`: all of them. `unconditional`: those that execute in every iteration, since every path to each jump back to
    the loop's start passes them.
    """

    body: frozenset[int]
    unconditional: frozenset[int]

    @property
    def conditional(self) -> frozenset[int]:
        """Instructions that do not execute in every iteration."""
        return self.body - self.unconditional


def find_loops(successors: Sequence[Sequence[int]]) -> list[Loop]:
    """Return all natural loops that are reachable from instruction 0, in the order of their first instructions.

    `successors`: for each instruction, the indices of those that may execute next. A jump back to an instruction that
    every path to the jump passes (that dominates it) makes a loop: the instruction is the header, the jump a latch. The
    body is the header and all instructions from which a latch is reached without passing the header.
    """
    dominators = _dominators(successors)
    edges = [(node, x) for node, mask in enumerate(dominators) if mask != -1 for x in successors[node]]
    predecessors, latches = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for node, successor in edges:
        predecessors[successor].append(node)
        if dominators[node] >> successor & 1:
            latches[successor].append(node)
    result = []
    for header, own_latches in sorted(latches.items()):
        body, todo = {header}, list(own_latches)
        while todo:
            if (node := todo.pop()) not in body:
                body.add(node)
                todo += predecessors[node]
        in_each_iteration = reduce(and_, (dominators[x] for x in own_latches))
        result.append(Loop(frozenset(body), frozenset(x for x in body if in_each_iteration >> x & 1)))
    return result


def _dominators(successors: Sequence[Sequence[int]]) -> list[int]:
    """Return the dominators of each instruction: those that every path from instruction 0 to it passes, and itself.

    They are the set bits of an int: bit i is instruction i. An instruction that no path reaches has -1, all bits.
    """
    masks, changed = [1] + [-1] * (len(successors) - 1), True
    while changed:
        changed = False
        for node, mask in enumerate(masks):
            for successor in successors[node] if mask != -1 else ():
                common = masks[successor] & (mask | 1 << successor)
                changed |= common != masks[successor]
                masks[successor] = common
    return masks


@dataclass(frozen=True)
class ListedInstruction:
    """An instruction of a listing.

    `address`: in bytes, hexadecimal; for PTX the line number. `label`: the label before it, or "". `guard`: its
    predicate, such as "@P0", or "". `kind`: its class (mnemonics.INSTRUCTION_CLASSES). `location`: the kernel's Python
    line; None if it belongs to no statement.
    """

    address: str
    label: str
    guard: str
    text: str
    kind: str
    location: SourceLocation | None


@dataclass(frozen=True)
class Listing:
    """The instructions of a kernel."""

    instructions: list[ListedInstruction]

    @cached_property
    def mainloops(self) -> list[Loop]:
        """Innermost loops with MMA instructions; if there are none, the loop with the most multiply-adds."""
        kind = "tensor" if self.count()["tensor"] else "multiply-add"
        loops = find_loops([self._successors(i) for i in range(len(self.instructions))])
        loops = [loop for loop in loops if self.count(loop.body)[kind]]
        inner = [x for x in loops if not any(y.body < x.body for y in loops)]
        return inner if kind == "tensor" else sorted(inner, key=lambda loop: -self.count(loop.body)[kind])[:1]

    def count(self, indices: Iterable[int] | None = None) -> Counter[str]:
        """Count the instructions by class: those at `indices`, or all."""
        indices = range(len(self.instructions)) if indices is None else indices
        return Counter(self.instructions[i].kind for i in indices)

    @cached_property
    def _labels(self) -> dict[str, int]:
        return {x.label: i for i, x in enumerate(self.instructions) if x.label}

    def _successors(self, i: int) -> list[int]:
        """Return the indices of the instructions that may execute after instruction `i`."""
        x, next_instruction = self.instructions[i], [i + 1] if i + 1 < len(self.instructions) else []
        if re.match(r"(EXIT|RET|ret|exit)\b", x.text):
            return next_instruction if x.guard else []
        branch = re.match(r"(?:BRA|bra)\S*\s+(.*, )?\W*?(\$?[\w.]+)\)?$", x.text)
        if branch is None or branch[2] not in self._labels:
            return next_instruction
        return [self._labels[branch[2]], *(next_instruction if x.guard or branch[1] else [])]


def build_listing(kernel: Kernel, code: Code) -> Listing:
    """Return the listing of a kernel's PTX or SASS. Raises CompileError.

    It is compiled with line information, which does not change the machine code.
    """
    source, target = kernel.source_with_line_directives, kernel.chip.target
    if code == "ptx":
        return Listing(list(_parse_ptx(compile_ptx(source, kernel.name, target, line_info=True))))
    cubin = compile_source(source, kernel.name, target, line_info=True).cubin
    instructions = list(_parse_sass(disassemble(cubin, line_info=True)))
    if any(_needs_location_from_ptx(x) for x in instructions):
        instructions = _copy_locations_from_ptx(instructions, build_listing(kernel, "ptx"))
    return Listing(instructions)


def _needs_location_from_ptx(x: ListedInstruction) -> bool:
    """Return whether the source location that ptxas gives an MMA instruction is missing or wrong.

    ptxas emits no line information for wgmma, and may attribute wmma to the .cu file.
    """
    return x.kind == "tensor" and (x.location is None or "GMMA" in x.text)


def _copy_locations_from_ptx(instructions: list[ListedInstruction], ptx: Listing) -> list[ListedInstruction]:
    """Return the SASS instructions, with the locations that ptxas lost taken from the MMA instructions of the PTX.

    They are taken in order if there are as many in both. Otherwise they are only taken if all in the PTX have one
    location.
    """
    locations = [x.location for x in ptx.instructions if x.kind == "tensor"]
    count = sum(map(_needs_location_from_ptx, instructions))
    if len(locations) != count:
        locations = [locations[0] if len(set(locations)) == 1 else None] * count
    rest = iter(locations)
    return [replace(x, location=next(rest)) if _needs_location_from_ptx(x) else x for x in instructions]


def _make_instruction(
    code: Code, address: str, label: str, text: str, file: str, line_number: int
) -> ListedInstruction:
    """Return the instruction of a line `text`; its location is None if `file` is the CUDA file (.cu), not Python."""
    guard, text = re.fullmatch(r"(@\S+)?\s*(.*)", text).groups("")  # type: ignore[union-attr]
    location = None if file.endswith(".cu") else SourceLocation(file, line_number)
    return ListedInstruction(address, label, guard, text, classify(code, text), location)


def _parse_sass(text: str) -> Iterator[ListedInstruction]:
    """Yield the instructions of nvdisasm's text.

    For inlined code, nvdisasm names several lines before an instruction. The last one, the caller's, counts.
    """
    location, label = (".cu", 0), ""
    for line in text.splitlines():
        if match := re.search(r'//## File "(.*?)", line (\d+)', line):
            location = match[1], int(match[2])
        elif match := re.match(r"(\.L_x_\d+):", line):
            label = match[1]
        elif match := re.match(r"\s+/\*([0-9a-f]+)\*/\s+(.*?)\s*;", line):
            yield _make_instruction("sass", f"0x{match[1]}", label, match[2], *location)
            label = ""


def _parse_ptx(text: str) -> Iterator[ListedInstruction]:
    """Yield the instructions of PTX, each with its line number as its address.

    The location of inlined code is that of its outermost caller. Labels of wait loops in inline assembly are left out.
    """
    files = dict(re.findall(r'\.file\s+(\d+)\s+"(.*?)"', text))
    callers: dict[tuple[str, ...], tuple[str, ...]] = {}
    location, label, parts = (".cu", 0), "", []
    opening, end = text.index("\n{\n") + 3, text.find("\n}\n\t.file")
    for number, line in enumerate(text[opening:end].split("\n"), text.count("\n", 0, opening) + 1):
        line = line.split("//")[0].strip()
        if match := re.match(r"\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?", line):
            loc, caller = match.group(1, 2, 3), match.group(4, 5, 6) if match[4] else None
            if caller:
                callers[loc] = caller
            while caller:
                loc, caller = caller, callers.get(caller)
            location = files[loc[0]], int(loc[1])
        elif match := re.match(r"(\$L\w+):", line):
            label = match[1]
        elif line and not re.match(r"[{}]$|\.|\w+:$", line):
            parts.append(line)
            if line.endswith(";"):
                instruction = " ".join(" ".join(parts).split()).rstrip("; ")
                yield _make_instruction("ptx", str(number - len(parts) + 1), label, instruction, *location)
                label, parts = "", []
