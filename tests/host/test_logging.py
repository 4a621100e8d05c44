"""The logger "gemmsmith" and NVTX ranges."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith.backends.cuda.kernel_loader import LoadedKernel, add_nvtx_range
from gemmsmith.core.errors import MissingPackageError


def test_what_is_chosen_and_compiled_is_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    a, b = gemmsmith.Spec((72, 64), "bf16"), gemmsmith.Spec((64, 40), "bf16")
    with caplog.at_level(logging.DEBUG, "gemmsmith"):
        plan = gemmsmith.plan(a, b)
        assert plan.resources.registers
        gemmsmith.plan(a, b, config=plan.config).resources  # noqa: B018 reads the cubin
    chosen, compiled, given, read = [x.getMessage() for x in caplog.records if x.name == "gemmsmith"]
    assert chosen == f"plan of {plan.problem}: {plan.config}, {plan.origin}"
    assert compiled.startswith(f"compiled {plan._planned.kernel.name} for sm_90a in ")
    assert given.endswith(f"{plan.config}, given")
    assert read == f"read {plan._planned.kernel.name} for sm_90a from the cache folder"


def test_what_is_retraced_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    x, captured = np.ones((8, 8), np.float32), np.ones(3)

    def scaled(acc: Any) -> Any:
        return acc * float(captured.sum())

    with caplog.at_level(logging.INFO, "gemmsmith"), pytest.warns(gemmsmith.RetraceWarning):
        gemmsmith.gemm(x, x, epilogue=scaled)
    assert [x for x in caplog.messages if x.startswith("scaled (") and "is traced again at each call, since" in x]


def test_a_repeated_call_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    x = np.ones((8, 24), np.float16)
    gemmsmith.gemm(x, x.T)
    caplog.clear()  # another test may have left a level at which the first call's plan is logged
    with caplog.at_level(logging.DEBUG, "gemmsmith"):
        gemmsmith.gemm(x, x.T)
    assert caplog.messages == []


def make_kernel() -> LoadedKernel:
    kernel = LoadedKernel("forged", None, 0, 128, (1, 1, 1), 0, ())
    kernel._driver = SimpleNamespace(cuLaunchKernel=lambda *arguments: (0,))
    return kernel


def test_launches_have_nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = list[str]()

    def annotate(name: str, domain: str) -> Callable[[Any], Any]:
        def decorate(launch: Any) -> Any:
            return lambda *arguments: (ranges.append(f"{domain}: {name}"), launch(*arguments))[1]

        return decorate

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    kernel = make_kernel()
    add_nvtx_range(kernel)
    kernel.launch(1, 0, 0, False)
    make_kernel().launch(1, 0, 0, False)  # others have none
    assert ranges == ["gemmsmith: forged"]


def test_ranges_without_the_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(MissingPackageError, match="pip install nvtx"):
        add_nvtx_range(make_kernel())
