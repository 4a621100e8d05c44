"""PTX and SASS as lists of instructions: their classes, the Python lines that they come from, and the mainloops."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from gemmsmith.backends.cuda.compiler import compile_ptx, compile_source
from gemmsmith.backends.cuda.disassembler import sass
from gemmsmith.backends.cuda.loops import Loop, loops
from gemmsmith.backends.cuda.mnemonics import Code, class_of
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.statements import Where


@dataclass(frozen=True)
class Line:
    """An instruction. `address`: in bytes, in hexadecimal; for PTX the line number. `label`: that before it, or
    "". `guard`: the predicate it is executed under, such as "@P0". `kind`: its class. `where`: the line of the kernel's
    Python file, None for what belongs to no statement."""

    address: str
    label: str
    guard: str
    text: str
    kind: str
    where: Where | None


@dataclass(frozen=True)
class Listing:
    """The instructions of a kernel."""

    lines: list[Line]

    @cached_property
    def mainloops(self) -> list[Loop]:
        """The innermost loops with tensor instructions; in a kernel without, the one with the most multiply-adds."""
        found = loops([self._after(i) for i in range(len(self.lines))])
        kind = "tensor" if self.count()["tensor"] else "multiply-add"
        holding = [loop for loop in found if self.count(loop.body)[kind]]
        inner = [x for x in holding if not any(y.body < x.body for y in holding)]
        return inner if kind == "tensor" else sorted(inner, key=lambda loop: -self.count(loop.body)[kind])[:1]

    def count(self, numbers: Iterable[int] | None = None) -> Counter[str]:
        """How many instructions there are of each class, in all or of these numbers."""
        numbers = range(len(self.lines)) if numbers is None else numbers
        return Counter(self.lines[i].kind for i in numbers)

    @cached_property
    def _labels(self) -> dict[str, int]:
        return {line.label: i for i, line in enumerate(self.lines) if line.label}

    def _after(self, i: int) -> list[int]:
        """The instructions that may follow one."""
        line, following = self.lines[i], [i + 1] * (i + 1 < len(self.lines))
        if re.match(r"(EXIT|RET|ret|exit)\b", line.text):
            return following if line.guard else []
        branch = re.match(r"(?:BRA|bra)\S*\s+(.*, )?\W*?(\$?[\w.]+)\)?$", line.text)
        if branch is None or branch[2] not in self._labels:
            return following
        return [self._labels[branch[2]], *(following if line.guard or branch[1] else [])]


def annotated(kernel: Kernel, code: Code) -> Listing:
    """A kernel's PTX or SASS. It is compiled with line information, which leaves the machine code as it is. Raises
    CompileError."""
    source, target = kernel.located_source, kernel.chip.target
    if code == "ptx":
        return Listing(list(_of_ptx(compile_ptx(source, kernel.name, target, lines=True))))
    lines = list(_of_sass(sass(compile_source(source, kernel.name, target, lines=True).cubin, lines=True)))
    if any(_has_no_line(line) for line in lines):
        lines = _with_lines_of_products(lines, annotated(kernel, "ptx"))
    return Listing(lines)


def _has_no_line(line: Line) -> bool:
    """wgmma, which ptxas leaves out of its table of lines; and wmma, which may get one of the CUDA file."""
    return line.kind == "tensor" and (line.where is None or "GMMA" in line.text)


def _with_lines_of_products(lines: list[Line], ptx: Listing) -> list[Line]:
    """Their lines from the PTX: if it has as many, in the same order, or if all are of one line."""
    known = [line.where for line in ptx.lines if line.kind == "tensor"]
    count = sum(map(_has_no_line, lines))
    if len(known) != count:
        known = [known[0] if len(set(known)) == 1 else None] * count
    rest = iter(known)
    return [replace(line, where=next(rest)) if _has_no_line(line) else line for line in lines]


def _line(code: Code, address: str, label: str, text: str, file: str, number: int) -> Line:
    """A Line of an instruction's text. `file` and `number`: the Python line, or that of the CUDA file (.cu) where it
    belongs to no statement."""
    guard, text = re.fullmatch(r"(@\S+)?\s*(.*)", text).groups("")  # type: ignore[union-attr]
    return Line(
        address, label, guard, text, class_of(code, text), None if file.endswith(".cu") else Where(file, number)
    )


def _of_sass(text: str) -> Iterator[Line]:
    """Of nvdisasm's text. Where a function is inlined, the last line that it names before an instruction is the
    caller's."""
    where, label = (".cu", 0), ""
    for line in text.splitlines():
        if named := re.search(r'//## File "(.*?)", line (\d+)', line):
            where = named[1], int(named[2])
        elif named := re.match(r"(\.L_x_\d+):", line):
            label = named[1]
        elif found := re.match(r"\s+/\*([0-9a-f]+)\*/\s+(.*?)\s*;", line):
            yield _line("sass", f"0x{found[1]}", label, found[2], *where)
            label = ""


def _of_ptx(text: str) -> Iterator[Line]:
    """Labels inside of inline assembly, of loops that wait, are left out."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"(.*?)"', text))
    callers: dict[tuple[str, ...], tuple[str, ...]] = {}
    where, label, parts = (".cu", 0), "", []
    opening, end = text.index("\n{\n") + 3, text.find("\n}\n\t.file")
    for number, line in enumerate(text[opening:end].split("\n"), text.count("\n", 0, opening) + 1):
        line = line.split("//")[0].strip()
        if loc := re.match(r"\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?", line):
            at, caller = loc.group(1, 2, 3), loc.group(4, 5, 6) if loc[4] else None
            if caller:
                callers[at] = caller
            while caller:
                at, caller = caller, callers.get(caller)
            where = files[at[0]], int(at[1])
        elif named := re.match(r"(\$L\w+):", line):
            label = named[1]
        elif line and not re.match(r"[{}]$|\.|\w+:$", line):
            parts.append(line)
            if line.endswith(";"):
                written = " ".join(" ".join(parts).split()).rstrip("; ")
                yield _line("ptx", str(number - len(parts) + 1), label, written, *where)
                label, parts = "", []
