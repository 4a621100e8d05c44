"""Arguments that gemmsmith's functions and those of gemmsmith.torch do not share: the guide's table, and refusals."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmsmith
import gemmsmith.torch as gt
from gemmsmith import ArgumentError
from gemmsmith.core.errors import PYTORCH_PAGE

ROOT = Path(__file__).parents[2]
FUNCTIONS = {"gemm": gemmsmith.gemm, "gt.gemm": gt.gemm,
             "grouped_gemm": gemmsmith.grouped_gemm, "gt.grouped_gemm": gt.grouped_gemm}  # fmt: skip
KEYWORDS = {
    name: {p.name for p in inspect.signature(f).parameters.values() if p.kind == p.KEYWORD_ONLY}
    for name, f in FUNCTIONS.items()
}


def test_the_table_of_differences() -> None:
    """Each row has the arguments that the same functions take; no difference is left out."""
    page, anchor = PYTORCH_PAGE.split("#")
    text = (ROOT / page).read_text()
    title = "Arguments of gemmsmith.gemm"
    assert anchor == re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    head, _, *rows = [
        [x.strip() for x in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)
    ]
    assert head[1:-1] == list(FUNCTIONS)
    listed: set[str] = set()
    for row in rows:
        for argument in re.findall(r"`(\w+)`", row[0]):
            listed.add(argument)
            takes = {name for name, cell in zip(FUNCTIONS, row[1:-1], strict=True) if cell == "yes"}
            assert takes == {name for name, keywords in KEYWORDS.items() if argument in keywords}, argument
    pairs = (("gemm", "gt.gemm"), ("grouped_gemm", "gt.grouped_gemm"))
    assert listed == set().union(*(KEYWORDS[x] ^ KEYWORDS[y] for x, y in pairs)) | {"scale_a", "scale_b"}


@pytest.mark.parametrize("name", ["gt.gemm", "gt.grouped_gemm"])
def test_what_only_gemmsmith_has_is_refused(name: str) -> None:
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    given: dict[str, Any] = {} if name == "gt.gemm" else {"offsets": torch.tensor([16], dtype=torch.int32)}
    for argument in sorted(KEYWORDS[name.removeprefix("gt.")] - KEYWORDS[name]):
        with pytest.raises(ArgumentError, match=rf"{argument}: got an argument of gemmsmith\..*{PYTORCH_PAGE}"):
            FUNCTIONS[name](a, b if name == "gt.gemm" else b[None], **given, **{argument: 1.0})
        with pytest.raises(ArgumentError, match=f"{argument}: .*operands need an `epilogue`"):
            FUNCTIONS[name](a, b if name == "gt.gemm" else b[None], **given, operands={argument: 1.0})


def test_what_only_gemmsmith_torch_has() -> None:
    with pytest.raises(ArgumentError, match=f"recompute: .*gemmsmith.torch's functions .{PYTORCH_PAGE}"):
        gemmsmith.gemm(torch.ones(16, 16), torch.ones(16, 16), precision="tf32", recompute=True)


def test_the_dtype_of_a_result() -> None:
    """What the table offers in place of `out_dtype`."""
    a = torch.ones(16, 16, dtype=torch.bfloat16, requires_grad=True)
    y = gt.gemm(a, torch.ones(16, 16, dtype=torch.bfloat16), epilogue=lambda acc: acc.to("fp32"))
    assert y.dtype == torch.float32
    y.sum().backward()
    assert a.grad is not None
