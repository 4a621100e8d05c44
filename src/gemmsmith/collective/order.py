"""Warpgroups that take turns. CUTLASS: OrderedSequenceBarrier."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.lang.builder import current
from gemmsmith.lang.values import Value


class OrderBarrier:
    """Each of `groups` warpgroups waits until the one before it has arrived; the first begins.

    A named barrier each: it completes when its own warpgroup waits and the one before has arrived.
    """

    def __init__(self, groups: int) -> None:
        self.groups, self.threads = groups, 256
        self._first = current().named_barriers(groups)

    def start(self, group: Value) -> None:
        """The last lets the first begin."""
        with current().when(group == self.groups - 1):
            hw.barrier_arrive(self._first, self.threads)

    def wait(self, group: Value) -> None:
        hw.barrier_sync(group + self._first, self.threads)

    def arrive(self, group: Value) -> None:
        """Lets the next go on."""
        hw.barrier_arrive((group + 1) % self.groups + self._first, self.threads)
