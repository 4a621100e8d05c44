"""Registries: the records of operations, of reductions and of functions of epilogues, by name."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from gemmsmith.core.errors import EpilogueError

R = TypeVar("R")


class Records(dict[str, R]):
    """A registry: the records of one kind by name. `kind`: what a record is, for messages, such as "an operation"."""

    replaced: ClassVar[int] = 0
    """How often a record of any kind was replaced. It is part of the keys of graphs, so that caches miss afterwards."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind, self._sources = kind, dict[str, str]()

    def register(self, name: str, record: R, source: str) -> None:
        """Add a record. `source`: the name of the module or function that defines it.

        It replaces a record of the same name and source, as when a notebook's cell is run again. Raises EpilogueError
        if another source has registered the name.
        """
        if self.get(name, record) is not record:
            if self._sources[name] != source:
                raise EpilogueError(f"{name}: there is {self._kind} of this name in {self._sources[name]}; use another")
            Records.replaced += 1
        self[name], self._sources[name] = record, source
