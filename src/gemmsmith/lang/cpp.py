"""How the printer lays out C++: lines of limited width, device functions, and those around one instruction's PTX."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from gemmsmith.lang.instruction import Instruction
from gemmsmith.lang.types import PRED, TENSOR_MAP
from gemmsmith.lang.values import Registers

WIDTH = 120
"""Columns of a line."""
_BREAK = re.compile(r", ?| (?=(?:[-+|^?:]|&&|\|\|) )")
"""Where a line of code may be broken: behind a comma, and before an operator."""


def wrapped(text: str, indent: str, deeper: str = "    ") -> str:
    """A line of code; too long a one is broken where it is nested least, at a comma rather than an operator, and goes
    on `deeper`."""
    lines, more = [], ""
    while len(indent + more + text) > WIDTH and not text.startswith("//"):
        room = WIDTH - len(indent + more)
        found = [m for m in _BREAK.finditer(text) if WIDTH // 3 < len(text[: m.end()].rstrip()) <= room]
        if not found:
            break
        nested = {m: sum(text.count(x, 0, m.start()) for x in "([") - sum(text.count(x, 0, m.start()) for x in ")]")
                  for m in found}  # fmt: skip
        best = min(found, key=lambda m: (nested[m], text[m.start()] != ",", -m.start()))
        lines.append(indent + more + text[: best.end()].rstrip())
        text, more = text[best.end() :], deeper
    return "\n".join([*lines, indent + more + text])


def comment(text: str) -> str:
    """A line of a comment, or several."""
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent="// ", subsequent_indent="//   "))


def device_function(gives: str, name: str, parameters: list[str], body: str) -> str:
    """A device function, on one line if it fits."""
    opening = f"__device__ __forceinline__ {gives} {name}({', '.join(parameters)}) {{"
    short = f"{opening} {body.strip()} }}"
    return short if "\n" not in body and len(short) <= WIDTH else f"{wrapped(opening, '')}\n{body}\n}}"


def functions(definitions: Iterable[str]) -> str:
    """One below the other, with empty lines between those of several lines."""
    text = ""
    for definition in definitions:
        several = "\n" in definition
        text += "\n" * (several and text[-2:] not in ("", "\n\n")) + definition + "\n" * (1 + several)
    return text.rstrip("\n") + "\n"


def wrapper(instruction: Instruction) -> str:
    """The `__device__` function around one instruction's PTX."""
    outputs: list[str] = []
    inputs: list[str] = []
    parameters: list[str] = []
    operands_of: dict[str, str] = {}
    operands = instruction.operands
    arrays = {n: v for n, v in operands.items() if isinstance(v, Registers)}
    written = {n: v for n, v in arrays.items() if instruction.operand_types[n].access != "in"}  # type: ignore[union-attr]
    count = 0

    def numbered(n: int) -> str:
        nonlocal count
        count += n
        return ", ".join(f"%{i}" for i in range(count - n, count))

    def vector(n: int) -> str:
        return numbered(1) if n == 1 else "{" + numbered(n) + "}"

    if instruction.result:
        operands_of["result"] = numbered(1)
        outputs.append(f'"={instruction.result.constraint}"(result)')
    for name, array in written.items():
        operands_of[name] = vector(array.count)
        sign = "+" if instruction.operand_types[name].access == "inout" else "="  # type: ignore[union-attr]
        outputs += [f'"{sign}{array.type.constraint}"({name}[{i}])' for i in range(array.count)]
    for name, operand in operands.items():
        if isinstance(operand, Registers):
            const = "" if name in written else "const "
            parameters.append(f"{const}{operand.type.cpp} (&{name})[{operand.count}]")
            if name not in written:
                operands_of[name] = vector(operand.count)
                inputs += [f'"{operand.type.constraint}"({name}[{i}])' for i in range(operand.count)]
            continue
        operands_of[name] = numbered(1)
        if operand.type == TENSOR_MAP:
            parameters.append(f"const TensorMap* {name}")
            inputs.append(f'"l"({name})')
        else:
            parameters.append(f"{operand.type.cpp} {name}")
            cast = "(int)" if operand.type == PRED else ""
            inputs.append(f'"{operand.type.constraint}"({cast}{name})')
    text = re.sub(r"\{(\w+)\}", lambda m: operands_of.get(m[1], m[0]), instruction.text()).strip()
    gives = instruction.result.cpp if instruction.result else "void"
    holds = "int" if instruction.result == PRED else gives  # inline PTX has no bool registers
    body = _assembly(text, outputs, inputs, instruction.pure)
    if instruction.result:
        body = f"    {holds} result;\n{body}\n    return result;"
    return device_function(gives, instruction.wrapper_name, parameters, body)


def _assembly(text: str, outputs: list[str], inputs: list[str], pure: bool) -> str:
    """An asm statement: PTX, and the operands behind its last line, or below."""
    sections = [outputs, inputs] + [['"memory"']] * (not pure)
    while sections and not sections[-1]:
        sections.pop()
    tail = "".join(":" + f" {', '.join(x)} " * bool(x) for x in sections).rstrip() + ");"
    opening = "    asm(" if pure else "    asm volatile("
    lines = [line.strip() for line in text.splitlines()]
    if len(lines) < 2 and len(line := f'{opening}"{text}" {tail}') <= WIDTH:
        return line
    strings = [f'"{part}"' for line in lines for part in re.findall(_PART, line + "\\n")] or ['""']
    if len(strings[-1] + tail) < WIDTH - 8:
        strings[-1] += f" {tail}"
        tail = ""
    elif len(tail) > WIDTH - 8:
        rows = [textwrap.wrap(", ".join(x), WIDTH - 12, break_long_words=False) for x in sections]
        tail = "\n        : ".join("\n          ".join(row) for row in rows)
        tail = f": {tail});".replace(": \n        :", "::")
    return "\n        ".join([opening, *strings, *[tail] * bool(tail)])


_PART = re.compile(rf".{{1,{WIDTH - 12}}}(?:(?<= )|(?=\.)|$)")
"""Of a line of PTX that is too long: whole words, or a part of one as far as a dot."""
