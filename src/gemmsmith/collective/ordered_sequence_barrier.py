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
        self._first_barrier = current_builder().named_barriers(groups)

    def prime(self, group: Value) -> None:
        """Let the first warpgroup pass its first wait: the last one arrives for it."""
        with current_builder().when(group == self.groups - 1):
            hw.barrier_arrive(self._first_barrier, self.threads)

    def wait(self, group: Value) -> None:
        """Wait until the warpgroup before `group` has arrived."""
        current_builder().comment(
            "wait until the other warpgroup's mainloop is done, so that the two do not compete for the tensor cores"
        )
        hw.barrier_sync(group + self._first_barrier, self.threads)

    def arrive(self, group: Value) -> None:
        """Let the warpgroup after `group` pass."""
        hw.barrier_arrive((group + 1) % self.groups + self._first_barrier, self.threads)
