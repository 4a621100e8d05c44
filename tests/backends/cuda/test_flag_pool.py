"""Flags on a GPU: which launches share them, and when they are freed."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import pytest

import gemmsmith
from gemmsmith.backends.cuda import flag_pool
from gemmsmith.backends.cuda.flag_pool import FLAG_ALIGNMENT_BYTES, POOL_BLOCK_BYTES, FlagPool, pool_of
from gemmsmith.core.errors import ArgumentError, DeviceError

CAPTURING = 99
"""A stream that is being captured."""


class Error(int):
    name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


class Driver:
    """Allocates at ever higher addresses; ids of streams are their handles."""

    def __init__(self) -> None:
        self.allocated: dict[int, int] = {}
        self.calls: list[str] = []
        self.error: Any = 0

    def allocate(self, nbytes: int) -> int:
        address = (1 + len(self.calls)) << 30
        self.allocated[address] = nbytes
        self.calls.append("allocate")
        return address

    def cuStreamGetId(self, stream: int) -> tuple[int, int]:
        return 0, stream

    def cuCtxSynchronize(self) -> tuple[Any]:
        self.calls.append("synchronize")
        return (self.error,)

    def cuMemFree(self, address: int) -> tuple[int]:
        self.calls.append("free")
        del self.allocated[address]
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(flag_pool, "bindings", lambda: fake)
    monkeypatch.setattr(flag_pool, "_allocate_zeros", fake.allocate)
    monkeypatch.setattr(flag_pool, "is_capturing", lambda stream: stream == CAPTURING)
    for name in ("device_guard", "relaxed_capture_mode"):
        monkeypatch.setattr(flag_pool, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(flag_pool, "_POOLS", {})
    return fake


def test_a_stream_has_flags_of_its_own_and_each_captured_launch(driver: Driver) -> None:
    pool = FlagPool(0)
    assert pool.get(1, 100) == pool.get(1, 60)
    calls = [(1, 100), (2, 100), (CAPTURING, 100), (CAPTURING, 100), (2, 5000), (CAPTURING, 100), (3, 100)]
    words = sorted((pool.get(stream, nbytes), nbytes) for stream, nbytes in calls)
    for (address, nbytes), (following, _) in pairwise(words):
        assert address + nbytes <= following
    assert all(address % FLAG_ALIGNMENT_BYTES == 0 for address, _ in words)


def test_flags_of_streams_are_freed_and_those_of_graphs_when_asked_for(driver: Driver) -> None:
    for device in range(2):
        pool_of(device).get(1, 100)
        pool_of(device).get(2, 2 * POOL_BLOCK_BYTES)
        pool_of(device).get(CAPTURING, 100)
    assert gemmsmith.free_memory() == 2 * (POOL_BLOCK_BYTES + 2 * POOL_BLOCK_BYTES)
    assert list(driver.allocated.values()) == [POOL_BLOCK_BYTES] * 2  # the graphs'
    assert all(driver.calls[i - 1] != "allocate" for i, call in enumerate(driver.calls) if call == "free")
    assert gemmsmith.free_memory() == 0
    fresh = pool_of(0).get(1, 100)
    assert fresh in driver.allocated
    assert gemmsmith.free_memory(graphs=True) == 3 * POOL_BLOCK_BYTES
    assert not driver.allocated
    assert pool_of(0).get(CAPTURING, 100) in driver.allocated


def test_nothing_is_freed_while_a_stream_is_captured(driver: Driver) -> None:
    address = pool_of(0).get(1, 100)
    driver.error = Error(900)
    with pytest.raises(DeviceError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED in cuCtxSynchronize"):
        gemmsmith.free_memory()
    assert pool_of(0).get(1, 100) == address
    with pytest.raises(ArgumentError, match="graphs: got 'all'; use True or False"):
        gemmsmith.free_memory(graphs="all")  # type: ignore[arg-type]


def test_without_a_gpu_there_is_nothing_to_free() -> None:
    assert gemmsmith.free_memory() >= 0
