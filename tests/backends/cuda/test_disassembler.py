"""SASS by nvdisasm, and what to install where it is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import metadata

import pytest

from gemmsmith.backends.cuda import listing
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.core.errors import CompileError


@pytest.fixture
def forgotten() -> Iterator[None]:
    """nvdisasm is looked for again, in the test and after it."""
    listing.find_nvdisasm.cache_clear()
    yield
    listing.find_nvdisasm.cache_clear()


def test_sass_of_a_kernel() -> None:
    compiled = compile_source('extern "C" __global__ void one(int* p) { *p = 1; }', "one", cache=False)
    text = listing.disassemble(compiled.cubin)
    assert ".text.one" in text
    assert "STG" in text
    assert "EXIT" in text


def test_what_is_no_cubin() -> None:
    with pytest.raises(CompileError, match="nvdisasm"):
        listing.disassemble(b"not a cubin")


@pytest.mark.usefixtures("forgotten")
def test_without_the_package_the_one_on_path_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "files", missing_package)
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    assert listing.find_nvdisasm() == "/opt/nvdisasm"


@pytest.mark.usefixtures("forgotten")
def test_without_any_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "files", missing_package)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvdisasm"):
        listing.disassemble(b"")


def missing_package(name: str) -> None:
    raise metadata.PackageNotFoundError(name)
