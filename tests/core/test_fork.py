"""A process that is forked while another thread computes or imports something."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmsmith  # noqa: F401 registers what is done before a fork
from gemmsmith.core.frozen import cached_property

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
STARTED, MAY_END = threading.Event(), threading.Event()


def exit_code_of_child(work: Callable[[], Any], seconds: float = 20) -> int | None:
    """What a forked child that does some work exits with; None if it hangs."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Square:
    def __init__(self, x: int, waits: bool = False) -> None:
        self.x, self.waits = x, waits

    @cached_property
    def value(self) -> int:
        """The square."""
        if self.waits:
            STARTED.set()
            MAY_END.wait()
        return self.x * self.x


def test_a_cached_property() -> None:
    square = Square(3)
    assert square.value == 9
    square.x = 4
    assert square.value == 9  # computed once
    assert vars(square)["value"] == 9
    assert Square.value.__doc__ == "The square."


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    STARTED.clear()
    MAY_END.clear()
    thread = threading.Thread(target=work)
    thread.start()
    assert STARTED.wait(20)
    return thread


def test_a_property_that_another_thread_computes() -> None:
    thread = in_thread(lambda: Square(3, waits=True).value)
    try:
        assert exit_code_of_child(lambda: Square(5).value) == 0
    finally:
        MAY_END.set()
        thread.join()


def test_a_module_that_another_thread_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork waits until it is imported."""
    (tmp_path / "gemmsmith_slow_module.py").write_text("import sys; sys.waits(); value = 3")
    monkeypatch.syspath_prepend(tmp_path)

    def waits() -> None:
        STARTED.set()
        MAY_END.wait()

    monkeypatch.setattr(sys, "waits", waits, raising=False)
    thread = in_thread(lambda: importlib.import_module("gemmsmith_slow_module"))
    threading.Timer(0.2, MAY_END.set).start()
    try:
        assert exit_code_of_child(lambda: importlib.import_module("gemmsmith_slow_module").value) == 0
    finally:
        thread.join()
        del sys.modules["gemmsmith_slow_module"]
