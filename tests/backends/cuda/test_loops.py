"""Loops of code, found by what may follow each instruction."""

from __future__ import annotations

from gemmsmith.backends.cuda.listing import Loop, find_loops


def loop(body: set[int], each: set[int]) -> Loop:
    return Loop(frozenset(body), frozenset(each))


def test_straight_code_has_none() -> None:
    assert find_loops([[1], [2], []]) == []


def test_an_instruction_that_some_turns_leave_out() -> None:
    (found,) = find_loops([[1], [2, 3], [3], [1, 4], []])
    assert found == loop({1, 2, 3}, {1, 3})
    assert found.conditional == {2}


def test_a_loop_in_a_loop() -> None:
    """The inner one's instructions are executed in each turn of the outer."""
    assert find_loops([[1], [2], [2, 3], [1, 4], []]) == [loop({1, 2, 3}, {1, 2, 3}), loop({2}, {2})]


def test_two_ways_back() -> None:
    """What only one of them goes through is left out by some turns."""
    assert find_loops([[1], [2, 3], [1], [1, 4], []]) == [loop({1, 2, 3}, {1})]


def test_code_behind_the_loop_that_it_goes_through() -> None:
    """As ptxas lays out what is rarely executed; instruction 5 is never reached."""
    assert find_loops([[1], [2, 4], [1, 3], [], [2], [1]]) == [loop({1, 2, 4}, {1, 2})]


def test_a_way_into_the_middle() -> None:
    """No instruction dominates such a circle: it is no natural loop."""
    assert find_loops([[1, 2], [2], [1, 3], []]) == []
