"""Registries: the records of operations, of reductions and of functions of epilogues, by name."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from gemmsmith.core.errors import EpilogueError

R = TypeVar("R")


class Records(dict[str, R]):
    """Records of one kind by name. `kind`: with its article, for messages."""

    replaced: ClassVar[int] = 0
    """How many records of all kinds were replaced; what was made of a graph before is made again if it has changed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind, self._sources = kind, dict[str, str]()

    def register(self, name: str, record: R, source: str) -> None:
        """Add a record. `source`: what defines it, such as a module.

        A record of the same name and source is replaced, as when a notebook's cell is run again. Raises EpilogueError
        if another source has defined one of this name.
        """
        if self.get(name, record) is not record:
            if self._sources[name] != source:
                raise EpilogueError(f"{name}: there is {self._kind} of this name in {self._sources[name]}; use another")
            Records.replaced += 1
        self[name], self._sources[name] = record, source
