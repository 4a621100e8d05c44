"""A size-bounded cache."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict used as a cache: an insertion beyond `max_entries` evicts the oldest one, safely between threads.

    It is not the least recently used one, so that look-ups, which repeated calls wait for, stay those of a dict. There
    is no lock, which a process that is forked meanwhile would inherit locked.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self.max_entries:
            try:
                self.pop(next(iter(self)), None)
            except (RuntimeError, StopIteration):  # another thread has inserted or evicted one meanwhile
                pass
