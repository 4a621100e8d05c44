"""A multiplication and a shift instead of a division."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as some

from gemmsmith.tile_scheduler.fast_divmod import fast_divmod_params

LARGEST = 2**31 - 1


@given(divisor=some.integers(1, LARGEST), x=some.integers(0, LARGEST))
@example(divisor=1, x=LARGEST)
@example(divisor=LARGEST, x=LARGEST)
@example(divisor=2**30 + 1, x=LARGEST)
@example(divisor=3, x=LARGEST - 1)
def test_it_is_the_quotient(divisor: int, x: int) -> None:
    multiplier, shift = fast_divmod_params(divisor)
    assert 0 < multiplier < 2**32
    assert x * multiplier < 2**64
    assert x * multiplier >> shift == x // divisor
    below = x // divisor * divisor
    for near in (below, max(below - 1, 0)):  # where a quotient changes
        assert near * multiplier >> shift == near // divisor


def test_the_largest_numbers_below_a_multiple() -> None:
    """Where the error of the multiplier adds up to most."""
    divisors = {*range(1, 3000), *(max((1 << i) + j, 1) for i in range(31) for j in (-1, 0, 1))}
    for divisor in divisors:
        multiplier, shift = fast_divmod_params(divisor)
        largest = (LARGEST + 1) // divisor * divisor - 1
        for x in (largest, largest - divisor, LARGEST):
            assert max(x, 0) * multiplier >> shift == max(x, 0) // divisor, (divisor, x)
