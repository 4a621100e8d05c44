"""The bounded cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from gemmsmith.core.dicts import BoundedCache


def test_the_oldest_entry_is_evicted() -> None:
    cache: BoundedCache[int, str] = BoundedCache(2)
    for key, value in ((1, "a"), (2, "b"), (1, "c"), (3, "d")):
        cache[key] = value
    assert cache == {2: "b", 3: "d"}


def test_threads_that_insert_concurrently() -> None:
    cache: BoundedCache[int, int] = BoundedCache(8)

    def insert(start: int) -> None:
        for i in range(start, 20_000, 4):
            cache[i] = i

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(insert, range(4)))
    assert len(cache) == 8
