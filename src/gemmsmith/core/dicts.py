"""Dicts: a cache of bounded size, and registries of the records of operations, reductions and functions, by name."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar, cast

from gemmsmith.core.errors import EpilogueError

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


R = TypeVar("R")


class Records(dict[str, R]):
    """A registry: the records of one kind by name.

    `kind`: what a record is, for messages, such as "an operation". `type_`: its type.
    """

    replaced: ClassVar[int] = 0
    """How often a record of any kind was replaced. It is part of the keys of graphs, so that caches miss afterwards."""

    def __init__(self, kind: str, type_: type[Any] = object) -> None:
        super().__init__()
        self._kind, self._type, self._sources = kind, type_, dict[str, str]()

    def register(self, record: R, source: str, name: str = "") -> None:
        """Add a record. `source`: the name of the module or function that defines it. `name`: by default the record's.

        It replaces a record of the same name and source, as when a notebook's cell is run again. Raises EpilogueError
        for another type, and if another source has registered the name.
        """
        if not isinstance(record, self._type):
            raise EpilogueError(f"got {type(record).__name__} as {self._kind}; use {self._type.__name__}(...)")
        name = name or cast(Any, record).name
        if self.get(name, record) is not record:
            if self._sources[name] != source:
                raise EpilogueError(f"{name}: there is {self._kind} of this name in {self._sources[name]}; use another")
            Records.replaced += 1
        self[name], self._sources[name] = record, source
