"""A size-bounded cache."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict used as a cache: an insertion beyond `max_entries` evicts the entry that was inserted first.

    Evicting the least recently used entry would slow down look-ups, which repeated calls wait for. Threads may share
    the cache. It has no lock, since a process that is forked while a thread holds the lock would inherit it locked.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self.max_entries:
            try:
                self.pop(next(iter(self)), None)
            except (RuntimeError, StopIteration):  # another thread has inserted or evicted an entry meanwhile
                pass
