"""A size-bounded cache."""

from __future__ import annotations

import threading
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict used as a cache: an insertion beyond `max_entries` evicts the oldest one, safely between threads.

    It is not the least recently used one, so that look-ups, which repeated calls wait for, stay those of a dict.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries, self._lock = max_entries, threading.Lock()

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            super().__setitem__(key, value)
            if len(self) > self.max_entries:
                del self[next(iter(self))]
