"""Bytes of memories: gathered and scattered in the widest words, and buffers far apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gemmsmith.backends.sim.memory.memory import GlobalMemory, gather, scatter, widest_word


@given(
    width=some.sampled_from([1, 2, 4, 8, 16, 24, 32]),
    step=some.sampled_from([1, 2, 4, 16]),
    places=some.lists(some.integers(0, 60), min_size=1, max_size=20, unique=True),
    size=some.sampled_from([1024, 1027]),
    seed=some.integers(0, 2**32 - 1),
)
def test_gather_and_scatter_are_byte_by_byte(width: int, step: int, places: list[int], size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, size).astype(np.uint8)
    offsets = np.array(places, np.int64) // max(1, width // step) * max(width, step) % (size - width)
    want = np.stack([data[o : o + width] for o in offsets])
    word = widest_word(int(np.bitwise_or.reduce(offsets)) | width)
    np.testing.assert_array_equal(gather(data, offsets, width, word), want)
    offsets = np.unique(offsets)[:1]  # two that overlap would be a race
    values = rng.integers(0, 256, (1, width)).astype(np.uint8)
    expected = data.copy()
    expected[offsets[0] : offsets[0] + width] = values[0]
    scatter(data, offsets, values, widest_word(int(np.bitwise_or.reduce(offsets)) | width))
    np.testing.assert_array_equal(data, expected)


def test_nothing_is_gathered_from_nowhere() -> None:
    assert gather(np.zeros(64, np.uint8), np.zeros(0, np.int64), 16, 16).shape == (0, 16)


@pytest.mark.parametrize("offset", [0, 6])
def test_an_address_is_found_in_its_buffer(offset: int) -> None:
    memory = GlobalMemory()
    first = memory.add_buffer(np.zeros(4, np.float32), "first")
    second = memory.add_buffer(np.zeros(4, np.float32), "second", alignment_offset=offset)
    assert (first % 256, second % 256) == (0, offset)
    for address, name in ((first, "first"), (first + 1000, "first"), (second, "second"), (second + 15, "second")):
        buffer = memory.buffer_at(address)
        assert buffer is not None
        assert buffer.name == name
    assert memory.buffer_at(first - 1) is None
    assert memory.buffer_at(second + (1 << 40)) is None


def test_a_placed_array_is_used_as_it_is() -> None:
    memory, x = GlobalMemory(), np.arange(4, dtype=np.uint16)
    buffer = memory.buffer_at(memory.add_buffer(x, "x"))
    assert buffer is not None
    buffer.data[2] = 77
    assert x[1] == 77
