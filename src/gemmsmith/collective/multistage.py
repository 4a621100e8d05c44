"""The mainloop without TMA (CUTLASS: MmaMultistage): all threads copy by cp.async, a few k-tiles ahead of the products,
over the ends of tiles too; so the copies of a tile's first k-tiles run under the last tile's epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from gemmsmith import hw
from gemmsmith.collective.copied_operand import CopiedOperand
from gemmsmith.collective.pipeline import Initialized, start
from gemmsmith.core.problem import Source, operand_of
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedBuffer, SharedView
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant, Value, ValueLike
from gemmsmith.schedule.tiles import Coordinates, TileScheduler, WorkTile


class Copied(Protocol):
    """An operand of so many `rows` with its stages, each a `tile`. `begin`: the next copies are those of a tile.
    `copies`: what starts those of a k-tile into a stage, of whose elements of K `k_left` are inside; None: all rows and
    elements are, and nothing is checked. `advance`: the next ones are of the next k-tile."""

    tile: Tile
    rows: Value
    stages: SharedBuffer

    def start(self) -> None: ...
    def begin(self, at: Coordinates, first_k: Value) -> None: ...
    def copies(self, stage: Value, k_left: Value | None) -> list[Callable[[], None]]: ...
    def advance(self) -> None: ...


Make = Callable[[str, Tile, int, Source, int], Copied]


class MultistageMainloop:
    """The stages of A and B, which stage is written next and which is read, and what is copied next. Each k-tile's
    copies are a group; behind the last tile groups are of zeros. Kernel arguments: the operands', and `k_extent`."""

    def __init__(self, spec: KernelSpec, scheduler: TileScheduler, make: Make = CopiedOperand) -> None:
        """`make`: of a name, a tile, the stages, its source and how many threads copy."""
        self.spec, self._scheduler, stages = spec, scheduler, spec.config.stages
        self.operands = tuple(
            make(name, tile, stages, operand_of(i), spec.threads)
            for i, (name, tile) in enumerate(zip("ab", spec.tiles, strict=True))
        )
        last = self.operands[-1].stages
        self.stages = range(self.operands[0].stages.offset, last.offset + last.bytes)
        self._k = current().parameter("k_extent", bind=lambda p: p.k)

    def prologue(self, *others: Initialized, prefetch: Sequence[Value] = ()) -> None:
        """Initializes the `others`' barriers, starts the copies of the first k-tiles, and waits for one."""
        k, config = current(), self.spec.config
        if others or prefetch:
            start(*others, prefetch=prefetch)
        hw.grid_dependency_wait()
        if config.pdl:
            hw.grid_dependency_launch()
        begin, self._stop, self._step = self._scheduler.walk()
        self._next = k.var(I32, begin, "next_tile")  # to be copied
        self._k_tiles, self._k_left = k.var(I32, 0, "k_tiles_left"), k.var(I32, 0, "k_left")  # of that being copied
        self._whole = k.var(I32, 0, "whole")  # k-tiles of it that are inside of both operands
        self._read = k.var(I32, 0, "read_stage")
        for operand in self.operands:
            operand.start()
        with k.range(config.stages - 1, name="stage") as stage:
            self._copy(stage)
        self._land()

    def spans(self, k_tiles: Value) -> Iterator[tuple[ValueLike, Value, Callable[[int, int], None]]]:
        """The k-tiles of a tile, first to stop, in two spans, each with what copies a share of a k-tile meanwhile.
        Those copied in the first are inside: nothing is decided there, so that copies mix with products."""
        k = current()
        whole = k.maximum(k.minimum(k_tiles, self._whole.get()), 0).named("whole_k_tiles")
        self._done(whole)
        yield 0, whole, self._copy_whole
        yield whole, k_tiles, lambda share, _: self.copy() if share == 0 else None

    def copy(self) -> None:
        """Starts the copies of one k-tile into the stage that was read before the last `next_stage`."""
        self._copy(self._behind())

    def _copy_whole(self, share: int, shares: int) -> None:
        """The same of a share of a k-tile that is inside."""
        self._start(self._behind(), None, share, shares)
        if share == shares - 1:
            self._commit()

    def _behind(self) -> Value:
        read, stages = self._read.get(), self.spec.config.stages
        return current().select(read == 0, stages, read) - 1

    def _copy(self, stage: Value) -> None:
        k = current()
        with k.when(self._k_tiles.get() == 0):
            self._begin_tile()
        k_left = self._k_left.get()
        with k.when(self._whole.get() > 0):
            self._start(stage, None)
        with k.otherwise():
            self._start(stage, k_left)
        self._commit()
        self._done(Constant(I32, 1))

    def _start(self, stage: Value, k_left: Value | None, share: int = 0, shares: int = 1) -> None:
        """Starts a share of a k-tile's copies."""
        copies = [copy for operand in self.operands for copy in operand.copies(stage, k_left)]
        for copy in copies[share * len(copies) // shares : (share + 1) * len(copies) // shares]:
            copy()

    def _commit(self) -> None:
        for operand in self.operands:
            operand.advance()
        hw.cp_async_commit()

    def _done(self, k_tiles: Value) -> None:
        """So many k-tiles are copied."""
        self._k_left.set(self._k_left.get() - k_tiles * self.spec.config.tile[2])
        self._k_tiles.set(self._k_tiles.get() - k_tiles)
        self._whole.set(self._whole.get() - k_tiles)

    def next_stage(self) -> None:
        """Waits until all are done with the stage that is read, and the next one's copies have landed."""
        self._land()
        after = self._read.get() + 1
        self._read.set(current().select(after == self.spec.config.stages, 0, after))

    def stage(self) -> list[SharedView]:
        """The tiles of A and B that are read."""
        return [x.stages[self._read.get()] for x in self.operands]

    def finish(self) -> None:
        """After the last tile: the copies of zeros end."""
        hw.cp_async_wait(0)

    def release_alias(self, tile: WorkTile) -> None:
        """Nothing: no epilogue lies in the stages."""

    def _begin_tile(self) -> None:
        k = current()
        with k.when(self._next.get() < self._stop):
            tile = self._scheduler.at(self._next.get())
            first = tile.k_tile(Constant(I32, 0)) * self.spec.config.tile[2]
            for operand, at in zip(self.operands, tile.operands, strict=True):
                operand.begin(at, first)
            a, b = (x.rows - at.row >= x.tile.mn for x, at in zip(self.operands, tile.operands, strict=True))
            left = (self._k - first).named("left")
            whole = k.minimum(tile.k_tiles, left // self.spec.config.tile[2])
            self._whole.set(k.select(a & b, whole, 0))
            self._k_tiles.set(tile.k_tiles)
            self._k_left.set(left)
            self._next.set(self._next.get() + self._step)
        with k.otherwise():
            self._k_left.set(0)
            self._k_tiles.set(1)

    def _land(self) -> None:
        """Each waits for its own copies of the next k-tile; the barrier makes them known to all."""
        hw.cp_async_wait(self.spec.config.stages - 2)
        hw.sync_threads()
