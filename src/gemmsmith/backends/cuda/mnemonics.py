"""What class of instruction a line of PTX or SASS is: rows of data."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Code = Literal["ptx", "sass"]


class Row(NamedTuple):
    """A class, and the patterns that open the instructions which are of it, in PTX and in SASS."""

    name: str
    ptx: str
    sass: str


CLASSES = (
    Row("tensor", r"wgmma\.mma_async|mma\.sync|wmma\.mma", r"[BDHIQ]G?MMA"),
    # HFMA2 of zeros moves a constant.
    Row("multiply-add", r"fma\.|dp4a", r"(?!HFMA2\S* \w+, -RZ, RZ)(FFMA2?|HFMA2|IDP)"),
    Row("async load", r"cp\.async\.(c[ag]|bulk\S*shared::\w+\.global)", r"LDGSTS|UTMALDG|UBLKCP"),
    Row("async store", r"cp\.async\.bulk\S*global\.shared", r"UTMASTG"),
    Row("global load", r"(ld|wmma\.load)\S*\.global", r"LDG|LD\b"),
    Row("global store", r"(st|wmma\.store|red|atom)\S*\.global", r"STG|ST\b|REDG?|ATOMG?"),
    Row("shared load", r"(ld|ldmatrix|wmma\.load)\S*\.shared", r"LDSM?"),
    Row("shared store", r"(st|stmatrix|wmma\.store|red|atom)\S*\.shared", r"STSM?|STAS|ATOMS"),
    Row("spill", r"(ld|st)\S*\.local", r"LDL|STL"),
    Row(
        "barrier",
        r"bar(rier)?\.|mbarrier\.|fence\.|membar|griddepcontrol|wgmma\.(fence|commit|wait)|"
        r"cp\.async\.(bulk\.)?(commit|wait|mbarrier)",
        r"U?BAR|SYNCS|(LDG)?DEPBAR|WARPGROUP|WARPSYNC|MEMBAR|FENCE|ARRIVES|UCGABAR\w*|UTMACMDFLUSH|ACQBULK",
    ),
    Row("branch", r"bra|ret|exit|call", r"BRA|BRX|EXIT|RET|CALL|BSSY|BSYNC|BREAK"),
    Row(
        "integer",
        r"(?!cvt\S*\.f\d)\S+\.(pred|[usb]\d+)\b(?!\.f\d)",
        r"U?(I(ADD3?|MAD|SETP|ABS|MNMX)|V(IADD|IMNMX)\w*|LEA|LOP3|SHF|PRMT|MOV|SEL|PLOP3|FLO|POPC|BREV|SGXT|BMSK)|"
        r"S2U?R|CS2R|R2UR|[RP]2[RP]",
    ),
    Row("other", r"", r""),
)
"""The first whose pattern fits. Integer: addresses, predicates and moves of registers as well."""
UNMARKED = "branch", "integer", "other"
"""What a listing does not mark."""

_COMPILED = {
    code: [(row.name, re.compile(rf"(?:{getattr(row, code)})" + r"(?![A-Z0-9_])" * (code == "sass" and bool(row.sass))))
           for row in CLASSES]
    for code in ("ptx", "sass")
}  # fmt: skip


def class_of(code: Code, instruction: str) -> str:
    """The class of an instruction, given without the predicate that guards it."""
    return next(name for name, pattern in _COMPILED[code] if pattern.match(instruction))
