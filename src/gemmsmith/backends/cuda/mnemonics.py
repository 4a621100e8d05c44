"""Classification of PTX and SASS instructions by mnemonic."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

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
