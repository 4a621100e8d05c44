"""Arguments that are bound where they are declared, scratch memory, and the grid."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import gemmsmith
from gemmsmith import hw
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.errors import KernelError
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I32, PRED, U64
from gemmsmith.lang.values import Constant


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


@pytest.mark.parametrize("condition", [False, True])
def test_a_branch_that_is_known_has_an_otherwise(condition: bool) -> None:
    """Neither joins an `if` before it."""
    with Builder("known", threads=128) as k:
        x = k.var(I32, 0, "x")
        with k.when(k.thread == 0):
            x.set(1)
        with k.when(Constant(PRED, condition)), k.when(k.thread == 1):
            x.set(2)
        with k.otherwise():
            x.set(3)
        source = k.finish().source.partition("int x = 0;")[2]
    assert ("x = 3;" in source, "x = 2;" in source, "else" in source) == (not condition, condition, False)


def test_buffers_over_others_are_inside_of_them() -> None:
    with Builder("inside", threads=128) as k:
        small = k.shared(512, alignment=16, name="small")
        k.shared(512, alignment=128, name="tile")
        over = k.shared(512, alignment=16, name="over", over=(small,))
        k.finish()
    assert over.offset == small.offset == 512
    with Builder("beyond", threads=128) as k:
        k.shared(1024, alignment=16, name="large", over=(k.shared(512, alignment=16, name="small"),))
        with pytest.raises(KernelError, match="large: it reaches beyond the buffers that it is over"):
            k.finish()


def test_a_launch_without_work_clusters_is_one_cluster_and_a_pointer_ignores_strides() -> None:
    with Builder("count", threads=32, cluster=(2, 1, 1)) as k:
        index = hw.block_index() * 32 + k.thread
        hw.store_global_word(k.pointer("out") + index.to(U64) * 4, index, True, "index")
        count = k.finish()
    out = np.full(200, -1, np.int32)
    gemmsmith.launch(count, "any problem", out=out[::2])
    assert np.array_equal(out, np.where(np.arange(200) < 64, np.arange(200), -1))
