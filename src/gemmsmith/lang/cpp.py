"""Layout of the printed C++: lines of limited width, device functions, and wrappers of one instruction's PTX."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from itertools import count, islice

from gemmsmith.lang.instruction import Instruction
from gemmsmith.lang.types import PRED
from gemmsmith.lang.values import RegisterArray

WIDTH = 120
"""Maximum columns per line."""
_BREAK = re.compile(r"[,;] ?| (?=(?:[-+|^?:]|&&|\|\|) )")
"""Matches where a line of code may be broken: after a comma, and before an operator."""


def wrap_line(text: str, indent: str, continuation_indent: str = "    ") -> str:
    """Return a line of code, indented by `indent`, wrapped at WIDTH columns.

    It is broken where parentheses are nested least, after commas rather than before operators. Further lines are
    indented by `continuation_indent`, too.
    """
    lines, extra_indent = [], ""
    while len(indent + extra_indent + text) > WIDTH and not text.startswith("//"):
        columns = WIDTH - len(indent + extra_indent)
        breaks = [m for m in _BREAK.finditer(text) if WIDTH // 3 < len(text[: m.end()].rstrip()) <= columns]
        if not breaks:
            break
        # Open parentheses at each place, of those that are not closed before.
        nesting = {m: sum(text.count(x, 0, m.start()) for x in "([") - sum(text.count(x, 0, m.start()) for x in ")]")
                   for m in breaks}  # fmt: skip
        best = min(breaks, key=lambda m: (nesting[m], text[m.start()] != ",", -m.start()))
        lines.append(indent + extra_indent + text[: best.end()].rstrip())
        text, extra_indent = text[best.end() :], continuation_indent
    return "\n".join([*lines, indent + extra_indent + text])


def comment_lines(text: str) -> str:
    """Return the text as one or more comment lines."""
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent="// ", subsequent_indent="//   "))


def device_function(return_type: str, name: str, parameters: list[str], body: str) -> str:
    """Return the definition of a device function, with an indented `body`, on one line if it fits."""
    opening = f"__device__ __forceinline__ {return_type} {name}({', '.join(parameters)}) {{"
    short = f"{opening} {body.strip()} }}"
    return short if "\n" not in body and len(short) <= WIDTH else f"{wrap_line(opening, '')}\n{body}\n}}"


def join_definitions(definitions: Iterable[str]) -> str:
    """Return the definitions as one text, with blank lines around those of several lines."""
    text = ""
    for definition in definitions:
        is_multi_line = "\n" in definition
        if is_multi_line and text[-2:] not in ("", "\n\n"):
            text += "\n"
        text += definition + ("\n\n" if is_multi_line else "\n")
    return text.rstrip("\n") + "\n"


def instruction_wrapper(instruction: Instruction) -> str:
    """Return the C++ `__device__` function that wraps the PTX of an instruction as inline assembly.

    Its parameters are the operands. In the PTX, `{operand}` becomes `%n`, and a register array `{%n, ...}`; outputs are
    numbered first, as inline assembly requires.
    """
    outputs: list[str] = []
    inputs: list[str] = []
    parameters: list[str] = []
    placeholders: dict[str, str] = {}
    operands = instruction.operands
    arrays = {n: v for n, v in operands.items() if isinstance(v, RegisterArray)}
    written = {n: v for n, v in arrays.items() if instruction.operand_types[n].access != "in"}  # type: ignore[union-attr]
    numbers = count()

    def vector(n: int) -> str:
        text = ", ".join(f"%{i}" for i in islice(numbers, n))
        return text if n == 1 else f"{{{text}}}"

    if instruction.result:
        placeholders["result"] = vector(1)
        outputs.append(f'"={instruction.result.constraint}"(result)')
    for name, array in written.items():
        placeholders[name] = vector(array.count)
        sign = "+" if instruction.operand_types[name].access == "inout" else "="  # type: ignore[union-attr]
        outputs += [f'"{sign}{array.type.constraint}"({x})' for x in _registers(name, array.count)]
    for name, operand in operands.items():
        if isinstance(operand, RegisterArray):
            const, ampersand = ("", "&") if name in written else ("const ", "")
            parameters.append(
                f"{operand.type.cpp}{ampersand} {name}"
                if operand.count == 1
                else f"{const}{operand.type.cpp} (&{name})[{operand.count}]"
            )
            if name not in written:
                placeholders[name] = vector(operand.count)
                inputs += [f'"{operand.type.constraint}"({x})' for x in _registers(name, operand.count)]
            continue
        placeholders[name] = vector(1)
        if operand.type.struct:
            parameters.append(f"const {operand.type.cpp}* {name}")
            inputs.append(f'"l"({name})')
        else:
            parameters.append(f"{operand.type.cpp} {name}")
            cast = "(int)" if operand.type == PRED else ""
            inputs.append(f'"{operand.type.constraint}"({cast}{name})')
    text = re.sub(r"\{(\w+)\}", lambda m: placeholders.get(m[1], m[0]), instruction.text()).strip()
    return_type = instruction.result.cpp if instruction.result else "void"
    result_type = "int" if instruction.result == PRED else return_type  # inline PTX has no bool registers
    body = _assembly(text, outputs, inputs, instruction.pure)
    if instruction.result:
        body = f"    {result_type} result;\n{body}\n    return result;"
    return device_function(return_type, instruction.wrapper_name, parameters, body)


def _registers(name: str, count: int) -> list[str]:
    """Return the texts of the `count` registers of the operand `name`: a scalar, or an array's elements."""
    return [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]


def _assembly(text: str, outputs: list[str], inputs: list[str], pure: bool) -> str:
    """Return an asm statement: the PTX `text`, and its operands after the last line or, if they do not fit, below it.

    `outputs`, `inputs`: the operands with their constraints.
    """
    sections = [outputs, inputs] if pure else [outputs, inputs, ['"memory"']]
    while sections and not sections[-1]:
        sections.pop()
    tail = "".join(f": {', '.join(x)} " if x else ":" for x in sections).rstrip() + ");"
    opening = "    asm(" if pure else "    asm volatile("
    lines = [line.strip() for line in text.splitlines()]
    if len(lines) < 2 and len(line := f'{opening}"{text}" {tail}') <= WIDTH:
        return line
    strings = [f'"{segment}"' for line in lines for segment in re.findall(_PTX_SEGMENT, line + "\\n")] or ['""']
    if len(strings[-1] + tail) < WIDTH - 8:
        strings[-1] += f" {tail}"
        tail = ""
    elif len(tail) > WIDTH - 8:
        rows = [textwrap.wrap(", ".join(x), WIDTH - 12, break_long_words=False) for x in sections]
        tail = "\n        : ".join("\n          ".join(row) for row in rows)
        tail = f": {tail});".replace(": \n        :", "::")
    return "\n        ".join([opening, *strings, tail] if tail else [opening, *strings])


_PTX_SEGMENT = re.compile(rf".{{1,{WIDTH - 12}}}(?:(?<= )|(?=\.)|$)")
"""Splits a long PTX line after a space or before a dot."""
