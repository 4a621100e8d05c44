"""Forks while other threads import modules, whose locks a child would inherit locked."""

from __future__ import annotations

import os
import sys
import time
from threading import get_ident

MAX_WAIT_S = 10.0
"""A module is not waited for longer: its import may wait for the fork. Chosen; not measured."""
_MODULE_LOCKS = getattr(sys.modules["_frozen_importlib"], "_module_locks", {})
"""Weak references to the locks of the modules that are imported now, by name; Python keeps them."""


def _is_importing_elsewhere() -> bool:
    locks = [reference() for reference in list(_MODULE_LOCKS.values())]
    return any(lock is not None and lock.owner not in (None, get_ident()) for lock in locks)


def wait_for_imports() -> None:
    """Wait, before a fork, until no other thread imports a module (as a first plan does), so that no lock is held."""
    end = time.monotonic() + MAX_WAIT_S
    while _is_importing_elsewhere() and time.monotonic() < end:
        time.sleep(0.001)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=wait_for_imports)
