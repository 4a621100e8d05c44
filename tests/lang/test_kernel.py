"""Arguments that are bound where they are declared, scratch memory, and the grid."""

from __future__ import annotations

from types import SimpleNamespace

from gemmsmith.core.pointer import Pointer
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel


def kernel() -> Kernel:
    with Builder("bound", threads=32) as k:
        k.work_clusters = lambda p: p.rows // 8
        k.parameter("rows", compute=lambda p: p.rows)
        k.scratch("first", lambda p: p.rows)
        k.scratch("words", lambda p: 4 * p.rows, zero_initialized=True)
        k.pointer("given")
        k.scratch("second", lambda p: 2 * p.rows)
        return k.finish()


def test_arguments_are_bound_to_the_problem() -> None:
    problem = SimpleNamespace(rows=300)
    found = kernel().arguments(problem, Pointer("workspace", 512), Pointer("flags"))
    assert found == {
        "rows": 300, "first": Pointer("workspace", 512), "second": Pointer("workspace", 512 + 512),
        "words": Pointer("flags"),
    }  # fmt: skip
    assert kernel().work_clusters(problem) == 37


def test_scratch_memory_is_what_its_parts_take() -> None:
    problem = SimpleNamespace(rows=300)
    assert kernel().scratch_bytes(problem) == 512 + 768
    assert kernel().scratch_bytes(problem, zero_initialized=True) == 1280
    assert kernel().scratch_bytes(SimpleNamespace(rows=0)) == 0
