"""Bringing an operand's tile into a stage by TMA: one copy a box, shared with the cluster where others need it too."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith import hw
from gemmsmith.core.tile import Tile
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import I32, U16
from gemmsmith.lang.values import Constant, Value, as_value


@dataclass(frozen=True)
class Operand:
    """A tensor map and the tile it is read in. `parts` CTAs of the cluster need the same tile: each brings one part of
    `part_rows` rows of the boxes, `part` being this CTA's, to all the CTAs of `mask`. `policy`: the L2's."""

    map: Value
    tile: Tile
    parts: int = 1
    part: Value | int = 0
    part_rows: Value | int = 0
    mask: Value | int = 1
    policy: Constant = EVICT_NORMAL

    @property
    def copies(self) -> int:
        """That bring a whole tile."""
        return self.parts * self.tile.boxes

    def load(
        self, stage: SharedView, barrier: SharedView, mn: Value, k: Value, batch: Value, *, alone: bool = False
    ) -> None:
        """Starts the copies of the tile at rows `mn`, depth `k`, into `stage`; `alone`: all parts, into this CTA's.
        Recorded in one thread."""
        tile = self.tile
        for part in range(self.parts) if alone else [self.part]:
            first = as_value(part * self.part_rows, I32).named("first_row")
            for box in range(tile.boxes):
                inner, outer = (k, mn) if tile.major == "K" else (mn, k)
                destination = stage.at(box * tile.box_bytes).at(first, tile.pitch)
                where = (self.map, inner + box * tile.box_inner, outer + first, batch, destination, barrier)
                if alone or self.parts == 1:
                    hw.tma_load(*where, self.policy)
                else:
                    mask = self.mask if isinstance(self.mask, int) else self.mask.to(U16)
                    hw.tma_load_multicast(*where, mask, self.policy)
