"""The gallery of docs/gallery.py: each change of the default kernel is reported as what it is, or there is a note why
nothing breaks."""

from __future__ import annotations

import pytest
from docs import gallery
from tests.mutants.mutate import ONLY_DELETED, SYNCHRONIZING
from tests.mutants.test_mutants import EQUIVALENT, EXPECTED

from gemmsmith.lang import statements as st


def key(title: str) -> tuple[str, str]:
    """What is changed, and of what, as in EXPECTED and EQUIVALENT."""
    what, _, target = title.rpartition(" ")
    return what, target


@pytest.mark.slow
@pytest.mark.parametrize("name", gallery.changes())
def test_a_change_is_reported_or_noted(name: str) -> None:
    change = gallery.changes()[name]
    found = gallery.simulate_changed(change.number)
    if name in gallery.NOTES:
        assert key(change.title) in EQUIVALENT
        assert all((x.hazards, x.verdict.scope) == ([], "every schedule") for x in found.simulations)
    else:
        assert found.hazards[0].kind in EXPECTED[key(change.title)]
        assert found.hazards[0].event is not None


def test_every_synchronizing_statement_and_phase_is_in_the_gallery() -> None:
    """Each of the kernel's is deleted, and each first phase is flipped."""
    kernel = gallery.plan()[0]._planned.kernel
    lines = kernel.cuda_lines
    wanted = [(f"delete {x.mnemonic}", lines[where.number]) for x, where in st.instructions(kernel.body)
              if isinstance(x, (*SYNCHRONIZING, *ONLY_DELETED))]  # fmt: skip
    wanted += [(f"flip start of {x}", line) for x, line in phases(gallery.source()[0])]
    shown = [(x.title, x.line) for x in gallery.changes().values() if x.title.startswith(("delete", "flip"))]
    assert sorted(shown) == sorted(wanted)


def phases(source: str) -> list[tuple[str, int]]:
    """The variables that hold a phase, with their lines of CUDA."""
    declared = ((line.split(), i) for i, line in enumerate(source.splitlines(), 1) if "_phase = " in line)
    return [(words[1], i) for words, i in declared if words[0] == "uint32_t"]


def test_a_change_is_at_its_line() -> None:
    """The line of CUDA has the instruction or the variable."""
    source = gallery.source()[0].splitlines()
    for change in gallery.changes().values():
        line, target = source[change.line - 1], change.title.split()[-1]
        words = {"advance": "_stage == ", "grid_dependency_wait": "grid_dependency_wait()"}
        assert words.get(target, target) in line, (change, line)


def test_without_a_change_nothing_is_reported() -> None:
    assert gallery.simulate().hazards == []
