"""A barrier that orders warpgroups (CUTLASS: OrderedSequenceBarrier, the consumer warpgroups' order barrier)."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.values import Value


class OrderedSequenceBarrier:
    """Each of `groups` warpgroups waits until the one before it has arrived, in a ring.

    Every warpgroup has a named barrier: it completes when the warpgroup itself waits and the one before has arrived.
    """

    def __init__(self, groups: int) -> None:
        self.groups, self.threads = groups, 256
        self.first_barrier = current_builder().named_barriers(groups)

    def of(self, group: Value) -> WarpgroupOrder:
        """Return the barrier as warpgroup `group` uses it."""
        return WarpgroupOrder(self, group)


class WarpgroupOrder:
    """The barrier in one of the warpgroups."""

    def __init__(self, barrier: OrderedSequenceBarrier, group: Value) -> None:
        self._barrier, self._group = barrier, group

    def prime(self) -> None:
        """Let the first warpgroup pass its first wait: the last one arrives for it."""
        x = self._barrier
        with current_builder().when(self._group == x.groups - 1):
            hw.barrier_arrive(x.first_barrier, x.threads)

    def wait(self) -> None:
        """Wait until the warpgroup before this one has arrived."""
        current_builder().comment(
            "wait until the warpgroup before has done its mainloop, so that they do not compete for the tensor cores"
        )
        hw.barrier_sync(self._group + self._barrier.first_barrier, self._barrier.threads)

    def arrive(self) -> None:
        """Let the warpgroup after this one pass."""
        x = self._barrier
        hw.barrier_arrive((self._group + 1) % x.groups + x.first_barrier, x.threads)
