"""Boxes of an operand's tile, and what the arguments of its copies say of a problem."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gemmsmith import Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.collective.tma_operand import TmaOperand, box_rows, multicast_slice_rows
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dtypes import BF16
from gemmsmith.core.problem import BoundProblem, Problem, operand_getter
from gemmsmith.core.spec import MmaOperand
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel


@given(rows=some.sampled_from([8, 16, 64, 96, 128, 256]), extent=some.integers(1, 400), log=some.integers(0, 2))
def test_parts_bring_every_row_once(rows: int, extent: int, log: int) -> None:
    parts = 1 << log
    if rows % (8 * parts):
        return
    tile = Tile(BF16, rows, 64, "K")
    part = multicast_slice_rows(tile, extent, parts)
    box = box_rows(tile, extent, part)
    assert part % 8 == 0 or parts == 1
    assert box <= part <= rows // parts
    brought = [row for p in range(parts) for row in range(p * part, p * part + box)]
    assert len(set(brought)) == len(brought)
    assert set(range(min(extent, rows))) <= set(brought) <= set(range(rows))
    assert multicast_slice_rows(Tile(BF16, rows, 64, "MN"), extent, parts) == 64 // parts  # depth is zeros outside


def kernel_of(parts: int) -> tuple[Kernel, TmaOperand]:
    with Builder("operand", threads=128, cluster=(parts, 1, 1)) as k:
        a = TmaOperand(MmaOperand("a", "a", Tile(BF16, 128, 64, "K"), operand_getter("a")), 3)
        a.enable_multicast(parts, k.lane, (1 << parts) - 1)
        return k.finish(), a


def bound(m: int, k: int) -> BoundProblem:
    p: Problem = bind(Request(Spec((m, k), "bf16"), Spec((k, 64), "bf16"))).problem
    return BoundProblem.from_problem(p, Pointer("a"), Pointer("b"), {"out": p.d})


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_its_arguments_are_bound_to_the_problem(parts: int) -> None:
    kernel, a = kernel_of(parts)
    assert [(b.name, b.count, b.slot_bytes) for b in kernel.buffers] == [("A", 3, 128 * 64 * 2)]
    assert a.loads_per_tile == parts
    arguments = kernel.arguments(bound(1000, 512))
    assert list(arguments) == (["a"] if parts == 1 else ["a", "a_multicast_slice_m"])
    assert arguments.get("a_multicast_slice_m", 128) == 128 // parts
    map = arguments["a"]
    assert (map.address, map.extents, map.strides) == (Pointer("a"), (512, 1000, 1), (1024, 0))
    assert map.box == (64, 128 // parts, 1)
    assert a.stage_bytes(bound(1000, 512)) == 128 * 64 * 2


def test_few_rows_are_copied_as_few() -> None:
    kernel, a = kernel_of(2)
    few = bound(20, 512)
    assert kernel.arguments(few)["a_multicast_slice_m"] == 16  # whole swizzle atoms
    assert kernel.arguments(few)["a"].box == (64, 16, 1)
    assert a.stage_bytes(few) == 2 * 16 * 64 * 2


def test_without_depth_nothing_is_copied() -> None:
    kernel, a = kernel_of(1)
    assert a.stage_bytes(bound(64, 0)) == 0
    assert kernel.arguments(bound(64, 0))["a"].extents == (16, 1, 1)
